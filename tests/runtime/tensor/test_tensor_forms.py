"""The form views take (affine, few pieces, lists), the primitives JAX is given for them, and the errors."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipujax.runtime.errors import TensorError
from ipujax.runtime.tensor import Concat, Indexed, Reshaped, Tensor, concat, read, write
from ipujax.runtime.tensor.variable import Variable
from tests.runtime.helpers import names, variable

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
def test_concatenated_slices_merge_to_the_variable(cuts, axis):
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


def test_reshape_with_a_cut_inside_a_digit_keeps_its_source():
    t = Tensor.of(variable(4, 5))[:, :3]
    assert isinstance(t.reshape((6, 2)).node, Reshaped)
    assert t.reshape((6, 2)).reshape((4, 3)).affine == t.affine
    assert isinstance(t.reshape((6, 2))[1:].node, Indexed)
    for arrays in (t.reshape((6, 2))[1:].node.which, t.reshape((6, 2))[1:].node.index):
        assert not arrays.flags.writeable


def test_complete_parts_of_a_concatenation_are_not_listed():
    many = concat([Tensor.of(variable(100, 6)) for _ in range(2)], axis=1).flatten()
    both = concat([many, Tensor.of(variable(5))])
    assert isinstance(both[:1200].node, Reshaped)
    assert isinstance(both[:1202].node, Concat)


def test_whole_and_constant_and_iteration():
    v = Variable((3, 4), np.dtype(np.float32), "c", value=np.zeros((3, 4), np.float32))
    t = Tensor.of(v)
    assert t.is_whole_variable and t.contains_constant and t.reshape((2, 6)).is_whole_variable
    assert not t[:2].is_whole_variable and not t.transpose().is_whole_variable
    assert [row.shape for row in t] == [(4,)] * 3
    assert t.variables() == (v,) and concat([t, t]).variables() == (v,)
    scalar = t[1, 2]
    assert scalar.shape == () and scalar.affine.offset == 6
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

    def written(x, new):
        return write(T[key], {V: x}, new)[V]

    assert "scatter" not in primitives(written, want, new)
    out = written(want.copy(), new)
    want[key] = new
    np.testing.assert_array_equal(out, want)


def test_read_of_a_whole_variable_is_the_value_itself():
    value = jnp.zeros(V.shape, jnp.int32)
    assert read(T, {V: value}) is value
    assert read(T[:2], {V: value}).dtype == jnp.int32
    new = jnp.ones(V.shape, jnp.int32)
    assert write(T, {}, new) == {V: new}


def test_keys_are_read_and_written():
    keys = jax.random.split(jax.random.key(0), 12).reshape(3, 4)
    v = Variable((3, 4), keys.dtype, "keys")
    t = Tensor.of(v)
    values = {v: keys}
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
def test_refuses_bad_views(name):
    make, match = BAD[name]
    with pytest.raises(TensorError, match=match):
        make()


@pytest.mark.parametrize(
    "view", [lambda t: t.flatten(-1), lambda t: t.flatten(2, 1), lambda t: t.reshape_partial(-1, 3, (4, 5, 6))]
)
def test_ranges_outside_of_the_dimensions_are_refused(view):
    tensor = Tensor.of(Variable((4, 5, 6), np.dtype(np.float32), "x"))
    with pytest.raises(TensorError, match="expected: 0 <= begin <= end <= 3"):
        view(tensor)
