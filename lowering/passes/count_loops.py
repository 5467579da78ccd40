"""Pass `count_loops`: a `while` whose trip count is known becomes a `scan` of that length.

Such a loop compares a scalar counter with a bound (`<`, `<=`, `>`, `>=`, `!=`, or `not` of one), and each iteration
adds the same step to the counter. Start, step and bound are known where they are constants, arguments with known
values, carries that no iteration changes, or computed from those. Known integers reach loops inside of loops, branches
and mapped functions by their operands.
Limits: counters are integers that do not wrap around; a condition of several comparisons is data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, scan_p
from ipujax.lowering.jaxpr import (
    CONTROL_FLOW,
    Body,
    bodies,
    primitive_names,
    while_body,
    while_condition,
    with_equations,
    with_inner,
)
from ipujax.lowering.primitives import exact_value, record_of


def count_loops(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr without loops of unknown length whose length is known."""
    if "while" not in primitive_names(jaxpr.jaxpr):
        return jaxpr
    return _LoopCounter().counted(jaxpr, [None] * len(jaxpr.in_avals))


class _LoopCounter:
    """Rewrites jaxprs, each once for the same known arguments, so that a shared one stays one object."""

    def __init__(self) -> None:
        self._results: dict[object, tuple[ClosedJaxpr, ClosedJaxpr]] = {}

    def counted(self, jaxpr: ClosedJaxpr, scalars: Sequence[KnownScalar]) -> ClosedJaxpr:
        """The jaxpr with scans in place of loops whose trip count is known, made once for the same known arguments.

        `scalars` has the number of each argument that is known, None for others.
        """
        arguments = tuple(None if x is None else (x.dtype, int(x)) for x in scalars)
        key = id(jaxpr.jaxpr), *map(id, jaxpr.consts), arguments
        if key not in self._results:
            # The jaxpr is stored so that its id is not reused.
            self._results[key] = jaxpr, self._rewrite(jaxpr, scalars)
        return self._results[key][1]

    def _rewrite(self, jaxpr: ClosedJaxpr, scalars: Sequence[KnownScalar]) -> ClosedJaxpr:
        if "while" not in primitive_names(jaxpr.jaxpr):
            return jaxpr
        values = known_values(jaxpr, scalars)
        eqns = [self._rewrite_equation(eqn, known_operands(values, eqn.invars)) for eqn in jaxpr.jaxpr.eqns]
        return with_equations(jaxpr, eqns)

    def _rewrite_equation(self, eqn: JaxprEqn, scalars: Sequence[KnownScalar]) -> JaxprEqn:
        """Makes a scan of a `while` whose trip count is known here, and rewrites loops in the bodies of an equation.

        `scalars` has for each operand its known value, or None; trip counts inside may follow from it.
        """
        if eqn.primitive.name == "while" and (count := trip_count(eqn, scalars)) is not None:
            eqn = _as_scan(eqn, count)
            # A scan has no operands of the condition, which come first.
            scalars = scalars[len(scalars) - len(eqn.invars) :]
        arguments = _KNOWN_INSIDE.get(eqn.primitive.name, _known_in_none)(eqn, scalars)

        def rewrite(inner: ClosedJaxpr) -> ClosedJaxpr:
            # The condition of a `while` has other arguments than its body.
            is_body = len(arguments) == len(inner.in_avals) and inner is not eqn.params.get("cond_jaxpr")
            return self.counted(inner, arguments if is_body else [None] * len(inner.in_avals))

        return with_inner(eqn, rewrite)


def _as_scan(eqn: JaxprEqn, length: int) -> JaxprEqn:
    """A `scan` of `length` iterations of the body of a `while`.

    The operands of a `while` are constants of its condition, constants of its body and carries. Those of a scan are
    constants, carries and stacks: the same without the first, as there are no stacks.
    """
    num_condition = eqn.params["cond_nconsts"]
    params = {
        "jaxpr": eqn.params["body_jaxpr"],
        "length": length,
        "num_carry": len(eqn.outvars),
        "num_consts": eqn.params["body_nconsts"],
        "reverse": False,
        "unroll": 1,
    }
    return eqn.replace(primitive=scan_p, params=params, invars=eqn.invars[num_condition:])


def _known_in_none(eqn: JaxprEqn, scalars: Sequence[KnownScalar]) -> list[KnownScalar]:
    return []


def _known_in_bodies(eqn: JaxprEqn, scalars: Sequence[KnownScalar]) -> list[KnownScalar]:
    body = bodies(eqn)[0]  # branches have the same operands
    rows = [None] * len(scalars[body.operands.stacks])
    return [*scalars[body.operands.constants], *fixed_carries(body, scalars), *rows]


def _known_in_tile_map(eqn: JaxprEqn, scalars: Sequence[KnownScalar]) -> list[KnownScalar]:
    return [None if is_stacked else x for x, is_stacked in zip(scalars, eqn.params["stacked"], strict=True)]


# Known arguments of the jaxprs of an equation, from its known operands.
_KNOWN_INSIDE: dict[str, Callable[[JaxprEqn, Sequence[KnownScalar]], list[KnownScalar]]] = {
    **dict.fromkeys(CONTROL_FLOW, _known_in_bodies),
    "tile_map": _known_in_tile_map,
}


KnownScalar = Any  # a NumPy scalar, None for a value that is data

_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "ne": "eq", "eq": "ne"}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne", "eq": "eq"}
_FOLDED = frozenset(
    (
        *("add", "sub", "mul", "div", "rem", "neg", "sign", "abs", "max", "min", "clamp", "integer_pow", "select_n"),
        *("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "shift_left", "shift_right_arithmetic"),
        *("convert_element_type", "copy"),
    )
)


def iterations(start: int, end: int, step: int, direction: str) -> int | None:
    """Count the iterations of a loop that runs while `counter direction end` is true.

    Args:
        start: first value of the counter.
        end: bound.
        step: added by each iteration.
        direction: "lt", "le", "gt", "ge", "ne" or "eq".

    Returns:
        The iterations in unbounded integers; None if it never ends.
    """
    if direction in ("le", "ge"):  # as "lt" and "gt" with the next bound
        end = end + (1 if direction == "le" else -1)
    if direction == "eq":
        return 0 if start != end else (None if step == 0 else 1)
    if start == end and direction == "ne":
        return 0
    if direction == "ne":  # ends only if the counter meets the bound exactly
        is_met = step != 0 and (end - start) % step == 0 and (end - start) // step > 0
        return (end - start) // step if is_met else None
    is_upwards = direction in ("lt", "le")
    if start == end or (start < end) != is_upwards:
        return 0
    return -((start - end) // step) if step != 0 and (step > 0) == is_upwards else None


def trip_count(eqn: JaxprEqn, scalars: Sequence[KnownScalar]) -> int | None:
    """Number of iterations of a `while` that counts an integer to a bound; None if it depends on data.

    The condition must compare a carry plus a constant with a known value, and each iteration add a constant to the
    carry.

    Args:
        eqn: equation `while`.
        scalars: scalar that each operand is known to be; None for those that are data.

    Returns:
        The iterations; None also if the condition has effects, or the counter would overflow its dtype.
    """
    condition = while_condition(eqn.params)
    body = while_body(eqn.params)
    tested = condition.jaxpr.jaxpr
    computed = body.jaxpr.jaxpr
    initial = scalars[body.operands.carries]
    fixed = fixed_carries(body, scalars)
    comparison = None if tested.effects else _comparison(tested)
    if comparison is None:
        return None
    values_of_condition = known_values(condition.jaxpr, [*scalars[condition.operands.constants], *fixed])
    values_of_body = known_values(body.jaxpr, [*scalars[body.operands.constants], *fixed])
    carries_of_condition = tested.invars[condition.inputs.carries]
    carries_of_body = computed.invars[body.inputs.carries]
    # Either side of the comparison may be the counter.
    for counted, bound, direction in (comparison, comparison.mirrored()):
        end = _integer(_value(values_of_condition, bound))
        for number, start in enumerate(map(_integer, initial)):
            offset = _added(tested, values_of_condition, counted, carries_of_condition[number])
            if start is None or end is None or offset is None:
                continue
            step = _added(computed, values_of_body, computed.outvars[number], carries_of_body[number])
            count = None if step is None else iterations(start + offset, end, step, direction)
            if count is None or step is None:
                return None
            # An integer that wraps around would count otherwise.
            last = start + count * step
            fits_carry = _can_hold(carries_of_condition[number], last)
            fits_comparison = _can_hold(counted, start + offset) and _can_hold(counted, last + offset)
            return count if fits_carry and fits_comparison else None
    return None


def known_values(jaxpr: ClosedJaxpr, scalars: Sequence[KnownScalar]) -> dict[Var, KnownScalar]:
    """Folds constants: scalar integers and booleans of a jaxpr that follow from its constants and known arguments.

    `scalars` has for each input the scalar that it is known to be, or None.
    """
    constants = ((var, _constant(value)) for var, value in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    values = {var: value for var, value in constants if value is not None}
    values |= {var: value for var, value in zip(jaxpr.jaxpr.invars, scalars, strict=True) if value is not None}
    for eqn in jaxpr.jaxpr.eqns:
        is_folded = (eqn.primitive.name in _FOLDED or record_of(eqn).is_in_order) and eqn.params.get("sharding") is None
        if not is_folded or not all(map(_is_scalar, (*eqn.invars, *eqn.outvars))):
            continue
        operands = [_value(values, atom) for atom in eqn.invars]
        if all(x is not None for x in operands):
            exact = exact_value(eqn.primitive.name, [np.asarray(x) for x in operands], _dtype(eqn.outvars[0]))
            values[eqn.outvars[0]] = _computed(eqn, operands) if exact is None else exact
    return values


def _computed(eqn: JaxprEqn, operands: Sequence[KnownScalar]) -> np.ndarray:
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        return np.asarray(eqn.primitive.bind(*operands, **eqn.params))


def fixed_carries(body: Body, scalars: Sequence[KnownScalar]) -> list[KnownScalar]:
    """Known value of each carry of a loop in all iterations; None for data, and where an iteration changes it."""
    jaxpr = body.jaxpr.jaxpr
    initial = scalars[body.operands.carries]
    carries = zip(initial, jaxpr.invars[body.inputs.carries], jaxpr.outvars[body.results.carries], strict=True)
    return [value if _added(jaxpr, {}, result, variable) == 0 else None for value, variable, result in carries]


def known_operands(values: dict[Var, KnownScalar], atoms: Sequence[Atom]) -> list[KnownScalar]:
    """Known value of each atom, None for data."""
    return [_value(values, atom) for atom in atoms]


class _Comparison(NamedTuple):
    """The comparison `left direction right`; directions are named as for `iterations`."""

    left: Atom
    right: Atom
    direction: str

    def mirrored(self) -> _Comparison:
        """This comparison with its sides exchanged."""
        return _Comparison(self.right, self.left, _MIRRORED[self.direction])


def _comparison(condition: Jaxpr) -> _Comparison | None:
    """The comparison of scalars that a condition of a `while` is, with negations applied; None for another one."""
    eqn = _definition(condition, condition.outvars[0])
    is_negated = False
    while eqn is not None and eqn.primitive.name == "not":
        is_negated = not is_negated
        eqn = _definition(condition, eqn.invars[0])
    if eqn is None or eqn.primitive.name not in _NEGATED or not _is_scalar(eqn.invars[0]):
        return None
    name = eqn.primitive.name
    return _Comparison(eqn.invars[0], eqn.invars[1], _NEGATED[name] if is_negated else name)


def _added(jaxpr: Jaxpr, values: dict[Var, KnownScalar], atom: Atom, counter: Var) -> int | None:
    """Constant c of an atom that is the variable `counter` plus c, traced back through additions and casts, else None.

    `values` has the known scalars of the jaxpr, of which a constant that is added must be one.
    """
    if atom is counter:
        return 0
    eqn = _definition(jaxpr, atom)
    name = "" if eqn is None else eqn.primitive.name
    if eqn is None or not _is_scalar(atom):
        return None
    if name == "convert_element_type":
        inner = _added(jaxpr, values, eqn.invars[0], counter)
        dtype = _dtype(eqn.invars[0])
        # A sum that is cast may have wrapped around in the narrower dtype, which `trip_count` does not see.
        return inner if dtype == _dtype(atom) or (inner == 0 and _is_wider(dtype, _dtype(atom))) else None
    if name not in ("add", "sub"):
        return None
    first, second = eqn.invars
    if name == "add" and _integer(_value(values, first)) is not None:
        first, second = second, first
    inner = _added(jaxpr, values, first, counter)
    constant = _integer(_value(values, second))
    if inner is None or constant is None:
        return None
    return inner + (constant if name == "add" else -constant)


def _definition(jaxpr: Jaxpr, atom: Atom) -> JaxprEqn | None:
    return next((eqn for eqn in jaxpr.eqns if atom in eqn.outvars), None) if isinstance(atom, Var) else None


def _is_wider(dtype: Any, other: Any) -> bool:
    return all(np.issubdtype(x, np.integer) for x in (dtype, other)) and np.can_cast(dtype, other, "safe")


def _can_hold(atom: Atom, value: int) -> bool:
    """True if the dtype of an atom has an integer."""
    limits = np.iinfo(_dtype(atom))
    return bool(limits.min <= value <= limits.max)


def _dtype(atom: Atom) -> Any:
    aval: Any = atom.aval
    return aval.dtype


def _is_scalar(atom: Atom) -> bool:
    """True for one integer or truth of a NumPy dtype."""
    aval = atom.aval
    return getattr(aval, "shape", None) == () and getattr(getattr(aval, "dtype", None), "kind", "") in ("i", "u", "b")


def _value(values: dict[Var, KnownScalar], atom: Atom) -> KnownScalar:
    if isinstance(atom, Literal):
        return np.asarray(atom.val, _dtype(atom)) if _is_scalar(atom) else None
    return values.get(atom)


def _constant(value: Any) -> KnownScalar:
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array) and not isinstance(value, jax.core.Tracer)
    return np.asarray(value) if is_array and value.ndim == 0 and value.dtype.kind in "iub" else None


def _integer(value: KnownScalar) -> int | None:
    return None if value is None or value.dtype.kind not in "iu" else int(value)
