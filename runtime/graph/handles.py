"""Handles that programs refer to: compute sets, host streams and remote buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ipujax.runtime.not_copied import OfGraph
from ipujax.runtime.tensor import Origin, Variable


@dataclass(frozen=True, eq=False, slots=True)
class ComputeSet(OfGraph):
    """Vertices that run in parallel between two syncs; the graph holds its vertex groups."""

    name: str
    origin: Origin = Origin()


@dataclass(frozen=True, eq=False, slots=True)
class HostStream(OfGraph):
    """A unidirectional channel between host and device, of one value of `shape` and `dtype` a transfer.

    With several replicas one transfer has the values of all: [replicas, *shape].
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    resident: bool = False  # the value is on the device already, or stays there: no bytes move
    broadcast: bool = False  # to the device: one value of `shape` for all replicas
    blocks: tuple[int, ...] | None = None  # to the device: replicas of equal numbers get equal values


@dataclass(frozen=True, eq=False, slots=True)
class RemoteBuffer(OfGraph):
    """Off-chip memory, moved by rows of its first axis or all at once; its values last from run to run.

    Args:
        name: its handle.
        memory: variable for its elements; of no graph, since it is mapped to no tile.
        filled_from: stream whose value the host writes to it before a run, element by element in the order of both.
        read_into: stream that the host reads it into after a run, in the same way.
        on_host: whether it is memory of the host, not streaming memory.
    """

    name: str
    memory: Variable
    filled_from: HostStream | None = None
    read_into: HostStream | None = None
    on_host: bool = False
    resident: ClassVar[bool] = False  # as of `HostStream`: its bytes always move

    @staticmethod
    def of(name: str, dtype: Any, num_elements: int, repeats: int = 1) -> RemoteBuffer:
        """Return a buffer of `repeats` rows of `num_elements`, all zeros."""
        return RemoteBuffer(name, Variable((repeats, num_elements), dtype, name))

    @property
    def row(self) -> int:
        """Elements of one row."""
        return self.memory.shape[1]

    @property
    def repeats(self) -> int:
        """Number of rows."""
        return self.memory.shape[0]
