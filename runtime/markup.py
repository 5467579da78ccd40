"""HTML from values: text is always escaped, so that no name can become markup.

Input: values. Output: `Markup`, a string that is HTML already; any other value is escaped when an element takes it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_VOID = frozenset({"br", "hr", "img", "input", "meta"})  # elements without content and end


class Markup(str):
    """HTML; joined and formatted by the functions of this module only."""

    __slots__ = ()


def escaped(value: object) -> Markup:
    """Return a value as HTML: markup unchanged, any other value as escaped text."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value), quote=True))


def join_markup(parts: Iterable[object], separator: str = "") -> Markup:
    """Return parts one after the other, with a separator, HTML, between them; values other than markup are escaped."""
    return Markup(separator.join(map(escaped, parts)))


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: `div`.
        content: its children, markup or values.
        attributes: with underscores for hyphens, and one at the end of a Python keyword; None and False leave one out,
            True is one without value.
    """
    texts = [
        key.rstrip("_").replace("_", "-") + ("" if value is True else f'="{html.escape(str(value), quote=True)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    ]
    start = f"<{' '.join([name, *texts])}>"
    return Markup(start if name in _VOID else f"{start}{join_markup(content)}</{name}>")


def table(head: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "") -> Markup:
    """Return a plain table, with numbers aligned right.

    Args:
        head: titles of the columns; no head if empty.
        rows: cells of each row, as many as the head has.
        caption: text above it; none if empty.
    """
    top = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))) if head else ""
    body = tag("tbody", *(tag("tr", *(_cell(n, cell) for n, cell in enumerate(row))) for row in rows))
    return tag("table", tag("caption", caption) if caption else "", top, body)


def _cell(column: int, value: object) -> Markup:
    # A bool is an int in Python.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if column == 0:
        return tag("th", value, scope="row", style="text-align:left")
    return tag("td", f"{value:,}" if is_number else value, style="text-align:right" if is_number else None)
