"""`DataFlow`: batches of a step, the tensors that a step returns (anchors), and properties of its inputs.

An input has a shape, which a model may leave open, and settings of its transfer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ipujax.front_end import nearest
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


class AnchorReturnTypeId(IntEnum):
    """Kinds of `AnchorReturnType`: the values of an anchor that a step returns."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3


_IDS = {kind.name.upper(): kind for kind in AnchorReturnTypeId}


class AnchorReturnType:
    """Values of an anchor that a step returns.

    Args:
        anchorReturnTypeString: "ALL", of all micro-batches; "EVERYN", of every n-th micro-batch; "FINAL", of the last
            micro-batch; "SUM", the sum over all.
        returnPeriod: n of "EVERYN"; a `TileSet` may stand here for the others.
        tileSet: tiles of the transfer to the host; the compiler chooses by `SessionOptions.numIOTiles`.
        exchangeStrategy: when it is transferred, likewise.

    Raises:
        popart_exception: an unknown kind, with the nearest, or a period where there is none.
    """

    def __init__(
        self,
        anchorReturnTypeString: str,
        returnPeriod: Any = None,
        tileSet: TileSet = TileSet.Compute,
        exchangeStrategy: ExchangeStrategy = ExchangeStrategy.JustInTime,
    ) -> None:
        # PopART overloads the constructor: the second argument is a period or a tile set.
        if isinstance(returnPeriod, TileSet):
            tileSet = returnPeriod
            returnPeriod = None
        word = str(anchorReturnTypeString).upper()
        if word not in _IDS:
            message = f"Invalid anchor return type ID supplied: {anchorReturnTypeString}"
            raise popart_exception(
                message, expected=", ".join(_IDS), got=anchorReturnTypeString, hint=nearest(word, list(_IDS))
            )
        self._id = _IDS[word]
        _check_period(self._id, returnPeriod)
        self._period = int(returnPeriod or 1)
        self._tile_set = tileSet
        self._strategy = exchangeStrategy

    def id(self) -> AnchorReturnTypeId:
        """Return the kind."""
        return self._id

    def rp(self) -> int:
        """Return the period of "EVERYN"; 1 for the others."""
        return self._period

    def tileSet(self) -> TileSet:
        """Return the tiles of the transfer."""
        return self._tile_set

    def exchangeStrategy(self) -> ExchangeStrategy:
        """Return when the anchor is transferred."""
        return self._strategy

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnchorReturnType) and (self._id, self._period) == (other._id, other._period)

    def __hash__(self) -> int:
        return hash((self._id, self._period))

    def __repr__(self) -> str:
        period = f", {self._period}" if self._id is AnchorReturnTypeId.EveryN else ""
        return f'AnchorReturnType("{self._id.name.upper()}"{period})'


def _check_period(kind: AnchorReturnTypeId, period: Any) -> None:
    if kind is not AnchorReturnTypeId.EveryN:
        if period is not None:
            message = "A return period should not be supplied for this anchor return type"
            raise popart_exception(message, expected='"EVERYN"', got=period)
        return
    if period is None:
        raise popart_exception("Must specify return period with option 'EVERYN'", expected="a number of batches")
    if not isinstance(period, int) or period < 1:
        raise popart_exception("Anchor return period must be greater than zero", expected="at least 1", got=period)


class DataFlow:
    """Batches of a step, and its anchors.

    Args:
        batchesPerStep: batches that one `session.run` takes.
        anchorTensors: `AnchorReturnType` by name of the tensor, or names alone.
        anchorReturnType: of all names, where `anchorTensors` has names alone.
        anchorIds: names alone, by PopART's name of the argument.

    Raises:
        popart_exception: a number of batches below 1, or an "EVERYN" whose period does not divide it.
    """

    def __init__(
        self,
        batchesPerStep: int,
        anchorTensors: Mapping[str, AnchorReturnType] | Sequence[str] | None = None,
        anchorReturnType: AnchorReturnType | None = None,
        anchorIds: Sequence[str] | None = None,
    ) -> None:
        anchors = anchorTensors if anchorIds is None else anchorIds
        default = anchorReturnType or AnchorReturnType("ALL")
        self._anchors = dict(anchors) if isinstance(anchors, Mapping) else dict.fromkeys(anchors or (), default)
        self.setBatchesPerStep(batchesPerStep)

    def setBatchesPerStep(self, batchesPerStep: int) -> None:
        """Change the number of batches of a step."""
        if isinstance(batchesPerStep, bool) or int(batchesPerStep) != batchesPerStep or batchesPerStep < 1:
            raise popart_exception(
                "batchesPerStep must be a number of batches", expected="at least 1", got=batchesPerStep
            )
        self._batches = int(batchesPerStep)
        for name, kind in self._anchors.items():
            # Otherwise the last batches of a step would be in no returned value.
            if self._batches % kind.rp():
                raise popart_exception(
                    f'"EVERYN" of anchor {name!r} does not divide the batches of a step',
                    expected=f"a period that divides {self._batches}",
                    got=kind.rp(),
                )

    def batchesPerStep(self) -> int:
        """Return the number of batches of a step."""
        return self._batches

    def anchors(self) -> list[str]:
        """Return the names of the anchors."""
        return list(self._anchors)

    def nAnchors(self) -> int:
        """Return the number of anchors."""
        return len(self._anchors)

    def isAnchored(self, name: str) -> bool:
        """Return whether a tensor is an anchor."""
        return name in self._anchors

    def art(self, name: str) -> AnchorReturnType:
        """Return the kind of an anchor."""
        if name not in self._anchors:
            raise unknown_name("a DataFlow is asked for an anchor", name, self._anchors)
        return self._anchors[name]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Micro-batches of a step.

    Args:
        batches: batches of a step, one update of the weights each.
        accumulation: micro-batches of a replica in a batch.
        replicas: replicas.
    """

    batches: int
    accumulation: int = 1
    replicas: int = 1

    @property
    def dims(self) -> tuple[int, int, int]:
        """The leading dimensions of the data of a step."""
        return self.batches, self.accumulation, self.replicas

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, of all replicas."""
        return self.batches * self.accumulation * self.replicas

    def anchor_dims(self, kind: AnchorReturnType) -> tuple[int, int, int]:
        """Return the leading dimensions of an anchor, with those that are 1.

        Args:
            kind: of the anchor.
        """
        if kind.id() in (AnchorReturnTypeId.Final, AnchorReturnTypeId.Sum):
            return 1, 1, self.replicas
        return self.batches // kind.rp(), self.accumulation, self.replicas

    def anchor_shape(self, kind: AnchorReturnType, info: TensorInfo) -> tuple[int, ...]:
        """Return the shape of the array of an anchor, without leading dimensions of 1.

        Args:
            kind: of the anchor.
            info: of its value for one micro-batch.
        """
        return (*(n for n in self.anchor_dims(kind) if n != 1), *info.dims)
