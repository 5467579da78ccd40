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
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from ipujax.runtime.errors import TensorError
from ipujax.runtime.tensor import Affine, Concat, Indexed, Reshaped, Tensor, concat, read, write
from ipujax.runtime.variable import Variable

STRIDE = 10_000
MAX_SIZE = 600
QUIET = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def variable(*shape: int, name: str = "v", dtype: type = np.int32) -> Variable:
    return Variable(shape, np.dtype(dtype), name)


def names(number: int, shape: tuple[int, ...]) -> np.ndarray:
    return (np.arange(prod(shape), dtype=np.int32) + number * STRIDE).reshape(shape)


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
    shape, axes = [], []
    for n in a.shape:
        shape += [data.draw(st.integers(1, 3))] * data.draw(st.integers(0, 1))
        axes.append(len(shape))
        shape.append(data.draw(st.integers(0, 3)) if n == 1 else n)
    assume(prod(shape) <= MAX_SIZE)
    shown = a.reshape([a.shape[axes.index(i)] if i in axes else 1 for i in range(len(shape))])
    return t.broadcast_in_dim(shape, axes), np.broadcast_to(shown, shape)


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
    axis, stride = data.draw(st.integers(0, a.ndim - 1)), data.draw(st.integers(1, 4))
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
    beside, names_beside = t, a
    if data.draw(st.integers(0, 3)):
        number = 1 + int(a.max(initial=0)) // STRIDE
        beside, names_beside = Tensor.of(variable(*a.shape, name=f"w{number}")), names(number, a.shape)
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
    tensor, array = Tensor.of(first), names(0, shape)
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


@settings(max_examples=500, **QUIET)
@given(view())
def test_elements_lie_where_numpy_puts_them(case):
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


@settings(max_examples=300, **QUIET)
@given(view())
def test_queries_say_what_the_elements_say(case):
    tensor, array, first = case
    assert tensor.is_writable == (np.unique(array).size == array.size)
    assert not (tensor.contains_constant_broadcast and tensor.is_writable)
    if tensor.size:
        v = tensor.variables()[0]
        whole = np.array_equal(array.reshape(-1), names(number_of(v, first), (v.size,)))
        assert tensor.is_whole_variable == (whole and tensor.affine is not None)
    if tensor.affine is None:
        with pytest.raises(TensorError, match="one affine piece"):
            tensor.single_runs()
        return
    starts, lengths = tensor.single_runs()
    listed = [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
    np.testing.assert_array_equal(np.concatenate([np.zeros(0, int), *listed]), array.reshape(-1) % STRIDE)


@settings(max_examples=250, **QUIET)
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


@settings(max_examples=250, **QUIET)
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


@settings(max_examples=250, **QUIET)
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


@settings(max_examples=12, **QUIET)
@given(view(max_steps=4))
def test_jax_agrees_with_the_table_of_numpy_functions(case):
    tensor, array, first = case
    values = {v: jnp.asarray(x) for v, x in values_of(tensor, first).items()}
    np.testing.assert_array_equal(read(tensor, values), array)
    if tensor.is_writable:
        updated = write(tensor, values, jnp.asarray(-array))
        np.testing.assert_array_equal(read(tensor, values | updated), -array)


# --- the form views take ----------------------------------------------------------------------------------------------


def test_reshape_of_a_transpose_stays_affine():
    t = Tensor.of(variable(4, 6, 5))
    assert t.affine.dims == (((4, 30),), ((6, 5),), ((5, 1),))
    assert t.flatten().affine.dims == (((120, 1),),)
    assert t.transpose((0, 2, 1)).flatten().affine.dims == (((4, 30), (5, 1), (6, 5)),)
    assert t.transpose((0, 2, 1)).flatten().reshape((4, 5, 2, 3)).affine.dims[2:] == (((2, 15),), ((3, 5),))
    back = t.transpose((2, 0, 1)).flatten().reshape((5, 4, 6)).transpose((1, 2, 0))
    assert back.is_whole_variable and back.affine == t.affine


def test_a_cut_between_digits_stays_affine_and_others_make_few_pieces():
    turned = Tensor.of(variable(10, 20)).transpose().flatten()  # 20 columns of 10
    assert turned[30:70].affine is not None
    assert turned[5::10].affine is not None
    assert len(turned[35:72].node.parts) == 3
    assert turned[35:38].affine is not None
    assert turned[::-2].affine is not None
    assert turned[35:72][5:35].affine == turned[40:70].affine


@pytest.mark.parametrize("cuts", [(0, 3, 8), (0, 1, 2, 3, 8), (0, 4, 4, 8)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_put_together_are_the_variable_again(cuts, axis):
    t = Tensor.of(variable(8, 8, 8))
    boxes = [(slice(None),) * axis + (slice(*ends),) for ends in pairwise(cuts)]
    assert concat([t[box] for box in boxes], axis).is_whole_variable
    turned = t.transpose((2, 0, 1))
    assert concat([turned[box] for box in boxes], axis).affine == turned.affine


def test_pieces_of_a_flattened_transpose_merge_again():
    turned = Tensor.of(variable(10, 20)).transpose().flatten()
    parts = [turned[a:b] for a, b in zip((0, 7, 13, 58, 120), (7, 13, 58, 120, 200), strict=True)]
    assert concat(parts).affine == turned.affine


def test_rows_of_one_stride_merge_and_unrelated_pieces_do_not():
    t = Tensor.of(variable(6, 10))
    assert concat([t[i : i + 1] for i in (1, 3, 5)]).affine == t[1::2].affine
    assert concat([t[i : i + 1] for i in (5, 3, 1)]).affine == t[:0:-2].affine
    flat = Tensor.of(variable(11))
    assert isinstance(concat([flat[:4], flat[7:]]).node, Concat)  # 7 divides nothing: two slices, not a gather
    assert isinstance(concat([t, Tensor.of(variable(6, 10))]).node, Concat)


def test_concat_of_variables_reshapes_part_by_part():
    a, b = (Tensor.of(variable(4, 6)) for _ in range(2))
    both = concat([a, b], axis=1)
    split = both.reshape((2, 2, 2, 6))
    assert split.node.axis == 2 and split.node.shape == (2, 2, 2, 6)
    assert split[:, :, 1].reshape((4, 6)).affine == b.affine
    assert len(concat([a, b]).reshape((4, 12)).node.parts) == 2
    assert len(concat([a, b], axis=1).flatten().node.parts) == 8
    many = concat([Tensor.of(variable(100, 6)) for _ in range(2)], axis=1).flatten()
    assert isinstance(many.node, Reshaped)  # 200 pieces otherwise
    assert isinstance(many.reshape((100, 12)).node, Concat)


def test_reshape_that_cuts_inside_a_digit_keeps_its_source():
    t = Tensor.of(variable(4, 5))[:, :3]
    assert isinstance(t.reshape((6, 2)).node, Reshaped)
    assert t.reshape((6, 2)).reshape((4, 3)).affine == t.affine
    assert isinstance(t.reshape((6, 2))[1:].node, Indexed)
    for arrays in (t.reshape((6, 2))[1:].node.which, t.reshape((6, 2))[1:].node.index):
        assert not arrays.flags.writeable


def test_whole_and_constant_and_iteration():
    v = Variable((3, 4), np.dtype(np.float32), "c", value=np.zeros((3, 4), np.float32))
    t = Tensor.of(v)
    assert t.is_whole_variable and t.contains_constant and t.reshape((2, 6)).is_whole_variable
    assert not t[:2].is_whole_variable and not t.transpose().is_whole_variable
    assert [row.shape for row in t] == [(4,)] * 3
    assert t.variables() == (v,) and concat([t, t]).variables() == (v,)
    scalar = t[1, 2]
    assert scalar.shape == () and scalar.affine.offset == 6
    starts, lengths = t[1:, 1:3].single_runs()
    assert starts.tolist() == [5, 9] and lengths.tolist() == [2, 2]
    assert t.expand_dims((0, -1)).shape == (1, 3, 4, 1)
    assert t[None, :1].squeeze(0).shape == (1, 4)
    assert "float32[3, 4] of c" in repr(t)


def test_interleaved_pieces_of_a_large_variable_are_writable():
    t = Tensor.of(variable(1 << 15, 1 << 15))  # 2^30 elements: counting them would take gigabytes
    swapped = concat([t[:, 9:], t[:, :9]], axis=1)
    assert swapped.is_writable
    assert concat([t[::2], t[1::2]]).is_writable
    assert not t[:, :1].broadcast_in_dim(t.shape, (0, 1)).is_writable


@pytest.mark.parametrize("overlap", [0, 1])
def test_pieces_that_share_one_element_are_not_writable(overlap):
    t = Tensor.of(variable(6, 10))
    flat = t.flatten()
    assert concat([flat[30:], flat[: 30 + overlap]]).is_writable == (not overlap)
    assert concat([flat[: 30 + overlap], Tensor.of(variable(3)), flat[30:]]).is_writable == (not overlap)
    assert concat([t[:, 4:], t[:, : 4 + overlap]], axis=1).is_writable == (not overlap)
    assert concat([t[:, : 4 + overlap], Tensor.of(variable(6, 1)), t[:, 4:]], axis=1).is_writable == (not overlap)
    assert concat([t[1:, : 4 + overlap], t[:-1, 4:]], axis=1).is_writable == (not overlap)
    assert concat([flat[::2], flat[1 - overlap :: 4]]).is_writable == (not overlap)


# --- what JAX is given ------------------------------------------------------------------------------------------------


def primitives(fun, *arrays) -> list[str]:
    return [eqn.primitive.name for eqn in jax.make_jaxpr(fun)(*arrays).jaxpr.eqns]


V = variable(4, 6, 5)
T = Tensor.of(V)
READS = {
    "whole": (T, []),
    "reshape": (T.reshape((8, 15)), ["reshape"]),
    "transpose": (T.transpose((2, 0, 1)), ["transpose"]),
    "transpose of a unit": (T[:, 2:3].transpose((1, 2, 0)), ["slice", "transpose"]),
    "slice": (T[1:3, ::2, 2:], ["slice"]),
    "integer": (T[1], ["slice", "reshape"]),
    "reverse": (T.reverse((0, 2)), ["rev"]),
    "negative step": (T[:, ::-1], ["rev"]),
    "broadcast": (T.broadcast_in_dim((7, 4, 6, 5), (1, 2, 3)), ["broadcast_in_dim"]),
    "flat slice": (T.flatten()[17:93], ["reshape", "slice"]),
    "flat steps": (T.flatten()[2::3], ["reshape", "slice", "reshape"]),
    "slice of a reshape": (T.reshape((8, 3, 5))[:, 1:, 2:4], ["reshape", "slice"]),
    "steps of a reshape": (T.reshape((24, 5))[1::4, ::2], ["reshape", "slice", "reshape"]),
    "flatten of a transpose": (T.transpose().flatten(), ["transpose", "reshape"]),
    "window": (T.flatten()[3:113].reshape((11, 10))[:, 2:9], ["reshape", "slice", "reshape", "slice"]),
    "rotation": (concat([T[1:], T[:1]]), ["slice", "slice", "concatenate"]),
    "reshaped": (T[:, :, :3].reshape((36, 2)), ["slice", "reshape"]),
}


@pytest.mark.parametrize("name", READS)
def test_read_is_a_few_cheap_primitives(name):
    tensor, expected = READS[name]
    assert primitives(lambda x: read(tensor, {V: x}), names(0, V.shape)) == expected


WRITES = {
    "whole": (T, []),
    "transpose": (T.transpose((2, 0, 1)), ["transpose"]),
    "slice": (T[1:3, 2:4], ["dynamic_update_slice"]),
    "integer": (T[1], ["reshape", "dynamic_update_slice"]),
    "flat slice": (T.flatten()[17:93], ["reshape", "dynamic_update_slice", "reshape"]),
    "window": (
        T.flatten()[3:113].reshape((11, 10))[:, 2:9],
        ["reshape", "slice", "reshape", "dynamic_update_slice", "reshape", "dynamic_update_slice", "reshape"],
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_write_is_a_few_cheap_primitives(name):
    tensor, expected = WRITES[name]
    new = names(1, tensor.shape)
    assert primitives(lambda x, new: write(tensor, {V: x}, new)[V], names(0, V.shape), new) == expected


@pytest.mark.parametrize("key", [np.s_[:, ::2], np.s_[1::2, 2::3], np.s_[::-2, 1::2, 1:3]])
def test_steps_that_divide_are_written_without_scatter(key):
    want = names(0, V.shape)
    new = names(1, want[key].shape)
    (out,), used = run(lambda x, new: write(T[key], {V: x}, new)[V], want.copy(), new)
    want[key] = new
    np.testing.assert_array_equal(out, want)
    assert "scatter" not in used


def test_read_of_a_whole_variable_is_the_value_itself():
    value = jnp.zeros(V.shape, jnp.int32)
    assert read(T, {V: value}) is value
    assert read(T[:2], {V: value}).dtype == jnp.int32
    new = jnp.ones(V.shape, jnp.int32)
    assert write(T, {}, new) == {V: new}


def test_keys_are_read_and_written():
    keys = jax.random.split(jax.random.key(0), 12).reshape(3, 4)
    v = Variable((3, 4), keys.dtype, "keys")
    t, values = Tensor.of(v), {v: keys}
    data = np.asarray(jax.random.key_data(keys))
    turned = concat([t.transpose()[1:, ::-1], t[:, 0][None]])
    want = np.concatenate([data.transpose(1, 0, 2)[1:, ::-1], data[:, 0][None]])
    np.testing.assert_array_equal(jax.random.key_data(read(turned, values)), want)
    np.testing.assert_array_equal(
        jax.random.key_data(read(t[:, :3].reshape((9,))[::2], values)), data[:, :3].reshape(9, 2)[::2]
    )
    assert read(t[:0], values).shape == (0, 4)
    written = write(t[1:, ::2], values, keys[:2, :2])[v]
    data = data.copy()
    data[1:, ::2] = data[:2, :2].copy()
    np.testing.assert_array_equal(jax.random.key_data(written), data)


def test_read_and_write_under_jit_and_vmap():
    inner = T.transpose()[1:4, ::-1]

    def double(x):
        return write(inner, {V: x}, 2 * read(inner, {V: x}))[V]

    stacked = np.stack([names(0, V.shape), names(1, V.shape)])
    want = stacked.copy()
    want[..., 1:4] *= 2
    np.testing.assert_array_equal(jax.jit(jax.vmap(double))(stacked), want)


# --- errors -----------------------------------------------------------------------------------------------------------

BAD = {
    "slice limits": (lambda: T.slice((0, 0, 0), (4, 7, 5)), "limit <= 6"),
    "slice rank": (lambda: T.slice((0,), (4,)), "3 starts"),
    "slice stride": (lambda: T.slice((0, 0, 0), (4, 6, 5), (1, 0, 1)), "stride 0"),
    "index range": (lambda: T[4], "-4 <= index < 4"),
    "index count": (lambda: T[0, 0, 0, 0], "at most 3 indices"),
    "index array": (lambda: T[np.array([0, 1])], "integers, slices"),
    "index mask": (lambda: T[True], "integers, slices"),
    "index step": (lambda: T[::0], "a step other than 0"),
    "two dots": (lambda: T[..., 0, ...], "one ..."),
    "reshape": (lambda: T.reshape((7, 17)), "120 elements"),
    "reshape -1": (lambda: T.reshape((7, -1)), "120 elements"),
    "transpose": (lambda: T.transpose((0, 1, 1)), "a permutation"),
    "broadcast sizes": (lambda: T.broadcast_in_dim((4, 6, 6), (0, 1, 2)), "sizes of 1"),
    "broadcast order": (lambda: T.broadcast_in_dim((6, 4, 5), (1, 0, 2)), "increasing"),
    "squeeze": (lambda: T.squeeze(0), "size 1"),
    "expand": (lambda: T.expand_dims(5), "axes below 4"),
    "reverse": (lambda: T.reverse(3), "one of 3"),
    "sub_sample": (lambda: T.sub_sample(0, 0), "stride >= 1"),
    "concat nothing": (lambda: concat([]), "at least one"),
    "concat shape": (lambda: concat([T, T[:, 1:]]), "shape and dtype like"),
    "concat dtype": (lambda: concat([T, Tensor.of(variable(4, 6, 5, dtype=np.float32))]), "shape and dtype like"),
    "iterate": (lambda: list(T[0, 0, 0]), "at least one dimension"),
    "no value": (lambda: read(T, {}), "no value"),
    "value shape": (lambda: read(T, {V: jnp.zeros((4, 6))}), r"\(4, 6, 5\)"),
    "write shape": (lambda: write(T, {}, jnp.zeros((4, 6), jnp.int32)), r"int32\[4, 6, 5\]"),
    "write dtype": (lambda: write(T, {}, jnp.zeros((4, 6, 5), jnp.float32)), r"int32\[4, 6, 5\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_views_say_what_was_expected(name):
    make, match = BAD[name]
    with pytest.raises(TensorError, match=match):
        make()
