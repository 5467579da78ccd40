"""What an operation has added to a graph, added again for operands that are and lie alike, as those of equal layers.

Input: an operation, its operands, and how it is added. Output: its results. The first time it is planned and added;
from then on its vertices are those of the first time on other variables. A graph remembers what was added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from ipujax.runtime.exchange import geometry
from ipujax.runtime.graph import Execute, Graph, Sequence as ProgramSequence, VertexGroup, substituted
from ipujax.runtime.tensor import Tensor, Variable

Add = Callable[[ProgramSequence], list[Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Emission:
    """What was added.

    Args:
        name: debug name of the operation, with which all others begin.
        given: the variables of its operands, each once.
        made: the variables that were added, constants excepted.
        steps: name and vertices of each compute set, in order.
        results: the results.
    """

    name: str
    given: tuple[Variable, ...]
    made: tuple[Variable, ...]
    steps: tuple[tuple[str, tuple[VertexGroup, ...]], ...]
    results: tuple[Tensor, ...]

    def again(self, graph: Graph, given: Sequence[Variable], prog: ProgramSequence, name: str) -> list[Tensor]:
        """Adds the same for other variables; those that lie nowhere yet lie as the first ones do."""
        table = dict(zip(self.given, given, strict=True))
        for old, new in table.items():
            if new not in graph.mappings:
                graph.set_tile_mapping(new, graph.mappings[old])
        for old in self.made:
            title = self._named(old.name, name)
            made = graph.add_variable(old.shape, old.dtype, title, graph.mappings[old], old.monoid)
            (table[old],) = made.variables()
        for title, groups in self.steps:
            compute_set = graph.add_compute_set(self._named(title, name))
            graph.groups[compute_set] = [_moved(group, table, graph) for group in groups]
            prog.add(Execute(compute_set))
        return [substituted(x, table) for x in self.results]

    def _named(self, old: str, name: str) -> str:
        return name + old.removeprefix(self.name)


def added(
    graph: Graph, operation: Hashable, operands: Sequence[Tensor | None], prog: ProgramSequence, name: str, add: Add
) -> list[Tensor]:
    """The results of an operation, which is planned once for operands that are and lie alike.

    Args:
        graph: graph to add to.
        operation: all that it depends on besides its operands and the graph.
        operands: what it reads and writes, None for what it makes.
        prog: program to add to.
        name: debug name of what is added.
        add: plans and adds it to a program.
    """
    numbers: dict[Variable, int] = {}
    forms = [None if x is None else _form(graph, x, numbers) for x in operands]
    if () in forms or not graph.maps_automatically:
        return add(prog)
    # Small variables and partial results start at that tile.
    question, given = (operation, tuple(forms), graph.next_tile), tuple(numbers)
    known = graph.emissions.get(question)
    if known is not None:
        again: list[Tensor] = known.again(graph, given, prog, name)
        return again
    first_variable, next_tile, own = len(graph.variables), graph.next_tile, ProgramSequence()
    results = add(own)
    for step in own.children():
        prog.add(step)
    emission = _recorded(graph, name, given, graph.variables[first_variable:], own, results)
    if emission is not None and graph.next_tile == next_tile:
        graph.emissions[question] = emission
    return results


def _form(graph: Graph, tensor: Tensor, numbers: dict[Variable, int]) -> tuple[object, ...]:
    """All that planning depends on in a tensor; nothing where a list of elements is part of that."""
    view, variables = geometry(tensor), tensor.variables()
    if view is None:
        return ()
    same = tuple(numbers.setdefault(v, len(numbers)) for v in variables)
    constants = tuple(v for v in variables if v.is_constant)
    return view, tensor.dtype, same, constants, tuple(map(graph.mappings.get, variables))


def _recorded(
    graph: Graph,
    name: str,
    given: tuple[Variable, ...],
    new: Sequence[Variable],
    prog: ProgramSequence,
    results: Sequence[Tensor],
) -> Emission | None:
    """What was added, if that is vertices on variables that lie somewhere."""
    steps = prog.children()
    sets = [step.compute_set for step in steps if isinstance(step, Execute)]
    if len(sets) < len(steps) or not all(v in graph.mappings for v in (*given, *new)):
        return None
    vertices = tuple((one.name, tuple(graph.groups[one])) for one in sets)
    return Emission(name, given, tuple(v for v in new if not v.is_constant), vertices, tuple(results))


def _moved(group: VertexGroup, table: dict[Variable, Variable], graph: Graph) -> VertexGroup:
    accesses = tuple(replace(access, tensor=substituted(access.tensor, table)) for access in group.accesses)
    return replace(group, accesses=accesses, origin=graph.origin, parts=graph.parts)
