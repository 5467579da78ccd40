"""Page of HTML that needs no network: head, styles, tabs of sections, charts, tables, scripts.

Input: tabs of sections of markup, charts of Bokeh, tables of data, and data for scripts. Output: the text of a page.
Charts are drawn by BokehJS, tables by Tabulator, when their tab is first opened; both are in the page, as are its own
styles and scripts. Without JavaScript all sections are shown, one below the other, without charts and data tables.
Tabulator 6.5.3 (MIT, `tabulator.LICENSE`) is in this folder as published. Bokeh's own tables, the alternative, have no
filter by column and no CSV, and their cells are no links: all of that would be code of ours.
Limits: a page without charts has no BokehJS, and Bokeh need not be installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from typing import Any, Literal

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.markup import Markup, escaped, join_markup, tag

STYLES = ("tabulator.min.css", "page.css")
SCRIPTS = ("page.js", "tables.js", "graph.js", "passes.js", "memory.js", "trace.js", "links.js")
# `<` would end the script in `</script>`, the separators would end a line of it; & and > for old parsers.
_JS_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
Kind = Literal["text", "number", "bytes", "share", "link", "trace", "map"]


@dataclass(frozen=True, slots=True)
class Section:
    """Section of a page.

    Args:
        key: its id.
        title: its heading.
        body: below the heading; an empty one omits the section.
        charts: its charts by name; `chart_place` is the place of one in the body.
        data: JSON-able values by name, for `page.js`.
    """

    key: str
    title: str
    body: Markup
    charts: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table.

    Args:
        title: its heading.
        kind: of its cells: "text"; "number", "bytes" and "share" are numbers, None for no value; "link" is (text, id of
            an element of the page, "" for none); "trace" is a target of `Anchors.trace_target`; "map" is the number of
            a variable.
        cells: a value for each row.
        note: what the heading means, which the pointer shows.
    """

    title: str
    kind: Kind
    cells: Sequence[Any]
    note: str = ""

    def data(self) -> dict[str, Any]:
        """Return JSON-able data; of cells that repeat each value stands once."""
        head = {"title": self.title, "kind": self.kind} | ({"note": self.note} if self.note else {})
        numbers: dict[Any, int] = {}
        positions = [numbers.setdefault(cell, len(numbers)) for cell in self.cells]
        if 2 * len(numbers) > len(positions):
            return head | {"values": list(self.cells)}
        return head | {"values": list(numbers), "at": positions}


@dataclass(frozen=True, slots=True)
class DataTable:
    """Table of data.

    Args:
        name: id of its place, and name of its CSV file.
        label: what it lists, for screen readers.
        columns: of equal length.
        ids: address of each row; empty for rows without.
        sorted_by: title of the column by which it is sorted, largest first; "" for the order of the cells.
    """

    name: str
    label: str
    columns: Sequence[Column]
    ids: Sequence[str] = ()
    sorted_by: str = ""

    def place(self, rows_of: str | None = None) -> Markup:
        """Return the place of the table, which may show the rows of another, by its name."""
        waiting = tag("p", "This table needs JavaScript.", class_="missing")
        label = {"role": "region", "aria_label": self.label, "data_rows_of": rows_of}
        return tag("div", waiting, id=self.name, class_="data-table", data_table=self.name, **label)

    def data(self) -> dict[str, Any]:
        """Return data of a section, for `tables.js`."""
        columns = [column.data() for column in self.columns]
        return {"tables": {self.name: {"columns": columns, "ids": list(self.ids), "sortedBy": self.sorted_by}}}


@dataclass(frozen=True, slots=True)
class Tab:
    """Tab of a page.

    Args:
        key: its id.
        title: its name.
        sections: in their order; those with an empty body are left out, and a tab without any with them.
    """

    key: str
    title: str
    sections: Sequence[Section]


def bokeh(module: str) -> Any:
    """Import a module of Bokeh, an optional dependency; refuse its absence with a hint."""
    try:
        return import_module(f"bokeh.{module}")
    except ImportError:
        hint = "pip install 'ipujax[report]'; profile.summary() needs nothing"
        raise ProfileError("pages need the package bokeh, which is not installed", hint=hint) from None


def chart_place(name: str, describes: str) -> Markup:
    """Return the place of a chart, with a description for readers who cannot see it."""
    return tag("div", class_="chart", id=f"chart-{name}", data_chart=name, role="figure", aria_label=describes)


@dataclass(frozen=True, slots=True)
class Alarm:
    """Failure that a reader must see first; it takes the place of the heading.

    Args:
        kind: in two or three words, which also begin the title of the window.
        text: the rest of the heading.
        ways: changes to try.
    """

    kind: str
    text: str
    ways: Sequence[str]


@dataclass(frozen=True, slots=True, repr=False)
class PageFrame:
    """Page in a frame, which a notebook shows.

    Args:
        page: its text.
        height: of the frame, in pixels.
    """

    page: str
    height: int

    def __repr__(self) -> str:
        return f"PageFrame(a page of {len(self.page):,} characters, which a notebook shows; to_html(path) writes it)"

    def _repr_html_(self) -> str:
        style = f"width:100%;height:{self.height}px;border:0"
        return tag("iframe", srcdoc=self.page, style=style, title="Profile")


def document(
    title: str, subtitle: str, tabs: Sequence[Tab], alarm: Alarm | None = None, *, is_searched: bool = False
) -> str:
    """Return the text of a page of tabs, the first open; an alarm replaces the heading, charts need Bokeh."""
    filled = [(tab, [section for section in tab.sections if section.body]) for tab in tabs]
    filled = [(tab, sections) for tab, sections in filled if sections]
    all_sections = [section for _, sections in filled for section in sections]
    charts = {name: chart for section in all_sections for name, chart in section.charts.items()}
    data = _merged(section.data for section in all_sections)
    names = (_tab(tab, is_first=number == 0) for number, (tab, _) in enumerate(filled))
    above = [_ways(alarm), *[""] * len(filled)]  # remedies are on the first tab
    panels = (_panel(tab, sections, ways) for (tab, sections), ways in zip(filled, above, strict=False))
    head = join_markup(
        [
            Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            tag("title", f"{alarm.kind}: {title}" if alarm else title),
            tag("style", Markup("".join(map(_file, STYLES)))),
        ]
    )
    body = join_markup(
        [
            tag("a", "Skip to the report", href="#main", class_="skip"),
            tag("header", *_heading(title, alarm), tag("p", subtitle)),
            tag(
                "nav",
                tag("div", *names, role="tablist", aria_label="Parts of the report"),
                _search_box() if is_searched else "",
                aria_label="Report",
            ),
            tag("main", *panels, id="main", tabindex=-1),
            Markup(f'<script type="application/json" id="page-data">{_json(data)}</script>'),
            *_embed_charts(charts),
            Markup(f"<script>/*\n{_file('tabulator.LICENSE')}*/\n{_file('tabulator.min.js')}</script>"),
            *(Markup(f"<script>{_file(name)}</script>") for name in SCRIPTS),
        ]
    )
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def _merged(data_of_sections: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the data of all sections by name; those of tables are one."""
    merged: dict[str, Any] = {"tables": {}}
    for data in data_of_sections:
        merged["tables"] |= data.get("tables", {})
        merged |= {name: value for name, value in data.items() if name != "tables"}
    return merged


def _tab(tab: Tab, *, is_first: bool) -> Markup:
    chosen = {"aria_selected": "true" if is_first else "false", "tabindex": 0 if is_first else -1}
    panel = f"panel-{tab.key}"
    return tag("a", tab.title, href=f"#{panel}", role="tab", id=f"tab-{tab.key}", aria_controls=panel, **chosen)


def _panel(tab: Tab, sections: Sequence[Section], above: Markup | str) -> Markup:
    label = {"role": "tabpanel", "aria_labelledby": f"tab-{tab.key}"}
    return tag("div", above, *map(_section, sections), id=f"panel-{tab.key}", **label)


def _heading(title: str, alarm: Alarm | None) -> tuple[Markup, ...]:
    if alarm is None:
        return tag("h1", title), _theme_button()
    heading = tag("h1", f"{alarm.kind}: {alarm.text}", class_="alarm")
    return heading, _theme_button(), tag("p", title, class_="title")


def _ways(alarm: Alarm | None) -> Markup:
    if alarm is None or not alarm.ways:
        return Markup()
    return tag("div", tag("p", "Try:"), tag("ul", *(tag("li", way) for way in alarm.ways)), class_="ways alarm-ways")


def _search_box() -> Markup:
    """Return a field that filters all tables and marks slices of the trace; `links.js` unhides it."""
    field = tag(
        "input",
        type="search",
        id="search",
        placeholder="Search all tables  ( / )",
        aria_label="Search operations, lines, layers, variables",
        aria_keyshortcuts="/",
    )
    return tag("div", field, tag("output", id="found", aria_live="polite"), class_="search", hidden=True)


def _theme_button() -> Markup:
    return tag("button", "Dark", type="button", id="theme", aria_pressed="false", title="Light or dark")


def _section(section: Section) -> Markup:
    heading = tag("h2", section.title, id=f"{section.key}-title")
    return tag("section", heading, section.body, id=section.key, aria_labelledby=f"{section.key}-title")


def _embed_charts(charts: Mapping[str, Any]) -> Iterable[Markup]:
    """Yield BokehJS, and each chart as data that `page.js` draws; nothing without charts."""
    if charts:
        yield Markup(bokeh("resources").Resources(mode="inline", components=["bokeh"]).render())
    for name, chart in charts.items():
        # As Bokeh's `json_item`, which also validates the figure and looks for callbacks of a server.
        drawn = bokeh("document").Document(title="")
        drawn.add_root(chart)
        content = drawn.to_json(deferred=False)
        text = _json({"root_id": chart.id, "doc": content, "version": content["version"]})
        yield Markup(f'<script type="application/json" id="drawing-{name}">{text}</script>')


def _json(data: Any) -> str:
    """Return JSON that can be inside a script of a page."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for character, code in _JS_ESCAPES.items():
        text = text.replace(character, code)
    return text


def _file(name: str) -> str:
    return (files("ipujax.runtime.page") / name).read_text(encoding="utf-8")


def sentence(text: object) -> Markup:
    """Return a paragraph of plain text."""
    return tag("p", escaped(text))


def fold_buttons() -> Markup:
    """Return buttons that fold and unfold the tree of their section."""
    buttons = {"open": "Unfold all", "closed": "Fold all"}
    return tag(
        "div", *(tag("button", text, type="button", data_fold=to) for to, text in buttons.items()), class_="zoom"
    )
