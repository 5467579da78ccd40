"""Operands and parameters that no library operation takes: refused where they are given, with nothing added."""

from __future__ import annotations

import pytest

from ipujax import poplin, popnn, popops, poprand, poputil
from ipujax.poplar import FLOAT, INT, UNSIGNED_INT
from ipujax.poplar.program import Sequence
from ipujax.popnn import gru, lstm
from ipujax.popops.expr import Add, Select, _1, _2
from ipujax.runtime.errors import IpuError
from tests.ipujax.poplar.engine_helpers import new_graph, variable
from tests.ipujax.poplar.refusals import refused


class Setting:
    """A graph with a few variables."""

    def __init__(self):
        self.graph, self.prog = new_graph(), Sequence()
        self.a = variable(self.graph, [2, 3], name="a")
        self.int = variable(self.graph, [2, 3], INT, "int")
        self.seed = variable(self.graph, [2], UNSIGNED_INT, "seed")


@pytest.fixture
def s():
    return Setting()


NO_OPERANDS = {
    "a number to popops": lambda s: popops.add(s.graph, s.a, 3, s.prog),  # here
    "a number to a reduction": lambda s: popops.reduce(s.graph, 3, [0], "add", s.prog),  # here
    "a number to map": lambda s: popops.map(s.graph, popops.expr.Neg(popops.expr._1), [3], s.prog),  # here
    "a number to poplin": lambda s: poplin.mat_mul(s.graph, s.a, 3, s.prog),  # here
    "a number to popnn": lambda s: popnn.softmax(s.graph, 3, s.prog),  # here
    "a number to poputil": lambda s: poputil.map_tensor_linearly(s.graph, 3),  # here
    "a fraction in a map of INT": lambda s: popops.map(s.graph, _1 + 2.5, [s.int], s.prog),  # here
    "a constant beyond INT": lambda s: popops.map(s.graph, _1 + 2**40, [s.int], s.prog),  # here
    "a constant below UNSIGNED_INT": lambda s: popops.map(s.graph, Add(-1, _1), [s.seed], s.prog),  # here
    "a string in a map": lambda s: popops.map(s.graph, _1 + "a", [s.a], s.prog),  # here
    "two numbers by a predicate alone": lambda s: popops.map(s.graph, Select(2, 3, _1 < 0), [s.a], s.prog),  # here
    "a map of different types": lambda s: popops.map(s.graph, _1 + _2, [s.a, s.int], s.prog),  # here
    "a choice of different types": lambda s: popops.map(s.graph, Select(_1, _2, _1 < 0), [s.a, s.int], s.prog),  # here
    "no program": lambda s: popops.add(s.graph, s.a, s.a, None),  # here
    "no graph": lambda s: popops.add(None, s.a, s.a, s.prog),  # here
    "a predicate of floats": lambda s: popops.select(s.graph, s.a, s.a, s.a, s.prog),  # here
    "a fraction as INT": lambda s: popops.fill(s.graph, s.int, s.prog, 1.5),  # here
    "iota of floats": lambda s: popops.iota(s.graph, s.a[0], 0, s.prog),  # here
    "matrices of different types": lambda s: poplin.mat_mul(s.graph, s.a, s.int.transpose(), s.prog),  # here
    "normal integers": lambda s: poprand.normal(s.graph, s.seed, 0, [2], INT, 0, 1, s.prog),  # here
    "a negative deviation": lambda s: poprand.normal(s.graph, s.seed, 0, [2], FLOAT, 0, -1, s.prog),  # here
    "no room for a draw": lambda s: poprand.truncated_normal(s.graph, s.seed, 0, [2], FLOAT, 0, 1, -1, s.prog),  # here
    "bounds beyond INT": lambda s: poprand.uniform(s.graph, s.seed, 0, [2], INT, 0, 2**40, s.prog),  # here
    "half a modifier": lambda s: poprand.uniform(s.graph, s.seed, 1.5, [2], FLOAT, 0, 1, s.prog),  # here
    "no pooling": lambda s: popnn.PoolParams("median", (2,), (1,)),  # here
    "a window of nothing": lambda s: popnn.PoolParams("max", (0,), (1,)),  # here
    "as many strides as none": lambda s: popnn.PoolParams("max", (2, 2), (1,)),  # here
    "a kernel of nothing": lambda s: poplin.ConvParams(FLOAT, 1, (4,), (0,), 1, 1),  # here
    "a kernel of other rank": lambda s: poplin.ConvParams(FLOAT, 1, (4,), (2, 2), 1, 1),  # here
    "a convolution of integers": lambda s: poplin.ConvParams(INT, 1, (4,), (2,), 1, 1),  # here
    "an LSTM of integers": lambda s: lstm.LstmParams(INT, 1, 1, [1, 1]),  # here
    "a GRU of half a size": lambda s: gru.GruParams(FLOAT, 1, 1, [1.5, 1]),  # here
}


@pytest.mark.parametrize("case", NO_OPERANDS)
def test_operands_that_are_none(s, case):
    before = list(s.prog.children())
    with refused(IpuError, r"\w"):
        NO_OPERANDS[case](s)
    assert list(s.prog.children()) == before
