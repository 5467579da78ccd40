"""Page of HTML that needs no network: head, styles, charts, sections, scripts.

Input: sections of markup, charts of Bokeh, and data for scripts. Output: the text of a page. Charts are drawn by
BokehJS, which is in the page, as are `page.css` and `page.js`.
Limits: a page without charts has no BokehJS, and Bokeh need not be installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from typing import Any

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.markup import Markup, escaped, join_markup, tag

# `<` would end the script in `</script>`, the separators would end a line of it; & and > for old parsers.
_JS_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


@dataclass(frozen=True, slots=True)
class Section:
    """Section of a page.

    Args:
        key: its id.
        title: its heading.
        body: below the heading; an empty one omits the section.
        charts: its charts by name; `chart_place` marks the place of one in the body.
        data: JSON-able values by name, for `page.js`.
    """

    key: str
    title: str
    body: Markup
    charts: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


def bokeh(module: str) -> Any:
    """Import a module of Bokeh, an optional dependency; refuse its absence with a hint."""
    try:
        return import_module(f"bokeh.{module}")
    except ImportError:
        hint = "pip install 'ipujax[report]'; profile.summary() needs nothing"
        raise ProfileError("pages need the package bokeh, which is not installed", hint=hint) from None


def chart_place(name: str, describes: str) -> Markup:
    """Return the place of a chart, with a description for readers who cannot see it."""
    return tag("div", _placeholder(name), class_="chart", id=f"chart-{name}", role="figure", aria_label=describes)


def _placeholder(name: str) -> Markup:
    return Markup(f"<!--chart:{name}-->")


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


def document(
    title: str, subtitle: str, sections: Sequence[Section], alarm: Alarm | None = None, *, is_searched: bool = False
) -> str:
    """Return the text of a page of sections, in order; an alarm replaces the heading, charts need Bokeh."""
    charts = {name: chart for section in sections for name, chart in section.charts.items()}
    data = {name: value for section in sections for name, value in section.data.items()}
    resources, places, drawing = _embed_charts(charts) if charts else (Markup(), {}, Markup())
    links = (tag("a", section.title, href=f"#{section.key}") for section in sections)
    head = join_markup(
        [
            Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
            tag("title", f"{alarm.kind}: {title}" if alarm else title),
            tag("style", Markup(_file("page.css"))),
        ]
    )
    body = join_markup(
        [
            tag("a", "Skip to the report", href="#main", class_="skip"),
            tag("header", *_heading(title, alarm), tag("p", subtitle), _ways(alarm)),
            tag("nav", *links, _search_box() if is_searched else "", aria_label="Sections"),
            tag("main", *map(_section, sections), id="main"),
            Markup(f'<script type="application/json" id="page-data">{_json(data)}</script>'),
            resources,
            drawing,
            Markup(f"<script>{_file('page.js')}{_file('links.js')}</script>"),
        ]
    )
    for name, place in places.items():  # last, since Bokeh makes all places and the script at once
        body = Markup(body.replace(_placeholder(name), place))
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


def _heading(title: str, alarm: Alarm | None) -> tuple[Markup, ...]:
    if alarm is None:
        return tag("h1", title), _theme_button()
    heading = tag("h1", f"{alarm.kind}: {alarm.text}", class_="alarm")
    return heading, _theme_button(), tag("p", title, class_="title")


def _ways(alarm: Alarm | None) -> Markup:
    if alarm is None or not alarm.ways:
        return Markup()
    return tag("div", tag("p", "Try:"), tag("ul", *(tag("li", way) for way in alarm.ways)), class_="ways")


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


def _embed_charts(charts: Mapping[str, Any]) -> tuple[Markup, Mapping[str, str], Markup]:
    """Return BokehJS, the place of each chart, and the script that draws them there."""
    resources = bokeh("resources").Resources(mode="inline", components=["bokeh"])
    script, places = bokeh("embed").components(dict(charts))
    return Markup(resources.render()), places, Markup(script)


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
