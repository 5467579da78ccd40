"""popops, poprand and poputil by hand, every function against numpy; wrong operands of all libraries."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ipujax import poplar, poplin, popnn, popops, poprand, poputil
from ipujax.lowering.popops.vertices.elementwise_cycles import OP_COSTS
from ipujax.poplar.program import Sequence
from ipujax.popops import expr
from ipujax.popops.elementwise import BINARY, FUNCTIONS, TERNARY, UNARY
from ipujax.popops.expr import Add, Cast, Const, Mul, Select, _1, _2, _3
from ipujax.runtime.errors import ArgumentError, GraphError, VerifyError
from ipujax.runtime.graph.program import Copy, Execute
from ipujax.runtime.graph.walks import distinct
from tests.ipujax.poplar.engine_helpers import DEVICE, both, constant, new_graph, on_tiles, variable

POSITIVE, OTHER = np.random.default_rng(1).uniform(0.1, 0.9, (2, 2, 5)).astype(np.float32)
INTS = np.array([[5, 9, 12], [7, 3, 1]], np.int32)
MORE_INTS = np.array([[1, 2, 3], [4, 1, 2]], np.int32)
BOOLS = np.array([True, False, True, False])
MORE_BOOLS = np.array([True, True, False, False])

NUMPY_UNARY = {
    "abs": np.abs, "asin": np.arcsin, "cbrt": np.cbrt, "ceil": np.ceil, "cos": np.cos, "exp": np.exp,
    "expm1": np.expm1, "floor": np.floor, "inv": lambda x: 1 / x, "is_finite": np.isfinite, "is_inf": np.isinf,
    "is_nan": np.isnan, "log": np.log, "log1p": np.log1p, "neg": np.negative, "relu": lambda x: np.maximum(x, 0),
    "round": np.round, "rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "signum": np.sign, "sin": np.sin, "sqrt": np.sqrt, "square": np.square, "tan": np.tan, "tanh": np.tanh,
    "erf": lambda x: np.asarray(jax.scipy.special.erf(x)), "trunc": np.trunc, "nearby_int": np.rint,
    "gelu_erf": lambda x: x * 0.5 * (1 + np.asarray(jax.scipy.special.erf(x / np.sqrt(2)))),
}  # fmt: skip
NUMPY_BINARY = {
    "add": np.add, "atan2": np.arctan2, "div": np.divide, "eq": np.equal, "gt": np.greater,
    "gteq": np.greater_equal, "lt": np.less, "lteq": np.less_equal, "max": np.maximum, "min": np.minimum,
    "mul": np.multiply, "neq": np.not_equal, "pow": np.power, "rem": np.fmod, "sub": np.subtract,
    "variance_to_inv_std_dev": lambda v, e: 1 / np.sqrt(v + e), "inv_std_dev_to_variance": lambda i, e: 1 / i**2 - e,
}  # fmt: skip
NUMPY_INT = {
    "bitwise_not": np.invert, "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor, "bitwise_xnor": lambda a, b: ~(a ^ b), "shift_left": np.left_shift,
    "shift_right": np.right_shift, "shift_right_sign_extend": np.right_shift, "popcount": np.bitwise_count,
    "count_leading_zeros": lambda x: np.array([[29, 28, 28], [29, 30, 31]], np.int32),
}  # fmt: skip
NUMPY_BOOL = {"logical_and": np.logical_and, "logical_or": np.logical_or, "logical_not": np.logical_not}


def _operand_arrays(name):
    if name in NUMPY_BOOL:
        return NUMPY_BOOL[name], [BOOLS, MORE_BOOLS]
    if name in NUMPY_INT:
        return NUMPY_INT[name], [INTS, MORE_INTS]
    return (NUMPY_UNARY | NUMPY_BINARY)[name], [POSITIVE, OTHER]


@pytest.mark.parametrize("name", sorted(UNARY | BINARY))
def test_elementwise(name):
    fun, arrays = _operand_arrays(name)
    arrays = arrays[: 1 if name in UNARY else 2]
    graph = new_graph()
    prog = Sequence()
    tensors = [variable(graph, list(a.shape), a.dtype, value=a) for a in arrays]
    outs = {"new": FUNCTIONS[name](graph, *tensors, prog, name)}
    if f"{name}_in_place" in FUNCTIONS:
        FUNCTIONS[f"{name}_in_place"](graph, *tensors, prog, name)
        outs["in place"] = tensors[0]
    outputs = both(graph, prog, outs)
    for value in outputs.values():
        np.testing.assert_allclose(value, fun(*arrays), rtol=2e-6, atol=1e-6)


def test_every_elementwise_operation_is_tested_and_has_a_cost():
    tested = set(NUMPY_UNARY) | set(NUMPY_BINARY) | set(NUMPY_INT) | set(NUMPY_BOOL)
    assert set(UNARY | BINARY) == tested
    assert set(TERNARY) == {"select", "clamp"}
    for name in UNARY | BINARY:
        _, arrays = _operand_arrays(name)
        graph = new_graph()
        prog = Sequence()
        tensors = [variable(graph, list(a.shape), a.dtype) for a in arrays[: 1 if name in UNARY else 2]]
        FUNCTIONS[name](graph, *tensors, prog, name)
        assert not graph.notes.fallbacks
    assert "add" in OP_COSTS


def test_select_and_clamp():
    graph = new_graph()
    prog = Sequence()
    a = variable(graph, [4], value=[1, 2, 3, 4])
    b = variable(graph, [4], value=[5, 6, 7, 8])
    p = constant(graph, BOOLS, poplar.BOOL)
    chosen = popops.select(graph, a, b, p, prog)
    clamped = popops.clamp(graph, a, constant(graph, 2.0), constant(graph, 3.0), prog)
    popops.select_in_place(graph, b, a, p, prog, "into b")
    outputs = both(graph, prog, {"chosen": chosen, "clamped": clamped, "b": b})
    np.testing.assert_array_equal(outputs["chosen"], [1, 6, 3, 8])
    np.testing.assert_array_equal(outputs["clamped"], [2, 2, 3, 3])
    np.testing.assert_array_equal(outputs["b"], [5, 2, 7, 4])


def test_broadcasting_as_numpy():
    graph = new_graph()
    prog = Sequence()
    a = variable(graph, [2, 3], value=np.arange(6))
    b = variable(graph, [3], value=[10, 20, 30])
    c = popops.add(graph, a, b, prog)
    np.testing.assert_array_equal(both(graph, prog, {"c": c})["c"], [[10, 21, 32], [13, 24, 35]])


def test_in_place_is_one_vertex_group_and_no_copy():
    graph = new_graph()
    prog = Sequence()
    a = variable(graph, [4], value=[1, 2, 3, 4])
    b = variable(graph, [4], value=[1, 1, 1, 1])
    before = len(graph.variables)
    popops.add_in_place(graph, a, b, prog)
    popops.add_in_place(graph, a[1:3], b[1:3], prog)
    popops.add_in_place(graph, a, constant(graph, 1.0), prog)
    assert len(graph.variables) == before + 1  # the constant
    assert not any(isinstance(node, Copy) for node in distinct(prog))
    assert sum(isinstance(node, Execute) for node in distinct(prog)) == 3
    np.testing.assert_array_equal(both(graph, prog, {"a": a})["a"], [3, 5, 6, 6])


def test_in_place_on_a_transposed_operand():
    graph = new_graph()
    prog = Sequence()
    a = variable(graph, [2, 2], value=[[1, 2], [3, 4]])
    popops.add_in_place(graph, a, a.transpose(), prog)
    np.testing.assert_array_equal(both(graph, prog, {"a": a})["a"], [[2, 5], [5, 8]])


def test_rounding_of_halves():
    values = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 2.7, -2.7], np.float32)
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [8], value=values)
    outputs = both(graph, prog, {n: FUNCTIONS[n](graph, x, prog) for n in ("round", "nearby_int", "trunc")})
    np.testing.assert_array_equal(outputs["round"], [-3, -2, -1, 1, 2, 3, 3, -3])
    np.testing.assert_array_equal(outputs["nearby_int"], [-2, -2, 0, 0, 2, 2, 3, -3])
    np.testing.assert_array_equal(outputs["trunc"], [-2, -1, 0, 0, 1, 2, 2, -2])


def test_operators_of_expressions():
    a = INTS
    b = MORE_INTS
    cases = {
        "pow": (_1**2, a**2), "rem": (_1 % _2, a % b), "and": (_1 & _2, a & b), "or": (_1 | 8, a | 8),
        "xor": (7 ^ _1, 7 ^ a), "left": (_1 << _2, a << b), "right": (-_1 >> 1, -a >> 1), "not": (~_1, ~a),
        "abs": (abs(_2 - _1), abs(b - a)), "lt": (_1 < _2, a < b), "ge": (_1 >= 5, a >= 5), "le": (_1 <= 5, a <= 5),
        "gt": (_1 > _2, a > b), "reverse": (100 - _1 * 2, 100 - a * 2),
        "named": (expr.IsNaN(Cast(_1, poplar.FLOAT)), a < 0),
    }  # fmt: skip
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [2, 3], poplar.INT, value=a)
    y = variable(graph, [2, 3], poplar.INT, value=b)
    outputs = both(graph, prog, {n: popops.map(graph, e, [x, y], prog, n) for n, (e, _) in cases.items()})
    for name, (_, expected) in cases.items():
        np.testing.assert_array_equal(outputs[name], expected, name)


def test_constructors_of_expressions_name_all_operations():
    names = vars(expr).items()
    constructors = [f for n, f in names if n[0].isupper() and (f.__doc__ or "").startswith("Return the expression")]
    operations = {f(_1, _2, _3).operation for f in constructors}
    assert operations == set(UNARY | BINARY | TERNARY)


def test_map_of_expressions():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [2, 5], value=POSITIVE)
    y = variable(graph, [2, 5], value=OTHER)
    flag = constant(graph, POSITIVE > 0.5, poplar.BOOL)
    a = popops.map(graph, Add(_1, Mul(_2, Const(3))), [x, y], prog, "a")
    b = popops.map(graph, (_1 - 1) * 2 / _2, [x, y], prog, "b")
    c = popops.map(graph, Select(Const(0), _1, _3), [x, y, flag], prog, "c")
    d = popops.map(graph, Cast(_1 * 10, poplar.INT), [x], prog, "d")
    popops.map_in_place(graph, -_1 + _2, [x, y], prog)
    outputs = both(graph, prog, {"a": a, "b": b, "c": c, "d": d, "x": x})
    np.testing.assert_allclose(outputs["a"], POSITIVE + OTHER * 3, rtol=1e-6)
    np.testing.assert_allclose(outputs["b"], (POSITIVE - 1) * 2 / OTHER, rtol=1e-6)
    np.testing.assert_array_equal(outputs["c"], np.where(POSITIVE > 0.5, 0, POSITIVE))
    np.testing.assert_array_equal(outputs["d"], (POSITIVE * 10).astype(np.int32))
    np.testing.assert_allclose(outputs["x"], -POSITIVE + OTHER, rtol=1e-6)


def test_reduce():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [2, 5], value=POSITIVE)
    total = variable(graph, [2], value=[10, 20])
    expected = {
        "add": POSITIVE.sum(1),
        "mul": POSITIVE.prod(1),
        "max": POSITIVE.max(1),
        "min": POSITIVE.min(1),
        "square_add": (POSITIVE**2).sum(1),
        "log_add": np.log(np.exp(POSITIVE).sum(1)),
    }
    outs = {op: popops.reduce(graph, x, [1], op, prog, op) for op in expected}
    popops.reduce(graph, x, [1], "add", prog, "update", scale=2, update=total)
    outputs = both(graph, prog, {**outs, "total": total})
    for name, value in expected.items():
        np.testing.assert_allclose(outputs[name], value, rtol=1e-6)
    np.testing.assert_allclose(outputs["total"], [10, 20] + 2 * POSITIVE.sum(1), rtol=1e-6)


def test_fills_casts_and_scaled_additions():
    graph = new_graph()
    prog = Sequence()
    a = variable(graph, [3])
    b = variable(graph, [3], poplar.HALF, value=[1, 2, 3])
    n = variable(graph, [4], poplar.INT)
    popops.fill(graph, a, prog, 2.5)
    popops.scaled_add_to(graph, a, b, 0.5, prog)
    popops.scaled_subtract_from(graph, a, b, constant(graph, [2.0]), prog)
    popops.zero(graph, a[0:1], prog)
    popops.iota(graph, n, 7, prog)
    c = popops.cast(graph, a, poplar.INT, prog)
    outputs = both(graph, prog, {"a": a, "n": n, "c": c})
    np.testing.assert_array_equal(outputs["a"], [0, 2.5 - 3, 2.5 - 4.5])
    np.testing.assert_array_equal(outputs["n"], [7, 8, 9, 10])
    np.testing.assert_array_equal(outputs["c"], [0, 0, -2])


def test_sorting():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [2, 5], value=POSITIVE)
    v = variable(graph, [2, 5], value=OTHER)
    y = popops.sort(graph, x, 1, prog)
    keys, values = popops.sort_key_value(graph, x, v, 1, prog)
    top, where = popops.top_k(graph, x, 2, prog)
    popops.sort_in_place(graph, v, 0, prog)
    outs = {"y": y, "keys": keys, "values": values, "top": top, "where": where, "v": v}
    outputs = both(graph, prog, outs)
    order = np.argsort(POSITIVE, 1)
    np.testing.assert_array_equal(outputs["y"], np.sort(POSITIVE, 1))
    np.testing.assert_array_equal(outputs["keys"], np.sort(POSITIVE, 1))
    np.testing.assert_array_equal(outputs["values"], np.take_along_axis(OTHER, order, 1))
    np.testing.assert_array_equal(outputs["where"], order[:, :-3:-1])
    assert outputs["where"].dtype == np.uint32
    np.testing.assert_array_equal(outputs["v"], np.sort(OTHER, 0))


def test_slices_at_dynamic_offsets():
    graph = new_graph()
    prog = Sequence()
    table = variable(graph, [4, 3], value=np.arange(12))
    at = constant(graph, [2], poplar.UNSIGNED_INT)
    part = popops.dynamic_slice(graph, table, at, [0], [2], prog)
    rows = popops.multi_slice(graph, table, constant(graph, [3, 0, 3], poplar.UNSIGNED_INT), [0], [1], prog)
    popops.dynamic_update(graph, table, constant(graph, np.full((1, 3), -1.0)), at, [0], [1], prog)
    slices = constant(graph, np.ones((3, 1, 3)))
    indices = constant(graph, [0, 3, 3], poplar.UNSIGNED_INT)
    popops.multi_update_add(graph, table, slices, indices, 10.0, [0], [1], prog)
    popops.multi_update(graph, table, slices[:1], constant(graph, [1], poplar.INT), [0], [1], prog)
    outputs = both(graph, prog, {"part": part, "rows": rows, "table": table})
    np.testing.assert_array_equal(outputs["part"], np.arange(6, 12).reshape(2, 3))
    np.testing.assert_array_equal(outputs["rows"][:, 0], np.arange(12).reshape(4, 3)[[3, 0, 3]])
    expected = [[10, 11, 12], [1, 1, 1], [-1, -1, -1], [29, 30, 31]]
    np.testing.assert_array_equal(outputs["table"], expected)


def test_one_hot():
    graph = new_graph()
    prog = Sequence()
    encoded = variable(graph, [3, 4])
    popops.encode_one_hot(graph, constant(graph, [2, 0, 3], poplar.UNSIGNED_INT), encoded, prog, on=5, off=-1)
    expected = np.where(np.eye(4)[[2, 0, 3]] > 0, 5, -1)
    np.testing.assert_array_equal(both(graph, prog, {"e": encoded})["e"], expected)


# --- poprand and poputil ---


def test_random_numbers_depend_on_seed_and_modifier_alone():
    def draws(modifier, tiles):
        graph = new_graph()
        prog = Sequence()
        seed = graph.add_variable(poplar.UNSIGNED_INT, [2], "seed")
        graph.set_tile_mapping(seed, tiles)
        graph.create_host_write("seed", seed)
        shape = [40, 50]
        x = variable(graph, [40, 50], value=np.ones((40, 50)))
        outs = {
            "uniform": poprand.uniform(graph, seed, modifier, shape, poplar.FLOAT, -1, 3, prog),
            "int": poprand.uniform(graph, seed, modifier, shape, poplar.INT, 1, 6, prog),
            "normal": poprand.normal(graph, seed, modifier, shape, poplar.HALF, 2, 0.5, prog),
            "truncated": poprand.truncated_normal(graph, seed, modifier, shape, poplar.FLOAT, 0, 1, 1.5, prog),
            "bernoulli": poprand.bernoulli(graph, seed, modifier, shape, poplar.INT, 0.25, prog),
            "dropout": poprand.dropout(graph, seed, modifier, x, 0.75, 4 / 3, prog),
        }
        engine = poplar.Engine(graph, prog)
        engine.load(DEVICE)
        engine.write_tensor("seed", np.uint32([7, 9]))
        engine.run()
        return {name: engine.read_tensor(out) for name, out in outs.items()}

    first = draws(1, 0)
    repetition = draws(1, 5)
    other_seed = draws(2, 0)
    for name, value in first.items():
        np.testing.assert_array_equal(value, repetition[name])
        assert np.any(value != other_seed[name])
    assert first["uniform"].min() >= -1 and first["uniform"].max() < 3 and abs(first["uniform"].mean() - 1) < 0.1
    assert set(np.unique(first["int"])) == {1, 2, 3, 4, 5, 6}
    assert abs(float(first["normal"].astype(np.float32).std()) - 0.5) < 0.05 and first["normal"].dtype == np.float16
    assert np.abs(first["truncated"]).max() <= 1.5
    assert abs(first["bernoulli"].mean() - 0.25) < 0.05
    assert set(np.unique(first["dropout"])) == {0, np.float32(4 / 3)}
    assert abs((first["dropout"] > 0).mean() - 0.75) < 0.05


def test_random_numbers_agree_with_the_interpreter():
    graph = new_graph()
    prog = Sequence()
    seed = variable(graph, [2], poplar.UNSIGNED_INT, value=[1, 2])
    x = poprand.uniform(graph, seed, 3, [12], poplar.FLOAT, 0, 1, prog)
    both(graph, prog, {"x": x})


def test_mapping_helpers():
    graph = new_graph()
    prog = Sequence()
    x = graph.add_variable(poplar.FLOAT, [6, 40], "x")
    with pytest.raises(GraphError, match=r"x: float32(.|\n)*set_tile_mapping"):
        popops.neg(graph, x, prog)
    poputil.map_tensor_linearly(graph, x)
    assert graph.get_tile_mapping(x) == poputil.calc_linear_tile_mapping(graph, x)
    assert poputil.get_tile_imbalance(graph, x) >= 0
    graph.set_initial_value(x, np.arange(240))
    a, b = poputil.broadcast_to_match(x, on_tiles(graph, graph.add_variable(poplar.FLOAT, [40])))
    assert a.shape == b.shape == (6, 40)
    copy = poputil.duplicate(graph, x, prog)
    assert graph.get_tile_mapping(copy) == graph.get_tile_mapping(x)
    np.testing.assert_array_equal(both(graph, prog, {"copy": copy})["copy"], np.arange(240).reshape(6, 40))


def test_libraries_register():
    graph = new_graph()
    for library in (popops, poplin, popnn, poprand, poputil):
        library.add_codelets(graph)
    assert graph.notes.libraries == {"popops", "poplin", "popnn", "poprand", "poputil"}


# --- errors ---


def test_refuses_invalid_operands():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [3], name="x")
    h = variable(graph, [3], poplar.HALF, "h")
    y = variable(graph, [4], name="y")
    unmapped = graph.add_variable(poplar.FLOAT, [3], "nowhere")
    fixed = constant(graph, [1.0, 2, 3])
    cases = [
        (lambda: popops.add(graph, x, h, prog), r"differ in type(.|\n)*float32, float16(.|\n)*popops.cast"),
        (lambda: popops.add(graph, x, y, prog, "sum"), r"sum: (.|\n)*float32\[3\], float32\[4\]"),
        (lambda: popops.add(graph, x, unmapped, prog), "operand .*nowhere.* is mapped to no tile"),
        (lambda: popops.map(graph, _3, [x], prog), "placeholder _3 has no tensor"),
        (lambda: popops.reduce(graph, x, [0], "ad", prog), r"'ad'(.|\n)*try: 'add'"),
        (lambda: poplin.mat_mul(graph, x, x, prog), "tensors of 2 dimensions"),
        (lambda: popnn.non_linearity(graph, "rleu", x, prog), r"try: 'relu'"),
        (lambda: poprand.uniform(graph, x, 0, [3], poplar.FLOAT, 0, 1, prog), r"seed must be(.|\n)*float32\[3\]"),
        (lambda: popops.scaled_add_to(graph, x, y, 1, prog), "differ in shape"),
    ]
    for call, message in cases:
        with pytest.raises(GraphError, match=message) as error:
            call()
        assert "test_libraries.py" in str(error.value)
    with pytest.raises(ArgumentError, match=r"try: 'partialsType'"):
        poplin.mat_mul(graph, x.reshape((1, 3)), x.reshape((3, 1)), prog, options={"partialType": "half"})
    with pytest.raises(AttributeError, match="popops has no operation 'ad'"):
        popops.ad  # noqa: B018
    popops.neg_in_place(graph, fixed, prog)
    with pytest.raises(VerifyError, match="read-only-output"):
        poplar.Engine(graph, prog)
    assert graph.maps_automatically is False
