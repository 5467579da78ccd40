"""Trials: the cost of an operation in one layout or another, from the cost model on a scratch graph.

An estimate leaves out costs that depend on the mappings of operands: fragments, and copies on the tile that make a
scattered operand contiguous. A trial takes a few milliseconds, so it is for the last few candidates. A choice that
is cached is tried on a graph that has nothing but the operands, described as `Operand`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ipujax.lowering.layout.mapping import map_linearly
from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.compile import Cost, leaf_costs, program_cycles
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.graph import Builder, Graph, Leaf, Sequence as ProgramSequence
from ipujax.runtime.memory import code_of_exchanges, memory_report
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Affine, Group, Tensor, TileMapping, Variable, element_bytes

Candidate = TypeVar("Candidate")


def trial_cycles(graph: Graph, add: Callable[[Builder], object]) -> int:
    """Cycles of the steps that `add` adds to a copy of a graph; it may map unmapped operands."""
    return program_cycles(*_scratch(graph, add))


def weighted_cost(graph: Graph, add: Callable[[Builder], object], placed: Sequence[Tensor] = ()) -> int:
    """Cycles of the steps that `add` adds, plus the cost of the bytes on the fullest tile.

    Args:
        graph: target, mappings and cost per byte; not changed.
        add: adds the operation; it may map unmapped operands.
        placed: operands whose memory counts besides exchange code: the bytes the operation maps to the fullest tile.
    """
    scratch, prog = _scratch(graph, add)  # a copy of the graph, to which `add` has added the operation, and its program
    placed_variables = {
        v for tensor in placed for v in tensor.variables() if v in scratch.mappings and v not in graph.mappings
    }
    costs = leaf_costs(scratch, prog)
    return _cycles_and_bytes(scratch, prog, costs, sum(_most_bytes(scratch, v) for v in placed_variables))


def weighted_cost_with_data(graph: Graph, add: Callable[[Builder], object]) -> int:
    """Cycles of the steps that `add` adds, plus the cost of all their bytes on the fullest tile.

    These are exchange code, the variables that the operation adds or maps, and the buffers of the step that has most:
    what tells apart plans that store different values, or move different operands.

    Args:
        graph: target, mappings and cost per byte; not changed.
        add: adds the operation; it may map unmapped operands.
    """
    scratch, prog = _scratch(graph, add)
    costs = leaf_costs(scratch, prog)
    added_variables = scratch.mappings.keys() - graph.mappings.keys()
    buffer_bytes = max((_most_buffer_bytes(cost) for cost in costs.values()), default=0)
    data_bytes = sum(_most_bytes(scratch, v) for v in added_variables) + buffer_bytes
    return _cycles_and_bytes(scratch, prog, costs, data_bytes)


def _cycles_and_bytes(scratch: Graph, prog: ProgramSequence, costs: Mapping[Leaf, Cost], data_bytes: int) -> int:
    code_bytes = int(code_of_exchanges(costs.values(), scratch.target).max(initial=0))
    return program_cycles(scratch, prog, costs=costs) + int(scratch.byte_cost_cycles * (code_bytes + data_bytes))


def _most_buffer_bytes(cost: Cost) -> int:
    """Bytes on the fullest tile that a step of vertices receives, and of the copies that order its operands."""
    if not isinstance(cost, ComputeSetCost):
        return 0
    return int((cost.before.received_bytes + cost.rearrangement_bytes).max(initial=0))


def _most_bytes(graph: Graph, variable: Variable) -> int:
    elements = graph.mappings[variable].elements_per_tile(graph.target.num_tiles)
    return int(elements.max(initial=0)) * element_bytes(variable.dtype)


def _scratch(graph: Graph, add: Callable[[Builder], object]) -> tuple[Graph, ProgramSequence]:
    scratch = Graph(graph.target, byte_cost_cycles=graph.byte_cost_cycles)
    prog = ProgramSequence()
    scratch.mappings = dict(graph.mappings)
    add(Builder(scratch, prog, "trial"))
    return scratch, prog


def choose_cheapest(
    candidates: Sequence[Candidate],
    bounds: Sequence[float],
    cost: Callable[[Candidate], int],
    is_exact: Sequence[bool] = (),
) -> Candidate:
    """Candidate of lowest cost, of equals the one of lowest bound; a single candidate is not tried.

    Args:
        candidates: one or more candidates.
        bounds: lower bound of the cost of each; one that is not below the lowest cost so far is not tried.
        cost: cost of a candidate.
        is_exact: for each candidate whether its bound is its cost, which saves the trial; empty for none.
    """
    has_exact_bound = is_exact or [False] * len(candidates)
    order = sorted(range(len(candidates)), key=lambda n: bounds[n])
    best = order[0]
    least_cost = float("inf")
    if len(order) == 1 or has_exact_bound[best]:
        return candidates[best]
    for number in order:
        # Rising bounds: no later candidate can cost less.
        if bounds[number] >= least_cost:
            break
        candidate_cost = bounds[number] if has_exact_bound[number] else cost(candidates[number])
        if candidate_cost < least_cost:
            best = number
            least_cost = candidate_cost
    return candidates[best]


@dataclass(frozen=True, slots=True)
class Operand:
    """Properties of an operand that its part in a cost depends on."""

    shape: tuple[int, ...]
    dtype: Any
    # Shape of its variable, offset and dimensions of the view; None if it is not of one variable
    view: tuple[tuple[int, ...], int, tuple[Group, ...]] | None
    mapping: TileMapping | None  # mapping of that variable; None while unmapped

    @staticmethod
    def of(graph: Graph, tensor: Tensor) -> Operand:
        affine = tensor.affine
        if affine is None:
            return Operand(tensor.shape, tensor.dtype, view=None, mapping=None)
        view = affine.variable.shape, affine.offset, affine.dims
        return Operand(tensor.shape, tensor.dtype, view, graph.mappings.get(affine.variable))

    def add_to(self, graph: Graph) -> Tensor:
        """Adds a tensor that costs as much as the described operand to a graph in which an operation is tried.

        A view of several variables is replaced by one variable, mapped linearly.
        """
        if self.view is None:
            tensor = graph.add_variable(self.shape, self.dtype, "operand")
            map_linearly(graph, tensor)
            return tensor
        shape, offset, dims = self.view
        (variable,) = graph.add_variable(shape, self.dtype, "operand", self.mapping).variables()
        return Tensor(Affine(variable, offset, dims), self.shape, self.dtype)


def choose_cheapest_alone(
    candidates: Sequence[Candidate],
    bounds: Sequence[float],
    operands: Sequence[Operand],
    add: Callable[[Builder, Sequence[Tensor], Candidate], object],
    target: Target,
    byte_cost: float,
    *,
    asks_for_least: bool = False,
) -> Candidate:
    """Candidate of lowest cost on a graph that has only the operands, so that the choice holds in any graph.

    Args:
        candidates: one or more candidates.
        bounds: lower bound of the cost of each.
        operands: the operands.
        add: adds the operation on tensors for the operands.
        target: target of the graph.
        byte_cost: cost per byte of exchange code on the fullest tile, in cycles.
        asks_for_least: whether the cost is bytes of the fullest tile, of equal ones the first, and `bounds` are unused.
    """

    def cost(candidate: Candidate) -> int:
        graph = Graph(target, byte_cost_cycles=byte_cost)
        tensors = [operand.add_to(graph) for operand in operands]
        measure = _trial_bytes if asks_for_least else weighted_cost
        return measure(graph, lambda builder: add(builder, tensors, candidate))

    return choose_cheapest(candidates, [0.0] * len(bounds) if asks_for_least else bounds, cost)


def _trial_bytes(graph: Graph, add: Callable[[Builder], object]) -> int:
    """Bytes of the fullest tile, operands and code included, of the steps that `add` adds, by the memory model."""
    scratch, prog = _scratch(graph, add)
    report = memory_report(scratch, prog, EffectsOf(scratch), leaf_costs(scratch, prog))
    return int(report.least_bytes.max())
