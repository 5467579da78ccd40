"""Pass `count_loops`: a `while` whose trip count is known becomes a `scan` of that length.

Known integers reach loops inside of loops, branches and mapped functions by their operands, see `trip_counts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, scan_p
from ipujax.lowering.jaxpr import CONTROL_FLOW, bodies, primitive_names, with_inner
from ipujax.lowering.passes.trip_counts import Known, fixed_carries, known_operands, known_values, trip_count


def count_loops(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Returns an equal jaxpr without loops of unknown length whose length is known."""
    if "while" not in primitive_names(jaxpr.jaxpr):
        return jaxpr
    return _Counter().rewritten(jaxpr, [None] * len(jaxpr.in_avals))


class _Counter:
    """Rewrites jaxprs, each once for the same known arguments, so that a shared one stays one object."""

    def __init__(self) -> None:
        self._results: dict[object, tuple[ClosedJaxpr, ClosedJaxpr]] = {}

    def rewritten(self, jaxpr: ClosedJaxpr, known: Sequence[Known]) -> ClosedJaxpr:
        """The jaxpr with scans, for arguments of which some are known."""
        arguments = tuple(None if x is None else (x.dtype, int(x)) for x in known)
        key = id(jaxpr.jaxpr), *map(id, jaxpr.consts), arguments
        if key not in self._results:
            self._results[key] = jaxpr, self._new(jaxpr, known)  # the jaxpr is stored so that its id is not reused
        return self._results[key][1]

    def _new(self, jaxpr: ClosedJaxpr, known: Sequence[Known]) -> ClosedJaxpr:
        if "while" not in primitive_names(jaxpr.jaxpr):
            return jaxpr
        values = known_values(jaxpr, known)
        eqns = [self._equation(eqn, known_operands(values, eqn.invars)) for eqn in jaxpr.jaxpr.eqns]
        is_same = all(new is old for new, old in zip(eqns, jaxpr.jaxpr.eqns, strict=True))
        return jaxpr if is_same else ClosedJaxpr(jaxpr.jaxpr.replace(eqns=eqns), jaxpr.consts)

    def _equation(self, eqn: JaxprEqn, known: Sequence[Known]) -> JaxprEqn:
        """A scan in place of a `while` whose trip count is known here; other equations with their bodies rewritten."""
        if eqn.primitive.name == "while":
            count = trip_count(eqn, known)
            eqn = eqn if count is None else _scan(eqn, count)
            known = known if count is None else known[len(known) - len(eqn.invars) :]
        arguments = _KNOWN_INSIDE.get(eqn.primitive.name, _nothing)(eqn, known)

        def rewrite(inner: ClosedJaxpr) -> ClosedJaxpr:
            # The condition of a `while` has other arguments than its body.
            is_body = len(arguments) == len(inner.in_avals) and inner is not eqn.params.get("cond_jaxpr")
            return self.rewritten(inner, arguments if is_body else [None] * len(inner.in_avals))

        return with_inner(eqn, rewrite)


def _scan(eqn: JaxprEqn, length: int) -> JaxprEqn:
    """The iterations of a `while`, without its condition."""
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


def _nothing(eqn: JaxprEqn, known: Sequence[Known]) -> list[Known]:
    return []


def _of_control_flow(eqn: JaxprEqn, known: Sequence[Known]) -> list[Known]:
    body = bodies(eqn)[0]
    rows = [None] * len(known[body.operands.stacks])
    return [*known[body.operands.constants], *fixed_carries(body, known), *rows]


def _of_tile_map(eqn: JaxprEqn, known: Sequence[Known]) -> list[Known]:
    return [None if is_stacked else x for x, is_stacked in zip(known, eqn.params["stacked"], strict=True)]


# Known arguments of the jaxprs of an equation, from its known operands.
_KNOWN_INSIDE: dict[str, Callable[[JaxprEqn, Sequence[Known]], list[Known]]] = {
    **dict.fromkeys(CONTROL_FLOW, _of_control_flow),
    "tile_map": _of_tile_map,
}
