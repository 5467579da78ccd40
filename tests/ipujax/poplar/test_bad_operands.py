"""Operands and parameters that no library operation accepts: refused at their line, with nothing added."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax import poplin, popnn, popops, poprand, poputil
from ipujax.poplar import FLOAT, INT, UNSIGNED_INT
from ipujax.poplar.program import CrossReplicaCopy, Sequence
from ipujax.popnn import gru, lstm
from ipujax.popops.expr import Add, Cast, Select, _1, _2
from ipujax.runtime.errors import ArgumentError, IpuError
from tests.ipujax.poplar.engine_helpers import new_graph, variable
from tests.ipujax.poplar.refusals import refused


class Setting:
    """A graph with a few variables."""

    def __init__(self):
        self.graph = new_graph()
        self.prog = Sequence()
        self.a = variable(self.graph, [2, 3], name="a")
        self.int = variable(self.graph, [2, 3], INT, "int")
        self.seed = variable(self.graph, [2], UNSIGNED_INT, "seed")


@pytest.fixture
def s():
    return Setting()


POOL = popnn.PoolParams("max", (2,), (1,))
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
    "one tensor to a map": lambda s: popops.map(s.graph, _1 + 2, s.a, s.prog),  # here
    "no tensors to a map": lambda s: popops.map(s.graph, _1 + 2, None, s.prog),  # here
    "no tensor to a map in place": lambda s: popops.map_in_place(s.graph, _1 + 2, [], s.prog),  # here
    "no expression": lambda s: popops.map(s.graph, [s.a], _1 + 2, s.prog),  # here
    "a cast to 64 bits": lambda s: popops.cast(s.graph, s.a, np.int64, s.prog),  # here
    "a cast to no type": lambda s: popops.cast(s.graph, s.a, "nothing", s.prog),  # here
    "a Cast to 64 bits": lambda s: popops.map(s.graph, Cast(_1, np.float64), [s.a], s.prog),  # here
    "a sum of 64 bits": lambda s: popops.reduce(s.graph, s.a, [0], "add", s.prog, out_type=np.int64),  # here
    "a product of 64 bits": lambda s: poplin.mat_mul(s.graph, s.a, s.a, s.prog, output_type=np.float64),  # here
    "numbers beyond UNSIGNED_INT": lambda s: popops.iota(s.graph, s.seed, 2**32 - 1, s.prog),  # here
    "a pool of INT": lambda s: popnn.pool(s.graph, POOL, s.int.expand_dims(0), s.prog),  # here
    "program left out": lambda s: popops.add(s.graph, s.a, s.a),  # here
    "too many operands": lambda s: popops.add(s.graph, s.a, s.a, s.prog, "sum", 3),  # here
    "graph after tensor": lambda s: popops.cast(s.a, s.graph, FLOAT, s.prog),  # here
    "type after program": lambda s: popops.cast(s.graph, s.a, s.prog, FLOAT),  # here
    "operation before dimensions": lambda s: popops.reduce(s.graph, s.a, "add", [0], s.prog),  # here
    "a misspelt keyword": lambda s: poplin.mat_mul(s.graph, s.a, s.a, s.prog, nam="product"),  # here
    "a program for parameters": lambda s: poplin.convolution(s.graph, s.a, s.a, s.prog, 3),  # here
    "statistics of a number": lambda s: popnn.batch_norm_statistics(s.graph, 3, 1e-5, s.prog),  # here
    "statistics of a graph": lambda s: popnn.layer_norm_statistics(s.a, s.graph, 1e-5, s.prog),  # here
    "statistics nowhere": lambda s: popnn.instance_norm_statistics(s.graph, s.a, 1e-5),  # here
    "no statistics": lambda s: popnn.batch_norm_whiten(s.graph, s.a, None, None, s.prog),  # here
    "groups by name": lambda s: popnn.group_norm_statistics(s.graph, s.a, 1e-5, s.prog, "two"),  # here
    "parameters of a graph": lambda s: popnn.create_norm_params(s.a, s.graph),  # here
    "an LSTM without state": lambda s: lstm.lstm_fwd(s.graph, s.prog),  # here
    "a clone of a graph": lambda s: poputil.clone(s.a, s.graph),  # here
    "broadcasting a number": lambda s: poputil.broadcast_to_match(s.a, 3),  # here
    "a seed as graph": lambda s: poprand.uniform(s.seed, s.graph, 0, [2], FLOAT, 0, 1, s.prog),  # here
    "codelets for nothing": lambda s: popops.add_codelets(),  # here
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


def test_errors_of_calls_name_the_expected_argument(s):
    with pytest.raises(IpuError, match=r"^add cannot.*'prog'(.|\n)*expected: add\(graph, a, b, prog, name=…\)"):
        popops.add(s.graph, s.a, s.a)
    with pytest.raises(IpuError, match=r"^mat_mul cannot.*'nam'(.|\n)*try: 'name'"):
        poplin.mat_mul(s.graph, s.a, s.a, s.prog, nam="product")
    with pytest.raises(
        IpuError, match=r"^map: argument tensors\n(.|\n)*expected: a list, each a Tensor\n *got: a Tensor"
    ):
        popops.map(s.graph, _1 + 2, s.a, s.prog)
    with pytest.raises(IpuError, match=r"^batch_norm_statistics: argument x\n(.|\n)*expected: a Tensor\n *got: None"):
        popnn.batch_norm_statistics(s.graph, None, 1e-5, s.prog)
    with pytest.raises(IpuError, match=r"a constant of add\(_1, 2.5\)"):
        popops.map(s.graph, _1 + 2.5, [s.int], s.prog)
    with pytest.raises(IpuError, match=r"got: Sequence of 0 programs to Graph of 3 variables and 0 compute sets"):
        CrossReplicaCopy(s.prog, s.graph, {0: 1})
    with pytest.raises(IpuError, match=r"^cast must have a type\n(.|\n)*got: None"):
        popops.cast(s.graph, s.a, None, s.prog)
    assert popops.add(s.graph, s.a, b=s.a, prog=s.prog, name="sum").shape == (2, 3)


@pytest.mark.parametrize("case", NO_OPERANDS)
def test_refuses_invalid_operands(s, case):
    before = list(s.prog.children())
    with refused(IpuError, r"\w"):
        NO_OPERANDS[case](s)
    assert list(s.prog.children()) == before


BAD_OPTIONS = {
    "a number": (3, "must be a mapping"),
    "nothing": (0, "must be a mapping"),
    "an array": (np.array([1, 2]), "must be a mapping"),
    "an unknown option": (
        {"partialType": "half"},
        "no matmul option is called 'partialType'(.|\n)*try: 'partialsType'",
    ),
    "a name that is none": ({3: "half"}, "no matmul option is called 3"),
    **{
        f"a proportion of {value!r}": (
            {"availableMemoryProportion": value},
            r"option availableMemoryProportion(.|\n)*expected: a number from 0 to 1\n",
        )
        for value in ("x", "nan", "1.5", -0.1, 1e300, 10**400, float("nan"), True, None, [], np.array([0.5, 0.5]))
    },
    **{
        f"partials of {value!r}": ({"partialsType": value}, 'option partialsType(.|\n)*expected: "half" or "float"')
        for value in ([], None, 16, np.array(["half", "float"]), "double")
    },
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_refuses_unknown_options_of_poplin(s, case):
    options, match = BAD_OPTIONS[case]
    before = list(s.prog.children())
    b = s.a.transpose()
    with refused(ArgumentError, match):
        poplin.mat_mul(s.graph, s.a, b, s.prog, options=options)  # here
    with refused(ArgumentError, match):
        poplin.create_mat_mul_input_lhs(s.graph, FLOAT, [2, 3], [3, 2], options=options)  # here
    assert list(s.prog.children()) == before


@pytest.mark.parametrize("value", [0, 1, 0.5, "0.5", np.float32(0.5)])
def test_refuses_invalid_proportions_of_memory(s, value):
    assert poplin.mat_mul(
        s.graph, s.a, s.a.transpose(), s.prog, options={"availableMemoryProportion": value}
    ).shape == (2, 2)
