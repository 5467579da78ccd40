"""Rules for elementwise primitives: one rule for all, by the cost table of popops.

Profiles divide the cycles of a fused vertex among its parts, one for each of its computing equations, weighted by the
cycles that a tile would take for it alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Primitive, Var, shape_of
from ipujax.lowering.layer_notes import layer_of, origin_of
from ipujax.lowering.layout import ceil_div
from ipujax.lowering.passes import index_space, is_unit_view
from ipujax.lowering.popops import MONOIDS, OP_COSTS, Op, Reduction, RowFunction, Step, each_row, freeze
from ipujax.lowering.popops.maps.elementwise import apply_steps, elementwise
from ipujax.lowering.popops.vertices.elementwise_cycles import elementwise_cycles
from ipujax.lowering.popops.vertices.kernel import Frozen
from ipujax.lowering.popops.vertices.reducers import reduce_cycles
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Builder, VertexPart
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin, Tensor


def fused_parts(
    fused: JaxprEqn, computing: list[tuple[JaxprEqn, str]], origin: Origin, target: Target
) -> tuple[VertexPart, ...]:
    """Parts of a fused vertex, one for each equation that it computes, among which a profile divides its cycles.

    Empty if all equations have one line, layer and part of the training step, to which all cycles belong.

    Args:
        fused: the fused equation.
        computing: the equations that it computes, each with its row of `OP_COSTS` or its monoid.
        origin: origin of the vertex.
        target: the machine, for the weights of parts.
    """
    # The layer around the fused equation: `origin_of` adds that of each equation to it.
    outer_layer = origin.layer.removesuffix(layer_of(fused)).rstrip("/")
    origins = [origin_of(eqn, replace(origin, layer=outer_layer), is_called=False) for eqn, _ in computing]
    # Origins of one line are equal, whatever their layer and part of the training step.
    if len({(origin, origin.layer, origin.part) for origin in origins}) < 2:
        return ()
    return tuple(
        VertexPart(origin, eqn.primitive.name, _cycles_alone(eqn, row, target))
        for origin, (eqn, row) in zip(origins, computing, strict=True)
    )


def _cycles_alone(eqn: JaxprEqn, row: str, target: Target) -> int:
    """Estimated cycles of one equation alone on a tile, its elements spread over all tiles.

    Args:
        eqn: an elementwise equation or a reduction.
        row: name of its operation in the table `OP_COSTS`; for a reduction its monoid.
        target: the machine.
    """
    operands: list[Any] = [atom.aval for atom in eqn.invars]
    result: Any = eqn.outvars[0].aval
    elements = _per_tile(max((aval.size for aval in operands), default=result.size), target)
    if eqn.primitive.name in MONOIDS:
        outputs = _per_tile(prod(shape_of(eqn.outvars[0])), target)
        return int(reduce_cycles(row, operands[0].dtype, outputs, ceil_div(elements, outputs), target))
    # A comparison, or a conversion from integers, is computed in the dtype of its operand.
    from_integer = eqn.primitive.name == "convert_element_type" and np.issubdtype(operands[0].dtype, np.integer)
    computes_in = operands[-1].dtype if result.dtype == np.bool_ or from_integer else result.dtype
    constants = sum(isinstance(atom, Literal) for atom in eqn.invars)
    cycles = elementwise_cycles(row, computes_in, len(operands) - constants, constants, elements, target)
    return int(cycles)


def _per_tile(elements: int, target: Target) -> np.ndarray:
    return np.asarray(max(1, ceil_div(elements, target.tiles_per_ipu)), np.int64)


def elementwise_rule(ctx: Context, *operands: Tensor, **params: Any) -> Tensor:
    """Binds an elementwise primitive on each block; returns an unchanged operand itself."""
    unchanged = unchanged_operand(ctx.equation)
    if unchanged is not None:
        return operands[unchanged]
    out = ctx.into_tensors[0]
    return elementwise(ctx.builder, op_of(ctx.equation), operands, out)


def op_of(eqn: JaxprEqn) -> Op:
    """Operation of an elementwise equation."""
    aval: Any = eqn.outvars[0].aval
    return _bound_op(_cost_row(eqn), eqn.primitive, tuple(sorted(eqn.params.items())), aval.dtype)


# Operations that compute powers with a constant exponent. Source: poplibs `optimise`, by its tests in
# `tests/popops/MapExprOptimisations.cpp`; the third power as in XLA.
_POWERS: dict[complex, str] = {-1.0: "div", -0.5: "rsqrt", 0.5: "sqrt", 2.0: "square", 3.0: "integer_pow"}


def _cost_row(eqn: JaxprEqn) -> str:
    """Row of `OP_COSTS`: that of its primitive, but of a power with a known exponent that of a simpler operation."""
    name = eqn.primitive.name
    exponent = eqn.invars[-1] if eqn.invars else None
    if name != "pow" or not isinstance(exponent, Literal) or np.size(exponent.val) != 1:
        return name
    return _POWERS.get(np.asarray(exponent.val).item(), name)


_OF_RESULT = ("new_dtype", "weak_type")  # parameters that the dtype of the result has


@remembered
def _bound_op(row: str, primitive: Primitive, params: tuple[tuple[str, Hashable], ...], out_dtype: np.dtype) -> Op:
    """Operation of a primitive with its parameters, by name; equal arguments give one object."""
    key = (row, primitive.name, params)
    has_no_params = all(value is None for name, value in params if name not in _OF_RESULT)
    return Op(row, partial(primitive.bind, **dict(params)), out_dtype, key, is_primitive=has_no_params)


def unchanged_operand(eqn: JaxprEqn) -> int | None:
    """Number of the operand that an elementwise equation returns unchanged, as x · 1 does x; None if none.

    Such an equation needs no vertex.
    """
    name = eqn.primitive.name
    ones = [isinstance(x, Literal) and bool(np.all(x.val == 1)) for x in eqn.invars]
    avals: list[Any] = [x.aval for x in eqn.invars]
    out: Any = eqn.outvars[0].aval
    unchanged = {
        # Divisions by 1 come from means over one replica, first powers from the first moment of Optax's Adam.
        "convert_element_type": lambda: 0,
        "integer_pow": lambda: 0 if eqn.params["y"] == 1 else None,
        "div": lambda: 0 if ones[1] else None,
        "mul": lambda: 0 if ones[1] else 1 if ones[0] else None,
    }
    number = unchanged[name]() if name in unchanged else None
    # A cast may change only the weakness of a type; a broadcast operand is changed.
    is_equal = number is not None and (avals[number].shape, avals[number].dtype) == (out.shape, out.dtype)
    return number if is_equal else None


def fused_rule(ctx: Context, *operands: Tensor, jaxpr: ClosedJaxpr, name: str) -> Sequence[Tensor]:
    """Elementwise equations over one index space and reductions of their results, in one vertex a tile.

    A result is a stored value, a reduction, or an operand that the equations return unchanged.

    Args:
        ctx: the equation, which the pass `fuse` has made.
        operands: its operands.
        jaxpr: the fused equations.
        name: name of the vertex in reports.
    """
    body = jaxpr.jaxpr
    reduced = {eqn.outvars[0]: eqn for eqn in body.eqns if eqn.primitive.name in MONOIDS}  # reductions by their result
    mapped = [eqn for eqn in body.eqns if eqn.primitive.name not in MONOIDS]
    # Shape that all operands and values get; operands come first in `number`, then the values that steps compute.
    space = index_space(shape_of(mapped[0].outvars[0]))
    computed_eqns, steps, number = _kernel_steps(body.invars, mapped)
    computing = [(eqn, MONOIDS[eqn.primitive.name]) for eqn in reduced.values()]
    computing += [(eqn, step.op.name) for eqn, step in zip(computed_eqns, steps, strict=True)]
    tensors = [x.reshape(space) for x in operands]
    outs = [var for var in body.outvars if isinstance(var, Var)]
    title = ctx.name.removesuffix(ctx.primitive.name) + name
    # By number of the result: value that is stored, reduction, or number of the operand that is returned.
    stored = {n: number[var] for n, var in enumerate(outs) if var not in reduced and number[var] >= len(operands)}
    reductions = {n: _reduction(reduced[var], number) for n, var in enumerate(outs) if var in reduced}
    returned = {n: number[var] for n, var in enumerate(outs) if n not in stored and n not in reductions}
    # An operand that is returned may be read later: no other result is written over it.
    protected = {variable for operand in returned.values() for variable in operands[operand].variables()}
    into = [None if out is None or protected.intersection(out.variables()) else out for out in ctx.into_tensors]
    places = [None if (out := into[n]) is None else out.reshape(space) for n in stored]
    values = list(stored.values())
    graph = ctx.graph
    # Computed on demand: only profiles ask for them.
    parts = cache(partial(fused_parts, ctx.equation, computing, graph.origin, graph.target))
    with graph.debug_origin(graph.origin, parts):
        builder = Builder(graph, ctx.prog, title)
        results = apply_steps(builder, steps, values, tensors, space, places, list(reductions.values()))
    views = {n: tensors[operand] for n, operand in returned.items()} | dict(
        zip((*stored, *reductions), results, strict=True)
    )
    # A stored result that has a destination is there.
    in_place = {n: place for n, place in enumerate(into) if n in stored and place is not None}
    return [in_place[n] if n in in_place else views[n].reshape(ctx.out_avals[n].shape) for n in range(len(outs))]


def _kernel_steps(
    invars: Sequence[Var], eqns: Sequence[JaxprEqn]
) -> tuple[list[JaxprEqn], list[Step], Mapping[Var, int]]:
    """Steps of a fused vertex, from the elementwise equations that it computes.

    Values are numbered: operands first, then the result of each step. An equation that returns an operand unchanged has
    no step: its result has the operand's number.

    Args:
        invars: operands of the vertex.
        eqns: the equations, in order.

    Returns:
        The equations that have a step; these steps; and the number of each value.
    """
    number: dict[Var, int] = {var: n for n, var in enumerate(invars)}
    computing: list[JaxprEqn] = []
    steps: list[Step] = []

    def read(atom: Atom) -> int | Frozen:
        aval: Any = atom.aval
        return freeze(np.asarray(atom.val, aval.dtype)) if isinstance(atom, Literal) else number[atom]

    for eqn in eqns:
        unchanged = 0 if is_unit_view(eqn) else unchanged_operand(eqn)
        if unchanged is not None:
            source = eqn.invars[unchanged]
            assert isinstance(source, Var)
            number[eqn.outvars[0]] = number[source]
            continue
        number[eqn.outvars[0]] = len(invars) + len(steps)
        computing.append(eqn)
        steps.append(Step(op_of(eqn), tuple(map(read, eqn.invars))))
    return computing, steps, number


def _reduction(eqn: JaxprEqn, number: Mapping[Var, int]) -> Reduction:
    """Reduction in the index space, which lacks the equation's dimensions of size 1; `number` is that of each value."""
    (source,) = eqn.invars
    assert isinstance(source, Var)
    shape = shape_of(source)
    dims = [d for d, n in enumerate(shape) if n != 1]
    axes = tuple(n for n, d in enumerate(dims) if d in eqn.params["axes"])
    return Reduction(number[source], MONOIDS[eqn.primitive.name], axes)


def bitcast_convert_type_rule(ctx: Context, x: Tensor, **params: Any) -> Tensor | Sequence[Tensor]:
    """Reinterpretation of bits as another dtype; elementwise if that has the same width.

    A narrower dtype adds a last dimension, [parts of an element], a wider one drops it; parameters are JAX's.
    """
    (aval,) = ctx.out_avals
    if aval.shape == x.shape:
        return elementwise_rule(ctx, x, **params)
    if not aval.size:
        return fallback(ctx, x)
    parts = aval.shape[-1] if aval.ndim > x.ndim else 1
    rows = x.reshape((*x.shape, 1)) if aval.ndim > x.ndim else x
    fun = _bitcast_of_rows(aval.dtype, splits=aval.ndim > x.ndim)
    (out,) = each_row(ctx.builder, "Bitcast", rows, rows.ndim - 1, fun, [(parts, aval.dtype)])
    return out.reshape(aval.shape)


@remembered
def _bitcast_of_rows(dtype: Any, *, splits: bool) -> RowFunction:
    """Function from rows of one element to rows of its narrower parts if it `splits` them, else back."""
    if splits:
        return lambda x: (lax.bitcast_convert_type(lax.squeeze(x, (x.ndim - 1,)), dtype),)
    return lambda x: (lax.expand_dims(lax.bitcast_convert_type(x, dtype), (x.ndim - 1,)),)


RULES: dict[str, Rule] = {name: elementwise_rule for name in OP_COSTS if name != "copy"}
RULES["bitcast_convert_type"] = bitcast_convert_type_rule
RULES["fused"] = fused_rule
