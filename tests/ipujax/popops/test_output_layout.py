"""Results of elementwise functions stay where their operands are, by the rule of PopLibs' createOutputForElementWiseOp.

Source: poplibs `lib/popops/ElementWiseUtil.cpp`: the operand of fewest elements on its fullest tile, then that on most
tiles, then that of fewest regions; operands with repeated elements do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ipujax import popnn, popops, poputil
from ipujax.poplar import BOOL, FLOAT, HALF, INT
from ipujax.popops import expr
from ipujax.runtime.graph import Sequence
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.tensor.tensor import Tensor
from tests.ipujax.poplar.helpers import compiled, placed, run_both, small_graph

N = 256


def tiles_of(graph: Any, tensor: Tensor) -> list[int]:
    return [tile for tile, intervals in enumerate(graph.get_tile_mapping(tensor)) if intervals]


class Case:
    """A graph of 64 tiles with operands of 256 elements: x, y and flags on tile 0, z on tile 5, even over all tiles."""

    def __init__(self) -> None:
        self.graph = small_graph(64)
        self.prog = Sequence()
        self.x, self.y = (placed(self.graph, FLOAT, (N,), name) for name in "xy")
        self.z = placed(self.graph, FLOAT, (N,), "z", 5)
        self.half = placed(self.graph, HALF, (N,), "half", 3)
        self.number = placed(self.graph, INT, (N,), "number", 2)
        self.flags = placed(self.graph, BOOL, (N,), "flags")
        self.one = placed(self.graph, FLOAT, (), "one", 7)
        self.even = self.graph.add_variable(FLOAT, (N,), "even")
        poputil.map_tensor_linearly(self.graph, self.even)
        self.matrix = placed(self.graph, FLOAT, (16, 16), "matrix", 4)
        self.row = placed(self.graph, FLOAT, (16,), "row", 6)
        self.operands = (self.x, self.y, self.z, self.half, self.number, self.flags, self.even, self.matrix, self.row)

    def phases(self) -> dict[str, int]:
        executable = compiled(self.graph, self.prog, {x: np.zeros(x.shape) for x in self.operands}, [])
        return Profile(executable).phase_cycles


def _constant(case: Case) -> Tensor:
    constant = case.graph.add_constant(FLOAT, (), 3.0)
    case.graph.set_tile_mapping(constant, 9)
    return constant


# What is computed, and the tiles that its result is mapped to.
CASES: dict[str, tuple[Callable[[Case], Tensor], list[int]]] = {
    "sum": (lambda c: popops.add(c.graph, c.x, c.y, c.prog), [0]),
    "sum of other tiles": (lambda c: popops.add(c.graph, c.z, c.z, c.prog), [5]),
    "first of equal operands": (lambda c: popops.sub(c.graph, c.z, c.x, c.prog), [5]),
    "the more even operand": (lambda c: popops.mul(c.graph, c.x, c.even, c.prog), [*range(8)]),
    "division": (lambda c: popops.div(c.graph, c.x, c.y, c.prog), [0]),
    "comparison": (lambda c: popops.gt(c.graph, c.z, c.z, c.prog), [5]),
    "unary": (lambda c: popops.exp(c.graph, c.z, c.prog), [5]),
    "several operations": (lambda c: popops.gelu_erf(c.graph, c.z, c.prog), [5]),
    "absolute value of integers": (lambda c: popops.abs(c.graph, c.number, c.prog), [2]),
    "truncation": (lambda c: popops.trunc(c.graph, c.z, c.prog), [5]),
    "select": (lambda c: popops.select(c.graph, c.z, c.z, c.flags, c.prog), [5]),
    "clamp": (lambda c: popops.clamp(c.graph, c.x, c.y, c.y, c.prog), [0]),
    "cast": (lambda c: popops.cast(c.graph, c.half, FLOAT, c.prog), [3]),
    "cast of integers": (lambda c: popops.cast(c.graph, c.number, HALF, c.prog), [2]),
    "scalar operand": (lambda c: popops.mul(c.graph, c.z, c.one, c.prog), [5]),
    "scalar operand first": (lambda c: popops.sub(c.graph, c.one, c.z, c.prog), [5]),
    "constant": (lambda c: popops.add(c.graph, c.z, _constant(c), c.prog), [5]),
    "rows": (lambda c: popops.add(c.graph, c.matrix, c.row, c.prog), [4]),
    "one element": (lambda c: popops.exp(c.graph, c.one, c.prog), [7]),
    "one element of lower rank": (lambda c: popops.mul(c.graph, c.one, c.row[:1], c.prog), [7]),
    "row of lower rank": (lambda c: popops.mul(c.graph, c.row, c.matrix[:1], c.prog), [6]),
    "select of three tiles": (lambda c: popops.select(c.graph, c.z, c.x, c.flags, c.prog), [5]),
    "slice": (lambda c: popops.square(c.graph, c.even[64:128], c.prog), [2, 3]),
    "reversed": (lambda c: popops.add(c.graph, c.z.reverse(0), c.z, c.prog), [5]),
    "transposed": (lambda c: popops.neg(c.graph, c.matrix.dim_shuffle((1, 0)), c.prog), [4]),
    "joined": (lambda c: popops.sqrt(c.graph, poputil.concat([c.x, c.z]), c.prog), [0, 5]),
    "repeated alone": (
        lambda c: popops.exp(c.graph, c.row.reshape((1, 16)).broadcast(8, 0), c.prog),
        [*range(64)],
    ),
    "expression": (
        lambda c: popops.map(c.graph, expr.Add(expr._1, expr.Mul(expr._2, expr.Const(3.0))), [c.z, c.z], c.prog),
        [5],
    ),
    "expression of comparisons": (
        lambda c: popops.map(c.graph, expr.Select(expr._1, expr._2, expr.Gt(expr._1, expr._2)), [c.x, c.y], c.prog),
        [0],
    ),
    "non-linearity": (lambda c: popnn.non_linearity(c.graph, "swish", c.z, c.prog), [5]),
    "gradient of a non-linearity": (
        lambda c: popnn.non_linearity_input_gradient(c.graph, "tanh", c.z, c.z, c.prog),
        [5],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_result_is_mapped_as_an_operand_is(name):
    make, tiles = CASES[name]
    case = Case()
    assert tiles_of(case.graph, make(case)) == tiles


@pytest.mark.parametrize("name", ["sum", "several operations", "division", "reversed", "slice", "joined", "expression"])
def test_operands_of_one_layout_are_not_exchanged(name):
    case = Case()
    CASES[name][0](case)
    cycles = case.phases()
    assert cycles["exchange"] == 0 and cycles["compute"] > 0


def test_a_sum_on_one_tile_takes_the_cycles_of_poplibs():
    """6 workers, 128 vectors, 3 cycles each: 11 + 6 · (29 + 22 · 3)."""
    case = Case()
    popops.add(case.graph, case.x, case.y, case.prog)
    assert case.phases()["compute"] == 581


IN_PLACE: dict[str, Callable[[Case], None]] = {
    "sum": lambda c: popops.add_in_place(c.graph, c.z, c.z, c.prog),
    "unary": lambda c: popops.exp_in_place(c.graph, c.z, c.prog),
    "several operations": lambda c: popops.gelu_erf_in_place(c.graph, c.z, c.prog),
    "scaled": lambda c: popops.scaled_add_to(c.graph, c.z, c.z, 0.5, c.prog),
    "part": lambda c: popops.mul_in_place(c.graph, c.even[3:70], c.even[3:70], c.prog),
    "expression": lambda c: popops.map_in_place(c.graph, expr.Sub(expr._1, expr.Square(expr._2)), [c.z, c.z], c.prog),
    "non-linearity": lambda c: popnn.non_linearity_in_place(c.graph, "gelu", c.z, c.prog),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_operations_in_place_exchange_nothing(name):
    case = Case()
    IN_PLACE[name](case)
    assert case.phases()["exchange"] == 0


@pytest.mark.parametrize("name", ["first of equal operands", "rows", "joined", "expression"])
def test_numbers_are_unchanged(name):
    case = Case()
    result = CASES[name][0](case)
    rng = np.random.default_rng(0)
    inputs = {t: rng.random(t.shape, np.float32) for t in (case.x, case.z, case.matrix, case.row)}
    (got,) = run_both(case.graph, case.prog, inputs, [result])
    x, z, matrix, row = inputs.values()
    expected = {
        "first of equal operands": z - x,
        "rows": matrix + row,
        "joined": np.sqrt(np.concatenate([x, z])),
        "expression": z + 3 * z,
    }[name]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
