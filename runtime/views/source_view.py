"""The user's source files with the costs of each line.

Input: `Figures`. Output: a `SourceFile` for each file that costs something, dearest first.
Limits: a line whose file is not known is given to the file of its name, if there is one such file.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from ipujax.runtime.profile import Figures
from ipujax.runtime.sources import line_number
from ipujax.runtime.tensor import Origin

MOST_LINES = 800  # of one file that are shown whole; of longer ones those near a cost
NEAR = 6


@dataclass(slots=True)
class LineCost:
    """What one line costs.

    Args:
        cycles: of all its steps, each on the IPU that spends most on it.
        share: of the run.
        moved_bytes: bytes that arrive on tiles or the host.
        variable_bytes: size of its variables.
        names: of its operations, dearest first.
        layers: of them, most expensive first.
        operation: number in `Figures.step_costs` of the most expensive; None where none takes time.
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
    """One file.

    Args:
        path: of it.
        lines: its text; empty when it could not be read.
        costs: by line number, from 1.
        name: of the file as lines of source show it, without its folder.
    """

    path: str
    lines: tuple[str, ...]
    costs: dict[int, LineCost] = field(default_factory=dict)
    name: str = ""

    @property
    def cycles(self) -> int:
        """Cycles of all its lines."""
        return sum(cost.cycles for cost in self.costs.values())

    def shown(self) -> list[int | None]:
        """The numbers of the lines to show, in order; None where some are left out."""
        if len(self.lines) <= MOST_LINES:
            return [*range(1, len(self.lines) + 1)] or [*sorted(self.costs)]
        near = {n for number in self.costs for n in range(number - NEAR, number + NEAR + 1)}
        numbers = sorted(near & set(range(1, len(self.lines) + 1)))
        shown: list[int | None] = []
        for number in numbers:
            if shown and shown[-1] is not None and shown[-1] + 1 != number:
                shown.append(None)
            shown.append(number)
        return shown


def source_view(profile: Figures) -> tuple[SourceFile, ...]:
    """The files of a profile.

    Args:
        profile: of a run.

    Raises:
        ProfileError: a loop whose trip count is unknown, or a profile saved by a version that kept no texts.
    """
    texts, names = profile.sources, dict[str, str]()
    costs: dict[str, dict[int, LineCost]] = defaultdict(lambda: defaultdict(LineCost))
    for row in profile.operations():
        if (place := _place(row.origin, list(texts))) is not None:
            names[place[0]] = place[2]
            cost = costs[place[0]][place[1]]
            cost.cycles += row.cycles
            cost.share += row.share
            cost.names += tuple(name for name in row.names if name not in cost.names)
    rows = sorted(enumerate(profile.step_costs), key=lambda row: -row[1].cycles)
    for number, step in rows:
        if (place := _place(step.origin, list(texts))) is not None:
            names[place[0]] = place[2]
            cost = costs[place[0]][place[1]]
            cost.moved_bytes += step.moved_bytes
            cost.variable_bytes += step.variable_bytes
            if step.cycles and cost.operation is None:
                cost.operation = number
            if step.origin.layer and step.origin.layer not in cost.layers:
                cost.layers += (step.origin.layer,)
    files = [SourceFile(path, tuple(texts.get(path, ())), dict(found), names[path]) for path, found in costs.items()]
    return tuple(sorted(files, key=lambda file: -file.cycles))


def _place(origin: Origin, paths: list[str]) -> tuple[str, int, str] | None:
    """The file, the line and the file's name of an origin."""
    found = line_number(origin.line)
    if found is None:
        return None
    name, number = found
    same = [path for path in paths if Path(path).name == name]
    return origin.file or (same[0] if len(same) == 1 else name), number, name
