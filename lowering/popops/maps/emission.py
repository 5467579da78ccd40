"""Replay of earlier, equal operations, such as those of equal layers: planned once, emitted again on other operands.

Input: an operation, its operands, and a function that plans and adds it. Output: its results. The first of equal
operations is planned; a later one, on operands of equal shapes and mappings, gets the same vertices on its own
variables. Emissions are stored in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from ipujax.runtime.exchange import geometry
from ipujax.runtime.graph import Builder, Execute, Graph, Sequence as ProgramSequence, VertexGroup
from ipujax.runtime.tensor import Tensor, Variable, substitute

Add = Callable[[ProgramSequence], list[Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Emission:
    """Vertices and variables that an operation added."""

    name: str  # debug name of the operation, a prefix of all others
    operands: tuple[Variable, ...]  # variables of its operands, each once
    variables: tuple[Variable, ...]  # variables that it added, except constants
    steps: tuple[tuple[str, tuple[VertexGroup, ...]], ...]  # name and vertices of each compute set, in order
    results: tuple[Tensor, ...]

    def replay(self, builder: Builder, operands: Sequence[Variable]) -> list[Tensor]:
        """Adds the recorded vertices on other operands; maps their unmapped variables as those of the first operands.

        `operands` are the variables of the new operands, in the order of those recorded. Returns the new results.
        """
        graph = builder.graph
        table = dict(zip(self.operands, operands, strict=True))
        for recorded, operand in table.items():
            if operand not in graph.mappings:
                graph.set_tile_mapping(operand, graph.mappings[recorded])
        for recorded in self.variables:
            title = self._renamed(recorded.name, builder.name)
            copy = graph.add_variable(recorded.shape, recorded.dtype, title, graph.mappings[recorded], recorded.monoid)
            (table[recorded],) = copy.variables()
        for title, groups in self.steps:  # name and vertex groups of each compute set
            compute_set = graph.add_compute_set(self._renamed(title, builder.name))
            graph.groups[compute_set] = [_substituted(group, table, graph) for group in groups]
            builder.prog.add(Execute(compute_set))
        return [substitute(x, table) for x in self.results]

    def _renamed(self, title: str, name: str) -> str:
        return name + title.removeprefix(self.name)


def emit_or_replay(builder: Builder, operation: Hashable, operands: Sequence[Tensor | None], add: Add) -> list[Tensor]:
    """Results of an operation, which is planned once for operands of equal views and mappings.

    Where it was planned before, its vertices are added again, with these operands in the place of the former ones.

    Args:
        builder: graph, program and debug name.
        operation: all that planning depends on besides operands and graph.
        operands: its operands, and tensors to overwrite; None in the place of a new result.
        add: plans the operation on these operands and adds it to a sequence; returns the results.
    """
    graph = builder.graph
    numbers: dict[Variable, int] = {}
    forms = [None if x is None else _planning_key(graph, x, numbers) for x in operands]
    if () in forms or not graph.maps_automatically:  # an operand without a key, or a plan by the user's mappings
        return add(builder.prog)
    # The next tile is part of the key: small variables and partial results start there.
    key = (operation, tuple(forms), graph.next_tile, graph.keeps_layouts)
    variables = tuple(numbers)
    emission: Emission | None = graph.emissions.get(key)
    if emission is not None:
        return emission.replay(builder, variables)
    first_variable = len(graph.variables)
    next_tile = graph.next_tile
    sequence = ProgramSequence()
    results = add(sequence)
    for step in sequence.children():
        builder.prog.add(step)
    emission = _record_emission(builder.into(sequence), variables, graph.variables[first_variable:], results)
    # One that takes the next tile would start another time at another.
    if emission is not None and graph.next_tile == next_tile:
        graph.emissions[key] = emission
    return results


def _planning_key(graph: Graph, tensor: Tensor, numbers: dict[Variable, int]) -> tuple[object, ...]:
    """Features of a tensor that planning depends on; empty where a list of elements is among them.

    `numbers`, by which variables are told apart, gets those of the tensor that are new.
    """
    view = geometry(tensor)
    variables = tensor.variables()
    if view is None:
        return ()
    variable_numbers = tuple(numbers.setdefault(v, len(numbers)) for v in variables)
    constants = tuple(v for v in variables if v.is_constant)
    return view, tensor.dtype, variable_numbers, constants, tuple(map(graph.mappings.get, variables))


def _record_emission(
    builder: Builder, operands: tuple[Variable, ...], variables: Sequence[Variable], results: Sequence[Tensor]
) -> Emission | None:
    """Emission to replay on other operands; None for a program of more than vertices on mapped variables."""
    steps = builder.prog.children()
    sets = [step.compute_set for step in steps if isinstance(step, Execute)]
    if len(sets) < len(steps) or not all(v in builder.graph.mappings for v in (*operands, *variables)):
        return None
    vertices = tuple((compute_set.name, tuple(builder.graph.groups[compute_set])) for compute_set in sets)
    return Emission(builder.name, operands, tuple(v for v in variables if not v.is_constant), vertices, tuple(results))


def _substituted(group: VertexGroup, table: dict[Variable, Variable], graph: Graph) -> VertexGroup:
    accesses = tuple(replace(access, tensor=substitute(access.tensor, table)) for access in group.accesses)
    return replace(group, accesses=accesses, origin=graph.origin, parts=graph.scope.parts)
