"""Divides what each step of a run does among the lines, layers and operations that it comes from.

    step ::= one place: all of it
           | vertex groups: by their active cycles; the vertices of a group by the cycles of its parts
    in a function: each of these by how often the function is called from where, in the layer of the call

Input: an `Executable`, the program that ran, and its `Timeline`. Output: `Share`s of each step, with whole weights.
`divided` cuts a whole number by such weights so that the parts add up to it.
Limits: decisions that are data count as taken equally often from all calls of a function.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.graph import (
    Call,
    Decision,
    Execute,
    Function,
    Leaf,
    Program,
    VertexGroup,
    run_counts,
)
from ipujax.runtime.tensor import MERGED_WITH, Origin, compose


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A share of one step.

    Args:
        origin: where it comes from, in the layer of the call if the step is in a function.
        name: debug name.
        weight: of it among the shares of the step.
        code: fraction of the step's code that it has: by weight in a function, equally among its calls.
        group: number of the vertex group that does it; 0 where that is not told apart.
    """

    origin: Origin
    name: str
    weight: int
    code: float = 1.0
    group: int = 0


def divided(total: int, weights: Sequence[int]) -> list[int]:
    """Cuts a whole number in proportion to weights, by largest remainder: the parts add up to it.

    Args:
        total: from 0.
        weights: from 0, not all 0.
    """
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    missing = total - sum(parts)
    if missing:
        remainders = [total * weight % whole for weight in weights]
        by_remainder = sorted(range(len(weights)), key=lambda n: -remainders[n])
        for number in by_remainder[:missing]:
            parts[number] += 1
    return parts


class Attribution:
    """The shares of all steps of one run.

    Args:
        executable: what ran.
        program: the part of it that ran.
    """

    def __init__(self, executable: Executable, program: Program) -> None:
        self._executable = executable
        self._calls = _calls_of_steps(program)

    def shares(self, node: Program) -> list[Share]:
        """The shares of a step or a decision; their weights are not all 0."""
        inside = self.inside(node)
        calls = self._calls.get(node, {})
        if calls.keys() <= {_TOP}:
            return inside
        return [
            replace(
                part,
                origin=compose(call[0], part.origin),
                weight=part.weight * times,
                code=part.code / len(calls),
            )
            for call, times in calls.items()
            for part in inside
        ]

    def inside(self, node: Program) -> list[Share]:
        """The shares of a step in the function that holds it, whatever calls that; their weights are not all 0."""
        origin, name = place(node)
        cost = self._executable.costs[node] if isinstance(node, Execute) else None
        if not isinstance(node, Execute) or not isinstance(cost, ComputeSetCost):
            return [Share(origin, operation(name, origin), 1)]
        groups = self._executable.graph.groups[node.compute_set]
        weights = cost.active_by_group if any(cost.active_by_group) else [1] * len(groups)
        scale = lcm(*(_part_cycles(group) for group in groups))  # groups keep their proportions, in whole numbers
        shares = [
            share
            for number, (group, weight) in enumerate(zip(groups, weights, strict=True))
            for share in _of_group(group, number, weight * scale // _part_cycles(group), origin, name)
        ]
        whole = sum(share.weight for share in shares)
        shares = [replace(share, code=share.weight / whole) for share in shares]
        return shares or [Share(origin, operation(name, origin), 1)]


def _part_cycles(group: VertexGroup) -> int:
    """What the weights of the parts of a group add up to."""
    return sum(part.cycles for part in group.parts()) or 1


def _of_group(group: VertexGroup, number: int, weight: int, outer: Origin, name: str) -> Iterator[Share]:
    """The shares of a vertex group: its equations, where these come from several places."""
    origin = outer if group.origin == Origin() else group.origin
    if not group.parts():
        yield Share(origin, operation(group.name or name, origin), weight, group=number)
    for part in group.parts():
        yield Share(part.origin, part.name, weight * part.cycles, group=number)


def operation(name: str, origin: Origin) -> str:
    """A debug name without the name stack of its equation, which the layer and the part of training tell.

    What collectives of other lines were merged into it stays in the name.
    """
    scope = origin.path.rpartition("/")[2]
    merged = f", {scope}" if scope.startswith(MERGED_WITH) else ""
    return (name.removeprefix(f"{origin.path}/") if origin.path else name) + merged


def place(node: Program) -> tuple[Origin, str]:
    """Where a step comes from, and its debug name."""
    if isinstance(node, Leaf):
        return node.shown_origin, node.label
    assert isinstance(node, Decision)
    return node.origin, "decision"


# Origins of calls that differ in their layer are equal, so it stands beside them.
_Call = tuple[Origin, str, str, tuple[str, ...]]
_TOP: _Call = (Origin(), "", "", ())  # outside of functions


def _call(origin: Origin) -> _Call:
    return origin, origin.layer, origin.part, origin.names


def _calls_of_steps(program: Program) -> Mapping[Program, Mapping[_Call, int]]:
    """For each step from which calls it runs, and how often."""
    bodies: dict[Function | None, _Body] = {None: _body(program)}
    order = _functions_in_order(program, bodies)
    calls: dict[Function | None, Counter[_Call]] = defaultdict(Counter)
    calls[None][_TOP] = 1
    steps: dict[Program, Counter[_Call]] = defaultdict(Counter)
    for function in (None, *order):
        body = bodies[function]
        for outer, times in calls[function].items():
            for node, runs in body.steps.items():
                steps[node][outer] += times * runs
            for (callee, (origin, *_)), runs in body.calls.items():
                calls[callee][outer if origin == Origin() else _call(compose(outer[0], origin))] += times * runs
    return steps


@dataclass(slots=True)
class _Body:
    """How often the steps of a function run, and what it calls from where, in one run of it."""

    steps: Counter[Program]
    calls: Counter[tuple[Function, _Call]]


def _body(program: Program) -> _Body:
    body = _Body(Counter(), Counter())
    for node, times in run_counts(program, into_calls=False).items():
        if isinstance(node, Call):
            body.calls[node.function, _call(node.origin)] += times
        elif isinstance(node, (Leaf, Decision)):
            body.steps[node] += times
    return body


def _functions_in_order(program: Program, bodies: dict[Function | None, _Body]) -> list[Function]:
    """All functions, callers before callees; fills `bodies`."""
    done: list[Function] = []

    def visit(body: _Body) -> None:
        for function, _ in body.calls:
            if function not in bodies:
                bodies[function] = _body(function.body)
                visit(bodies[function])
                done.append(function)

    visit(bodies[None])
    return done[::-1]
