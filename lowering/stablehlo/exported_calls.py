"""Calls of exported functions, and primitives that only lower to StableHLO, as jaxprs.

Source: JAX, "Exporting and serializing staged-out computations", section on the calling convention.

An operation of StableHLO without a counterpart in JAX is a module of its own that XLA computes:

    results = module_operation_p.bind(*operands, module=…, label=…, work_of=…, flops=…)

The cost of an operation is that of XLA's analysis; of a routine of LAPACK that `linear_algebra` leaves, that of the
primitive of JAX that calls it, `work_of`; other custom calls have no body, so no cost: `flops` is None, and they are
listed as unpriced.
Limits: one vertex, whatever its batch dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, eval_equation, func, is_float0, make_primitive, mlir
from ipujax.lowering.source_info import source_line
from ipujax.lowering.stablehlo import arrays, elementwise, linear_algebra, numerics, regions, shardy
from ipujax.lowering.stablehlo.elementwise import CHLO
from ipujax.lowering.stablehlo.linear_algebra import lapack_results
from ipujax.lowering.stablehlo.numerics import top_k
from ipujax.lowering.stablehlo.shardy import check_is_whole
from ipujax.lowering.stablehlo.translation import (
    SINGLE,
    Operation,
    Region,
    Rule,
    Scope,
    UntranslatedError,
    Values,
    dtype_of,
    functions_of,
    module_of,
    static_shape,
    text,
)
from ipujax.lowering.stored_modules import StoredModule
from ipujax.runtime.errors import GraphError
from ipujax.runtime.logs import Log
from ipujax.runtime.names_at_import import jax_jit

ir = mlir.ir
_LAPACK = re.compile(r"lapack_[sdcz](\w+?)(_ffi)?")
_PRIMITIVES = {  # of JAX, by the routine or the target that they call
    "potrf": "cholesky",
    "getrf": "lu",
    **dict.fromkeys(("geqrf", "geqp3"), "qr"),
    **dict.fromkeys(("orgqr", "ungqr"), "householder_product"),
    **dict.fromkeys(("ormqr", "unmqr"), "ormqr"),
    **dict.fromkeys(("syevd", "heevd"), "eigh"),
    **dict.fromkeys(("gesdd", "gesvd", "gesvdx"), "svd"),
    "geev": "eig",
    "gees": "schur",
    "gehrd": "hessenberg",
    **dict.fromkeys(("sytrd", "hetrd"), "tridiagonal"),
    "trsm": "triangular_solve",
    "gtsv": "tridiagonal_solve",
    "ApproxTopK": "approx_top_k",
}
# Custom calls that return their operand, and those that return nothing.
_IDENTITIES = ("Sharding", "annotate_device_placement", "xla.sdy.FuncResultSharding", "xla.sdy.GlobalToLocalShape")
_CHECKS = ("shape_assertion",)
_CHLO = "chlo."
_DIALECTS = ("stablehlo.", "chlo.")
_OF_MESHES = ("sdy.", "mhlo.sharding")  # attributes
_CALLBACK = "callback"  # in the names of custom calls that run Python by an address


def _compute(*operands: jax.Array, module: StoredModule, **params: Any) -> list[Any]:
    return module(*operands)


def _shapes(*operands: Any, module: StoredModule, **params: Any) -> Sequence[jax.ShapeDtypeStruct]:
    return module.out_avals


module_operation_p = make_primitive("module_operation", _compute, _shapes)


def single_operation_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Results of an operation that XLA computes as it is."""
    if not op.name.startswith(_DIALECTS):
        raise UntranslatedError(f"the operation {op.name}")
    return _bind_module(scope, op, operands, op.name.partition(".")[2], work_of="", is_priced=True)


def custom_call_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Results of `stablehlo.custom_call`, a call of code outside of the module, by the name of that code, its target.

    A marker returns its operand and a check nothing; a routine of LAPACK is a primitive of JAX, if it is called as JAX
    does; any other call is a vertex without a price.
    """
    target = text(op, "call_target_name")
    if target in _IDENTITIES and len(operands) == 1:
        check_is_whole(op)
        return operands
    if target in _CHECKS:
        return ()
    if _CALLBACK in target:
        raise UntranslatedError(f"the custom call {target}, which runs Python")
    results = lapack_results(scope, op, operands)
    if results is not None:
        return results
    routine = _LAPACK.fullmatch(target)
    work_of = _PRIMITIVES.get(routine[1] if routine else target, "")
    return _bind_module(scope, op, operands, target, work_of=work_of, is_priced=False)


def composite_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Results of `stablehlo.composite`, a name and a function of the module that says what it computes.

    They are those of the operation of JAX with that name, else of the function.
    """
    name = text(op, "name").removeprefix(_CHLO)
    attributes: Any = (
        ir.DictAttr(op.attributes["composite_attributes"]) if "composite_attributes" in op.attributes else {}
    )
    if text(op, "name") == "chlo.top_k":
        return top_k(operands[0], int(ir.IntegerAttr(attributes["k"]).value))
    if text(op, "name").startswith(_CHLO) and name in CHLO:
        return [CHLO[name](*operands)]
    return scope.function(text(op, "decomposition"), operands)


def _bind_module(
    scope: Scope, op: Operation, operands: Values, label: str, *, work_of: str, is_priced: bool
) -> Sequence[Any]:
    """Results of an operation without a counterpart in JAX, by a primitive that gives XLA a module of it alone.

    Args:
        scope: the scope of the operation.
        op: the operation.
        operands: its operands.
        label: name in reports.
        work_of: primitive of JAX whose work it has; "" for none.
        is_priced: whether it has the cost of XLA's analysis.
    """
    if any(x.dtype != dtype_of(operand.type) for x, operand in zip(operands, op.operands, strict=True)):
        raise UntranslatedError(f"the operation {op.name} on numbers of 64 bits")
    module = _module_of_operation(scope, op, operands, label)
    flops = _flops_of_module(module) if is_priced else None
    return module_operation_p.bind(*operands, module=module, label=label, work_of=work_of, flops=flops)


def _flops_of_module(module: StoredModule) -> int | None:
    """Operations by XLA's analysis; None where it has none."""
    analysis = jax_jit(module).lower(*module.in_avals).compile().cost_analysis()
    return None if analysis is None else int(max(0.0, analysis.get("flops", 0.0)))


def _module_of_operation(scope: Scope, op: Operation, operands: Values, name: str) -> StoredModule:
    """A module for XLA that computes one operation of another module; functions and constants that it needs are copied.

    Args:
        scope: the scope of the operation.
        op: the operation.
        operands: its operands, for their shapes.
        name: name of the module.
    """
    in_avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    out_avals = tuple(jax.ShapeDtypeStruct(static_shape(x.type), dtype_of(x.type)) for x in op.results)
    named = re.findall(r"@([\w.$-]+)", str(op))
    with op.context, ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            for function in _reached_functions(scope, named):
                scope.functions[function].clone()
            types = [ir.RankedTensorType.get(x.shape, mlir.dtype_to_ir_type(x.dtype)) for x in in_avals]
            main: Any = func.FuncOp("main", (types, [x.type for x in op.results]))
            block = main.add_entry_block()
        with ir.InsertionPoint(block):
            outside = [x for region in op.regions for x in _read_from_outside(region)]
            copies = {x: x.owner.clone().results[0] for x in outside if getattr(x.owner, "name", "") == _CONSTANT}
            if len(copies) != len(outside):
                raise UntranslatedError(f"the operation {op.name}, whose region reads values of the function")
            copy = op.clone()
            for n, argument in enumerate(block.arguments):
                copy.operands[n] = argument
            for attribute in [name for name in copy.attributes if name.startswith(_OF_MESHES)]:
                del copy.attributes[attribute]
            for inner in _inner_operations(copy):
                for n, x in enumerate(inner.operands):
                    if x in copies:
                        inner.operands[n] = copies[x]
            func.ReturnOp(list(copy.results))
        return StoredModule(str(module), name, in_avals, out_avals)


_CONSTANT = "stablehlo.constant"


def _reached_functions(scope: Scope, names: Sequence[str]) -> list[str]:
    """Names of the module's functions that some names reach, directly or by calls inside them, each once."""
    reached: list[str] = []
    remaining = list(names)
    while remaining:
        name = remaining.pop()
        if name in scope.functions and name not in reached:
            reached.append(name)
            remaining += re.findall(r"@([\w.$-]+)", str(scope.functions[name]))
    return reached


def _inner_operations(op: Operation) -> list[Any]:
    """Operations in the regions of another, such as the body of a loop, and those inside of them, outer ones first."""
    return [
        nested
        for region in op.regions
        for block in region.blocks
        for inner in block.operations
        for nested in (inner.operation, *_inner_operations(inner.operation))
    ]


def _read_from_outside(region: Region) -> list[Any]:
    """Values that a region reads and does not define."""
    operations = [
        x for block in region.blocks for op in block.operations for x in (op.operation, *_inner_operations(op))
    ]
    inside = {x for block in region.blocks for x in block.arguments}
    inside |= {x for op in operations for x in op.results}
    inside |= {x for op in operations for inner in op.regions for block in inner.blocks for x in block.arguments}
    return list(dict.fromkeys(x for op in operations for x in op.operands if x not in inside))


_LOG = Log("lowering")
_PLATFORM = "cpu"  # where the engine computes
_GENERATORS = ("threefry2x32", "rbg", "unsafe_rbg")
_FAMILIES = (elementwise, arrays, numerics, regions, linear_algebra, shardy)
RULES: dict[str, Rule] = {
    **{name: rule for family in _FAMILIES for name, rule in family.RULES.items()},
    "stablehlo.custom_call": custom_call_rule,
    "stablehlo.composite": composite_rule,
    SINGLE: single_operation_rule,
}


def exported_callee(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Jaxpr of a call of a function that `jax.export` has stored as StableHLO, so that it is lowered as any function.

    None for a call with effects, on one device: the call stays. A module with operations without a counterpart in JAX,
    which is logged, stays a call, one unpriced vertex.

    Raises:
        GraphError: a call that could not run either: a module for several devices without a counterpart, or one for
            other platforms.
    """
    exported = eqn.params["exported"]
    avals = [_without_sharding(atom.aval) for atom in eqn.invars]
    results: list[Any] = [var.aval for var in eqn.outvars]

    def fun(*operands: Any) -> Sequence[Any]:
        return [_as_result(x, aval) for x, aval in zip(_call_exported(exported, operands), results, strict=True)]

    _check_platform(exported, eqn)
    if eqn.effects and exported.nr_devices == 1:
        return None
    try:
        if eqn.effects:
            raise UntranslatedError("effects")
        return jax.make_jaxpr(fun)(*avals)
    except UntranslatedError as error:
        if exported.nr_devices > 1:
            raise _no_counterpart(exported, str(error), eqn) from error
        _LOG.info("the exported function %s has %s: it is not priced (%s)", exported.fun_name, error, source_line(eqn))
    # In the place of the module's constants, so that the profile counts their bytes.
    captured = np.zeros(_captured_bytes(exported), np.uint8)
    outs = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in results)
    params = {"call": partial(eval_equation, eqn), "outs": outs, "label": f"exported {exported.fun_name}"}
    return jax.make_jaxpr(lambda *operands: opaque_call_p.bind(captured, *operands, **params))(*avals)


def _check_platform(exported: Any, eqn: JaxprEqn) -> None:
    """Refuses a function that was exported for other platforms, unless its export says that any will do."""
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


def _no_counterpart(exported: Any, part: str, eqn: JaxprEqn) -> GraphError:
    """Error for a function that was exported for several devices, and has a `part` that no program of IPUs can do."""
    return GraphError(
        f"{exported.fun_name}, exported for {exported.nr_devices} devices, has no counterpart on IPUs",
        where=source_line(eqn) or None,
        expected="operations of arrays with shardings of named axes (jax_use_shardy_partitioner=True)",
        got=part,
        hint="export the function for one device, and shard it by ipu.jit(in_shardings=...) or jax.shard_map",
    )


def _captured_bytes(exported: Any) -> int:
    """Bytes of the constant arrays in the module of an exported function, which the program's memory must hold."""
    sizes: list[int] = []

    def note_constant(op: Operation) -> Any:
        if op.name == "stablehlo.constant":
            kind = op.results[0].type
            sizes.append(prod(static_shape(kind)) * dtype_of(kind).itemsize)
        return mlir.ir.WalkResult.ADVANCE

    module_of(exported.mlir_module_serialized).operation.walk(note_constant)
    return sum(sizes)


# results = opaque_call_p.bind(captured, *operands, call=…, outs=…, label=…)
opaque_call_p = make_primitive(
    "opaque_call",
    lambda captured, *operands, call, **params: call(*operands),
    lambda *avals, outs, **params: outs,
)


def lowered_callee(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Jaxpr of a primitive's equation, translated from the module that JAX lowers it to for the CPU.

    None where that has an operation without a counterpart in JAX, such as a call of compiled code, or effects, which is
    logged, or where operands are keys or no arrays.
    """
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    if any(not isinstance(aval, jax.core.ShapedArray) or _is_key(aval.dtype) for aval in avals):
        return None
    function = jax_jit(lambda *operands: eval_equation(eqn, *operands), keep_unused=True)
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    try:
        if eqn.effects:
            raise UntranslatedError("effects")
        module = function.trace(*shapes).lower(lowering_platforms=(_PLATFORM,)).compiler_ir("stablehlo")
        return jax.make_jaxpr(lambda *operands: _run_main(module, operands))(*avals)
    except (UntranslatedError, NotImplementedError) as error:
        _LOG.info("%s is not priced: %s (%s)", eqn.primitive.name, error, source_line(eqn))
        return None


def _run_main(module: Any, arguments: Sequence[Any]) -> Values:
    with module.context:
        return Scope(functions_of(module), RULES, {}, shardy.meshes_of(module)).function("main", arguments)


def _call_exported(exported: Any, operands: Sequence[Any]) -> Values:
    """Runs the module of an exported function by binding JAX's primitives, for a trace; returns its results.

    The module's arguments are the operands that the function reads; before them, in a module for several platforms, the
    number of the platform to run for.
    """
    if exported.ordered_effects:
        raise UntranslatedError("ordered effects")
    module = module_of(exported.mlir_module_serialized)
    with module.context:
        of_operands, of_results = shardy.shardings_of(exported, shardy.meshes_of(module))
    operands = [shardy.constrained(x, sharding) for x, sharding in zip(operands, of_operands, strict=True)]
    number = exported.platforms.index(_PLATFORM) if _PLATFORM in exported.platforms else 0
    platform = [np.asarray(number, np.int32)] if len(exported.platforms) > 1 else []
    arguments = [*platform, *(_as_words(operands[n]) for n in exported.module_kept_var_idx)]
    results = _run_main(module, arguments)
    return [shardy.constrained(x, sharding) for x, sharding in zip(results, of_results, strict=True)]


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _as_words(x: Any) -> Any:
    """Keys of random numbers as the module has them; others as they are."""
    return jax.random.key_data(x) if _is_key(x.dtype) else x


def _generator_of_keys(aval: Any) -> str:
    """Name of the generator of keys."""
    with jax.ensure_compile_time_eval():
        names = [name for name in _GENERATORS if jax.random.key(0, impl=name).dtype == aval.dtype]
    if not names:
        raise UntranslatedError(f"keys of {aval.dtype}")
    return names[0]


def _as_result(x: Any, aval: Any) -> Any:
    """Result as the equation has it: keys of random numbers, and gradients of whole numbers, are other arrays there.

    `aval` is the abstract value of the equation's result.
    """
    if is_float0(aval):
        return np.zeros(aval.shape, jax.dtypes.float0)
    if _is_key(aval.dtype):
        return jax.random.wrap_key_data(x, impl=_generator_of_keys(aval))
    return x
