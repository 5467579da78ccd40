"""Slow paths of products and convolutions: operands in another order, whose rows of channels are no whole vectors."""

import jax
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.poplin.rearranged import rearrangement_cycles, rearrangement_of_whole_rows, slow_rearrangement
from ipujax.lowering.poplin.spec import ConvSpec, Dims
from ipujax.lowering.poplin.vertex_kinds import KINDS
from ipujax.runtime.target import preset

TARGET = preset("mk2")
HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
KIND = next(kind for kind in KINDS if kind.name == "ConvPartial1x1OutSwapped")


def product_spec(rows, channels, outs, dtype):
    extents = Dims(1, 1, outs, channels, (rows,), (1,))
    return ConvSpec(extents, (rows,), (1,), (1,), (1,), dtype, dtype, dtype, dtype, is_product=True)


@pytest.mark.parametrize(
    ("channels", "dtype", "rate"),
    [(197, HALF, 5.1484), (198, HALF, 3.125), (197, FLOAT, 3.125), (194, HALF, 3.125)],
)
def test_slow_path_of_channels_that_are_padded(channels, dtype, rate):
    spec = product_spec(64, channels, 48, dtype)
    block = Dims(1, 1, np.array([16]), np.array([32]), (np.array([16]),), (np.array([1]),))
    paths = slow_rearrangement(KIND, spec, block, TARGET)
    whole = rearrangement_of_whole_rows(KIND, spec, block, TARGET)
    assert [str(path.reason).partition(" because")[2] for path in paths] == [
        f" the row length {channels} is no multiple of {8 // dtype.itemsize}"
    ] * 2
    # Both operands: 16 rows and 16 columns of 32 channels. Floats move one by one, halves by the fast transposition.
    num_bytes = 16 * 32 * dtype.itemsize
    fast = num_bytes / 8 if dtype == HALF else 16 * 32 * 5 / 4
    assert all(path.cycles == np.ceil(num_bytes * rate - fast) for path in paths)
    assert rearrangement_cycles(KIND, spec, block, TARGET) == whole + sum(path.cycles for path in paths)


@pytest.mark.parametrize("channels", [192, 196, 208])
def test_slow_path_of_no_channels_that_are_whole_vectors(channels):
    # A block of 14 channels is no slow path: planners cut rows of whole vectors between vectors.
    spec = product_spec(64, channels, 48, HALF)
    block = Dims(1, 1, np.array([16]), np.array([14]), (np.array([16]),), (np.array([1]),))
    assert slow_rearrangement(KIND, spec, block, TARGET) == []


def test_slow_path_of_attention_is_named_once_a_reason():
    def attend(weights, values):
        return weights @ values

    shapes = ((4, 197, 197), (4, 197, 64))
    device = ipu.IPUModel(tiles_per_ipu=64)
    paths = ipu.jit(attend, device=device).profile(*(jax.ShapeDtypeStruct(s, "float16") for s in shapes)).slow_paths
    assert any(
        path.reason == "inputs rearranged by halves because the row length 197 is no multiple of 4" for path in paths
    )
    shapes = ((4, 200, 200), (4, 200, 64))
    assert not ipu.jit(attend, device=device).profile(*(jax.ShapeDtypeStruct(s, "float16") for s in shapes)).slow_paths


@pytest.mark.parametrize("columns", [197, 196])
def test_slow_path_does_not_change_numbers(columns):
    generator = np.random.default_rng(0)
    x, w = (generator.standard_normal(shape, np.float32) for shape in ((24, columns), (columns, 40)))
    product = ipu.jit(lambda x, w: x @ w, device=ipu.IPUModel(tiles_per_ipu=16))
    np.testing.assert_allclose(product(x, w), x @ w, rtol=1e-4, atol=1e-4)
