"""Execution traces of Chakra: one file for each IPU, of compute and communication nodes with their dependencies.

Input: `Figures` with a compiled program. Output: the content of a file for each rank, which Chakra and simulators such
as ASTRA-sim read. Rank r·n + i is IPU i of n of replica r. `chakra_nodes` has the nodes, `chakra_messages` the format.

Attributes are those that Chakra's feeder knows: `is_cpu_op`, `tensor_size` (bytes of a transfer, or that arrive on the
tiles in a compute node's exchanges), `comm_size`, `comm_src`, `comm_dst`, `comm_tag`. Times of nodes are whole
microseconds in the format; `start_cycle` and `cycles` have them exactly.
Source: mlcommons/chakra, `schema/protobuf/et_def.proto` and `src/feeder/et_feeder_node.cpp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ipujax.runtime.profile import Figures
from ipujax.runtime.report.chakra_messages import NODE_TYPES, VERSION, trace_file
from ipujax.runtime.report.chakra_nodes import NO_PEER, TraceNode, trace_nodes

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
