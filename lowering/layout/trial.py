"""What an operation is charged in one layout or another, tried on a graph of its own.

An estimate leaves out what depends on where operands lie: fragments, and copies on the tile that make a scattered
operand contiguous. A trial adds the operation to a scratch graph that knows where its operands lie, and asks the cost
model. It takes a few milliseconds, so it is for the last few candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ipujax.runtime.compile import leaf_costs, program_cycles
from ipujax.runtime.graph import Graph, Sequence as ProgramSequence
from ipujax.runtime.memory import code_of_exchanges

Candidate = TypeVar("Candidate")


def charged_cycles(graph: Graph, add: Callable[[Graph, ProgramSequence], object]) -> int:
    """Cycles of what `add` adds to a graph and a program.

    Args:
        graph: holds the target and the mappings of the operands; not changed.
        add: adds the operation; operands that lie nowhere yet it may place.
    """
    return program_cycles(*_tried(graph, add))


def charged_price(graph: Graph, add: Callable[[Graph, ProgramSequence], object]) -> int:
    """The same with what the exchange code of the fullest tile is worth; arguments as `charged_cycles`."""
    scratch, prog = _tried(graph, add)
    costs = leaf_costs(scratch, prog)
    code_bytes = int(code_of_exchanges(costs.values(), graph.target).max(initial=0))
    return program_cycles(scratch, prog, costs=costs) + int(graph.byte_price_cycles * code_bytes)


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
