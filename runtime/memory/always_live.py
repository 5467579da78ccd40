"""Memory that every tile uses during the whole program: constants, vertices, code, stacks.

Input: a graph, a program and the costs of its leaves. Output: bytes of each tile by category, under the names of
Poplar's memory profile.

    constant                 constants that the program uses
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
small, so its host exchange code says nothing of large ones, which are assumed to repeat the same code. Fields of
vertices and copy descriptors count as vertex instances; control tables, program ids and edge pointers are not
modelled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from ipujax.runtime.cost import (
    ComputeSetCost,
    CopyCost,
    ExchangeCost,
    IpuCopyCost,
    StreamCost,
    SyncCost,
    WaitCost,
    tile_range,
)
from ipujax.runtime.exchange import receive_code_bytes, receiver_code_bytes, send_code_bytes
from ipujax.runtime.graph import NO_TILE, Execute, Graph, Leaf, Program, VertexGroup, is_free, leaves
from ipujax.runtime.target import Target

STACK_BYTES = 3_168  # derived: 3,852,288 B of stacks / 1,216 tiles of the guide's example
CONTROL_BYTES_PER_STEP = 9  # derived: 467,696 B of control code / 1,216 tiles / 43 compute sets of the guide's example
HOST_HEADER_BYTES = 4  # assumed: one word for each tile of each transfer
HOST_CODE_BYTES = 79  # derived: 211,132 B of host exchange code to 10,720 B of headers, guide's example

EXCHANGE_CODE = ("internalExchangeCode", "globalExchangeCode", "hostExchangeCode")
CODE = ("vertexCode", "controlCode", *EXCHANGE_CODE)
DATA = ("constant", "vertexInstanceState", "hostExchangePacketHeader", "stack")
FIXED = CODE + DATA

Cost = ComputeSetCost | CopyCost | StreamCost | SyncCost | WaitCost
Costs = Mapping[Leaf, Cost]


def fixed_bytes(graph: Graph, program: Program, costs: Costs, constants: np.ndarray) -> dict[str, np.ndarray]:
    """Return the bytes in use during the whole program, by category of `FIXED`, int64[num_tiles] each."""
    sizes = {name: np.zeros(graph.target.num_tiles, np.int64) for name in FIXED}
    sizes["constant"] += constants
    counted: set[object] = set()
    counted_costs: list[Cost] = []
    code: dict[str, tuple[int, np.ndarray]] = {}
    for leaf in leaves(program):
        key = leaf.compute_set if isinstance(leaf, Execute) else leaf  # code of a compute set exists once
        if key in counted or is_free(leaf):
            continue
        counted.add(key)
        for group in graph.groups[leaf.compute_set] if isinstance(leaf, Execute) else ():
            _add_vertices(sizes["vertexInstanceState"], code, group)
        sizes["controlCode"][_participating_tiles(costs[leaf], graph.target)] += CONTROL_BYTES_PER_STEP
        counted_costs.append(costs[leaf])
    _add_exchange_code(sizes, counted_costs, graph.target)
    for code_bytes, has_code in code.values():
        sizes["vertexCode"] += code_bytes * has_code
    sizes["stack"] += STACK_BYTES
    return sizes


def _add_vertices(state: np.ndarray, code: dict[str, tuple[int, np.ndarray]], group: VertexGroup) -> None:
    """Add the instances of a group to `state`; record its code size, and the tiles with its code, in `code`."""
    first, stop = tile_range(group.tile)
    tiles = group.tile[group.tile != NO_TILE]
    state[first:stop] += np.bincount(tiles - first, minlength=stop - first) * group.codelet.state_bytes
    # Codelets of one name that differ in size, as by dtype, are one piece of code: the largest.
    code_bytes, has_code = code.get(group.codelet.name, (0, np.zeros(len(state), bool)))
    has_code[tiles] = True
    code[group.codelet.name] = max(code_bytes, group.codelet.code_bytes), has_code


def _participating_tiles(cost: Cost, target: Target) -> slice:
    """Return the tiles of the IPUs of a leaf, all of which are assumed to have its code; all for a sync or a wait."""
    if isinstance(cost, SyncCost | WaitCost):
        return slice(None)
    first = cost.first_ipu * target.tiles_per_ipu
    if isinstance(cost, CopyCost):
        return slice(first, first + len(cost.ipus) * target.tiles_per_ipu)
    values = cost.tile_bytes if isinstance(cost, StreamCost) else cost.compute_cycles
    return slice(first, first + len(values))


def _add_exchange_code(sizes: dict[str, np.ndarray], costs: Iterable[Cost], target: Target) -> None:
    """Add the instructions of the exchanges of leaves to `sizes`, by category."""
    copies = Counter[tuple[str, int, IpuCopyCost]]()  # many copies of a pipeline are equal on an IPU
    for cost in costs:
        match cost:
            case CopyCost():
                name = "globalExchangeCode" if cost.is_global else "internalExchangeCode"
                copies.update((name, ipu, each) for ipu, each in enumerate(cost.ipus, cost.first_ipu))
            case ComputeSetCost():
                for exchange in (cost.before, cost.after):
                    _add(sizes["internalExchangeCode"], cost.first_ipu, exchange_code_bytes(exchange, target), target)
            case StreamCost() if cost.cycles.any():  # of a resident stream nothing is moved
                takes_part = cost.tile_bytes > 0
                _add(sizes["hostExchangeCode"], cost.first_ipu, HOST_CODE_BYTES * takes_part, target)
                _add(sizes["hostExchangePacketHeader"], cost.first_ipu, HOST_HEADER_BYTES * takes_part, target)
    for (name, ipu, each), count in copies.items():
        _add(sizes[name], ipu, count * exchange_code_bytes(each.exchange, target), target)


def _add(sizes: np.ndarray, first_ipu: int, tile_bytes: np.ndarray, target: Target) -> None:
    """Add bytes of tiles from the first of an IPU on."""
    first = first_ipu * target.tiles_per_ipu
    sizes[first : first + len(tile_bytes)] += tile_bytes


def code_of_exchanges(costs: Iterable[Cost], target: Target) -> np.ndarray:
    """Return the bytes of exchange code of some leaves on each tile, int64[num_tiles]."""
    names = ("internalExchangeCode", "globalExchangeCode", "hostExchangeCode", "hostExchangePacketHeader")
    sizes = {name: np.zeros(target.num_tiles, np.int64) for name in names}
    _add_exchange_code(sizes, costs, target)
    return np.asarray(sum(sizes[name] for name in EXCHANGE_CODE), np.int64)


def received_at_once(cost: Cost) -> int:
    """Return the bytes that a tile receives, at most, in one exchange between tiles of a leaf."""
    if isinstance(cost, ComputeSetCost):
        return int(max(cost.before.received_bytes.max(), cost.after.received_bytes.max()))
    copied = cost.ipus if isinstance(cost, CopyCost) else ()
    return max((int(ipu.exchange.received_bytes.max()) for ipu in copied), default=0)


def exchange_code_bytes(exchange: ExchangeCost, target: Target) -> np.ndarray:
    """Return the bytes of the send and receive instructions of an exchange, int64[tiles of the exchange]."""
    parts = receive_code_bytes(exchange.receives, target) + send_code_bytes(exchange.sends, exchange.sent_bytes)
    return parts + receiver_code_bytes(exchange.receives)
