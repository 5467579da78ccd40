"""What changed between two profiles, by operation and source line.

    print(ipu.compare(before, after))

Input: two profiles, also saved ones, of programs and machines that need have nothing in common. Output: `Comparison`:
totals, and a row for each operation of each line of source whose figures differ.
Limits: operations are matched by line and name. Code that has moved to another line is gone there, and new here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ipujax.runtime.errors import ArgumentTypeError, ProfileError
from ipujax.runtime.markup import table
from ipujax.runtime.memory import EXCHANGE_CODE
from ipujax.runtime.page import ComparedFigures, comparison_page
from ipujax.runtime.profile import Figures, FilePath, StepCost, write_file
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.tensor import Origin

FIGURES = ("cycles", "moved_bytes", "variable_bytes", "exchange_code_bytes")
_HEADS = {
    "cycles": "cycles",
    "moved_bytes": "moved B",
    "variable_bytes": "variable B",
    "exchange_code_bytes": "exchange code B",
}
_SHOWN = 20  # rows of the text


@dataclass(frozen=True, slots=True)
class Change:
    """How one operation of one line of source differs.

    Args:
        origin: the line.
        name: the operation.
        before: its figures in the first profile; zeros when it is not there.
        after: those in the second.
    """

    origin: Origin
    name: str
    before: StepCost
    after: StepCost

    def difference(self, figure: str) -> int:
        """By how much a figure grew.

        Args:
            figure: one of `FIGURES`.
        """
        return int(getattr(self.after, figure)) - int(getattr(self.before, figure))

    @property
    def figures(self) -> dict[str, tuple[float, float]]:
        """Before and after, by name."""
        return {name: (float(getattr(self.before, name)), float(getattr(self.after, name))) for name in FIGURES}

    @property
    def _weight(self) -> tuple[int, ...]:
        return tuple(-abs(self.difference(name)) for name in FIGURES)


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """How two profiles differ.

    Args:
        totals: figures of the whole runs, first and second: "cycles", "seconds", "moved_bytes", "variable_bytes", and,
            of the tile that has most of it, "tile_bytes" and "exchange_code_bytes"; and "byte_price", in cycles.
        changes: the operations that differ, largest change of cycles first.
        phases: cycles of each phase of the limiting IPU, first and second.
        categories: bytes of each memory category on all tiles, first and second.
        titles: what both profiles are, in a line each.
        names: what both profiles are called: label, function and file, and more only where these are the same.
    """

    totals: dict[str, tuple[float, float]]
    changes: tuple[Change, ...]
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)
    categories: dict[str, tuple[int, int]] = field(default_factory=dict)
    titles: tuple[str, str] = ("", "")
    names: tuple[str, str] = ("", "")

    def text(self, n: int | None = _SHOWN) -> str:
        """Totals and changes as text.

        Args:
            n: how many changes; all when None.
        """
        lines = [f"Before: {self.names[0]}", f"After:  {self.names[1]}"] if any(self.names) else []
        lines.append("Totals:")
        for name, (before, after) in self.totals.items():
            form = {"seconds": ",.3e", "byte_price": "g"}.get(name, ",.0f")
            lines.append(f"  {name + ':':<21}{before:>16{form}} → {after:>16{form}}  {_ratio(before, after)}")
        if not self.changes:
            return "\n".join([*lines, "No operation differs."])
        widths = {name: max(12, len(head)) for name, head in _HEADS.items()}
        heads = "  ".join(f"{head:>{widths[name]}}" for name, head in _HEADS.items())
        lines += [f"Changes ({len(self.changes):,} operations):", f"  {heads}  where"]
        for change in self.changes[:n]:
            figures = "  ".join(f"{change.difference(name):>+{widths[name]},}" for name in FIGURES)
            lines.append(f"  {figures}  {change.origin}  [{change.name}]")
        rest = len(self.changes) - len(self.changes[:n])
        return "\n".join([*lines, *([f"  … and {rest:,} more"] if rest else [])])

    def to_html(self, path: FilePath) -> None:
        """Writes a page of what changed, in the look of `profile.to_html`.

        Args:
            path: the file; one that exists is replaced.

        Raises:
            ArgumentTypeError: something that is no path.
            ProfileError: a path that cannot be written.
        """
        rows = [ComparedFigures(change.name, str(change.origin), change.figures) for change in self.changes]
        page = comparison_page(self.names, self.titles, self.totals, self.phases, self.categories, rows)
        write_file(path, page.encode())

    def _repr_html_(self) -> str:
        head = ("Figure", "Before", "After", "Change")
        rows = ((name, f"{a:,.6g}", f"{b:,.6g}", _ratio(a, b)) for name, (a, b) in self.totals.items())
        names = " → ".join(filter(None, dict.fromkeys(self.names)))
        return table(head, rows, f"What changed; {len(self.changes):,} operations differ" + (names and f"; {names}"))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        before, after = self.totals["cycles"]
        return f"Comparison({before:,.0f} → {after:,.0f} cycles, {len(self.changes):,} operations differ)"


def _ratio(before: float, after: float) -> str:
    return "same" if before == after else f"{after / before - 1:+.1%}" if before else "new"


@checking_calls("ipu.compare")
def compare(before: Figures, after: Figures) -> Comparison:
    """Says what changed from one profile to another, by operation and source line.

    Args:
        before: a profile.
        after: another.

    Raises:
        ArgumentTypeError: something else than two profiles.
        ProfileError: a loop whose trip count is data, is in no option and was not recorded.
    """
    for given in (before, after):
        if not isinstance(given, Figures):
            hint = "compiled.profile, or ipu.Profile.load(path)"
            got = type(given).__name__
            raise ArgumentTypeError("ipu.compare was given something else", expected="two profiles", got=got, hint=hint)
    first, second = (
        {(str(row.origin), row.name): row for row in _step_costs(which, each)}
        for which, each in (("first", before), ("second", after))
    )
    changes = []
    for key in dict.fromkeys((*first, *second)):
        known = first.get(key) or second[key]
        none = StepCost(known.origin, known.name)
        change = Change(known.origin, known.name, first.get(key, none), second.get(key, none))
        if any(map(change.difference, FIGURES)):
            changes.append(change)
    changes.sort(key=lambda change: change._weight)
    totals = {name: (float(figure(before)), float(figure(after))) for name, figure in _TOTALS.items()}
    phases = {name: (cycles, after.phase_cycles[name]) for name, cycles in before.phase_cycles.items()}
    first_memory, second_memory = (each.memory.by_category for each in (before, after))
    categories = {name: (int(first_memory[name].sum()), int(second_memory[name].sum())) for name in first_memory}
    titles = f"{before.title}; {before.brief}", f"{after.title}; {after.brief}"
    return Comparison(totals, tuple(changes), phases, categories, titles, _names(before, after))


def _names(before: Figures, after: Figures) -> tuple[str, str]:
    """Names of two profiles; their titles, with machine and date, where these alone tell them apart."""
    names, titles = (before.identity.name, after.identity.name), (before.title, after.title)
    return titles if names[0] == names[1] and titles[0] != titles[1] else names


def _step_costs(which: str, profile: Figures) -> tuple[StepCost, ...]:
    try:
        return profile.step_costs
    except ProfileError as error:
        what = f"the {which} of the profiles that are compared has no cycles: {error.what}"
        raise ProfileError(what, where=error.where, hint=error.hint) from error


def _exchange_code_bytes(profile: Figures) -> int:
    return int(sum(profile.memory.by_category[name] for name in EXCHANGE_CODE).max())  # type: ignore[union-attr]


_TOTALS: dict[str, Callable[[Figures], Any]] = {
    "cycles": lambda profile: profile.cycles,
    "seconds": lambda profile: profile.seconds,
    "moved_bytes": lambda profile: sum(row.moved_bytes for row in profile.step_costs),
    "variable_bytes": lambda profile: sum(row.variable_bytes for row in profile.step_costs),
    "tile_bytes": lambda profile: profile.memory.max_tile_bytes,
    "exchange_code_bytes": _exchange_code_bytes,
    "byte_price": lambda profile: profile.byte_price,
}
