"""What each pass of a compilation changed: the equations that it added and removed.

Input: for each pass the number of equations of each kind after it. Output: a `PassChange` for each pass. Equations are
of one kind if they agree in primitive, types and line: names of values make no difference, of which a removed equation
changes all that follow. The changes between two passes are the sums of those from one to the other.
Limits: equations that only moved are no change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

EquationKind = tuple[str, str, str]  # primitive, types "f32[8] f32[8] → f32[8]", line of source


@dataclass(frozen=True, slots=True)
class PassChange:
    """What a pass changed.

    Args:
        name: of the pass; the first is the trace, which adds all equations.
        num_equations: after it, those inside other equations included.
        changes: number of equations of a kind that it added, below 0 if it removed them, most first.
    """

    name: str
    num_equations: int
    changes: tuple[tuple[EquationKind, int], ...]


def pass_changes(counts: Mapping[str, Counter[EquationKind]]) -> tuple[PassChange, ...]:
    """Return the change of each pass, from the equations after each by its name, in order."""
    changes: list[PassChange] = []
    before = Counter[EquationKind]()
    for name, after in counts.items():
        added = {kind: after[kind] - before[kind] for kind in (*after, *before)} if after is not before else {}
        rows = sorted((row for row in added.items() if row[1]), key=lambda row: (-abs(row[1]), row))
        changes.append(PassChange(name, after.total(), tuple(rows)))
        before = after
    return tuple(changes)
