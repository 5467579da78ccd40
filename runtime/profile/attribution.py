"""Attribution: the shares of lines, layers and operations in each step of a run.

    step ::= one origin: all of it
           | vertex groups: by their cycles on the slowest tiles; the vertices of a group by the cycles of its parts
    in a function: each of these by the runs of each call of the function, in the layer of the call

Input: an `Executable` and the program of a run. Output: `Share`s of each step, with integer weights. `divide` splits an
integer by such weights into parts that add up to it.
Limits: decisions that are data are assumed to fall alike in all calls of a function.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

from ipujax.runtime.causes.variants import latency_of
from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.graph import (
    HOST_LATENCY,
    Call,
    Decision,
    Execute,
    Function,
    Leaf,
    Program,
    VertexGroup,
    VertexPart,
    run_counts,
)
from ipujax.runtime.tensor import MERGED_WITH, Origin, compose, without_transformations


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A share of one step.

    Args:
        origin: its origin, in the layer of the call if the step is in a function.
        name: debug name.
        weight: integer weight among the shares of the step.
        code: fraction of the step's code: by weight in a function, in equal parts among its calls.
        group: number of its vertex group; 0 in steps without vertex groups.
        is_latency: whether it is the latency of a host exchange, see `latency_of`, whose bytes and code are another's.
    """

    origin: Origin
    name: str
    weight: int
    code: float = 1.0
    group: int = 0
    is_latency: bool = False


def divide(total: int, weights: Sequence[int]) -> list[int]:
    """Split an integer in proportion to weights, not all 0, by largest remainder: the parts add up to it."""
    weight_sum = sum(weights)
    parts = [total * weight // weight_sum for weight in weights]
    missing = total - sum(parts)
    if missing:
        remainders = [total * weight % weight_sum for weight in weights]
        by_remainder = sorted(range(len(weights)), key=lambda n: -remainders[n])
        for number in by_remainder[:missing]:
            parts[number] += 1
    return parts


class Attribution:
    """The shares of all steps of one run.

    Args:
        executable: the compiled program.
        program: the program of the run, of the executable's steps.
    """

    def __init__(self, executable: Executable, program: Program) -> None:
        self._executable = executable
        self._calls = _calls_of_steps(program)
        self._own_shares: dict[Program, list[Share]] = {}

    def shares(self, node: Program) -> list[Share]:
        """Return the shares of a step or a decision; their weights are not all 0."""
        own_shares = self.own_shares(node)
        calls = self._calls.get(node, {})
        if calls.keys() <= {_TOP}:
            return own_shares
        return [
            replace(
                share,
                origin=compose(call[0], share.origin),
                weight=share.weight * times,
                code=share.code / len(calls),  # a function has its code once, however often it is called
            )
            for call, times in calls.items()
            for share in own_shares
        ]

    def own_shares(self, node: Program) -> list[Share]:
        """Return the shares of a step without the calls of its function; their weights are not all 0."""
        if node not in self._own_shares:
            self._own_shares[node] = self._find_own_shares(node)
        return self._own_shares[node]

    def _find_own_shares(self, node: Program) -> list[Share]:
        """Divide a compute set by the limiting cycles of its groups and their parts, a transfer by its latency."""
        origin, name = label(node)
        cost = self._executable.costs[node] if isinstance(node, Execute) else None
        if not isinstance(node, Execute) or not isinstance(cost, ComputeSetCost):
            latency = int(latency_of(self._executable, node).sum())
            if latency == 0:
                return [Share(origin, operation_name(name, origin), 1)]
            others = int(self._executable.steps[node].work.sum()) - latency
            of_latency = Share(HOST_LATENCY, "latency", latency, code=0.0, is_latency=True)
            return [Share(origin, operation_name(name, origin), max(1, others)), of_latency]
        groups = self._executable.graph.groups[node.compute_set]
        weights = cost.limiting_by_group if any(cost.limiting_by_group) else [1] * len(groups)
        parts_of_groups = [group.parts() for group in groups]
        cycles = [sum(part.cycles for part in parts) or 1 for parts in parts_of_groups]
        # Weights of parts differ in scale from group to group: with a common multiple all stay integers.
        scale = lcm(*cycles)
        parts = [
            (number, part)
            for number, (group, inside) in enumerate(zip(groups, parts_of_groups, strict=True))
            for part in _parts_of(group, inside, weights[number] * scale // cycles[number], origin, name)
        ]
        weight_sum = sum(part.weight for _, part in parts)
        shares = [Share(*part, code=part.weight / weight_sum, group=number) for number, part in parts]
        return shares or [Share(origin, operation_name(name, origin), 1)]


class _WeightedPart(NamedTuple):
    """A part of a vertex group: the origin and the name of its operation, and its weight in the compute set."""

    origin: Origin
    name: str
    weight: int


def _parts_of(
    group: VertexGroup, parts: Sequence[VertexPart], weight: int, outer: Origin, name: str
) -> Iterator[_WeightedPart]:
    """Yield the parts of a vertex group: its equations if they are known, else all of it."""
    if not parts:
        origin = outer if group.origin == Origin() else group.origin
        yield _WeightedPart(origin, operation_name(group.name or name, origin), weight)
    for part in parts:
        yield _WeightedPart(part.origin, part.name, weight * part.cycles)


def operation_name(name: str, origin: Origin) -> str:
    """Return a debug name without the name stack of its equation, which layer and part already tell."""
    # The end of the stack stays if it names collectives of other lines that were merged into the operation.
    scope = origin.path.rpartition("/")[2]
    merged = f", {scope}" if scope.startswith(MERGED_WITH) else ""
    return without_transformations(name.removeprefix(f"{origin.path}/") if origin.path else name) + merged


class StepLabel(NamedTuple):
    """The origin and the debug name of a step."""

    origin: Origin
    name: str


def label(node: Program) -> StepLabel:
    """Return the label of a step or a decision."""
    if isinstance(node, Leaf):
        return StepLabel(node.shown_origin, node.label)
    assert isinstance(node, Decision)
    return StepLabel(node.origin, "decision")


# Origins that differ in layer, part, names or places only compare equal, so these are part of the key.
_Call = tuple[Origin, str, str, tuple[str, ...], tuple[str, ...]]
_TOP: _Call = (Origin(), "", "", (), ())  # outside of functions


def _call(origin: Origin) -> _Call:
    return origin, origin.layer, origin.part, origin.names, origin.places


def _calls_of_steps(program: Program) -> Mapping[Program, Mapping[_Call, int]]:
    """Return, for each step, the number of its runs from each call: a function's steps count for all its callers."""
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
    """Runs of the steps of a function, and of its calls of other functions, in one run of it."""

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
    """Return all functions, callers before callees; add each to `bodies`."""
    finished: list[Function] = []

    def visit(body: _Body) -> None:
        for function, _ in body.calls:
            if function not in bodies:
                bodies[function] = _body(function.body)
                visit(bodies[function])
                finished.append(function)

    visit(bodies[None])
    return finished[::-1]
