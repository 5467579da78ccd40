"""Rows of a constant that a loop reads at its counter, as rows of a stack.

    scan: h' = f(h, x[i]), i' = i + 1          scan over rows r of x: h' = f(h, r), i' = i + 1

So loops that count, as those of `lax.fori_loop` and of exporters, read what loops over rows do: no index is computed,
no constant is exchanged, and `hoist_products` finds the rows.
Input: an equation `scan`. Output: equal equations.
Limits: rows in arithmetic progression, of one element along one dimension; nothing else in the body reads the constant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add, ge, gt, le, lt, mul, sub
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Literal, Var, is_on_host, shape_of, trace
from ipujax.lowering.jaxpr import Body, scan_body, spliced, variables, variables_read, with_scan_body
from ipujax.lowering.primitives import LOOK_UPS, record_of

_SUMS: Mapping[str, Callable[[int, int], int]] = {"add": add, "sub": sub}
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {"lt": lt, "le": le, "gt": gt, "ge": ge}


class _Progression(NamedTuple):
    """An integer, or truth, of iteration n: first + n · step."""

    first: int
    step: int


class _Row(NamedTuple):
    """Rows of a constant that an equation reads.

    Args:
        constant: the constant.
        dim: the dimension along which the row has one element.
        place: index along it.
        keeps_dim: whether the row has that dimension.
    """

    constant: Var
    dim: int
    place: _Progression
    keeps_dim: bool


def with_stacked_rows(scan: JaxprEqn) -> list[JaxprEqn]:
    """A loop that reads rows of stacks where it read rows of constants at its counter, behind what makes the stacks."""
    inside = scan_body(scan.params)
    body = inside.jaxpr.jaxpr
    length = scan.params["length"]
    outer = dict(zip(body.invars, scan.invars, strict=True))
    reads = Counter(var for eqn in body.eqns for var in variables_read(eqn)) + Counter(variables(body.outvars))
    constants = {var for var in body.invars[inside.inputs.constants] if reads[var] == 1 and not is_on_host(var.aval)}
    progressions = _progressions(inside, scan)
    rows: dict[int, _Row] = {}
    for number, eqn in enumerate(body.eqns):
        row = _row_read(eqn, progressions, constants) if eqn.primitive.name in LOOK_UPS else None
        if row is not None and row.place.step and _is_inside(row, length):
            rows[number] = row
    if not rows or length < 2:
        return [scan]
    before: list[JaxprEqn] = []
    stacks: list[Atom] = []
    inputs: list[Var] = []
    eqns: list[JaxprEqn] = []
    for number, eqn in enumerate(body.eqns):
        row = rows.get(number)
        if row is None:
            eqns.append(eqn)
            continue
        making, (stack,) = _traced(_stack_of(row, length, reverse=scan.params["reverse"]), outer[row.constant])
        before += making
        stacks.append(stack)
        aval: Any = stack.aval
        slot = Var(aval.update(shape=aval.shape[1:])) if row.keeps_dim else eqn.outvars[0]
        inputs.append(slot)
        if row.keeps_dim:
            eqns += _traced(partial(lax.expand_dims, dimensions=(row.dim,)), slot, eqn.outvars)[0]
    names = body.debug_info.with_unknown_names()
    jaxpr = ClosedJaxpr(body.replace(invars=[*body.invars, *inputs], eqns=eqns, debug_info=names), inside.jaxpr.consts)
    loop = scan.replace(params=with_scan_body(scan.params, jaxpr, 0), invars=[*scan.invars, *stacks])
    return [*before, loop]


def _progressions(inside: Body, scan: JaxprEqn) -> dict[Var, _Progression]:
    """Integers and truths of a body that are progressions: counters, and what is computed of them."""
    body = inside.jaxpr.jaxpr
    makers = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    last = scan.params["length"] - 1
    progressions: dict[Var, _Progression] = {}
    carries = zip(
        scan.invars[inside.operands.carries],
        body.invars[inside.inputs.carries],
        body.outvars[inside.results.carries],
        strict=True,
    )
    for start, var, result in carries:
        eqn = makers.get(result) if isinstance(result, Var) else None
        if eqn is None or eqn.primitive.name != "add" or not _is_integer(var) or var not in eqn.invars:
            continue
        first = _literal(start)
        (step,) = [_literal(atom) for atom in eqn.invars if atom is not var] or [None]
        if first is not None and step is not None and _holds(var, _Progression(first, step), last):
            progressions[var] = _Progression(first, step)
    for eqn in body.eqns:
        operands = [_of_atom(progressions, atom) for atom in eqn.invars]
        value = _computed(eqn, operands, last) if len(eqn.outvars) == 1 else None
        if value is not None and _holds(eqn.outvars[0], value, last):
            progressions[eqn.outvars[0]] = value
    return progressions


def _computed(eqn: JaxprEqn, operands: Sequence[_Progression | None], last: int) -> _Progression | None:
    """Result of an equation on progressions; None if it is none. `last` is the number of the last iteration."""
    name = eqn.primitive.name
    first, *later = operands if operands else [None]
    if first is None:
        return None
    if name == "convert_element_type" or record_of(eqn).cost == "view":  # `_holds` refuses a type without its numbers
        return first
    if name == "select_n":
        return later[first.first] if first.step == 0 else None
    second = later[0] if len(later) == 1 else None
    if second is None:
        return None
    if name in _SUMS:
        return _Progression(_SUMS[name](first.first, second.first), _SUMS[name](first.step, second.step))
    if name == "mul" and 0 in (first.step, second.step):
        steps = first.first * second.step + first.step * second.first
        return _Progression(mul(first.first, second.first), steps)
    if name in _COMPARISONS:
        # The difference rises or falls: what holds for the first and the last iteration holds for all.
        truths = {_COMPARISONS[name](first.first + n * first.step, second.first + n * second.step) for n in (0, last)}
        return _Progression(int(truths.pop()), 0) if len(truths) == 1 else None
    return None


def _of_atom(progressions: Mapping[Var, _Progression], atom: Atom) -> _Progression | None:
    number = _literal(atom)
    if number is not None:
        return _Progression(number, 0)
    return progressions.get(atom) if isinstance(atom, Var) else None


def _literal(atom: Atom) -> int | None:
    """The number of a literal integer or truth."""
    return int(atom.val) if isinstance(atom, Literal) and _is_integer(atom) else None


def _is_integer(atom: Atom) -> bool:
    """True for one integer or truth."""
    aval: Any = atom.aval
    return getattr(aval, "size", 0) == 1 and getattr(getattr(aval, "dtype", None), "kind", "") in ("i", "u", "b")


def _holds(var: Var, value: _Progression, last: int) -> bool:
    """True if the dtype of one integer or truth has a progression's numbers."""
    if not _is_integer(var):
        return False
    aval: Any = var.aval
    limits = np.iinfo(aval.dtype) if aval.dtype.kind in "iu" else None
    low, high = (0, 1) if limits is None else (limits.min, limits.max)
    return all(low <= value.first + n * value.step <= high for n in (0, last))


def _row_read(eqn: JaxprEqn, progressions: Mapping[Var, _Progression], constants: set[Var]) -> _Row | None:
    """The row that a slice or a gather reads of one of the constants."""
    constant, *indices = eqn.invars
    if not isinstance(constant, Var) or constant not in constants:
        return None
    shape = shape_of(constant)
    sizes = eqn.params["slice_sizes"]
    # Along the others a slice is all of the array, wherever it starts.
    sliced = [d for d, size in enumerate(shape) if sizes[d] != size]
    if len(sliced) != 1 or sizes[sliced[0]] != 1:
        return None
    (dim,) = sliced
    if eqn.primitive.name == "dynamic_slice":
        place = _of_atom(progressions, indices[dim])
        return None if place is None else _Row(constant, dim, place, keeps_dim=True)
    place = _of_atom(progressions, indices[0])
    numbers = eqn.params["dimension_numbers"]
    is_row = numbers.start_index_map == (dim,) and shape_of(indices[0]) == (1,) and not numbers.operand_batching_dims
    is_row = is_row and numbers.offset_dims == tuple(range(len(shape_of(eqn.outvars[0]))))
    is_row = is_row and set(numbers.collapsed_slice_dims) <= {dim}
    return _Row(constant, dim, place, dim not in numbers.collapsed_slice_dims) if is_row and place is not None else None


def _is_inside(row: _Row, length: int) -> bool:
    """True if all rows are in the array, so that no index is clamped or counts from the end."""
    last = row.place.first + (length - 1) * row.place.step
    return min(row.place.first, last) >= 0 and max(row.place.first, last) < shape_of(row.constant)[row.dim]


def _stack_of(row: _Row, length: int, *, reverse: bool) -> Callable[[jax.Array], jax.Array]:
    """Function that returns all rows of a constant, in the order of a loop's slots."""
    first, step = row.place
    last = first + (length - 1) * step
    is_falling = (step < 0) != reverse

    def stack(x: jax.Array) -> jax.Array:
        rows = lax.slice_in_dim(x, min(first, last), max(first, last) + 1, abs(step), row.dim)
        in_order = lax.rev(rows, (row.dim,)) if is_falling else rows
        return jnp.moveaxis(in_order, row.dim, 0)

    return stack


def _traced(fun: Callable[..., Any], operand: Atom, results: Sequence[Var] = ()) -> tuple[list[JaxprEqn], list[Atom]]:
    """Equations of a function of a value, and its results, which are new variables unless `results` are given."""
    jaxpr = trace(fun, [operand.aval], {}, ()).jaxpr.jaxpr
    replaced = dict(zip(jaxpr.outvars, results, strict=True)) if results else {}
    return spliced(jaxpr, {**replaced, jaxpr.invars[0]: operand})
