"""Loops whose rows stay in the host's memory: the same numbers, and tiles that hold one iteration's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu

RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=(8, 8)).astype(np.float32)
ROWS = RNG.normal(size=(6, 4, 8)).astype(np.float32)
DEVICE = ipu.IPUModel(tiles_per_ipu=4)
Fun = Callable[[Any, Any], Any]


def map_rows(w: Any, xs: Any) -> Any:
    return lax.scan(lambda carry, x: (carry, x @ w), 0.0, xs)[1]


def train(w: Any, xs: Any) -> Any:
    def step(w: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: jnp.abs(x @ w).mean())(w)
        return w - 0.1 * gradient, (loss, x @ w)

    return lax.scan(step, w, xs)


def views(w: Any, xs: Any) -> Any:
    w, (losses, ys) = train(w, jnp.squeeze(xs[None], 0).reshape(6, 2, 16).reshape(6, 4, 8))
    return w, losses, ys[None]


def called(w: Any, xs: Any) -> Any:
    return jax.jit(train)(w, xs)


def backwards(w: Any, xs: Any) -> Any:
    return lax.scan(lambda w, x: (0.9 * w + x.T @ x, x + 1), w, xs, reverse=True)


def read_twice(w: Any, xs: Any) -> Any:
    first = lax.scan(lambda w, x: (0.9 * w + x.T @ x, None), w, xs)[0]
    return lax.scan(lambda w, x: (0.8 * w + x.T @ x, None), first, xs)[0]


def nested(w: Any, xs: Any) -> Any:
    def update(w: Any, rows: Any) -> Any:
        gradient, ys = lax.scan(lambda g, x: (g + x.T @ (x @ w), x @ w), jnp.zeros_like(w), rows)
        return w - 0.01 * gradient, ys.sum(0)

    return lax.scan(update, w, xs.reshape(3, 2, 4, 8))


def nested_and_read(w: Any, xs: Any) -> Any:
    """Rows of the outer loop are read by more than the inner loop, and go in whole."""

    def update(w: Any, rows: Any) -> Any:
        return lax.scan(lambda g, x: (g + x.T @ x, None), w, rows)[0], rows.sum()

    return lax.scan(update, w, xs.reshape(3, 2, 4, 8))


def three_loops(w: Any, xs: Any) -> Any:
    def outer(w: Any, rows: Any) -> Any:
        return lax.scan(lambda w, x: lax.scan(lambda w, v: (0.9 * w + v[:, None] * v, None), w, x), w, rows)[0], None

    return lax.scan(outer, w, xs.reshape(3, 2, 4, 8))[0]


def counted(w: Any, xs: Any) -> Any:
    return lax.fori_loop(0, 6, lambda i, w: 0.9 * w + xs[5 - i].T @ xs[5 - i], w)


def counted_by_stack(w: Any, xs: Any) -> Any:
    return lax.scan(lambda w, i: (0.9 * w + xs[i].T @ xs[i], xs[i, 0]), w, jnp.asarray([3, 1, 0, 5, 2, 4]))


def counted_from_a_number(w: Any, xs: Any) -> Any:
    """Carries begin with literals, as a sum of the batches does."""
    return lax.fori_loop(0, 6, lambda i, total: total + jnp.tanh(xs[i] @ w).sum(), 0.0)


def indexed_by_jax(w: Any, xs: Any) -> Any:
    """A function of JAX that it calls, not inlines, reads the row."""

    def body(i: Any, w: Any) -> Any:
        row = lax.dynamic_index_in_dim(xs, i, 0, keepdims=False)
        return 0.9 * w + row.T @ row

    return lax.fori_loop(0, 6, body, w)


def while_counted(w: Any, xs: Any) -> Any:
    def body(state: Any) -> Any:
        i, w = state
        return i + 1, 0.9 * w + xs[i].T @ xs[i]

    return lax.while_loop(lambda state: state[0] < 6, body, (0, w))[1]


def gradient_of_loop(w: Any, xs: Any) -> Any:
    return jax.grad(lambda w: lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), xs[0] * 0, xs)[0].sum())(w)


def in_branch(w: Any, xs: Any) -> Any:
    return lax.cond(w.sum() > 0, lambda: train(w, xs)[0], lambda: w * xs[0].sum())


def slices(w: Any, xs: Any) -> Any:
    """Starts that are literals, of a row that is read and of a constant of the loop."""

    def body(i: Any, w: Any) -> Any:
        row = lax.dynamic_slice(xs, (i, 0, 0), (1, 4, 8))[0]
        return 0.9 * w + row.T @ row + lax.dynamic_slice(w, (0, 0), (1, 8))

    return lax.fori_loop(0, 6, body, w)


def counted_inside(w: Any, xs: Any) -> Any:
    """An inner loop reads its row by a counter, which does not count the outer loop."""

    def outer(w: Any, rows: Any) -> Any:
        return lax.fori_loop(0, 2, lambda i, w: 0.9 * w + rows[i].T @ rows[i], w), None

    return lax.scan(outer, w, xs.reshape(3, 2, 4, 8))[0]


def other_rows_inside(w: Any, xs: Any) -> Any:
    """An inner loop reads rows that are no leading dimensions of the outer loop's."""

    def outer(w: Any, rows: Any) -> Any:
        return lax.scan(lambda w, x: (0.9 * w + x.T @ x, x @ w), w, rows.reshape(4, 2, 8))

    return lax.scan(outer, w, xs.reshape(3, 2, 4, 8))


def innermost_of_whole(w: Any, xs: Any) -> Any:
    """The loop in the middle reads its row whole, besides the innermost."""

    def middle(w: Any, x: Any) -> Any:
        return lax.scan(lambda w, v: (0.9 * w + v[:, None] * v, None), w, x)[0] + x.sum(), None

    return lax.scan(lambda w, rows: (lax.scan(middle, w, rows)[0], None), w, xs.reshape(3, 2, 4, 8))[0]


def rows_returned(w: Any, xs: Any) -> Any:
    """The innermost loop returns its rows, as they are and in another shape."""

    def outer(w: Any, rows: Any) -> Any:
        return lax.scan(lambda w, x: (0.9 * w + x.T @ x, (x, x.reshape(-1))), w, rows)

    return lax.scan(outer, w, xs.reshape(3, 2, 4, 8))


STREAMED = [map_rows, train, views, called, backwards, read_twice, nested, three_loops, counted, counted_by_stack]
STREAMED += [counted_from_a_number, indexed_by_jax, while_counted]
STREAMED += [rows_returned, slices, other_rows_inside, innermost_of_whole]
WHOLE = [nested_and_read, gradient_of_loop, in_branch, counted_inside]


def jitted(fun: Fun, stream_loops: Any, device: ipu.IPUModel = DEVICE, **settings: Any) -> Any:
    return ipu.jit(fun, device=device, options=ipu.Options(stream_loops=stream_loops), **settings)


@pytest.mark.parametrize("fun", [*STREAMED, *WHOLE])
def test_numbers_are_those_of_plain_jax(fun: Fun) -> None:
    expected = jax.jit(fun)(WEIGHTS, ROWS)
    streamed = jitted(fun, True)(WEIGHTS, ROWS)
    # Not to the bit: XLA may contract the product and the sum of one program and not of the other.
    for other in (jitted(fun, False)(WEIGHTS, ROWS), expected):
        jax.tree.map(lambda got, right: np.testing.assert_allclose(got, right, rtol=2e-5, atol=1e-5), streamed, other)


@pytest.mark.parametrize("fun", [*STREAMED, *WHOLE])
def test_tiles_compute_the_same(fun: Fun) -> None:
    assert jitted(fun, True).check(WEIGHTS, ROWS).agrees


def fullest(fun: Fun, count: int, stream_loops: Any) -> int:
    shapes = (jax.ShapeDtypeStruct((64, 64), np.float16), jax.ShapeDtypeStruct((count, 16, 64), np.float16))
    device = ipu.IPUModel(tiles_per_ipu=8)
    return jitted(fun, stream_loops, device).lower(*shapes).compile().profile.memory.max_tile_bytes


def test_the_profile_lists_loops_that_stream() -> None:
    profile = jitted(map_rows, True).profile(WEIGHTS, ROWS)
    (loop,) = profile.streamed_loops
    assert (loop.iterations, loop.bytes_in, loop.bytes_out) == (6, 4 * 8 * 4, 4 * 8 * 4)
    assert "test_stream_loops.py" in str(loop.origin) and "(map_rows)" in str(loop.origin)
    assert "6 iterations  128 bytes in and 128 out in each" in profile.summary()
    inner, outer = sorted(jitted(nested, True).profile(WEIGHTS, ROWS).streamed_loops, key=lambda loop: loop.bytes_out)
    assert (inner.iterations, inner.bytes_in) == (2, 128) and (outer.iterations, outer.bytes_out) == (3, 128)
    assert not jitted(map_rows, False).profile(WEIGHTS, ROWS).streamed_loops


@pytest.mark.parametrize("fun", [counted, counted_from_a_number, indexed_by_jax, while_counted])
def test_loops_that_count_read_one_row_an_iteration(fun: Fun) -> None:
    (loop,) = jitted(fun, True).profile(WEIGHTS, ROWS).streamed_loops
    assert loop.iterations == 6 and loop.bytes_in in (128, 256)  # a row that is read twice moves twice


def accumulate(w: Any, xs: Any) -> Any:
    def update(w: Any, rows: Any) -> Any:
        gradient, losses = lax.scan(lambda g, x: (g + x.T @ (x @ w), jnp.abs(x @ w).mean()), w * 0, rows)
        return w - gradient, losses

    return lax.scan(update, w, xs.reshape(2, -1, 16, 64))


@pytest.mark.parametrize("fun", [map_rows, train, accumulate])
def test_tiles_hold_one_iteration(fun: Fun) -> None:
    few, many, whole = fullest(fun, 4, True), fullest(fun, 64, True), fullest(fun, 64, False)
    assert many <= 1.05 * few and whole > 1.5 * many


def sum_rows(w: Any, rows: Any) -> Any:
    return lax.scan(lambda w, x: (0.9 * w + x.T @ x, None), w, rows)[0]


def cast_and_divided(w: Any, images: Any) -> Any:
    return sum_rows(w, images.astype(jnp.float32) / 255)


def normalised(w: Any, images: Any) -> Any:
    return sum_rows(w, (images.astype(jnp.float32) / 255 - w[0]) / (1 + w[1] ** 2))


def reshaped(w: Any, images: Any) -> Any:
    flat = images.reshape(-1, 64).astype(jnp.float32) - 128
    return sum_rows(w, flat.reshape(-1, 16, 64))


def two_operands(w: Any, images: Any) -> Any:
    wide = images.astype(jnp.float32)
    pairs = wide / 255, jnp.where(images > 100, wide, 0.0)
    return lax.scan(lambda w, x: (0.9 * w + x[0].T @ x[1], None), w, pairs)[0]


def counted_and_cast(w: Any, images: Any) -> Any:
    rows = images.astype(jnp.float32) / 255

    def update(i: Any, w: Any) -> Any:
        x = rows[i]
        return 0.9 * w + x.T @ x

    return lax.fori_loop(0, len(images), update, w)


COMPUTED = [cast_and_divided, normalised, reshaped, two_operands, counted_and_cast]


@pytest.mark.parametrize("fun", COMPUTED)
def test_rows_of_computed_stacks_are_computed_in_the_loop(fun: Fun) -> None:
    few, many = (
        jitted(fun, True, ipu.IPUModel(tiles_per_ipu=8))
        .profile(jax.ShapeDtypeStruct((64, 64), np.float32), jax.ShapeDtypeStruct((count, 16, 64), np.uint8))
        .memory.max_tile_bytes
        for count in (2, 256)
    )
    assert many <= 1.05 * few


@pytest.mark.parametrize("fun", COMPUTED)
def test_computed_rows_are_those_of_plain_jax(fun: Fun) -> None:
    weights = RNG.normal(size=(64, 64)).astype(np.float32)
    images = RNG.integers(0, 255, size=(3, 16, 64)).astype(np.uint8)
    expected = jax.jit(fun)(weights, images)
    np.testing.assert_allclose(jitted(fun, True)(weights, images), expected, rtol=2e-5, atol=1e-5)


def test_computed_rows_stream_where_the_program_does_not_fit() -> None:
    device = ipu.IPUModel(tiles_per_ipu=8, bytes_per_tile=100_000)
    shapes = jax.ShapeDtypeStruct((64, 64), np.float32), jax.ShapeDtypeStruct((256, 16, 64), np.uint8)
    (loop,) = jitted(cast_and_divided, "auto", device).profile(*shapes).streamed_loops
    assert (loop.iterations, loop.bytes_in) == (256, 16 * 64)


def test_a_loop_costs_what_a_pipeline_of_its_iterations_does() -> None:
    shapes = (jax.ShapeDtypeStruct((64, 64), np.float16), jax.ShapeDtypeStruct((32, 16, 64), np.float16))

    def pipeline(w: Any, xs: Any) -> Any:
        return ipu.pipeline(lambda w, x: x[0] @ w, micro_batches=32, reduce="stack")(w, xs)

    loop_cycles = jitted(map_rows, True).lower(*shapes).compile().profile.cycles
    assert loop_cycles <= 1.03 * jitted(pipeline, False).lower(*shapes).compile().profile.cycles


def test_auto_streams_where_the_program_does_not_fit() -> None:
    shapes = (jax.ShapeDtypeStruct((64, 64), np.float16), jax.ShapeDtypeStruct((64, 16, 64), np.float16))

    def profile(stream_loops: Any, **machine: Any) -> Any:
        device = ipu.IPUModel(tiles_per_ipu=8, **machine)
        return jitted(map_rows, stream_loops, device).lower(*shapes).compile().profile

    whole, streamed = profile(False), profile(True)
    assert profile("auto").cycles == whole.cycles < streamed.cycles
    small = (whole.memory.max_tile_bytes + streamed.memory.max_tile_bytes) // 2
    assert profile("auto", bytes_per_tile=small).cycles == streamed.cycles
    with pytest.raises(ipu.TileMemoryError, match=r"Options\(stream_loops=True\)"):
        profile(False, bytes_per_tile=small)


def test_replicas_stream_rows_of_their_own() -> None:
    """Numbers differ by rounding: products of rows that are on the chip are computed before the loop."""

    def assert_close(got: Any, right: Any) -> None:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, right)

    def fun(w: Any, xs: Any) -> Any:
        w, ys = lax.scan(lambda w, x: (w - 0.1 * lax.pmean(x.T @ x, "replica"), x @ w), w, jnp.swapaxes(xs, 0, 1))
        return lax.pmean(w, "replica"), ys[None]

    def rows_first(w: Any, xs: Any) -> Any:
        w, ys = lax.scan(lambda w, x: (w - 0.1 * lax.pmean(x.T @ x, "replica"), x @ w), w, xs[0])
        return w, ys[None]

    xs = np.stack([ROWS, ROWS + 1])
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=4)
    settings: Any = {"replicas": 2, "in_specs": (P(), P("replica")), "out_specs": (P(), P("replica"))}
    whole = jitted(rows_first, False, device, **settings)
    streamed = jitted(rows_first, True, device, **settings)
    assert_close(whole(WEIGHTS, xs), streamed(WEIGHTS, xs))
    assert streamed.profile(WEIGHTS, xs).memory.max_tile_bytes < whole.profile(WEIGHTS, xs).memory.max_tile_bytes
    swapped = xs.swapaxes(1, 2)  # rows are not contiguous: they stay whole
    assert_close(
        *(jitted(lambda w, xs: fun(w, xs[0]), way, device, **settings)(WEIGHTS, swapped) for way in (False, True))
    )


def test_batches_of_stages_behind_reshapes_stream() -> None:
    def loss(w: Any, x: Any) -> Any:
        with ipu.stage(0):
            y = jnp.tanh(x @ w)
        with ipu.stage(1):
            return (y @ w).mean()

    def fun(w: Any, xs: Any) -> Any:
        batch = jnp.squeeze(jnp.squeeze(xs, 0), 0).reshape(-1, 8)
        return ipu.pipeline(jax.value_and_grad(loss), micro_batches=6)(w, batch)

    run = jitted(fun, "auto", ipu.IPUModel(num_ipus=2, tiles_per_ipu=4))
    jax.tree.map(
        lambda got, right: np.testing.assert_allclose(got, right, rtol=2e-5, atol=1e-6),
        run(WEIGHTS, ROWS[None, None]),
        jax.jit(fun)(WEIGHTS, ROWS[None, None]),
    )


def test_rows_that_a_mesh_splits_are_loaded_whole() -> None:
    mesh = ipu.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    shardings = (NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "x")))
    xs = ROWS.reshape(3, 2, 4, 8)

    def fun(w: Any, xs: Any) -> Any:
        step = lambda w, x: (0.9 * w + x.T @ x, x @ w)  # noqa: E731
        return lax.scan(lambda w, rows: lax.scan(step, w, rows), w, xs)

    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=4)
    jax.tree.map(
        lambda got, right: np.testing.assert_allclose(got, right, rtol=2e-4, atol=1e-4),
        jitted(fun, True, device, in_shardings=shardings)(WEIGHTS, xs),
        jax.jit(fun)(WEIGHTS, xs),
    )


def test_io_tiles_fetch_rows_ahead() -> None:
    device = ipu.IPUModel(tiles_per_ipu=16)
    options = [ipu.Options(stream_loops=True, io_tiles=n) for n in (0, 4)]
    alone, ahead = (ipu.jit(map_rows, device=device, options=each) for each in options)
    np.testing.assert_array_equal(alone(WEIGHTS, ROWS), ahead(WEIGHTS, ROWS))


@pytest.mark.parametrize("value", ["yes", 1.0, None])
def test_other_ways_are_refused(value: Any) -> None:
    with pytest.raises(ipu.ArgumentError, match="stream_loops"):
        ipu.Options(stream_loops=value)
