"""The constants of the known machines as Markdown: the generated part of docs/machine.md.

    python -m ipujax.runtime.target.machine_page                  prints it
    python -m ipujax.runtime.target.machine_page docs/machine.md  puts it into the page, below the marker

Input: the fields of `Target` and the presets. Output: a table of values, one of peak rates, and for each constant its
meaning and the source of each value. Source: `target` and `presets`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.files import write_file
from ipujax.runtime.target.presets import PRESETS
from ipujax.runtime.target.target import Source, Target

MARKER = "<!-- generated from here on by: python -m ipujax.runtime.target.machine_page docs/machine.md -->\n"
_OMITTED = ("name", "num_ipus", "sources")  # names of columns; 1 in every preset; printed below the tables


def generated(presets: Mapping[str, Target] = PRESETS) -> str:
    """Return the generated part of the page, with a column for each machine."""
    items = [item for item in dataclasses.fields(Target) if item.name not in _OMITTED]
    values = [
        (
            f"`{item.name}`",
            item.metadata["unit"],
            *(constant_text(getattr(target, item.name)) for target in presets.values()),
        )
        for item in items
    ]
    parts = [
        "## Constants\n",
        _table(("constant", "unit", *presets), values),
        "\n## Peak rates\n\nOne IPU; whole numbers a cycle, times tiles, times the clock.\n",
        _table(("rate", "a cycle and tile", *presets), list(_peak_rows(presets))),
        "\n## Meaning and sources\n",
        *(_constant_paragraph(item, presets) for item in items),
    ]
    return "\n".join(parts)


def constant_text(value: object) -> str:
    """Return the value of a constant as text; sets are in order."""
    if isinstance(value, frozenset):
        return ", ".join(sorted(value))
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) else f"{value:g}"
    return str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _peak_rows(presets: Mapping[str, Target]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of peak rates."""
    # Rates of a target are of its whole system; the page is of one IPU.
    targets = [target.replace(num_ipus=1) for target in presets.values()]
    rows = (
        ("fp16 AMP", "2 flop a MAC", [t.peak_fp16_flops for t in targets], "flop/s"),
        ("fp32 AMP", "2 flop a MAC", [t.peak_fp32_flops for t in targets], "flop/s"),
        ("SRAM", "loads and store", [t.sram_bytes_per_second for t in targets], "B/s"),
        ("exchange", "each direction", [t.exchange_bytes_per_second for t in targets], "B/s"),
    )
    for name, unit_work, values, unit in rows:
        yield name, unit_work, *(f"{value:,.0f} {unit}" for value in values)


def _constant_paragraph(item: dataclasses.Field[object], presets: Mapping[str, Target]) -> str:
    """Return a constant's meaning, and the source of its value on each machine; machines of one source together."""
    # Most values have one source on all machines, which is then printed once.
    machines_of_source: dict[Source, list[str]] = {}
    for name, target in presets.items():
        machines_of_source.setdefault(target.sources[item.name], []).append(name)
    lines = [f"- **`{item.name}`** ({item.metadata['unit']}): {item.metadata['doc']}.\n"]
    for source, names in machines_of_source.items():
        machines = "all" if len(names) == len(presets) else ", ".join(names)
        is_exact = source.low == source.high
        interval = "" if is_exact else f" 90 % interval: {source.low:.3g} to {source.high:.3g} times."
        lines.append(f"  - {machines}: *{source.kind}*: {source.text}.{interval}\n")
    return "".join(lines)


def page_with(text: str) -> str:
    """Return a page whose text after the marker, which must be there, is generated."""
    by_hand, marker, _ = text.partition(MARKER)
    if not marker:
        raise ArgumentError("the page must have a marker for the constants", expected=f"a line {MARKER.strip()}")
    return by_hand + marker + "\n" + generated()


def main(arguments: Sequence[str]) -> None:
    """Print the constants, or write them into the named page."""
    if not arguments:
        sys.stdout.write(generated())
        return
    page = Path(arguments[0])
    write_file(page, page_with(page.read_text(encoding="utf-8")).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
