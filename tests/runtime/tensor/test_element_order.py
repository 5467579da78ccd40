"""Orders of elements: views of a variable and of the array that keeps it in another order name the same elements."""

from __future__ import annotations

import random
from math import prod

import jax.numpy as jnp
import numpy as np
import pytest

from ipujax.runtime.tensor import Affine, ElementOrder, Tensor, Variable, concat, read, reordered_node
from ipujax.runtime.tensor.affine import row_major
from ipujax.runtime.tensor.view import reshape_node, slice_node, transpose_node

GROUPED = Variable((64, 8, 16), np.dtype(np.float32))  # channel groups, rows, channels of a group
ROWS = Affine(GROUPED, 0, (((8, 16),), ((64, 128), (16, 1))))  # rows × channels


def order_of(view: Affine) -> ElementOrder:
    order = ElementOrder.of_dims(view.variable, [[stride for _, stride in group] for group in view.dims])
    assert order is not None
    return order


def assert_same_elements(piece: Affine, order: ElementOrder) -> None:
    """The moved view has, of the reordered elements, those that the view has of the variable's."""
    moved = order.view(piece)
    assert moved is not None and moved.shape == piece.shape
    elements = np.arange(piece.variable.size)
    array = np.empty_like(elements)
    array[order.indices(elements)] = elements
    np.testing.assert_array_equal(array[moved.flat_indices()], piece.flat_indices())


def test_the_view_of_an_order_is_its_array() -> None:
    order = order_of(ROWS)
    assert order.array.shape == (8, 1024) and not order.is_own
    assert order.view(ROWS) == row_major(order.array)


def test_views_have_the_same_elements() -> None:
    order = order_of(ROWS)
    whole = row_major(GROUPED)
    slices = [slice_node(ROWS, (2, 32), (3, 64), (1, 1)), slice_node(ROWS, (7, 5), (4, 3), (-2, 1))]
    pieces = [ROWS, whole, *slices, transpose_node(ROWS, (1, 0)), reshape_node(whole, (8192,))]
    for piece in pieces:
        assert isinstance(piece, Affine)
        assert_same_elements(piece, order)


def test_a_view_that_carries_between_digits_has_none() -> None:
    piece = Affine(GROUPED, 8, (((16, 1),),))  # the end of one row and the start of the next
    assert order_of(ROWS).view(piece) is None


@pytest.mark.parametrize("strides", [[[3], [2]], [[16], [16]], [[0], [1]], [[-1]]])
def test_strides_that_do_not_divide_have_no_order(strides: list[list[int]]) -> None:
    assert ElementOrder.of_dims(GROUPED, strides) is None


def test_a_part_of_a_variable_orders_all_of_it() -> None:
    padded = Variable((4, 6, 16), np.dtype(np.float32))
    part = Affine(padded, 0, (((5, 16),), ((4, 96), (10, 1))))  # 5 of 6 rows, 10 of 16 channels
    order = order_of(part)
    assert order.array.shape == (6, 64)
    assert_same_elements(part, order)


def test_random_views() -> None:
    chance = random.Random(0)
    for _ in range(200):
        sizes = [chance.choice((1, 2, 3, 4, 8)) for _ in range(chance.randint(2, 4))]
        variable = Variable(tuple(sizes), np.dtype(np.int32))
        if variable.size < 2:
            continue
        kept = transpose_node(row_major(variable), chance.sample(range(len(sizes)), len(sizes)))
        assert isinstance(kept, Affine)
        order = order_of(kept)
        shape = chance.sample(sizes, len(sizes))
        piece = reshape_node(transpose_node(row_major(variable), chance.sample(range(len(sizes)), len(sizes))), shape)
        if isinstance(piece, Affine) and order.view(piece) is not None:
            assert_same_elements(piece, order)
        assert_same_elements(row_major(variable), order)
        assert prod(order.array.shape) == variable.size


def test_concatenations_and_lists_are_reordered() -> None:
    order = order_of(ROWS)
    rows = Tensor(ROWS, ROWS.shape, GROUPED.dtype)
    values = np.random.default_rng(0).normal(size=GROUPED.shape).astype(np.float32)
    array = np.empty(GROUPED.size, np.float32)
    array[order.indices(np.arange(GROUPED.size))] = values.ravel()
    tensor = concat([rows[:, 32:64], rows[:, :16]], 1)
    listed = rows.flatten()[5::7]
    for each in (tensor, listed, tensor.transpose((1, 0)), tensor.flatten()):
        node = reordered_node(each.node, {GROUPED: order})
        assert node is not None
        got = read(Tensor(node, each.shape, each.dtype), {order.array: jnp.asarray(array.reshape(order.array.shape))})
        np.testing.assert_array_equal(got, read(each, {GROUPED: jnp.asarray(values)}))
