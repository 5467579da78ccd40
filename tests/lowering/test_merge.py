"""Independent compute sets run together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ipujax as ipu
from ipujax.lowering.merge import merge_compute_sets
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.vertices.kernel import Op
from ipujax.runtime.compile import program_cycles
from ipujax.runtime.graph import (
    BYTE_COST_CYCLES,
    NO_TILE,
    Builder,
    Copy,
    Execute,
    Graph,
    HostStream,
    Sequence,
    StreamIn,
    VertexGroup,
)
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.tensor.mapping import grid
from tests.lowering.helpers import check, small_target

F32 = np.dtype(np.float32)
SIN = Op("sin", jax.lax.sin, F32)
X = np.random.default_rng(2).normal(size=(12, 8)).astype(np.float32)


def tensor(graph: Graph, name: str) -> Tensor:
    return graph.add_variable((12, 8), F32, name, grid((12, 8), (2, 2)))


def counts(graph: Graph, prog: Sequence) -> list[int]:
    """Vertex groups of each step that is a compute set, 0 for others."""
    return [len(graph.groups[c.compute_set]) if isinstance(c, Execute) else 0 for c in prog.children()]


def built(order: str, target: Target | None = None, byte_cost: float = BYTE_COST_CYCLES) -> tuple[Graph, Sequence]:
    """A program of sines, `ab` for b = sin a, in order; `>` is a host stream into x."""
    graph = Graph(target or small_target(4), byte_cost_cycles=byte_cost)
    prog = Sequence()
    tensors = dict[str, Tensor]()
    for step in order.split():
        if step == ">":
            tensors["x"] = tensor(graph, "x")
            prog.add(StreamIn(HostStream("x", (12, 8), F32), tensors["x"]))
            continue
        read, written = step
        source = tensors.setdefault(read, tensor(graph, read))
        tensors[written] = elementwise(Builder(graph, prog, step), SIN, [source])
    merge_compute_sets(graph, prog)
    return graph, prog


def test_independent_neighbours_are_one_compute_set() -> None:
    graph, prog = built("ab cd ef")
    assert counts(graph, prog) == [3] and set(graph.groups) == {prog.children()[0].compute_set}  # type: ignore[attr-defined]


def test_operands_and_results_of_a_merged_set_have_the_limit_of_one_operation() -> None:
    """Each sine reads and writes 96 bytes on a tile."""
    for proportion, expected in ((0.1, [3]), (400 / 8192, [2, 1]), (200 / 8192, [1, 1, 1])):
        target = small_target(4, bytes_per_tile=8192, available_memory_proportion=proportion)
        assert counts(*built("ab cd ef", target)) == expected


def test_a_merged_set_takes_less_where_a_byte_costs_more() -> None:
    """Each sine reads and writes 96 bytes on a tile, and one operation may take 640."""
    target = small_target(4, bytes_per_tile=8192, available_memory_proportion=640 / 8192)
    for byte_cost, expected in ((0.0, [3]), (2.0, [3]), (3.0, [2, 1]), (8.0, [1, 1, 1])):
        assert counts(*built("ab cd ef", target, byte_cost)) == expected


def counts_of_two(max_bytes: int, changed: Callable[[VertexGroup], VertexGroup]) -> list[int]:
    """`counts` of two sines with changed vertices, where one operation may take `max_bytes` of a tile."""
    target = small_target(4, bytes_per_tile=8192, available_memory_proportion=max_bytes / 8192)
    graph = Graph(target)
    prog = Sequence()
    for name in "ab":
        elementwise(Builder(graph, prog, name), SIN, [tensor(graph, name)])
    for compute_set, (group,) in list(graph.groups.items()):
        graph.groups[compute_set] = [changed(group)]
    merge_compute_sets(graph, prog)
    return counts(graph, prog)


def test_counts_the_blocks_of_all_vertices_of_a_tile() -> None:
    """A sine reads and writes 96 bytes on a tile, be it in one vertex or in three."""

    def cut_in_three(group: VertexGroup) -> VertexGroup:
        axes = replace(group.axes[0], cuts=np.arange(0, 13, 2)), group.axes[1]
        return replace(group, axes=axes, tile=np.repeat(group.tile, 3, axis=0))

    assert counts_of_two(300, cut_in_three) == [1, 1]
    assert counts_of_two(400, cut_in_three) == [2]


def test_blocks_without_a_vertex_are_on_no_tile() -> None:
    """All 384 bytes that a sine reads, and its results, are on one tile, though one of four blocks has no vertex."""
    tile = np.array([[0, 0], [0, NO_TILE]], np.int32)
    assert counts_of_two(1000, lambda group: replace(group, tile=tile)) == [1, 1]
    assert counts_of_two(1600, lambda group: replace(group, tile=tile)) == [2]


def test_a_chain_is_not_merged() -> None:
    assert counts(*built("ab bc cd")) == [1, 1, 1]


def test_two_chains_run_side_by_side() -> None:
    assert counts(*built("ab bc xy yz")) == [2, 2]


def test_does_not_pass_host_exchanges() -> None:
    assert counts(*built("ab > cd")) == [1, 0, 1]
    assert counts(*built("ab > xc")) == [1, 0, 1]


def test_a_reader_of_a_copy_stays_behind_it() -> None:
    graph = Graph(small_target(4))
    prog = Sequence()
    a = tensor(graph, "a")
    b = tensor(graph, "b")
    elementwise(Builder(graph, prog, "first"), SIN, [a])
    prog.add(Copy(a, b))
    elementwise(Builder(graph, prog, "second"), SIN, [b])
    merge_compute_sets(graph, prog)
    assert counts(graph, prog) == [1, 0, 1]


def test_large_results_are_not_computed_early() -> None:
    """Their bytes cost more than a sync."""
    graph = Graph(small_target(4))
    prog = Sequence()
    large = [graph.add_variable((512, 64), F32, n, grid((512, 64), (2, 2))) for n in "abc"]
    b = elementwise(Builder(graph, prog, "b"), SIN, [large[0]])
    elementwise(Builder(graph, prog, "c"), SIN, [b])
    elementwise(Builder(graph, prog, "neighbour of c"), SIN, [large[1]])
    elementwise(Builder(graph, prog, "neighbour of both"), SIN, [large[2]])
    merge_compute_sets(graph, prog)
    assert counts(graph, prog) == [1, 3]


def test_saves_a_sync_for_each_merged_set() -> None:
    def cycles(order: str, merged: bool) -> int:
        graph = Graph(small_target(4))
        prog = Sequence()
        for name in order:
            elementwise(Builder(graph, prog, name), SIN, [tensor(graph, name)])
        if merged:
            merge_compute_sets(graph, prog)
        return program_cycles(graph, prog)

    sync = small_target(4).internal_sync_cycles
    assert cycles("abcd", True) == cycles("abcd", False) - 3 * sync


def test_an_optimiser_is_a_few_steps() -> None:
    """All parameters of one space together, the state written in place."""

    def step(params: Any, momentum: Any, grads: Any) -> Any:
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum

    tree = [jnp.asarray(X) + n for n in range(6)]
    program = ipu.jit(step, donate_argnums=(0, 1)).lower(tree, tree, tree)
    steps = [leaf for leaf in program.program.children() if isinstance(leaf, (Execute, Copy))]
    assert len(steps) == 1 and len(program.graph.groups[steps[0].compute_set]) == 6  # type: ignore[union-attr]
    check(step, tree, tree, tree, tiles=(1, 7), rtol=1e-6)


def test_lines_share_the_cycles_of_a_merged_compute_set() -> None:
    def fun(x: jax.Array, y: jax.Array) -> Any:
        first = jnp.sin(x)
        second = jnp.cos(y[:, :4])
        return first, second

    profile = ipu.jit(fun).lower(X, X).compile().profile
    rows = {row.origin.line: row.cycles for row in profile.operations() if "(fun)" in row.origin.line}
    assert len(rows) == 2 and min(rows.values()) > 0
    assert sum(row.cycles for row in profile.operations()) == profile.cycles
