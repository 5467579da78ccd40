"""Common parts of a page's charts: size, tools, colours, units on axes, and buttons for readers without a mouse.

Input: names and labels. Output: figures of Bokeh, and the markup beside them.
Source of the palettes: Okabe and Ito, "Color Universal Design", 2008, for phases; Cividis (Nuñez, Anderton, Renslow,
2018) for amounts. People who confuse red and green can distinguish the colours of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ipujax.runtime.markup import Markup, tag
from ipujax.runtime.page.document import bokeh

PHASE_COLOURS = {
    "compute": "#0072B2",
    "exchange": "#E69F00",
    "global_exchange": "#D55E00",
    "host_exchange": "#CC79A7",
    "sync": "#009E73",
    "idle": "#B8B8B8",
}
ACCENT = "#2A85C7"  # a blue a little lighter than that of phases, for thin lines on dark pages
SECOND = "#D55E00"
AMOUNTS = "Cividis256"
OVER = "#D55E00"  # of amounts beyond the scale
SIZE_OF_TICK = "return window.ipujaxPage.size(tick)"
_MIN_RANGE = 4  # cycles or steps, when zoomed in
_BINARY = [2**power for power in range(10)]


def chart(
    name: str, x_label: str, y_label: str, height: int, tools: str = "xbox_zoom,xpan,xwheel_zoom", **properties: Any
) -> Any:
    """Return an empty figure of Bokeh, `height` pixels high; `page.js` finds it by name, and colours it as the page."""
    figure = bokeh("plotting").figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        tools=f"{tools},reset,save",
        active_scroll=None,
        x_axis_label=x_label,
        y_axis_label=y_label,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        **properties,
    )
    figure.toolbar.logo = None
    if (box_zoom := _tool(figure, bokeh("models").BoxZoomTool)) is not None:
        figure.toolbar.active_drag = box_zoom  # Bokeh's own choice is to pan
    return figure


def _tool(figure: Any, kind: type) -> Any:
    """Return the tool of a kind, None without; Bokeh's `select_one` searches all parts of the figure."""
    return next((tool for tool in figure.toolbar.tools if isinstance(tool, kind)), None)


def add_rectangles(figure: Any, source: Mapping[str, Any], name: str | None = None, **style: Any) -> Any:
    """Add rectangles, and return Bokeh's renderer of them.

    In the place of `figure.quad`, which makes four more glyphs for rectangles that are selected or muted.

    Args:
        figure: of Bokeh.
        source: columns "left", "right", "top" and "bottom", and those that are shown on them.
        name: by which scripts find them.
        style: properties of Bokeh's `Quad`.
    """
    models = bokeh("models")
    edges = {edge: edge for edge in ("left", "right", "top", "bottom")}
    return figure.add_glyph(models.ColumnDataSource(dict(source)), models.Quad(**(edges | style)), name=name)


def format_thousands(figure: Any) -> None:
    """Format the numbers of the horizontal axis with thousands separators."""
    for axis in figure.xaxis:
        axis.formatter = bokeh("models").NumeralTickFormatter(format="0,0")


def bytes_axis(figure: Any) -> None:
    """Label the vertical axis in KiB, MiB…, at whole numbers of them."""
    for axis in figure.yaxis:
        axis.formatter = bokeh("models").CustomJSTickFormatter(code=SIZE_OF_TICK)
        axis.ticker = bokeh("models").AdaptiveTicker(base=1024, mantissas=_BINARY, desired_num_ticks=5)


def zoom_by_wheel(figure: Any, last: float) -> None:
    """Zoom the horizontal axis, from 0 to `last`, by the wheel about the pointer; a double click shows all."""
    models = bokeh("models")
    figure.x_range = models.Range1d(0, last, bounds=(0, last), min_interval=min(_MIN_RANGE, last))
    figure.toolbar.active_scroll = _tool(figure, models.WheelZoomTool)
    figure.toolbar.active_scroll.maintain_focus = False  # at an end of the axis it goes on at the other
    figure.js_on_event("doubletap", models.CustomJS(code=f"window.ipujaxPage.showAll('{figure.name}')"))


def zoom_buttons(name: str, content: str) -> Markup:
    """Return buttons that zoom and move a chart along its horizontal axis; `content` labels them for screen readers."""
    steps = (
        ("in", "Zoom in", "+"),
        ("out", "Zoom out", "−"),
        ("left", "Move left", "◀"),
        ("right", "Move right", "▶"),
        ("all", "Show all", "All"),
    )
    buttons = (
        tag(
            "button", sign, type="button", data_zoom=name, data_step=step, aria_label=f"{label}: {content}", title=label
        )
        for step, label, sign in steps
    )
    return tag("div", *buttons, class_="zoom", role="group", aria_label=f"Zoom: {content}")


def legend(colours: Mapping[str, str], patterns: Mapping[str, str] = MappingProxyType({})) -> Markup:
    """Return a list of names beside their colours, or beside patterns, which are classes of the style sheet."""
    items = (
        tag("li", tag("span", class_="swatch", style=f"background:{colour}"), name.replace("_", " "))
        for name, colour in colours.items()
    )
    patterned = (tag("li", tag("span", class_=f"swatch {kind}"), name) for name, kind in patterns.items())
    return tag("ul", *items, *patterned, class_="legend")


def bar(part: float, total: float, colour: str = ACCENT) -> Markup:
    """Return a horizontal bar for a cell of a table, as wide as the cell where `part` is `total`; "" for no width."""
    width = round(100 * part / total, 1) if total else 0
    if not width:  # as of most steps of a large program
        return Markup()
    # The number is beside it: a screen reader skips the bar.
    return tag("span", class_="bar", style=f"width:{width}%;background:{colour}", aria_hidden="true")
