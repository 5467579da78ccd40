"""Tensor views against numpy: the same operations on an array that holds the name of each element.

An element's name is its flat index plus `STRIDE` times the number of its variable. Jaxprs of `read` and `write` are run
by a table of numpy functions (hundreds of examples a second), a few also by JAX itself.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, event, given, settings, strategies as st

from ipujax.runtime.errors import TensorError
from ipujax.runtime.tensor import Affine, Concat, Indexed, Reshaped, Tensor, concat, read, write
from ipujax.runtime.tensor.variable import Variable
from tests.runtime.helpers import STRIDE, names, variable

MAX_SIZE = 600


# --- random chains of views -------------------------------------------------------------------------------------------

SIZES = st.sampled_from([1, 1, 2, 2, 3, 4, 4, 5, 6, 8, 12])


@st.composite
def basic_index(draw, shape):
    key = []
    for n in shape:
        kind = draw(st.sampled_from(["all", "slice", "slice", "step", "int"]))
        if kind == "int" and n:
            key.append(draw(st.integers(-n, n - 1)))
        elif kind == "all":
            key.append(slice(None))
        else:
            ends = st.one_of(st.none(), st.integers(-n, n))
            step = draw(st.sampled_from([1, 2, 3, -1, -2])) if kind == "step" else None
            key.append(slice(draw(ends), draw(ends), step))
        if len(shape) < 6 and draw(st.integers(0, 9)) == 9:
            key.append(None)
    if len(key) > 1 and draw(st.integers(0, 4)) == 0 and isinstance(key[-1], slice):
        key[-1] = Ellipsis
    return tuple(key)


@st.composite
def factorisation(draw, size):
    """A shape of `size` elements."""
    if size == 0:
        return tuple(draw(st.permutations([0, draw(st.integers(0, 3)), 1])))
    shape = []
    while size > 1 and len(shape) < 4:
        n = draw(st.sampled_from([d for d in range(2, size + 1) if size % d == 0]))
        shape.append(n)
        size //= n
    if size > 1:
        shape.append(size)
    shape += [1] * draw(st.integers(0, 1))
    return tuple(draw(st.permutations(shape)))


def index_step(data, t, a):
    key = data.draw(basic_index(a.shape))
    return t[key], a[key]


def slice_step(data, t, a):
    starts = [data.draw(st.integers(0, n)) for n in a.shape]
    limits = [data.draw(st.integers(s, n)) for s, n in zip(starts, a.shape, strict=True)]
    strides = data.draw(st.one_of(st.none(), st.tuples(*[st.integers(1, 3)] * a.ndim)))
    key = tuple(slice(*sls) for sls in zip(starts, limits, strides or [1] * a.ndim, strict=True))
    return t.slice(starts, limits, strides), a[key]


def transpose_step(data, t, a):
    perm = data.draw(st.permutations(range(a.ndim)))
    return t.dim_shuffle(perm), a.transpose(perm)


def reshape_step(data, t, a):
    shape = data.draw(factorisation(a.size))
    return t.reshape(shape), a.reshape(shape)


def flatten_step(data, t, a):
    return t.flatten(), a.reshape(-1)


def broadcast_step(data, t, a):
    assume(a.ndim < 5)
    shape = []
    axes = []
    for n in a.shape:
        shape += [data.draw(st.integers(1, 3))] * data.draw(st.integers(0, 1))
        axes.append(len(shape))
        shape.append(data.draw(st.integers(0, 3)) if n == 1 else n)
    assume(prod(shape) <= MAX_SIZE)
    expanded = a.reshape([a.shape[axes.index(i)] if i in axes else 1 for i in range(len(shape))])
    return t.broadcast_in_dim(shape, axes), np.broadcast_to(expanded, shape)


def reverse_step(data, t, a):
    axes = data.draw(st.lists(st.integers(0, a.ndim - 1), unique=True)) if a.ndim else []
    return t.reverse(axes), np.flip(a, axes)


def expand_step(data, t, a):
    assume(a.ndim < 7)
    axis = data.draw(st.integers(-a.ndim - 1, a.ndim))
    return t.expand_dims(axis), np.expand_dims(a, axis)


def squeeze_step(data, t, a):
    return t.squeeze(), a.squeeze()


def sample_step(data, t, a):
    assume(a.ndim)
    axis = data.draw(st.integers(0, a.ndim - 1))
    stride = data.draw(st.integers(1, 4))
    return t.sub_sample(stride, axis), a[(slice(None),) * axis + (slice(None, None, stride),)]


def split_step(data, t, a):
    """Cut along an axis and put the parts together, in order or not."""
    assume(a.ndim)
    axis = data.draw(st.integers(0, a.ndim - 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, a.shape[axis]), max_size=3)))
    before = (slice(None),) * axis
    boxes = [(*before, slice(*ends)) for ends in zip([0, *cuts], [*cuts, a.shape[axis]], strict=True)]
    if data.draw(st.booleans()):
        boxes = data.draw(st.permutations(boxes))
    return concat([t[box] for box in boxes], axis), np.concatenate([a[box] for box in boxes], axis)


def other_step(data, t, a):
    """Put another variable beside, or the same view again."""
    assume(a.ndim and 2 * a.size <= MAX_SIZE)
    axis = data.draw(st.integers(0, a.ndim - 1))
    beside = t
    names_beside = a
    if data.draw(st.integers(0, 3)):
        number = 1 + int(a.max(initial=0)) // STRIDE
        beside = Tensor.of(variable(*a.shape, name=f"w{number}"))
        names_beside = names(number, a.shape)
    return concat([t, beside], axis - a.ndim), np.concatenate([a, names_beside], axis)


STEPS = [
    *[index_step, slice_step, transpose_step, reshape_step, reshape_step, flatten_step, broadcast_step],
    *[reverse_step, expand_step, squeeze_step, sample_step, split_step, other_step],
]


@st.composite
def view(draw, max_steps=7):
    """A tensor, the names of its elements, and names and numbers of its variables."""
    data = draw(st.data())
    shape = tuple(draw(st.lists(SIZES, max_size=4)))
    assume(prod(shape) <= MAX_SIZE)
    first = variable(*shape)
    tensor = Tensor.of(first)
    array = names(0, shape)
    for _ in range(draw(st.integers(0, max_steps))):
        tensor, array = draw(st.sampled_from(STEPS))(data, tensor, array)
    return tensor, array, first


def number_of(v: Variable, first: Variable) -> int:
    return 0 if v is first else int(v.name[1:])


def values_of(tensor: Tensor, first: Variable) -> dict[Variable, np.ndarray]:
    return {v: names(number_of(v, first), v.shape) for v in tensor.variables()}


# --- jaxprs in numpy --------------------------------------------------------------------------------------------------


def _update(x, new, *starts):
    x = x.copy()
    x[tuple(slice(s, s + n) for s, n in zip(starts, new.shape, strict=True))] = new
    return x


def _broadcast(x, shape, broadcast_dimensions, **_):
    inner = [1] * len(shape)
    for axis, n in zip(broadcast_dimensions, x.shape, strict=True):
        inner[axis] = n
    return np.broadcast_to(x.reshape(inner), shape)


def _slice(x, start_indices, limit_indices, strides):
    ends = zip(start_indices, limit_indices, strides or [1] * x.ndim, strict=True)
    assert all(0 <= s <= lim <= n for s, lim, n in zip(start_indices, limit_indices, x.shape, strict=True))
    return x[tuple(slice(*sls) for sls in ends)]


NUMPY = {
    "slice": _slice,
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes),
    "transpose": lambda x, permutation: x.transpose(permutation),
    "rev": lambda x, dimensions: np.flip(x, dimensions),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "dynamic_update_slice": _update,
}


def run(fun, *arrays):
    """Trace a function, and run its jaxpr in numpy where every primitive is in the table; also its primitives."""
    closed = jax.make_jaxpr(fun)(*arrays)
    used = {eqn.primitive.name for eqn in closed.jaxpr.eqns}
    if not used <= set(NUMPY):
        return [np.asarray(out) for out in jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *arrays)], used
    held = dict(zip(closed.jaxpr.invars, arrays, strict=True)) | dict(
        zip(closed.jaxpr.constvars, closed.consts, strict=True)
    )

    for eqn in closed.jaxpr.eqns:
        out = NUMPY[eqn.primitive.name](*[_lookup(held, atom) for atom in eqn.invars], **eqn.params)
        assert out.shape == eqn.outvars[0].aval.shape
        held[eqn.outvars[0]] = out
    return [_lookup(held, atom) for atom in closed.jaxpr.outvars], used


def _lookup(held, atom):
    return atom.val if hasattr(atom, "val") else held[atom]


# --- properties -------------------------------------------------------------------------------------------------------


@settings(max_examples=175)
@given(view())
def test_views_have_the_elements_of_numpy(case):
    tensor, array, first = case
    assert tensor.shape == array.shape == tensor.node.shape
    assert (tensor.ndim, tensor.size) == (array.ndim, array.size)
    event(type(tensor.node).__name__)
    which, index = tensor.flat_indices()
    assert which.dtype == index.dtype == np.int64
    numbers = np.array([number_of(v, first) for v in tensor.variables()])
    np.testing.assert_array_equal(numbers[which] * STRIDE + index, array)
    if tensor.size:
        assert set(np.unique(array // STRIDE)) == set(numbers)


@settings(max_examples=100)
@given(view())
def test_queries_agree_with_the_list_of_elements(case):
    tensor, array, first = case
    assert tensor.is_writable == (np.unique(array).size == array.size)
    if tensor.size:
        v = tensor.variables()[0]
        full = np.array_equal(array.reshape(-1), names(number_of(v, first), (v.size,)))
        assert tensor.is_whole_variable == (full and tensor.affine is not None)


@settings(max_examples=100)
@given(view())
def test_affine_pieces_are_canonical(case):
    tensor, _, _ = case
    for piece in _pieces(tensor.node):
        for group in piece.dims:
            assert all(n != 1 for n, _ in group)
            assert all(a[1] != b[0] * b[1] for a, b in pairwise(group))
        if tensor.size == 0:
            assert piece.offset == 0


def _pieces(node):
    if isinstance(node, Concat):
        assert len(node.parts) > 1 and 0 not in node.shape
        return [piece for part in node.parts for piece in _pieces(part)]
    return _pieces(node.source) if isinstance(node, Reshaped) else [node] if isinstance(node, Affine) else []


@settings(max_examples=100)
@given(view())
def test_read_gives_the_elements(case):
    tensor, array, first = case
    values = values_of(tensor, first)
    (out,), used = run(lambda *xs: read(tensor, dict(zip(values, xs, strict=True))), *values.values())
    np.testing.assert_array_equal(out, array)
    if not any(isinstance(node, Indexed) for node in _nodes(tensor.node)):
        event("gather" if "gather" in used else "no gather")


def _nodes(node):
    children = node.parts if isinstance(node, Concat) else [node.source] if isinstance(node, Reshaped) else []
    return [node, *(below for child in children for below in _nodes(child))]


@settings(max_examples=100)
@given(view())
def test_write_is_numpys_assignment(case):
    tensor, array, first = case
    values = values_of(tensor, first)
    new = -1 - np.arange(array.size, dtype=np.int32).reshape(array.shape)
    if not tensor.is_writable:
        with pytest.raises(TensorError, match="write to"):
            write(tensor, values, new)
        return
    expected = {v: x.copy() for v, x in values.items()}
    for v, x in expected.items():
        mine = array // STRIDE == number_of(v, first)
        x.reshape(-1)[array[mine] % STRIDE] = new[mine]

    def written(new, *xs):
        out = write(tensor, dict(zip(values, xs, strict=True)), new)
        return [out[v] for v in values]

    outs, _ = run(written, new, *values.values())
    for out, want in zip(outs, expected.values(), strict=True):
        np.testing.assert_array_equal(out, want)


@settings(max_examples=12)
@given(view(max_steps=4))
def test_jax_agrees_with_the_table_of_numpy_functions(case):
    tensor, array, first = case
    values = {v: jnp.asarray(x) for v, x in values_of(tensor, first).items()}
    np.testing.assert_array_equal(read(tensor, values), array)
    if tensor.is_writable:
        updated = write(tensor, values, jnp.asarray(-array))
        np.testing.assert_array_equal(read(tensor, values | updated), -array)
