"""Leaves of the program tree: nodes that compute, move or wait themselves, and `WriteUndef`, which does nothing.

Execute | Copy | CrossReplicaCopy | StreamIn | StreamOut | RemoteIn | RemoteOut | Wait | Sync | WriteUndef
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph.forms import ComputeSet, HostStream, Leaf, Program, RemoteBuffer, Tensors, describe
from ipujax.runtime.tensor import STREAMS, Origin, Tensor

SyncKind = Literal["internal", "external"]


@dataclass(frozen=True, eq=False, slots=True)
class Execute(Leaf):
    """Runs a compute set: exchanges its operands, runs its vertices, exchanges its results."""

    compute_set: ComputeSet

    # It has no `reads` and `writes`: those of its vertices are in the graph, see `analysis.EffectsOf`.

    def __post_init__(self) -> None:
        if not isinstance(self.compute_set, ComputeSet):
            raise GraphError(
                f"{describe(self.compute_set)} is not a compute set",
                expected="a compute set, as graph.add_compute_set returns",
            )

    @property
    def label(self) -> str:
        return self.compute_set.name

    @property
    def shown_origin(self) -> Origin:
        return self.compute_set.origin

    @property
    def builder_part(self) -> str:
        return self.compute_set.origin.part


def _check_same_type(name: str, copy: Copy | CrossReplicaCopy) -> None:
    """Refuse a copy between tensors of different shape or dtype; messages call it `name`."""
    a = copy.source
    b = copy.destination
    if a.shape != b.shape or a.dtype != b.dtype:
        raise GraphError(
            f"{name} joins different tensors",
            where=copy.origin,
            expected=f"{a.dtype}{list(a.shape)}",
            got=f"{b.dtype}{list(b.shape)}",
        )


@dataclass(frozen=True, eq=False, slots=True)
class Copy(Leaf):
    """Copies one tensor to another of the same shape and dtype.

    Args:
        source: tensor that is read.
        destination: tensor that is written.
        name: debug name.
        origin: line and layer.
        is_collective: whether it is a `CrossReplicaCopy` of replicas that are parts of one graph: only IPUs that send
            or receive sync for it.
    """

    source: Tensor
    destination: Tensor
    name: str = "copy"
    origin: Origin = Origin()
    is_collective: bool = False

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
        source: tensor of every replica that sends.
        destination: tensor of every replica that receives; of the source's shape and dtype.
        replica_map: (source, destination) pairs of replicas. A replica may send to several, and receives once at most;
            one that receives nothing keeps the values of its destination.
        name: debug name.
        origin: line and layer.
        back: another source and destination of the same shape and dtype, copied in the same exchange from each receiver
            to its sender; None if nothing goes back.
    """

    source: Tensor
    destination: Tensor
    replica_map: tuple[tuple[int, int], ...]
    name: str = "cross-replica copy"
    origin: Origin = Origin()
    back: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        for copy in self.ways:
            _check_same_type(self.name, copy)
        if self.back is not None:  # both ways move as much
            _check_same_type(self.name, replace(self, destination=self.back[0], back=None))

    @property
    def ways(self) -> tuple[CrossReplicaCopy, ...]:
        """The copy along the map, and the one back if there is one, each by itself."""
        if self.back is None:
            return (self,)
        reverse = tuple((destination, source) for source, destination in self.replica_map)
        return replace(self, back=None), CrossReplicaCopy(*self.back, reverse, self.name, self.origin)

    def sources(self, replicas: int) -> tuple[int | None, ...]:
        """Return the replica that each replica receives from; None for those that receive nothing."""
        source_of = {destination: source for source, destination in self.replica_map}
        return tuple(source_of.get(replica) for replica in range(replicas))

    def reaches_all(self, replicas: int) -> bool:
        """Return whether each replica receives something."""
        # Each receives once at most: pairs are counted, not looked at, as there may be thousands.
        return len(self.replica_map) == replicas

    @property
    def reads(self) -> Tensors:
        return tuple(copy.source for copy in self.ways)

    @property
    def writes(self) -> Tensors:
        return tuple(copy.destination for copy in self.ways)

    @property
    def label(self) -> str:
        return self.name


# Of cycles that all transfers of a host exchange share, as if they were a step.
HOST_LATENCY = Origin(path="latency of host exchanges", part=STREAMS)


def _origin_or_stream(origin: Origin, stream: HostStream) -> Origin:
    # The front end makes transfers of arguments and results, which have no line of the user's.
    shown = Origin(path=f"host stream {stream.name}") if origin == Origin() else origin
    return replace(shown, part=STREAMS)


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
        return _origin_or_stream(self.origin, self.stream)


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
        return _origin_or_stream(self.origin, self.stream)


@dataclass(frozen=True, eq=False, slots=True)
class RemoteIn(Leaf):
    """Moves rows of a remote buffer into a tensor [rows, *shape of a row].

    `offset`, int32 or uint32 [rows], has the row numbers; None stands for all rows. Rows beyond the buffer read as
    zeros. With `overlaps`, I/O tiles move it while the steps after it run; `Wait` ends it.
    """

    buffer: RemoteBuffer
    destination: Tensor
    offset: Tensor | None = None
    origin: Origin = Origin()
    overlaps: bool = False

    # The buffer is off-chip, so it is among neither `reads` nor `writes`.
    @property
    def reads(self) -> Tensors:
        return () if self.offset is None else (self.offset,)

    @property
    def writes(self) -> Tensors:
        return (self.destination,)

    @property
    def label(self) -> str:
        return self.buffer.name

    @property
    def shown_origin(self) -> Origin:
        return replace(self.origin, part=STREAMS)


@dataclass(frozen=True, eq=False, slots=True)
class RemoteOut(Leaf):
    """Moves a tensor [rows, *shape of a row] into rows of a remote buffer; rows beyond the buffer are dropped."""

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

    @property
    def shown_origin(self) -> Origin:
        return replace(self.origin, part=STREAMS)


@dataclass(frozen=True, eq=False, slots=True)
class Wait(Leaf):
    """Waits for the transfers of a tensor that overlap other steps; its variables are live until then."""

    tensor: Tensor
    origin: Origin = Origin()

    @property
    def reads(self) -> Tensors:
        return (self.tensor,)

    @property
    def label(self) -> str:
        return "wait"

    @property
    def shown_origin(self) -> Origin:
        return replace(self.origin, part=STREAMS)


@dataclass(frozen=True, eq=False, slots=True)
class Sync(Leaf):
    """Synchronises the tiles of each IPU ("internal"), or all IPUs and the host ("external")."""

    kind: SyncKind = "external"
    origin: Origin = Origin()

    @property
    def label(self) -> str:
        return f"{self.kind} sync"


@dataclass(frozen=True, eq=False, slots=True)
class WriteUndef(Program):
    """Ends the live range of a tensor's values, whose elements may then be read and are undefined: no cycles, no bytes.

    Needed before parts of a buffer are written one by one, so that its memory is not live from the start.
    """

    destination: Tensor

    # No `Leaf`: it has no cost, and no place on a timeline.

    def __post_init__(self) -> None:
        if not isinstance(self.destination, Tensor):
            raise GraphError(f"WriteUndef of {describe(self.destination)}", expected="a tensor")

    @property
    def writes(self) -> Tensors:
        return (self.destination,)
