"""Handles that programs refer to: compute sets, host streams and remote buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ipujax.runtime.tensor import Origin, Variable


@dataclass(frozen=True, eq=False, slots=True)
class ComputeSet:
    """Vertices that run in parallel between two syncs; the graph holds its vertex groups."""

    name: str
    origin: Origin = Origin()


@dataclass(frozen=True, eq=False, slots=True)
class HostStream:
    """A unidirectional channel between host and device, of one value of `shape` and `dtype` a transfer.

    Where a graph has several replicas, a transfer is all of theirs together: [replicas, *shape].
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    resident: bool = False  # the value already lies on the device (or stays there): no bytes move
    broadcast: bool = False  # to the device: one value, of `shape`, for all replicas


@dataclass(frozen=True, eq=False, slots=True)
class RemoteBuffer:
    """Off-chip memory, moved by rows of its first axis or as a whole; it keeps what it holds from run to run.

    Args:
        name: its handle.
        memory: what it holds; a variable of no graph, for no tile holds it.
        filled_from: the host fills it with a value of this stream before a run.
        read_into: the host reads what it holds after a run, as a value of this stream.
        on_host: it is memory of the host's, not streaming memory.
    """

    name: str
    memory: Variable
    filled_from: HostStream | None = None
    read_into: HostStream | None = None
    on_host: bool = False
    resident: ClassVar[bool] = False  # its bytes do move, as those of a `HostStream` may not

    @staticmethod
    def of(name: str, dtype: Any, num_elements: int, repeats: int = 1) -> RemoteBuffer:
        """Makes a buffer of `repeats` rows of `num_elements`, all zeros."""
        return RemoteBuffer(name, Variable((repeats, num_elements), dtype, name))

    @property
    def row(self) -> int:
        """Elements of one row."""
        return self.memory.shape[1]

    @property
    def repeats(self) -> int:
        """Number of rows."""
        return self.memory.shape[0]
