"""Pass `count_loops`: a `while` whose trip count is known becomes a `scan` of that length.

Known integers reach loops inside of loops, branches and mapped functions by their operands, see `trip_counts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, scan_p
from ipujax.lowering.jaxpr import CONTROL_FLOW, bodies, primitive_names, with_equations, with_inner
from ipujax.lowering.passes.trip_counts import Known, fixed_carries, known_operands, known_values, trip_count


def count_loops(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr without loops of unknown length whose length is known."""
    if "while" not in primitive_names(jaxpr.jaxpr):
        return jaxpr
    return _LoopCounter().counted(jaxpr, [None] * len(jaxpr.in_avals))


class _LoopCounter:
    """Rewrites jaxprs, each once for the same known arguments, so that a shared one stays one object."""

    def __init__(self) -> None:
        self._results: dict[object, tuple[ClosedJaxpr, ClosedJaxpr]] = {}

    def counted(self, jaxpr: ClosedJaxpr, known: Sequence[Known]) -> ClosedJaxpr:
        """The jaxpr with scans, for arguments of which some are known."""
        arguments = tuple(None if x is None else (x.dtype, int(x)) for x in known)
        key = id(jaxpr.jaxpr), *map(id, jaxpr.consts), arguments
        if key not in self._results:
            self._results[key] = jaxpr, self._rewrite(jaxpr, known)  # the jaxpr is stored so that its id is not reused
        return self._results[key][1]

    def _rewrite(self, jaxpr: ClosedJaxpr, known: Sequence[Known]) -> ClosedJaxpr:
        if "while" not in primitive_names(jaxpr.jaxpr):
            return jaxpr
        values = known_values(jaxpr, known)
        eqns = [self._rewrite_equation(eqn, known_operands(values, eqn.invars)) for eqn in jaxpr.jaxpr.eqns]
        return with_equations(jaxpr, eqns)

    def _rewrite_equation(self, eqn: JaxprEqn, known: Sequence[Known]) -> JaxprEqn:
        """Makes a scan of a `while` whose trip count is known here, and rewrites loops in the bodies of an equation.

        `known` has for each operand the scalar that it is known to be, or None; trip counts inside may follow from it.
        """
        if eqn.primitive.name == "while" and (count := trip_count(eqn, known)) is not None:
            eqn = _as_scan(eqn, count)
            known = known[len(known) - len(eqn.invars) :]  # a scan has no operands of the condition, which come first
        arguments = _KNOWN_INSIDE.get(eqn.primitive.name, _known_in_none)(eqn, known)

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


def _known_in_none(eqn: JaxprEqn, known: Sequence[Known]) -> list[Known]:
    return []


def _known_in_bodies(eqn: JaxprEqn, known: Sequence[Known]) -> list[Known]:
    body = bodies(eqn)[0]  # branches have the same operands
    rows = [None] * len(known[body.operands.stacks])
    return [*known[body.operands.constants], *fixed_carries(body, known), *rows]


def _known_in_tile_map(eqn: JaxprEqn, known: Sequence[Known]) -> list[Known]:
    return [None if is_stacked else x for x, is_stacked in zip(known, eqn.params["stacked"], strict=True)]


# Known arguments of the jaxprs of an equation, from its known operands.
_KNOWN_INSIDE: dict[str, Callable[[JaxprEqn, Sequence[Known]], list[Known]]] = {
    **dict.fromkeys(CONTROL_FLOW, _known_in_bodies),
    "tile_map": _known_in_tile_map,
}
