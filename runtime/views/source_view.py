"""Source files of the user with the costs of each line.

Input: `Figures`. Output: a `SourceFile` for each file with a cost, costliest first.
Limits: a line of an unknown path belongs to the file of its name, if there is a single such file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ipujax.runtime.profile import Figures
from ipujax.runtime.sources import line_number
from ipujax.runtime.tensor import Origin

MAX_LINES = 800  # of a file that is listed in full; of a longer one, the lines near a cost
CONTEXT_LINES = 6  # before and after a line with a cost


@dataclass(slots=True)
class LineCost:
    """Costs of a line.

    Args:
        cycles: busy cycles of all IPUs.
        share: of the busy cycles of all lines.
        moved_bytes: bytes that arrive on tiles or the host.
        variable_bytes: size of its variables.
        names: of its operations, costliest first.
        layers: of its operations, costliest first.
        operation: number in `Figures.step_costs` of the costliest; None where none takes time.
    """

    cycles: int = 0
    share: float = 0.0
    moved_bytes: int = 0
    variable_bytes: int = 0
    names: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    operation: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SourceFile:
    """Source file and the costs of its lines.

    Args:
        path: of the file.
        lines: its text; empty when it could not be read.
        costs: by line number, from 1.
        name: of the file without its folder, as in `file:line (function)`.
    """

    path: str
    lines: tuple[str, ...]
    costs: dict[int, LineCost] = field(default_factory=dict)
    name: str = ""

    @property
    def cycles(self) -> int:
        """Cycles of all lines."""
        return sum(cost.cycles for cost in self.costs.values())

    def listed_lines(self) -> list[int | None]:
        """Return the numbers of the lines to list, in order; None for a gap between them."""
        if len(self.lines) <= MAX_LINES:
            return [*range(1, len(self.lines) + 1)] or [*sorted(self.costs)]
        near = {n for number in self.costs for n in range(number - CONTEXT_LINES, number + CONTEXT_LINES + 1)}
        listed: list[int | None] = []
        for number in sorted(near & set(range(1, len(self.lines) + 1))):
            if listed and listed[-1] is not None and listed[-1] + 1 != number:
                listed.append(None)
            listed.append(number)
        return listed


def source_view(profile: Figures) -> tuple[SourceFile, ...]:
    """Return the source files of a profile with their costs, costliest first.

    Raises:
        ProfileError: a loop whose trip count is unknown.
    """
    return profile.once(_source_view)


def _source_view(profile: Figures) -> tuple[SourceFile, ...]:
    """Add up the costs of each line of source, with its operations and layers."""
    texts = profile.sources
    paths_of: dict[str, list[str]] = defaultdict(list)
    for path in texts:
        paths_of[Path(path).name].append(path)
    names = dict[str, str]()
    costs: dict[str, dict[int, LineCost]] = defaultdict(lambda: defaultdict(LineCost))
    # Cycles of a line are those of `operations`, as in the summary; bytes are in the costs of steps alone.
    for row in profile.operations():
        if (line := _locate(row.origin, paths_of)) is not None:
            path, number, name = line
            names[path] = name
            cost = costs[path][number]
            cost.cycles += row.cycles
            cost.share += row.share
            cost.names = tuple(dict.fromkeys((*cost.names, *row.names)))
    layers: dict[tuple[str, int], dict[str, None]] = defaultdict(dict)
    costliest_first = sorted(enumerate(profile.step_costs), key=lambda row: -row[1].cycles)
    for operation, step in costliest_first:
        if (line := _locate(step.origin, paths_of)) is not None:
            path, number, name = line
            names[path] = name
            cost = costs[path][number]
            cost.moved_bytes += step.moved_bytes
            cost.variable_bytes += step.variable_bytes
            if step.cycles and cost.operation is None:
                cost.operation = operation
            if step.origin.layer:
                layers[path, number][step.origin.layer] = None
    for (path, number), of_line in layers.items():
        costs[path][number].layers = tuple(of_line)
    files = [SourceFile(path, tuple(texts.get(path, ())), dict(lines), names[path]) for path, lines in costs.items()]
    return tuple(sorted(files, key=lambda file: -file.cycles))


class _Line(NamedTuple):
    """A line of source: path, number from 1, name of the file."""

    path: str
    number: int
    name: str


def _locate(origin: Origin, paths_of: Mapping[str, Sequence[str]]) -> _Line | None:
    """Return the line of an origin, from the paths of files by name."""
    line = line_number(origin.line)
    if line is None:
        return None
    name, number = line
    candidates = paths_of.get(name, ())
    return _Line(origin.file or (candidates[0] if len(candidates) == 1 else name), number, name)
