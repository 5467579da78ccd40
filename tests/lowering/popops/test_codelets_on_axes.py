"""Codelets on other axes compute the same elements: kernels, reductions, and slices at dynamic indices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.popops.indexing.dynamic_slices import _slice_codelet, _sliced_in_order, _update_codelet
from ipujax.lowering.popops.vertices.kernel import Input, Kernel, Op, Reduction, Step
from ipujax.lowering.popops.vertices.kernel_codelet import kernel_codelet
from ipujax.lowering.popops.vertices.reducers import axes_among, reduce_codelet

FLOAT = np.dtype(np.float32)
SHAPE = (4, 3, 8)  # groups, rows, channels of a group
# Rows of all channels; each group by itself, split in two; the axes as they are, in another order.
JOINED = ((1,), (0, 2))
TRANSPOSED = ((2,), (1,), (0,))


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(prod(shape)).normal(size=shape), FLOAT)


def on_axes(array: jax.Array, axes: Sequence[int], sources: Sequence[Sequence[int]]) -> jax.Array:
    """An array whose dimensions are some axes, on the new ones that it has."""
    old = [axis for source in sources for axis in source if axis in axes]
    moved = lax.transpose(array, [list(axes).index(axis) for axis in old])
    return moved.reshape([prod(SHAPE[axis] for axis in source) for source in sources if source[0] in axes])


@pytest.mark.parametrize("sources", [JOINED, TRANSPOSED, ((0,), (1,), (2,))])
def test_kernels(sources: Sequence[Sequence[int]]) -> None:
    add, mul = (Op(name, fun, FLOAT) for name, fun in (("add", lax.add), ("mul", lax.mul)))
    inputs = (Input(FLOAT, (0, 1, 2)), Input(FLOAT, (1,)), Input(FLOAT, (0, 2)), Input(FLOAT, ()))
    steps = (Step(add, (0, 1)), Step(mul, (4, 2)), Step(mul, (5, 3)))
    kernel = Kernel(3, inputs, steps, (6,), (Reduction(6, "add", (1,)), Reduction(5, "max", (0, 1, 2))))
    arrays = [random(*SHAPE), random(3), random(4, 8), random()]
    expected = kernel.evaluate(arrays, SHAPE)
    other = kernel.with_axes(sources)
    assert other is not None
    shape = tuple(prod(SHAPE[axis] for axis in source) for source in sources)
    moved = [on_axes(x, operand.axes, sources) for x, operand in zip(arrays, inputs, strict=True)]
    got = other.evaluate(moved, shape)
    for result, old, axes in zip(got, expected, ((0, 1, 2), (0, 2), ()), strict=True):
        np.testing.assert_allclose(result, on_axes(old, axes, sources), rtol=1e-6)


def test_sources_are_the_fields_that_a_result_depends_on() -> None:
    add, mul = (Op(name, fun, FLOAT) for name, fun in (("add", lax.add), ("mul", lax.mul)))
    inputs = (Input(FLOAT, (0,)), Input(FLOAT, (0,)), Input(FLOAT, ()))
    steps = (Step(mul, (1, 1)), Step(add, (0, 3)), Step(mul, (4, 2)))
    codelet = kernel_codelet(Kernel(1, inputs, steps, (3, 5), (Reduction(4, "add", (0,)),)))
    assert codelet.sources == ({1}, {0, 1, 2}, {0, 1})
    arrays = [random(8), random(8) + 3, jnp.float32(2)]
    expected = codelet.compute(*arrays)
    for field in range(3):
        changed = codelet.compute(*(x + 1 if n == field else x for n, x in enumerate(arrays)))
        differs = [not np.array_equal(a, b) for a, b in zip(changed, expected, strict=True)]
        assert differs == [field in sources for sources in codelet.sources]


def test_axes_that_are_used_apart_are_not_joined() -> None:
    kernel = Kernel(2, (Input(FLOAT, (0, 1)), Input(FLOAT, (1,))), (), (0,))
    assert kernel.with_axes(((0, 1),)) is None
    assert Kernel(2, (Input(FLOAT, (0, 1)),), (), (0,), (Reduction(0, "add", (0,)),)).with_axes(((0, 1),)) is None
    assert axes_among((0,), ((0, 1),)) is None and axes_among((0, 1), ((1,), (2,), (0,))) == (0, 2)


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_reductions(axes: tuple[int, ...]) -> None:
    x = random(*SHAPE)
    codelet = reduce_codelet("add", FLOAT, axes)
    assert codelet.with_axes is not None
    for sources in (JOINED, TRANSPOSED):
        other = codelet.with_axes(sources)
        if other is None:
            continue
        kept = [axis for axis in range(3) if axis not in axes]
        got = other.compute(on_axes(x, (0, 1, 2), sources))
        np.testing.assert_allclose(got, on_axes(codelet.compute(x), kept, sources), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "sources",
    [((1,), (0, 2), (3,)), ((0,), (3,), (1,), (2,)), ((2,), (3,), (1,), (0,)), ((0,), (0,), (1,), (2,), (3,))],
)
def test_slices(sources: Sequence[Sequence[int]]) -> None:
    """Of dimension 1, whose part has axis 3."""
    buffer, update = random(*SHAPE), random(4, 1, 8)
    start = jnp.int32(2)
    split = sources[1] == sources[0]
    sizes = [2, 2, 3, 8, 1] if split else [prod((*SHAPE, 1)[axis] for axis in source) for source in sources]
    old = [0, 1, 2, 3] if split else [axis for source in sources for axis in source]

    def moved(array: jax.Array, without: int) -> jax.Array:
        kept = [axis for axis in old if axis != without]
        dims = lax.transpose(array, [1 if axis == 3 else axis for axis in kept])
        return dims.reshape([n for n, source in zip(sizes, sources, strict=True) if source[0] != without])

    of_tensor = partial(moved, without=3)
    of_part = partial(moved, without=1)
    slicing = _slice_codelet(FLOAT, _sliced_in_order(3, (1,)), np.dtype(np.int32), "2d")
    updating = _update_codelet(FLOAT, _sliced_in_order(3, (1,)), np.dtype(np.int32), "2d", may_read_buffer=True)
    assert slicing.with_axes is not None and updating.with_axes is not None
    other_slicing, other_updating = slicing.with_axes(sources), updating.with_axes(sources)
    assert other_slicing is not None and other_updating is not None
    part = of_part(lax.dynamic_slice(buffer, (0, 2, 0), (4, 1, 8)))
    np.testing.assert_array_equal(other_slicing.compute(of_tensor(buffer), start, shapes=(part.shape,)), part)
    expected = of_tensor(lax.dynamic_update_slice(buffer, update, (0, 2, 0)))
    np.testing.assert_array_equal(other_updating.compute(of_tensor(buffer), of_part(update), start), expected)
    assert set(slicing.ordered_axes) == {1, 3}
    assert not other_slicing.supervisor and not other_updating.supervisor  # the form stays


def test_sliced_dimensions_are_not_joined() -> None:
    codelet = _slice_codelet(FLOAT, _sliced_in_order(3, (1,)), np.dtype(np.int32), "1d")
    assert codelet.with_axes is not None and codelet.with_axes(((0, 1), (2,), (3,))) is None
