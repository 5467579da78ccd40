"""Poplar's views of tensors: each equals NumPy's view of an array, alone, in sequence, and in programs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from ipujax import poplar
from ipujax.poplar.program import Copy
from ipujax.runtime.errors import TensorError
from tests.ipujax.poplar.helpers import placed, run_both, small_graph

SHAPE = (2, 3, 4)


def tensor(shape=SHAPE):
    """A tensor and an array of its elements' numbers."""
    return placed(small_graph(), poplar.INT, shape, "v"), np.arange(np.prod(shape)).reshape(shape)


def element_numbers(view):
    """Number of each element of a view."""
    return np.broadcast_to(view.flat_indices()[1], view.shape)


# What Poplar's call gives, and numpy's way to say it.
VIEWS = {
    "slice of dimension 0": (lambda t: t.slice(1, 2), lambda a: a[1:2]),
    "slice of a dimension": (lambda t: t.slice(1, 3, 2), lambda a: a[:, :, 1:3]),
    "slice by name of the dimension": (lambda t: t.slice(1, 3, axis=1), lambda a: a[:, 1:3]),
    "slice of a negative dimension": (lambda t: t.slice(1, 3, -1), lambda a: a[..., 1:3]),
    "empty slice": (lambda t: t.slice(1, 1, 1), lambda a: a[:, 1:1]),
    "slice of a box": (lambda t: t.slice([0, 1, 2], [2, 3, 4]), lambda a: a[0:2, 1:3, 2:4]),
    "slice of a box with strides": (lambda t: t.slice([0, 0, 1], [2, 3, 4], [1, 2, 2]), lambda a: a[:, ::2, 1::2]),
    "index": (lambda t: t[1], lambda a: a[1]),
    "index of each dimension": (lambda t: t[1][2][3], lambda a: a[1, 2, 3]),
    "index by a list": (lambda t: t.index([1, 2]), lambda a: a[1, 2]),
    "index by no list": (lambda t: t.index([]), lambda a: a),
    "numpy's indexing": (lambda t: t[..., None, ::-2, 1:], lambda a: a[..., None, ::-2, 1:]),
    "reshape": (lambda t: t.reshape([4, 6]), lambda a: a.reshape(4, 6)),
    "reshape of the first dimensions": (lambda t: t.reshape_partial(0, 2, [3, 2]), lambda a: a.reshape(3, 2, 4)),
    "reshape of the last dimension": (lambda t: t.reshape_partial(2, 3, [2, 1, 2]), lambda a: a.reshape(2, 3, 2, 1, 2)),
    "reshape of no dimension": (lambda t: t.reshape_partial(1, 1, [1]), lambda a: a.reshape(2, 1, 3, 4)),
    "flatten": (lambda t: t.flatten(), lambda a: a.reshape(-1)),
    "flatten of some dimensions": (lambda t: t.flatten(1, 3), lambda a: a.reshape(2, 12)),
    "flatten from a dimension": (lambda t: t.flatten(1), lambda a: a.reshape(2, 12)),
    "transpose": (lambda t: t.transpose(), lambda a: a.T),
    "dim_shuffle": (lambda t: t.dim_shuffle([2, 0, 1]), lambda a: a.transpose(2, 0, 1)),
    "dim_shuffle_partial": (lambda t: t.dim_shuffle_partial([0, 2], [1, 0]), lambda a: np.moveaxis(a, [0, 2], [1, 0])),
    "dim_roll to the front": (lambda t: t.dim_roll(2), lambda a: np.moveaxis(a, 2, 0)),
    "dim_roll to the end": (lambda t: t.dim_roll(0, 2), lambda a: np.moveaxis(a, 0, 2)),
    "expand": (lambda t: t.expand([0, 1, 1, 3]), lambda a: a.reshape(1, 2, 1, 1, 3, 4, 1)),
    "squeeze": (lambda t: t[:1, :, 2:3].squeeze([0, 2]), lambda a: a[0, :, 2]),
    "broadcast": (lambda t: t.broadcast(2, 1), lambda a: np.tile(a, (1, 2, 1))),
    "upsample": (lambda t: t.upsample(2, 1), lambda a: np.repeat(a, 2, 1)),
    "upsample to nothing": (lambda t: t.upsample(0, 2), lambda a: np.repeat(a, 0, 2)),
    "reverse": (lambda t: t.reverse(1), lambda a: a[:, ::-1]),
    "sub_sample": (lambda t: t.sub_sample(3, 2), lambda a: a[:, :, ::3]),
    "concat": (lambda t: poplar.concat([t, t[:, :1]], 1), lambda a: np.concatenate([a, a[:, :1]], 1)),
    "append": (lambda t: poplar.append(t, t[:, 0], 1), lambda a: np.concatenate([a, a[:, :1]], 1)),
    "append to dimension 0": (lambda t: poplar.append(t, t[0]), lambda a: np.concatenate([a, a[:1]])),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_has_the_elements_of_numpys(name):
    view, same = VIEWS[name]
    t, a = tensor()
    expected = same(a)
    assert view(t).shape == expected.shape
    np.testing.assert_array_equal(element_numbers(view(t)), expected)


@pytest.mark.parametrize("name", VIEWS)
def test_engine_and_tile_interpreter_copy_a_view_equally(name):
    view, same = VIEWS[name]
    graph = small_graph()
    t = graph.add_variable(poplar.INT, SHAPE, "v")
    graph.set_tile_mapping(t, np.arange(t.size) * 5 % 8)
    expected = same(np.arange(t.size).reshape(SHAPE))
    out = graph.add_variable(poplar.INT, expected.shape, "out")
    graph.set_tile_mapping(out, np.arange(out.size) % 8)
    (got,) = run_both(graph, Copy(view(t), out), {t: np.arange(t.size).reshape(SHAPE)}, [out])
    np.testing.assert_array_equal(got, expected)


def sliced(draw, t, a, d):
    low, high = sorted((draw(st.integers(0, a.shape[d])), draw(st.integers(0, a.shape[d]))))
    return t.slice(low, high, d), a.take(range(low, high), d)


def rolled(draw, t, a, d):
    to = draw(st.integers(0, a.ndim - 1))
    return t.dim_roll(d, to), np.moveaxis(a, d, to)


def upsampled(draw, t, a, d):
    n = draw(st.integers(0, 3))
    return t.upsample(n, d), np.repeat(a, n, d)


def broadcast(draw, t, a, d):
    n = draw(st.integers(1, 3))
    return t.broadcast(n, d), np.concatenate([a] * n, d)


def reversed_(draw, t, a, d):
    return t.reverse(d), np.flip(a, d)


def sampled(draw, t, a, d):
    n = draw(st.integers(1, 3))
    return t.sub_sample(n, d), a.take(range(0, a.shape[d], n), d)


def merged(draw, t, a, d):
    end = draw(st.integers(d + 1, a.ndim))
    return t.flatten(d, end), a.reshape(*a.shape[:d], np.prod(a.shape[d:end], dtype=int), *a.shape[end:])


def split(draw, t, a, d):
    assume(a.shape[d] % 2 == 0 and a.ndim < 6)
    shape = [a.shape[d] // 2, 2]
    return t.reshape_partial(d, d + 1, shape), a.reshape(*a.shape[:d], *shape, *a.shape[d + 1 :])


def appended(draw, t, a, d):
    assume(a.shape[d])
    return poplar.append(t, t.slice(0, 1, d).squeeze([d]), d), np.concatenate([a, a.take([0], d)], d)


STEPS = (sliced, rolled, upsampled, broadcast, reversed_, sampled, merged, split, appended)


@settings(max_examples=120)
@given(st.data())
def test_views_of_views_have_the_elements_of_numpys(data):
    t, a = tensor()
    for _ in range(data.draw(st.integers(1, 6))):
        assume(a.ndim and a.size <= 2000)
        step = data.draw(st.sampled_from(STEPS))
        t, a = step(data.draw, t, a, data.draw(st.integers(0, a.ndim - 1)))
    assert t.shape == a.shape
    np.testing.assert_array_equal(element_numbers(t), a)


def test_several_slices_of_one_dimension():
    t, a = tensor()
    first, second = t.slices([(0, 1), (2, 4)], 2)
    np.testing.assert_array_equal(element_numbers(first), a[:, :, 0:1])
    np.testing.assert_array_equal(element_numbers(second), a[:, :, 2:4])


def test_aliases_are_repeated_elements_of_memory():
    t, _ = tensor()
    assert not t.contains_aliases() and not t.transpose().reverse(0).contains_aliases()
    assert t.upsample(2, 0).contains_aliases() and poplar.append(t, t[0]).contains_aliases()
    assert (t.rank(), t.dim(1), t.num_elements(), t.element_type()) == (3, 3, 24, poplar.INT)


REFUSED = {
    "slice beyond the end": (lambda t: t.slice(1, 5), r"slice of [\s\S]*limit <= 2[\s\S]*limit 5"),
    "slice backwards": (lambda t: t.slice(2, 1), "start 2, limit 1"),
    "slice of no dimension": (lambda t: t.slice(0, 1, 3), r"dimension 3 of [\s\S]*one of 3 dimensions"),
    "a dimension for a box": (lambda t: t.slice([0, 0, 0], [1, 1, 1], 1), "two numbers and a dimension, or two seq"),
    "a number and a list": (lambda t: t.slice(0, [1, 1, 1]), "two numbers and a dimension, or two seq"),
    "too few of a box": (lambda t: t.slice([0], [1]), "3 starts, limits and strides"),
    "index out of range": (lambda t: t.index([0, 3]), r"index of .*[\s\S]*below \[2, 3, 4\][\s\S]*\[0, 3\]"),
    "too many indices": (lambda t: t.index([0, 0, 0, 0]), r"index of .*"),
    "flatten backwards": (lambda t: t.flatten(2, 1), r"flatten of .*[\s\S]*\(2, 1\)"),
    "reshape_partial of no dimensions": (lambda t: t.reshape_partial(1, 4, [12]), r"reshape_partial[\s\S]*\(1, 4\)"),
    "reshape_partial to another size": (lambda t: t.reshape_partial(1, 3, [5]), r"reshape of [\s\S]*24 elements"),
    "dim_shuffle_partial of two to one": (lambda t: t.dim_shuffle_partial([0, 1], [2]), "equally many different"),
    "dim_shuffle_partial twice to one": (lambda t: t.dim_shuffle_partial([0, 1], [2, 2]), "equally many different"),
    "dim_roll of no dimension": (lambda t: t.dim_roll(3), "dimension 3"),
    "dim_shuffle of some": (lambda t: t.dim_shuffle([1, 0]), "a permutation of 0…2"),
    "upsample less than nothing": (lambda t: t.upsample(-1, 0), r"upsample of [\s\S]*at least 0"),
    "broadcast of no dimension": (lambda t: t.broadcast(2, 4), "dimension 4"),
    "sub_sample of every none": (lambda t: t.sub_sample(0, 0), "stride >= 1"),
    "squeeze of a long dimension": (lambda t: t.squeeze([1]), "dimensions of size 1"),
    "expand beyond the end": (lambda t: t.expand([4]), "0 … 3"),
    "concat without a list": (lambda t: poplar.concat(t, t), r"not in a list[\s\S]*concat\(\[first, second\], axis\)"),
    "concat of nothing": (lambda t: poplar.concat([]), "at least one tensor"),
    "concat of other shapes": (lambda t: poplar.concat([t, t[0]]), "concat along dimension 0"),
    "append of a tensor of the same rank": (lambda t: poplar.append(t, t), "concat along dimension 0"),
    "reshape to another size": (lambda t: t.reshape([5, 5]), "24 elements"),
    "index array": (lambda t: t[[0, 1]], "index"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_view_names_tensor_and_line(name):
    act, message = REFUSED[name]
    t, _ = tensor()
    with pytest.raises(TensorError, match=message) as error:
        act(t)
    assert str(error.value.where).startswith("test_tensor_views.py:")
