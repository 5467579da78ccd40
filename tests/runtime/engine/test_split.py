"""Signatures against one vertex at a time, and blocks against numpy slices."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ipujax.runtime.engine.split import join_blocks, put_blocks, signatures, take_blocks, varying_axes
from ipujax.runtime.graph.codelet import Codelet, Field
from ipujax.runtime.graph.vertex_group import NO_TILE, Access, Axis, Dim, Term, VertexGroup, extents, unsplit
from ipujax.runtime.tensor.mapping import frozen
from ipujax.runtime.tensor.tensor import Tensor
from ipujax.runtime.tensor.variable import Variable
from tests.runtime.helpers import no_cycles

FLOAT = np.dtype(np.float32)


@st.composite
def groups(draw: Any) -> VertexGroup:
    """Any group of up to three axes, with holes, strides, halos and block numbers; not one that could run."""
    axes = []
    for number in range(draw(st.integers(0, 3))):
        inner = draw(st.lists(st.integers(1, 6), max_size=3, unique=True))
        axes.append(Axis(f"a{number}", frozen([0, *sorted(inner), 7][: draw(st.integers(1, 9))], np.int64)))
    term = st.builds(Term, st.integers(0, len(axes) - 1), st.integers(-2, 3), st.sampled_from(["element", "block"]))
    terms = st.lists(term, max_size=2).map(tuple) if axes else st.just(())
    dims = st.lists(st.builds(Dim, terms, st.integers(-5, 9), st.integers(1, 3)), max_size=3).map(tuple)
    accesses = []
    for rank_dims in draw(st.lists(dims, min_size=1, max_size=3)):
        shape = tuple(draw(st.integers(0, 9)) for _ in rank_dims)
        accesses.append(Access(Tensor.of(Variable(shape, FLOAT)), rank_dims, 0.0))
    counts = tuple(axis.blocks for axis in axes)
    tile = np.array(draw(st.lists(st.integers(NO_TILE, 3), min_size=prod(counts), max_size=prod(counts))), np.int32)
    codelet = Codelet("any", tuple(Field(f"f{i}", "in", FLOAT) for i in range(len(accesses))), len, no_cycles)
    origins = tuple(axis.name for axis in axes if draw(st.booleans()))
    return VertexGroup(codelet, tuple(axes), tuple(accesses), tile.reshape(counts), origins)


def facts(group: VertexGroup) -> dict[tuple[int, ...], Any]:
    """By index of its block, tile, first indices, and the blocks of each vertex, one vertex at a time."""
    names = [axis.name for axis in group.axes]
    result = {}
    for index in np.ndindex(group.grid):
        if group.tile[index] != NO_TILE:
            first = [int(group.axes[names.index(n)].cuts[index[names.index(n)]]) for n in group.origins]
            blocks = []
            for access in group.accesses:
                for extent in extents(group, access):
                    values = (extent.start, extent.length, extent.pad_low, extent.pad_high)
                    blocks.append(tuple(int(np.broadcast_to(v, group.grid)[index]) for v in values))
            result[index] = int(group.tile[index]), first, blocks
    return result


@given(groups())
@settings(max_examples=75)
def test_signatures_hold_each_vertex_once_with_its_blocks(group: VertexGroup) -> None:
    got = {}
    actual = signatures(group)
    for signature in actual:
        for v, index in enumerate(signature.index):
            blocks = [
                (int(start), length, *pads)
                for field in range(len(group.accesses))
                for start, length, pads in zip(
                    signature.starts[field][v], signature.lengths[field], signature.pads[field], strict=True
                )
            ]
            assert tuple(index) not in got
            got[tuple(index)] = int(signature.tile[v]), signature.origins[v].tolist(), blocks
    assert got == facts(group)
    assert len({(s.lengths, s.pads) for s in actual}) == len(actual)


@given(groups())
@settings(max_examples=50)
def test_signature_of_a_group_of_one_vertex(group: VertexGroup) -> None:
    one = unsplit(group)
    for signature in signatures(one):
        (expected,) = facts(one).values()
        starts = [int(start) for field in signature.starts for start in field[0]]
        lengths = [length for field in signature.lengths for length in field]
        pads = [pad for field in signature.pads for pad in field]
        assert [(s, n, *p) for s, n, p in zip(starts, lengths, pads, strict=True)] == expected[2]


def starts_on_grid(case: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """Starts on a grid in an array of 12 × 10, and the lengths of blocks."""
    i, j = np.meshgrid(np.arange(3), np.arange(2), indexing="ij")
    table: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
        "adjacent": (4 * i, 5 * j, (4, 5)),
        "adjacent inside": (1 + 3 * i, 2 + 2 * j, (3, 2)),
        "transposed": (3 * j, 2 * i, (3, 2)),
        "apart": (4 * i, 5 * j, (2, 3)),
        "halo": (3 * i, 4 * j, (5, 6)),
        "on one axis": (4 * i, 0 * j, (4, 10)),
        "by two axes": (2 * i + j, 5 * j, (3, 5)),
        "backwards": (8 - 4 * i, 5 * j, (4, 5)),
    }
    first, second, lengths = table[case]
    return np.stack([first, second], axis=-1), lengths


CASES = ["adjacent", "adjacent inside", "transposed", "apart", "halo", "on one axis", "by two axes", "backwards"]


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_taken(case: str) -> None:
    starts, lengths = starts_on_grid(case)
    value = np.arange(120).reshape(12, 10)
    starts = starts[tuple(slice(None) if v else 0 for v in varying_axes(starts))]
    got = np.asarray(take_blocks(jnp.asarray(value), starts, lengths))
    for point in np.ndindex(starts.shape[:-1]):
        a, b = starts[point]
        np.testing.assert_array_equal(got[point], value[a : a + lengths[0], b : b + lengths[1]])


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_put(case: str) -> None:
    starts, lengths = starts_on_grid(case)
    blocks = np.arange(1, prod((3, 2, *lengths)) + 1, dtype=np.int32).reshape(3, 2, *lengths)
    expected = np.zeros((12, 10), blocks.dtype)
    for point in np.ndindex(3, 2):
        a, b = starts[point]
        expected[a : a + lengths[0], b : b + lengths[1]] = blocks[point]
    got = put_blocks(jnp.zeros((12, 10), blocks.dtype), starts, jnp.asarray(blocks))
    np.testing.assert_array_equal(got, expected)
    box = join_blocks(jnp.asarray(blocks), starts)
    assert (box is not None) == (case in ("adjacent", "adjacent inside", "transposed"))
    if box is not None:
        joined = np.zeros_like(expected)
        joined[tuple(slice(s, s + n) for s, n in zip(box[0], box[1].shape, strict=True))] = box[1]
        np.testing.assert_array_equal(joined, expected)


def test_keys_are_taken_and_put() -> None:
    keys = jax.random.split(jax.random.key(0), 6)
    starts = np.array([[0], [3]])
    blocks = take_blocks(keys, starts, (2,))
    assert jnp.array_equal(blocks, jnp.stack([keys[:2], keys[3:5]]))
    got = put_blocks(jax.random.split(jax.random.key(1), 6), starts, blocks)
    assert jnp.array_equal(got[:2], keys[:2]) and jnp.array_equal(got[3:5], keys[3:5])
