"""Programs of a profile: every node of the program tree, divided into phases of all tiles, with ids.

Input: an `Executable`. Output: `Numbering`: the entries of `programs`, and all compute sets and exchanges by their ids,
which are positions in lists. A step of the tree becomes one or several `Activity`, each a phase on all tiles; a step
that takes no time, as a stream of data that stay on the device, becomes none:

    Execute        DoExchange? OnTileExecute DoExchange?
    Copy           DoExchange? OnTileExecute?, or GlobalExchange OnTileExecute? between IPUs and between replicas
    stream copies, remote buffers, PrintTensor           StreamCopy
    If             SetLocalConsensusFromVar Sync (If | IfElse)
    all else       itself, by its type

A copy within a tile is a vertex of type `COPY_VERTEX`: in an additional compute set for a `Copy`, and in the compute
set itself where operands are rearranged.
Source: Poplar & PopLibs user guide, "Profiling", section "Program structure".
Limits: copy vertices have neither state nor code in the memory model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost, CopyCost, ExchangeCost, StreamCost, SyncCost, WaitCost
from ipujax.runtime.exchange import send_code_bytes
from ipujax.runtime.graph import (
    Block,
    Branch,
    Call,
    Collective,
    ComputeSet,
    Function,
    If,
    Leaf,
    Loop,
    Program,
    WholeOperation,
    is_free,
)
from ipujax.runtime.memory import exchange_code_bytes
from ipujax.runtime.sections.ids import Activity, ComputeSetRow, Json, Numbering
from ipujax.runtime.target import Target

COPY_VERTEX = "poplar_rt::StridedCopy"


def numbering(executable: Executable) -> Numbering:
    """Number the programs, compute sets and exchanges of an executable."""
    walk = _Walk(executable)
    walk.ids.root = walk.single_program(executable.program)
    return walk.ids


class _Walk:
    """Walk of the program tree that assigns ids."""

    def __init__(self, executable: Executable) -> None:
        self.executable = executable
        self.target = executable.target
        self.ids = Numbering()
        self.sets: dict[ComputeSet, tuple[int, int, int]] = {}  # ids of it, and of its exchanges; −1 without one
        self.functions: dict[Function, int] = {}
        self.sequences: dict[Program, int] = {}

    def single_program(self, node: Program) -> int:
        """Return the id of a node's program, of a Sequence if it has several or none."""
        programs = self.program(node)
        if len(programs) == 1:
            return programs[0]
        if node not in self.sequences:
            self.sequences[node] = self.ids.add({"type": "Sequence", "children": programs})
        return self.sequences[node]

    def program(self, node: Program) -> list[int]:
        """Return the ids of a node's programs, which are added at the first visit: a tree may share nodes."""
        if isinstance(node, Leaf):
            if node not in self.ids.activities:
                activities = [] if is_free(node) else self.activities(node)
                self.ids.activities[node] = [(self.ids.add(self.entry(activity)), activity) for activity in activities]
        elif node not in self.ids.control:
            self.ids.control[node] = self.control(node)
        return self.ids.programs_of(node)

    def control(self, node: Program) -> list[int]:
        """Add a node of control flow and the programs inside; return its number, behind those of its consensus."""
        before = []
        if isinstance(node, If):
            sync = {"type": "Sync", "syncType": decision_sync(self.target)}
            before = [self.ids.add({"type": "SetLocalConsensusFromVar"}), self.ids.add(sync)]
        entry: Json = {"type": _type(node)}
        programs = [*before, self.ids.add(entry)]
        match node:
            case Call(function):
                entry |= {"target": self.function(function), "name": function.name}
            case Block():
                entry |= {"name": node.name} if isinstance(node, Collective) else {}
                entry["children"] = [program for child in node.children() for program in self.program(child)]
            case If() if entry["type"] == "If":
                entry["children"] = [self.single_program(node.then)]
            case Loop() | Branch():
                entry |= {"count": node.trips} if isinstance(node, Loop) and node.trips is not None else {}
                entry["children"] = [self.single_program(child) for child in node.children()]
        return programs

    def function(self, function: Function) -> int:
        """Return the number of a function, whose body is added at its first call."""
        if function not in self.functions:
            number = self.functions[function] = len(self.ids.functions)
            self.ids.functions.append(-1)  # reserved: functions that the body calls come after it
            self.ids.functions[number] = self.single_program(function.body)
        return self.functions[function]

    # --- activities of a leaf ---

    def entry(self, activity: Activity) -> Json:
        """Return the program of an activity."""
        entry: Json = {"type": activity.type}
        for name, value in activity.fields.items():  # a program has one name for its exchange, a step has three
            entry["exchange" if name.endswith("Exchange") else name] = value
        if activity.exchange is not None:
            entry["memoryByInstruction"] = _instruction_bytes(activity.exchange, self.target)
        return entry

    def activities(self, leaf: Leaf) -> list[Activity]:
        """Return the exchanges, copies and computation of a step, in order."""
        cost = self.executable.costs[leaf]
        name = leaf.label
        match cost:
            case WaitCost():
                return []
            case SyncCost():
                return [Activity("Sync", np.zeros(0, np.int64), None, {"syncType": cost.kind.title()})]
            case StreamCost():
                self.ids.host.append((leaf, cost))
                fields = {"hostExchange": len(self.ids.host) - 1, "name": name}
                cycles = stream_cycles(cost, self.target)
                return [Activity("StreamCopy", cycles, cost.tile_bytes, fields, int(cost.tile_bytes.sum()))]
            case CopyCost():
                return list(self.copy(cost, name))
        return self.compute_set(cost, name)

    def copy(self, cost: CopyCost, name: str) -> Iterator[Activity]:
        """Yield the exchange of a copy and its copies on tiles, which are a compute set of their own."""
        if cost.exchange.cycles.any():
            yield self.copy_exchange(cost, name)
        if cost.copy_cycles.any():
            number = len(self.ids.compute_sets)
            copy_name = f"{name}/OnTileCopy"
            copies = _copy_vertices(cost.copy_cycles)
            row = ComputeSetRow(copy_name, cost.first_ipu, cost.copy_cycles, cost.copy_cycles, *copies)
            self.ids.compute_sets.append(row)
            yield Activity("OnTileExecute", cost.copy_cycles, None, {"computeSet": number, "name": copy_name})

    def copy_exchange(self, cost: CopyCost, name: str) -> Activity:
        """Return the exchange of a copy: an internal one, or an external one where it crosses links between IPUs."""
        exchange = cost.exchange
        if cost.link_cycles is None:  # within an IPU
            self.ids.exchanges.append((cost.first_ipu, exchange))
            (activity,) = _internal_exchange(exchange, len(self.ids.exchanges) - 1, name)
            return activity
        self.ids.external.append((cost.first_ipu, cost))
        fields = {"externalExchange": len(self.ids.external) - 1, "name": name}
        data = exchange.received_bytes + exchange.sent_bytes
        moved_bytes = int(exchange.received_bytes.sum())
        return Activity("GlobalExchange", external_cycles(cost, self.target), data, fields, moved_bytes)

    def compute_set(self, cost: ComputeSetCost, name: str) -> list[Activity]:
        """Return the exchange of operands, the computation and the exchange of results of a compute set."""
        if cost.compute_set not in self.sets:
            number = len(self.ids.compute_sets)
            self.ids.compute_sets.append(self.row(cost))
            exchange_ids = []
            for exchange in (cost.before, cost.after):
                exchange_ids.append(len(self.ids.exchanges) if exchange.cycles.any() else -1)
                if exchange_ids[-1] >= 0:
                    self.ids.exchanges.append((cost.first_ipu, exchange))
            self.sets[cost.compute_set] = number, exchange_ids[0], exchange_ids[1]
        number, before, after = self.sets[cost.compute_set]
        compute = Activity("OnTileExecute", cost.compute_cycles, None, {"computeSet": number, "name": name})
        return [
            *_internal_exchange(cost.before, before, f"{name}/ExchangePre"),
            compute,
            *_internal_exchange(cost.after, after, f"{name}/ExchangePost"),
        ]

    def row(self, cost: ComputeSetCost) -> ComputeSetRow:
        """Return the vertices of a compute set and its copies on tiles, counted by type, with their cycles."""
        groups = tuple(self.executable.graph.groups[cost.compute_set])
        vertices = Counter[str]()
        for group in groups:
            vertices[group.codelet.name] += group.num_vertices
        copies, copy_cycles = _copy_vertices(cost.rearrangement_cycles)
        return ComputeSetRow(
            cost.compute_set.name,
            cost.first_ipu,
            cost.compute_cycles,
            active_cycles(cost),
            {**vertices, **copies},
            {**dict(cost.active_by_codelet), **copy_cycles},
            groups,
        )


def active_cycles(cost: ComputeSetCost) -> np.ndarray:
    """Return the cycles of each tile in which a worker issues an instruction of a vertex or copies, int64[tiles]."""
    return cost.active_cycles + cost.rearrangement_cycles


def external_cycles(cost: CopyCost, target: Target) -> np.ndarray:
    """Return the cycles that each tile takes part in an exchange between IPUs, int64[tiles]."""
    assert cost.link_cycles is not None
    exchange = cost.exchange
    by_ipu = cost.link_cycles[cost.first_ipu :][: len(exchange.cycles) // target.tiles_per_ipu]
    takes_part = (exchange.received_bytes + exchange.sent_bytes) > 0
    # A tile waits for the links of its IPU, unless its part of the exchange takes longer.
    return np.where(takes_part, np.maximum(exchange.cycles, np.repeat(by_ipu, target.tiles_per_ipu)), 0)


def stream_cycles(cost: StreamCost, target: Target) -> np.ndarray:
    """Return the cycles that each tile with data waits for a transfer, those of its IPU, int64[tiles]."""
    by_ipu = cost.cycles[cost.first_ipu :][: len(cost.tile_bytes) // target.tiles_per_ipu]
    return np.where(cost.tile_bytes > 0, np.repeat(by_ipu, target.tiles_per_ipu), 0)


def decision_sync(target: Target) -> str:
    """Return the type of the sync before a decision of data-dependent control."""
    return "Internal" if target.num_ipus == 1 else "External"


def _type(node: Program) -> str:
    if isinstance(node, If):
        return "IfElse" if _has_steps(node.otherwise) else "If"
    return "Sequence" if isinstance(node, WholeOperation) else type(node).__name__  # Poplar has no such programs


def _has_steps(node: Program) -> bool:
    return not isinstance(node, Block) or bool(node.children())


def _copy_vertices(cycles: np.ndarray) -> tuple[dict[str, int], dict[str, int]]:
    """Return number and active cycles of the copy vertices, one on each tile that copies."""
    count = int(np.count_nonzero(cycles))
    return ({COPY_VERTEX: count}, {COPY_VERTEX: int(cycles.sum())}) if count else ({}, {})


def _instruction_bytes(exchange: ExchangeCost, target: Target) -> dict[str, int]:
    """Return the bytes of an exchange's instructions on all tiles; those that direct arriving data are `other`."""
    send = int(send_code_bytes(exchange.sends, exchange.sent_bytes).sum())
    total = int(exchange_code_bytes(exchange, target).sum())
    return {"send": send, "other": total - send, "total": total}


def _internal_exchange(exchange: ExchangeCost, number: int, name: str) -> list[Activity]:
    if number < 0:  # the compute set needs none
        return []
    data = exchange.received_bytes + exchange.sent_bytes
    moved_bytes = int(exchange.received_bytes.sum())
    return [Activity("DoExchange", exchange.cycles, data, {"exchange": number, "name": name}, moved_bytes, exchange)]
