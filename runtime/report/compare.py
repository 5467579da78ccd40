"""Changes between two profiles, by operation and source line.

    print(ipu.compare(before, after))

Input: two profiles, also saved ones, of programs and machines that need have nothing in common. Output: `Comparison`:
totals, and a row for each operation of each line of source whose figures differ.
Operations are matched by line, layer, part of training and name; the others by function, layer and name, since line
numbers change when a file is edited; and then by line and layer alone, since other equations may be fused.
Limits: an operation that moved to another function counts as removed from one and as new in the other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ipujax.runtime.errors import ArgumentTypeError, ProfileError
from ipujax.runtime.files import FilePath
from ipujax.runtime.markup import table
from ipujax.runtime.memory import EXCHANGE_CODE
from ipujax.runtime.page import ComparedFigures, comparison_page
from ipujax.runtime.profile import NO_LAYER, Figures, StepCost, write_file
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
_NUM_ROWS = 20  # of the text


@dataclass(frozen=True, slots=True)
class Change:
    """Change of one operation of one line of source.

    Args:
        origin: line, layer and part of training, in the second profile if it has the operation.
        name: of the operation; "old → new" where it has another name.
        before: figures in the first profile; zeros without the operation.
        after: figures in the second.
    """

    origin: Origin
    name: str
    before: StepCost
    after: StepCost

    @property
    def place(self) -> str:
        """Line, with layer and part of training where they are known."""
        layer = " ".join(filter(None, (self.origin.layer, self.origin.part)))
        return f"{self.origin}{f', {layer}' if layer else ''}"

    def difference(self, figure: str) -> int:
        """Return the growth of a figure, one of `FIGURES`, in its unit."""
        return int(getattr(self.after, figure)) - int(getattr(self.before, figure))

    @property
    def figures(self) -> dict[str, tuple[float, float]]:
        """(before, after) of each of `FIGURES`."""
        return {name: (float(getattr(self.before, name)), float(getattr(self.after, name))) for name in FIGURES}

    @property
    def _weight(self) -> tuple[int, ...]:
        return tuple(-abs(self.difference(name)) for name in FIGURES)


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Differences of two profiles; all pairs are (first, second).

    Args:
        totals: figures of the runs: "cycles", "seconds", "moved_bytes", "variable_bytes"; of the tile with most,
            "tile_bytes" and "exchange_code_bytes"; and "byte_cost", in cycles.
        changes: the operations that differ, largest change of cycles first.
        phases: cycles of each phase of the limiting IPU.
        categories: bytes of each memory category on all tiles.
        titles: program, machine and main figures of each profile, in a line.
        names: label, function and file of each profile, or its title where these are equal.
        layers: busy cycles of each layer that differs, without those inside it, all parts of training together, largest
            change first.
    """

    totals: dict[str, tuple[float, float]]
    changes: tuple[Change, ...]
    phases: dict[str, tuple[int, int]] = field(default_factory=dict)
    categories: dict[str, tuple[int, int]] = field(default_factory=dict)
    titles: tuple[str, str] = ("", "")
    names: tuple[str, str] = ("", "")
    layers: dict[str, tuple[int, int]] = field(default_factory=dict)

    def text(self, n: int | None = _NUM_ROWS) -> str:
        """Return totals, layers and the first `n` changes as text; all changes when None."""
        first, second = (name or title for name, title in zip(self.names, self.titles, strict=True))
        lines = [f"Before: {first}", f"After:  {second}", self.verdict, "Totals:"]
        for name, (before, after) in self.totals.items():
            form = {"seconds": ",.3e", "byte_cost": "g"}.get(name, ",.0f")
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
        num_omitted = len(self.changes) - len(self.changes[:n])
        return "\n".join([*lines, *([f"  … and {num_omitted:,} more"] if num_omitted else [])])

    @property
    def verdict(self) -> str:
        """Change of the cycles, and the operation that explains most of it, in a sentence or two."""
        before, after = self.totals["cycles"]
        if before == after:
            return f"Both runs take {before:,.0f} cycles."
        text = f"{_ratio(before, after)} cycles: {before:,.0f} → {after:,.0f}."
        differences = {change: change.difference("cycles") for change in self.changes}
        total = sum(differences.values())
        if total * (after - before) <= 0:  # busy cycles did not cause it: an IPU waits for others for another time
            return f"{text} IPUs work for {total:+,} cycles and wait for the rest: see phases."
        change = max(differences, key=lambda change: differences[change] * (1 if total > 0 else -1))
        share = differences[change] / total
        subject = "Most of it" if share > 0.5 else "The largest part"
        part = f"{share:.0%} of it" if share <= 1 else f"and other operations take {'less' if total > 0 else 'more'}"
        return f"{text} {subject} is {change.name} at {change.place}: {differences[change]:+,} cycles, {part}."

    def to_html(self, path: FilePath) -> None:
        """Write a page of the changes, in the style of `profile.to_html`.

        Args:
            path: of the HTML file; an existing one is replaced.

        Raises:
            ArgumentTypeError: another type than a path.
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
    """Compare two profiles, by operation and source line.

    Args:
        before: the first profile.
        after: the second.

    Raises:
        ArgumentTypeError: another type than `Profile`.
        ProfileError: a loop whose trip count is data, is in no option and was not recorded.
    """
    for profile in (before, after):
        if not isinstance(profile, Figures):
            hint = "compiled.profile, or ipu.Profile.load(path)"
            got = type(profile).__name__
            raise ArgumentTypeError("ipu.compare needs two profiles", expected="ipu.Profile", got=got, hint=hint)
    pairs = _match_operations(_step_costs("first", before), _step_costs("second", after))
    changes = [change for change in pairs if any(map(change.difference, FIGURES))]
    changes.sort(key=lambda change: change._weight)
    totals = {name: (float(figure(before)), float(figure(after))) for name, figure in _TOTALS.items()}
    phases = {name: (cycles, after.phase_cycles[name]) for name, cycles in before.phase_cycles.items()}
    old, new = (profile.memory.by_category for profile in (before, after))
    categories = {name: (int(old[name].sum()), int(new[name].sum())) for name in old}  # all profiles have all of them
    layers = _changed_layers(layer_cycles(before), layer_cycles(after))
    titles = f"{before.title}; {before.brief}", f"{after.title}; {after.brief}"
    return Comparison(totals, tuple(changes), phases, categories, titles, _names(before, after), layers)


def _changed_layers(before: Counter[str], after: Counter[str]) -> dict[str, tuple[int, int]]:
    pairs = {
        layer: (before[layer], after[layer])
        for layer in (before | after)
        if before[layer] != after[layer] and layer != NO_LAYER
    }
    return dict(sorted(pairs.items(), key=lambda pair: -abs(pair[1][1] - pair[1][0])))


Key = tuple[object, ...]
_NUMBER = re.compile(r":\d+ ")  # of a line, in `file.py:12 (loss)`


def _function_key(row: StepCost) -> Key:
    """Return file, function, layer, part and name: all but the number of the line."""
    return _NUMBER.sub(" ", str(row.origin)), row.origin.layer, row.origin.part, row.name


def _line_key(row: StepCost) -> Key:
    return str(row.origin), row.origin.layer, row.origin.part


# Rows with equal keys are one operation; the most reliable key first.
_KEYS: tuple[Callable[[StepCost], Key], ...] = (lambda row: (*_line_key(row), row.name), _function_key, _line_key)


def _match_operations(before: Sequence[StepCost], after: Sequence[StepCost]) -> list[Change]:
    """Pair the rows of two profiles that are one operation; each other row is a change from or to nothing."""
    changes = list[Change]()
    for key in _KEYS:
        first = _group_rows(before, key)
        second = _group_rows(after, key)
        common = first.keys() & second.keys()
        # In the order of the first profile: a set has another order in each process.
        changes += [_change(first[each], second[each]) for each in first if each in common]
        before = [row for row in before if key(row) not in common]
        after = [row for row in after if key(row) not in common]
    return changes + [_change([row], []) for row in before] + [_change([], [row]) for row in after]


def _group_rows(rows: Sequence[StepCost], key: Callable[[StepCost], Key]) -> dict[Key, list[StepCost]]:
    groups: dict[Key, list[StepCost]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _change(before: Sequence[StepCost], after: Sequence[StepCost]) -> Change:
    """Return the change from rows of the first profile to rows of the second, either of which may be empty."""
    names = [", ".join(dict.fromkeys(row.name for row in rows)) for rows in (before, after) if rows]
    origin = (after or before)[0].origin
    return Change(
        origin, " → ".join(dict.fromkeys(names)), _sum(origin, names[0], before), _sum(origin, names[-1], after)
    )


def _sum(origin: Origin, name: str, rows: Sequence[StepCost]) -> StepCost:
    return StepCost(origin, name, **{figure: sum(getattr(row, figure) for row in rows) for figure in FIGURES})


def _names(before: Figures, after: Figures) -> tuple[str, str]:
    """Return names of two profiles; their titles, with machine and date, where only these differ."""
    names = (before.identity.name, after.identity.name)
    titles = (before.title, after.title)
    return titles if names[0] == names[1] and titles[0] != titles[1] else names


def _step_costs(ordinal: str, profile: Figures) -> tuple[StepCost, ...]:
    try:
        return profile.step_costs
    except ProfileError as error:
        title = f"the {ordinal} of the profiles that are compared has no cycles: {error.what}"
        raise ProfileError(title, where=error.where, hint=error.hint) from error


def _exchange_code_bytes(profile: Figures) -> int:
    return int(sum(profile.memory.by_category[name] for name in EXCHANGE_CODE).max())  # type: ignore[union-attr]


_TOTALS: dict[str, Callable[[Figures], Any]] = {
    "cycles": lambda profile: profile.cycles,
    "seconds": lambda profile: profile.seconds,
    "moved_bytes": lambda profile: sum(row.moved_bytes for row in profile.step_costs),
    "variable_bytes": lambda profile: sum(row.variable_bytes for row in profile.step_costs),
    "tile_bytes": lambda profile: profile.memory.max_tile_bytes,
    "exchange_code_bytes": _exchange_code_bytes,
    "byte_cost": lambda profile: profile.byte_cost,
}
