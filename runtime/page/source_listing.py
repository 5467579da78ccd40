"""Source section of a page: a table of lines, and the user's files, with cycles and bytes beside each line.

Input: `SourceFile`s. Output: a section.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ipujax.runtime.markup import Markup, join_markup, tag
from ipujax.runtime.page.anchors import MAX_FILES, Anchors, listed_files
from ipujax.runtime.page.charts import bar
from ipujax.runtime.page.document import Column, DataTable, Section, sentence
from ipujax.runtime.profile.text import size
from ipujax.runtime.views import SourceFile
from ipujax.runtime.views.source_view import LineCost

_HEADS = ("Cycles", "", "Share", "Links", "Line", "", "Moved", "Variables")
_CODE = 5  # the column of the text


def source_section(files: Sequence[SourceFile], anchors: Anchors) -> Section:
    """Return the section of the files, of which the first, the most expensive, is unfolded."""
    max_cycles = max((cost.cycles for file in files for cost in file.costs.values()), default=0)
    listings = [_file(file, max_cycles, number == 0, anchors) for number, file in enumerate(listed_files(files))]
    num_omitted = sum(bool(file.cycles) for file in files) - MAX_FILES
    note = f"{num_omitted:,} more files are left out." if num_omitted > 0 else ""
    intro = "Cycles of a line are those of all its operations. Files are shown as they were when this page was made."
    lines = _line_table(files, anchors)
    body = join_markup([sentence(f"{intro} {note}"), lines.place(), *listings])
    return Section("source", "Source", body, data=lines.data())


def _line_table(files: Sequence[SourceFile], anchors: Anchors) -> DataTable:
    """Return the table of all lines with a cost."""
    rows = [(file, number, cost) for file in files for number, cost in file.costs.items()]
    links = [(f"{file.name}:{number}", anchors.lines.get((file.path, number), "")) for file, number, _ in rows]
    texts = [file.lines[number - 1].strip() if number <= len(file.lines) else "" for file, number, _ in rows]
    columns = (
        Column("Line", "link", links),
        Column("Text", "text", texts),
        Column("Trace", "trace", [anchors.trace_target("line", link) if link else "" for _, link in links]),
        Column("Cycles", "number", [cost.cycles for *_, cost in rows], "busy cycles of all IPUs"),
        Column("Share", "share", [cost.share for *_, cost in rows]),
        Column("Moved", "bytes", [cost.moved_bytes for *_, cost in rows], "bytes that arrive on tiles or the host"),
        Column("Variables", "bytes", [cost.variable_bytes for *_, cost in rows], "size of its variables"),
        Column("Operations", "text", [", ".join(cost.names[:6]) for *_, cost in rows]),
        Column("Layers", "text", [", ".join(cost.layers[:3]) for *_, cost in rows]),
    )
    return DataTable("lines-table", "Lines of source", columns, sorted_by="Cycles")


def _file(file: SourceFile, max_cycles: int, is_open: bool, anchors: Anchors) -> Markup:
    """Return the listing of a file's text with the costs of each line."""
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in _HEADS)))
    costliest = max(file.costs, key=lambda number: file.costs[number].cycles)  # `page.js` scrolls to it
    rows = (_line(file, number, max_cycles, number == costliest, anchors) for number in file.listed_lines())
    lines = f"{len(file.costs):,} line{'s' * (len(file.costs) != 1)}"
    title = join_markup([tag("strong", file.name), f" {file.cycles:,} cycles on {lines} "])
    missing = "" if file.lines else sentence("The text of this file could not be read.")
    listing = tag("table", head, tag("tbody", *rows), class_="code")
    label = {"role": "region", "aria_label": file.name}
    region = tag("div", listing, class_="scroll", tabindex=0, data_search="source", **label)
    head_line = tag("summary", title, tag("span", _folder(file), class_="line"))
    return tag("details", head_line, missing, region, open=is_open)


def _folder(file: SourceFile) -> str:
    # A cell of a notebook has a temporary file, whose path would tell nothing.
    return file.path if Path(file.path).name == file.name else ""


def _line(file: SourceFile, number: int | None, max_cycles: int, is_costliest: bool, anchors: Anchors) -> Markup:
    """Return a row of a listing: the costs and the text of a line, or a gap where `number` is None."""
    if number is None:  # a gap between listed lines
        return tag("tr", tag("td", "⋯", colspan=len(_HEADS)))
    cost = file.costs.get(number, LineCost())
    text = file.lines[number - 1] if number <= len(file.lines) else ""
    anchor = anchors.lines.get((file.path, number), "")
    cells = (
        f"{cost.cycles:,}" if cost.cycles else "",
        bar(cost.cycles, max_cycles) if cost.cycles else "",
        f"{cost.share:.1%}" if cost.cycles else "",
        join_markup(_links(cost, anchor, anchors), " "),
        number,
        tag("code", text),
        size(cost.moved_bytes) if cost.moved_bytes else "",
        size(cost.variable_bytes) if cost.variable_bytes else "",
    )
    columns = (tag("td", cell, class_=None if n == _CODE else "number") for n, cell in enumerate(cells))
    title = ", ".join(cost.names[:6]) or None
    is_highlighted = cost.cycles > 0.1 * max_cycles > 0
    marks = {"class_": "dear" if is_highlighted else None, "data_dearest": is_costliest}  # names in css and js
    return tag("tr", *columns, title=title, id=anchor or None, data_find=_search_words(file, number, cost), **marks)


def _search_words(file: SourceFile, number: int, cost: LineCost) -> str | None:
    """Return the words, beside the text of a line, by which a search matches it."""
    return " ".join([f"{file.name}:{number}", *cost.names, *cost.layers]) if cost.names or cost.layers else None


def _links(cost: LineCost, anchor: str, anchors: Anchors) -> list[Markup | str]:
    """Return links to the most expensive operation of a line, its layer, and its slices in the trace."""
    if not cost.cycles or not anchor:
        return []
    operation = anchors.operation(cost.operation, "operation") if cost.operation in anchors.operations else ""
    layer = anchors.layer(cost.layers[0], "layer") if cost.layers and cost.layers[0] in anchors.layers else ""
    return [part for part in (operation, layer, anchors.trace("line", anchor)) if part]
