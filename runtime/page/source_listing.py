"""The source section of a page: the user's files, with cycles and bytes beside each line.

Input: `SourceFile`s. Output: a section.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ipujax.runtime.markup import Markup, joined, tag
from ipujax.runtime.page.charts import bar
from ipujax.runtime.page.document import Section, sentence
from ipujax.runtime.profile.text import size
from ipujax.runtime.views import SourceFile
from ipujax.runtime.views.source_view import LineCost

MOST_FILES = 12
_HEADS = ("Cycles", "", "Share", "Line", "", "Moved", "Variables")
_CODE = 4  # the column of the text


def source_section(files: Sequence[SourceFile]) -> Section:
    """The files.

    Args:
        files: dearest first.
    """
    most = max((cost.cycles for file in files for cost in file.costs.values()), default=0)
    files = [file for file in files if file.cycles] or files
    listings = [_file(file, most, number == 0) for number, file in enumerate(files[:MOST_FILES])]
    rest = f"{len(files) - MOST_FILES:,} more files are left out." if len(files) > MOST_FILES else ""
    intro = "Cycles of a line are those of all its operations. Files are shown as they were when this page was made."
    return Section("source", "Source", joined([sentence(f"{intro} {rest}"), *listings]))


def _file(file: SourceFile, most: int, is_open: bool) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in _HEADS)))
    dearest = max(file.costs, key=lambda number: file.costs[number].cycles)
    rows = (_line(file, number, most, number == dearest) for number in file.shown())
    title = joined([tag("strong", file.name), f" {file.cycles:,} cycles on {len(file.costs):,} lines "])
    missing = "" if file.lines else sentence("The text of this file could not be read.")
    listing = tag("table", head, tag("tbody", *rows), class_="code")
    region = tag("div", listing, class_="scroll", tabindex=0, role="region", aria_label=file.name)
    head_line = tag("summary", title, tag("span", _folder(file), class_="line"))
    return tag("details", head_line, missing, region, open=is_open)


def _folder(file: SourceFile) -> str:
    """The path of a file; nothing for the temporary file of a cell."""
    return file.path if Path(file.path).name == file.name else ""


def _line(file: SourceFile, number: int | None, most: int, is_dearest: bool) -> Markup:
    if number is None:
        return tag("tr", tag("td", "⋯", colspan=len(_HEADS)))
    cost = file.costs.get(number, LineCost())
    text = file.lines[number - 1] if number <= len(file.lines) else ""
    cells = (
        f"{cost.cycles:,}" if cost.cycles else "",
        bar(cost.cycles, most) if cost.cycles else "",
        f"{cost.share:.1%}" if cost.cycles else "",
        number,
        tag("code", text),
        size(cost.moved_bytes) if cost.moved_bytes else "",
        size(cost.variable_bytes) if cost.variable_bytes else "",
    )
    shown = (tag("td", cell, class_=None if n == _CODE else "number") for n, cell in enumerate(cells))
    is_dear, title = cost.cycles > 0.1 * most > 0, ", ".join(cost.names[:6]) or None
    return tag("tr", *shown, title=title, class_="dear" if is_dear else None, data_dearest=is_dearest)
