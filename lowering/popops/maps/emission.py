"""Replay of earlier, equal operations, such as those of equal layers: planned once, emitted again on other operands.

Input: an operation, its operands, and a function that plans and adds it. Output: its results. The first of equal
operations is planned; a later one, on operands of equal shapes and mappings, gets the same vertices on its own
variables, from its own first tile on. Emissions are stored in the graph; the views of equal IPUs share them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from ipujax.lowering.popops.maps.constants import immediate_of
from ipujax.lowering.popops.vertices.kernel import freeze
from ipujax.runtime.exchange import geometry
from ipujax.runtime.graph import Builder, Execute, Graph, Sequence as ProgramSequence, VertexGroup, shift_vertices
from ipujax.runtime.tensor import Tensor, TileMapping, Variable, substitute

Add = Callable[[ProgramSequence], list[Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Emission:
    """Vertices and variables that an operation added."""

    name: str  # debug name of the operation, a prefix of all others
    operands: dict[Variable, TileMapping | None]  # variables of its operands, each once, and their mappings
    variables: dict[Variable, TileMapping]  # variables that it added, except constants
    first_tile: int  # of its graph, from which mappings count tiles, and vertices do not
    has_constants: bool  # whether it added constants, which other IPUs cannot read
    steps: tuple[tuple[str, tuple[VertexGroup, ...]], ...]  # name and vertices of each compute set, in order
    results: tuple[Tensor, ...]

    def replay(self, builder: Builder, operands: Sequence[Variable]) -> list[Tensor]:
        """Adds the recorded vertices on other operands; maps their unmapped variables as those of the first operands.

        `operands` are the variables of the new operands, in the order of those recorded. Returns the new results.
        """
        graph = builder.graph
        table = dict(zip(self.operands, operands, strict=True))
        for recorded, mapping in self.operands.items():
            if mapping is not None and table[recorded] not in graph.mappings:
                graph.set_tile_mapping(table[recorded], mapping)
        for recorded, mapping in self.variables.items():
            title = self._renamed(recorded.name, builder.name)
            copy = graph.add_variable(recorded.shape, recorded.dtype, title, mapping, recorded.monoid)
            (table[recorded],) = copy.variables()
        shift = graph.first_tile - self.first_tile
        for title, groups in self.steps:  # name and vertex groups of each compute set
            compute_set = graph.add_compute_set(self._renamed(title, builder.name))
            graph.groups[compute_set] = [_substituted(group, table, shift, graph) for group in groups]
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
    numbers: dict[Variable, int] = {}  # of the variables of all operands, in order; `_planning_key` adds them
    forms = [None if x is None else _planning_key(graph, x, numbers) for x in operands]
    if () in forms or not graph.maps_automatically:  # an operand without a key, or a plan by the user's mappings
        return add(builder.prog)
    # The next tile is part of the key: small variables and partial results start there.
    key = (operation, tuple(forms), graph.next_tile, graph.keeps_layouts)
    variables = tuple(numbers)
    emission: Emission | None = graph.emissions.get(key)
    if emission is not None and (emission.first_tile == graph.first_tile or not emission.has_constants):
        return emission.replay(builder, variables)
    first_variable = len(graph.variables)
    next_tile = graph.next_tile
    sequence = ProgramSequence()
    results = add(sequence)
    for step in sequence.children():
        builder.prog.add(step)
    emission = _record_emission(builder.into(sequence), variables, graph.variables[first_variable:], results)
    # A plan that starts at the next tile would start at another tile the next time.
    if emission is not None and graph.next_tile == next_tile:
        graph.emissions[key] = emission
    return results


def _planning_key(graph: Graph, tensor: Tensor, numbers: dict[Variable, int]) -> tuple[object, ...]:
    """Features of a tensor that planning depends on: operands of equal features have equal plans.

    Args:
        graph: has the mapping of each variable.
        tensor: the tensor.
        numbers: numbers of the variables of all operands so far, by which they are told apart; gets new variables.

    Returns:
        The features; `()` for a tensor that is a list of single elements, whose plans are not kept.
    """
    view = geometry(tensor)
    if view is None:
        return ()
    features: list[tuple[object, ...]] = []  # of each variable: number, mapping, and constant
    for variable in tensor.variables():
        number = numbers.setdefault(variable, len(numbers))
        features.append((number, graph.mappings.get(variable), _constant_key(variable)))
    return view, tensor.dtype, tuple(features)


def _constant_key(variable: Variable) -> object:
    """Key of a constant: the value of a scalar, which is planned as an immediate, or the constant itself."""
    if not variable.is_constant:
        return None
    value = immediate_of(Tensor.of(variable))
    return variable if value is None else freeze(value)


def _record_emission(
    builder: Builder, operands: Sequence[Variable], variables: Sequence[Variable], results: Sequence[Tensor]
) -> Emission | None:
    """Records the vertices and variables that a map added, to add the like for other operands without a plan.

    Args:
        builder: what the map was added with, whose program has nothing but the map.
        operands: variables that it reads.
        variables: variables that it added.
        results: its results.

    Returns:
        The record; None if more was added than vertices, or if variables have no mapping yet.
    """
    steps = builder.prog.children()
    sets = [step.compute_set for step in steps if isinstance(step, Execute)]
    graph = builder.graph
    # A constant without a mapping is an immediate, which no vertex reads from a tile.
    if len(sets) < len(steps) or not all(v in graph.mappings or v.is_constant for v in (*operands, *variables)):
        return None
    added = {v: graph.mappings[v] for v in variables if not v.is_constant}
    return Emission(
        builder.name,
        {v: graph.mappings.get(v) for v in operands},
        added,
        graph.first_tile,
        len(added) < len(variables),
        tuple((compute_set.name, tuple(graph.groups[compute_set])) for compute_set in sets),
        tuple(results),
    )


def _substituted(group: VertexGroup, table: dict[Variable, Variable], shift: int, graph: Graph) -> VertexGroup:
    accesses = tuple(replace(access, tensor=substitute(access.tensor, table)) for access in group.accesses)
    tile = shift_vertices(group.tile, shift)
    return replace(group, accesses=accesses, tile=tile, origin=graph.origin, parts=graph.scope.parts)
