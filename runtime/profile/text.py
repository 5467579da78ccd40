"""How figures look in texts for people: tables, bytes, seconds, shares."""

from __future__ import annotations

from collections.abc import Sequence


def table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """A heading, and under it a label and a value a row."""
    width = max((len(label) for label, _ in rows), default=0) + 1
    return "\n".join([f"{title}:", *(f"  {label + ':':<{width}}  {value}" for label, value in rows)])


def share(part: float, whole: float) -> str:
    """A part as a percentage of the whole, in columns."""
    return f"{100 * part / whole if whole else 0:5.1f} %"


def size(num_bytes: float) -> str:
    """Bytes in the largest unit that gives at least one."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def duration(seconds: float) -> str:
    """A time in the largest unit that gives at least one."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:,.3f} {unit}"
    return f"{seconds / 1e-9:,.1f} ns"
