"""Memory section of a page: chips as heat maps, roles, categories, and contents of a tile.

Input: `MemoryView`, `LivenessView`. Output: sections.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.runtime.markup import Markup, join_markup, tag
from ipujax.runtime.page.anchors import Anchors
from ipujax.runtime.page.charts import (
    ACCENT,
    AMOUNTS,
    OVER,
    SECOND,
    SIZE_OF_TICK,
    bytes_axis,
    chart,
    format_thousands,
    zoom_buttons,
    zoom_by_wheel,
)
from ipujax.runtime.page.document import Column, DataTable, Section, bokeh, chart_place, sentence
from ipujax.runtime.page.role_charts import (
    breakdown_table,
    by_role,
    fullest_tile,
    items_table,
    parts_table,
    role_charts,
)
from ipujax.runtime.profile.text import size
from ipujax.runtime.tensor import Origin
from ipujax.runtime.views import LivenessView, MemoryView

_LABEL_ROWS = 2.0  # above a chip, for its name


def memory_section(view: MemoryView, anchors: Anchors) -> Section:
    """Return the section on the bytes of all tiles."""
    worst = int(view.tile_bytes.argmax())
    used = int(view.tile_bytes.max())
    num_over = _count_overflowed(view)
    items = items_table(view, anchors)
    breakdown = breakdown_table(view, worst)
    variables = _variable_table(view)
    body = join_markup(
        [
            sentence(
                f"{len(view.tile_bytes):,} tiles of {size(view.bytes_per_tile)}; the fullest is tile {worst:,} with "
                f"{size(used)}, the mean is {size(float(view.tile_bytes.mean()))}, gaps included."
            ),
            tag("h3", "Bytes by tile"),
            sentence(
                "Click a tile, or give its number below. Tile 0 is at the upper left; numbers go on to the right."
            ),
            _chip_legend(view, worst),
            chart_place(
                "chip",
                f"Heat map of the bytes of each tile, from 0 to the {size(view.bytes_per_tile)} that a tile has; "
                f"{num_over or 'no'} tile{'s' * (num_over != 1)} need more; the fullest is tile {worst} with "
                f"{size(used)}",
            ),
            _contrast(view),
            tag("p", tag("output", id="mapped", aria_live="polite"), class_="mapped"),
            tag("h3", "What is on a tile"),
            _tile_chooser(view, worst),
            by_role(view),
            tag("details", tag("summary", "By category"), parts_table("Category", view.categories, worst)),
            fullest_tile(view, items),
            tag("h3", "Tiles of a variable"),
            sentence(f"The {len(view.variables.variables):,} largest variables. A button shows the tiles of one."),
            variables.place(),
            tag("h3", "By variable, role, category and line"),
            breakdown.place(),
        ]
    )
    charts = {"chip": _chips(view), **role_charts(view)}
    tables = {name: table for each in (items, breakdown, variables) for name, table in each.data()["tables"].items()}
    return Section("memory", "Memory", body, charts, {"memory": _data(view), "tables": tables})


def _variable_table(view: MemoryView) -> DataTable:
    """Return the table of the largest variables, with buttons that show their tiles."""
    rows = view.variables.variables
    layouts = view.variables.layouts
    columns = (
        Column("Variable", "text", [row.name for row in rows]),
        Column("Tiles", "map", [*range(len(rows))], "shows its tiles on the chips"),
        Column("Bytes", "bytes", [row.num_bytes for row in rows], "on all tiles"),
        Column("On tiles", "number", [int(np.count_nonzero(layouts[row.layout])) for row in rows]),
        Column("Most on a tile", "bytes", [int(layouts[row.layout].max()) for row in rows]),
        Column("Role", "text", [row.role for row in rows]),
        Column("Line", "text", ["" if row.line == str(Origin()) else row.line for row in rows]),
    )
    return DataTable("variables-table", "Variables", columns)


def _count_overflowed(view: MemoryView) -> int:
    return int((view.tile_bytes > view.bytes_per_tile).sum())


def _chip_legend(view: MemoryView, worst: int) -> Markup:
    """Return the legend of the fullest tile's ring, and of the colour of overflowed tiles if there are any."""
    ring = tag("li", tag("span", class_="ring"), f"fullest tile, {worst:,}")
    num_over = _count_overflowed(view)
    swatch = tag("span", class_="swatch", style=f"background:{OVER}")
    overflowed = tag("li", swatch, f"more than {size(view.bytes_per_tile)}: {num_over:,} tile{'s' * (num_over != 1)}")
    return tag("ul", ring, overflowed if num_over else "", class_="legend")


def _contrast(view: MemoryView) -> Markup:
    """Return a switch that ends the scale of colours at the fullest tile, if that uses less than half the scale."""
    used = int(view.tile_bytes.max())
    if not 0 < used < view.bytes_per_tile / 2:
        return Markup()
    box = tag("input", type="checkbox", id="contrast")
    return tag("p", tag("label", box, f" End the scale of colours at the fullest tile, {size(used)}"))


def _tile_chooser(view: MemoryView, worst: int) -> Markup:
    """Return a field for the number of a tile, and the place of its contents, which `memory.js` fills."""
    last = len(view.tile_bytes) - 1
    number = tag("input", type="number", id="tile", min=0, max=last, value=worst, inputmode="numeric")
    note = f"Known of the {len(view.listed):,} fullest tiles." if len(view.listed) < last + 1 else ""
    return join_markup(
        [
            tag("p", tag("label", f"Tile (0 to {last:,}) ", number), " ", tag("output", id="tile-total"), for_=None),
            tag("div", id="tile-contents", aria_live="polite", data_search="tile"),
            sentence(note) if note else "",
        ]
    )


def _data(view: MemoryView) -> dict[str, Any]:
    """Return the data from which `memory.js` lists the contents of a tile."""
    contents = view.contents
    return {
        "have": view.bytes_per_tile,
        "tileBytes": view.tile_bytes.tolist(),
        "kind": "Role",
        "parts": [[row.name, row.when] for row in view.roles],
        "listed": view.listed.tolist(),
        "byPart": view.by_role.tolist(),
        "chips": [view.chip_origin(ipu) for ipu in range(view.num_ipus)],
        "grid": [view.columns, view.rows],
        "perIpu": len(view.tile_bytes) // view.num_ipus,
        # Rows of items are sorted by tile: those of tile n are first[n] up to first[n + 1].
        "contents": {
            "items": [list(item) for item in contents.items],
            "steps": list(contents.steps),
            "tiles": contents.tiles.tolist(),
            "peak": contents.peak.tolist(),
            "first": [*np.searchsorted(contents.tile, contents.tiles).tolist(), len(contents.tile)],
            "item": contents.item.tolist(),
            "bytes": contents.num_bytes.tolist(),
        },
        "variables": [[row.name, row.layout] for row in view.variables.variables],
        "layouts": view.variables.runs_of_layouts,
    }


def _chips(view: MemoryView) -> Any:
    """Draw all chips of a replica in a figure, numbered if there are several."""
    models = bokeh("models")
    tops = [top for _, top in map(view.chip_origin, range(view.num_ipus))]
    height = 60 + 11 * (max(tops) + view.rows + 3)
    figure = chart("chip", "", "", min(900, max(180, height)), "hover,tap,pan,wheel_zoom")
    mapper = models.LinearColorMapper(AMOUNTS, low=0, high=view.bytes_per_tile, high_color=OVER)
    mapper.nan_color = "rgba(0, 0, 0, 0)"  # cells without a tile
    grids = [view.chip(ipu) for ipu in range(view.num_ipus)]
    origins = [view.chip_origin(ipu) for ipu in range(view.num_ipus)]
    source = {
        "image": [sizes for _, sizes in grids],
        "tile": [numbers for numbers, _ in grids],
        "x": [column for column, _ in origins],
        "y": [-row - view.rows for _, row in origins],  # rows count downwards, the vertical axis upwards
    }
    image = figure.image("image", x="x", y="y", dw=view.columns, dh=view.rows, color_mapper=mapper, source=source)
    figure.hover.renderers = [image]
    figure.hover.tooltips = [("tile", "@tile{0,0}"), ("bytes", "@image{0,0}")]
    if view.num_ipus > 1:
        names = models.ColumnDataSource(
            {"x": source["x"], "y": [-row + 0.3 for _, row in origins], "text": [f"IPU {n}" for n in range(len(grids))]}
        )
        figure.text("x", "y", "text", source=names, text_font_size="11px", name="labels")
    column, row = view.cell(int(view.tile_bytes.argmax()))
    for colour, width in (("white", 5), ("black", 2)):  # a ring that is visible on every colour
        figure.scatter(
            [column],
            [-row],
            size=18,
            marker="circle",
            fill_color=None,
            line_color=colour,
            line_width=width,
            name="fullest",
        )
    quarters = [view.bytes_per_tile * part / 4 for part in range(5)]
    scale = models.ColorBar(color_mapper=mapper, width=12, ticker=models.FixedTicker(ticks=quarters))
    scale.formatter = models.CustomJSTickFormatter(code=SIZE_OF_TICK)
    scale.major_label_overrides = {view.bytes_per_tile: f"{size(view.bytes_per_tile)}: full"}
    scale.background_fill_color = None
    figure.add_layout(scale, "right")
    figure.axis.visible = False
    figure.grid.visible = False
    lowest = max(row for _, row in origins) + view.rows
    figure.y_range = models.Range1d(-lowest - 0.5, _LABEL_ROWS if view.num_ipus > 1 else 0.5)
    code = "window.ipujaxPage.tileAt(cb_obj.x, cb_obj.y)"
    figure.js_on_event("tap", models.CustomJS(code=code))
    return figure


def liveness_section(view: LivenessView) -> Section:
    """Return the section on live bytes and the largest variables of each step."""
    peak = int(view.live_bytes.argmax()) if len(view.live_bytes) else 0
    peak_bytes = int(view.live_bytes.max(initial=view.always_bytes))
    last = max(0, len(view.names) - 1)
    name = view.names[peak] if view.names else "nothing"
    slider = tag("input", type="range", id="step", min=0, max=last, value=peak, aria_label="Step of the program")
    note = f" (of {view.num_steps:,}; of neighbours the one with most)" if view.num_steps > len(view.names) else ""
    ranges = _range_table(view)
    body = join_markup(
        [
            sentence(
                f"At most {size(peak_bytes)} live on all tiles together, at {name}; {size(view.always_bytes)} of it "
                f"always. {len(view.names):,} steps of the program in its order{note}."
            ),
            chart_place("liveness", f"Live bytes at each step; most at {name} with {size(peak_bytes)}"),
            zoom_buttons("liveness", "steps of the program"),
            tag("p", tag("label", "Step ", slider), " ", tag("output", id="step-name"), class_="wide"),
            tag("div", id="step-variables", aria_live="polite", data_search="step"),
            tag("h3", "By variable"),
            ranges.place(),
        ]
    )
    data = {
        "names": list(view.names),
        "bytes": view.live_bytes.tolist(),
        "variables": [list(variable) for variable in view.variables],
        "largest": [list(numbers) for numbers in view.largest],
    }
    return Section("liveness", "Liveness", body, {"liveness": _liveness(view)}, {"liveness": data, **ranges.data()})


def _range_table(view: LivenessView) -> DataTable:
    """Return the table of all that is live at some step."""
    rows = view.ranges
    columns = (
        Column("Name", "text", [row.item[0] for row in rows]),
        Column("Bytes", "bytes", [row.item[1] for row in rows], "on all tiles"),
        Column("Live", "text", ["always" if row.is_always else "at some steps" for row in rows]),
        Column("From step", "number", [row.first for row in rows], "of all steps of the program, from 0"),
        Column("To step", "number", [row.last for row in rows]),
        Column("Line", "text", [row.item[2] for row in rows]),
    )
    return DataTable("ranges-table", "Live variables", columns)


def _liveness(view: LivenessView) -> Any:
    """Draw the live bytes of all tiles at each step, with a cursor at which the page lists the variables."""
    models = bokeh("models")
    steps = np.arange(len(view.live_bytes))
    figure = chart("liveness", "step of the program", "live bytes, all tiles", 280)
    zoom_by_wheel(figure, max(1, len(steps) - 1))
    if len(steps):  # Bokeh 3.9 draws an area without points for ever
        figure.varea_step(
            steps, np.zeros(len(steps)), view.live_bytes, fill_color=ACCENT, fill_alpha=0.45, step_mode="center"
        )
    figure.line(
        [0, max(1, len(steps) - 1)], [view.always_bytes] * 2, color=SECOND, line_dash="dashed", legend_label="always"
    )
    cursor = models.Span(location=0, dimension="height", line_color=SECOND, line_width=2, name="cursor")
    figure.add_layout(cursor)
    figure.y_range.start = 0
    format_thousands(figure)
    bytes_axis(figure)
    figure.js_on_event("mousemove", models.CustomJS(code="window.ipujaxPage.stepAt(cb_obj.x)"))
    return figure
