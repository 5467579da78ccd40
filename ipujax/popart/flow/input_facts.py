"""Properties of inputs besides their data: shapes that a model leaves open, and settings of their transfer."""

from __future__ import annotations

from typing import Any

from ipujax.popart.enumerations import ExchangeStrategy, ReplicatedStreamMode, TileSet
from ipujax.popart.exceptions import popart_exception, unknown_name
from ipujax.popart.tensor_info import TensorInfo


class InputShapeInfo:
    """Element types and shapes of inputs that a model leaves open."""

    def __init__(self) -> None:
        self._infos: dict[str, TensorInfo] = {}

    def add(self, name: str, info: TensorInfo) -> None:
        """Set element type and shape of an input."""
        self._infos[name] = info

    def get(self, name: str) -> TensorInfo:
        """Return element type and shape of an input.

        Raises:
            popart_exception: none is set.
        """
        if name not in self._infos:
            raise unknown_name("InputShapeInfo is asked for an input", name, self._infos)
        return self._infos[name]

    def has(self, name: str) -> bool:
        """Return whether an input has one."""
        return name in self._infos

    def infos(self) -> dict[str, TensorInfo]:
        """Return all by name."""
        return dict(self._infos)


class InputSettings:
    """Settings of the transfer of an input; the compiler chooses tiles by `SessionOptions.numIOTiles`.

    Args:
        settings: a `TileSet`, an `ExchangeStrategy` or a `ReplicatedStreamMode`, in any order.

    Raises:
        popart_exception: `ReplicatedStreamMode.Broadcast`, one stream for all replicas.
    """

    def __init__(self, *settings: Any, **keywords: Any) -> None:
        values = [*settings, *keywords.values()]
        self._tile_set = _first(values, TileSet, TileSet.Compute)
        self._strategy = _first(values, ExchangeStrategy, ExchangeStrategy.JustInTime)
        self._mode = _first(values, ReplicatedStreamMode, ReplicatedStreamMode.Replicate)
        if self._mode != ReplicatedStreamMode.Replicate:
            message = "InputSettings: each replica reads its own data"
            raise popart_exception(message, expected="ReplicatedStreamMode.Replicate", got=self._mode)

    def tileSet(self) -> TileSet:
        """Return the tiles."""
        return TileSet(self._tile_set)

    def exchangeStrategy(self) -> ExchangeStrategy:
        """Return when data are exchanged."""
        return ExchangeStrategy(self._strategy)

    def replicatedStreamMode(self) -> ReplicatedStreamMode:
        """Return whether replicas read streams of their own."""
        return ReplicatedStreamMode(self._mode)


def _first(values: list[Any], kind: type, default: Any) -> Any:
    return next((value for value in values if isinstance(value, kind)), default)
