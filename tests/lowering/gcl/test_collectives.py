"""Collectives over replicas, in plain JAX, engine and tile interpreter against NumPy; their schedules as data."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.gcl import collectives, rounds
from ipujax.lowering.gcl.collective_params import COLLECTIVES, axis_rank
from ipujax.lowering.gcl.collective_schedules import Level, Schedule, candidates, choose
from ipujax.lowering.layout import MemoryOrder, memory_order
from ipujax.runtime.compile import compile
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Builder
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Collective, Copy, CrossReplicaCopy, Sequence as Program, WriteUndef
from ipujax.runtime.graph.walks import distinct
from ipujax.runtime.options import Options
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.target.presets import preset
from ipujax.runtime.target.target import Target
from ipujax.runtime.tensor.mapping import on_one_tile
from tests.lowering.replicas.replica_helpers import SAME, SPLIT, assert_ways, device, lowered, ways

HALVES = [[0, 1], [2, 3]]
CROSSED = [[2, 0], [1, 3]]
GROUPS = [None, HALVES, CROSSED]


def values(*shape: int, dtype: Any = np.float32) -> Any:
    """Small whole numbers, on which sums are exact in any order."""
    size = int(np.prod(shape))
    return (np.arange(size) * 7 % 23 - 11).reshape(shape).astype(dtype)


def split_replicas(x: Any, replicas: int) -> list[Any]:
    """The part of each replica."""
    return np.split(x, replicas)


def by_group(parts: list[Any], groups: list[list[int]], fun: Callable[[list[Any], int], Any]) -> Any:
    """For each replica a function of its group's parts and of its rank, joined."""
    results: dict[int, Any] = {}
    for group in groups:
        for rank, replica in enumerate(group):
            results[replica] = fun([parts[r] for r in group], rank)
    return np.concatenate([results[r] for r in range(len(parts))])


# name of the primitive: (function of one replica, function of the parts of a group and of a rank)
CASES: list[tuple[str, str, Callable[..., Any], Callable[..., Any]]] = [
    ("psum", "all", lambda x, g: lax.psum(x, "replica", axis_index_groups=g), lambda parts, _: sum(parts)),
    ("pmax", "all", lambda x, g: lax.pmax(x, "replica", axis_index_groups=g), lambda parts, _: np.max(parts, 0)),
    ("pmin", "all", lambda x, g: lax.pmin(x, "replica", axis_index_groups=g), lambda parts, _: np.min(parts, 0)),
    (
        "all_reduce",
        "transposed",
        lambda x, g: (
            lax.psum(x.T, "replica", axis_index_groups=g).T + lax.psum(x[:1, :1], "replica", axis_index_groups=g)
        ),
        lambda parts, _: sum(parts) + sum(parts)[:1, :1],
    ),
    (
        "all_gather",
        "dimension",
        lambda x, g: lax.all_gather(x, "replica", axis_index_groups=g, axis=1).reshape(x.shape[0], -1),
        lambda parts, _: np.stack(parts, 1).reshape(parts[0].shape[0], -1),
    ),
    (
        "all_gather",
        "joined",
        lambda x, g: lax.all_gather(x, "replica", axis_index_groups=g, axis=1, tiled=True),
        lambda parts, _: np.concatenate(parts, 1),
    ),
    (
        "reduce_scatter",
        "joined",
        lambda x, g: lax.psum_scatter(x, "replica", scatter_dimension=1, axis_index_groups=g, tiled=True),
        lambda parts, rank: np.split(sum(parts), len(parts), 1)[rank],
    ),
    (
        "all_to_all",
        "joined",
        lambda x, g: lax.all_to_all(x, "replica", 1, 0, axis_index_groups=g, tiled=True),
        lambda parts, rank: np.concatenate([np.split(part, len(parts), 1)[rank] for part in parts], 0),
    ),
]


@pytest.mark.parametrize("groups", GROUPS, ids=["all", "halves", "crossed"])
@pytest.mark.parametrize(
    ("primitive", "name", "fun", "expected"), CASES, ids=lambda case: case if isinstance(case, str) else ""
)
def test_collectives_of_groups(
    primitive: str, name: str, fun: Callable[..., Any], expected: Callable[..., Any], groups: Any
):
    del name
    x = values(4 * 3, 8)
    expected_result = by_group(split_replicas(x, 4), groups or [[0, 1, 2, 3]], expected)
    assert_ways(expected_result, lambda part: fun(part, groups), 4, SPLIT, SPLIT, x)
    traced = jax.make_jaxpr(lambda part: fun(part, groups), axis_env=[("replica", 4)])(x[:3])
    primitives = {eqn.primitive.name for eqn in traced.eqns}
    assert primitive in primitives | {"all_reduce"}


@pytest.mark.parametrize(
    ("replicas", "size", "dtype"),
    [
        (2, 1, np.float32),
        (2, 257, np.float16),
        (4, 3, np.int32),
        (4, 257, np.float32),
        (8, 3, np.uint8),
        (8, 64, jnp.bfloat16),
        (8, 257, np.float32),
    ],
    ids=str,
)
def test_sizes_without_a_common_divisor(replicas: int, size: int, dtype: Any):
    x = (values(replicas * size) % 5).astype(dtype)
    expected = sum(split_replicas(x, replicas)).astype(dtype)
    assert_ways(expected, lambda part: lax.psum(part, "replica"), replicas, SPLIT, SAME, x)


def test_sums_of_halves_are_rounded_once():
    x = np.array([256.0, *[1.0] * 7]).astype(jnp.bfloat16)  # 256 + 1 is 256 in bfloat16
    for fun in (lambda x: lax.psum(x, "replica"), lambda x: lax.psum_scatter(jnp.repeat(x, 8), "replica")[None]):
        results = ways(fun, 8, SPLIT, SPLIT, x)
        assert all((results[way][0] == 264).all() for way in ("plain", "engine"))


def test_permutes_indices_and_vmapped_sums():
    x = values(4 * 2, 3)
    parts = split_replicas(x, 4)
    sent = np.concatenate([np.zeros_like(parts[0]), parts[0], parts[3], np.zeros_like(parts[0])])
    assert_ways(sent, lambda p: lax.ppermute(p, "replica", [(0, 1), (3, 2)]), 4, SPLIT, SPLIT, x)
    turned = np.concatenate(parts[::-1])
    assert_ways(turned, lambda p: lax.pshuffle(p, "replica", [3, 2, 1, 0]), 4, SPLIT, SPLIT, x)
    index = np.repeat(np.arange(4, dtype=np.int32), 2)
    assert_ways(index, lambda p: jnp.full(p.shape[:1], lax.axis_index("replica")), 4, SPLIT, SPLIT, x)
    ranks = np.repeat(np.array([0, 1, 0, 1], np.int32), 2)
    assert_ways(ranks, lambda p: jnp.full(p.shape[:1], axis_rank((0, 1, 0, 1))), 4, SPLIT, SPLIT, x)
    spread = np.stack([p[r % 2] for r, p in enumerate(parts)])
    assert_ways(spread, lambda p: p[lax.axis_index("replica") % 2][None], 4, SPLIT, SPLIT, x)
    of_dimensions = sum(parts).sum(0)
    vmapped = jax.vmap(lambda row: lax.psum(row, ("batch", "replica")), axis_name="batch")
    assert_ways(np.stack([of_dimensions] * 2), vmapped, 4, SPLIT, SAME, x)


def test_inside_loops_and_branches():
    x = values(4 * 2)

    def fun(p: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            total = lax.psum(row, "replica")
            return carry + total, total * row

        carry, rows = lax.scan(body, jnp.float32(0), p)
        top = lax.pmax(p.max(), "replica")
        limited = lax.while_loop(lambda s: s[0] < top, lambda s: (s[0] + 5, lax.pmean(s[1], "replica") + p), (0.0, p))
        chosen = lax.cond(top > 3, lambda: lax.psum(p, "replica"), lambda: lax.pmin(p, "replica"))
        return carry, rows, limited[1], chosen

    parts = split_replicas(x, 4)
    totals = sum(parts)
    iterations = int(np.ceil(x.max() / 5))
    mean = [p.copy() for p in parts]
    for _ in range(iterations):
        middle = sum(mean) / np.float32(4)
        mean = [middle + p for p in parts]
    expected = totals.sum(), np.concatenate([totals * p for p in parts]), np.concatenate(mean), totals
    assert_ways(expected, fun, 4, SPLIT, (SAME, SPLIT, SPLIT, SAME), x, rtol=1e-6)


def test_inside_loops_over_a_batch():
    trips = np.array([0, 3, 1])

    def fun(rows: Any) -> Any:
        def row(count: Any, x: Any) -> Any:
            def step(state: Any) -> Any:
                return state[0] + 1, state[1] + lax.psum(state[1], "replica")

            return lax.while_loop(lambda state: state[0] < count, step, (0, x))[1]

        return jax.vmap(row)(trips, rows)

    x = values(4 * 3, 2)
    parts = split_replicas(x, 4)
    for trip in range(3):
        total = sum(parts)
        parts = [np.where((trips > trip)[:, None], part + total, part) for part in parts]
    assert_ways(np.concatenate(parts), fun, 4, SPLIT, SPLIT, x)


def test_refuses_a_collective_that_not_all_replicas_reach():
    def branch(p: Any) -> Any:
        return lax.cond(p[0] > 0, lambda: lax.psum(p, "replica"), lambda: p)

    with pytest.raises(GraphError, match=r"disagree on the choice of a branch[\s\S]*test_collectives.py"):
        lowered(branch, 2, SPLIT, SPLIT, values(4))

    def loop(p: Any) -> Any:
        return lax.while_loop(lambda s: s[0] < 3, lambda s: lax.pmean(s, "replica") + p, p)

    with pytest.raises(GraphError, match="disagree on a loop's condition"):
        lowered(loop, 2, SPLIT, SPLIT, values(4))


def test_gradients_through_collectives():
    x = values(4 * 2, 3) / 8
    w = values(3) / 4

    def loss(w: Any, p: Any) -> Any:
        return lax.pmean(jnp.mean(jnp.tanh(p @ w) ** 2), "replica")

    def step(w: Any, p: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, p)
        return value, lax.pmean(gradient, "replica")

    expected = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    assert_ways(expected, step, 4, (SAME, SPLIT), SAME, w, x, rtol=2e-6)


@pytest.mark.parametrize("groups", GROUPS, ids=["all", "halves", "crossed"])
def test_parts_of_another_order_in_memory(groups: Any):
    """Transposed arguments are moved as memory has them, and their results are transposed alike."""
    size = 4 if groups is None else 2
    x = values(4 * 3, 5, size)

    def fun(part: Any) -> Any:
        share = lax.psum_scatter(part.transpose((2, 1, 0)), "replica", axis_index_groups=groups)
        return share.T, lax.all_gather(part.transpose((2, 1, 0)), "replica", axis_index_groups=groups).T

    shares = by_group(split_replicas(x, 4), groups or [[0, 1, 2, 3]], lambda parts, rank: sum(parts)[..., rank])
    everyone = by_group(split_replicas(x, 4), groups or [[0, 1, 2, 3]], lambda parts, _: np.stack(parts, -1))
    assert_ways((shares, everyone), fun, 4, SPLIT, SPLIT, x)


def test_results_have_the_layout_of_their_operands():
    """A sum's share of part after part, each transposed, and the whole of such parts, are views of whole variables."""
    graph = Graph(preset("mk2").replace(tiles_per_ipu=4), 2)
    prog = Program()
    x = graph.add_variable((2, 3, 5), np.dtype(np.float32), "x").transpose((0, 2, 1))
    share = collectives.reduce_scatter(Builder(graph, prog, "share"), x, "add", ((0, 1),))
    assert share.shape == (5, 3) and memory_order(share) == MemoryOrder(((5,), (3,)), (1, 0))
    everyone = collectives.all_gather(Builder(graph, prog, "everyone"), share, ((0, 1),))
    assert everyone.shape == (2, 5, 3) and memory_order(everyone) == MemoryOrder(((2,), (5,), (3,)), (0, 2, 1))


def test_every_collective_has_a_case():
    covered = {primitive for primitive, *_ in CASES} | {"ppermute", "axis_index", "axis_rank"}
    assert set(COLLECTIVES) - covered == {"pbroadcast"}  # which jax 0.10.2 cannot trace over an axis of this name


# --- schedules ---


def program_of(fun: Callable[..., Any], replicas: int, *args: Any) -> list[Any]:
    """The nodes of a program of several replicas."""
    return list(distinct(lowered(fun, replicas, SAME, SAME, *args).program))


def test_a_tree_is_one_collective():
    tree = {"a": values(3, 5), "b": values(7), "c": values(2).astype(np.float16)}
    nodes = program_of(lambda t: lax.pmean(jax.tree.map(lambda x: x * 2, t), "replica"), 4, tree)
    collectives = [node for node in nodes if isinstance(node, Collective)]
    assert [len(node.inputs) for node in collectives] == [2, 1]  # one for each dtype

    def apart(x: Any) -> Any:
        first = lax.psum(x, "replica")
        other = lax.psum(x * 3, "replica")
        return first * other, lax.psum(first * x, "replica"), lax.psum(1.0, "replica")

    collectives = [node for node in program_of(apart, 4, values(5)) if isinstance(node, Collective)]
    assert [len(node.inputs) for node in collectives] == [2, 1]  # the last needs the first; a literal's is known


def test_large_sums_are_not_merged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(import_module("ipujax.lowering.passes.merge_collectives"), "MOST_BYTES", 64)
    tree = [values(size) for size in (6, 4, 8, 20, 1)]  # of 4 bytes
    nodes = program_of(lambda t: lax.psum(t, "replica"), 2, tree)
    assert [len(node.inputs) for node in nodes if isinstance(node, Collective)] == [2, 1, 1, 1]


def test_a_literal_is_summed_by_groups_of_one_size_alone():
    def fun(part: Any) -> Any:
        return part + jax.jit(lambda literal: lax.psum(literal, "replica", axis_index_groups=[[0], [1, 2, 3]]))(1.0)

    assert_ways(np.array([1, 3, 3, 3], np.float32), fun, 4, SPLIT, SPLIT, np.zeros(4, np.float32))


class Round(NamedTuple):
    """The sends of one round, (source, destination, chunk of the level's value), and whether the receiver adds."""

    sends: list[tuple[int, int, int]]
    combines: bool


def reducing(level: Level) -> list[Round]:
    """Rounds after which the replica at position p of a ring has the sum of chunk p, of doubling all."""
    if level.kind == "doubling":
        return [Round([(a, b, 0) for a, b in swaps], True) for swaps in level.swaps()]
    return [on_ring(level, -1 - number, True) for number in range(level.size - 1)]


def gathering(level: Level) -> list[Round]:
    """Rounds after which all have every chunk, if the replica at position p has chunk p."""
    return [on_ring(level, -number, False) for number in range(level.size - 1 if level.kind == "ring" else 0)]


def on_ring(level: Level, offset: int, combines: bool) -> Round:
    """Every replica sends the chunk that is so far from its position to the next one."""
    n = level.size
    return Round([(g[p], g[(p + 1) % n], (p + offset) % n) for g in level.groups for p in range(n)], combines)


@pytest.mark.parametrize("replicas", [2, 3, 4, 5, 8, 16])
def test_a_ring_copies_twice_n_times_n_less_one_chunks(replicas: int):
    schedule = Schedule((Level((tuple(range(replicas)),)),), "ring")
    sends = [send for level in schedule.levels for r in (*reducing(level), *gathering(level)) for send in r.sends]
    assert len(sends) == 2 * replicas * (replicas - 1)


def test_the_program_does_not_grow_with_replicas():
    def program(replicas: int, size: int) -> list[Any]:
        return program_of(lambda x: lax.psum(x, "replica"), replicas, jax.ShapeDtypeStruct((size,), np.float32))

    for replicas in (4, 16, 64):
        copies = [node for node in program(replicas, 1 << 20) if isinstance(node, CrossReplicaCopy)]
        assert len(copies) in (2, 4)  # one in the loop of each half of each level
        assert len(program(replicas, 1 << 20)) < 50
    swaps = [node for node in program(16, 4) if isinstance(node, CrossReplicaCopy)]
    assert len(swaps) == 4  # a small value doubles


def candidate_schedules(replicas: int, groups: Any, ipus_each: int = 1) -> list[Schedule]:
    system = preset("mk2", replicas * ipus_each).replace(ipus_per_pod=8)
    return list(candidates(system, ipus_each, groups, reduces_all=True))


@pytest.mark.parametrize(
    ("replicas", "groups"),
    [
        (2, ((0, 1),)),
        (6, ((0, 1, 2, 3, 4, 5),)),
        (8, (tuple(range(8)),)),
        (16, (tuple(range(16)),)),
        (8, ((0, 2, 4, 6), (1, 3, 5, 7))),
        (16, (tuple(range(8)), tuple(range(8, 16)))),
    ],
    ids=str,
)
def test_schedules_sum_all_chunks_everywhere(replicas: int, groups: Any):
    """Every candidate, played round by round on numbers of its own."""
    schedules = candidate_schedules(replicas, groups)
    assert len({schedule.name for schedule in schedules}) >= 2 or replicas == 2
    for schedule in schedules:
        start = np.random.default_rng(replicas).integers(0, 100, (replicas, *schedule.chunks))
        result = _simulated(schedule, start.copy())
        for group in groups:
            np.testing.assert_array_equal(
                result[list(group)], np.broadcast_to(start[list(group)].sum(0), (len(group), *schedule.chunks))
            )


NAMES = ("ring", "ring along the ladder", "ring both ways", "two-phase", "doubling")
APART = [[7, 5, 3, 1], [0, 2, 4, 6]]


@pytest.mark.parametrize(
    ("groups", "name", "ipus_each"),
    [*product((None, [[0, 1, 2, 3], [4, 5, 6, 7]], APART), NAMES, (1, 2))],
)
def test_all_schedules_give_equal_results(
    name: str, groups: list[list[int]] | None, ipus_each: int, monkeypatch: pytest.MonkeyPatch
):
    """Each schedule there is, whether or not it would be chosen, of sums, joins and shares."""
    chosen = []

    def choose(graph: Graph, groups: Any, num_bytes: int, *, reduces_all: bool) -> Schedule:
        del num_bytes
        schedules = list(candidates(graph.system_target, graph.target.num_ipus, groups, reduces_all))
        chosen.append(next((schedule for schedule in schedules if schedule.name == name), schedules[0]))
        return chosen[-1]

    monkeypatch.setattr(collectives, "choose", choose)
    on = device(8 * ipus_each, tiles=3, ipus_per_gateway=2 * ipus_each, ipus_per_pod=4 * ipus_each)
    x = values(8 * 2, 4)

    def fun(part: Any) -> Any:
        total = lax.psum(part, "replica", axis_index_groups=groups)
        everyone = lax.all_gather(part, "replica", axis_index_groups=groups, axis=1)
        rows = everyone.reshape(part.shape[0], -1)
        share = lax.psum_scatter(rows, "replica", scatter_dimension=1, axis_index_groups=groups, tiled=True)
        return total, rows, share

    parts = split_replicas(x, 8)
    members = groups or [list(range(8))]
    size = len(members[0])
    rows = by_group(parts, members, lambda group, _: np.concatenate(group, 1))
    expected = (by_group(parts, members, lambda group, _: sum(group)), rows, size * x)
    assert_ways(expected, fun, 8, SPLIT, SPLIT, x, on=on)
    no_machine_holds_two_of_a_group = groups is not None and groups[0][0] == 7
    left_out = {"two-phase": no_machine_holds_two_of_a_group, "ring both ways": ipus_each > 1}
    assert name in {schedule.name for schedule in chosen} or left_out[name]


def _simulated(schedule: Schedule, values: np.ndarray) -> np.ndarray:
    """Values of all replicas after all rounds, [replicas, *chunks]."""

    def working_views(depth: int) -> list[Any]:
        """Views [chunks of level, …] of the value of each replica at a depth."""
        views = []
        for replica in range(len(values)):
            view = values[replica]
            for level in schedule.levels[:depth]:
                view = view[level.positions(len(values))[replica] % level.chunks]
            views.append(view)
        return views

    def play(depth: int, rounds: Any) -> None:
        for current_round in rounds:
            sent = [view.copy() for view in working_views(depth)]
            for source, destination, chunk in current_round.sends:
                if current_round.combines:
                    working_views(depth)[destination][chunk] += sent[source][chunk]
                else:
                    working_views(depth)[destination][chunk] = sent[source][chunk]

    for depth, level in enumerate(schedule.levels):
        play(depth, reducing(level))
    for depth in reversed(range(len(schedule.levels))):
        play(depth, gathering(schedule.levels[depth]))
    return values


# --- time ---

SLOW_LINKS = preset("mk2").replace(ipu_link_bytes_per_second=1e9, tiles_per_ipu=4, ipus_per_gateway=64)


def phases(replicas: int, elements: int, name: str, target: Target = SLOW_LINKS) -> dict[str, int]:
    """Cycles by phase of an all-reduce of float32 by the schedule of a name, of a value that is there already."""
    graph = Graph(target, replicas)
    prog = Program()
    groups = (tuple(range(replicas)),)
    (schedule,) = [s for s in candidates(graph.system_target, 1, groups, reduces_all=True) if s.name == name]
    chunk_elements = -(-elements // (schedule.ways * int(np.prod(schedule.chunks))))
    parts = []
    for way in range(schedule.ways):
        value = rounds.add_value(graph, schedule.chunks, chunk_elements, np.dtype(np.float32), "value")
        parts.append(rounds.Part(graph, value, is_back=way > 0))
        for part in (WriteUndef(value), *_zeroed(graph, value)):
            prog.add(part)
    phases_before = Profile(compile(graph, prog, options=Options(allow_out_of_memory=True))).phase_cycles
    rounds.gather(rounds.reduce(parts, schedule, "add", prog, "sum"), parts, schedule, prog, "sum")
    phases_after = Profile(compile(graph, prog, options=Options(allow_out_of_memory=True))).phase_cycles
    return {phase: phases_after[phase] - phases_before[phase] for phase in phases_after}


def _zeroed(graph: Graph, value: Any) -> list[Copy]:
    zero = graph.add_constant(np.zeros((), np.float32), "zero", on_one_tile(1, 0))
    return [Copy(zero.broadcast_in_dim(value.shape, ()), value, "zero")]


def link_cycles(num_bytes: int, links: int) -> int:
    """Cycles of an exchange of some bytes on some IPU-Links at once."""
    rate = links * SLOW_LINKS.ipu_link_bytes_per_second * SLOW_LINKS.ipu_link_efficiency / SLOW_LINKS.clock_hz
    return round(SLOW_LINKS.global_exchange_latency_seconds * SLOW_LINKS.clock_hz) + int(np.ceil(num_bytes / rate))


@pytest.mark.parametrize("elements", [999, 4_000])
def test_a_ring_takes_the_time_of_its_closed_form(elements: int):
    """2 (n - 1) α + 2 (n - 1) / n · N β + (n - 1) / n · N γ, with chunks rounded up (reference parallel.md §4).

    α has the latency of an exchange between IPUs, which each round pays.
    """
    phase_cycles = {n: phases(n, n * elements, "ring along the ladder") for n in (4, 5, 8, 16)}
    for replicas, cycles in phase_cycles.items():
        # On the ladder every ring has a way with the bandwidth of two links, the fewest there are.
        assert cycles["global_exchange"] == 2 * (replicas - 1) * link_cycles(elements * 4, 2)
        assert cycles["host_exchange"] == cycles["idle"] == 0
    # α and γ remain: each iteration of a half takes the same time for any number of replicas.
    other_cycles = {n: sum(cycles.values()) - cycles["global_exchange"] for n, cycles in phase_cycles.items()}
    iteration_cycles = other_cycles[5] - other_cycles[4]
    assert (
        iteration_cycles > 0 and {n: other_cycles[4] + (n - 4) * iteration_cycles for n in phase_cycles} == other_cycles
    )


@pytest.mark.parametrize("replicas", [4, 8, 16])
def test_both_ways_carry_half_of_a_value_in_as_many_rounds(replicas: int):
    one_way, both_ways = (
        phases(replicas, replicas * 4_000, f"ring{ways} along the ladder") for ways in ("", " both ways")
    )
    assert both_ways["global_exchange"] == 2 * (replicas - 1) * link_cycles(4_000 * 4 // 2, 2)
    # Both halves are sent in one exchange, and combined apart.
    exchanges = 2 * (replicas - 1) * SLOW_LINKS.global_sync_cycles
    assert exchanges <= both_ways["sync"] < one_way["sync"] + exchanges


@pytest.mark.parametrize("replicas", [5, 7, 12])
def test_chunks_are_rounded_up(replicas: int):
    phase_cycles = phases(replicas, 1000, "ring along the ladder")
    assert phase_cycles["global_exchange"] == 2 * (replicas - 1) * link_cycles(-(-1000 // replicas) * 4, 2)


def test_doubling_takes_a_round_for_each_bit():
    phase_cycles = {n: phases(n, 1000, "doubling") for n in (2, 4, 8, 16)}
    # Partners are 1, 2, 4, 8 IPUs apart: 1, 1, 2 and 4 flows share a step of the ladder; the first have four links.
    flows = [link_cycles(4000, 4), *(link_cycles(4000 * n, 2) for n in (1, 2, 4))]
    assert [cycles["global_exchange"] for cycles in phase_cycles.values()] == [sum(flows[: n + 1]) for n in range(4)]
    syncs = [cycles["sync"] for cycles in phase_cycles.values()]
    assert syncs == [syncs[0] * (n + 1) for n in range(4)]


def test_small_values_double_and_large_values_take_rings():
    graph = Graph(preset("mk2"), 16)
    groups = (tuple(range(16)),)
    names = [choose(graph, groups, num_bytes, reduces_all=True).name for num_bytes in (4, 1 << 12, 1 << 26)]
    assert names[0] == "doubling" and "doubling" not in names[-1]
    across = Graph(preset("mk2").replace(ipus_per_pod=8, gateway_bytes_per_second=2e9), 16)
    assert choose(across, groups, 1 << 26, reduces_all=True).name == "two-phase"  # little crosses the gateways


# --- groups ---


@pytest.mark.parametrize("groups", [[[0], [1, 2, 3]], [[3, 1, 2], [0]]])
@pytest.mark.parametrize(
    ("reduction", "combined"), [(lax.psum, sum), (lax.pmax, max), (lax.pmin, min)], ids=["sum", "max", "min"]
)
def test_groups_of_different_sizes(reduction: Any, combined: Any, groups: Any):
    x = np.array([1, 10, 100, 1000], np.int32)
    expected = np.array([combined(x[list(next(g for g in groups if r in g))].tolist()) for r in range(4)], np.int32)
    assert_ways(expected, lambda part: reduction(part, "replica", axis_index_groups=groups), 4, SPLIT, SPLIT, x)


@pytest.mark.parametrize(
    ("groups", "match"),
    [([[0, 1]], "each of the replicas 0 to 3 in one group"), ([[0], [1, 2, 3]], "groups of one size")],
)
def test_refuses_invalid_groups(groups: Any, match: str):
    with pytest.raises(GraphError, match=rf"all_gather over invalid groups[\s\S]*{match}"):
        lowered(lambda x: lax.all_gather(x, "replica", axis_index_groups=groups), 4, SPLIT, SPLIT, values(8))


def test_empty_operands():
    x = np.zeros((4, 0, 3), np.float32)
    assert_ways(x + 1, lambda part: part + 1, 2, SPLIT, SPLIT, x)
    assert_ways(x[:2], lambda part: lax.psum(part, "replica"), 2, SPLIT, SAME, x)
    assert_ways(x, lambda part: lax.all_gather(part, "replica", tiled=True), 2, SPLIT, SAME, x)
    y = np.zeros((2, 4, 0), np.float32)
    assert_ways(y[0], lambda part: lax.psum_scatter(part[0], "replica", tiled=True), 2, SPLIT, SPLIT, y)
