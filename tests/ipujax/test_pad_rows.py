"""`Options(pad_rows=True)`: rows that are no whole number of vectors take more memory where that saves cycles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import PaddedRows

DEVICE = ipu.IPUModel(tiles_per_ipu=64)
PADDED = ipu.Options(pad_rows=True)


def attend(scores, values):
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(jnp.float16)
    return weights @ values


def profile(fun, *shapes, options=None, dtype="float16", device=DEVICE):
    return ipu.jit(fun, device=device, options=options).profile(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))


def attention(length, options=None):
    return profile(attend, (8, length, length), (8, length, 64), options=options)


def test_pad_rows_saves_the_cycles_that_it_says():
    slow, padded = attention(197), attention(197, PADDED)
    (row,) = padded.padded_rows
    assert (row.length, row.padded_length) == (197, 200)
    assert slow.cycles - padded.cycles == row.saved_cycles > 0
    assert slow.slow_paths and not padded.slow_paths
    # All variables live at once take at most so much more, and buffers for what arrives as much.
    assert 0 < padded.memory.max_tile_bytes - slow.memory.max_tile_bytes <= 0.04 * slow.memory.max_tile_bytes


def test_pad_rows_costs_at_least_what_the_longer_rows_cost():
    # A row of 200 is computed as one of 200, but planned as one of 197, which avoids slow paths.
    padded = attention(197, PADDED)
    assert attention(200).device_cycles <= 1.02 * padded.device_cycles
    assert padded.device_cycles < 0.75 * attention(197).device_cycles


@pytest.mark.parametrize("length", [192, 200])
def test_pad_rows_leaves_whole_vectors_as_they_are(length):
    plain, padded = attention(length), attention(length, PADDED)
    assert padded.padded_rows == () and padded.cycles == plain.cycles
    assert np.array_equal(padded.memory.tile_bytes, plain.memory.tile_bytes)


def test_pad_rows_is_off_by_default():
    assert attention(197).padded_rows == ()


def test_pad_rows_pays_for_its_bytes():
    # A cost per byte at which no cycle is worth a byte.
    costly = ipu.Options(pad_rows=True, byte_cost=1e6)
    assert attention(197, costly).padded_rows == ()


def test_pad_rows_of_several_lengths():
    def program(x, y, mean, other):
        return x - mean[:, None], y * other[:, None]

    device = ipu.IPUModel(tiles_per_ipu=4)
    shapes = (64, 197), (64, 301), (64,), (64,)
    rows = profile(program, *shapes, options=PADDED, device=device).padded_rows
    assert {row.length: row.padded_length for row in rows} == {197: 200, 301: 304}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_pad_rows_does_not_change_numbers(dtype):
    generator = np.random.default_rng(0)
    x, w = (generator.standard_normal(shape).astype(dtype) for shape in ((24, 51), (51, 13)))

    def program(x, w):
        y = x @ w
        return (y - y.mean(-1, keepdims=True)) / (1 + jnp.abs(y).max(-1, keepdims=True))

    device = ipu.IPUModel(tiles_per_ipu=8)
    plain = ipu.jit(program, device=device)(x, w)
    padded = ipu.jit(program, device=device, options=ipu.Options(pad_rows=True, check=True))(x, w)
    assert np.array_equal(plain, padded)


def test_pad_rows_is_saved_and_named(tmp_path):
    padded = attention(197, PADDED)
    padded.save(tmp_path / "profile.json")
    loaded = ipu.Profile.load(tmp_path / "profile.json")
    assert loaded.padded_rows == padded.padded_rows
    assert all(isinstance(row, PaddedRows) for row in loaded.padded_rows)
    assert "197 → 200 elements" in padded.summary() and "197 → 200 elements" in loaded.summary()


def test_pad_rows_is_a_bool():
    with pytest.raises(ArgumentError, match="pad_rows"):
        ipu.Options(pad_rows="auto")
