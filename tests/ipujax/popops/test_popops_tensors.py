"""popops on whole tensors: reductions, sums of scaled tensors, slices, gathers, sorts, padding; against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax import poplar, popops
from ipujax.poplar.program import Sequence
from ipujax.runtime.errors import GraphError
from tests.ipujax.poplar.engine_helpers import both, constant, new_graph, variable

X = np.random.default_rng(3).uniform(-1, 1, (3, 4, 5)).astype(np.float32)
M = popops.MASKED_LABEL_CODE


def indices(graph, value):
    return constant(graph, np.asarray(value), poplar.UNSIGNED_INT)


# --- reductions ---


def test_reduce_scales_updates_and_changes_type():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [3, 4, 5], value=X)
    h = variable(graph, [3, 4], poplar.HALF, value=X[:, :, 0])
    total = variable(graph, [4], value=[1, 2, 3, 4])
    out = variable(graph, [3, 5], value=np.ones((3, 5)))
    scale = constant(graph, [2.0])
    popops.reduce(graph, x, [0, 2], "square_add", prog, scale=scale, update=total)
    popops.reduce_with_output(graph, x, out, [1], "add", prog, scale=scale)
    popops.reduce_with_output(graph, x, out, [1], "add", prog, scale=0.5, update=True)
    wide = popops.reduce(graph, h, [1], "add", prog, out_type=poplar.FLOAT)
    nothing = popops.reduce(graph, x, [], "add", prog)
    actual = both(graph, prog, {"total": total, "out": out, "wide": wide, "nothing": nothing})
    np.testing.assert_allclose(actual["total"], [1, 2, 3, 4] + 2 * (X**2).sum((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(actual["out"], 2.5 * X.sum(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual["wide"], X[:, :, 0].astype(np.float16).astype(np.float32).sum(1), rtol=1e-6)
    np.testing.assert_array_equal(actual["nothing"], X)


def test_scaled_sums_of_halves_are_rounded_once():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [2, 64], poplar.HALF, value=np.full((2, 64), 2000))
    quarter = constant(graph, [1 / 4096])
    mean = popops.reduce(graph, x, [1], "add", prog, scale=1 / 64)
    square = popops.reduce(graph, x, [1], "square_add", prog, scale=quarter)
    actual = both(graph, prog, {"mean": mean, "square": square})
    assert actual["mean"].dtype == actual["square"].dtype == np.float16
    np.testing.assert_array_equal(actual["mean"], [2000, 2000])
    np.testing.assert_array_equal(actual["square"], np.float16([62500, 62500]))


@pytest.mark.parametrize(
    ("dtype", "values", "operation", "out_type", "expected"),
    [
        (poplar.SHORT, [300, -2000], "square_add", poplar.INT, 4_090_000),
        (poplar.UNSIGNED_CHAR, [20, 200], "square_add", poplar.INT, 40_400),
        (poplar.SHORT, [300, -2000], "square_add", poplar.FLOAT, 4_090_000),
        (poplar.INT, [2**30] * 3, "add", poplar.FLOAT, 3 * 2**30),
        (poplar.CHAR, [100] * 5, "mul", poplar.FLOAT, 10**10),
        (poplar.CHAR, [-5, 3], "max", poplar.UNSIGNED_INT, 3),
    ],
)
def test_reductions_are_in_the_type_of_the_result(dtype, values, operation, out_type, expected):
    graph = new_graph()
    prog = Sequence()
    total = popops.reduce(graph, constant(graph, values, dtype), [0], operation, prog, out_type=out_type)
    assert both(graph, prog, {"total": total})["total"] == expected


def test_sums_are_scaled_before_they_are_rounded_to_half():
    graph = new_graph()
    prog = Sequence()
    x = constant(graph, [60000, 60000])
    total = popops.reduce(graph, x, [0], "add", prog, scale=0.25, out_type=poplar.HALF)
    assert both(graph, prog, {"total": total})["total"] == 30000


def test_scales_of_integers_are_integers():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [4], poplar.INT)
    half = constant(graph, [0.5])
    row = constant(graph, [[1]], poplar.INT)
    for scale, got in ((0.5, "0.5"), (half, "float32")):
        calls = (
            lambda s=scale: popops.reduce(graph, x, [0], "add", prog, scale=s),
            lambda s=scale: popops.scaled_add_to(graph, x, x, 1, prog, scale_a=s),
            lambda s=scale: popops.multi_update_add(graph, x, row, indices(graph, [2]), s, [0], [1], prog),
        )
        for call in calls:
            with pytest.raises(GraphError, match=f"the scale(.|\n)*{got}"):
                call()


def test_reduce_many():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [3, 4, 5], value=X)
    flags = constant(graph, X > 0, poplar.BOOL)
    first, second = popops.reduce_many(
        graph, [popops.SingleReduceOp(x, [0], "max"), popops.SingleReduceOp(flags, [1, 2], "logical_or")], prog
    )
    out = variable(graph, [3, 4], value=np.full((3, 4), 10))
    repeated = popops.SingleReduceOp(x, [2], "add", scale=2.0, update=True)
    assert popops.reduce_many(graph, [repeated], prog, outputs=[out]) == [out]
    actual = both(graph, prog, {"first": first, "second": second, "out": out})
    np.testing.assert_array_equal(actual["first"], X.max(0))
    np.testing.assert_array_equal(actual["second"], (X > 0).any((1, 2)))
    np.testing.assert_allclose(actual["out"], 10 + 2 * X.sum(2), rtol=1e-6)


def test_predicates_of_all_elements():
    graph = new_graph()
    prog = Sequence()
    spoiled = X[0].copy()
    endless = X[0].copy()
    spoiled[1, 2] = np.nan
    endless[1, 2] = np.inf
    tensors = {n: variable(graph, [4, 5], value=v) for n, v in (("x", X[0]), ("nan", spoiled), ("inf", endless))}
    outs = {f"{n} nan": popops.has_nan(graph, t, prog) for n, t in tensors.items()}
    outs |= {f"{n} any": popops.has_nan_or_inf(graph, t, prog) for n, t in tensors.items()}
    outs["all"] = popops.all_true(graph, constant(graph, [True] * 9, poplar.BOOL), prog)
    outs["not all"] = popops.all_true(graph, constant(graph, [True] * 9 + [False], poplar.BOOL), prog)
    actual = {n: bool(v) for n, v in both(graph, prog, outs).items()}
    true = {"nan nan", "nan any", "inf any", "all"}
    assert actual == {name: name in true for name in actual}


# --- sums of scaled tensors ---


def test_scaled_sums_with_two_scales():
    a = X[0]
    b = X[1]
    graph = new_graph()
    prog = Sequence()
    out = [variable(graph, [4, 5], value=a) for _ in range(4)]
    other = variable(graph, [4, 5], value=b)
    two = constant(graph, [2.0])
    popops.scaled_add_to(graph, out[0], other, 3.0, prog, scale_a=0.5)
    popops.scaled_subtract_from(graph, out[1], other, two, prog, scale_a=two)
    popops.scaled_add_to(graph, out[2], other, two, prog, scale_a=0.25, speciality="x_minus_ax_plus_by")
    popops.scaled_add_to(graph, out[3], other, 0.5, prog, scale_a=two)
    actual = both(graph, prog, {str(n): t for n, t in enumerate(out)})
    expected = [0.5 * a + 3 * b, 2 * a - 2 * b, a - 0.25 * a + 2 * b, 2 * a + 0.5 * b]
    for number, value in enumerate(expected):
        np.testing.assert_allclose(actual[str(number)], value, rtol=1e-5, atol=1e-6)


# --- sorting ---


def test_sort_with_values_in_place():
    graph = new_graph()
    prog = Sequence()
    k = variable(graph, [4, 5], value=X[0])
    v = variable(graph, [4, 5], poplar.INT, value=np.arange(20))
    popops.sort_key_value_in_place(graph, k, v, 0, prog)
    actual = both(graph, prog, {"k": k, "v": v})
    np.testing.assert_array_equal(actual["k"], np.sort(X[0], 0))
    np.testing.assert_array_equal(actual["v"], np.take_along_axis(np.arange(20).reshape(4, 5), np.argsort(X[0], 0), 0))


@pytest.mark.parametrize("largest", [True, False])
def test_top_k_of_floats_and_integers(largest):
    whole = np.array([[5, -(2**31), 2**31 - 1, 5, 0]], np.int32)
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [4, 5], value=X[0])
    n = variable(graph, [1, 5], poplar.INT, value=whole)
    names = variable(graph, [4, 5], poplar.INT, value=np.arange(20))
    order = "ascending" if largest else "descending"
    best, where = popops.top_k(graph, x, 3, prog, largest=largest)
    worst_first, _ = popops.top_k(graph, x, 3, prog, largest=largest, sort_order=order)
    numbers, at = popops.top_k(graph, n, 4, prog, largest=largest, sort_order="none")
    keys, values = popops.top_k_key_value(graph, x, names, 2, prog, largest=largest)
    actual = both(
        graph, prog, {"b": best, "w": where, "r": worst_first, "n": numbers, "at": at, "k": keys, "v": values}
    )
    rank = np.argsort(-X[0] if largest else X[0], 1)
    np.testing.assert_array_equal(actual["w"], rank[:, :3])
    np.testing.assert_array_equal(actual["b"], np.take_along_axis(X[0], rank, 1)[:, :3])
    np.testing.assert_array_equal(actual["r"], np.take_along_axis(X[0], rank, 1)[:, 2::-1])
    np.testing.assert_array_equal(actual["v"], (rank + 5 * np.arange(4)[:, None])[:, :2])
    np.testing.assert_array_equal(actual["k"], np.take_along_axis(X[0], rank, 1)[:, :2])
    np.testing.assert_array_equal(np.take_along_axis(whole, actual["at"].astype(int), 1), actual["n"])
    expected = sorted(whole[0].tolist(), reverse=largest)[:4]
    assert sorted(actual["n"][0].tolist(), reverse=largest) == expected


@pytest.mark.parametrize("largest", [True, False])
def test_zeros_of_both_signs_are_equal(largest):
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [1, 4], value=np.array([[-0.0, 0.0, -0.0, 0.0]]))
    _, where = popops.top_k(graph, x, 3, prog, largest=largest)
    np.testing.assert_array_equal(both(graph, prog, {"where": where})["where"], [[0, 1, 2]])


# --- slices ---


def test_slices_in_several_dimensions():
    graph = new_graph()
    prog = Sequence()
    x = popops.create_sliceable_tensor(graph, poplar.FLOAT, [3, 4, 5], [0, 2], [1, 2], "x")
    graph.set_initial_value(x, X)
    y = variable(graph, [3, 4, 5], value=X)
    at = indices(graph, [2, 1])
    out = variable(graph, [1, 4, 2])
    popops.dynamic_slice_with_output(graph, out, x, at, [0, 2], [1, 2], prog)
    places = indices(graph, [[0, 3], [2, 0], [1, 1], [2, 0]])
    boxes = popops.multi_slice(graph, x, places, [0, 2], [1, 2], prog)
    popops.multi_update_max(graph, y, constant(graph, np.zeros((4, 1, 4, 2))), places, [0, 2], [1, 2], prog)
    popops.multi_update_add(graph, x, constant(graph, np.ones((4, 1, 4, 2))), places, 2.0, [0, 2], [1, 2], prog)
    actual = both(graph, prog, {"out": out, "boxes": boxes, "x": x, "y": y})
    np.testing.assert_array_equal(actual["out"], X[2:, :, 1:3])
    expected = X.copy()
    clipped = X.copy()
    for number, (i, j) in enumerate([(0, 3), (2, 0), (1, 1), (2, 0)]):
        box = np.s_[i : i + 1, :, j : j + 2]
        np.testing.assert_array_equal(actual["boxes"][number], X[box])
        expected[box] += 2
        clipped[box] = np.maximum(clipped[box], 0)
    np.testing.assert_allclose(actual["x"], expected, rtol=1e-6)
    np.testing.assert_array_equal(actual["y"], clipped)
    assert not graph.notes.fallbacks


def test_slices_at_constant_offsets_are_new_variables():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [3, 4, 5], value=X)
    sliced = popops.dynamic_slice(graph, x, indices(graph, [1]), [0], [1], prog)
    rows = popops.multi_slice(graph, variable(graph, [3, 4], value=X[:, :, 0]), indices(graph, [[2]]), [0], [1], prog)
    popops.dynamic_update(graph, x, constant(graph, np.zeros((1, 4, 5))), indices(graph, [1]), [0], [1], prog)
    actual = both(graph, prog, {"sliced": sliced, "rows": rows, "x": x})
    np.testing.assert_array_equal(actual["sliced"], X[1:2])
    np.testing.assert_array_equal(actual["rows"].reshape(4), X[2, :, 0])
    np.testing.assert_array_equal(actual["x"][1], 0)


def test_slicing_a_sliceable_tensor_exchanges_only_the_offset():
    def exchange_cycles(make):
        graph = new_graph()
        prog = Sequence()
        at = graph.add_variable(poplar.UNSIGNED_INT, [1])
        graph.set_tile_mapping(at, 0)
        popops.dynamic_slice(graph, make(graph), at, [0], [1], prog)
        return poplar.Engine(graph, prog).profile.phase_cycles["exchange"]

    spread = exchange_cycles(lambda g: variable(g, [64, 64]))
    aligned = exchange_cycles(lambda g: popops.create_sliceable_tensor(g, poplar.FLOAT, [64, 64], [0], [1]))
    assert aligned < spread / 4


# --- gather and scatter ---


def test_gather_with_dimension_numbers():
    where = np.array([[0, 2, 1], [3, 0, 2]], np.int32)  # the places are its columns
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [3, 4, 5], value=X)
    at = constant(graph, where, poplar.INT)
    out = popops.gather(graph, x, at, 0, [1], [1, 1, 5], [0, 1], [0, 1], prog)
    single = popops.gather(graph, x, indices(graph, [1, 2]), 1, [1, 2], [1, 4, 5], [0], [0], prog)
    actual = both(graph, prog, {"out": out, "single": single})
    np.testing.assert_array_equal(actual["out"], X[where[0], where[1]])
    np.testing.assert_array_equal(actual["single"], X[1:3])


@pytest.mark.parametrize("combination", ["replace", "add", "sub", "mul", "min", "max"])
def test_scatter(combination):
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [4, 5], value=X[0])
    new = constant(graph, X[1, :3])
    popops.scatter(graph, x, indices(graph, [3, 0, 9]), new, 1, [1], [0], [0], prog, update_computation=combination)
    combine = {"replace": lambda a, b: b, "add": np.add, "sub": np.subtract, "mul": np.multiply,
               "min": np.minimum, "max": np.maximum}[combination]  # fmt: skip
    expected = X[0].copy()
    expected[3], expected[0] = combine(expected[3], X[1, 0]), combine(expected[0], X[1, 1])
    np.testing.assert_allclose(both(graph, prog, {"x": x})["x"], expected, rtol=1e-6)


def test_scalars_of_rows():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [4, 5], value=X[0])
    y = variable(graph, [4, 5], value=X[0])
    at = indices(graph, [4, 5, M, 0])
    chosen = popops.select_scalar_from_rows(graph, x, at, prog)
    popops.update_scalar_in_rows(graph, y, at, prog)
    actual = both(graph, prog, {"chosen": chosen, "y": y})
    np.testing.assert_array_equal(actual["chosen"], [X[0, 0, 4], np.nan, 0, X[0, 3, 0]])
    expected = X[0].copy()
    expected[0, 4], expected[1], expected[3, 0] = expected[0, 4] - 1, np.nan, expected[3, 0] - 1
    np.testing.assert_allclose(actual["y"], expected, rtol=1e-6)


# --- encodings and padding ---


def test_one_hot_with_tensors_and_masked_labels():
    graph = new_graph()
    prog = Sequence()
    encoded = variable(graph, [3, 4], poplar.HALF)
    on = constant(graph, [2.0])
    off = constant(graph, [-1.0], poplar.HALF)
    popops.encode_one_hot(graph, indices(graph, [1, M, 3]), encoded, prog, on, off)
    expected = np.full((3, 4), -1)
    expected[0, 1] = expected[2, 3] = 2
    np.testing.assert_array_equal(both(graph, prog, {"e": encoded})["e"], expected)


def test_one_hot_with_more_columns_than_the_type_of_indices_has_numbers():
    graph = new_graph()
    prog = Sequence()
    encoded = variable(graph, [3, 300])
    popops.encode_one_hot(graph, constant(graph, [1, 200, 255], poplar.UNSIGNED_CHAR), encoded, prog)
    np.testing.assert_array_equal(both(graph, prog, {"e": encoded})["e"], np.eye(300)[[1, 200, 255]])


def test_values_of_paddings_and_encodings_fit_their_type():
    graph = new_graph()
    prog = Sequence()
    row = variable(graph, [3], poplar.INT)
    encoded = variable(graph, [3, 4], poplar.INT)
    halves = variable(graph, [3], poplar.HALF)
    cases = [
        (lambda: popops.pad(graph, row, [1], [1], 0.5), r"the value(.|\n)*0\.5"),
        (lambda: popops.pad(graph, halves, [1], [1], 1e6), r"the value(.|\n)*1000000"),
        (lambda: popops.encode_one_hot(graph, row, encoded, prog, on=0.5), r"a value(.|\n)*0\.5"),
        (lambda: popops.encode_one_hot(graph, row, encoded, prog, off=constant(graph, [0.5])), "float32"),
    ]
    for call, message in cases:
        with pytest.raises(GraphError, match=message):
            call()


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect"])
def test_pad_is_a_view(mode):
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [4, 5], value=X[0])
    steps = len(graph.groups)
    padded = popops.pad(graph, x, [2, -1], [1, 3], 7, mode=mode) if mode == "constant" else None
    padded = padded if padded is not None else popops.pad(graph, x, [2, -1], [1, 3], mode=mode)
    assert len(graph.groups) == steps
    out = popops.neg(graph, padded, prog)
    settings = {"constant_values": 7} if mode == "constant" else {}
    expected = -np.pad(X[0][:, 1:], [(2, 1), (0, 3)], mode=mode, **settings)
    np.testing.assert_array_equal(both(graph, prog, {"out": out})["out"], expected)


def test_normalise_image():
    image = np.random.default_rng(5).integers(0, 255, (2, 2, 3)).astype(np.uint8)
    offset = np.float16([0.5, 0.25, 0.125])
    scale = np.float16([2, 4, 8])
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [2, 2, 3], poplar.UNSIGNED_CHAR, value=image)
    out = popops.normalise_image(
        graph, x, 1 / 256, constant(graph, offset, poplar.HALF), constant(graph, scale, poplar.HALF), prog
    )
    expected = np.concatenate([(image * np.float16(1 / 256) - offset) * scale, np.zeros((2, 2, 1))], 2)
    np.testing.assert_array_equal(both(graph, prog, {"out": out})["out"], expected.astype(np.float16))


# --- errors ---


def test_wrong_operands():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [4, 5], name="x")
    y = variable(graph, [4], name="y")
    i = indices(graph, [0, 1])
    cases = [
        (lambda: popops.reduce(graph, x, [2], "add", prog), r"must be dimensions(.|\n)*from 0 to 1(.|\n)*\[2\]"),
        (lambda: popops.reduce(graph, x, [0], "max", prog, scale=2.0), "only sums scale"),
        (lambda: popops.all_true(graph, x, prog), r"takes BOOL operands(.|\n)*float32"),
        (lambda: popops.reduce_with_output(graph, x, y, [0], "add", prog), r"float32\[5\](.|\n)*float32\[4\]"),
        (lambda: popops.reduce_many(graph, [popops.SingleReduceOp(x, [0], "add", update=True)], prog), "outputs="),
        (lambda: popops.scaled_add_to(graph, x, x, y, prog), "a scale is one number"),
        (lambda: popops.scaled_add_to(graph, x, x, 1, prog, speciality="x_minus_ax_plus_by"), "speciality"),
        (lambda: popops.top_k(graph, x, 6, prog), r"1 to 5(.|\n)*6"),
        (lambda: popops.top_k(graph, x, 2, prog, sort_order="up"), "unknown order"),
        (lambda: popops.dynamic_slice(graph, x, i, [0, 1], [5, 1], prog), "must fit the tensor"),
        (lambda: popops.dynamic_slice(graph, x, i, [0], [1], prog), "one offset a dimension"),
        (lambda: popops.dynamic_update(graph, x, y, i, [0, 1], [1, 1], prog), "the wrong shape"),
        (lambda: popops.multi_slice(graph, x, y, [0], [1], prog), r"integers(.|\n)*float32\[4\]"),
        (lambda: popops.multi_update(graph, x, y, i, [0], [1], prog), r"the wrong shape(.|\n)*\(2, 1, 5\)"),
        (lambda: popops.gather(graph, x, i, 2, [1], [1, 5], [0], [0], prog), "indices must be integers"),
        (lambda: popops.gather(graph, x, i, 1, [0, 1], [1, 5], [0], [0], prog), "gather: "),
        (lambda: popops.scatter(graph, x, i, x, 1, [1], [0], [0], prog, update_computation="ad"), "try: 'add'"),
        (lambda: popops.select_scalar_from_rows(graph, x, i, prog), "one index a row"),
        (lambda: popops.pad(graph, x, [0], [0, 1]), "2 each"),
        (lambda: popops.pad(graph, x, [0, -3], [0, -3]), "crops more"),
        (lambda: popops.pad(graph, x, [4, 0], [0, 0], mode="reflect"), "too few elements to mirror"),
        (lambda: popops.pad(graph, x, [4, 0], [0, 0], mode="wrap"), "unknown mode"),
        (lambda: popops.normalise_image(graph, x, 1, y, y, prog), "three colours"),
        (lambda: popops.iota(graph, x, 0, prog), "a vector"),
        (lambda: popops.encode_one_hot(graph, i, x, prog), "a row for each index"),
    ]
    before = len(graph.variables)
    for call, message in cases:
        with pytest.raises(GraphError, match=message) as error:
            call()
        assert "test_popops_tensors.py" in str(error.value)
    assert len(graph.variables) == before
