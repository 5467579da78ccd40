"""Execution traces of Chakra: one file for each IPU, of compute and communication nodes with their dependencies.

Input: `Figures` with a compiled program. Output: the content of a file for each rank, which Chakra and simulators such
as ASTRA-sim read. Rank r·n + i is IPU i of n of replica r.

Each part of a step on an IPU is a node. An IPU runs its steps in order, so a node waits for those of the step before; a
message is a node of its sender and one of its receiver, with the same tag. Bytes are those that arrive, as in the
profile: of messages, transfers, and exchanges inside the IPU of a compute node. So those of all ranks add up to the
profile's of all replicas, if each replica takes part in all copies between replicas; the profile is one of a replica
that does.

A file is messages of protocol buffers, each after its length: a `GlobalMetadata`, then the `Node`s. `MESSAGES` has the
fields that are written, by number and type. Attributes are those that Chakra's feeder knows: `is_cpu_op`, `tensor_size`
(bytes of a transfer, or that arrive on the tiles in a compute node's exchanges), `comm_size`, `comm_src`, `comm_dst`,
`comm_tag`. Times of nodes are whole microseconds in the format; `start_cycle` and `cycles` have them exactly.
Source: mlcommons/chakra, `schema/protobuf/et_def.proto` and `src/feeder/et_feeder_node.cpp`; protobuf.dev, "Encoding".
Limits: a collective is its rounds of messages, as it runs. Transfers on I/O tiles begin with their step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost, CopyCost, ExchangeCost, StreamCost
from ipujax.runtime.graph import CrossReplicaCopy, Leaf, Program, RemoteIn, StreamIn
from ipujax.runtime.profile import Figures
from ipujax.runtime.profile.attribution import label
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import readable_name
from ipujax.runtime.timeline import Spans

NodeKind = Literal["compute", "send", "receive", "load", "store"]
NO_PEER = -1


@dataclass(frozen=True, slots=True)
class TraceNode:
    """A part of a step on one IPU.

    Args:
        name: of the step.
        kind: of the node.
        step: number of the step in the run; the tag of messages.
        start: cycle at which the step begins on the IPU.
        cycles: cycles until it ends there, waits inside it included.
        num_bytes: bytes that arrive; of a message to another IPU, bytes that leave.
        peer: rank of the other IPU of a message, else `NO_PEER`.
    """

    name: str
    kind: NodeKind
    step: int
    start: int
    cycles: int
    num_bytes: int
    peer: int = NO_PEER


def trace_nodes(executable: Executable, spans: Spans, rank: int) -> Iterator[TraceNode]:
    """Yield the nodes of a rank in order; spans must be of single steps."""
    num_ipus = executable.target.num_ipus
    replica, ipu = divmod(rank, num_ipus)
    for row in np.flatnonzero(spans.ipu == ipu).tolist():
        step = int(spans.step[row])
        node = spans.nodes[step]
        start, end = int(spans.start[row]), int(spans.end[row])
        for kind, num_bytes, peer in _nodes_of_step(executable, node, replica, ipu):
            yield TraceNode(readable_name(label(node)[1]), kind, step, start, end - start, num_bytes, peer)


def _nodes_of_step(
    executable: Executable, node: Program, replica: int, ipu: int
) -> Iterator[tuple[NodeKind, int, int]]:
    """Yield kind, bytes and peer of the nodes of one step on an IPU; messages first."""
    cost = executable.costs.get(node) if isinstance(node, Leaf) else None
    received = int(_received_bytes(cost, executable.target)[ipu])
    if isinstance(cost, StreamCost):
        if received:
            yield "load" if isinstance(node, StreamIn | RemoteIn) else "store", received, NO_PEER
        return
    num_messages = 0
    if isinstance(cost, CopyCost) and cost.flows is not None:
        flows = cost.flows
        other_replicas = _other_replicas(node, replica)
        ways = len(node.ways) if isinstance(node, CrossReplicaCopy) else 1  # of equal bytes, to different replicas
        for kind, own_ipus, peers, replicas in (
            ("send", flows.senders, flows.receivers, other_replicas[0]),
            ("receive", flows.receivers, flows.senders, other_replicas[1]),
        ):
            for pair in np.flatnonzero(own_ipus == ipu).tolist():
                num_bytes = int(flows.num_bytes[pair]) // ways
                for other in replicas:
                    num_messages += 1
                    received -= num_bytes if kind == "receive" else 0
                    yield kind, num_bytes, other * executable.target.num_ipus + int(peers[pair])  # type: ignore[misc]
    if received > 0 or not num_messages:
        yield "compute", max(0, received), NO_PEER


def _other_replicas(node: Program, replica: int) -> tuple[list[int], list[int]]:
    """Replicas to which a copy sends from one, and from which that receives; the same one within a replica."""
    if not isinstance(node, CrossReplicaCopy):
        return [replica], [replica]
    pairs = [pair for copy in node.ways for pair in copy.replica_map if pair[0] != pair[1]]
    return [b for a, b in pairs if a == replica], [a for a, b in pairs if b == replica]


def _received_bytes(cost: object, target: Target) -> np.ndarray:
    """Return the bytes that arrive on the tiles of each IPU in one run of a step, or that the host exchanges."""
    total = np.zeros(target.num_ipus, np.int64)
    match cost:
        case StreamCost():
            parts = [(cost.first_ipu, cost.tile_bytes)]
        case CopyCost():
            parts = [(cost.first_ipu, _arriving(cost.exchange))]
        case ComputeSetCost():
            parts = [(cost.first_ipu, _arriving(exchange)) for exchange in (cost.before, cost.after)]
        case _:
            parts = []
    for first_ipu, tile_bytes in parts:
        by_ipu = tile_bytes.reshape(-1, target.tiles_per_ipu).sum(1)
        total[first_ipu : first_ipu + len(by_ipu)] += by_ipu
    return total


def _arriving(exchange: ExchangeCost) -> np.ndarray:
    """Return the bytes that arrive on each tile."""
    return np.asarray(exchange.received_bytes)


VERSION = "0.0.4"  # published: of the schema, as in the traces of its own tests

# Message → field → number and type: a scalar type, "repeated" before one, or the name of a message.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "GlobalMetadata": {"version": (1, "string"), "attr": (2, "repeated AttributeProto")},
    "Node": {
        "id": (1, "uint64"),
        "name": (2, "string"),
        "type": (3, "enum"),
        "ctrl_deps": (4, "repeated uint64"),
        "data_deps": (5, "repeated uint64"),
        "start_time_micros": (6, "uint64"),
        "duration_micros": (7, "uint64"),
        "attr": (10, "repeated AttributeProto"),
    },
    "AttributeProto": {
        "name": (1, "string"),
        "int32_val": (7, "int32"),
        "int64_val": (9, "int64"),
        "uint64_val": (13, "uint64"),
        "bool_val": (27, "bool"),
        "string_val": (29, "string"),
    },
}
NODE_TYPES = {
    "METADATA_NODE": 1,
    "MEM_LOAD_NODE": 2,
    "MEM_STORE_NODE": 3,
    "COMP_NODE": 4,
    "COMM_SEND_NODE": 5,
    "COMM_RECV_NODE": 6,
    "COMM_COLL_NODE": 7,
}
_VARINT, _BYTES = 0, 2  # wire types


def varint(number: int) -> bytes:
    """Return a whole number of at least 0, seven bits a byte, the lowest first."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(0x80 | number & 0x7F)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _number(value: int) -> bytes:
    return varint(int(value) & 0xFFFF_FFFF_FFFF_FFFF)  # negative ones have ten bytes, as of 64 bits


def _prefixed(content: bytes) -> bytes:
    return varint(len(content)) + content


# Type → wire type, and the encoding of a value.
_SCALARS: dict[str, tuple[int, Callable[[Any], bytes]]] = {
    **{kind: (_VARINT, _number) for kind in ("uint64", "int64", "int32", "bool", "enum")},
    "string": (_BYTES, lambda text: _prefixed(text.encode())),
}


def message(kind: str, fields: Mapping[str, Any]) -> bytes:
    """Return a message.

    Args:
        kind: its name in `MESSAGES`.
        fields: values by name: numbers, texts, lists of them, dicts for messages.
    """
    return b"".join(_encoded_field(*MESSAGES[kind][name], value) for name, value in fields.items())


def _encoded_field(number: int, kind: str, value: Any) -> bytes:
    repeated, _, each = kind.rpartition(" ")
    values: Iterable[Any] = value if repeated else (value,)
    if each in MESSAGES:
        tag = varint(number << 3 | _BYTES)
        return b"".join(tag + _prefixed(message(each, part)) for part in values)
    wire_type, encode = _SCALARS[each]
    if repeated and wire_type == _VARINT:  # packed, as proto3 has it
        content = b"".join(map(encode, values))
        return varint(number << 3 | _BYTES) + _prefixed(content) if content else b""
    return b"".join(varint(number << 3 | wire_type) + encode(part) for part in values)


def trace_file(metadata: Mapping[str, Any], nodes: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the content of a trace: fields of its `GlobalMetadata` and of its `Node`s."""
    return b"".join(
        [_prefixed(message("GlobalMetadata", metadata)), *(_prefixed(message("Node", node)) for node in nodes)]
    )


_TYPES = {
    "compute": "COMP_NODE",
    "send": "COMM_SEND_NODE",
    "receive": "COMM_RECV_NODE",
    "load": "MEM_LOAD_NODE",
    "store": "MEM_STORE_NODE",
}


def chakra_files(profile: Figures, max_steps: int) -> Iterator[tuple[int, bytes]]:
    """Yield rank and content of the trace of each IPU of each replica.

    Raises:
        ProfileError: as `Figures.single_steps`.
    """
    spans = profile.single_steps(max_steps)
    executable = profile.executable
    microseconds = 1e6 / executable.target.clock_hz
    metadata = {
        "version": VERSION,
        "attr": [
            _text("machine", f"{executable.target.num_ipus} × {executable.target.name}"),
            {"name": "replicas", "int64_val": profile.replicas},
            {"name": "cycles", "int64_val": profile.cycles},
            {"name": "clock_hz", "int64_val": round(executable.target.clock_hz)},
        ],
    }
    for rank in range(profile.replicas * executable.target.num_ipus):
        nodes = list(trace_nodes(executable, spans, rank))
        yield rank, trace_file(metadata, _node_messages(nodes, rank, microseconds))


def _node_messages(nodes: Sequence[TraceNode], rank: int, microseconds: float) -> Iterator[dict[str, Any]]:
    """Yield the fields of each node; those of a step wait for all of the step before."""
    before: list[int] = []
    now: list[int] = []
    for number, node in enumerate(nodes):
        if number and nodes[number - 1].step != node.step:
            before, now = now, []
        now.append(number)
        # Both ends are whole, not the duration, so that nodes do not overlap.
        start, end = (int(time * microseconds) for time in (node.start, node.start + node.cycles))
        yield {
            "id": number,
            "name": node.name,
            "type": NODE_TYPES[_TYPES[node.kind]],
            "data_deps": before,
            "start_time_micros": start,
            "duration_micros": end - start,
            "attr": [*_node_attributes(node, rank)],
        }


def _node_attributes(node: TraceNode, rank: int) -> Iterator[dict[str, Any]]:
    yield {"name": "is_cpu_op", "bool_val": False}
    yield {"name": "start_cycle", "int64_val": node.start}
    yield {"name": "cycles", "int64_val": node.cycles}
    if node.peer == NO_PEER:
        yield {"name": "tensor_size", "uint64_val": node.num_bytes}
        return
    source, destination = (rank, node.peer) if node.kind == "send" else (node.peer, rank)
    yield {"name": "comm_size", "int64_val": node.num_bytes}
    yield {"name": "comm_src", "int32_val": source}
    yield {"name": "comm_dst", "int32_val": destination}
    yield {"name": "comm_tag", "int32_val": node.step}


def _text(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "string_val": value}
