"""Memory by role on a page: tiles in order of bytes, the fullest tile over time, and its contents at the peak.

Input: `MemoryView`. Output: markup and charts. Each chart has a table or a sentence with its figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.page.anchors import Anchors
from ipujax.runtime.page.charts import ACCENT, add_rectangles, bar, bytes_axis, chart, format_thousands, legend
from ipujax.runtime.page.document import Column, DataTable, bokeh, chart_place, sentence
from ipujax.runtime.profile.text import size
from ipujax.runtime.tensor import readable_name
from ipujax.runtime.views import CategoryRow, MemoryView

MAX_BARS = 400  # tiles, or groups of tiles, that are drawn beside each other
ROLE_COLOURS = {  # roles of one kind have shades of one hue
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
    """Return the place of the chart of tiles stacked by role, and a table of the roles."""
    worst = int(view.tile_bytes.argmax())
    largest = sorted(view.roles, key=lambda row: -row.total)[:3]
    totals = ", ".join(f"{row.name} {size(row.total)}" for row in largest)
    title = "Bytes of tiles by role, the fullest first, below a line at what a tile has"
    return join_markup(
        [
            tag("h3", "By role"),
            chart_place("roles", f"{title}; on all tiles together {totals}; the table has all"),
            legend({row.name: ROLE_COLOURS[row.name] for row in view.roles}),
            parts_table("Role", sorted(view.roles, key=lambda row: (-row.fullest, -row.total)), worst),
        ]
    )


def parts_table(kind: str, parts: Sequence[CategoryRow], worst: int) -> Markup:
    """Return a table of roles or categories; `kind` heads its first column, `worst` is the fullest tile."""
    head = (kind, "When", f"Fullest tile ({worst:,})", "", "Most on a tile", "All tiles")
    max_bytes = max((row.fullest for row in parts), default=0)
    rows = (
        (row.name, row.when, size(row.fullest), bar(row.fullest, max_bytes), size(row.largest), size(row.total))
        for row in parts
    )
    return table(head, rows)


def breakdown_table(view: MemoryView, worst: int) -> DataTable:
    """Return the table of all that is in memory at the peak; its last row is the sum of the others."""
    rows = view.breakdown
    columns = (
        Column("Name", "text", [row.readable for row in rows]),
        Column("Role", "text", [row.role for row in rows]),
        Column("Category", "text", [row.category for row in rows]),
        Column("Line", "text", [row.line for row in rows]),
        Column("Items", "number", [row.num_items for row in rows]),
        Column(f"On tile {worst:,}", "number", [row.fullest_bytes for row in rows], "bytes on the fullest tile"),
        Column("On the mean tile", "number", [float(row.mean_bytes) for row in rows], "bytes, the mean of all tiles"),
    )
    return DataTable("breakdown-table", "Bytes at the peak of each tile", columns)


def fullest_tile(view: MemoryView, items: DataTable) -> Markup:
    """Return the place of the chart of the fullest tile over time, and the table of its contents at the peak."""
    worst = int(view.tile_bytes.argmax())
    title = tag("h3", f"The fullest tile, {worst:,}", id="fullest")
    used = int(view.tile_bytes[worst])
    caption = f"All that is on tile {worst:,} at its peak: {len(view.fullest):,} things of {used:,} bytes together."
    return join_markup([title, _over_time(view), sentence(caption), items.place()])


def _over_time(view: MemoryView) -> Markup:
    """Return the place of the chart of the fullest tile's bytes at each step, and its sentence."""
    live = view.live
    if not live.steps:
        return sentence(f"The program has no steps; {size(live.always_bytes)} are always there.")
    peak_size = size(int(live.num_bytes[live.peak]))
    name = live.steps[live.peak]
    note = f" {len(live.steps):,} are drawn, of neighbours the fullest." if live.shown_of > len(live.steps) else ""
    text = (
        f"At most {peak_size} at step {live.peak + 1:,} of {len(live.steps):,}, {name}; {size(live.always_bytes)} are "
        f"always there, and on average {size(float(live.num_bytes.mean()))}. Gaps come on top.{note}"
    )
    return join_markup([sentence(text), chart_place("fullest", f"Bytes of the fullest tile at each step. {text}")])


def items_table(view: MemoryView, anchors: Anchors) -> DataTable:
    """Return the table of the items on the fullest tile at its peak, with links to their lines and layers."""
    rows = view.fullest
    lines = [
        (
            str(row.origin) if row.origin.line or row.origin.path else "",
            anchors.line_id(str(row.origin), row.origin.file),
        )
        for row in rows
    ]
    columns = (
        Column("Name", "text", [row.readable for row in rows]),
        Column("Trace", "trace", [anchors.trace_target_at(str(row.origin), row.layer) for row in rows]),
        Column("Role", "text", [row.role or row.category for row in rows]),
        Column("Line", "link", lines),
        Column("Layer", "link", [(row.layer, anchors.layers.get(row.layer, "") if row.layer else "") for row in rows]),
        Column("Bytes", "number", [row.num_bytes for row in rows]),
        Column("Of it on all tiles", "bytes", [row.whole_bytes or None for row in rows]),
    )
    return DataTable("fullest-items", "All that is on the fullest tile at its peak", columns)


def role_charts(view: MemoryView) -> dict[str, Any]:
    """Return the charts of `by_role` and `fullest_tile` by name."""
    return {"roles": _stacked(view)} | ({"fullest": _steps(view)} if view.live.steps else {})


def _stacked(view: MemoryView) -> Any:
    """Draw tiles beside each other, the fullest first, stacked by role; of many tiles, the fullest of each group."""
    order = np.argsort(-view.tile_bytes[view.listed], kind="stable")
    width = max(1, -(-len(order) // MAX_BARS))  # tiles of a group
    columns = order[::width]  # sorted: the first of a group is its fullest
    start = np.arange(len(columns)) * width
    stop = np.minimum(start + width, len(order))
    names = [row.name for row in view.roles] or ["all"]
    parts = (view.by_role if view.roles else view.tile_bytes[None, view.listed])[:, columns]
    count = len(view.tile_bytes)
    tiles = "tiles" if len(order) == count else f"the {len(order):,} fullest of {count:,} tiles"
    figure = chart("roles", f"{tiles}, fullest first", "bytes of a tile", 280, "hover,pan,xwheel_zoom,box_zoom")
    for name, top, number in zip(names, parts.cumsum(0), parts, strict=True):
        source = {"left": start, "right": stop, "top": top, "bottom": top - number, "bytes": number}
        source |= {"tile": view.listed[columns], "role": [name] * len(columns)}
        add_rectangles(figure, source, fill_color=ROLE_COLOURS.get(name, ACCENT), line_color=None)
    figure.hover.tooltips = [("tile", "@tile{0,0}"), ("role", "@role"), ("bytes", "@bytes{0,0}")]
    return _with_capacity(figure, view, len(order))


def _steps(view: MemoryView) -> Any:
    """Draw the bytes of the fullest tile at each step."""
    live = view.live
    assert live is not None, "the chart needs bytes by step"
    steps = np.arange(1, len(live.steps) + 1)
    figure = chart("fullest", "step of the program", "bytes of the tile", 240, "hover,pan,xwheel_zoom,box_zoom")
    source = {
        "left": steps - 0.5,
        "right": steps + 0.5,
        "top": live.num_bytes,
        "name": list(map(readable_name, live.steps)),
    }
    add_rectangles(figure, source, bottom=0, fill_color=ACCENT, line_color=None)
    figure.hover.tooltips = [("step", "$index{0,0}"), ("name", "@name"), ("bytes", "@top{0,0}")]
    return _with_capacity(figure, view, len(steps))


def _with_capacity(figure: Any, view: MemoryView, width: int) -> Any:
    """Add axes, and a line at the memory of a tile, which the vertical axis always includes."""
    capacity = view.bytes_per_tile
    models = bokeh("models")
    colour = "#1a1a1a"  # `page.js` gives line and label the colour of the page's text
    style = {"line_dash": "dashed", "line_width": 2, "line_color": colour}
    figure.add_layout(models.Span(location=capacity, dimension="width", name="capacity", **style))
    position = {"x": 6, "x_units": "screen", "y": capacity, "y_offset": 3}
    text = {"text": f"a tile has {size(capacity)}", "text_font_size": "11px", "text_color": colour}
    figure.add_layout(models.Label(name="capacity", **position, **text))
    figure.y_range.start = 0
    figure.y_range.end = 1.12 * max(capacity, int(view.tile_bytes.max()))
    figure.x_range.start = 0
    figure.x_range.end = width + 0.5
    format_thousands(figure)
    bytes_axis(figure)
    return figure
