"""What every tile holds during the whole program: constants, vertices, code, stacks.

Input: a graph, a program and what its leaves cost. Output: bytes of each tile by category, under the names of Poplar's
memory profile.

    constant                 constants the program uses
    vertexInstanceState      one instance a vertex, with its fields
    vertexCode               once for each codelet and tile that has a vertex of it
    controlCode              running each step of the program in which the IPU takes part
    internalExchangeCode     sending and receiving inside an IPU, each exchange of the program once
    globalExchangeCode       the same between IPUs
    hostExchangeCode         the same with the host, each transfer once; hostExchangePacketHeader its packet headers
    stack                    of the supervisor and the workers

Code can be fetched from the memory below the interleaved region only.
Source: names: Poplar & PopLibs user guide, "Memory by category". The constants derived from "the guide's example" are
from "Profile summary output": an Mk1 training program, 1,216 tiles, 43 compute sets, 5,564 vertices.
Limits: code sizes are means of that example or assumed, and not those of a compiler; the transfers of that example are
small, so its host exchange code says nothing of large ones, which are taken to repeat the same code. Fields of vertices
and copy descriptors are not told apart from vertex instances; control tables, program ids and edge pointers are not
modelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ipujax.runtime.cost import ComputeSetCost, CopyCost, ExchangeCost, StreamCost, SyncCost, WaitCost, tile_range
from ipujax.runtime.graph import NO_TILE, Execute, Graph, Leaf, Program, VertexGroup, is_free, leaves
from ipujax.runtime.target import Target

STACK_BYTES = 3_168  # derived: 3,852,288 B of stacks / 1,216 tiles of the guide's example
CONTROL_BYTES_PER_STEP = 9  # derived: 467,696 B of control code / 1,216 tiles / 43 compute sets of the guide's example
INSTRUCTION_BYTES = 4  # reference A2: one control slot is one instruction
SEND_WORDS = 4_148  # most 4-byte words of one send instruction, reference machine.md §1.4
HOST_HEADER_BYTES = 4  # assumed: one word for each tile of each transfer
HOST_CODE_BYTES = 79  # derived: 211,132 B of host exchange code to 10,720 B of headers, guide's example

EXCHANGE_CODE = ("internalExchangeCode", "globalExchangeCode", "hostExchangeCode")
CODE = ("vertexCode", "controlCode", *EXCHANGE_CODE)
DATA = ("constant", "vertexInstanceState", "hostExchangePacketHeader", "stack")
FIXED = CODE + DATA

Cost = ComputeSetCost | CopyCost | StreamCost | SyncCost | WaitCost
Costs = Mapping[Leaf, Cost]


def fixed_bytes(graph: Graph, program: Program, costs: Costs, constants: np.ndarray) -> dict[str, np.ndarray]:
    """What every tile holds during the whole program.

    Args:
        graph: vertices and mappings.
        program: the control tree.
        costs: the cost of each leaf.
        constants: bytes of constants on each tile, int64[num_tiles].

    Returns:
        Bytes by category of `FIXED`, int64[num_tiles] each.
    """
    layers = {name: np.zeros(graph.target.num_tiles, np.int64) for name in FIXED}
    layers["constant"] += constants
    seen: set[object] = set()
    code: dict[str, tuple[int, np.ndarray]] = {}
    for leaf in leaves(program):
        key = leaf.compute_set if isinstance(leaf, Execute) else leaf
        if key in seen or is_free(leaf):
            continue
        seen.add(key)
        for group in graph.groups[leaf.compute_set] if isinstance(leaf, Execute) else ():
            _add_vertices(layers["vertexInstanceState"], code, group)
        layers["controlCode"][_where_it_runs(costs[leaf], graph.target)] += CONTROL_BYTES_PER_STEP
        _add_exchange_code(layers, costs[leaf], graph.target)
    for size, where in code.values():
        layers["vertexCode"] += size * where
    layers["stack"] += STACK_BYTES
    return layers


def _add_vertices(state: np.ndarray, code: dict[str, tuple[int, np.ndarray]], group: VertexGroup) -> None:
    """Adds the instances of a group to `state`, and notes which tiles need its code."""
    (first, stop), there = tile_range(group.tile), group.tile[group.tile != NO_TILE]
    state[first:stop] += np.bincount(there - first, minlength=stop - first) * group.codelet.state_bytes
    size, where = code.get(group.codelet.name, (0, np.zeros(len(state), bool)))
    where[there] = True
    code[group.codelet.name] = max(size, group.codelet.code_bytes), where


def _where_it_runs(cost: Cost, target: Target) -> slice:
    """The tiles of the IPUs that a leaf keeps busy (assumed to have code of it); a plain sync, or a wait, does all."""
    if isinstance(cost, SyncCost | WaitCost):
        return slice(None)
    if isinstance(cost, StreamCost):
        values = cost.tile_bytes
    else:
        values = cost.copy_cycles if isinstance(cost, CopyCost) else cost.compute_cycles
    first = cost.first_ipu * target.tiles_per_ipu
    return slice(first, first + len(values))


def _add_exchange_code(layers: dict[str, np.ndarray], cost: Cost, target: Target) -> None:
    """Adds the instructions of the exchanges of one leaf."""
    if isinstance(cost, SyncCost | WaitCost):
        return
    first = cost.first_ipu * target.tiles_per_ipu
    if isinstance(cost, StreamCost):
        if cost.cycles.any():
            window, takes_part = slice(first, first + len(cost.tile_bytes)), cost.tile_bytes > 0
            layers["hostExchangeCode"][window] += HOST_CODE_BYTES * takes_part
            layers["hostExchangePacketHeader"][window] += HOST_HEADER_BYTES * takes_part
        return
    is_global = isinstance(cost, CopyCost) and cost.is_global
    name = "globalExchangeCode" if is_global else "internalExchangeCode"
    for exchange in (cost.exchange,) if isinstance(cost, CopyCost) else (cost.before, cost.after):
        layers[name][first : first + len(exchange.cycles)] += exchange_code_bytes(exchange, target)


def code_of_exchanges(costs: Iterable[Cost], target: Target) -> np.ndarray:
    """Bytes of exchange code on each tile for the exchanges of some leaves, int64[num_tiles]."""
    names = ("internalExchangeCode", "globalExchangeCode", "hostExchangeCode", "hostExchangePacketHeader")
    layers = {name: np.zeros(target.num_tiles, np.int64) for name in names}
    for cost in costs:
        _add_exchange_code(layers, cost, target)
    return np.asarray(sum(layers[name] for name in EXCHANGE_CODE), np.int64)


def exchange_code_bytes(exchange: ExchangeCost, target: Target) -> np.ndarray:
    """Bytes of the instructions that send and receive in an exchange, on each tile of it."""
    sends = -(-exchange.sent_bytes // (SEND_WORDS * 4))
    return INSTRUCTION_BYTES * (exchange.fragments * target.exchange_fragment_cycles + sends)
