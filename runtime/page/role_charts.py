"""Memory by role on a page: tiles in order of size, the fullest tile over time, and all that is on it at its peak.

Input: `MemoryView`. Output: markup and charts. Each chart has a table or a sentence that says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ipujax.runtime.markup import Markup, joined, table, tag
from ipujax.runtime.page.anchors import Anchors
from ipujax.runtime.page.charts import ACCENT, bar, bytes_axis, chart, legend, with_separators
from ipujax.runtime.page.document import bokeh, chart_place, sentence
from ipujax.runtime.profile.text import size
from ipujax.runtime.views import CategoryRow, MemoryView

MOST_BARS = 400  # tiles, or runs of tiles, that are drawn beside each other
ROLE_COLOURS = {
    "weights": "#0072B2",
    "optimiser state": "#56B4E9",
    "other state": "#A9CCE3",
    "gradients": "#D55E00",
    "activations, kept": "#009E73",
    "activations, recomputed": "#7FD1B0",
    "inputs": "#F0E442",
    "arguments": "#C9B400",
    "results": "#CC79A7",
    "partial results": "#E69F00",
    "other intermediates": "#F5C77E",
    "variables of no known role": "#8C564B",
    "constants": "#6A3D9A",
    "buffers of operations": "#B5651D",
    "vertex state": "#9E9E9E",
    "vertex code": "#7F8FA9",
    "control code": "#A9B6CB",
    "exchange code": "#54627B",
    "stacks and headers": "#BDBDBD",
    "gaps": "#E0E0E0",
}


def by_role(view: MemoryView) -> Markup:
    """The tiles in order of size, stacked by role, and a table of the roles.

    Args:
        view: of a profile.
    """
    worst = int(view.tile_bytes.argmax())
    if not view.roles:
        place = chart_place("roles", "Bytes of tiles, the fullest first")
        return joined([tag("h3", "By role"), place, tag("p", f"Not known: {view.missing}.", class_="missing")])
    largest = sorted(view.roles, key=lambda row: -row.total)[:3]
    said = ", ".join(f"{row.name} {size(row.total)}" for row in largest)
    what = "Bytes of tiles by role, the fullest first, below a line at what a tile has"
    describes = f"{what}; on all tiles together {said}; the table has all"
    return joined(
        [
            tag("h3", "By role"),
            chart_place("roles", describes),
            legend({row.name: ROLE_COLOURS[row.name] for row in view.roles}),
            parts_table("Role", sorted(view.roles, key=lambda row: (-row.fullest, -row.total)), worst),
        ]
    )


def parts_table(kind: str, parts: Sequence[CategoryRow], worst: int) -> Markup:
    """What bytes are for, as a table.

    Args:
        kind: what the parts are.
        parts: in the order of the rows.
        worst: the fullest tile.
    """
    head = (kind, "When", f"Fullest tile ({worst:,})", "", "Most on a tile", "All tiles")
    most = max((row.fullest for row in parts), default=0)
    rows = (
        (row.name, row.when, size(row.fullest), bar(row.fullest, most), size(row.largest), size(row.total))
        for row in parts
    )
    return table(head, rows)


def fullest_tile(view: MemoryView, anchors: Anchors) -> Markup:
    """The fullest tile at each step, and all that it holds when it is fullest.

    Args:
        view: of a profile.
        anchors: of the page.
    """
    worst, used = int(view.tile_bytes.argmax()), int(view.tile_bytes.max())
    title = tag("h3", f"The fullest tile, {worst:,}", id="fullest")
    return joined([title, _over_time(view), _items(view, worst, used, anchors)])


def _over_time(view: MemoryView) -> Markup:
    live = view.live
    if live is None:
        return tag("p", f"Not known: {view.missing}.", class_="missing")
    if not live.steps:
        return sentence(f"The program has no steps; {size(live.always_bytes)} are always there.")
    most, name = int(live.num_bytes[live.peak]), live.steps[live.peak]
    shown = f" {len(live.steps):,} are drawn, of neighbours the fullest." if live.shown_of > len(live.steps) else ""
    said = (
        f"At most {size(most)} at step {live.peak + 1:,} of {len(live.steps):,}, {name}; {size(live.always_bytes)} are "
        f"always there, and on average {size(float(live.num_bytes.mean()))}. Gaps come on top.{shown}"
    )
    return joined([sentence(said), chart_place("fullest", f"Bytes of the fullest tile at each step. {said}")])


def _items(view: MemoryView, worst: int, used: int, anchors: Anchors) -> Markup:
    """All that is on the tile at its peak, with links to what makes it."""
    head = ("Bytes", "Of it on all tiles", "Name", "Role", "Line", "Layer")
    rows = [
        (
            f"{item.num_bytes:,}",
            size(item.whole_bytes) if item.whole_bytes else "",
            joined([item.readable, " ", anchors.trace_at(str(item.origin), item.layer)]),
            item.role or item.category,
            anchors.line(str(item.origin), item.origin.file) if item.origin.line or item.origin.path else "",
            anchors.layer(item.layer) if item.layer else "",
        )
        for item in view.fullest
    ]
    what = f"All that is on tile {worst:,} at its peak: {len(rows):,} things of {used:,} bytes together"
    label = {"role": "region", "aria_label": what, "data_search": "memory"}
    return tag("div", table(head, rows, what), id="fullest-items", class_="scroll", tabindex=0, **label)


def role_charts(view: MemoryView) -> dict[str, Any]:
    """The charts of `by_role` and `fullest_tile`.

    Args:
        view: of a profile.
    """
    return {"roles": _stacked(view)} | ({"fullest": _steps(view)} if view.live is not None and view.live.steps else {})


def _stacked(view: MemoryView) -> Any:
    """Tiles beside each other, the fullest first; of long rows the fullest of each few."""
    order = np.argsort(-view.tile_bytes[view.listed], kind="stable")
    width = max(1, -(-len(order) // MOST_BARS))
    chosen = order[::width]
    left = np.arange(len(chosen)) * width
    right = np.minimum(left + width, len(order))
    names = [row.name for row in view.roles] or ["all"]
    parts = (view.by_role if view.roles else view.tile_bytes[None, view.listed])[:, chosen]
    figure = chart("roles", "tiles, fullest first", "bytes of a tile", 280, "hover,pan,xwheel_zoom,box_zoom")
    for name, top, number in zip(names, parts.cumsum(0), parts, strict=True):
        source = {"left": left, "right": right, "top": top, "bottom": top - number, "bytes": number}
        source |= {"tile": view.listed[chosen], "role": [name] * len(chosen)}
        ends = {end: end for end in ("left", "right", "top", "bottom")}
        figure.quad(**ends, source=source, color=ROLE_COLOURS.get(name, ACCENT), line_color=None)
    figure.hover.tooltips = [("tile", "@tile{0,0}"), ("role", "@role"), ("bytes", "@bytes{0,0}")]
    return _with_capacity(figure, view, len(order))


def _steps(view: MemoryView) -> Any:
    """The fullest tile at each step."""
    live = view.live
    assert live is not None, "there is a chart of what is known"
    steps = np.arange(1, len(live.steps) + 1)
    figure = chart("fullest", "step of the program", "bytes of the tile", 240, "hover,pan,xwheel_zoom,box_zoom")
    source = {"left": steps - 0.5, "right": steps + 0.5, "top": live.num_bytes, "name": list(live.steps)}
    figure.quad(left="left", right="right", top="top", bottom=0, source=source, color=ACCENT, line_color=None)
    figure.hover.tooltips = [("step", "$index{0,0}"), ("name", "@name"), ("bytes", "@top{0,0}")]
    return _with_capacity(figure, view, len(steps))


def _with_capacity(figure: Any, view: MemoryView, width: int) -> Any:
    """The chart with its axes, and a line at the memory of a tile, which is always in sight."""
    capacity = view.bytes_per_tile
    models, colour = bokeh("models"), "#1a1a1a"  # `page.js` paints both as the texts of the page
    style = {"line_dash": "dashed", "line_width": 2, "line_color": colour}
    figure.add_layout(models.Span(location=capacity, dimension="width", name="capacity", **style))
    place = {"x": 6, "x_units": "screen", "y": capacity, "y_offset": 3}
    text = {"text": f"a tile has {size(capacity)}", "text_font_size": "11px", "text_color": colour}
    figure.add_layout(models.Label(name="capacity", **place, **text))
    figure.y_range.start, figure.y_range.end = 0, 1.05 * max(capacity, int(view.tile_bytes.max()))
    figure.x_range.start, figure.x_range.end = 0, width + 0.5
    with_separators(figure, "x")
    bytes_axis(figure)
    return figure
