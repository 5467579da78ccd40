"""The programs of a profile: every node of the program tree, taken apart into what the machine does, with numbers.

Input: an `Executable`. Output: `Numbering`: the entries of `programs`, and all compute sets and exchanges by their ids,
which are positions in lists. A step of the tree becomes one or several `Activity`, each a phase on all tiles; what
takes no time, as a stream of what stays on the device, becomes none:

    Execute        DoExchange? OnTileExecute DoExchange?
    Copy           DoExchange? OnTileExecute?, or GlobalExchange OnTileExecute? between IPUs and between replicas
    stream copies, remote buffers, PrintTensor           StreamCopy
    If             SetLocalConsensusFromVar Sync (If | IfElse)
    all else       itself, by its type

Copying on the own tile is a vertex of type `COPY_VERTEX` on each tile that does it: in a compute set of its own where
a `Copy` needs it, and in the compute set itself where operands are rearranged.
Source: Poplar & PopLibs user guide, "Profiling", section "Program structure".
Limits: copy vertices have neither state nor code in the memory model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost, CopyCost, ExchangeCost, StreamCost, SyncCost, WaitCost
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
    is_free,
)
from ipujax.runtime.memory import INSTRUCTION_BYTES, exchange_code_bytes
from ipujax.runtime.sections.ids import Activity, ComputeSetRow, Json, Numbering
from ipujax.runtime.target import Target

COPY_VERTEX = "poplar_rt::StridedCopy"


def numbering(executable: Executable) -> Numbering:
    """Takes the program of an executable apart, and numbers everything in it."""
    walk = _Walk(executable)
    walk.ids.root = walk.one(executable.program)
    return walk.ids


class _Walk:
    """One walk of the tree; owns the ids it hands out."""

    def __init__(self, executable: Executable) -> None:
        self.executable, self.target = executable, executable.target
        self.ids = Numbering()
        self.sets: dict[ComputeSet, tuple[int, int, int]] = {}
        self.functions: dict[Function, int] = {}
        self.wrapped: dict[Program, int] = {}

    def one(self, node: Program) -> int:
        """The id of one entry that stands for a node, a Sequence if it needs several or none."""
        programs = self.program(node)
        if len(programs) == 1:
            return programs[0]
        if node not in self.wrapped:
            self.wrapped[node] = self.ids.add({"type": "Sequence", "children": programs})
        return self.wrapped[node]

    def program(self, node: Program) -> list[int]:
        """The ids of the entries that stand for a node in its parent, which are added when it is first met."""
        if isinstance(node, Leaf):
            if node not in self.ids.activities:
                found = [] if is_free(node) else self.activities(node)
                self.ids.activities[node] = [(self.ids.add(self.entry(activity)), activity) for activity in found]
        elif node not in self.ids.control:
            self.ids.control[node] = self.control(node)
        return self.ids.programs_of(node)

    def control(self, node: Program) -> list[int]:
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
                entry["children"] = [self.one(node.then)]
            case Loop() | Branch():
                entry |= {"count": node.trips} if isinstance(node, Loop) and node.trips is not None else {}
                entry["children"] = [self.one(child) for child in node.children()]
        return programs

    def function(self, function: Function) -> int:
        """The number of a function, whose body is added at its first call."""
        if function not in self.functions:
            number = self.functions[function] = len(self.ids.functions)
            self.ids.functions.append(-1)
            self.ids.functions[number] = self.one(function.body)
        return self.functions[function]

    # --- what a leaf does ---

    def entry(self, activity: Activity) -> Json:
        """An activity as a program."""
        entry: Json = {"type": activity.type}
        for name, fact in activity.facts.items():  # a program calls its exchange by one name, a step by three
            entry["exchange" if name.endswith("Exchange") else name] = fact
        if activity.exchange is not None:
            entry["memoryByInstruction"] = _instruction_bytes(activity.exchange, self.target)
        return entry

    def activities(self, leaf: Leaf) -> list[Activity]:
        cost, name = self.executable.costs[leaf], leaf.label
        match cost:
            case WaitCost():
                return []
            case SyncCost():
                return [Activity("Sync", np.zeros(0, np.int64), None, {"syncType": cost.kind.title()})]
            case StreamCost():
                self.ids.host.append((leaf, cost))
                facts = {"hostExchange": len(self.ids.host) - 1, "name": name}
                moved, cycles = int(cost.tile_bytes.sum()), stream_cycles(cost, self.target)
                return [Activity("StreamCopy", cycles, cost.tile_bytes, facts, moved)]
            case CopyCost():
                return list(self.copy(cost, name))
        return self.compute_set(cost, name)

    def copy(self, cost: CopyCost, name: str) -> Iterator[Activity]:
        if cost.exchange.cycles.any():
            yield self.copy_exchange(cost, name)
        if cost.copy_cycles.any():
            copying, number = f"{name}/OnTileCopy", len(self.ids.compute_sets)
            copies = _copies(cost.copy_cycles)
            row = ComputeSetRow(copying, cost.first_ipu, cost.copy_cycles, cost.copy_cycles, *copies)
            self.ids.compute_sets.append(row)
            yield Activity("OnTileExecute", cost.copy_cycles, None, {"computeSet": number, "name": copying})

    def copy_exchange(self, cost: CopyCost, name: str) -> Activity:
        exchange, target = cost.exchange, self.target
        if cost.link_cycles is None:
            self.ids.exchanges.append((cost.first_ipu, exchange))
            (activity,) = _internal(exchange, len(self.ids.exchanges) - 1, name)
            return activity
        self.ids.external.append((cost.first_ipu, cost))
        facts = {"externalExchange": len(self.ids.external) - 1, "name": name}
        data, moved = exchange.received_bytes + exchange.sent_bytes, int(exchange.received_bytes.sum())
        return Activity("GlobalExchange", external_cycles(cost, target), data, facts, moved)

    def compute_set(self, cost: ComputeSetCost, name: str) -> list[Activity]:
        if cost.compute_set not in self.sets:
            number = len(self.ids.compute_sets)
            self.ids.compute_sets.append(self.row(cost))
            places = []
            for exchange in (cost.before, cost.after):
                places.append(len(self.ids.exchanges) if exchange.cycles.any() else -1)
                if places[-1] >= 0:
                    self.ids.exchanges.append((cost.first_ipu, exchange))
            self.sets[cost.compute_set] = number, places[0], places[1]
        number, before, after = self.sets[cost.compute_set]
        compute = Activity("OnTileExecute", cost.compute_cycles, None, {"computeSet": number, "name": name})
        return [
            *_internal(cost.before, before, f"{name}/ExchangePre"),
            compute,
            *_internal(cost.after, after, f"{name}/ExchangePost"),
        ]

    def row(self, cost: ComputeSetCost) -> ComputeSetRow:
        groups = tuple(self.executable.graph.groups[cost.compute_set])
        vertices, active = Counter[str](), Counter(dict(cost.active_by_codelet))
        for group in groups:
            vertices[group.codelet.name] += group.num_vertices
        copies, copying = _copies(cost.rearrangement_cycles)
        all_active = active_cycles(cost)
        name = cost.compute_set.name
        return ComputeSetRow(
            name, cost.first_ipu, cost.compute_cycles, all_active, {**vertices, **copies}, {**active, **copying}, groups
        )


def active_cycles(cost: ComputeSetCost) -> np.ndarray:
    """Cycles of each tile in which a worker issues an instruction of a vertex or copies, int64[tiles]."""
    return cost.active_cycles + cost.rearrangement_cycles


def external_cycles(cost: CopyCost, target: Target) -> np.ndarray:
    """Cycles each tile takes part in an exchange between IPUs: those of its IPU's links, or its own if more."""
    assert cost.link_cycles is not None
    exchange = cost.exchange
    by_ipu = cost.link_cycles[cost.first_ipu :][: len(exchange.cycles) // target.tiles_per_ipu]
    moves = (exchange.received_bytes + exchange.sent_bytes) > 0
    return np.where(moves, np.maximum(exchange.cycles, np.repeat(by_ipu, target.tiles_per_ipu)), 0)


def stream_cycles(cost: StreamCost, target: Target) -> np.ndarray:
    """Cycles each tile waits for its part of a transfer, from those of its IPU."""
    by_ipu = cost.cycles[cost.first_ipu :][: len(cost.tile_bytes) // target.tiles_per_ipu]
    return np.where(cost.tile_bytes > 0, np.repeat(by_ipu, target.tiles_per_ipu), 0)


def decision_sync(target: Target) -> str:
    """Which sync a decision of data-dependent control takes."""
    return "Internal" if target.num_ipus == 1 else "External"


def _type(node: Program) -> str:
    if isinstance(node, If):
        return "IfElse" if _does_something(node.otherwise) else "If"
    return "Sequence" if isinstance(node, Collective) else type(node).__name__


def _does_something(node: Program) -> bool:
    return not isinstance(node, Block) or bool(node.children())


def _copies(cycles: np.ndarray) -> tuple[dict[str, int], dict[str, int]]:
    """Number and active cycles of the copy vertices, one on each tile that copies."""
    count = int(np.count_nonzero(cycles))
    return ({COPY_VERTEX: count}, {COPY_VERTEX: int(cycles.sum())}) if count else ({}, {})


def _instruction_bytes(exchange: ExchangeCost, target: Target) -> dict[str, int]:
    """Bytes of the instructions of an exchange on all tiles; those that direct what arrives are `other`."""
    total = int(exchange_code_bytes(exchange, target).sum())
    other = INSTRUCTION_BYTES * int(exchange.fragments.sum()) * target.exchange_fragment_cycles
    return {"send": total - other, "other": other, "total": total}


def _internal(exchange: ExchangeCost, number: int, name: str) -> list[Activity]:
    """An internal exchange, if there is one."""
    if number < 0:
        return []
    data, moved = exchange.received_bytes + exchange.sent_bytes, int(exchange.received_bytes.sum())
    return [Activity("DoExchange", exchange.cycles, data, {"exchange": number, "name": name}, moved, exchange)]
