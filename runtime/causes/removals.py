"""Removals: the work of a program's steps without some causes of cycles.

Input: an executable. Output: for any set of causes the work of all steps without them, int64[steps, num_ipus, 5]. A
step keeps its place and its syncs in the program: a transfer without cycles is one over an endless link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ipujax.runtime.causes.compute_set_parts import (
    CyclesOfTiles,
    cycles_of_small_vertices,
    is_of_scalars,
    with_combinations,
)
from ipujax.runtime.causes.variants import latency_of, whole_work
from ipujax.runtime.compile import Executable, graph_on
from ipujax.runtime.cost import ComputeSetCost, CopyCost, StreamCost, compute_set_cost, copy_cost
from ipujax.runtime.graph import (
    Call,
    Collective,
    ComputeSet,
    Copy,
    CrossReplicaCopy,
    Execute,
    Graph,
    HostStream,
    Leaf,
    PaddedRows,
    Program,
    RemoteIn,
    RemoteOut,
    StreamIn,
    StreamOut,
    VertexGroup,
    distinct,
    joining_streams,
    leaves,
)
from ipujax.runtime.tensor import Origin, Tensor, compose, dtype_name, is_key_dtype, pad_tiles
from ipujax.runtime.tensor.roles import OPTIMISER_STATE, STATE, WEIGHTS
from ipujax.runtime.timeline.clocks import COMPUTE, EXCHANGE, GLOBAL_EXCHANGE, HOST_EXCHANGE, SYNC

RETURNED = "state that is not donated"
HOST = "other transfers of the host"
STREAMING = "streaming memory"
FALLBACKS = "operations without a parallel rule"
SINGLE_TILES = "steps on a single tile"
EMULATION = "emulated dtypes"
SLOW_PATHS = "slow paths of odd rows"
COLLECTIVES = "collectives"
UNEQUAL_IPUS = "unequal work of IPUs"
WAITS = "IPUs that wait"
BETWEEN_IPUS = "exchange between IPUs"
BETWEEN_TILES = "exchange between tiles"
OF_PRODUCTS = "exchange of products"
OF_LOOKUPS = "exchange of look-ups"
REARRANGEMENT = "rearrangement on tiles"
SYNCS = "sync and start of supersteps"
UNEQUAL_TILES = "unequal work of tiles"
# What a user may remove most easily first: of equal cycles it is removed first.
CAUSES = (
    *(RETURNED, HOST, STREAMING, FALLBACKS, SINGLE_TILES, EMULATION, SLOW_PATHS, COLLECTIVES, UNEQUAL_IPUS, WAITS),
    *(BETWEEN_IPUS, BETWEEN_TILES, OF_PRODUCTS, OF_LOOKUPS, REARRANGEMENT, SYNCS, UNEQUAL_TILES),
)
MOVES = frozenset(
    (BETWEEN_IPUS, BETWEEN_TILES, OF_PRODUCTS, OF_LOOKUPS, REARRANGEMENT)
)  # of data between operations on the device

_OF_COMPUTE = (SINGLE_TILES, EMULATION, SLOW_PATHS, REARRANGEMENT, SYNCS, UNEQUAL_TILES)
_WIDE_DTYPES = frozenset(("float64", "int64", "uint64", "complex128"))
_KEPT = frozenset((WEIGHTS, OPTIMISER_STATE, STATE))  # roles of arguments that a later call takes as they return
Flags = np.ndarray  # of steps, bool[steps]


@dataclass(frozen=True)
class Removals:
    """The work of an executable's steps without causes.

    Args:
        executable: the compiled program.
    """

    executable: Executable

    @cached_property
    def nodes(self) -> tuple[Program, ...]:
        """The leaves and decisions of the program."""
        return tuple(self.executable.steps)

    @cached_property
    def whole(self) -> np.ndarray:
        """Work of all steps with all causes, see `whole_work`."""
        return self.executable.once(whole_work)

    def without(self, removed: Iterable[str]) -> np.ndarray:
        """Return the work of all steps without some causes, int64[steps, num_ipus, 5]; those of IPUs are no work."""
        causes = frozenset(removed)
        work = self.whole.copy()
        work[..., COMPUTE] = self._compute_cycles(*(cause in causes for cause in _OF_COMPUTE))
        if RETURNED in causes:
            work[..., HOST_EXCHANGE] = self._host_cycles_of_donated
        if SINGLE_TILES in causes:  # what remains is computing, on all tiles alike
            work[self._steps_of[SINGLE_TILES], :, EXCHANGE:] = 0
            work[self._of_scalars] = 0
        for cause in (HOST, STREAMING, FALLBACKS, COLLECTIVES):
            if cause in causes:
                work[self._steps_of[cause]] = 0
        if BETWEEN_IPUS in causes:
            work[~self._steps_of[COLLECTIVES], :, GLOBAL_EXCHANGE] = 0
        is_of_products, is_of_lookups = self._steps_of[OF_PRODUCTS], self._steps_of[OF_LOOKUPS]
        for cause, steps in (
            (BETWEEN_TILES, ~is_of_products & ~is_of_lookups),
            (OF_PRODUCTS, is_of_products),
            (OF_LOOKUPS, is_of_lookups & ~is_of_products),
        ):
            if cause in causes:
                work[steps, :, EXCHANGE] = 0
        if EMULATION in causes:
            wide = work[self._wide]
            work[self._wide] = wide - (wide - self._fixed[self._wide]).clip(0) // 2  # half of the bytes
        if SYNCS in causes:
            free_of_cause = ~self._of_other_causes
            work[free_of_cause, :, SYNC] = 0
            work[free_of_cause, :, EXCHANGE] = np.maximum(work[..., EXCHANGE] - self._exchange_starts, 0)[free_of_cause]
        return work

    @cached_property
    def tasks(self) -> Flags:
        """The steps of the tasks of pipelines: work that another cut into stages would distribute otherwise."""
        calls = (node for node in distinct(self.executable.program) if isinstance(node, Call) and node.task is not None)
        steps = {step for call in calls for step in distinct(call)}
        return np.array([node in steps for node in self.nodes], bool)

    @cached_property
    def _steps_of(self) -> Mapping[str, Flags]:
        """The steps that are of a cause as a whole."""
        executable = self.executable
        fallbacks = executable.graph.notes.fallbacks
        collective = set(_leaves_of_collectives(executable.program))
        multiplying = with_combinations(executable.graph, lambda codelet: codelet.is_product)
        looking_up = with_combinations(executable.graph, lambda codelet: codelet.is_lookup)

        def is_host_transfer(node: Program) -> bool:
            if isinstance(node, StreamIn | StreamOut):
                return node.stream not in self._returned
            return isinstance(node, RemoteIn | RemoteOut) and node.buffer.on_host

        def is_on_one_tile(node: Program) -> bool:
            """Return whether a step has no place on one tile, or is of scalars: few elements have small supersteps."""
            cost = executable.costs[node] if isinstance(node, Execute) else None
            if not isinstance(cost, ComputeSetCost) or cost.compute_set in fallbacks:
                return False
            if np.count_nonzero(cost.vertices) != 1:
                return False
            _, least_cycles = self._cycles_of_small(cost)
            groups = executable.graph.groups[cost.compute_set]
            return cost.compute_cycles.max() >= 2 * least_cycles.max() or all(map(is_of_scalars, groups))

        tests: dict[str, Callable[[Program], bool]] = {
            HOST: is_host_transfer,
            STREAMING: lambda node: isinstance(node, RemoteIn | RemoteOut) and not node.buffer.on_host,
            FALLBACKS: lambda node: isinstance(node, Execute) and node.compute_set in fallbacks,
            SINGLE_TILES: is_on_one_tile,
            COLLECTIVES: lambda node: node in collective,
            OF_PRODUCTS: lambda node: isinstance(node, Execute) and node.compute_set in multiplying,
            OF_LOOKUPS: lambda node: isinstance(node, Execute) and node.compute_set in looking_up,
        }
        return {cause: np.array([test(node) for node in self.nodes], bool) for cause, test in tests.items()}

    @cached_property
    def _wide(self) -> Flags:
        """The steps whose results are all of numbers of 64 bits, in the place of which a program has those of 32."""
        wide_dtypes = _WIDE_DTYPES - self.executable.target.native_dtypes

        def is_wide(node: Program) -> bool:
            dtypes = {dtype_name(tensor.dtype) for tensor in _results_of(node, self.executable.graph)}
            return bool(dtypes) and dtypes <= wide_dtypes

        return np.array([is_wide(node) for node in self.nodes], bool)

    @cached_property
    def _fixed(self) -> np.ndarray:
        """Work of all steps that is for no bytes: latency, syncs, starts; int64[steps, num_ipus, 5]."""
        executable = self.executable
        fixed = np.zeros_like(self.whole)
        fixed[..., HOST_EXCHANGE] = self.host_latency
        fixed[..., EXCHANGE] = self._exchange_starts
        fixed[..., SYNC] = self.whole[..., SYNC]
        for row, node in zip(fixed, self.nodes, strict=True):
            cost = executable.costs[node] if isinstance(node, Leaf) else None
            if isinstance(cost, ComputeSetCost | CopyCost):
                tiles = self._cycles_of_tiles(cost, is_in_place=False)
                row[:, COMPUTE] = pad_tiles(tiles.most - tiles.most_started, cost.first_ipu, executable.target.num_ipus)
        return fixed

    @cached_property
    def _of_scalars(self) -> Flags:
        """The steps on a single tile that compute single elements alone: they vanish as a whole."""
        groups = self.executable.graph.groups

        def is_of_scalars_alone(node: Program) -> bool:
            return isinstance(node, Execute) and all(map(is_of_scalars, groups[node.compute_set]))

        return self._steps_of[SINGLE_TILES] & np.array(list(map(is_of_scalars_alone, self.nodes)), bool)

    @cached_property
    def _of_other_causes(self) -> Flags:
        """The steps that are of a cause as a whole, and so not of those that other steps share."""
        return np.logical_or.reduce([self._steps_of[cause] for cause in (FALLBACKS, SINGLE_TILES, COLLECTIVES)])

    @cached_property
    def host_latency(self) -> np.ndarray:
        """Cycles of each step for the latency of a host exchange, int64[steps, num_ipus]."""
        return np.stack([latency_of(self.executable, node) for node in self.nodes])

    @cached_property
    def _returned(self) -> frozenset[HostStream]:
        """Streams of state that comes in and goes out with one shape and dtype: donated, it would stay.

        As `jax.jit` pairs donated arguments with results: each result is for one argument.
        """
        graph = self.executable.graph
        moving = [leaf for leaf in self.nodes if isinstance(leaf, StreamIn | StreamOut) and not leaf.stream.resident]
        # A batch may have the shape of a result too, and is another in each call.
        incoming = _by_type(
            leaf.stream for leaf in moving if isinstance(leaf, StreamIn) and graph.role_of(leaf.destination) in _KEPT
        )
        outgoing = _by_type(leaf.stream for leaf in moving if isinstance(leaf, StreamOut))
        pairs = [zip(streams, outgoing.get(kind, []), strict=False) for kind, streams in incoming.items()]
        return frozenset(stream for of_kind in pairs for pair in of_kind for stream in pair)

    @cached_property
    def _host_cycles_of_donated(self) -> np.ndarray:
        """Cycles of host exchange where returned arrays are donated, int64[steps, num_ipus]."""
        executable = self.executable
        cycles = self.whole[..., HOST_EXCHANGE].copy()
        number = {node: n for n, node in enumerate(self.nodes)}
        counts = {leaf: cost.counts for leaf, cost in executable.costs.items() if isinstance(cost, StreamCost)}
        joining = joining_streams(executable.program)
        for leaf in counts:  # in program order: the first transfer of a host exchange has its latency
            stays = isinstance(leaf, StreamIn | StreamOut) and leaf.stream in self._returned
            before = counts.get(joining[leaf]) if leaf in joining else None
            earlier = np.zeros(executable.target.num_ipus, bool) if before is None else before.moves
            counts[leaf] = replace(counts[leaf], earlier=earlier, is_resident=counts[leaf].is_resident or stays)
            cycles[number[leaf]] = counts[leaf].cycles(executable.target)[:, 0]
        return cycles

    def _compute_cycles(
        self, is_spread: bool, is_native: bool, is_fast: bool, is_in_place: bool, is_started: bool, is_equal: bool
    ) -> np.ndarray:
        """Return compute cycles, int64[steps, num_ipus].

        Args:
            is_spread: whether single elements that are computed beside others are left out, and vertices on a single
                tile are on all tiles alike.
            is_native: whether all dtypes are computed natively.
            is_fast: whether no row takes a slow path.
            is_in_place: whether nothing is copied on its own tile.
            is_started: whether the vertices of each tile start in no time.
            is_equal: whether all tiles of an IPU work alike, each with its least cycles and the mean of all others.
        """
        flags = is_spread, is_native, is_fast, is_in_place, is_started, is_equal
        if not any(flags):
            return self.whole[..., COMPUTE]
        if flags in self._compute:
            return self._compute[flags]
        costs = self._costs_of(is_spread, is_native, is_fast)
        num_ipus = self.executable.target.num_ipus
        rows = []
        flags_of_steps = self._of_other_causes, self._steps_of[SINGLE_TILES] & is_spread
        for node, row, is_of_other, is_moved in zip(self.nodes, self.whole[..., COMPUTE], *flags_of_steps, strict=True):
            cost = costs[node] if isinstance(node, Leaf) else None
            if isinstance(cost, ComputeSetCost | CopyCost):
                tiles = self._cycles_of_tiles(cost, is_in_place)
                of_ipus = tiles.of_ipus(is_started and not is_of_other, is_moved or (is_equal and not is_of_other))
                row = pad_tiles(of_ipus, cost.first_ipu, num_ipus)
            rows.append(row)
        self._compute[flags] = np.stack(rows)
        return self._compute[flags]

    def _cycles_of_tiles(self, cost: ComputeSetCost | CopyCost, is_in_place: bool) -> CyclesOfTiles:
        """Return the compute cycles of a leaf, of which few differ, as equal leaves share the cycles of their tiles."""
        cycles = cost.compute_cycles if isinstance(cost, ComputeSetCost) else cost.ipus
        key = id(cycles), is_in_place
        if key not in self._tiles:
            of_tiles = _of_tiles(cost, is_in_place)
            starts, least = self._cycles_of_small(cost)
            self._tiles[key] = CyclesOfTiles.of(of_tiles, starts, least, self.executable.target), cycles
        return self._tiles[key][0]

    @cached_property
    def _tiles(self) -> dict[tuple[int, bool], tuple[CyclesOfTiles, object]]:
        """Cycles of tiles that are known, by the identity of what they are of, which is kept for that."""
        return {}

    @cached_property
    def _compute(self) -> dict[tuple[bool, ...], np.ndarray]:
        """Compute cycles that are known, by the arguments of `_compute_cycles`."""
        return {}

    def _cycles_of_small(self, cost: ComputeSetCost | CopyCost) -> tuple[np.ndarray, np.ndarray]:
        """Return the cycles of each tile for vertices without elements, which start, and for those of one element."""
        if isinstance(cost, CopyCost):
            return np.zeros_like(cost.copy_cycles), np.zeros_like(cost.copy_cycles)
        if id(cost.vertices) not in self._small:  # by identity: equal compute sets share it
            vertices = self.executable.graph, cost.compute_set, cost.first_ipu, len(cost.vertices)
            starts, least = (cycles_of_small_vertices(*vertices, elements) for elements in (0, 1))
            self._small[id(cost.vertices)] = np.minimum(starts, least), least
        return self._small[id(cost.vertices)]

    @cached_property
    def _small(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Results of `_cycles_of_small` that are known, by the identity of the vertices."""
        return {}

    @cached_property
    def _exchange_starts(self) -> np.ndarray:
        """Cycles to start the exchanges of all steps, int64[steps, num_ipus]: a part of `SYNCS`, not of their bytes."""
        costs = [self.executable.costs[node] if isinstance(node, Leaf) else None for node in self.nodes]
        return np.stack([self._num_exchanges(cost) for cost in costs]) * self.executable.target.exchange_startup_cycles

    def _num_exchanges(self, cost: object) -> np.ndarray:
        """Return how often each IPU starts an exchange in a step, int64[num_ipus]."""
        target = self.executable.target
        number = np.zeros(target.num_ipus, np.int64)
        match cost:
            case CopyCost():
                exchanges = [cost.exchange]
            case ComputeSetCost():
                exchanges = [cost.before, cost.after]
            case _:
                return number
        for exchange in exchanges:
            takes_part = (exchange.cycles.reshape(-1, target.tiles_per_ipu) > 0).any(1)
            number += pad_tiles(np.asarray(takes_part, np.int64), cost.first_ipu, target.num_ipus)
        return number

    def _costs_of(self, is_spread: bool, is_native: bool, is_fast: bool) -> Mapping[Leaf, object]:
        """Return the costs of leaves without single elements beside others, with native dtypes, or without slow paths.

        Emulated dtypes become native ones of their own size.
        """
        executable = self.executable
        target = executable.target
        is_native = is_native and self.is_of(EMULATION)
        slow_rows = self._slow_rows if is_fast else frozenset()
        remaining = self._groups_beside_scalars if is_spread else {}
        if not is_native and not slow_rows and not remaining:
            return executable.costs
        key = is_spread, is_native, is_fast
        if key not in self._costs:
            dtypes = target.native_dtypes | self._dtypes if is_native else target.native_dtypes
            graph = graph_on(executable.graph, replace(target, native_dtypes=dtypes))
            graph.groups.update(remaining)
            # Rows that are as long with padding as without have no slow path, and no more elements.
            graph.notes.padded_rows.extend(PaddedRows(row, row, 0, 0) for row in slow_rows)
            # Other costs are as they are.
            self._costs[key] = {
                leaf: _cost_on(graph, leaf, cost)
                if is_native or (slow_rows and _slow_rows_of(cost)) or _compute_set_of(leaf) in remaining
                else cost
                for leaf, cost in executable.costs.items()
            }
        return self._costs[key]

    @cached_property
    def _groups_beside_scalars(self) -> Mapping[ComputeSet, list[VertexGroup]]:
        """The vertex groups of compute sets without those that compute single elements beside others."""
        remaining = {}
        for compute_set, groups in self.executable.graph.groups.items():
            others = [group for group in groups if not is_of_scalars(group)]
            if 0 < len(others) < len(groups):
                remaining[compute_set] = others
        return remaining

    @cached_property
    def _costs(self) -> dict[tuple[bool, bool, bool], Mapping[Leaf, object]]:
        """Costs of leaves that are known, by the arguments of `_costs_of`."""
        return {}

    @cached_property
    def _slow_rows(self) -> frozenset[int]:
        """Lengths of rows that take slow paths."""
        return frozenset(row for cost in self.executable.costs.values() for row in _slow_rows_of(cost))

    @cached_property
    def _dtypes(self) -> frozenset[str]:
        groups = (group for groups in self.executable.graph.groups.values() for group in groups)
        dtypes = {item.dtype for group in groups for item in group.codelet.fields}
        return frozenset(dtype_name(dtype) for dtype in dtypes if not is_key_dtype(dtype))

    @cached_property
    def calls(self) -> Mapping[Program, Origin]:
        """The origin of the first call of each step of a function, as seen from outside of all functions."""
        calls: dict[Program, Origin] = {}
        for node in distinct(self.executable.program):  # parents first
            if isinstance(node, Call):
                origin = compose(calls[node], node.origin) if node in calls else node.origin
                for step in distinct(node.function.body, into_calls=False):
                    calls.setdefault(step, origin)
        return calls

    def origin_in(self, node: Leaf, cause: str) -> Origin:
        """Return the origin of the cycles that a step has by a cause: its own, or that of single elements in it."""
        if cause == SINGLE_TILES and _compute_set_of(node) in self._groups_beside_scalars:
            cost = self.executable.costs[node]
            assert isinstance(cost, ComputeSetCost)
            pairs = zip(self.executable.graph.groups[cost.compute_set], cost.limiting_by_group, strict=True)
            single = Counter[Origin]()
            for group, cycles in pairs:
                if is_of_scalars(group):
                    single[group.origin] += cycles
            return max(single, key=lambda origin: single[origin])
        return node.shown_origin

    def is_of(self, cause: str) -> bool:
        """Return whether the program may have cycles of a cause; others need not be tried."""
        if cause == UNEQUAL_IPUS:
            return bool(self.tasks.any())
        if cause == WAITS:
            return self.executable.target.num_ipus > 1
        if cause == SLOW_PATHS:
            return bool(self._slow_rows)
        if cause == EMULATION:
            return not self._dtypes <= self.executable.target.native_dtypes
        return True


def _results_of(node: Program, graph: Graph) -> list[Tensor]:
    """Return the tensors that a step writes, or moves off the tiles."""
    if isinstance(node, Execute):
        groups = graph.groups[node.compute_set]
        pairs = (pair for group in groups for pair in zip(group.codelet.fields, group.accesses, strict=True))
        return [access.tensor for field, access in pairs if field.is_written]
    return list(node.writes or node.reads) if isinstance(node, Leaf) else []


def _slow_rows_of(cost: object) -> list[int]:
    """Return the lengths of rows that take slow paths in a compute set or a copy."""
    if isinstance(cost, CopyCost):
        return [] if cost.slow_path is None else [cost.slow_path.row]
    return [reason.row for _, reason, _ in cost.slow_paths] if isinstance(cost, ComputeSetCost) else []


def _compute_set_of(leaf: Leaf) -> ComputeSet | None:
    return leaf.compute_set if isinstance(leaf, Execute) else None


def _cost_on(graph: Graph, leaf: Leaf, cost: object) -> object:
    """Return the cost of a compute set or a copy on another graph; that of other leaves as it is."""
    if isinstance(leaf, Execute):
        return compute_set_cost(graph, leaf.compute_set)
    return copy_cost(graph, leaf) if isinstance(leaf, Copy) else cost


def _of_tiles(cost: ComputeSetCost | CopyCost, is_in_place: bool) -> np.ndarray:
    if isinstance(cost, CopyCost):
        return np.zeros_like(cost.copy_cycles) if is_in_place else cost.copy_cycles
    return np.maximum(cost.compute_cycles - cost.rearrangement_cycles, 0) if is_in_place else cost.compute_cycles


def _by_type(streams: Iterable[HostStream]) -> dict[tuple[tuple[int, ...], str], list[HostStream]]:
    by_type: dict[tuple[tuple[int, ...], str], list[HostStream]] = {}
    for stream in streams:
        by_type.setdefault((stream.shape, str(stream.dtype)), []).append(stream)
    return by_type


def _leaves_of_collectives(program: Program) -> Iterator[Leaf]:
    for node in distinct(program):
        if isinstance(node, Collective):
            yield from leaves(node)
        elif isinstance(node, CrossReplicaCopy) or (isinstance(node, Copy) and node.is_collective):
            yield node
