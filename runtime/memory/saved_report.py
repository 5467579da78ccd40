"""The memory report of a profile that was saved: arrays by tile, and what is on the fullest tile.

Input: `memory_data` of a report, JSON-able. Output: a `MemoryReport` with the same figures.
Limits: of other tiles than the fullest only the largest things are known, by `contents`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.memory.always_live import FIXED
from ipujax.runtime.memory.contents import TileContents
from ipujax.runtime.memory.live import Borrowed
from ipujax.runtime.memory.live_bytes import LiveBytes
from ipujax.runtime.memory.live_item import LiveItem
from ipujax.runtime.memory.report import MemoryReport
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin, frozen

T = TypeVar("T")


def memory_data(memory: MemoryReport) -> dict[str, Any]:
    """A report as data of which `SavedMemory` makes one again."""
    step, origin, items = memory.at_peak(memory.worst_tile)
    return {
        "byCategory": {name: layer.tolist() for name, layer in memory.by_category.items()},
        "shared": memory.shared_bytes.tolist(),
        "isFromTop": np.flatnonzero(memory.is_from_top).tolist(),
        "peak": {"step": step, "origin": _place(origin)},
        "items": [[item.name, item.num_bytes, item.category, _place(item.origin)] for item in items],
        "roles": [item.role for item in items],
        "layers": [item.layer for item in items],
        "wholeBytes": [item.whole_bytes for item in items],
        "byRole": {name: values.tolist() for name, values in memory.by_role.items()},
        "liveBytes": _live_data(memory.live_bytes),
        "contents": memory.contents.data(),
        "borrowed": [[b.name, b.tile, b.num_bytes, b.num_tiles, _place(b.origin)] for b in memory.borrowed],
    }


def _live_data(live: LiveBytes) -> dict[str, Any]:
    columns = {"steps": list(live.steps), "bytes": live.num_bytes.tolist()}
    return {**columns, "always": live.always_bytes, "shownOf": live.shown_of}


def _place(origin: Origin) -> list[str]:
    return [origin.line, origin.path, origin.library]


class SavedMemory(MemoryReport):
    """Tile memory as it was when the profile was saved; see `MemoryReport`.

    Args:
        target: the machine.
        data: of `memory_data`.
    """

    def __init__(self, target: Target, data: Mapping[str, Any]) -> None:
        layers = MappingProxyType({name: _by_tile(layer, target) for name, layer in data["byCategory"].items()})
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "fixed", MappingProxyType({name: layers[name] for name in FIXED}))
        object.__setattr__(self, "_saved", _Saved.of(target, layers, data))

    _saved: _Saved

    @cached_property
    def tile_bytes(self) -> np.ndarray:
        """As `MemoryReport.tile_bytes`."""
        return frozen(sum(self.by_category.values()), np.int64)

    @cached_property
    def by_category(self) -> Mapping[str, np.ndarray]:
        """As `MemoryReport.by_category`."""
        return self._saved.layers

    @property
    def shared_bytes(self) -> np.ndarray:
        """As `MemoryReport.shared_bytes`."""
        return self._saved.shared

    @property
    def is_from_top(self) -> np.ndarray:
        """As `MemoryReport.is_from_top`."""
        return self._saved.from_top

    @property
    def borrowed(self) -> tuple[Borrowed, ...]:
        """As `MemoryReport.borrowed`."""
        return self._saved.borrowed

    @property
    def contents(self) -> TileContents:
        """As `MemoryReport.contents`.

        Raises:
            ProfileError: it was saved by an older version.
        """
        return _recent(self._saved.contents, "what is on each tile")

    @cached_property
    def by_role(self) -> Mapping[str, np.ndarray]:
        """As `MemoryReport.by_role`.

        Raises:
            ProfileError: it was saved by an older version.
        """
        return _recent(self._saved.by_role, "the roles of variables")

    @cached_property
    def live_bytes(self) -> LiveBytes:
        """As `MemoryReport.live_bytes`.

        Raises:
            ProfileError: it was saved by an older version.
        """
        steps, num_bytes, always, shown_of = _recent(self._saved.live, "the bytes of its fullest tile over time")
        return LiveBytes(self.worst_tile, steps, num_bytes, always, shown_of)

    def _fits_unpacked(self) -> bool:
        return False  # what is packed is known

    def at_peak(self, tile: int) -> tuple[str, Origin, tuple[LiveItem, ...]]:
        """As `MemoryReport.at_peak`, of the fullest tile.

        Raises:
            ProfileError: for another tile.
        """
        if tile != self.worst_tile:
            what = "a saved profile knows what is on the fullest tile alone"
            raise ProfileError(what, expected=f"tile {self.worst_tile}", got=f"tile {tile}")
        return self._saved.peak

    def __repr__(self) -> str:
        return f"SavedMemory({self.max_tile_bytes:,} B on tile {self.worst_tile})"


def _recent(value: T | None, what: str) -> T:
    """What files of older versions lack."""
    if value is None:
        message = f"the profile was saved by an older ipujax, without {what}"
        raise ProfileError(message, hint="save the profile again with this ipujax")
    return value


@dataclass(frozen=True, eq=False, slots=True)
class _Saved:
    """The figures that others follow from."""

    layers: Mapping[str, np.ndarray]
    shared: np.ndarray
    from_top: np.ndarray
    borrowed: tuple[Borrowed, ...]
    peak: tuple[str, Origin, tuple[LiveItem, ...]]
    contents: TileContents | None
    by_role: Mapping[str, np.ndarray] | None
    live: tuple[tuple[str, ...], np.ndarray, int, int] | None

    @classmethod
    def of(cls, target: Target, layers: Mapping[str, np.ndarray], data: Mapping[str, Any]) -> _Saved:
        count = len(data["items"])
        roles, names_of_layers = (data.get(name, [""] * count) for name in ("roles", "layers"))
        rows = zip(data["items"], roles, names_of_layers, data.get("wholeBytes", [0] * count), strict=True)
        items = tuple(
            LiveItem(name, size, kind, replace(Origin(*place), layer=layer), None, role, whole)
            for (name, size, kind, place), role, layer, whole in rows
        )
        borrowed = tuple(
            Borrowed(name, tile, size, tiles, Origin(*place)) for name, tile, size, tiles, place in data["borrowed"]
        )
        from_top = frozen(np.isin(np.arange(target.num_tiles), data["isFromTop"]), np.bool_)
        peak = data["peak"]["step"], Origin(*data["peak"]["origin"]), items
        contents = TileContents.of_data(data["contents"]) if "contents" in data else None
        by_role = None
        if "byRole" in data:
            by_role = MappingProxyType({name: _by_tile(values, target) for name, values in data["byRole"].items()})
        live = None
        if "liveBytes" in data:
            found = data["liveBytes"]
            live = tuple(found["steps"]), frozen(found["bytes"], np.int64), found["always"], found["shownOf"]
        return cls(layers, _by_tile(data["shared"], target), from_top, borrowed, peak, contents, by_role, live)


def _by_tile(values: Sequence[int], target: Target) -> np.ndarray:
    array = frozen(values, np.int64)
    if array.shape != (target.num_tiles,):
        raise ValueError(f"{array.shape} values for {target.num_tiles} tiles")
    return array
