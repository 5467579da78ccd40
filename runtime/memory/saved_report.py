"""Memory report of a saved profile: arrays by tile, and the items of the fullest tile.

Input: `memory_data` of a report, JSON-able. Output: a `MemoryReport` with the same figures.
Lists by tile are runs of equal numbers in the data.
Limits: of other tiles than the fullest only the largest items are saved, in `contents`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.files import numbers_of_runs, runs_of
from ipujax.runtime.memory.always_live import FIXED
from ipujax.runtime.memory.contents import TileContents
from ipujax.runtime.memory.live import Borrowed
from ipujax.runtime.memory.live_bytes import LiveBytes
from ipujax.runtime.memory.live_item import LiveItem
from ipujax.runtime.memory.report import MemoryReport
from ipujax.runtime.read_only import ReadOnlyMapping
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin, frozen


def memory_data(memory: MemoryReport) -> dict[str, Any]:
    """Return a report as JSON-able data, which `SavedMemory` reads."""
    step, origin, items = memory.at_peak(memory.worst_tile)
    return {
        "byCategory": {name: runs_of(values) for name, values in memory.by_category.items()},
        "shared": runs_of(memory.shared_bytes),
        "isFromTop": np.flatnonzero(memory.is_from_top).tolist(),
        "peak": {"step": step, "origin": _origin_data(origin)},
        "items": [[item.name, item.num_bytes, item.category, _origin_data(item.origin)] for item in items],
        "roles": [item.role for item in items],
        "layers": [item.layer for item in items],
        "wholeBytes": [item.whole_bytes for item in items],
        "byRole": {name: runs_of(values) for name, values in memory.by_role.items()},
        "liveBytes": _live_data(memory.live_bytes),
        "contents": memory.contents.data(),
        "borrowed": [[b.name, b.tile, b.num_bytes, b.num_tiles, _origin_data(b.origin)] for b in memory.borrowed],
    }


def _live_data(live: LiveBytes) -> dict[str, Any]:
    columns = {"steps": list(live.steps), "bytes": live.num_bytes.tolist()}
    return {**columns, "always": live.always_bytes, "shownOf": live.shown_of}


def _origin_data(origin: Origin) -> list[str]:
    return [origin.line, origin.path, origin.library]


class SavedMemory(MemoryReport):
    """Tile memory as it was when the profile was saved; see `MemoryReport` for its attributes.

    Args:
        target: the machine.
        data: result of `memory_data`.
    """

    def __init__(self, target: Target, data: Mapping[str, Any]) -> None:
        by_category = {name: _by_tile(runs) for name, runs in data["byCategory"].items()}
        # The base class is frozen, and its other fields, graph and live ranges, are not saved.
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "fixed", ReadOnlyMapping({name: by_category[name] for name in FIXED}))
        object.__setattr__(self, "_saved", _Saved.of(target, ReadOnlyMapping(by_category), data))

    _saved: _Saved

    @cached_property
    def tile_bytes(self) -> np.ndarray:
        return frozen(sum(self.by_category.values()), np.int64)

    @cached_property
    def by_category(self) -> Mapping[str, np.ndarray]:
        return self._saved.by_category

    @property
    def shared_bytes(self) -> np.ndarray:
        return self._saved.shared

    @property
    def is_from_top(self) -> np.ndarray:
        return self._saved.from_top

    @property
    def borrowed(self) -> tuple[Borrowed, ...]:
        return self._saved.borrowed

    @property
    def contents(self) -> TileContents:
        return self._saved.contents

    @cached_property
    def by_role(self) -> Mapping[str, np.ndarray]:
        return self._saved.by_role

    @cached_property
    def live_bytes(self) -> LiveBytes:
        steps, num_bytes, always, shown_of = self._saved.live
        return LiveBytes(self.worst_tile, steps, num_bytes, always, shown_of)

    def _fits_unpacked(self) -> bool:
        return False  # the packed sizes are saved: no reason to estimate

    def at_peak(self, tile: int) -> tuple[str, Origin, tuple[LiveItem, ...]]:
        """Return step, origin and items of the fullest tile, and of no other; see `MemoryReport.at_peak`."""
        if tile != self.worst_tile:
            message = "a saved profile lists the contents of the fullest tile only"
            raise ProfileError(message, expected=f"tile {self.worst_tile}", got=f"tile {tile}")
        return self._saved.peak

    def __repr__(self) -> str:
        return f"SavedMemory({self.max_tile_bytes:,} B on tile {self.worst_tile})"


@dataclass(frozen=True, eq=False, slots=True)
class _Saved:
    """The figures from which the others follow."""

    by_category: Mapping[str, np.ndarray]
    shared: np.ndarray
    from_top: np.ndarray
    borrowed: tuple[Borrowed, ...]
    peak: tuple[str, Origin, tuple[LiveItem, ...]]
    contents: TileContents
    by_role: Mapping[str, np.ndarray]
    live: tuple[tuple[str, ...], np.ndarray, int, int]

    @classmethod
    def of(cls, target: Target, by_category: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> _Saved:
        rows = zip(data["items"], data["roles"], data["layers"], data["wholeBytes"], strict=True)
        items = tuple(
            LiveItem(name, size, category, replace(Origin(*origin), layer=layer), None, role, variable_bytes)
            for (name, size, category, origin), role, layer, variable_bytes in rows
        )
        borrowed = tuple(
            Borrowed(name, tile, size, tiles, Origin(*origin)) for name, tile, size, tiles, origin in data["borrowed"]
        )
        from_top = frozen(np.isin(np.arange(target.num_tiles), data["isFromTop"]), np.bool_)
        peak = data["peak"]["step"], Origin(*data["peak"]["origin"]), items
        contents = TileContents.of_data(data["contents"])
        by_role = ReadOnlyMapping({name: _by_tile(runs) for name, runs in data["byRole"].items()})
        columns = data["liveBytes"]
        live = tuple(columns["steps"]), frozen(columns["bytes"], np.int64), columns["always"], columns["shownOf"]
        return cls(by_category, _by_tile(data["shared"]), from_top, borrowed, peak, contents, by_role, live)


def _by_tile(runs: str) -> np.ndarray:
    return frozen(numbers_of_runs(runs), np.int64)
