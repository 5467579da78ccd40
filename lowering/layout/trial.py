"""What an operation is charged in one layout or another, tried on a graph of its own.

An estimate leaves out what depends on where operands lie: fragments, and copies on the tile that make a scattered
operand contiguous. A trial adds the operation to a scratch graph that knows where its operands lie, and asks the cost
model. It takes a few milliseconds, so it is for the last few candidates. What is to be remembered is tried on a graph
that holds nothing but the operands, described as `Operand`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ipujax.lowering.layout.mapping import map_linearly
from ipujax.runtime.compile import leaf_costs, program_cycles
from ipujax.runtime.graph import Graph, Sequence as ProgramSequence
from ipujax.runtime.memory import code_of_exchanges
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Affine, Group, Tensor, TileMapping, Variable, element_bytes

Candidate = TypeVar("Candidate")


def charged_cycles(graph: Graph, add: Callable[[Graph, ProgramSequence], object]) -> int:
    """Cycles of what `add` adds to a graph and a program.

    Args:
        graph: holds the target and the mappings of the operands; not changed.
        add: adds the operation; operands that lie nowhere yet it may place.
    """
    return program_cycles(*_tried(graph, add))


def charged_price(graph: Graph, add: Callable[[Graph, ProgramSequence], object], placed: Sequence[Tensor] = ()) -> int:
    """The same with what the exchange code of the fullest tile is worth; arguments as `charged_cycles`.

    Args:
        graph: as there.
        add: as there.
        placed: operands whose memory counts too, as much as the fullest tile gets of what the operation places.
    """
    scratch, prog = _tried(graph, add)
    costs = leaf_costs(scratch, prog)
    code_bytes = int(code_of_exchanges(costs.values(), graph.target).max(initial=0))
    new = {v for tensor in placed for v in tensor.variables() if v in scratch.mappings and v not in graph.mappings}
    data_bytes = sum(_most_bytes(scratch, variable) for variable in new)
    return program_cycles(scratch, prog, costs=costs) + int(graph.byte_price_cycles * (code_bytes + data_bytes))


def _most_bytes(graph: Graph, variable: Variable) -> int:
    """Bytes of a variable on the tile that has most of it."""
    elements = graph.mappings[variable].elements_per_tile(graph.target.num_tiles)
    return int(elements.max(initial=0)) * element_bytes(variable.dtype)


def _tried(graph: Graph, add: Callable[[Graph, ProgramSequence], object]) -> tuple[Graph, ProgramSequence]:
    scratch, prog = Graph(graph.target, byte_price_cycles=graph.byte_price_cycles), ProgramSequence()
    scratch.mappings = dict(graph.mappings)
    add(scratch, prog)
    return scratch, prog


def least_charged(
    candidates: Sequence[Candidate],
    bounds: Sequence[float],
    charge: Callable[[Candidate], int],
    is_exact: Sequence[bool] = (),
) -> Candidate:
    """The candidate that is charged least, of equals the one of least bound; one alone is taken without a trial.

    Args:
        candidates: what to choose from, one or more.
        bounds: of each candidate what it costs at least; one that is not below the least charge found is not tried.
        charge: cycles of a candidate.
        is_exact: of each candidate whether its bound is what it costs, so that a trial can be saved; none when empty.
    """
    exact = is_exact or [False] * len(candidates)
    order = sorted(range(len(candidates)), key=lambda n: bounds[n])
    best, least = order[0], float("inf")
    if len(order) == 1 or exact[best]:
        return candidates[best]
    for number in order:
        if bounds[number] >= least:
            break
        cycles = bounds[number] if exact[number] else charge(candidates[number])
        if cycles < least:
            best, least = number, cycles
    return candidates[best]


@dataclass(frozen=True, slots=True)
class Operand:
    """What an operand's part in a cost depends on.

    Args:
        shape: of the operand.
        dtype: of the operand.
        view: shape of the variable it is a view of, offset and dimensions of the view; None if not of one variable.
        mapping: where that variable lies; None while that is open.
    """

    shape: tuple[int, ...]
    dtype: Any
    view: tuple[tuple[int, ...], int, tuple[Group, ...]] | None
    mapping: TileMapping | None

    @staticmethod
    def of(graph: Graph, tensor: Tensor) -> Operand:
        """Describes an operand of a graph."""
        affine = tensor.affine
        if affine is None:
            return Operand(tensor.shape, tensor.dtype, None, None)
        view = affine.variable.shape, affine.offset, affine.dims
        return Operand(tensor.shape, tensor.dtype, view, graph.mappings.get(affine.variable))

    def add_to(self, graph: Graph) -> Tensor:
        """Adds such an operand; one of several variables lies linearly."""
        if self.view is None:
            tensor = graph.add_variable(self.shape, self.dtype, "operand")
            map_linearly(graph, tensor)
            return tensor
        shape, offset, dims = self.view
        (variable,) = graph.add_variable(shape, self.dtype, "operand", self.mapping).variables()
        return Tensor(Affine(variable, offset, dims), self.shape, self.dtype)


def least_charged_alone(
    candidates: Sequence[Candidate],
    bounds: Sequence[float],
    operands: Sequence[Operand],
    add: Callable[[Graph, Sequence[Tensor], Candidate, ProgramSequence], object],
    target: Target,
    byte_price: float,
) -> Candidate:
    """The same where nothing counts but the operands.

    Args:
        candidates: as `least_charged` takes them.
        bounds: as there.
        operands: the operands.
        add: adds the operation on tensors for them to a graph and a program.
        target: the machine.
        byte_price: cycles that a byte of exchange code on the fullest tile is worth.
    """

    def charge(candidate: Candidate) -> int:
        graph = Graph(target, byte_price_cycles=byte_price)
        tensors = [operand.add_to(graph) for operand in operands]
        return charged_price(graph, lambda scratch, prog: add(scratch, tensors, candidate, prog))

    return least_charged(candidates, bounds, charge)
