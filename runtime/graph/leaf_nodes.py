"""Leaves of the program tree: nodes that compute, move or wait themselves, and `WriteUndef`, which does nothing.

Execute | Copy | CrossReplicaCopy | StreamIn | StreamOut | RemoteIn | RemoteOut | Wait | Sync | WriteUndef
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph.forms import Leaf, Program, Tensors, described
from ipujax.runtime.graph.handles import ComputeSet, HostStream, RemoteBuffer
from ipujax.runtime.tensor import Origin, Tensor

SyncKind = Literal["internal", "external"]


@dataclass(frozen=True, eq=False, slots=True)
class Execute(Leaf):
    """Runs a compute set: exchange its operands, run its vertices, exchange its results."""

    compute_set: ComputeSet

    def __post_init__(self) -> None:
        if not isinstance(self.compute_set, ComputeSet):
            raise GraphError(
                f"{described(self.compute_set)} is no compute set", expected="what graph.add_compute_set made"
            )

    @property
    def label(self) -> str:
        return self.compute_set.name

    @property
    def shown_origin(self) -> Origin:
        return self.compute_set.origin


def _check_same_type(name: str, copy: Copy | CrossReplicaCopy) -> None:
    a, b = copy.source, copy.destination
    if a.shape != b.shape or a.dtype != b.dtype:
        expected, got = f"{a.dtype}{list(a.shape)}", f"{b.dtype}{list(b.shape)}"
        raise GraphError(f"{name} joins different tensors", where=copy.origin, expected=expected, got=got)


@dataclass(frozen=True, eq=False, slots=True)
class Copy(Leaf):
    """Copies one tensor to another of the same shape and dtype."""

    source: Tensor
    destination: Tensor
    name: str = "copy"
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        _check_same_type(f"copy {self.name}", self)

    @property
    def reads(self) -> Tensors:
        return (self.source,)

    @property
    def writes(self) -> Tensors:
        return (self.destination,)

    @property
    def label(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, slots=True)
class CrossReplicaCopy(Leaf):
    """Copies a tensor of each replica to a tensor of other replicas.

    Args:
        source: what is sent, in every replica that sends.
        destination: where it goes, in every replica that receives; of the source's shape and dtype.
        replica_map: (source, destination) pairs of replicas. No replica receives twice, one may send to several; who
            receives nothing keeps what it holds.
        name: debug name.
    """

    source: Tensor
    destination: Tensor
    replica_map: tuple[tuple[int, int], ...]
    name: str = "cross-replica copy"
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        _check_same_type(self.name, self)

    def sources(self, replicas: int) -> tuple[int | None, ...]:
        """The replica that each replica receives from, None where there is none."""
        sent = {destination: source for source, destination in self.replica_map}
        return tuple(sent.get(replica) for replica in range(replicas))

    @property
    def reads(self) -> Tensors:
        return (self.source,)

    @property
    def writes(self) -> Tensors:
        return (self.destination,)

    @property
    def label(self) -> str:
        return self.name


def _of_stream(origin: Origin, stream: HostStream) -> Origin:
    """An origin, or the stream where that is unknown."""
    return Origin(path=f"host stream {stream.name}") if origin == Origin() else origin


@dataclass(frozen=True, eq=False, slots=True)
class StreamIn(Leaf):
    """Moves one value from the host into a tensor."""

    stream: HostStream
    destination: Tensor
    origin: Origin = Origin()

    @property
    def writes(self) -> Tensors:
        return (self.destination,)

    @property
    def label(self) -> str:
        return self.stream.name

    @property
    def shown_origin(self) -> Origin:
        return _of_stream(self.origin, self.stream)


@dataclass(frozen=True, eq=False, slots=True)
class StreamOut(Leaf):
    """Moves the value of a tensor to the host."""

    source: Tensor
    stream: HostStream
    origin: Origin = Origin()

    @property
    def reads(self) -> Tensors:
        return (self.source,)

    @property
    def label(self) -> str:
        return self.stream.name

    @property
    def shown_origin(self) -> Origin:
        return _of_stream(self.origin, self.stream)


@dataclass(frozen=True, eq=False, slots=True)
class RemoteIn(Leaf):
    """Moves rows of a remote buffer into a tensor [rows, *shape of a row].

    `offset`, int32 or uint32 [rows], names the rows; None stands for the whole buffer. What is beyond the buffer reads
    as zeros. If it `overlaps`, what follows does not wait for it but where it needs the tensor.
    """

    buffer: RemoteBuffer
    destination: Tensor
    offset: Tensor | None = None
    origin: Origin = Origin()
    overlaps: bool = False

    @property
    def reads(self) -> Tensors:
        return () if self.offset is None else (self.offset,)

    @property
    def writes(self) -> Tensors:
        return (self.destination,)

    @property
    def label(self) -> str:
        return self.buffer.name


@dataclass(frozen=True, eq=False, slots=True)
class RemoteOut(Leaf):
    """Moves a tensor [rows, *shape of a row] into rows of a remote buffer; those beyond the buffer are lost."""

    source: Tensor
    buffer: RemoteBuffer
    offset: Tensor | None = None
    origin: Origin = Origin()
    overlaps: bool = False

    @property
    def reads(self) -> Tensors:
        return (self.source,) if self.offset is None else (self.source, self.offset)

    @property
    def label(self) -> str:
        return self.buffer.name


@dataclass(frozen=True, eq=False, slots=True)
class Wait(Leaf):
    """Waits until transfers of a tensor that overlap other work are over; its memory is kept until then."""

    tensor: Tensor
    origin: Origin = Origin()

    @property
    def reads(self) -> Tensors:
        return (self.tensor,)

    @property
    def label(self) -> str:
        return "wait"


@dataclass(frozen=True, eq=False, slots=True)
class Sync(Leaf):
    """Makes tiles wait for one another: those of each IPU ("internal"), or all IPUs and the host ("external")."""

    kind: SyncKind = "external"
    origin: Origin = Origin()

    @property
    def label(self) -> str:
        return f"{self.kind} sync"


@dataclass(frozen=True, eq=False, slots=True)
class WriteUndef(Program):
    """Says that what a tensor held is dead, and that what it holds now is anything: no cycles, no bytes.

    Needed before parts of a buffer are written one by one, so that its memory is not live from the start.
    """

    destination: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.destination, Tensor):
            raise GraphError(f"WriteUndef of {described(self.destination)}", expected="a tensor")

    @property
    def writes(self) -> Tensors:
        return (self.destination,)
