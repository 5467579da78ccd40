"""Slow paths of rows that are no whole number of vectors: which operations take them, why, and for how many cycles."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu

ROWS = 14
DEVICE = ipu.IPUModel(tiles_per_ipu=1)


def profile(fun, *shapes, dtype="float16", device=DEVICE):
    return ipu.jit(fun, device=device).profile(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


def subtract_mean(x, mean):
    return x - mean[:, None]


def add_bias(x, bias):
    return x + bias


@pytest.mark.parametrize("columns", [192, 200, 64, 8])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("fun", "operand"), [(subtract_mean, ROWS), (add_bias, None)])
def test_slow_path_of_no_row_of_whole_vectors(fun, operand, columns, dtype):
    small = (columns,) if operand is None else (operand,)
    assert profile(fun, (ROWS, columns), small, dtype=dtype).slow_paths == ()


@pytest.mark.parametrize(
    ("dtype", "columns", "vector"), [("float16", 197, 4), ("float16", 22, 4), ("float16", 9, 4), ("float32", 197, 2)]
)
def test_slow_path_of_an_element_for_each_row(dtype, columns, vector):
    (path,) = profile(subtract_mean, (ROWS, columns), (ROWS,), dtype=dtype).slow_paths
    assert path.reason == f"C++ because the row length {columns} is no multiple of {vector}"
    assert path.operation.startswith("popops::Sub") and "test_slow_paths.py" in str(path.origin)
    # PopLibs: a worker takes rows where they are shorter than a vector for each of six workers, else a part of each.
    cycles = 3
    if columns < 6 * vector:
        outer, loops = math.ceil(ROWS / 6), math.ceil(columns / vector)
    else:
        outer, loops = ROWS, math.ceil(math.ceil(columns / 6) / vector)
    whole = math.ceil(math.ceil(ROWS * columns / vector) / 6)
    assert path.cycles == 6 * (outer * (25 + loops * cycles) - whole * cycles)


@pytest.mark.parametrize(("dtype", "columns", "rate"), [("float16", 197, 5.1484), ("float16", 6, 3.125)])
def test_slow_path_of_a_row_that_is_repeated(dtype, columns, rate):
    (path,) = profile(add_bias, (ROWS, columns), (columns,), dtype=dtype).slow_paths
    assert path.reason.startswith("repeated rows are copied by ") and f"row length {columns} " in path.reason
    assert path.cycles == math.ceil(ROWS * columns * np.dtype(dtype).itemsize * rate)


@pytest.mark.parametrize("columns", [197, 22])
def test_slow_path_is_part_of_the_cycles(columns):
    slow = profile(subtract_mean, (ROWS, columns), (ROWS,))
    whole = profile(subtract_mean, (ROWS, columns // 4 * 4), (ROWS,))
    assert slow.device_cycles - whole.device_cycles >= 0.9 * slow.slow_paths[0].cycles


def test_slow_path_of_a_fused_softmax_is_of_its_rows():
    def softmax(x):
        return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)

    reasons = {path.reason for path in profile(softmax, (ROWS, 197)).slow_paths}
    assert reasons == {"C++ because the row length 197 is no multiple of 4"}
    assert profile(softmax, (ROWS, 200)).slow_paths == ()


@pytest.mark.parametrize(("columns", "atom"), [(197, "by halves"), (198, "by words"), (200, "")])
def test_slow_path_of_rows_that_are_put_together(columns, atom):
    # Columns of products are on several tiles; the largest of each row is of all of them.
    def row_maxima(x, w):
        return (x @ w).max(-1)

    device = ipu.IPUModel(tiles_per_ipu=64)
    reasons = [path.reason for path in profile(row_maxima, (96, 64), (64, columns), device=device).slow_paths]
    copied = [reason for reason in reasons if reason.startswith("operand copied")]
    assert all(f"copied {atom} because the row length {columns}" in reason for reason in copied)
    assert bool(copied) == bool(atom)


def test_slow_paths_are_saved_and_named(tmp_path):
    original = profile(subtract_mean, (ROWS, 197), (ROWS,))
    original.save(tmp_path / "profile.json")
    assert ipu.Profile.load(tmp_path / "profile.json").slow_paths == original.slow_paths
    assert "C++ because the row length 197 is no multiple of 4" in original.summary()


@pytest.mark.parametrize(("columns", "is_slow"), [(197, True), (22, True), (24, False), (192, False)])
def test_slow_path_of_sums_over_rows(columns, is_slow):
    # On one tile: the default vertex fetches each of the rows by a pointer, vector by vector, and its remainder.
    def column_sums(x):
        return jax.lax.reduce_sum(x, (0,))

    paths = [path for path in profile(column_sums, (ROWS, columns)).slow_paths if "partials" in path.reason]
    assert bool(paths) == is_slow
    if is_slow:
        reason = f"partials fetched one by one because the row length {columns} is no multiple of 4"
        assert [path.reason for path in paths] == [reason]
        vectors, bits = columns // 8, (columns % 8).bit_count()
        least = vectors * 19 * ROWS + bits * 16 * ROWS
        assert 0.5 * least < paths[0].cycles < 1.5 * least


def test_slow_path_of_no_sum_along_a_row():
    def row_sums(x):
        return jax.lax.reduce_sum(x, (1,))

    assert not [path for path in profile(row_sums, (ROWS, 197)).slow_paths if "partials" in path.reason]


@pytest.mark.parametrize("vector_bytes", [4, 16])
def test_slow_paths_on_machines_of_other_vectors(vector_bytes):
    # Atoms are those of the source, up to 64 bits, whatever a machine's vectors are.
    device = ipu.IPUModel(tiles_per_ipu=16, vector_width_bytes=vector_bytes)

    def program(x, w):
        y = x @ w
        return y - y.max(-1, keepdims=True), y.sum(0)

    for columns in (30, 31, 32, 33, 34):
        assert profile(program, (24, columns), (columns, columns + 1), device=device).cycles > 0
