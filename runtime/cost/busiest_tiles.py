"""Counts of an exchange and of copies on the tiles that decide how long they last, and their cycles on each IPU.

Input: traffic of operands by tile. Output: `ExchangeCounts`, `CopyingCounts`, which know no target but its tiles; their
cycles are those of `exchange.superstep`, for one target or an array of machines. A phase lasts as long as its slowest
tile: of equal tiles one is enough, and none that has no count above another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.cost.ipu_window import Window
from ipujax.runtime.exchange import Traffic, copy_cycles, exchange_cycles, receive_cycles
from ipujax.runtime.target import Target

_MOST_COMPARED = 256  # tiles: their comparison with each other takes the square of their number


def distinct_columns(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct columns of int64[k, n] in lexical order, [k, distinct], and the number of each, [n]."""
    if not rows.size:
        return rows[:, :1], np.zeros(rows.shape[1], np.int64)
    # Tiles mostly equal the one before them, and mostly in all counts but a few: few columns and rows are sorted.
    is_new = np.concatenate([[True], (rows[:, 1:] != rows[:, :-1]).any(0)])
    runs = rows[:, is_new]
    varying = runs[(runs != runs[:, :1]).any(1)]
    if not len(varying):
        return runs[:, :1], np.zeros(rows.shape[1], np.int64)
    order = np.lexsort(varying[::-1])
    ordered = varying[:, order]
    begins = np.concatenate([[True], (ordered[:, 1:] != ordered[:, :-1]).any(0)])
    number_of_run = np.empty(len(order), np.int64)
    number_of_run[order] = np.cumsum(begins) - 1
    return runs[:, order[begins]], number_of_run[np.cumsum(is_new) - 1]


def distinct_tiles(counts: np.ndarray, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct tiles of each IPU of a window, by counts int64[k, tiles]: counts [k, n] and IPUs [n]."""
    busy = counts.any(0)
    if window.num_ipus == 1:
        columns, _ = distinct_columns(counts[:, busy])
        return columns, np.zeros(columns.shape[1], np.int64)
    ipu = np.flatnonzero(busy) // window.tiles_per_ipu
    columns, _ = distinct_columns(np.concatenate([ipu[None], counts[:, busy]]))
    return columns[1:], columns[0]


def without_lesser(counts: np.ndarray, ipu: np.ndarray) -> np.ndarray:
    """Return which tiles have no count below another's of their IPU in all counts, bool[n]; tiles are distinct."""
    if not 1 < len(ipu) <= _MOST_COMPARED:
        return np.ones(len(ipu), bool)
    is_lesser = (counts[:, :, None] <= counts[:, None, :]).all(0) & (ipu[:, None] == ipu[None, :])
    np.fill_diagonal(is_lesser, False)
    return np.asarray(~is_lesser.any(1))


def largest_of_ipus(values: np.ndarray, ipu: np.ndarray, num_ipus: int) -> np.ndarray:
    """Return the maxima of each IPU, [num_ipus, machines], of those of tiles, [n, machines], with rising `ipu`."""
    largest = np.zeros_like(values, shape=(num_ipus, values.shape[-1]))  # of its type: these may be cycles of vertices
    present, first = np.unique(ipu, return_index=True)
    if len(present):
        largest[present] = np.maximum.reduceat(values, first, axis=0)
    return largest


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeCounts:
    """Counts of an exchange on its busiest tiles.

    Args:
        operands: of each operand bytes received apart from shared ones, bytes shared by buses, receives, fragments:
            int64[operands, 4, n].
        sent: bytes and contiguous parts sent, int64[2, n].
        ipu: IPU of each tile, in the window, int64[n].
        num_ipus: IPUs of the window.
    """

    operands: np.ndarray
    sent: np.ndarray
    ipu: np.ndarray
    num_ipus: int

    @staticmethod
    def of(traffics: Sequence[Traffic], window: Window) -> ExchangeCounts:
        """Return the counts of one exchange of some traffic, by tiles of a window."""
        parts = [
            np.stack([t.received_bytes - t.shared_bytes, t.shared_bytes, t.receives, t.fragments])
            for t in traffics
            if t.received_bytes.any()
        ]
        if not parts:  # what arrives on no tile is sent by none
            none = np.zeros((0, 4, 0), np.int64), np.zeros((2, 0), np.int64), np.zeros(0, np.int64)
            return ExchangeCounts(*none, window.num_ipus)
        sent = np.stack([window.total(t.sent_bytes for t in traffics), window.total(t.sends for t in traffics)])
        return ExchangeCounts.by_tile(parts, sent, window)

    @staticmethod
    def by_tile(operands: Sequence[np.ndarray], sent: np.ndarray, window: Window) -> ExchangeCounts:
        """Return the counts of operands, int64[4, tiles] each, and of what is sent, int64[2, tiles]."""
        received = np.stack(operands).astype(np.int64) if operands else np.zeros((0, 4, window.tiles), np.int64)
        counts, ipu = distinct_tiles(np.concatenate([received.reshape(-1, window.tiles), sent]), window)
        chosen = without_lesser(counts, ipu)
        counts, ipu = counts[:, chosen], ipu[chosen]
        return ExchangeCounts(counts[:-2].reshape(len(received), 4, len(ipu)), counts[-2:], ipu, window.num_ipus)

    def cycles(self, target: Target) -> np.ndarray:
        """Return the cycles on each IPU, [num_ipus, machines]."""
        if not len(self.ipu):
            return np.zeros((self.num_ipus, 1), np.int64)
        receiving = np.zeros((len(self.ipu), 1), np.int64)
        for lanes, shared, receives, fragments in self.operands[..., None]:
            receiving = receiving + receive_cycles(lanes + shared, shared, receives, target, fragments)
        sent_bytes, sends = self.sent[..., None]
        return largest_of_ipus(exchange_cycles(receiving, sent_bytes, target, sends), self.ipu, self.num_ipus)


@dataclass(frozen=True, slots=True, eq=False)
class CopyingCounts:
    """Copies on the busiest tiles, bytes, fragments and cycles by atoms, int64[3, n], and the IPU of each, int64[n]."""

    copied: np.ndarray
    ipu: np.ndarray
    num_ipus: int

    @staticmethod
    def by_tile(copied: np.ndarray, window: Window) -> CopyingCounts:
        """Return the counts of bytes, fragments and cycles by atoms, int64[3, tiles]."""
        counts, ipu = distinct_tiles(copied, window)
        chosen = without_lesser(counts, ipu)
        return CopyingCounts(counts[:, chosen], ipu[chosen], window.num_ipus)

    def cycles(self, target: Target) -> np.ndarray:
        """Return the cycles on each IPU, [num_ipus, machines]."""
        copied_bytes, fragments, slow_cycles = self.copied[..., None]
        cycles = copy_cycles(copied_bytes, fragments, target, slow_cycles)
        return largest_of_ipus(cycles, self.ipu, self.num_ipus)
