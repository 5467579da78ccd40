"""Reductions: stages, layouts, the operation of the engine; against numpy and tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

from ipujax.lowering.layout.trial import trial_cycles
from ipujax.lowering.popops.reductions.partials import combining_cycles, reduce_partials, reduce_partials_in_place
from ipujax.lowering.popops.reductions.reduce import REDUCERS, reduce
from ipujax.runtime.engine.engine import engine_function
from ipujax.runtime.graph import Builder
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Execute, HostStream, Sequence, StreamIn, StreamOut
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.tensor.mapping import Blocked, TileMapping, frozen, grid, linear, on_one_tile
from ipujax.runtime.tensor.tensor import Tensor
from tests.lowering.helpers import check as check_on, lowered, small_target

check = partial(check_on, tiles=(16,))  # the op table tries other sizes of target
NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.sum,
    "mul": np.prod,
    "max": np.max,
    "min": np.min,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


def reduced(
    x: np.ndarray,
    axes: tuple[int, ...],
    monoid: str,
    mapping: TileMapping | None,
    tiles: int,
    view: Callable[[Tensor], Tensor] = lambda t: t,
) -> tuple[list[np.ndarray], Graph, Sequence]:
    """Reduces an array of a mapping: results of engine, literal engine and interpreter."""
    graph = Graph(small_target(tiles))
    prog = Sequence()
    variable = graph.add_variable(x.shape, x.dtype, "x", mapping)
    source = HostStream("x", x.shape, x.dtype)
    prog.add(StreamIn(source, variable))
    out = reduce(Builder(graph, prog, "reduce"), view(variable), axes, monoid)
    sink = HostStream("out", out.shape, out.dtype)
    prog.add(StreamOut(out, sink))
    for v in graph.variables:
        assert v in graph.mappings or v.is_constant
    results = [
        np.asarray(engine_function(graph, prog, exact_splits=exact)({source: x})[sink]) for exact in (False, True)
    ]
    return [*results, np.asarray(interpret(graph, prog, {source: x}, seed=tiles)[sink])], graph, prog


def integers(*shape: int) -> np.ndarray:
    """Integers as float32: sums and products are exact in any order."""
    return np.random.default_rng(len(shape)).integers(-4, 5, shape).astype(np.float32)


def test_only_keeps_signs_of_zeros() -> None:
    x = np.where(np.arange(12)[:, None] == np.arange(10), np.float32(-0.0), np.float32(0))
    results, _, _ = reduced(x, (0,), "only", grid((12, 10), (4, 2)), 8)
    for got in results:
        assert np.signbit(got).all() and set(REDUCERS) == {*NUMPY, "only", "signed_add"}


@pytest.mark.parametrize("monoid", NUMPY)
def test_every_monoid_over_a_split_dimension(monoid: str) -> None:
    x = np.random.default_rng(0).integers(-9, 9, (12, 10)).astype(np.int32)
    results, _, _ = reduced(x, (0,), monoid, grid((12, 10), (4, 2)), 8)
    for got in results:
        np.testing.assert_array_equal(got, NUMPY[monoid](x, axis=0))


MAPPINGS: dict[str, TileMapping] = {
    "rows": grid((14, 15), (7, 1)),
    "columns": grid((14, 15), (1, 5)),
    "boxes": grid((14, 15), (3, 4), first_tile=2),
    "uneven": Blocked(
        (frozen([0, 1, 13, 14], np.int64), frozen([0, 14, 15], np.int64)), frozen([[3, 3], [0, 15], [7, 3]], np.int32)
    ),
    "flat": linear(210, 4, 16),
    "one-tile": on_one_tile(210, 9),
}


@pytest.mark.parametrize("axes", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("layout", MAPPINGS)
def test_every_layout(layout: str, axes: tuple[int, ...]) -> None:
    x = integers(14, 15)
    results, _, _ = reduced(x, axes, "add", MAPPINGS[layout], 16)
    for got in results:
        np.testing.assert_array_equal(got, x.sum(axes))


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "transposed": (lambda t: t.transpose((1, 0)), lambda x: x.T),
    "sliced": (lambda t: t[2:13, 4:9], lambda x: x[2:13, 4:9]),
    "reversed": (lambda t: t.reverse((0,)), lambda x: x[::-1]),
    "strided": (lambda t: t[::3, 1::2], lambda x: x[::3, 1::2]),
    "reshaped": (lambda t: t.reshape((7, 30)), lambda x: x.reshape(7, 30)),
    "broadcast": (lambda t: t[0].broadcast_in_dim((5, 15), (1,)), lambda x: np.broadcast_to(x[0], (5, 15))),
}


@pytest.mark.parametrize("layout", ["boxes", "uneven", "flat"])
@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, layout: str) -> None:
    x = integers(14, 15)
    tensor_view, array_view = VIEWS[view]
    for axes in ((0,), (1,), (0, 1)):
        results, _, _ = reduced(x, axes, "add", MAPPINGS[layout], 16, tensor_view)
        for got in results:
            np.testing.assert_array_equal(got, array_view(x).sum(axes), err_msg=f"{axes}")


@settings(max_examples=15)
@given(st.data())
def test_any_blocked_mapping(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    cuts = tuple(
        frozen([0, *sorted(data.draw(st.sets(st.integers(1, n - 1)))), n] if n > 1 else [0, 1], np.int64) for n in shape
    )
    counts = [len(c) - 1 for c in cuts]
    tiles = data.draw(st.lists(st.integers(0, 3), min_size=int(np.prod(counts)), max_size=int(np.prod(counts))))
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1)))))
    x = integers(*shape)
    results, _, _ = reduced(x, axes, "add", Blocked(cuts, frozen(np.reshape(tiles, counts), np.int32)), 4)
    for got in results:
        np.testing.assert_array_equal(got, x.sum(axes))


STAGES = [(2, 1), (15, 1), (16, 2), (124, 2), (125, 3), (300, 3)]  # slots and stages
COMBINATIONS = (reduce_partials, reduce_partials_in_place)


@pytest.mark.parametrize(
    ("slots", "stages", "combination"),
    [(*stage, combination) for stage in STAGES for combination in COMBINATIONS],
)
def test_number_of_stages(combination: Callable[..., Tensor], slots: int, stages: int) -> None:
    x = integers(slots, 7, 30)
    graph = Graph(small_target(64))
    prog = Sequence()
    slot_grid = grid((slots, 7, 30), (slots, 1, 1))
    mapping = Blocked(slot_grid.cuts, slot_grid.tile % 64)
    partials = graph.add_variable(x.shape, x.dtype, "partials", mapping, "add")
    source = HostStream("x", x.shape, x.dtype)
    prog.add(StreamIn(source, partials))
    out = combination(Builder(graph, prog, "sum"), partials)
    sink = HostStream("out", out.shape, out.dtype)
    prog.add(StreamOut(out, sink))
    assert sum(isinstance(node, Execute) for node in prog.children()) == stages
    for got in (
        engine_function(graph, prog)({source: x})[sink],
        engine_function(graph, prog, exact_splits=True)({source: x})[sink],
        interpret(graph, prog, {source: x}, seed=slots)[sink],
    ):
        np.testing.assert_array_equal(got, x.sum(0))


@pytest.mark.parametrize("slots", [2, 7, 16, 40, 125, 260])
@pytest.mark.parametrize("blocks", [(1, 1), (5, 1), (1, 3), (3, 2)])
def test_estimates_the_cost_of_partials_combined_in_place(slots: int, blocks: tuple[int, int]) -> None:
    for shape, dtype in (((11, 24), np.float32), ((6, 301), np.float16), ((5, 3), np.int32)):
        mapping = grid((slots, *shape), (slots, *blocks))
        tiles = mapping.tile.size
        for target in (small_target(tiles), small_target(tiles + 300)):
            graph = Graph(target)
            partials = graph.add_variable((slots, *shape), dtype, "partials", mapping, "add")
            cost = trial_cycles(graph, lambda builder, t=partials: reduce_partials_in_place(builder, t))
            longest = tuple(int(np.diff(cut).max()) for cut in mapping.cuts[1:])
            assert cost == combining_cycles(
                slots, longest, shape, np.dtype(dtype), "add", target, graph.byte_cost_cycles
            )


def test_combines_a_tall_column_in_several_stages() -> None:
    x = integers(60000)
    program = lowered(lambda x: x.sum(), (x,), small_target(1472))
    assert sum(isinstance(node, Execute) for node in program.program.children()) >= 3
    check(lambda x: x.sum(), x, tiles=(16,))


def test_engine_emits_one_reduction_for_all_stages() -> None:
    x = integers(60000)
    for tiles in (16, 1472):
        program = lowered(lambda x: x.sum(), (x,), small_target(tiles))
        run = engine_function(program.graph, program.program)
        jaxpr = jax.make_jaxpr(lambda x, run=run, program=program: run({program.inputs[0]: x})[program.outputs[0]])(x)
        sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.size > 1]
        assert len(sums) == 1, jaxpr


def test_reductions_over_single_elements_are_views() -> None:
    x = np.array([[[-0.0], [1.5], [np.nan]]], np.float32)

    def fun(x: Any) -> Any:
        return jnp.sum(x, 0), jnp.max(x, (0, 2)), jnp.prod(x, 2), lax.reduce_and(x > 1, (0,))

    program = lowered(fun, (x,), small_target(4))
    names = [group.codelet.name for groups in program.graph.groups.values() for group in groups]
    assert names == ["popops::Gt<float32>"]
    check(fun, x)


@pytest.mark.parametrize("monoid", REDUCERS)
@pytest.mark.parametrize(
    "shape",
    [(0,), (0, 3), (3, 0), (2, 0, 3)],
)
def test_reductions_of_no_elements(monoid: str, shape: tuple[int, ...]) -> None:
    dtype = np.int32 if monoid in ("and", "or", "xor") else np.float32
    x = np.zeros(shape, dtype)
    for axes in ((0,), tuple(range(len(shape)))):
        check(lambda x, axes=axes: REDUCERS[monoid](x, axes=axes), x, tiles=(4,))


def test_partials_keep_nan_and_infinity() -> None:
    x = np.random.default_rng(5).normal(size=(64, 20)).astype(np.float32)
    x[3, 4] = np.nan
    x[60, 4] = 1.0
    x[7, 5] = np.inf
    x[9, 6] = -np.inf
    check(lambda x: (x.max(0), x.min(0), x.max()), x)
    check(lambda x: x.sum(0), x, rtol=1e-5, atol=1e-5)


def test_bits_of_booleans_and_small_integers() -> None:
    flags = np.random.default_rng(6).random((40, 30)) < 0.9
    check(lambda f: (f.all(0), f.any(1), f.all(), f.any()), flags)
    small = np.random.default_rng(7).integers(-128, 128, (40, 30)).astype(np.int8)
    check(lambda n: (jax.lax.reduce_sum(n, (0,)), n.max(1), n.min()), small)  # sums wrap around
