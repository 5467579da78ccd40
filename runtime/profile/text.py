"""Figures in texts for people: tables, bytes, seconds, shares, lack of memory, and colours for a terminal.

A text whose sections begin with a line that is not indented gets ANSI escape codes. The environment takes precedence
over the caller: `NO_COLOR=1` means never, else `CLICOLOR_FORCE=1` always, else `CLICOLOR=0` never.
Source of the colours: Poplar & PopLibs user guide, "Profile summary output"; of `NO_COLOR`: https://no-color.org.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ipujax.runtime.memory import MemoryReport

Row = tuple[str, ...]


def table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a heading, and under it a line with label and value for each row."""
    width = max((len(label) for label, _ in rows), default=0) + 1
    return "\n".join([f"{title}:", *(f"  {label + ':':<{width}}  {value}" for label, value in rows)])


def share(part: float, total: float) -> str:
    """Return a part as a percentage of the whole, of a fixed width."""
    return f"{100 * part / total if total else 0:5.1f} %"


def size(num_bytes: float) -> str:
    """Return bytes in the largest unit of which there is at least one."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def duration(seconds: float) -> str:
    """Return a time in the largest unit of which there is at least one."""
    return _in_units(seconds, "s")


def energy(joules: float) -> str:
    """Return an energy in the largest unit of which there is at least one."""
    return _in_units(joules, "J")


def _in_units(value: float, unit: str) -> str:
    for prefix, factor in (("", 1.0), ("m", 1e-3), ("µ", 1e-6)):
        if value >= factor:
            return f"{value / factor:,.3f} {prefix}{unit}"
    return f"{value / 1e-9:,.1f} n{unit}"


def text_table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table; rows have equally many texts, columns the width of their widest one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


BOLD, CYAN, GREEN, RED = "1", "36", "32", "31"
_LABEL = re.compile(r"^( +)([^:*]*:)( )")  # of a row
_BAR = re.compile(r"\*{1,}")
_ALARM = re.compile(r"^ *(Out of memory|Overflowed):")


def wants_colours(requested: bool | None, *, is_terminal: bool, environment: Mapping[str, str] | None = None) -> bool:
    """Return whether output gets colours: as NO_COLOR and CLICOLOR say, else as requested, else on a terminal."""
    environment = os.environ if environment is None else environment
    if environment.get("NO_COLOR"):
        return False
    if environment.get("CLICOLOR_FORCE", "") not in ("", "0"):
        return True
    if environment.get("CLICOLOR") == "0":
        return False
    supports_colours = is_terminal and environment.get("TERM") != "dumb"
    return supports_colours if requested is None else requested


def coloured(text: str) -> str:
    """Return a summary with its headings, labels, bars and alarms in colours."""
    return "\n".join(map(_line, text.split("\n")))


def _line(line: str) -> str:
    if _ALARM.match(line):
        return _in(line, RED)
    if line and not line.startswith(" "):
        return _in(line, f"{BOLD};{CYAN}")
    if "*" in line:
        return _BAR.sub(lambda bar: _in(bar[0], GREEN), line)
    return _LABEL.sub(lambda label: label[1] + _in(label[2], BOLD) + label[3], line)


def _in(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"


def section(title: str, lines: Iterable[object]) -> str:
    """Join a heading and the lines below it; "" without lines."""
    indented = [f"  {line}" for line in lines]
    return "\n".join([f"{title}:", *indented]) if indented else ""


def out_of_memory(memory: MemoryReport) -> str:
    """Return a clause with the number of tiles that lack memory and the worst of them; empty where all fits."""
    if not (lacking := memory.lacking()):
        return ""
    kind = max(lacking, key=lambda name: int(lacking[name].max()))
    short = lacking[kind]
    need = memory.needed(kind)
    limit = memory.limits[kind]
    worst = int(short.argmax())
    tiles = int(np.count_nonzero(short))
    of_kind = "" if kind == "memory" else kind.removeprefix("memory")
    return (
        f"{tiles:,} of {len(short):,} tile{'s' * (len(short) > 1)} need{'s' * (tiles == 1)} more than {size(limit)}"
        f"{of_kind}; tile {worst:,} needs most, {size(int(need[worst]))}, which is {size(int(short[worst]))} too much "
        f"({need[worst] / limit:,.0%} full)"
    )
