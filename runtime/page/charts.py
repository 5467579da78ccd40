"""What all charts of a page share: size, tools, colours, units on axes, and buttons for those who use no mouse.

Input: names and labels. Output: figures of Bokeh, and the markup beside them.
Source of the palettes: Okabe and Ito, "Color Universal Design", 2008, for phases; Cividis (Nuñez, Anderton, Renslow,
2018) for amounts. Both can be told apart by people who confuse red and green.
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
ACCENT, SECOND = "#2A85C7", "#D55E00"  # blue a little lighter than that of phases, for thin lines on dark pages
AMOUNTS = "Cividis256"
OVER = "#D55E00"  # of amounts beyond the scale
SIZE_OF_TICK = "return window.ipujaxPage.size(tick)"
_LEAST_SHOWN = 4  # cycles or steps, when zoomed in
_BINARY = [2**power for power in range(10)]


def chart(
    name: str, x_label: str, y_label: str, height: int, tools: str = "xbox_zoom,xpan,xwheel_zoom", **more: Any
) -> Any:
    """An empty figure; `page.js` gives it the colours of the page.

    Args:
        name: of the chart, by which scripts find it.
        x_label: of the horizontal axis, with its unit.
        y_label: of the vertical one.
        height: in pixels.
        tools: of Bokeh; dragging zooms to a range if that is among them.
        more: further properties.
    """
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
        **more,
    )
    figure.toolbar.logo = None
    if (box_zoom := figure.select_one(bokeh("models").BoxZoomTool)) is not None:
        figure.toolbar.active_drag = box_zoom  # Bokeh's own choice is to pan
    return figure


def with_separators(figure: Any, axes: str = "xy") -> None:
    """Puts thousands separators into the numbers of axes.

    Args:
        figure: of Bokeh.
        axes: which.
    """
    for axis in [*(figure.xaxis if "x" in axes else ()), *(figure.yaxis if "y" in axes else ())]:
        axis.formatter = bokeh("models").NumeralTickFormatter(format="0,0")


def bytes_axis(figure: Any) -> None:
    """Puts KiB, MiB… on the vertical axis, at whole numbers of them.

    Args:
        figure: of Bokeh.
    """
    for axis in figure.yaxis:
        axis.formatter = bokeh("models").CustomJSTickFormatter(code=SIZE_OF_TICK)
        axis.ticker = bokeh("models").AdaptiveTicker(base=1024, mantissas=_BINARY, desired_num_ticks=5)


def zooms_by_wheel(figure: Any, first: float, last: float) -> None:
    """Makes the wheel zoom a chart about the pointer along its horizontal axis, and a double click show all of it.

    Args:
        figure: of Bokeh.
        first: where its horizontal axis begins.
        last: where it ends.
    """
    models = bokeh("models")
    figure.x_range = models.Range1d(first, last, bounds=(first, last), min_interval=min(_LEAST_SHOWN, last - first))
    figure.toolbar.active_scroll = figure.select_one(models.WheelZoomTool)
    figure.toolbar.active_scroll.maintain_focus = False  # at an end of the axis it goes on at the other
    figure.js_on_event("doubletap", models.CustomJS(code=f"window.ipujaxPage.showAll('{figure.name}')"))


def zoom_buttons(name: str, what: str) -> Markup:
    """Buttons that zoom and move a chart along its horizontal axis.

    Args:
        name: of the chart.
        what: it shows, for labels.
    """
    steps = (
        ("in", "Zoom in", "+"),
        ("out", "Zoom out", "−"),
        ("left", "Move left", "◀"),
        ("right", "Move right", "▶"),
        ("all", "Show all", "All"),
    )
    buttons = (
        tag("button", sign, type="button", data_zoom=name, data_step=step, aria_label=f"{label}: {what}", title=label)
        for step, label, sign in steps
    )
    return tag("div", *buttons, class_="zoom", role="group", aria_label=f"Zoom: {what}")


def legend(colours: Mapping[str, str], patterns: Mapping[str, str] = MappingProxyType({})) -> Markup:
    """Names beside their colours.

    Args:
        colours: by name.
        patterns: classes of the style sheet, by name.
    """
    items = (
        tag("li", tag("span", class_="swatch", style=f"background:{colour}"), name.replace("_", " "))
        for name, colour in colours.items()
    )
    more = (tag("li", tag("span", class_=f"swatch {kind}"), name) for name, kind in patterns.items())
    return tag("ul", *items, *more, class_="legend")


def bar(part: float, whole: float, colour: str = ACCENT) -> Markup:
    """A horizontal bar, for a cell.

    Args:
        part: its length.
        whole: that of a full one.
        colour: of it.
    """
    width = 100 * part / whole if whole else 0
    return tag("span", class_="bar", style=f"width:{width:.1f}%;background:{colour}", aria_hidden="true")
