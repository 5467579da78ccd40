"""What changed between two profiles, by operation and source line.

    print(ipu.compare(before, after))

Input: two profiles, also saved ones, of programs and machines that need have nothing in common. Output: `Comparison`:
totals, and a row for each operation of each line of source whose figures differ.
Operations are matched by line, layer, part of training and name; what is left by function, layer and name, since lines
move when a file is edited; and then by line and layer alone, since equations are fused otherwise.
Limits: an operation that moved to another function is gone there, and new here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ipujax.runtime.errors import ArgumentTypeError, ProfileError
from ipujax.runtime.markup import table
from ipujax.runtime.memory import EXCHANGE_CODE
from ipujax.runtime.page import ComparedFigures, comparison_page
from ipujax.runtime.profile import NO_LAYER, Figures, FilePath, StepCost, write_file
from ipujax.runtime.report.many_runs import layer_cycles
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
        origin: the line, the layer and the part of training; those in the second profile where it is there.
        name: the operation; "old → new" where it has another name.
        before: its figures in the first profile; zeros when it is not there.
        after: those in the second.
    """

    origin: Origin
    name: str
    before: StepCost
    after: StepCost

    @property
    def place(self) -> str:
        """The line, and the layer and the part of training where they are known."""
        layer = " ".join(filter(None, (self.origin.layer, self.origin.part)))
        return f"{self.origin}{f', {layer}' if layer else ''}"

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
        layers: busy cycles of each layer without those inside it, all parts of training together, first and second;
            layers that differ, largest change first. Empty where a profile was saved without layers.
    """

    totals: dict[str, tuple[float, float]]
    changes: tuple[Change, ...]
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)
    categories: dict[str, tuple[int, int]] = field(default_factory=dict)
    titles: tuple[str, str] = ("", "")
    names: tuple[str, str] = ("", "")
    layers: dict[str, tuple[int, int]] = field(default_factory=dict)

    def text(self, n: int | None = _SHOWN) -> str:
        """Totals and changes as text.

        Args:
            n: how many changes; all when None.
        """
        first, second = (name or title for name, title in zip(self.names, self.titles, strict=True))
        lines = [f"Before: {first}", f"After:  {second}", self.verdict, "Totals:"]
        for name, (before, after) in self.totals.items():
            form = {"seconds": ",.3e", "byte_price": "g"}.get(name, ",.0f")
            lines.append(f"  {name + ':':<21}{before:>16{form}} → {after:>16{form}}  {_ratio(before, after)}")
        if not self.changes:
            return "\n".join([*lines, "No operation differs."])
        if self.layers:
            lines.append("Changes by layer:")
            for layer, (old, new) in list(self.layers.items())[:n]:
                lines.append(f"  {new - old:>+15,}  {_ratio(old, new):>8}  {layer}")
        widths = {name: max(12, len(head)) for name, head in _HEADS.items()}
        heads = "  ".join(f"{head:>{widths[name]}}" for name, head in _HEADS.items())
        lines += [f"Changes of {len(self.changes):,} operations:", f"  {heads}  where"]
        for change in self.changes[:n]:
            figures = "  ".join(f"{change.difference(name):>+{widths[name]},}" for name in FIGURES)
            lines.append(f"  {figures}  {change.place}  [{change.name}]")
        rest = len(self.changes) - len(self.changes[:n])
        return "\n".join([*lines, *([f"  … and {rest:,} more"] if rest else [])])

    @property
    def verdict(self) -> str:
        """How the cycles changed, and the change of an operation that explains most of it, in a sentence or two."""
        before, after = self.totals["cycles"]
        if before == after:
            return f"Both runs take {before:,.0f} cycles."
        text = f"{_ratio(before, after)} cycles: {before:,.0f} → {after:,.0f}."
        differences = {change: change.difference("cycles") for change in self.changes}
        total = sum(differences.values())
        if total * (after - before) <= 0:
            return f"{text} IPUs work for {total:+,} cycles and wait for the rest: see phases."
        change = max(differences, key=lambda change: differences[change] * (1 if total > 0 else -1))
        share = differences[change] / total
        what = "Most of it" if share > 0.5 else "The largest part"
        opposed = "less" if total > 0 else "more"
        part = f"{share:.0%} of it" if share <= 1 else f"and other operations take {opposed}"
        return f"{text} {what} is {change.name} at {change.place}: {differences[change]:+,} cycles, {part}."

    def to_html(self, path: FilePath) -> None:
        """Writes a page of what changed, in the look of `profile.to_html`.

        Args:
            path: the file; one that exists is replaced.

        Raises:
            ArgumentTypeError: something that is no path.
            ProfileError: a path that cannot be written.
        """
        rows = [ComparedFigures(change.name, change.place, change.figures) for change in self.changes]
        tables = self.totals, self.phases, self.categories, self.layers
        page = comparison_page(self.names, self.titles, self.verdict, *tables, rows)
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
    changes = [
        change
        for change in _matched(_step_costs("first", before), _step_costs("second", after))
        if any(map(change.difference, FIGURES))
    ]
    changes.sort(key=lambda change: change._weight)
    totals = {name: (float(figure(before)), float(figure(after))) for name, figure in _TOTALS.items()}
    phases = {name: (cycles, after.phase_cycles[name]) for name, cycles in before.phase_cycles.items()}
    first_memory, second_memory = (each.memory.by_category for each in (before, after))
    categories = {name: (int(first_memory[name].sum()), int(second_memory[name].sum())) for name in first_memory}
    layers = _changed_layers(layer_cycles(before), layer_cycles(after))
    titles = f"{before.title}; {before.brief}", f"{after.title}; {after.brief}"
    return Comparison(totals, tuple(changes), phases, categories, titles, _names(before, after), layers)


def _changed_layers(before: Counter[str], after: Counter[str]) -> dict[str, tuple[int, int]]:
    if not before or not after:
        return {}
    pairs = {
        layer: (before[layer], after[layer])
        for layer in (before | after)
        if before[layer] != after[layer] and layer != NO_LAYER
    }
    return dict(sorted(pairs.items(), key=lambda pair: -abs(pair[1][1] - pair[1][0])))


Key = tuple[object, ...]
_NUMBER = re.compile(r":\d+ ")  # of a line, in `file.py:12 (loss)`


def _function(row: StepCost) -> Key:
    """File, function, layer, part and name: all but the number of the line."""
    return _NUMBER.sub(" ", str(row.origin)), row.origin.layer, row.origin.part, row.name


def _line(row: StepCost) -> Key:
    return str(row.origin), row.origin.layer, row.origin.part


# What rows have in common that are one operation, the most reliable first.
_KEYS: tuple[Callable[[StepCost], Key], ...] = (lambda row: (*_line(row), row.name), _function, _line)


def _matched(before: Sequence[StepCost], after: Sequence[StepCost]) -> list[Change]:
    """All operations of two profiles, those that are one together."""
    changes = list[Change]()
    for key in _KEYS:
        first, second = _by_key(before, key), _by_key(after, key)
        both = first.keys() & second.keys()
        changes += [_change(first[each], second[each]) for each in first if each in both]
        before = [row for row in before if key(row) not in both]
        after = [row for row in after if key(row) not in both]
    return changes + [_change([row], []) for row in before] + [_change([], [row]) for row in after]


def _by_key(rows: Sequence[StepCost], key: Callable[[StepCost], Key]) -> dict[Key, list[StepCost]]:
    groups: dict[Key, list[StepCost]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _change(before: Sequence[StepCost], after: Sequence[StepCost]) -> Change:
    """What some rows of the first profile became in the second."""
    names = [", ".join(dict.fromkeys(row.name for row in rows)) for rows in (before, after) if rows]
    origin = (after or before)[0].origin
    return Change(
        origin, " → ".join(dict.fromkeys(names)), _sum(origin, names[0], before), _sum(origin, names[-1], after)
    )


def _sum(origin: Origin, name: str, rows: Sequence[StepCost]) -> StepCost:
    return StepCost(origin, name, **{figure: sum(getattr(row, figure) for row in rows) for figure in FIGURES})


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
