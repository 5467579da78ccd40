"""The engine against numpy and plain JAX, on graphs built by hand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

from ipujax.runtime.engine.collapse import find_collapsible
from ipujax.runtime.engine.engine import engine_function
from ipujax.runtime.engine.split import run_group, signatures, store_blocks
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph.codelet import Codelet, Field
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import (
    Call,
    Copy,
    Execute,
    Function,
    HostStream,
    If,
    Program,
    RemoteBuffer,
    RemoteIn,
    RemoteOut,
    Repeat,
    RepeatWhile,
    Sequence,
    StreamIn,
    StreamOut,
    Switch,
)
from ipujax.runtime.graph.vertex_group import NO_TILE, Access, Axis, Dim, Term, VertexGroup, block, element, unsplit
from ipujax.runtime.target.presets import preset
from ipujax.runtime.tensor.mapping import even_cuts, linear
from ipujax.runtime.tensor.tensor import Tensor, concat, read
from ipujax.runtime.tensor.variable import dtype_name
from tests.lowering.helpers import quick_jit
from tests.runtime.helpers import no_cycles

TARGET = preset("mk2").replace(tiles_per_ipu=16)


def make_codelet(compute: Callable[..., Any], *fields: str, dtype: Any = np.float32, takes: Any = ()) -> Codelet:
    """A codelet with fields such as "in a", "out b" or "in i int32"."""
    parsed = []
    for field in fields:
        direction, name, *kind = field.split()
        parsed.append(Field(name, direction, np.dtype(kind[0] if kind else dtype)))  # type: ignore[arg-type]
    return Codelet("test", tuple(parsed), compute, no_cycles, takes=takes)


class Bench:
    """A graph and a program under construction, with streams for its inputs and outputs."""

    def __init__(self) -> None:
        self.graph = Graph(TARGET)
        self.program = Sequence()
        self.inputs: dict[HostStream, np.ndarray] = {}

    def variable(self, *shape: int, dtype: Any = np.float32, **more: Any) -> Tensor:
        return self.graph.add_variable(shape, dtype, **more)

    def feed(self, value: Any) -> Tensor:
        value = value if isinstance(value, jax.Array) else np.asarray(value)
        tensor = self.variable(*value.shape, dtype=value.dtype)
        stream = HostStream(f"in{len(self.inputs)}", value.shape, value.dtype)
        self.program.add(StreamIn(stream, tensor))
        self.inputs[stream] = value
        return tensor

    def vertices(
        self,
        codelet: Codelet,
        axes: list[Axis],
        accesses: list[Access],
        tile: Any = None,
        origins: tuple[str, ...] = (),
    ) -> Execute:
        """A compute set of one group, not added to the program."""
        counts = [axis.blocks for axis in axes]
        tiles = np.arange(int(np.prod(counts))).reshape(counts) % TARGET.num_tiles if tile is None else tile
        compute_set = self.graph.add_compute_set("set")
        group = VertexGroup(codelet, tuple(axes), tuple(accesses), np.asarray(tiles, np.int32), origins)
        self.graph.add_vertices(compute_set, group)
        return Execute(compute_set)

    def elementwise(self, compute: Callable[..., Any], inputs: list[Tensor], out: Tensor, blocks: int = 4) -> Execute:
        """A compute set that applies a function element by element, split over the first dimension."""
        names = [f"in x{i} {dtype_name(t.dtype)}" for i, t in enumerate(inputs)]
        axes = [split_axis("i0", out.shape[0], blocks)] if out.ndim else []
        axes += [split_axis(f"i{d}", n, 1) for d, n in enumerate(out.shape[1:], 1)]
        accesses = [Access(t, tuple(element(d) for d in range(t.ndim))) for t in [*inputs, out]]
        return self.vertices(make_codelet(compute, *names, f"out y {dtype_name(out.dtype)}"), axes, accesses)

    def function(self, *outputs: Tensor, exact_splits: bool = False) -> Callable[[], list[jax.Array]]:
        """Function that runs the program and returns the values of some tensors after it."""
        streams = [HostStream(f"out{i}", t.shape, t.dtype) for i, t in enumerate(outputs)]
        ends = [StreamOut(t, s) for t, s in zip(outputs, streams, strict=True)]
        run = engine_function(self.graph, Sequence(self.program, *ends), exact_splits=exact_splits)
        return lambda: [run(self.inputs)[s] for s in streams]

    def run(self, *outputs: Tensor, exact_splits: bool = False) -> list[np.ndarray]:
        return [np.asarray(v) for v in quick_jit(self.function(*outputs, exact_splits=exact_splits))()]


def split_axis(name: str, extent: int, blocks: int, kind: Any = "map") -> Axis:
    return Axis(name, even_cuts(extent, blocks), kind)


def primitives(function: Callable[..., Any]) -> Counter[str]:
    """Number of each primitive in a function, inner jaxprs included."""

    def visit(jaxpr: Any) -> Iterator[str]:
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
                inner = getattr(parameter, "jaxpr", parameter)
                if hasattr(inner, "eqns"):
                    yield from visit(inner)

    return Counter(visit(jax.make_jaxpr(function)().jaxpr))


COMBINE = {"add": np.sum, "mul": np.prod, "max": np.max, "min": np.min}


def check_kinds(group: VertexGroup, values: dict[Any, Any], tolerance: float = 0.0) -> None:
    """Checks that one vertex computing all of a group writes the values of its vertices, partial results combined."""

    @partial(jax.jit, static_argnums=0)
    def written(group: VertexGroup) -> list[jax.Array]:
        tensors = [a.tensor for f, a in zip(group.codelet.fields, group.accesses, strict=True) if f.is_written]
        state = {v: jnp.zeros(v.shape, v.dtype) for t in tensors for v in t.variables()}
        state.update({v: jnp.asarray(x) for v, x in values.items()})
        for item in run_group(group, signatures(group), state):
            store_blocks(item, state)
        return [read(t, state) for t in tensors]

    one = unsplit(group)
    accesses = [a for f, a in zip(group.codelet.fields, group.accesses, strict=True) if f.is_written]
    for access, split, whole in zip(accesses, written(group), written(one), strict=True):
        if access.dims and access.dims[0].terms and access.dims[0].terms[0].unit == "block":
            monoid = access.tensor.variables()[0].monoid
            assert monoid is not None
            split = COMBINE[monoid](split, axis=0)
            whole = whole[0]
        np.testing.assert_allclose(split, whole, rtol=tolerance, atol=tolerance)


def randn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- vertices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact_splits", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_elementwise_on_flat_tensors(exact_splits: bool, mapped: bool) -> None:
    bench = Bench()
    x = randn(100)
    y = randn(100, seed=1)
    a = bench.feed(x)
    b = bench.feed(y)
    c = bench.variable(100, mapping=linear(100, 4, 4) if mapped else None)
    bench.program.add(bench.elementwise(lambda a, b: a * b + 1, [a, b], c, blocks=7))
    (got,) = bench.run(c, exact_splits=exact_splits)
    np.testing.assert_allclose(got, x * y + 1, rtol=1e-6)


def test_unsplit_elementwise_is_nothing_but_the_operation() -> None:
    bench = Bench()
    a = bench.feed(randn(100))
    c = bench.variable(100)
    bench.program.add(bench.elementwise(jnp.sin, [a], c, blocks=7))
    assert primitives(bench.function(c)) == {"sin": 1}


def test_views_are_read_and_written() -> None:
    bench = Bench()
    x = randn(6, 4)
    y = randn(8, seed=1)
    a = bench.feed(x)
    b = bench.feed(y)
    c = bench.variable(8, 6)
    rows = concat([a.transpose()[1:3], b.reshape((8, 1)).broadcast_in_dim((8, 6), (0, 1))[:2]], 0)
    bench.program.add(bench.elementwise(jnp.negative, [rows], c[2:6], blocks=2))
    for exact_splits in (False, True):
        (got,) = bench.run(c, exact_splits=exact_splits)
        expected = np.zeros((8, 6), np.float32)
        expected[2:4] = -x.T[1:3]
        expected[4:6] = -np.broadcast_to(y[:2, None], (2, 6))
        np.testing.assert_array_equal(got, expected)


def matmul(bench: Bench, a: Tensor, b: Tensor, blocks: tuple[int, int, int], monoid: str | None = "add") -> tuple:
    """A product with k split in partial results and a reduction of them: partials, product, and both steps."""
    (m, k) = a.shape
    n = b.shape[1]
    mul = make_codelet(lambda a, b: a @ b, "in a", "in b", "out p")
    axes = [split_axis("m", m, blocks[0]), split_axis("n", n, blocks[1]), split_axis("k", k, blocks[2], "reduce")]
    partials = bench.variable(axes[2].blocks, m, n, monoid=monoid)
    c = bench.variable(m, n)
    first = bench.vertices(
        mul,
        axes,
        [
            Access(a, (element(0), element(2))),
            Access(b, (element(2), element(1))),
            Access(partials, (block(2), element(0), element(1))),
        ],
    )
    add = make_codelet(lambda p: jnp.sum(p, axis=0), "in p", "out c")
    second = bench.vertices(
        add,
        [split_axis("s", axes[2].blocks, 1, "reduce"), split_axis("m", m, 3), split_axis("n", n, 2)],
        [Access(partials, (element(0), element(1), element(2))), Access(c, (element(1), element(2)))],
    )
    return partials, c, first, second


def test_matmul_with_partials_collapses_to_one_dot() -> None:
    bench = Bench()
    x = randn(12, 10)
    y = randn(10, 8, seed=1)
    partials, c, first, second = matmul(bench, bench.feed(x), bench.feed(y), (3, 2, 4))
    bench.program.add(first)
    bench.program.add(second)
    assert find_collapsible(bench.graph, bench.program) == set(partials.variables())
    actual = primitives(bench.function(c))
    assert actual["dot_general"] == 1
    assert not {"concatenate", "scatter", "dynamic_update_slice", "scan", "gather", "slice"} & set(actual)
    np.testing.assert_allclose(bench.run(c)[0], x @ y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(bench.run(c, exact_splits=True)[0], x @ y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exact_splits", [False, True])
def test_partials_whose_slots_are_kept_in_another_order_collapse(exact_splits: bool) -> None:
    """As channels in groups: the slots are those of the variable, their elements are not in its order."""
    bench = Bench()
    x = randn(12, 8)
    a = bench.feed(x)
    slots = bench.variable(4, 2, 3, monoid="add")
    y = bench.variable(3, 2)
    p = slots.transpose((0, 2, 1))
    columns = bench.variable(3, 2, 12)
    bench.program.add(Copy(a[:, :6].reshape((12, 3, 2)).transpose((1, 2, 0)), columns))
    axes = [split_axis("c", 3, 3), split_axis("d", 2, 1), split_axis("k", 12, 4, "reduce")]
    accesses = [Access(columns, (element(0), element(1), element(2))), Access(p, (block(2), element(0), element(1)))]
    bench.program.add(bench.vertices(make_codelet(lambda x: x.sum(-1), "in x", "out p"), axes, accesses))
    axes = [split_axis("s", 4, 1, "reduce"), split_axis("c", 3, 1), split_axis("d", 2, 1)]
    accesses = [Access(p, (element(0), element(1), element(2))), Access(y, (element(1), element(2)))]
    bench.program.add(bench.vertices(make_codelet(lambda p: p.sum(0), "in p", "out y"), axes, accesses))
    assert find_collapsible(bench.graph, bench.program) == set(slots.variables())
    got = bench.run(y, exact_splits=exact_splits)[0]
    np.testing.assert_allclose(got, x[:, :6].sum(0).reshape(3, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recorded", ["part of each slot", "slots across", "slots backwards", "elements repeated"])
def test_partials_without_all_elements_of_each_slot_stay(recorded: str) -> None:
    bench = Bench()
    x = randn(4, 4, 12)
    a = bench.feed(x)
    slots = bench.variable(4, 4, 4, monoid="add")
    views = {
        "part of each slot": slots[:, :3],
        "slots across": slots.transpose((1, 0, 2)),
        "slots backwards": slots[::-1],
        "elements repeated": slots[:, :1].broadcast_in_dim((4, 4, 4), (0, 1, 2)),
    }
    p = views[recorded]
    rows = views[recorded].shape[1]
    y = bench.variable(rows, 4)
    write = slots if recorded == "elements repeated" else p
    axes = [split_axis("c", rows, 1), split_axis("d", 4, 1), split_axis("k", 12, 4, "reduce")]
    given = a[:rows] if write is p else a
    axes = axes if write is p else [split_axis("c", 4, 1), *axes[1:]]
    accesses = [Access(given, (element(0), element(1), element(2))), Access(write, (block(2), element(0), element(1)))]
    bench.program.add(bench.vertices(make_codelet(lambda x: x.sum(-1), "in x", "out p"), axes, accesses))
    axes = [split_axis("s", 4, 1, "reduce"), split_axis("c", rows, 1), split_axis("d", 4, 1)]
    accesses = [Access(p, (element(0), element(1), element(2))), Access(y, (element(1), element(2)))]
    bench.program.add(bench.vertices(make_codelet(lambda p: p.sum(0), "in p", "out y"), axes, accesses))
    assert not find_collapsible(bench.graph, bench.program)
    total = x.sum(-1)
    expected = np.broadcast_to(total[:1], (4, 4)) if recorded == "elements repeated" else total[:rows]
    np.testing.assert_allclose(bench.run(y)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("blocks", [(3, 2, 5), (1, 1, 4), (5, 3, 3)])
def test_matmul_kinds_are_true(blocks: tuple[int, int, int]) -> None:
    bench = Bench()
    x = randn(12, 10)
    y = randn(10, 8, seed=1)
    a = bench.feed(x)
    b = bench.feed(y)
    _, _, first, _ = matmul(bench, a, b, blocks)
    (group,) = bench.graph.groups[first.compute_set]
    check_kinds(group, {a.variables()[0]: x, b.variables()[0]: y}, 1e-5)


def test_false_kinds_are_caught() -> None:
    bench = Bench()
    x = randn(12)
    a = bench.feed(x)
    c = bench.variable(12)
    execute = bench.elementwise(lambda a: a - jnp.max(a), [a], c, blocks=3)
    (group,) = bench.graph.groups[execute.compute_set]
    with pytest.raises(AssertionError):
        check_kinds(group, {a.variables()[0]: x})


def test_a_copy_of_the_partials_keeps_them_whole() -> None:
    bench = Bench()
    x = randn(6, 10)
    y = randn(10, 5, seed=1)
    partials, c, first, second = matmul(bench, bench.feed(x), bench.feed(y), (1, 1, 4))
    recorded = bench.variable(*partials.shape)
    for step in (first, second, Copy(partials, recorded)):
        bench.program.add(step)
    assert not find_collapsible(bench.graph, bench.program)
    got, product = bench.run(recorded, c)
    cuts = even_cuts(10, 4)
    expected = np.stack([x[:, i:j] @ y[i:j] for i, j in pairwise(cuts)])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(product, x @ y, rtol=1e-5, atol=1e-5)


def test_partials_without_monoid_stay_whole() -> None:
    bench = Bench()
    x = randn(6, 8)
    y = randn(8, 5, seed=1)
    _, c, first, second = matmul(bench, bench.feed(x), bench.feed(y), (2, 1, 4), monoid=None)
    bench.program.add(first)
    bench.program.add(second)
    assert not find_collapsible(bench.graph, bench.program)
    assert "dot_general" in primitives(bench.function(c))
    np.testing.assert_allclose(bench.run(c)[0], x @ y, rtol=1e-5, atol=1e-5)


def argmax(bench: Bench, x: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor, Execute, Execute]:
    """Index of the maximum: partial values and indices, then their reduction."""

    def first(x: jax.Array, origins: tuple) -> tuple[jax.Array, jax.Array]:
        return jnp.max(x), jnp.argmax(x).astype(jnp.int32) + jnp.int32(origins[0])

    (n,) = x.shape
    values = bench.variable(blocks, monoid="argmax")
    indices = bench.variable(blocks, dtype=np.int32, monoid="argmax")
    result = bench.variable(dtype=np.int32)
    stage1 = bench.vertices(
        make_codelet(first, "in x", "out v", "out i int32", takes=("origins",)),
        [split_axis("n", n, blocks, "reduce")],
        [Access(x, (element(0),)), Access(values, (block(0),)), Access(indices, (block(0),))],
        origins=("n",),
    )
    stage2 = bench.vertices(
        make_codelet(lambda v, i: i[jnp.argmax(v)], "in v", "in i int32", "out y int32"),
        [split_axis("s", blocks, 1, "reduce")],
        [Access(values, (element(0),)), Access(indices, (element(0),)), Access(result, ())],
    )
    return values, indices, result, stage1, stage2


@pytest.mark.parametrize("exact_splits", [False, True])
def test_two_partial_results_collapse_together(exact_splits: bool) -> None:
    bench = Bench()
    x = randn(50)
    values, indices, result, *steps = argmax(bench, bench.feed(x), 7)
    for step in steps:
        bench.program.add(step)
    assert find_collapsible(bench.graph, bench.program) == {*values.variables(), *indices.variables()}
    assert bench.run(result, exact_splits=exact_splits)[0] == np.argmax(x)


def test_partial_results_stay_whole_together() -> None:
    bench = Bench()
    x = randn(50)
    values, _, result, *steps = argmax(bench, bench.feed(x), 7)
    for step in (*steps, StreamOut(values, HostStream("seen", values.shape, values.dtype))):
        bench.program.add(step)
    assert not find_collapsible(bench.graph, bench.program)
    assert bench.run(result)[0] == np.argmax(x)


@pytest.mark.parametrize("recorded", [False, True])
def test_partial_results_in_two_stages(recorded: bool) -> None:
    bench = Bench()
    x = randn(60, 3)
    a = bench.feed(x)
    y = bench.variable(3)
    p = bench.variable(12, 3, monoid="add")
    q = bench.variable(4, 3, monoid="add")
    add = make_codelet(lambda x: jnp.sum(x, axis=0), "in x", "out y")
    for source, target, extent, blocks in ((a, p, 60, 12), (p, q, 12, 4)):
        axes = [split_axis("r", extent, blocks, "reduce"), split_axis("i", 3, 1)]
        accesses = [Access(source, (element(0), element(1))), Access(target, (block(0), element(1)))]
        bench.program.add(bench.vertices(add, axes, accesses))
    axes = [split_axis("r", 4, 1, "reduce"), split_axis("i", 3, 1)]
    accesses = [Access(q, (element(0), element(1))), Access(y, (element(1),))]
    bench.program.add(bench.vertices(add, axes, accesses))
    if recorded:
        bench.program.add(Copy(q, bench.variable(4, 3)))
    assert find_collapsible(bench.graph, bench.program) == (set() if recorded else {*p.variables(), *q.variables()})
    for exact_splits in (False, True):
        np.testing.assert_allclose(bench.run(y, exact_splits=exact_splits)[0], x.sum(0), rtol=1e-5, atol=1e-5)


def test_a_reader_with_another_operand_by_slot_keeps_them_whole() -> None:
    bench = Bench()
    x = randn(20)
    w = randn(4, seed=1)
    a = bench.feed(x)
    weights = bench.feed(w)
    p = bench.variable(4, monoid="add")
    y = bench.variable()
    total = make_codelet(lambda x: jnp.sum(x), "in x", "out y")
    dot = make_codelet(lambda p, w: jnp.sum(p * w), "in p", "in w", "out y")
    axes = [split_axis("r", 20, 4, "reduce")]
    bench.program.add(bench.vertices(total, axes, [Access(a, (element(0),)), Access(p, (block(0),))]))
    axes = [split_axis("s", 4, 1, "reduce")]
    accesses = [Access(p, (element(0),)), Access(weights, (element(0),)), Access(y, ())]
    bench.program.add(bench.vertices(dot, axes, accesses))
    assert not find_collapsible(bench.graph, bench.program)
    np.testing.assert_allclose(bench.run(y)[0], x.reshape(4, 5).sum(1) @ w, rtol=1e-5)


def test_partials_indexed_by_blocks_twice_stay_whole() -> None:
    bench = Bench()
    x = randn(6, 8)
    a = bench.feed(x)
    p = bench.variable(4, 3, monoid="add")
    y = bench.variable(3)
    axes = [split_axis("i", 6, 3, "reduce"), split_axis("k", 8, 4, "reduce")]
    accesses = [Access(a, (element(0), element(1))), Access(p, (block(1), block(0)))]
    bench.program.add(bench.vertices(make_codelet(jnp.sum, "in x", "out p"), axes, accesses))
    axes = [split_axis("s", 4, 1, "reduce"), split_axis("i", 3, 1)]
    accesses = [Access(p, (element(0), element(1))), Access(y, (element(1),))]
    bench.program.add(bench.vertices(make_codelet(lambda p: jnp.sum(p, axis=0), "in p", "out y"), axes, accesses))
    assert not find_collapsible(bench.graph, bench.program)
    np.testing.assert_allclose(bench.run(y)[0], x.reshape(3, 16).sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exact_splits", [False, True])
def test_partials_of_two_axes_collapse(exact_splits: bool) -> None:
    bench = Bench()
    x = randn(6, 8)
    a = bench.feed(x)
    p = bench.variable(12, monoid="add")
    y = bench.variable()
    axes = [split_axis("i", 6, 3, "reduce"), split_axis("k", 8, 4, "reduce")]
    slot = Dim((Term(0, 4, "block"), Term(1, 1, "block")))
    accesses = [Access(a, (element(0), element(1))), Access(p, (slot,))]
    bench.program.add(bench.vertices(make_codelet(jnp.sum, "in x", "out p"), axes, accesses))
    axes = [split_axis("s", 12, 1, "reduce")]
    accesses = [Access(p, (element(0),)), Access(y, ())]
    bench.program.add(bench.vertices(make_codelet(jnp.sum, "in p", "out y"), axes, accesses))
    assert find_collapsible(bench.graph, bench.program) == set(p.variables())
    np.testing.assert_allclose(bench.run(y, exact_splits=exact_splits)[0], x.sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stride, dilation, pad", [(1, 1, 1), (2, 1, 0), (1, 2, 2), (3, 2, 4)])
@pytest.mark.parametrize("takes_pads", [False, True])
def test_convolution_with_halo(stride: int, dilation: int, pad: int, takes_pads: bool) -> None:
    def compute(x: jax.Array, w: jax.Array, pads: Any = None) -> jax.Array:
        padding = [pads[0][1] if pads else (0, 0)]
        y = lax.conv_general_dilated(
            x[None], w, (stride,), padding, rhs_dilation=(dilation,), dimension_numbers=("NCH", "OIH", "NCH")
        )
        return y[0]

    bench = Bench()
    x = randn(3, 17)
    w = randn(4, 3, 3, seed=1)
    expected = lax.conv_general_dilated(x[None], w, (stride,), [(pad, pad)], rhs_dilation=(dilation,))[0]
    a = bench.feed(x)
    b = bench.feed(w)
    y = bench.variable(*expected.shape)
    names = ["o", "x", "c", "k"]
    axes = [split_axis(n, e, s) for n, e, s in zip(names, (4, expected.shape[1], 3, 3), (2, 4, 1, 1), strict=True)]
    position = Dim((Term(1, stride), Term(3, dilation)), -pad)
    execute = bench.vertices(
        make_codelet(compute, "in x", "in w", "out y", takes=("pads",) if takes_pads else ()),
        axes,
        [
            Access(a, (element(2), position), fill=0.0),
            Access(b, (element(0), element(2), element(3))),
            Access(y, (element(0), element(1))),
        ],
    )
    bench.program.add(execute)
    np.testing.assert_allclose(bench.run(y)[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(bench.run(y, exact_splits=True)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fill", [0.0, -np.inf])
def test_dilated_reads_see_fill_between(fill: float) -> None:
    bench = Bench()
    x = randn(5)
    a = bench.feed(x)
    y = bench.variable(14)
    execute = bench.vertices(
        make_codelet(lambda x: x, "in x", "out y"),
        [split_axis("i", 14, 4)],
        [Access(a, (Dim((Term(0),), -2, 3),), fill=fill), Access(y, (element(0),))],
    )
    bench.program.add(execute)
    expected = np.full(14, fill, np.float32)
    expected[2::3] = x[:4]
    for exact_splits in (False, True):
        np.testing.assert_array_equal(bench.run(y, exact_splits=exact_splits)[0], expected)


@given(st.data())
@settings(max_examples=10)
def test_strided_offset_dilated_reads(data: st.DataObject) -> None:
    """Every index of the hull reads its element, or fill; split and unsplit, against plain Python."""
    n = data.draw(st.integers(1, 9))
    size = data.draw(st.integers(0, 9))
    coeff = data.draw(st.integers(-3, 3).filter(bool))
    divisor = data.draw(st.integers(1, 3))
    offset = data.draw(st.integers(-9, 30))
    blocks = data.draw(st.integers(1, 4))
    x = np.arange(1, size + 1, dtype=np.float32)
    bench = Bench()
    a = bench.feed(x)
    y = bench.variable(n)

    def compute(x: jax.Array) -> jax.Array:
        return x[:: abs(coeff)] if coeff > 0 else x[::-1][:: abs(coeff)]

    access = Access(a, (Dim((Term(0, coeff),), offset, divisor),), fill=0.0)
    execute = bench.vertices(
        make_codelet(compute, "in x", "out y"), [split_axis("i", n, blocks)], [access, Access(y, (element(0),))]
    )
    bench.program.add(execute)
    where = [coeff * i + offset for i in range(n)]
    expected = [x[i // divisor] if i % divisor == 0 and 0 <= i // divisor < size else 0 for i in where]
    for exact_splits in (False, True):
        with jax.disable_jit():
            got = bench.function(y, exact_splits=exact_splits)()[0]
        np.testing.assert_array_equal(got, expected)


def test_literal_axis_keeps_its_split() -> None:
    bench = Bench()
    x = randn(12, 3)
    a = bench.feed(x)
    y = bench.variable(12, 3)
    execute = bench.vertices(
        make_codelet(lambda x: jnp.cumsum(x, axis=0), "in x", "out y"),
        [split_axis("i", 12, 5, "literal"), split_axis("j", 3, 3)],
        [Access(a, (element(0), element(1))), Access(y, (element(0), element(1)))],
    )
    bench.program.add(execute)
    cuts = even_cuts(12, 5)
    expected = np.concatenate([np.cumsum(x[i:j], axis=0) for i, j in pairwise(cuts)])
    np.testing.assert_allclose(bench.run(y)[0], expected, rtol=1e-5)


def test_origins_and_shapes_of_vertices() -> None:
    def compute(origins: tuple, shapes: tuple) -> jax.Array:
        column, row = origins
        return lax.broadcasted_iota(jnp.int32, shapes[0], 0) + 100 * row + 10 * column

    for kind, exact_splits in (("literal", False), ("map", False), ("map", True)):
        bench = Bench()
        y = bench.variable(6, 4, dtype=np.int32)
        codelet = make_codelet(compute, "out y", dtype=np.int32, takes=("origins", "shapes"))
        axes = [split_axis("row", 6, 3, kind), split_axis("column", 4, 2, kind)]
        access = Access(y, (element(0), element(1)))
        bench.program.add(bench.vertices(codelet, axes, [access], origins=("column", "row")))
        expected = np.zeros((6, 4), np.int32)
        step = (6, 4) if kind == "map" and not exact_splits else (2, 2)
        for i in range(0, 6, step[0]):
            for j in range(0, 4, step[1]):
                expected[i : i + step[0], j : j + step[1]] = np.arange(step[0])[:, None] + 100 * i + 10 * j
        np.testing.assert_array_equal(bench.run(y, exact_splits=exact_splits)[0], expected)


def test_blocks_without_a_vertex_are_left_alone() -> None:
    bench = Bench()
    x = randn(8, 8)
    z = randn(8, 8, seed=1)
    a = bench.feed(x)
    y = bench.feed(z)
    tile = np.where(np.tri(4, dtype=bool), 0, NO_TILE)
    axes = [split_axis("i", 8, 4), split_axis("j", 8, 4)]
    accesses = [Access(t, (element(0), element(1))) for t in (a, y)]
    bench.program.add(bench.vertices(make_codelet(lambda x: 2 * x, "in x", "out y"), axes, accesses, tile))
    mask = np.kron(np.tri(4), np.ones((2, 2))) > 0
    np.testing.assert_array_equal(bench.run(y)[0], np.where(mask, 2 * x, z))


def test_groups_of_a_compute_set_read_the_values_before_it() -> None:
    bench = Bench()
    x = randn(6)
    y = randn(6, seed=1)
    a = bench.feed(x)
    b = bench.feed(y)
    swap = bench.elementwise(lambda v: v, [a], b)
    back = bench.elementwise(lambda v: v, [b], a)
    bench.graph.groups[swap.compute_set] += bench.graph.groups[back.compute_set]
    bench.program.add(swap)
    got = bench.run(a, b)
    np.testing.assert_array_equal(got[0], y)
    np.testing.assert_array_equal(got[1], x)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("exact_splits", [False, True])
def test_nothing_to_compute(shape: tuple[int, ...], exact_splits: bool) -> None:
    bench = Bench()
    a = bench.feed(np.zeros(shape, np.float32))
    y = bench.variable(*shape)
    bench.program.add(bench.elementwise(jnp.sin, [a], y))
    assert bench.run(y, exact_splits=exact_splits)[0].shape == shape


def test_scalars_and_constants() -> None:
    bench = Bench()
    a = bench.feed(np.float32(3))
    c = bench.graph.add_constant(np.float32(4))
    y = bench.variable()
    bench.program.add(bench.elementwise(lambda a, c: a * c, [a, c], y))
    assert bench.run(y)[0] == 12


@pytest.mark.parametrize("exact_splits", [False, True])
def test_random_keys(exact_splits: bool) -> None:
    keys = jax.random.split(jax.random.key(3), 6)
    bench = Bench()
    a = bench.feed(keys)
    k = bench.variable(6, dtype=keys.dtype)
    y = bench.variable(6, 2)
    split = Codelet("split", (Field("k", "inout", keys.dtype),), jax.vmap(lambda k: jax.random.split(k)[1]), no_cycles)
    draw = Codelet(
        "draw",
        (Field("k", "in", keys.dtype), Field("y", "out", np.dtype(np.float32))),
        jax.vmap(lambda k: jax.random.normal(k, (2,))),
        no_cycles,
    )
    axes = [split_axis("i", 6, 3), split_axis("j", 2, 1)]
    next_keys = bench.vertices(split, axes[:1], [Access(k, (element(0),))])
    numbers = bench.vertices(draw, axes, [Access(k, (element(0),)), Access(y, (element(0), element(1)))])
    for step in (Copy(a, k), Repeat(3, next_keys), numbers):
        bench.program.add(step)
    for _ in range(3):
        keys = jax.vmap(lambda k: jax.random.split(k)[1])(keys)
    expected = jax.vmap(lambda k: jax.random.normal(k, (2,)))(keys)
    np.testing.assert_allclose(bench.run(y, exact_splits=exact_splits)[0], expected, rtol=1e-6)


# --- control flow -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_repeat(count: int) -> None:
    bench = Bench()
    x = randn(5)
    a = bench.feed(x)
    b = bench.feed(np.zeros(5, np.float32))
    total = bench.feed(np.zeros(5, np.float32))
    body = Sequence(
        bench.elementwise(lambda a: a + 1, [a], b), bench.elementwise(jnp.add, [total, b], total), Copy(b, a)
    )
    bench.program.add(Repeat(count, body))
    expected = np.zeros(5, np.float32)
    running = x.copy()
    last = np.zeros(5, np.float32)
    for _ in range(count):
        last = running = running + 1
        expected = expected + running
    for tensor, value in zip(bench.run(a, b, total), (running, last, expected), strict=True):
        np.testing.assert_allclose(tensor, value, rtol=1e-6)


def test_temporaries_are_not_carried() -> None:
    bench = Bench()
    a = bench.feed(randn(5))
    b = bench.variable(5)
    c = bench.variable(5)
    unused = bench.variable(5)
    steps = [bench.elementwise(jnp.sin, [s], t) for s, t in ((a, b), (b, c), (c, a), (a, unused))]
    bench.program.add(Repeat(3, Sequence(*steps)))
    jaxpr = jax.make_jaxpr(bench.function(a))()
    (scan,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    assert scan.params["num_carry"] == 1


def increment(bench: Bench, counter: Tensor) -> Execute:
    return bench.elementwise(lambda i: i + 1, [counter], counter)


def buffer_loop(depth: int, width: int, count: int) -> tuple[Bench, Tensor]:
    """A loop that writes a slot of a buffer, then reads another slot of it, at addresses that are data."""
    bench = Bench()
    i = bench.feed(np.int32(0))
    x = bench.feed(np.zeros(width, np.float32))
    buffer = bench.feed(np.zeros((depth, width), np.float32))
    row = [element(0), element(1)]
    axes = [split_axis("slot", depth, 1), split_axis("x", width, 4)]
    put = make_codelet(
        lambda b, x, i: lax.dynamic_update_slice(b, x[None] + i.astype(jnp.float32), (i % depth, 0)),
        "inout b", "in x", "in i int32",
    )  # fmt: skip
    get = make_codelet(
        lambda b, i: lax.dynamic_index_in_dim(b, (i * 7) % depth, keepdims=False), "in b", "in i int32", "out x"
    )
    body = Sequence(
        bench.vertices(put, axes, [Access(buffer, tuple(row)), Access(x, (element(1),)), Access(i, ())]),
        bench.vertices(get, axes, [Access(buffer, tuple(row)), Access(i, ()), Access(x, (element(1),))]),
        increment(bench, i),
    )
    bench.program.add(Repeat(count, body))
    return bench, x


def test_buffer_updated_in_a_loop() -> None:
    bench, x = buffer_loop(5, 8, 11)
    buffer = np.zeros((5, 8), np.float32)
    value = np.zeros(8, np.float32)
    for i in range(11):
        buffer[i % 5] = value + i
        value = buffer[(i * 7) % 5].copy()
    np.testing.assert_array_equal(bench.run(x)[0], value)


def test_buffer_is_updated_in_place() -> None:
    """In the compiled loop nothing copies the buffer, and nothing but an update makes a new one."""
    bench, x = buffer_loop(64, 1024, 100)
    text = jax.jit(bench.function(x)).lower().compile().as_text()
    makes = re.compile(r"^\s*(?:ROOT )?%\S+ = f32\[64,1024\]\S* ([\w-]+)\(", re.MULTILINE)
    computations = {match[1]: match[0] for match in re.finditer(r"^%(\S+) \(.*?^}", text, re.MULTILINE | re.DOTALL)}
    (body,) = re.findall(r"while\(.*body=%([\w.-]+)", text)
    assert Counter(makes.findall(computations[body])) == {"get-tuple-element": 1, "fusion": 1}
    (fused,) = re.findall(r"= f32\[64,1024\]\S* fusion\(.*calls=%([\w.-]+)", computations[body])
    assert set(makes.findall(computations[fused])) == {"parameter", "dynamic-update-slice"}


def test_nested_loops_and_functions() -> None:
    bench = Bench()
    i = bench.feed(np.int32(0))
    total = bench.feed(np.int32(0))
    add = Function(Sequence(bench.elementwise(jnp.add, [total, i], total)), "add")
    inner = Repeat(3, Sequence(Call(add), increment(bench, i)))
    bench.program.add(Repeat(4, Sequence(inner, Call(add))))
    got = bench.run(i, total)
    number = expected = 0
    for _ in range(4):
        for _ in range(3):
            expected += number
            number += 1
        expected += number
    assert (got[0], got[1]) == (number, expected)


@pytest.mark.parametrize("is_remote", [True, False])
def test_functions_called_around_loops_receive_data(is_remote: bool) -> None:
    bench = Bench()
    x = bench.feed(np.float32([1, 2]))
    total = bench.feed(np.float32([0, 0]))
    received = bench.variable(2)
    if is_remote:
        buffer = RemoteBuffer.of("far", np.float32, 2, 1)
        bench.program.add(RemoteOut(x.reshape((1, 2)), buffer))
        receive: Program = RemoteIn(buffer, received.reshape((1, 2)))
    else:
        stream = HostStream("row", (2,), np.dtype(np.float32))
        bench.inputs[stream] = np.float32([1, 2])
        receive = StreamIn(stream, received)
    add = Function(Sequence(receive, bench.elementwise(jnp.add, [total, received], total, 1)), "add")
    bench.program.add(Repeat(3, Call(add)))
    bench.program.add(Call(add))
    (got,) = bench.run(total)
    np.testing.assert_array_equal(got, [4, 8])


@pytest.mark.parametrize("limit", [-1, 0, 1, 9])
def test_repeat_while(limit: int) -> None:
    bench = Bench()
    i = bench.feed(np.int32(0))
    top = bench.feed(np.int32(limit))
    double = bench.variable(dtype=np.int32)
    goes_on = bench.variable(dtype=np.bool_)
    recorded = bench.feed(np.int32(-5))
    condition = Sequence(
        bench.elementwise(lambda i: 2 * i, [i], double),
        bench.elementwise(jnp.less, [double, top], goes_on),
    )
    body = Sequence(increment(bench, i), Copy(double, recorded))
    bench.program.add(RepeatWhile(condition, goes_on, body))
    number, last = 0, -5
    while 2 * number < limit:
        last = 2 * number
        number = number + 1
    assert [int(v) for v in bench.run(i, double, recorded)] == [number, 2 * number, last]
    assert bench.run(recorded)[0] == last  # the counter is carried though nothing after the loop reads it


@pytest.mark.parametrize("predicate", [False, True])
def test_if_writes_only_variables_that_a_branch_writes(predicate: bool) -> None:
    bench = Bench()
    x = randn(4)
    y = randn(4, seed=1)
    z = randn(4, seed=2)
    p = bench.feed(np.bool_(predicate))
    a = bench.feed(x)
    b = bench.feed(y)
    c = bench.feed(z)
    then = Sequence(bench.elementwise(jnp.negative, [a], b), bench.elementwise(jnp.sin, [b], c))
    bench.program.add(If(p, then, bench.elementwise(jnp.negative, [b], a)))
    got = bench.run(a, b, c)
    expected = (x, -x, np.sin(-x)) if predicate else (-y, y, z)
    for value, reference in zip(got, expected, strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-6)


def test_branches_return_only_live_variables() -> None:
    bench = Bench()
    p = bench.feed(np.bool_(True))
    a = bench.feed(randn(4))
    b = bench.variable(4)
    c = bench.variable(4)
    then = Sequence(bench.elementwise(jnp.sin, [a], b), bench.elementwise(jnp.sin, [b], c))
    bench.program.add(If(p, then, bench.elementwise(jnp.cos, [a], c)))
    bench.program.add(Copy(c, b))  # what the branch wrote to b dies here
    bench.program.add(Copy(b, c))
    jaxpr = jax.make_jaxpr(bench.function(c))()
    (cond,) = [equation for equation in jaxpr.eqns if equation.primitive.name == "cond"]
    assert len(cond.outvars) == 1


@pytest.mark.parametrize("selector", [-3, -1, 0, 1, 2, 3, 70])
def test_switch(selector: int) -> None:
    bench = Bench()
    s = bench.feed(np.int32(selector))
    y = bench.feed(np.int32(-1))
    cases = tuple(
        Copy(bench.graph.add_constant(np.int32(value)), y) if value else Sequence() for value in (10, 0, 30, 99)
    )
    bench.program.add(Switch(s, cases[:-1], cases[-1]))
    assert bench.run(y)[0] == {0: 10, 1: -1, 2: 30}.get(selector, 99)


def test_switch_without_cases() -> None:
    bench = Bench()
    s = bench.feed(np.int32(0))
    y = bench.feed(np.int32(-1))
    bench.program.add(Switch(s, (), Copy(bench.graph.add_constant(np.int32(5)), y)))
    assert bench.run(y)[0] == 5


class RandomProgram:
    """A program over a few vectors, and a Python function that does the same to numpy arrays, drawn together."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw
        self.bench = Bench()
        self.names = range(4)
        self.start = {n: np.arange(3, dtype=np.int32) + n for n in self.names}
        self.tensors = [self.bench.feed(value) for value in self.start.values()]

    def one(self) -> int:
        return self.draw(st.sampled_from(self.names))

    def scalar(self, compute: Callable[..., Any], source: int, dtype: Any) -> tuple[Tensor, Execute]:
        """A scalar computed from the first element of a vector, and the step that does it."""
        scalar = self.bench.variable(dtype=dtype)
        return scalar, self.bench.elementwise(compute, [self.tensors[source][0]], scalar)

    def program(self, depth: int) -> tuple[Program, Callable[[dict], None]]:
        leaves = [self.add, self.copy, self.copy_part]
        inner = [self.sequence, self.repeat, self.loop, self.branch]
        make = self.draw(st.sampled_from(leaves if not depth else inner + leaves[:1]))
        return make() if make in leaves else make(depth - 1)

    def add(self) -> tuple[Program, Callable[[dict], None]]:
        a = self.one()
        b = self.one()
        c = self.one()
        t = self.tensors

        def run(values: dict) -> None:
            values[c] = (values[a] + 2 * values[b]) % 17

        return self.bench.elementwise(lambda a, b: (a + 2 * b) % 17, [t[a], t[b]], t[c], blocks=2), run

    def copy(self) -> tuple[Program, Callable[[dict], None]]:
        a = self.one()
        b = self.one()
        return Copy(self.tensors[a], self.tensors[b]), lambda values: values.update({b: values[a].copy()})

    def copy_part(self) -> tuple[Program, Callable[[dict], None]]:
        a = self.one()
        b = self.one()
        i = self.draw(st.integers(0, 2))

        def run(values: dict) -> None:
            values[b] = values[b].copy()
            values[b][i] = values[a][0]

        return Copy(self.tensors[a][:1], self.tensors[b][i : i + 1]), run

    def sequence(self, depth: int) -> tuple[Program, Callable[[dict], None]]:
        parts = [self.program(depth) for _ in range(self.draw(st.integers(0, 4)))]

        def run(values: dict) -> None:
            for _, part in parts:
                part(values)

        sequence = Sequence(*(program for program, _ in parts))
        return Call(Function(sequence)) if self.draw(st.booleans()) else sequence, run

    def repeat(self, depth: int) -> tuple[Program, Callable[[dict], None]]:
        count = self.draw(st.integers(0, 3))
        (body, part) = self.sequence(depth)

        def run(values: dict) -> None:
            for _ in range(count):
                part(values)

        return Repeat(count, body), run

    def loop(self, depth: int) -> tuple[Program, Callable[[dict], None]]:
        """At most three times, while the first element of some vector is even."""
        source = self.one()
        (first, condition) = self.sequence(depth)
        (then, body) = self.sequence(depth)
        counter, even, both = (self.bench.variable(dtype=d) for d in (np.int32, np.bool_, np.bool_))
        even, test = self.scalar(lambda x: x % 2 == 0, source, np.bool_)
        limit = self.bench.elementwise(lambda even, n: even & (n < 3), [even, counter], both)
        zero = Copy(self.bench.graph.add_constant(np.int32(0)), counter)

        def run(values: dict) -> None:
            condition(values)
            number = 0
            while values[source][0] % 2 == 0 and number < 3:
                body(values)
                number += 1
                condition(values)

        loop = RepeatWhile(Sequence(first, test, limit), both, Sequence(then, increment(self.bench, counter)))
        return Sequence(zero, loop), run

    def branch(self, depth: int) -> tuple[Program, Callable[[dict], None]]:
        """An If or a Switch on the first element of some vector."""
        source = self.one()
        parts = [self.sequence(depth) for _ in range(self.draw(st.integers(2, 3)))]
        programs = [program for program, _ in parts]
        n = len(parts) - 1

        def run(values: dict) -> None:
            first = int(values[source][0]) % 5 - 1
            parts[first if 0 <= first < n else n][1](values)

        selector, step = self.scalar(lambda x: x % 5 - 1, source, np.int32)
        if n > 1:
            return Sequence(step, Switch(selector, tuple(programs[:-1]), programs[-1])), run
        predicate, step = self.scalar(lambda x: x % 5 == 1, source, np.bool_)
        return Sequence(step, If(predicate, *programs)), run


@given(st.data())
@settings(max_examples=4)
def test_random_programs(data: st.DataObject) -> None:
    random = RandomProgram(data)
    program, run = random.sequence(3)
    random.bench.program.add(program)
    expected = dict(random.start)
    run(expected)
    outputs = data.draw(st.lists(st.sampled_from(random.names), min_size=1, unique=True))
    function = random.bench.function(*(random.tensors[n] for n in outputs), exact_splits=data.draw(st.booleans()))
    jax.make_jaxpr(function)()  # checks the types of all loop states and branches, at a hundredth of compiling
    with jax.disable_jit():
        got = function()
    for value, name in zip(got, outputs, strict=True):
        np.testing.assert_array_equal(value, expected[name])


def test_partials_collapse_inside_loops_and_branches() -> None:
    bench = Bench()
    x = randn(6, 6)
    y = randn(6, 6, seed=1) / 3
    a = bench.feed(x)
    b = bench.feed(y)
    p = bench.feed(np.bool_(True))
    _, c, first, second = matmul(bench, a, b, (1, 2, 3))
    bench.program.add(Repeat(3, If(p, Sequence(first, second, Copy(c, a)), Sequence())))
    assert len(find_collapsible(bench.graph, bench.program)) == 1
    np.testing.assert_allclose(bench.run(a)[0], x @ y @ y @ y, rtol=1e-4, atol=1e-4)


def test_streams_inside_control_flow_hold_the_last_value() -> None:
    bench = Bench()
    i = bench.feed(np.int32(0))
    once = HostStream("once", (), np.dtype(np.int32))
    never = HostStream("never", (), np.dtype(np.int32))
    bench.program.add(Repeat(4, Sequence(increment(bench, i), StreamOut(i, once))))
    bench.program.add(If(bench.graph.add_constant(np.bool_(False)), StreamOut(i, never), Sequence()))
    run = engine_function(bench.graph, bench.program)
    got = run(bench.inputs)
    assert (got[once], got[never]) == (4, 0)


def bad_inputs() -> list[tuple[str, Any]]:
    return [
        ("no value", None),
        ("the wrong shape or dtype", np.zeros(3, np.float32)),
        ("the wrong shape or dtype", np.zeros(4, np.int32)),
    ]


@pytest.mark.parametrize("message, value", bad_inputs())
def test_inputs_are_checked(message: str, value: Any) -> None:
    bench = Bench()
    bench.feed(randn(4))
    (stream,) = bench.inputs
    run = engine_function(bench.graph, bench.program)
    with pytest.raises(ArgumentError, match=message):
        run({} if value is None else {stream: value})


@pytest.mark.parametrize("result", [lambda x: x[:-1], lambda x: x.astype(jnp.int32), lambda x: (x, x)])
def test_refuses_codelets_with_other_results(result: Callable[..., Any]) -> None:
    bench = Bench()
    a = bench.feed(randn(4))
    y = bench.variable(4)
    bench.program.add(bench.elementwise(result, [a], y))
    with pytest.raises(AssertionError, match="test"):
        bench.run(y)


def test_a_read_outside_needs_a_fill() -> None:
    bench = Bench()
    a = bench.feed(randn(4))
    y = bench.variable(4)
    accesses = [Access(a, (element(0, offset=1),)), Access(y, (element(0),))]
    bench.program.add(bench.vertices(make_codelet(lambda x: x, "in x", "out y"), [split_axis("i", 4, 1)], accesses))
    with pytest.raises(AssertionError, match="no fill"):
        bench.run(y)
