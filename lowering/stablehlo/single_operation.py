"""Operations of StableHLO without a counterpart in JAX, each as a module of its own that XLA computes.

    results = module_operation_p.bind(*operands, module=…, label=…, work_of=…, flops=…)

The cost of an operation is that of XLA's analysis; of a routine of LAPACK that `linear_algebra` leaves, that of the
primitive of JAX that calls it, `work_of`; other custom calls have no body, so no cost: `flops` is None, and they are
listed as unpriced.
Limits: one vertex, whatever its batch dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

from ipujax.lowering.jax_compat import func, make_primitive, mlir
from ipujax.lowering.stablehlo.elementwise import CHLO
from ipujax.lowering.stablehlo.linear_algebra import lapack_results
from ipujax.lowering.stablehlo.numerics import top_k
from ipujax.lowering.stablehlo.shardy import check_is_whole
from ipujax.lowering.stablehlo.translation import (
    SINGLE,
    Rule,
    Scope,
    UntranslatedError,
    Values,
    dtype_of,
    static_shape,
    text,
)
from ipujax.lowering.stored_modules import StoredModule
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


def single_operation_rule(scope: Scope, op: Any, operands: Values) -> Sequence[Any]:
    """Results of an operation that XLA computes as it is."""
    if not op.name.startswith(_DIALECTS):
        raise UntranslatedError(f"the operation {op.name}")
    return _bound(scope, op, operands, op.name.partition(".")[2], work_of="", is_priced=True)


def custom_call_rule(scope: Scope, op: Any, operands: Values) -> Sequence[Any]:
    """Results of a custom call, by its target."""
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
    return _bound(scope, op, operands, target, work_of, is_priced=False)


def composite_rule(scope: Scope, op: Any, operands: Values) -> Sequence[Any]:
    """Results of an operation with a decomposition: that of JAX with its name, else the decomposition."""
    name = text(op, "name").removeprefix(_CHLO)
    attributes: Any = (
        ir.DictAttr(op.attributes["composite_attributes"]) if "composite_attributes" in op.attributes else {}
    )
    if text(op, "name") == "chlo.top_k":
        return top_k(operands[0], int(ir.IntegerAttr(attributes["k"]).value))
    if text(op, "name").startswith(_CHLO) and name in CHLO:
        return [CHLO[name](*operands)]
    return scope.function(text(op, "decomposition"), operands)


def _bound(scope: Scope, op: Any, operands: Values, label: str, work_of: str, is_priced: bool) -> Sequence[Any]:
    if any(x.dtype != dtype_of(operand.type) for x, operand in zip(operands, op.operands, strict=True)):
        raise UntranslatedError(f"the operation {op.name} on numbers of 64 bits")
    module = _module(scope, op, operands, label)
    flops = _flops(module) if is_priced else None
    return module_operation_p.bind(*operands, module=module, label=label, work_of=work_of, flops=flops)


def _flops(module: StoredModule) -> int | None:
    analysis = jax_jit(module).lower(*module.in_avals).compile().cost_analysis()
    return None if analysis is None else int(max(0.0, analysis.get("flops", 0.0)))


def _module(scope: Scope, op: Any, operands: Values, name: str) -> StoredModule:
    """A module for XLA, whose main is one operation; functions that it names and constants that it reads are copied."""
    in_avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    out_avals = tuple(jax.ShapeDtypeStruct(static_shape(x.type), dtype_of(x.type)) for x in op.results)
    named = re.findall(r"@([\w.$-]+)", str(op))
    with op.context, ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            for function in _reached(scope, named):
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
            for inner in _operations(copy):
                for n, x in enumerate(inner.operands):
                    if x in copies:
                        inner.operands[n] = copies[x]
            func.ReturnOp(list(copy.results))
        return StoredModule(str(module), name, in_avals, out_avals)


_CONSTANT = "stablehlo.constant"


def _reached(scope: Scope, names: Sequence[str]) -> list[str]:
    """Functions that names reach, directly or through other functions."""
    reached: list[str] = []
    remaining = list(names)
    while remaining:
        name = remaining.pop()
        if name in scope.functions and name not in reached:
            reached.append(name)
            remaining += re.findall(r"@([\w.$-]+)", str(scope.functions[name]))
    return reached


def _operations(op: Any) -> list[Any]:
    return [
        nested
        for region in op.regions
        for block in region.blocks
        for inner in block.operations
        for nested in (inner.operation, *_operations(inner.operation))
    ]


def _read_from_outside(region: Any) -> list[Any]:
    """Values that a region reads and does not define."""
    operations = [x for block in region.blocks for op in block.operations for x in (op.operation, *_operations(op))]
    inside = {x for block in region.blocks for x in block.arguments}
    inside |= {x for op in operations for x in op.results}
    inside |= {x for op in operations for inner in op.regions for block in inner.blocks for x in block.arguments}
    return list(dict.fromkeys(x for op in operations for x in op.operands if x not in inside))


RULES: dict[str, Rule] = {
    "stablehlo.custom_call": custom_call_rule,
    "stablehlo.composite": composite_rule,
    SINGLE: single_operation_rule,
}
