"""Pass `fuse`: groups, numbers, and the lowering and cost of a group."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.extend.core import Primitive  # noqa: TID251 as a user adds one
from jax.interpreters import batching, mlir  # noqa: TID251

import ipujax as ipu
from ipujax.lowering.jax_compat import ClosedJaxpr, jaxpr_as_fun
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.offload.primitives import remote_rows_p, remote_update_p
from ipujax.lowering.passes import fuse, fuse_equations, fuser, outline, ready
from ipujax.lowering.passes.grouping import grouped
from ipujax.lowering.popops import OP_COSTS
from ipujax.lowering.popops.vertices.kernel_cycles import OpCount, kernel_cycles
from ipujax.runtime.target import preset
from tests.lowering.helpers import check, lowered, quick_jit, run_tiles, share_all, small_target

RNG = np.random.default_rng(3)
X, Y = (RNG.normal(size=(6, 10)).astype(np.float32) for _ in range(2))


def passed(fun: Any, *args: Any) -> ClosedJaxpr:
    """The jaxpr after all passes."""
    return ready(jax.make_jaxpr(fun)(*args))


def names(jaxpr: ClosedJaxpr) -> list[str]:
    """Primitives of a jaxpr, those inside of `fused` too."""
    return [eqn.primitive.name for eqn in equations(jaxpr.jaxpr)]


def groups(jaxpr: ClosedJaxpr) -> list[list[str]]:
    """Primitives of each group."""
    fused = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "fused"]
    return [[inner.primitive.name for inner in eqn.params["jaxpr"].eqns] for eqn in fused]


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.04 * x**3)))


def test_fuses_a_chain() -> None:
    jaxpr = passed(gelu, X)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["fused"]
    assert len(lowered(gelu, [X], small_target(7)).graph.groups) == 1
    check(gelu, X, tiles=(1, 7), rtol=1e-5, atol=1e-6)


def test_separates_equations_with_a_dependency_between() -> None:
    """A sum that reads one half and is read by the other is between them."""

    def fun(x: Any) -> Any:
        y = jnp.exp(x) + 1
        return y / y.sum() * 2

    assert groups(passed(fun, X)) == [["exp", "add", "reduce_sum"], ["div", "mul"]]
    check(fun, X, tiles=(1, 7), rtol=1e-5, atol=1e-6)


def test_fuses_across_dimensions_of_size_1() -> None:
    def fun(x: Any) -> Any:
        return jnp.sqrt(x.sum(1)[:, None] ** 2 + 1.0)[:, :, None] * 2

    assert [len([n for n in group if n != "broadcast_in_dim"]) for group in groups(passed(fun, X))] == [4]
    check(fun, X, tiles=(1, 7), rtol=1e-5, atol=1e-6)


def test_keeps_a_reshape_that_permutes() -> None:
    """One of a square array has the shape of its operand, and the elements in another order."""
    check(lambda x: lax.reshape(x * 2, (6, 6), dimensions=(1, 0)) + 1, X[:, :6], tiles=(1, 7))


def test_reads_rows_and_columns_once() -> None:
    def fun(x: Any, row: Any, column: Any) -> Any:
        return x * row + jnp.exp(x) * column[:, None]

    program = lowered(fun, [X, X[0], X[:, 0]], small_target(3))
    (vertices,) = next(iter(program.graph.groups.values()))
    ranks = sorted(access.tensor.ndim for access in vertices.accesses)
    assert ranks == [1, 1, 2, 2]
    check(fun, X, X[0], X[:, 0], tiles=(1, 7), rtol=1e-5, atol=1e-6)


def test_separates_places() -> None:
    """Places decide, not names of stages."""

    def fun(x: Any) -> Any:
        with ipu.stage(0):
            y = jnp.sin(x) * 2
        with ipu.stage(1):
            return jnp.cos(y) * 3

    jaxpr = passed(fun, X)
    assert "fused" not in names(jaxpr)  # it is cut first
    separate, joined = (fuse_equations(jaxpr.jaxpr, fuser(), places).jaxpr for places in ((0, 0, 1, 1), (1,) * 4))
    assert groups(ClosedJaxpr(separate, ())) == [["sin", "mul"], ["cos", "mul"]]
    assert groups(ClosedJaxpr(joined, ())) == [["sin", "mul", "cos", "mul"]]
    device = ipu.IPUModel(num_ipus=2)
    np.testing.assert_allclose(ipu.jit(fun, device=device)(X), fun(X), rtol=1e-5, atol=1e-6)


def test_fuses_inside_loops_branches_and_functions() -> None:
    def fun(x: Any) -> Any:
        x = jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c) * 2 + 1, x)
        return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x) * 2, lambda x: jnp.cos(x) * 3, x)

    assert ["tanh", "mul", "add"] in groups(passed(fun, X)) and ["sin", "mul"] in groups(passed(fun, X))
    check(fun, X, tiles=(1, 7), rtol=1e-5, atol=1e-6)


def test_fuses_an_operation_added_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of `OP_COSTS` is enough: alone the operation is split over tiles, in a chain it is fused."""
    softsign_p = Primitive("softsign")
    softsign_p.def_abstract_eval(lambda x: x)
    softsign_p.def_impl(lambda x: x / (1 + jnp.abs(x)))
    mlir.register_lowering(softsign_p, mlir.lower_fun(softsign_p.impl, multiple_results=False))
    batching.defvectorized(softsign_p)

    def chain(x: Any) -> Any:
        return jnp.tanh(softsign_p.bind(x)) * 2

    monkeypatch.setitem(OP_COSTS, "softsign", OP_COSTS["tanh"])
    assert groups(passed(chain, X)) == [["softsign", "tanh", "mul"]]
    check(chain, X, tiles=(1, 7), rtol=1e-6)
    assert not lowered(softsign_p.bind, [X], small_target(7)).graph.notes.fallbacks
    check(softsign_p.bind, X, tiles=(1, 7), rtol=1e-6)


def test_does_not_outline_fused_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vertex calls no function, even if the passes run in another order, as for parts of pipelines."""
    share_all(monkeypatch)
    fused = fuse(jax.make_jaxpr(lambda x: x * x * x * x * x)(X))
    assert groups(outline(fused)) == groups(fused) == [["mul"] * 4]


def test_keeps_the_order_of_effects(capfd: pytest.CaptureFixture[str]) -> None:
    def fun(x: Any) -> Any:
        a = x + 1
        jax.debug.print("first {}", a[0, 0])
        b = a * 2
        jax.debug.print("second {}", b[0, 0])
        return b - a

    ipu.jit(fun)(np.zeros((2, 2), np.float32)).block_until_ready()
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["first", "1.0", "second", "2.0"]


def test_results_that_are_operands_and_constants() -> None:
    def fun(x: Any) -> Any:
        return x * 1 + 0, jnp.full_like(x, 2.0) * 3, (x + 0.5) * 1

    check(fun, X, tiles=(1, 7), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_rounds_every_equation_to_its_dtype(dtype: Any) -> None:
    """On the tiles a group gives the bits of its equations, compiled as strictly as XLA does."""
    x = X.astype(dtype)

    def fun(x: Any) -> Any:
        return ((x * 1.1 + x) * 0.77 - x * x) + x

    # Not one by one: on CPUs with arithmetic in halves XLA contracts a product and a sum, which then round once.
    strictly = {"xla_allow_excess_precision": False}
    (fused,) = jax.jit(jaxpr_as_fun(passed(fun, x)), compiler_options=strictly)(x)
    stepwise = jax.jit(fun, compiler_options=strictly)(x)
    np.testing.assert_array_equal(np.asarray(fused, np.float32), np.asarray(stepwise, np.float32))
    (out,) = run_tiles(lowered(fun, [x], small_target(5)), [x])
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(stepwise, np.float32))


UNARY = [jnp.tanh, jnp.sin, lambda x: x * 2, lambda x: -x, lambda x: x.astype(jnp.float16).astype(jnp.float32)]
BINARY = [jnp.add, jnp.subtract, jnp.maximum, lambda a, b: jnp.where(a > b, a, b)]


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=14))
@settings(max_examples=25)
def test_random_programs(steps: list[tuple[int, int, int]]) -> None:
    """Elementwise operations between sums, which separate groups."""

    def fun(x: Any, y: Any) -> Any:
        values = [x, y]
        for op, first, second in steps:
            a = values[first % len(values)]
            b = values[second % len(values)]
            if op < len(UNARY):
                values.append(UNARY[op](a))
            elif op < len(UNARY) + len(BINARY):
                values.append(BINARY[op - len(UNARY)](a, b))
            else:
                values.append(a / (1 + jnp.abs(b).sum(op % 2, keepdims=True)))
        return values[2:]

    plain = jax.make_jaxpr(fun)(X, Y)
    fused = fuse(plain)
    for expected, actual in zip(jaxpr_as_fun(plain)(X, Y), jaxpr_as_fun(fused)(X, Y), strict=True):
        np.testing.assert_allclose(expected, actual, rtol=1e-6, atol=1e-6)


def test_orders_groups_by_their_operands() -> None:
    """Random graphs: each equation once, after its operands, and groups of one key."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        count = int(rng.integers(1, 40))
        reads = [
            sorted({int(rng.integers(n)) for _ in range(int(rng.integers(0, 3)))}) if n else [] for n in range(count)
        ]
        keys = [None if rng.random() < 0.3 else int(rng.integers(2)) for _ in range(count)]
        order = grouped(reads, keys)
        assert sorted(n for group in order for n in group) == list(range(count))
        run: set[int] = set()
        for group in order:
            assert len(group) == 1 or (len({keys[n] for n in group}) == 1 and keys[group[0]] is not None)
            assert all(n in run or n in group for member in group for n in reads[member])
            run.update(group)


def test_costs_loads_instructions_and_stores() -> None:
    """`scale·x + y` of 600 floats: 50 iterations a worker of two loads and a store, two instructions beside them."""
    target = preset("mk2")
    float32 = np.dtype(np.float32)
    ops = [OpCount("mul", float32, 1, 1), OpCount("add", float32, 2, 0)]
    cycles = kernel_cycles(ops, [float32] * 2, [float32], np.int64(600), target)
    assert cycles == target.supervisor_overhead_cycles + 6 * (31 + 50 * 3)


def test_costs_integer_sums_without_their_loop() -> None:
    """The row of 7 cycles an element is of C++, of which loads, the store and the loop are 5."""
    target = preset("mk2")
    int32 = np.dtype(np.int32)
    ops = [OpCount("add", int32, 2, 0), OpCount("add", int32, 2, 0)]
    cycles = kernel_cycles(ops, [int32] * 3, [int32], np.int64(600), target)
    assert cycles == target.supervisor_overhead_cycles + 6 * (31 + 50 * (3 + 1 + 2 * 2 * (7 - 5)))


def test_loads_a_scalar_once() -> None:
    """A constant is loaded in every iteration, a scalar tensor once."""
    vector, scalar = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((1200,), ()))
    device = ipu.IPUModel(tiles_per_ipu=1)
    constant = ipu.jit(lambda x, y: 3 * x + y, device=device).lower(vector, vector)
    tensor = ipu.jit(lambda x, y, scale: scale * x + y, device=device).lower(vector, vector, scalar)
    cycles = [lowered.compile().profile.phase_cycles["compute"] for lowered in (constant, tensor)]
    assert cycles[1] - cycles[0] == 6


def test_does_not_store_a_reduced_value() -> None:
    """Two sums of squares and products: one group, whose vertices write only partials."""

    def fun(x: Any, y: Any) -> Any:
        z = x * y
        return z.sum(0), jnp.square(z).max()

    assert groups(passed(fun, X, Y)) == [["mul", "reduce_sum", "square", "reduce_max"]]
    program = lowered(fun, [X, Y], small_target(4))
    first = next(iter(program.graph.groups.values()))[0]
    assert all(f.is_read or a.tensor.size < X.size for f, a in zip(first.codelet.fields, first.accesses, strict=True))
    check(fun, X, Y, tiles=(1, 4, 7), rtol=1e-5, atol=1e-5)


AXES = ((0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2))
REDUCTIONS = [
    pytest.param(reduce, axes, id=f"{reduce.__name__}-axes{n}")
    for reduce in (jnp.sum, jnp.max, jnp.prod)
    for n, axes in enumerate(AXES)
]


@pytest.mark.parametrize(("reduce", "axes"), REDUCTIONS)
def test_reductions_of_a_group(reduce: Any, axes: tuple[int, ...]) -> None:
    x = RNG.uniform(0.5, 1.5, (3, 8, 5)).astype(np.float32)

    def fun(x: Any, row: Any) -> Any:
        y = jnp.tanh(x) * row
        return y, reduce(y, axes), reduce(y + 1, axes, keepdims=True)

    check(fun, x, x[0, 0], tiles=(1, 4, 16), rtol=1e-5, atol=1e-5)


def test_recomputes_cheap_values() -> None:
    """A cast that two groups read is in both, and the wide array is not stored."""
    half = X.astype(np.float16)

    def fun(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return wide - wide.mean(1, keepdims=True)

    assert [group.count("convert_element_type") for group in groups(passed(fun, half))] == [1, 1]
    program = lowered(fun, [half], small_target(4))
    wide = [v for v in program.graph.variables if v.dtype == np.float32 and v.size == X.size]
    assert len(wide) == 1  # the result
    check(fun, half, tiles=(1, 4, 7), rtol=1e-5, atol=1e-5)


def softmax_of_halves(x: Any) -> Any:
    return jax.nn.softmax(x.astype(jnp.float32)).astype(jnp.float16)


def norm_of_halves(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)).astype(jnp.float16)


def entropy_of_halves(x: Any) -> Any:
    labels = jax.nn.one_hot(jnp.arange(len(x)) % 7, x.shape[-1])
    return -(labels * jax.nn.log_softmax(x.astype(jnp.float32))).sum(-1)


@pytest.mark.parametrize(
    ("fun", "is_gradient"),
    [
        (softmax_of_halves, False),
        (softmax_of_halves, True),
        (norm_of_halves, False),
        (norm_of_halves, True),
        (entropy_of_halves, False),
    ],
)
def test_stores_no_float_copy_of_an_array_of_halves(fun: Any, is_gradient: bool) -> None:
    """Each group computes floats from the halves again, also through an exponential."""
    half = X.astype(np.float16)
    plain = jax.grad(lambda x: (fun(x).astype(jnp.float32) ** 2).sum()) if is_gradient else fun
    program = lowered(plain, [half], small_target(4))
    assert not [v for v in program.graph.variables if v.dtype == np.float32 and v.size == X.size]
    check(plain, half, tiles=(1, 4, 7), rtol=1e-2, atol=1e-3)


def test_computes_an_operand_of_a_product_once() -> None:
    def fun(x: Any, w: Any) -> Any:
        wide = x.astype(jnp.float32)
        return wide @ w, wide - wide.max()

    counts = [group.count("convert_element_type") for group in groups(passed(fun, X.astype(np.float16), X.T))]
    assert sum(counts) <= 1
    check(fun, X.astype(np.float16), X.T, tiles=(1, 4), rtol=1e-4, atol=1e-4)


def test_stores_values_of_many_instructions() -> None:
    def fun(x: Any) -> Any:
        y = jnp.exp(x)
        return y / y.sum()

    assert sum(group.count("exp") for group in groups(passed(fun, X))) == 1


def test_computes_compared_values_once() -> None:
    """A maximum and the search for its position would round the sum of products differently."""

    def at_the_largest(x: Any) -> Any:
        y = x + x * -0.618034
        return jnp.where(y == jnp.max(y), x, 0)

    assert [name for group in groups(passed(at_the_largest, X)) for name in group].count("add") == 1
    x = np.array([-0.125, 0, 1, 1.875, -1.875, -1.5, 1.375], np.float32)
    result = quick_jit(ipu.jit(at_the_largest, device=ipu.IPUModel(tiles_per_ipu=7)).lower(x).evaluate)(x)
    np.testing.assert_array_equal(result, np.where(x == x.max(), x, 0))


def test_reads_of_a_buffer_stay_before_it_is_overwritten() -> None:
    """The update writes the memory that the first read is from; fused with a later product, its rows came too late."""

    def fun(table: Any, numbers: Any) -> Any:
        rows = numbers + 1
        (old,) = remote_rows_p.bind(table, rows)
        (new,) = remote_update_p.bind(table, numbers, jnp.ones((2, 3)))
        (updated,) = remote_rows_p.bind(new, rows * 2)
        return old, new, updated

    jaxpr = jax.make_jaxpr(fun)(jnp.zeros((8, 3)), jnp.arange(2))
    moves = [name for name in names(fuse(jaxpr)) if name.startswith("remote")]
    assert moves == ["remote_rows", "remote_update", "remote_rows"]
