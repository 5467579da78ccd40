"""Copies of operands before the vertices of a compute set, and of results after them, on their own tile.

Input: the exchange of each field. Output: `Rearrangement`, bytes and cycles by tile. Operands in one part, and fields
that are lists of vectors, are not copied. Parts of whole vectors arrive in place and only those of the own tile are
copied beside them; rows that are no whole vectors are copied by atoms (`exchange.superstep`). Partial results are
stored by blocks that begin with a vector, whatever their rows; vertices that combine them put the rows of their result
together.
Source: poplibs `poplin/ConvUtilInternal.cpp`: partials of convolutions have whole groups of channels, and results are
put in order after their reduction (`ConvModel.cpp`, `rearrangeOutput`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ipujax.runtime.cost.ipu_window import Window
from ipujax.runtime.cost.padded_rows import padding_of_tensor, with_padding
from ipujax.runtime.exchange import (
    Traffic,
    TrafficWindow,
    access_window,
    atom_cycles,
    copy_cycles,
    shortest_atom,
    slow_bytes,
    traffic_on,
)
from ipujax.runtime.graph import NO_TILE, Access, Field, Graph, SlowReason, VertexGroup
from ipujax.runtime.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FieldTraffic:
    """Exchange of one field of a vertex group, which has a number in its compute set, on the tiles of a window."""

    number: int
    group: VertexGroup
    field: Field
    tensor: Tensor
    traffic: Traffic


def field_windows(group: VertexGroup, graph: Graph, results: bool, first_tile: int) -> list[TrafficWindow]:
    """Return the exchange of each field that is read, or with `results` written, tiles counted from `first_tile`."""
    windows = [access_window(group, access, graph, results) for _, access in _exchanged(group, results).values()]
    return [TrafficWindow(window.first - first_tile, window.traffic) for window in windows]


def padded_traffics(
    group: VertexGroup, windows: Sequence[TrafficWindow], graph: Graph, results: bool, num_tiles: int
) -> list[Traffic]:
    """Return the exchange of each field, see `field_windows`, on `num_tiles` tiles, padding included."""
    return [
        with_padding(traffic_on([window], range(num_tiles)), padding_of_tensor(access.tensor, graph.padded_lengths))
        for window, (_, access) in zip(windows, _exchanged(group, results).values(), strict=True)
    ]


def field_traffics(
    groups: Sequence[VertexGroup], traffics: Sequence[Sequence[Traffic]], results: bool
) -> list[FieldTraffic]:
    """Return the exchanges of the fields of some groups; `traffics` has those of each, see `padded_traffics`."""
    return [
        FieldTraffic(number, group, field, access.tensor, exchange)
        for number, (group, exchanges) in enumerate(zip(groups, traffics, strict=True))
        for (field, access), exchange in zip(_exchanged(group, results).values(), exchanges, strict=True)
    ]


def _exchanged(group: VertexGroup, results: bool) -> dict[int, tuple[Field, Access]]:
    """Return fields of a group by position: those that are read, or with `results` written."""
    fields = enumerate(zip(group.codelet.fields, group.accesses, strict=True))
    return {n: pair for n, pair in fields if (pair[0].is_written if results else pair[0].is_read)}


@dataclass(frozen=True, slots=True, eq=False)
class Rearrangement:
    """Copies of scattered operands, or results, on their own tile; arrays are int64[tiles]."""

    num_bytes: np.ndarray
    cycles: np.ndarray
    slow_paths: tuple[tuple[int, SlowReason, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class RearrangementCounts:
    """Counts of copies on their own tile, which know no target; arrays are int64[tiles].

    Args:
        fast_bytes: bytes that are copied in whole vectors.
        fast_fragments: contiguous parts of those.
        slow_bytes: bytes that are copied by atoms.
        slow_cycles: their cycles.
        slow_paths: number of the vertex group, reason, and cycles on the slowest tile.
    """

    fast_bytes: np.ndarray
    fast_fragments: np.ndarray
    slow_bytes: np.ndarray
    slow_cycles: np.ndarray
    slow_paths: tuple[tuple[int, SlowReason, int], ...]


def rearrangement(rows: Sequence[FieldTraffic], results: bool, window: Window, graph: Graph) -> Rearrangement:
    """Return the copies of the fields of a compute set, operands or results, for the tiles of a window."""
    counts = rearrangement_counts(rows, results, window, graph)
    if not counts.fast_bytes.any() and not counts.slow_paths:
        return Rearrangement(window.zeros, window.zeros, ())
    cycles = copy_cycles(counts.fast_bytes, counts.fast_fragments, graph.target, counts.slow_cycles)
    return Rearrangement(counts.fast_bytes + counts.slow_bytes, cycles, counts.slow_paths)


def rearrangement_counts(
    rows: Sequence[FieldTraffic], results: bool, window: Window, graph: Graph
) -> RearrangementCounts:
    """Return the counts of the copies of operands or results, for the tiles of a window."""
    # A result that arrives in parts is one operand of its owner.
    fast: list[Traffic] = []
    slow_cycles = window.zeros
    slow_bytes_of_all = window.zeros
    slow_paths: list[tuple[int, SlowReason, int]] = []
    for row in rows:
        if row.field.in_pieces:
            continue
        part = row.traffic
        uneven = shortest_atom([row.tensor], graph.padded_lengths)
        if uneven is None or _is_partial(row.tensor):
            fast.append(part)
            continue
        operands = 1 if results else _vertices_by_tile(row.group, window)
        if results and _combines_partials(row.group):
            operands, part = 0, replace(part, copied_bytes=part.local_bytes)
        copied = slow_bytes(part, uneven.atom_bytes, operands)
        cycles = np.ceil(atom_cycles(copied, uneven.atom_bytes)).astype(np.int64)
        slow_bytes_of_all = slow_bytes_of_all + copied
        slow_cycles = slow_cycles + cycles
        if cycles.any():
            reason = uneven.because("result copied" if results else "operand copied")
            slow_paths.append((row.number, reason, int(cycles.max())))
    copied_bytes, fragments = (
        window.total(getattr(part, name) for part in fast) for name in ("copied_bytes", "copied_fragments")
    )
    return RearrangementCounts(copied_bytes, fragments, slow_bytes_of_all, slow_cycles, tuple(slow_paths))


def _combines_partials(group: VertexGroup) -> bool:
    pairs = zip(group.accesses, group.codelet.fields, strict=True)
    return any(field.is_read and _is_partial(access.tensor) for access, field in pairs)


def _is_partial(tensor: Tensor) -> bool:
    return any(variable.monoid is not None for variable in tensor.variables())


def _vertices_by_tile(group: VertexGroup, window: Window) -> np.ndarray:
    tile = group.tile[group.tile != NO_TILE] - window.first_tile
    return np.maximum(1, np.bincount(tile, minlength=window.tiles))
