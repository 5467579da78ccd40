"""Longest dependence path of a function: compute sets that follow one another in every plan.

Input: a jaxpr, weights of a target. Output: the longest `Path`, a lower bound for the time of any one element.

A value has the path of the element of it that is ready first. Each compute set takes a sync and a vertex. Arguments:

    product       its vertices do nothing else, and read what an earlier compute set wrote: one of its own
    elementwise   fused into one vertex with others before it, not with the product or reduction whose result it reads
    reduction     ends the vertex of elementwise operations that it reduces
    loop          runs each iteration by itself, so that the first vertex of one is in no vertex of the one before; but
                  the terms of a carry that is their sum may be added at once
    exchange      of two products or reductions one behind the other, either some element moves to another tile, or one
                  tile computes all elements that the second reads for one result. The latter is no shorter if these
                  take as long as an exchange. One exchange may serve both (a sum of partial results on all tiles); not
                  where already the elementwise operations between them take as long, which all are behind the first

Views, casts and look-ups are passed through. A joined or padded value is ready with its first part. Values of unknown
primitives, and of loops whose trip count is data, are ready at once.
Limits: of a loop's carries, a path through several that do not grow alike is not found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ipujax.lowering.jax_compat import ClosedJaxpr, DropVar, JaxprEqn, Var, shape_of
from ipujax.lowering.jaxpr import Body, bodies, scan_body, sum_carries
from ipujax.lowering.least_work.equation_floor import EquationCost
from ipujax.lowering.popops.vertices.reducers import LAUNCH_CYCLES
from ipujax.runtime.target import Target


class Path(NamedTuple):
    """A path, compared by its cycles first.

    Args:
        cycles: of all of it, as weighted.
        supersteps: compute sets.
        exchanges: exchanges between them.
        vertex_cycles: of the smallest vertex of each.
    """

    cycles: float = 0.0
    supersteps: int = 0
    exchanges: int = 0
    vertex_cycles: float = 0.0

    def plus(self, other: Path) -> Path:
        """Return this path with another behind it: sums of cycles, supersteps and exchanges."""
        cycles, supersteps, exchanges, vertex_cycles = other
        return Path(
            self.cycles + cycles,
            self.supersteps + supersteps,
            self.exchanges + exchanges,
            self.vertex_cycles + vertex_cycles,
        )

    def times(self, count: int) -> Path:
        """Return the path of so many repetitions."""
        return Path(self.cycles * count, self.supersteps * count, self.exchanges * count, self.vertex_cycles * count)


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a path.

    Args:
        target: the machine of one replica.
        tile_share: weight of the cycles of the path's own vertices; the rest of 1 is that of the mean tile's work, to
            which each compute set adds a smallest vertex.
        smallest_cycles: of the smallest vertex of any compute set.
        exchange_cycles: of the shortest exchange.
        costs: cost of each equation without jaxprs, by its identity.
        known: paths to the carries of a loop through some of them, by the identity of its jaxpr and their numbers.
        compute_sets: paths of one compute set, by the cycles of its vertex.
    """

    target: Target
    tile_share: float
    smallest_cycles: float
    exchange_cycles: float
    costs: Mapping[int, EquationCost]
    known: dict[tuple[int, frozenset[int]], list[dict[int, Path]]] = field(default_factory=dict)
    compute_sets: dict[float, Path] = field(default_factory=dict)

    def compute_set(self, vertex_cycles: float) -> Path:
        """Return the path of one compute set with a vertex."""
        if vertex_cycles not in self.compute_sets:
            vertex = (1 - self.tile_share) * self.smallest_cycles + self.tile_share * vertex_cycles
            path = Path(self.target.internal_sync_cycles + vertex, 1, 0, vertex_cycles)
            self.compute_sets[vertex_cycles] = path
        return self.compute_sets[vertex_cycles]

    @property
    def exchange(self) -> Path:
        """The path of one exchange."""
        return Path(self.exchange_cycles, 0, 1, 0.0)

    def longer(self, vertex_cycles: float) -> Path:
        """Return the path of further cycles of the same vertex."""
        return Path(self.tile_share * vertex_cycles, 0, 0, vertex_cycles)


class Ready(NamedTuple):
    """Path to the element of a value that is ready first.

    All but the first two tell whether a product or reduction behind it needs an exchange, see `_combined`. They are of
    two places on the path, given as the cycles of its vertices up to there: before the last product or reduction on
    it, and behind that one's result.

    Args:
        path: the longest path to it.
        is_open: whether a vertex of elementwise operations computes it, which may compute those that follow too.
        since: the place before the last product or reduction; None if there is none, or an exchange behind it.
        element_cycles: cycles in which a tile computes one element from there on.
        result_since: the place behind the result of that product or reduction; None as above.
        mapped_cycles: cycles in which a tile computes one element from there on.
    """

    path: Path = Path()
    is_open: bool = False
    since: float | None = None
    element_cycles: float = 0.0
    result_since: float | None = None
    mapped_cycles: float = 0.0


_Value = Ready | None  # None: nothing is known to be before it


def longest_path(jaxpr: ClosedJaxpr, weights: Weights) -> Path:
    """Return the longest path of one evaluation of a jaxpr."""
    return _evaluate(jaxpr, [Ready()] * len(jaxpr.in_avals), weights).longest


class _Evaluated(NamedTuple):
    """Results of a jaxpr, and the longest path in it."""

    results: list[_Value]
    longest: Path


def _evaluate(jaxpr: ClosedJaxpr, inputs: Sequence[_Value], weights: Weights) -> _Evaluated:
    """Return when the results of a jaxpr are ready, and the longest path in it.

    Args:
        jaxpr: its equations are evaluated in order.
        inputs: when each argument is ready, None where nothing is known to be before it.
        weights: cycles of the compute set of each equation, and of an exchange.
    """
    body = jaxpr.jaxpr
    values: dict[Any, _Value] = dict(zip(body.invars, inputs, strict=True))
    longest = max((x.path for x in inputs if x is not None), default=Path())
    for eqn in body.eqns:
        operands = [values.get(atom) if isinstance(atom, Var) else None for atom in eqn.invars]
        evaluated = _equation(eqn, operands, weights)
        longest = max(longest, evaluated.longest)
        for var, value in zip(eqn.outvars, evaluated.results, strict=True):
            if value is not None:
                longest = max(longest, value.path)  # paths are compared by their cycles
            if not isinstance(var, DropVar):
                values[var] = value
    results = [values.get(atom) if isinstance(atom, Var) else None for atom in body.outvars]
    return _Evaluated(results, longest)


def _equation(eqn: JaxprEqn, operands: Sequence[_Value], weights: Weights) -> _Evaluated:
    """Return when the results of an equation are ready, None where nothing is known, and the longest path inside of it.

    Only equations with jaxprs inside have a path there; that to the results is part of these.
    """
    name = eqn.primitive.name
    if name == "scan":
        return _scan(eqn, operands, weights)
    if name == "while":  # the trip count is data: there may be no iteration
        return _Evaluated([None] * len(eqn.outvars), Path())
    if inside := bodies(eqn):
        return _alternatives(inside, operands, weights)
    if name == "optimization_barrier":
        return _Evaluated(list(operands), Path())
    result = None
    if any(operand is not None for operand in operands):
        result = _result(eqn, operands, weights)
    return _Evaluated([result] * len(eqn.outvars), Path())


def _result(eqn: JaxprEqn, operands: Sequence[_Value], weights: Weights) -> _Value:
    """Return when the first element of any result of an equation is ready; None where nothing is known.

    What an equation adds to the path of its operands depends on the kind of its cost, see the head of this module.
    """
    cost = weights.costs[id(eqn)]
    values = [operand for operand in operands if operand is not None]
    match cost.kind:
        case "product":
            vertex = weights.compute_set(cost.vertex_cycles)
            return _last([_combined(x, x.path.plus(vertex), cost, weights) for x in values])
        case "reduction":
            return _last([_reduction(x, cost, weights) for x in values])
        case "map":
            return _mapped(eqn, operands, cost, weights)
        case "window":
            last = _last(values)
            return last and Ready(last.path.plus(weights.compute_set(cost.vertex_cycles)))
        case "view":
            return _last(values)
        case "repeated":  # all elements of the result may be of one element: what one costs is no part of each
            last = _last(values)
            return last and last._replace(element_cycles=0.0, mapped_cycles=0.0)
        case "joined":
            return _joined(operands)
        case "written":  # elements of the first operand where no others are written
            return _first([operands[0], _last(operands[1:])])
    return None


def _first(operands: Sequence[_Value]) -> _Value:
    """Return when the first of several values is ready, for a result with elements of any of them.

    None where one may be ready at once.
    """
    values = [operand for operand in operands if operand is not None]
    if len(values) < len(operands) or not values:
        return None
    return Ready(min(x.path for x in values), any(x.is_open for x in values))


def _joined(operands: Sequence[_Value]) -> _Value:
    """Return when the first element of a joined value, such as a concatenation, is ready: the first of any part.

    None where nothing is known. Parts may be computed from one element, so that its cycles count once for all of them.
    """
    first = _first(operands)
    values = [operand for operand in operands if operand is not None]
    if first is None:
        return None

    def earliest(sinces: Sequence[float | None]) -> float | None:
        """Return a place on the path of the joined value, as far from its end as any operand's is from that of its own.

        `sinces` are these places of the operands, see `Ready`; None if one of them is.
        """
        behind = [x.path.vertex_cycles - since for x, since in zip(values, sinces, strict=True) if since is not None]
        return first.path.vertex_cycles - max(behind) if len(behind) == len(values) else None

    # One element of each part may be computed from the same: each counts only a share of these cycles.
    return first._replace(
        since=earliest([x.since for x in values]),
        element_cycles=min(x.element_cycles for x in values) / len(values),
        result_since=earliest([x.result_since for x in values]),
        mapped_cycles=min(x.mapped_cycles for x in values) / len(values),
    )


def _last(operands: Sequence[_Value]) -> _Value:
    """Return when the last of several values is ready, for a result whose elements each read an element of all."""
    values = [operand for operand in operands if operand is not None]
    if len(values) < 2:
        return values[0] if values else None
    return max(values, key=lambda x: (x.path, not x.is_open, x.element_cycles))


def _mapped(eqn: JaxprEqn, operands: Sequence[_Value], cost: EquationCost, weights: Weights) -> _Value:
    """Return when the result of an elementwise equation is ready.

    It is computed in the vertex of the operand that is ready last, if that is elementwise too (`is_open`), else in a
    compute set of its own.
    """
    shape = shape_of(eqn.outvars[0])
    vertex = weights.compute_set(cost.vertex_cycles)
    results = [
        Ready(
            path=operand.path if operand.is_open else operand.path.plus(vertex),
            is_open=True,
            since=operand.since,
            # An element of an operand that is repeated is computed once for several of the result.
            element_cycles=cost.element_cycles + (operand.element_cycles if shape_of(atom) == shape else 0.0),
            result_since=operand.result_since,
            mapped_cycles=cost.element_cycles + (operand.mapped_cycles if shape_of(atom) == shape else 0.0),
        )
        for atom, operand in zip(eqn.invars, operands, strict=True)
        if operand is not None
    ]
    return _last(results)


def _reduction(operand: Ready, cost: EquationCost, weights: Weights) -> Ready:
    """Return the result of a reduction, which the vertex that computes its operand may be part of."""
    alone = cost.vertex_cycles
    added = weights.longer(alone - LAUNCH_CYCLES) if operand.is_open else weights.compute_set(alone)
    return _combined(operand, operand.path.plus(added), cost, weights)


def _combined(operand: Ready, path_through: Path, cost: EquationCost, weights: Weights) -> Ready:
    """Return the result of a product or reduction, which reads several elements of an operand for each of its own.

    If none of those moves, one tile computes all in the vertices of the path, which are as much longer. Where that
    takes as long as an exchange, the exchange is part of the path.

    Args:
        operand: when the operand is ready.
        path_through: its path with the vertex of the product or reduction.
        cost: cost of the product or reduction; `read` is the number of elements that it reads for each of its own.
        weights: weights of vertices and exchanges.
    """
    before = operand.path.vertex_cycles
    # Two places on the path, see `Ready`: before the last product or reduction, and behind its result.
    for since, cycles in ((operand.since, operand.element_cycles), (operand.result_since, operand.mapped_cycles)):
        # One tile would take `cost.read * cycles` from there, in the place of the path's own `before - since`.
        if since is not None and weights.tile_share * (cost.read * cycles - before + since) >= weights.exchange_cycles:
            path = path_through.plus(weights.exchange)
            return Ready(path, result_since=path.vertex_cycles)
    return Ready(
        path_through, since=before, element_cycles=cost.element_cycles, result_since=path_through.vertex_cycles
    )


def _alternatives(inside: Sequence[Body], operands: Sequence[_Value], weights: Weights) -> _Evaluated:
    """Return the results of a call, or of branches, of which the shortest may run."""
    branches = [_evaluate(body.jaxpr, body.of_operands(list(operands)), weights) for body in inside]
    results = [_first(values) for values in zip(*(branch.results for branch in branches), strict=True)]
    if len(branches) == 1:
        results = branches[0].results
    return _Evaluated(results, min(branch.longest for branch in branches))


def _scan(eqn: JaxprEqn, operands: Sequence[_Value], weights: Weights) -> _Evaluated:
    """Return when the results of a loop are ready: carries after its last iteration, stacks with their earliest row.

    The body is evaluated as its first iteration, as a later one, and as the last. None stands for a value that is ready
    at once, so that paths are lower bounds.
    """
    body = scan_body(eqn.params)
    length = eqn.params["length"]
    operands_of_carries = list(operands[body.operands.carries])
    inputs = body.of_operands(list(operands))
    if not length:  # carries as they are, and stacks without rows
        return _Evaluated([*operands_of_carries, *[None] * len(eqn.outvars[len(operands_of_carries) :])], Path())
    # Separate operands: no vertex of an iteration computes operations from before it, too.
    first = _evaluate(body.jaxpr, _separate(inputs), weights)
    rows = first.results[body.results.stacks]
    if length == 1:
        return _Evaluated([*first.results[body.results.carries], *rows], first.longest)
    # A carry that is not known to grow may be ready at once in a later iteration, and so may rows that read it alone.
    inputs[body.inputs.carries] = [None] * len(operands_of_carries)
    later_rows = _evaluate(body.jaxpr, _separate(inputs), weights).results[body.results.stacks]
    rows = [_first(pair) for pair in zip(rows, later_rows, strict=True)]
    # The last iteration reads the carries after all others.
    inputs[body.inputs.carries] = _grown(body, operands_of_carries, weights, length - 1)
    last = _evaluate(body.jaxpr, _separate(inputs), weights)
    return _Evaluated([*last.results[body.results.carries], *rows], max(first.longest, last.longest))


def _separate(inputs: Sequence[_Value]) -> list[_Value]:
    """Return the inputs of an iteration: none of its vertices is one of those before it."""
    return [x and x._replace(is_open=False) for x in inputs]


_TRIALS = 4  # sets of carries that are tried: first all, then without those that grow least
_ROUNDS = 8  # iterations that are evaluated, of which the first may take no exchange that all others do


def _grown(body: Body, begin: Sequence[_Value], weights: Weights, iterations: int) -> list[_Value]:
    """Return when the carries of a loop are ready after some iterations, None where no growth is known.

    `begin` is when they are before the first one.

    Paths through a set of carries alone are evaluated for some iterations. Iterations on carries that are ready later
    are as much later, so carries that all have grown by some path after so many iterations grow by it every so many.
    """
    grown: list[_Value] = [None] * len(begin)
    deepest = _last(begin)
    # Numbers of the carries that begin last: alone they may grow from a later begin than with the others.
    late = {n for n, x in enumerate(begin) if x is not None and deepest is not None and x.path == deepest.path}
    sums = set(sum_carries(body))  # whose terms may be added at once: they do not grow
    for chosen in (set(range(len(begin))), late):
        _grow(body, chosen - sums, begin, grown, weights, iterations)
    return grown


def _grow(
    body: Body, chosen: set[int], begin: Sequence[_Value], grown: list[_Value], weights: Weights, iterations: int
) -> None:
    """Enters in `grown` the growth of a set of carries, and of those of it that grow more, where it exceeds the known.

    Args:
        body: the loop's body.
        chosen: numbers of the carries.
        begin: when each carry is ready before the loop.
        grown: when each is known to be ready after the iterations, at least; changed.
        weights: weights of vertices and exchanges.
        iterations: number of iterations.
    """
    for _ in range(_TRIALS):
        rounds = _iterated(body, chosen, weights)
        # A carry without a path from the chosen ones does not grow; the others may have grown by it.
        while lost := {n for n in chosen if any(n not in paths for paths in rounds)}:
            chosen = chosen - lost
            rounds = _iterated(body, chosen, weights)
        if not chosen:
            break
        slowest = min(rounds[-1].values())  # by which all of them grow in `_ROUNDS` iterations
        path = slowest.times(iterations // _ROUNDS)
        if rest := iterations % _ROUNDS:
            path = path.plus(min(rounds[rest - 1].values()))
        first = _first([begin[n] for n in chosen])
        ready = Ready(path if first is None else first.path.plus(path))
        for n in chosen if path.cycles else ():
            before = grown[n]
            grown[n] = ready if before is None or ready.path > before.path else before
        chosen = {n for n in chosen if rounds[-1][n] > slowest}


def _iterated(body: Body, chosen: Set[int], weights: Weights) -> list[dict[int, Path]]:
    """Return the paths to carries after each of some iterations, through the chosen carries alone."""
    key = id(body.jaxpr), frozenset(chosen)
    if key not in weights.known:
        weights.known[key] = _after_iterations(body, chosen, weights)
    return weights.known[key]


def _after_iterations(body: Body, chosen: Set[int], weights: Weights) -> list[dict[int, Path]]:
    """Return for each of the first `_ROUNDS` iterations the paths to carries, by their number, from chosen ones alone.

    A chosen carry is ready at once before the first iteration; nothing is known to be before any other input.
    """
    inputs: list[_Value] = [None] * len(body.jaxpr.in_avals)
    begin = body.inputs.carries.start
    for n in chosen:
        inputs[begin + n] = Ready()
    rounds: list[dict[int, Path]] = []
    for _ in range(_ROUNDS):
        carries = _evaluate(body.jaxpr, _separate(inputs), weights).results[body.results.carries]
        rounds.append({n: value.path for n in chosen if (value := carries[n]) is not None})
        for n in chosen:
            inputs[begin + n] = carries[n]
    return rounds
