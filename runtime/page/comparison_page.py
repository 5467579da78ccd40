"""Page of the changes between two profiles.

Input: figures of both and the operations that differ, as plain values. Output: HTML in the style of a profile's page,
without charts, and so without Bokeh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ipujax.runtime.markup import Markup, join_markup, tag
from ipujax.runtime.page.charts import ACCENT, SECOND, bar
from ipujax.runtime.page.document import Column, DataTable, Section, Tab, document, sentence

Pairs = Mapping[str, tuple[float, float]]
MAX_ROWS = 500


@dataclass(frozen=True, slots=True)
class ComparedFigures:
    """Operation of a line in two profiles.

    Args:
        name: of the operation.
        line: of source.
        figures: (before, after) by name.
    """

    name: str
    line: str
    figures: Pairs


def comparison_page(
    names: tuple[str, str],
    titles: tuple[str, str],
    verdict: str,
    totals: Pairs,
    phases: Pairs,
    categories: Pairs,
    layers: Pairs,
    rows: Sequence[ComparedFigures],
) -> str:
    """Return the page; arguments as the fields of `Comparison`, pairs are (before, after).

    Args:
        names: of both profiles; "" without one.
        titles: of both profiles, a line each.
        verdict: the main change, in sentences.
        totals: figures of the runs.
        phases: cycles of each phase of the limiting IPUs.
        categories: bytes of each category on all tiles.
        layers: busy cycles of the layers that differ, largest change first.
        rows: the operations that differ, largest change first.
    """
    before, after = titles
    intro = join_markup([tag("p", tag("strong", "Before: "), before), tag("p", tag("strong", "After: "), after)])
    sections = [
        Section("summary", "Summary", join_markup([intro, _verdict(verdict, totals), _pairs("Figure", totals)])),
        Section(
            "phases",
            "Phases",
            join_markup([sentence("Cycles of the IPU that is busy for most cycles."), _pairs("Phase", phases)]),
        ),
        Section("categories", "Memory", join_markup([sentence("Bytes on all tiles."), _pairs("Category", categories)])),
        Section("layers", "Layers", _layers(layers)),
        _operations(rows),
    ]
    both = " → ".join(dict.fromkeys(names)) if all(names) else "two profiles"
    tabs = [Tab(section.key, section.title, [section]) for section in sections]
    return document(f"What changed: {both}", f"{len(rows):,} operations differ", tabs)


def _verdict(verdict: str, totals: Pairs) -> Markup:
    tile = totals["tile_bytes"]
    text = f"{verdict} The fullest tile holds {tile[0]:,.0f} → {tile[1]:,.0f} B ({_ratio(*tile)})."
    return tag("div", tag("article", tag("h3", "What changed most?"), tag("p", text)), class_="answers")


def _ratio(before: float, after: float) -> str:
    return "same" if before == after else f"{after / before - 1:+.1%}" if before else "new"


def _pairs(head: str, pairs: Pairs) -> Markup:
    """Return a table with a row for each figure that is not 0 in both profiles, and bars for both."""
    rows = [
        tag(
            "tr",
            tag("th", name.replace("_", " "), scope="row"),
            *(tag("td", _format_figure(name, value), class_="number") for value in (before, after)),
            tag("td", _ratio(before, after), class_="number"),
            tag("td", bar(before, max(before, after), SECOND), bar(after, max(before, after), ACCENT)),
        )
        for name, (before, after) in pairs.items()
        if before or after
    ]
    heads = (tag("th", text, scope="col") for text in (head, "Before", "After", "Change", "Both"))
    return tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows))


def _format_figure(name: str, value: float) -> str:
    return f"{value:,.3e}" if name == "seconds" else f"{value:,g}" if name == "byte_cost" else f"{value:,.0f}"


def _layers(layers: Pairs) -> Markup:
    if not layers:
        return sentence("No layer differs.")
    listed = dict(list(layers.items())[:MAX_ROWS])
    return join_markup([sentence("Busy cycles of all IPUs, without those of layers inside."), _pairs("Layer", listed)])


def _operations(rows: Sequence[ComparedFigures]) -> Section:
    """Return the section of the operations that differ, with a table of their changes."""
    if not rows:
        return Section("operations", "Operations", sentence("No operation differs."))
    columns = [
        Column("Operation", "text", [row.name for row in rows]),
        Column("Line", "text", [row.line for row in rows]),
    ]
    for name in rows[0].figures:
        title = name.replace("_", " ")
        pairs = [row.figures[name] for row in rows]
        columns.append(Column(title, "number", [after - before for before, after in pairs], "second minus first"))
        columns.append(Column(f"{title} before", "number", [before for before, _ in pairs]))
        columns.append(Column(f"{title} after", "number", [after for _, after in pairs]))
    table = DataTable("operations-table", "Operations that differ", columns)
    intro = "Second minus first, and both; operations are matched by line, layer and name."
    return Section("operations", "Operations", join_markup([sentence(intro), table.place()]), data=table.data())
