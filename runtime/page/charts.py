"""What all charts of a page share: size, tools, colours, units on axes, and buttons for those who use no mouse.

Input: names and labels. Output: figures of Bokeh, and the markup beside them.
Source of the palettes: Okabe and Ito, "Color Universal Design", 2008, for phases; Cividis (Nuñez, Anderton, Renslow,
2018) for amounts. Both can be told apart by people who confuse red and green.
"""

from __future__ import annotations

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
_BINARY = [2**power for power in range(10)]


def chart(
    name: str, x_label: str, y_label: str, height: int, tools: str = "xpan,xwheel_zoom,xbox_zoom", **more: Any
) -> Any:
    """An empty figure; `page.js` gives it the colours of the page.

    Args:
        name: of the chart, by which scripts find it.
        x_label: of the horizontal axis, with its unit.
        y_label: of the vertical one.
        height: in pixels.
        tools: of Bokeh.
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
    code = "return window.ipujaxPage.size(tick)"
    for axis in figure.yaxis:
        axis.formatter = bokeh("models").CustomJSTickFormatter(code=code)
        axis.ticker = bokeh("models").AdaptiveTicker(base=1024, mantissas=_BINARY, desired_num_ticks=5)


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


def legend(colours: dict[str, str]) -> Markup:
    """Names beside their colours.

    Args:
        colours: by name.
    """
    items = (
        tag("li", tag("span", class_="swatch", style=f"background:{colour}"), name.replace("_", " "))
        for name, colour in colours.items()
    )
    return tag("ul", *items, class_="legend")


def bar(part: float, whole: float, colour: str = ACCENT) -> Markup:
    """A horizontal bar, for a cell.

    Args:
        part: its length.
        whole: that of a full one.
        colour: of it.
    """
    width = 100 * part / whole if whole else 0
    return tag("span", class_="bar", style=f"width:{width:.1f}%;background:{colour}", aria_hidden="true")
