"""Calls of exported functions, and primitives that only lower to StableHLO, as jaxprs.

Source: JAX, "Exporting and serializing staged-out computations", section on the calling convention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, eval_equation, is_float0, make_primitive, mlir
from ipujax.lowering.source_info import source_line
from ipujax.lowering.stablehlo import (
    arrays,
    elementwise,
    linear_algebra,
    numerics,
    regions,
    shardy,
    single_operation,
)
from ipujax.lowering.stablehlo.translation import (
    Rule,
    Scope,
    UntranslatedError,
    Values,
    dtype_of,
    functions_of,
    module_of,
    static_shape,
)
from ipujax.runtime.errors import GraphError
from ipujax.runtime.logs import Log
from ipujax.runtime.names_at_import import jax_jit

_LOG = Log("lowering")
_PLATFORM = "cpu"  # where the engine computes
_GENERATORS = ("threefry2x32", "rbg", "unsafe_rbg")
_FAMILIES = (elementwise, arrays, numerics, regions, linear_algebra, shardy, single_operation)
RULES: dict[str, Rule] = {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}


def exported_callee(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Jaxpr of a call of an exported function; None for a call with effects.

    A module without a counterpart in JAX, which is logged, stays a call: with an operand of the bytes that it captured.

    Raises:
        GraphError: a call that could not run either: a module for several devices without a counterpart, or one for
            other platforms.
    """
    exported = eqn.params["exported"]
    avals = [_without_sharding(atom.aval) for atom in eqn.invars]
    results: list[Any] = [var.aval for var in eqn.outvars]

    def fun(*operands: Any) -> Sequence[Any]:
        return [_of_type(x, aval) for x, aval in zip(_call(exported, operands), results, strict=True)]

    _check_platform(exported, eqn)
    if eqn.effects and exported.nr_devices == 1:
        return None
    try:
        if eqn.effects:
            raise UntranslatedError("effects")
        return jax.make_jaxpr(fun)(*avals)
    except UntranslatedError as error:
        if exported.nr_devices > 1:
            raise _refusal(exported, str(error), eqn) from error
        _LOG.info("the exported function %s has %s: it is not priced (%s)", exported.fun_name, error, source_line(eqn))
    captured = np.zeros(_captured_bytes(exported), np.uint8)
    outs = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in results)
    params = {"call": partial(eval_equation, eqn), "outs": outs, "label": f"exported {exported.fun_name}"}
    return jax.make_jaxpr(lambda *operands: opaque_call_p.bind(captured, *operands, **params))(*avals)


def _check_platform(exported: Any, eqn: JaxprEqn) -> None:
    is_checked = jax.export.DisabledSafetyCheck.platform() not in exported.disabled_safety_checks
    if _PLATFORM not in exported.platforms and is_checked:
        raise GraphError(
            f"{exported.fun_name} was exported for other platforms than the engine's",
            where=source_line(eqn) or None,
            expected=repr(_PLATFORM),
            got=", ".join(map(repr, exported.platforms)),
            hint=f"jax.export.export(..., platforms=[{_PLATFORM!r}, ...])",
        )


def _without_sharding(aval: Any) -> Any:
    """Type of an operand for a module, which has shardings of its own."""
    is_array = isinstance(aval, jax.core.ShapedArray) and not _is_key(aval.dtype)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype) if is_array else aval


def _refusal(exported: Any, part: str, eqn: JaxprEqn) -> GraphError:
    return GraphError(
        f"{exported.fun_name}, exported for {exported.nr_devices} devices, has no counterpart on IPUs",
        where=source_line(eqn) or None,
        expected="operations of arrays with shardings of named axes (jax_use_shardy_partitioner=True)",
        got=part,
        hint="export the function for one device, and shard it by ipu.jit(in_shardings=...) or jax.shard_map",
    )


def _captured_bytes(exported: Any) -> int:
    """Bytes of the arrays in the module of an exported function."""
    sizes: list[int] = []

    def look(op: Any) -> Any:
        if op.name == "stablehlo.constant":
            kind = op.results[0].type
            sizes.append(prod(static_shape(kind)) * dtype_of(kind).itemsize)
        return mlir.ir.WalkResult.ADVANCE

    module_of(exported.mlir_module_serialized).operation.walk(look)
    return sum(sizes)


# results = opaque_call_p.bind(captured, *operands, call=…, outs=…, label=…)
opaque_call_p = make_primitive(
    "opaque_call",
    lambda captured, *operands, call, **params: call(*operands),
    lambda *avals, outs, **params: outs,
)


def lowered_callee(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Jaxpr of a primitive as JAX lowers it for the CPU; None if that is a call of code that no module holds."""
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    if any(not isinstance(aval, jax.core.ShapedArray) or _is_key(aval.dtype) for aval in avals):
        return None
    function = jax_jit(lambda *operands: eval_equation(eqn, *operands), keep_unused=True)
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    try:
        module = function.trace(*shapes).lower(lowering_platforms=(_PLATFORM,)).compiler_ir("stablehlo")
        return jax.make_jaxpr(lambda *operands: _run(module, operands))(*avals)
    except (UntranslatedError, NotImplementedError) as error:
        _LOG.info("%s is not priced: %s (%s)", eqn.primitive.name, error, source_line(eqn))
        return None


def _run(module: Any, arguments: Sequence[Any]) -> Values:
    with module.context:
        return Scope(functions_of(module), RULES, {}, shardy.meshes_of(module)).function("main", arguments)


def _call(exported: Any, operands: Sequence[Any]) -> Values:
    """Results of the module of an exported function; its arguments are those in `module_kept_var_idx`."""
    if exported.ordered_effects:
        raise UntranslatedError("ordered effects")
    module = module_of(exported.mlir_module_serialized)
    with module.context:
        of_operands, of_results = shardy.shardings_of(exported, shardy.meshes_of(module))
    operands = [shardy.constrained(x, sharding) for x, sharding in zip(operands, of_operands, strict=True)]
    number = exported.platforms.index(_PLATFORM) if _PLATFORM in exported.platforms else 0
    platform = [np.asarray(number, np.int32)] if len(exported.platforms) > 1 else []
    arguments = [*platform, *(_data(operands[n]) for n in exported.module_kept_var_idx)]
    results = _run(module, arguments)
    return [shardy.constrained(x, sharding) for x, sharding in zip(results, of_results, strict=True)]


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _data(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x.dtype) else x


def _implementation(aval: Any) -> str:
    """Name of the generator of keys."""
    with jax.ensure_compile_time_eval():
        names = [name for name in _GENERATORS if jax.random.key(0, impl=name).dtype == aval.dtype]
    if not names:
        raise UntranslatedError(f"keys of {aval.dtype}")
    return names[0]


def _of_type(x: Any, aval: Any) -> Any:
    """Result as the equation has it: keys of random numbers, and gradients of whole numbers, are other arrays there."""
    if is_float0(aval):
        return np.zeros(aval.shape, jax.dtypes.float0)
    if _is_key(aval.dtype):
        return jax.random.wrap_key_data(x, impl=_implementation(aval))
    return x
