"""A 3 × 3 Gaussian blur of a picture of 2,200 × 1,122 pixels on Mk1, phase by phase.

Every IPU holds a strip of the picture, and each of its tiles a rectangle. Each worker of a tile computes a part, from
that part and the eight parts around it: rows, columns and corners, each an operand of its own. Those of another IPU
are connected like the others: the engine copies them. Outside the picture all is zero.
Source of the program: lbm-graphcore, `LowLevelStencil.cpp` and `StructuredGridUtils.hpp` (reference B5), of the commit
97cd841 that measured it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from fidelity_cases.case import Ends, Family, Row, compute_set_costs, interval_of, profile_of
from ipujax import poplar
from ipujax.poplar.program import Execute, Program, Sequence
from ipujax.poplar.vertex.codelets import OVERHEAD_CYCLES

_CHANNELS = 4
_WIDTH = 2200
_HEIGHT = 1122
FEWEST_PIXELS = 6  # of a side of a tile's rectangle
_WEIGHTS = np.array([[1, 2, 1], [2, 4, 2], [1, 2, 1]], np.float32) / 16
# A vector of results: 9 loads, 8 additions and 3 products, a store, 2 instructions of the loop; no two at once.
_VECTOR_INSTRUCTIONS = 9 + 11 + 1 + 2
_EDGES = ("n", "s", "w", "e", "nw", "ne", "sw", "se")
# Cycles by number of IPUs and type: exchange on the chip, copies before, copies after, compute, global exchange, sync.
_PUBLISHED = {
    (1, "half4"): (637, 5741, 4826, 63531, 0, 64),
    (1, "float2"): (1173, 8279, 6954, 100257, 0, 117),
    (1, "float"): (1173, 8279, 6954, 210249, 0, 117),
    (16, "half4"): (263, 1611, 882, 4446, 3043, 501),
    (16, "float2"): (397, 1897, 954, 7914, 4017, 642),
    (16, "float"): (397, 1894, 954, 13152, 4048, 640),
}
_PHASES = ("exchange on the chip", "copies before", "copies after", "compute", "global exchange", "sync")
_BARS = (0.20, 0.40, 0.40, 0.25, 0.20, None)


def blurred(n: Any, s: Any, w: Any, e: Any, nw: Any, ne: Any, sw: Any, se: Any, m: Any) -> Any:
    """The blur of a rectangle from its pixels and those around it, all flat; of the same size and type."""
    rows = w.size // _CHANNELS
    columns = n.size // _CHANNELS
    corner = (1, 1)
    side = (rows, 1)
    middle = (rows, columns)
    above = [part.reshape(*shape, _CHANNELS) for part, shape in ((nw, corner), (n, (1, columns)), (ne, corner))]
    beside = [part.reshape(*shape, _CHANNELS) for part, shape in ((w, side), (m, middle), (e, side))]
    below = [part.reshape(*shape, _CHANNELS) for part, shape in ((sw, corner), (s, (1, columns)), (se, corner))]
    extended = jnp.concatenate([jnp.concatenate(parts, 1) for parts in (above, beside, below)], 0)
    total = jnp.zeros((rows, columns, _CHANNELS), m.dtype)
    for (dy, dx), weight in np.ndenumerate(_WEIGHTS):
        total += extended[dy : dy + rows, dx : dx + columns] * m.dtype.type(weight)
    return total.ravel()


class BlurHalf4(poplar.Vertex):
    """Four halves at once, as compiled from C++."""

    n: poplar.Input[poplar.Vector[poplar.HALF]]
    s: poplar.Input[poplar.Vector[poplar.HALF]]
    w: poplar.Input[poplar.Vector[poplar.HALF]]
    e: poplar.Input[poplar.Vector[poplar.HALF]]
    nw: poplar.Input[poplar.Vector[poplar.HALF]]
    ne: poplar.Input[poplar.Vector[poplar.HALF]]
    sw: poplar.Input[poplar.Vector[poplar.HALF]]
    se: poplar.Input[poplar.Vector[poplar.HALF]]
    m: poplar.Input[poplar.Vector[poplar.HALF]]
    out: poplar.Output[poplar.Vector[poplar.HALF]]

    def compute(n, s, w, e, nw, ne, sw, se, m):
        return blurred(n, s, w, e, nw, ne, sw, se, m)

    def cycles(shapes, target):
        return OVERHEAD_CYCLES + _VECTOR_INSTRUCTIONS * (shapes["m"][0] // 4)


class BlurFloat2(poplar.Vertex):
    """Two floats at once."""

    n: poplar.Input[poplar.Vector[poplar.FLOAT]]
    s: poplar.Input[poplar.Vector[poplar.FLOAT]]
    w: poplar.Input[poplar.Vector[poplar.FLOAT]]
    e: poplar.Input[poplar.Vector[poplar.FLOAT]]
    nw: poplar.Input[poplar.Vector[poplar.FLOAT]]
    ne: poplar.Input[poplar.Vector[poplar.FLOAT]]
    sw: poplar.Input[poplar.Vector[poplar.FLOAT]]
    se: poplar.Input[poplar.Vector[poplar.FLOAT]]
    m: poplar.Input[poplar.Vector[poplar.FLOAT]]
    out: poplar.Output[poplar.Vector[poplar.FLOAT]]

    def compute(n, s, w, e, nw, ne, sw, se, m):
        return blurred(n, s, w, e, nw, ne, sw, se, m)

    def cycles(shapes, target):
        return OVERHEAD_CYCLES + _VECTOR_INSTRUCTIONS * (shapes["m"][0] // 2)


class BlurFloat(BlurFloat2):
    """One float at a time."""

    def cycles(shapes, target):
        return OVERHEAD_CYCLES + _VECTOR_INSTRUCTIONS * shapes["m"][0]


CODELETS = {"half4": (poplar.HALF, BlurHalf4), "float2": (poplar.FLOAT, BlurFloat2), "float": (poplar.FLOAT, BlurFloat)}


@dataclass(frozen=True)
class Rectangle:
    """Pixels from a first row and column on."""

    top: int
    left: int
    height: int
    width: int

    def around(self, name: str) -> Rectangle:
        """The neighbouring rectangle: above ("n"), below, beside, or at a corner."""
        top = self.top - 1 if "n" in name else self.top + self.height if "s" in name else self.top
        left = self.left - 1 if "w" in name else self.left + self.width if "e" in name else self.left
        height = 1 if set("ns") & set(name) else self.height
        width = 1 if set("we") & set(name) else self.width
        return Rectangle(top, left, height, width)

    def workers(self, workers: int) -> Iterator[Rectangle]:
        """Its parts: rows or columns, whichever divides more evenly."""
        if self.height % workers / self.height <= self.width % workers / self.width:
            for start, size in _shares(self.height, min(workers, self.height)):
                yield Rectangle(self.top + start, self.left, size, self.width)
            return
        for start, size in _shares(self.width, min(workers, self.width)):
            yield Rectangle(self.top, self.left + start, self.height, size)


def _shares(length: int, parts: int) -> Iterator[tuple[int, int]]:
    """Start and size of parts of a length, the longer ones first."""
    size, longer = divmod(length, parts)
    for part in range(parts):
        yield part * size + min(part, longer), size + (part < longer)


def strips_of(height: int, width: int, ipus: int) -> list[Rectangle]:
    """The strip of each IPU: of rows, or of columns, whichever divides more evenly; of columns if both do equally."""
    if height % ipus / height < width % ipus / width:
        return [Rectangle(top, 0, size, width) for top, size in _shares(height, ipus)]
    return [Rectangle(0, left, height, size) for left, size in _shares(width, ipus)]


def tiles_of(height: int, width: int, num_tiles: int, fewest_pixels: int = FEWEST_PIXELS) -> Iterator[Rectangle]:
    """The rectangle of each tile, in a grid of about the picture's proportions."""
    most_columns, most_rows = (min(num_tiles, max(1, n // fewest_pixels)) for n in (width, height))
    columns = min(most_columns, int(np.ceil(np.sqrt(num_tiles * width / height))))
    rows = min(most_rows, num_tiles // columns)
    for top, tall in _shares(height, rows):
        for left, wide in _shares(width, columns):
            yield Rectangle(top, left, tall, wide)


def blur(
    target: poplar.Target, height: int, width: int, name: str, fewest_pixels: int = FEWEST_PIXELS
) -> tuple[poplar.Graph, poplar.Tensor, poplar.Tensor, Program]:
    """The program of one step on all IPUs of a target; returns graph, picture, result and program.

    Args:
        target: the machine.
        height: rows of the picture.
        width: its columns.
        name: the codelet, of `CODELETS`.
        fewest_pixels: of a side of a tile's rectangle.
    """
    graph = poplar.Graph(target)
    (dtype, codelet) = CODELETS[name]
    graph.add_codelets(codelet)
    picture, result = (graph.add_variable(dtype, [height, width, _CHANNELS], name) for name in ("img", "tmpImg"))
    compute_set = graph.add_compute_set("inToOut")
    for tile, rectangle in _mapped_rectangles(target, height, width, fewest_pixels):
        for image in (picture, result):
            graph.set_tile_mapping(_part(image, rectangle), tile)
        for part in rectangle.workers(target.get_num_worker_contexts()):
            fields = {name: _or_zeros(graph, picture, part.around(name), dtype, tile) for name in _EDGES}
            fields |= {"m": _part(picture, part).flatten(), "out": _part(result, part).flatten()}
            graph.set_tile_mapping(graph.add_vertex(compute_set, codelet.__name__, fields), tile)
    return graph, picture, result, Sequence(Execute(compute_set))


def _mapped_rectangles(
    target: poplar.Target, height: int, width: int, fewest_pixels: int
) -> Iterator[tuple[int, Rectangle]]:
    """The tiles that have a rectangle, and it."""
    tiles_per_ipu = target.get_tiles_per_ipu()
    for ipu, strip in enumerate(strips_of(height, width, target.get_num_ipus())):
        for tile, part in enumerate(tiles_of(strip.height, strip.width, tiles_per_ipu, fewest_pixels)):
            rectangle = Rectangle(strip.top + part.top, strip.left + part.left, part.height, part.width)
            yield ipu * tiles_per_ipu + tile, rectangle


def _part(image: Any, part: Rectangle) -> Any:
    return image[part.top : part.top + part.height, part.left : part.left + part.width]


def _or_zeros(graph: poplar.Graph, image: Any, part: Rectangle, dtype: Any, tile: int) -> Any:
    """Pixels of an image, or zeros on a tile where it has none."""
    height, width, _ = image.shape
    if 0 <= part.top <= height - part.height and 0 <= part.left <= width - part.width:
        return _part(image, part).flatten()
    zeros = np.zeros(part.height * part.width * _CHANNELS, dtype)
    constant = graph.add_constant(dtype, zeros.shape, zeros, "zeros")
    graph.set_tile_mapping(constant, tile)
    return constant


def target_of(ipus: int) -> poplar.Target:
    """Several Mk1."""
    return poplar.IPUModel("ipu1", num_ipus=ipus).create_device().get_target()


def phases(ipus: int, name: str) -> list[tuple[int, Ends | None]]:
    """Cycles of each of `_PHASES` of a step, the slowest tile or IPU, and the intervals of those that are phases."""
    graph, _, _, program = blur(target_of(ipus), _HEIGHT, _WIDTH, name)
    (step_cost,) = compute_set_costs(graph, program)
    after = step_cost.rearrangement_after_cycles
    copies = step_cost.rearrangement_cycles
    parts = (step_cost.before.cycles, copies - after, after, step_cost.compute_cycles - copies)
    profile = profile_of(graph, program)
    clocked = ("exchange", "global_exchange", "sync")
    intervals = {phase: interval_of(profile, (phase,)) for phase in clocked if profile.phase_cycles[phase]}
    exchange, *other_rows = (int(cycles.max()) for cycles in parts)
    beyond = [(profile.phase_cycles[phase], intervals.get(phase)) for phase in clocked[1:]]
    return [(exchange, intervals.get("exchange")), *((cycles, None) for cycles in other_rows), *beyond]


def family() -> Family:
    """Each phase of each type, the slowest tile."""
    rows = []
    for (ipus, name), figures in _PUBLISHED.items():
        number = "1 IPU" if ipus == 1 else f"{ipus} IPUs"
        for phase, published, (cycles, interval), bar in zip(_PHASES, figures, phases(ipus, name), _BARS, strict=True):
            if published:
                rows.append(Row(f"{number}, {name}: {phase}", published, cycles, bar, interval=interval))
    source = "lbm-graphcore, Mk1 hardware, cycles of one step by phase (reference B5)."
    how = (
        "Each worker computes a part of its tile's rectangle from nine operands; figures are those of the slowest "
        f"tile of each phase. Instructions of the codelets are counted: {_VECTOR_INSTRUCTIONS} for each vector of "
        f"results and {OVERHEAD_CYCLES} a vertex. The cycles of a copy and of each piece of it, and the start and "
        "control slots of an exchange, are `fitted` to these rows, and the latency of an exchange between IPUs is "
        "`derived` from them (docs/machine.md); the counts of bytes and pieces, the rates of links, and the compute "
        "cycles, are not. Syncs have no bar: the model has one constant for each kind."
    )
    return Family("Blur 3 × 3 on Mk1", source, how, rows)
