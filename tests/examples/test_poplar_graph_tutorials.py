"""Tutorials 3, 6 and 7 of the Poplar guide: their output, their numbers, and both tile by tile."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from ipujax import poplar
from tests.examples.poplar_examples import example
from tests.ipujax.poplar.helpers import run_both


@pytest.fixture(scope="module")
def tut3() -> ModuleType:
    return example("tut3_vertices")


@pytest.fixture(scope="module")
def tut6() -> ModuleType:
    return example("tut6_matrix_vector")


@pytest.fixture(scope="module")
def tut7() -> ModuleType:
    return example("tut7_matrix_vector_opt")


def tiles(number: int) -> poplar.Device:
    """A Mk2 with few tiles."""
    return poplar.IPUModel(tiles_per_ipu=number).create_device()


def test_tutorial_3_prints_suffix_sums(tut3, capfd):
    np.testing.assert_array_equal(tut3.main(), [7, 6, 4.5, 2.5])
    assert "v2: {7,6,4.5,2.5}" in "".join(capfd.readouterr())


def test_tutorial_6_multiplies(tut6, capsys):
    got, expected = tut6.multiply(40, 50, poplar.IPUModel().create_device())
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert "Multiplying matrix of size 40x50 by vector of size 50" in (text := capsys.readouterr().out)
    assert "Multiplication result OK" in text


@pytest.mark.parametrize(("rows", "cols", "num_tiles"), [(7, 5, 4), (3, 9, 8), (13, 1, 5)])
def test_tutorial_6_computes_the_same_tile_by_tile(tut6, rows, cols, num_tiles):
    graph = poplar.Graph(tiles(num_tiles))
    graph.add_codelets(tut6)
    matrix, vector, out = (graph.add_variable(poplar.FLOAT, shape, "x") for shape in ([rows, cols], [cols], [rows]))
    prog = tut6.build_multiply_program(graph, matrix, vector, out)
    a = np.arange(rows * cols, dtype=np.float32).reshape(rows, cols)
    x = np.arange(cols, dtype=np.float32)
    (got,) = run_both(graph, prog, {matrix: a, vector: x}, [out])
    np.testing.assert_array_equal(got, a @ x)


# Published: the user guide's tutorial 7 (Mk1), and the same program of a later SDK for Mk2 (reference B4).
PUBLISHED = {
    "ipu1": (5, 4751, 4410, 200, 45, 96, 64373),
    "ipu2": (7, 3996, 3696, 143, 49, 108, 53807),
}


@pytest.mark.parametrize("arch", PUBLISHED)
def test_tutorial_7_estimates_the_cycles_of_the_guide(tut7, arch):
    target = poplar.IPUModel(arch).create_device().get_target()
    best, worst = tut7.best_and_worst_split(target, 10000, 1000)
    phases = (best.compute, best.exchange, best.reduce_exchange, best.reduce_compute)
    assert (best.split, best.total, *phases, worst.total) == PUBLISHED[arch]


def test_tutorial_7_multiplies_in_about_the_cycles_of_the_guide(tut7, capsys):
    """Published: 5071 cycles of the guide's own model for this program."""
    got, expected, cycles = tut7.multiply(10000, 1000, poplar.IPUModel("ipu1", min_ipu_sync_delay=0).create_device())
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    text = capsys.readouterr().out
    assert "colsAxisSplit=5, total cost=4751 (compute cost=4410, exchange cost=200, reduce exchange cost=45, " in text
    assert "reduce compute cost=96)\nWorst cost seen: 64373" in text and "Multiplication result OK" in text
    assert abs(cycles / 5071 - 1) < 0.03


@pytest.mark.parametrize(
    ("rows", "cols", "split", "num_tiles"),
    [(7, 10, 3, 4), (5, 4, 1, 8), (6, 6, 6, 5)],
)
def test_tutorial_7_computes_the_same_tile_by_tile(tut7, rows, cols, split, num_tiles):
    graph = poplar.Graph(tiles(num_tiles))
    graph.add_codelets(tut7)
    matrix, vector, out = (graph.add_variable(poplar.FLOAT, shape, "x") for shape in ([rows, cols], [cols], [rows]))
    prog = tut7.build_multiply_program(graph, matrix, vector, out, split)
    a = np.arange(rows * cols, dtype=np.float32).reshape(rows, cols)
    x = np.arange(cols, dtype=np.float32)
    (got,) = run_both(graph, prog, {matrix: a, vector: x}, [out])
    np.testing.assert_array_equal(got, a @ x)
