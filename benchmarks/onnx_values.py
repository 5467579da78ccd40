"""Random ONNX models with 64-bit extremes, evaluated with 32 bits: right, refused, or wrong.

    python benchmarks/onnx_values.py
    python benchmarks/onnx_values.py --count 2000 --seed 7

Constants, arguments and attributes of each model are 64-bit extremes (±2³¹, ±2³² and beside, 2⁵³, the ends of int64 and
uint64, huge doubles) and small numbers. Models of which 32 bits do not hold an intermediate result are left out;
constants, what is computed from them alone, and masked values before a selection may be larger. Each model has the
results of onnxruntime, or those of onnx's reference where the two differ; or it is refused by an error that names
`jax_enable_x64`; anything else is wrong. One model in `--compiled` goes through `ipu.jit`, all others are called.

Prints the numbers of models by operator and outcome. Refused without need are those whose results would be right if all
their values were limited to 32 bits. Exits with 1 if any model is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import ipujax as ipu
import ipujax.onnx

jax.config.update("jax_platforms", "cpu")
OPSET = 21
IR_VERSION = 10
SHAPE = (3, 4)
_POWERS = [2**31, 2**32, 2**53, 2**62]
_NEAR_POWERS = [power + distance for power in _POWERS for distance in (-1, 0, 1)]
_HASH_FACTOR = 2654435761
EXTREMES: Mapping[str, Sequence[Any]] = {
    "int64": [-(2**63), 2**63 - 1, *_NEAR_POWERS, *(-n for n in _NEAR_POWERS), _HASH_FACTOR],
    "uint64": [2**64 - 1, 2**63, *_NEAR_POWERS, _HASH_FACTOR],
    "float64": [1e300, -1e300, sys.float_info.max, -sys.float_info.max, np.inf, -np.inf, 2.0**31, 2.0**53, 1e39],
}
LIMITS: Mapping[str, tuple[Any, Any]] = {
    "int64": (-(2**31), 2**31 - 1),
    "uint64": (0, 2**32 - 1),
    "float64": (float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)),
}
MARKED = {"Where"}  # operators whose results may be larger, and those that move them
MOVING = {"Concat", "Expand", "Gather", "Identity", "Reshape", "Slice", "Split", "Tile", "Transpose"}
Draw = np.random.Generator
Bounds = tuple[int, int]  # the second one excluded


@dataclass
class Builder:
    """A model in the making.

    Args:
        draw: source of its choices.
        dtype: of the numbers of the model.
        extreme: probability that a number is an extreme.
    """

    draw: Draw
    dtype: str
    extreme: float
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    count: int = 0

    def name(self, stem: str) -> str:
        """Return a new name."""
        self.count += 1
        return f"{stem}{self.count}"

    def numbers(self, shape: Sequence[int], extreme: float | None = None, small: Bounds = (-9, 10)) -> np.ndarray:
        """Return small numbers, some of them extremes."""
        rate = self.extreme if extreme is None else extreme
        low = max(0, small[0]) if self.dtype == "uint64" else small[0]
        values = self.draw.integers(low, small[1], shape).astype(self.dtype)
        extremes = np.array(EXTREMES[self.dtype], self.dtype)
        chosen = extremes[self.draw.integers(0, len(extremes), shape)]
        return np.where(self.draw.random(shape) < rate, chosen, values).astype(self.dtype)

    def argument(self, shape: Sequence[int], is_extreme: bool) -> str:
        """Add an input of held numbers, some of them limits of 32 bits; or of any."""
        values = self.numbers(shape, extreme=0.3 if is_extreme else 0.0)
        if not is_extreme:
            low, high = LIMITS[self.dtype]
            # A sum of a few doubles must not be out of range.
            edges = np.array([low, low + 1, high, high - 1] if self.is_integer else [2.0**100, -(2.0**100)], self.dtype)
            values = np.where(self.draw.random(shape) < 0.25, edges[self.draw.integers(0, len(edges), shape)], values)
        name = self.name("x")
        self.inputs[name] = values.astype(self.dtype)
        return name

    def constant(self, array: np.ndarray) -> str:
        """Add a constant: an initialiser, a `Constant` node, or the result of nodes of constants."""
        array = np.asarray(array)
        kind = self.draw.integers(0, 4)
        name = self.name("c")
        if kind == 0 and array.dtype == np.int64 and array.ndim <= 1 and array.size:
            value = {"value_int": int(array)} if array.ndim == 0 else {"value_ints": array.tolist()}
            self.nodes.append(helper.make_node("Constant", [], [name], **value))
        elif kind == 1:
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name)))
        elif kind == 2 and array.ndim == 0:
            tensor = numpy_helper.from_array(array.reshape(1), "value")
            return self.node("ConstantOfShape", self.constant(np.zeros(0, np.int64)), value=tensor)
        elif kind == 3 and array.dtype == np.int64 and array.size and np.all(array % 2 == 0):
            return self.node("Mul", self.constant(array // 2), self.constant(np.int64(2)))
        else:
            self.initializers[name] = array
        return name

    def scalar(self, extreme: float | None = None, small: Bounds = (-9, 10)) -> str:
        """Add a constant number."""
        return self.constant(self.numbers((), extreme, small))

    def ints(self, *values: int) -> str:
        """Add a vector of int64 that decides a shape or a position."""
        return self.constant(np.array(values, np.int64))

    def node(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node; return the name of its result, or a list of several."""
        names = [self.name(op_type.lower()) for _ in range(outputs)]
        self.nodes.append(helper.make_node(op_type, list(inputs), names, self.name(f"/{op_type}_"), **attributes))
        return names[0] if outputs == 1 else names

    def pick(self, *choices: Any) -> Any:
        """Return one of several."""
        return choices[self.draw.integers(0, len(choices))]

    def cast(self, x: str) -> str:
        """Return a value in the dtype of the model."""
        return self.node("Cast", x, to=helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)))

    def condition(self) -> str:
        """Return a mask, an input."""
        name = self.name("mask")
        self.inputs[name] = self.draw.random(SHAPE) < 0.5
        return name

    @property
    def is_integer(self) -> bool:
        """True if numbers are integers."""
        return self.dtype != "float64"


# Families: value of SHAPE → value of SHAPE. ---------------------------------------------------------------------------


def arithmetic(b: Builder, x: str) -> str:
    """A sum, a difference, a product, a quotient or a remainder with a constant."""
    op = b.pick("Add", "Sub", "Mul", "Div", "Mod" if b.is_integer else "Add")
    small = (1, 7) if op in ("Div", "Mod") else (-9, 10)
    y = b.constant(b.numbers(b.pick((), (4,), SHAPE), small=small))
    return b.node(op, x, y, **({"fmod": b.pick(0, 1)} if op == "Mod" else {}))


def hashed(b: Builder, x: str) -> str:
    """A hash: a product with a large constant, and a remainder."""
    product = b.node("Mul", x, b.scalar(0.7))
    return b.node("Mod", product, b.scalar(0.2, (2, 1000)), fmod=0 if b.is_integer else 1)


def unary(b: Builder, x: str) -> str:
    """A function of one operand."""
    return b.node(b.pick("Abs", "Sign", "Identity", "Neg" if b.dtype != "uint64" else "Sign"), x)


def powers(b: Builder, x: str) -> str:
    """A power with a constant exponent."""
    return unary(b, x) if b.dtype == "uint64" else b.node("Pow", x, b.scalar(0.1, (0, 4)))


def multiplied(b: Builder, x: str) -> str:
    """A product with a matrix of constants."""
    matrix = b.constant(b.numbers((4, 4), 0.03, (0, 3)))
    return b.node("MatMul", x, matrix) if b.pick(0, 1) else b.node("Einsum", x, matrix, equation="ij,jk->ik")


def compressed(b: Builder, x: str) -> str:
    """Rows that a constant mask selects, and others by vectors of indices."""
    rows = b.node("Compress", x, b.constant(np.array([True, False, True])), axis=0)
    return b.node("GatherND", rows, b.constant(np.array([[0], [-1], [1]], np.int64)))


def bits(b: Builder, x: str) -> str:
    """Operations on bits."""
    if not b.is_integer:
        return unary(b, x)
    if b.dtype == "uint64" and b.pick(0, 1):
        return b.node("BitShift", x, b.scalar(0.1, (0, 70)), direction=b.pick("LEFT", "RIGHT"))
    return b.node(b.pick("BitwiseAnd", "BitwiseOr", "BitwiseXor"), x, b.scalar())


def compared(b: Builder, x: str) -> str:
    """A comparison with a constant."""
    operands = [x, b.constant(b.numbers(b.pick((), (4,))))]
    op = b.pick("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
    return b.cast(b.node(op, *(operands if b.pick(0, 1) else operands[::-1])))


def clipped(b: Builder, x: str) -> str:
    """An interval with ends that may be extremes."""
    low, high = np.sort(b.numbers((2,), 0.6))
    return b.node("Clip", x, b.pick("", b.constant(low)), b.pick(b.constant(high), b.constant(high), ""))


def extreme_of_two(b: Builder, x: str) -> str:
    """A maximum or minimum with constants."""
    constants = [b.constant(b.numbers(b.pick((), (4,), SHAPE))) for _ in range(b.pick(1, 1, 2))]
    operands = [x, *constants]
    b.draw.shuffle(operands)
    return b.node(b.pick("Max", "Min"), *operands)


def selected(b: Builder, x: str) -> str:
    """A mask of sentinels, and what selects from the rest."""
    low = np.array(EXTREMES[b.dtype], b.dtype).min()
    high = np.array(EXTREMES[b.dtype], b.dtype).max()
    is_max = bool(b.pick(0, 1))
    sentinel = b.constant(low if is_max else high) if b.pick(0, 1) else b.scalar(0.9)
    masked = b.node("Where", b.condition(), x, sentinel)
    if b.pick(0, 0, 1):
        masked = b.node("Transpose", b.node("Transpose", masked, perm=[1, 0]), perm=[1, 0])
    axis = int(b.pick(0, 1, -1))
    kind = b.pick("reduce", "reduce", "arg", "arg", "top", "two", "plain")
    if kind == "reduce":
        reduced = b.node("ReduceMax" if is_max else "ReduceMin", masked, b.ints(axis))
        return b.node("Expand", reduced, b.ints(*SHAPE))
    if kind == "arg":
        index = b.node("ArgMax" if is_max else "ArgMin", masked, axis=axis, select_last_index=int(b.pick(0, 1)))
        return b.node("Expand", b.cast(index), b.ints(*SHAPE))
    if kind == "top":
        values, indices = b.node("TopK", masked, b.ints(2), outputs=2, axis=axis, largest=int(is_max))
        top = b.pick(values, b.cast(indices))
        return b.node("Expand", b.node("ReduceMax", top, b.ints(axis)), b.ints(*SHAPE))
    if kind == "two":
        return b.node("Max" if is_max else "Min", masked, b.scalar(0.1))
    return masked


def gathered(b: Builder, x: str) -> str:
    """Elements by constant indices; or of a constant table by small indices."""
    if b.pick(0, 1):
        return b.node("Gather", x, b.ints(*b.draw.integers(-3, 3, 3).tolist()), axis=0)
    name = b.name("index")
    b.inputs[name] = b.draw.integers(-5, 5, SHAPE)
    return b.node("Gather", b.constant(b.numbers((5,), 0.1)), name)


def gathered_elements(b: Builder, x: str) -> str:
    """Elements by an index each."""
    index = b.constant(b.draw.integers(-4, 4, SHAPE))
    return b.node("GatherElements", x, index, axis=1)


def scattered(b: Builder, x: str) -> str:
    """Elements replaced by constants, or combined with them."""
    updates = b.constant(b.numbers((3, 1), 0.1))
    index = b.constant(b.draw.integers(-4, 4, (3, 1)))
    reduction = b.pick("none", "add", "max", "min")
    if b.pick(0, 1):
        return b.node("ScatterElements", x, index, updates, axis=1, reduction=reduction)
    vectors = b.constant(np.array([[0, 1], [2, 3], [1, 0]]))
    return b.node("ScatterND", x, vectors, b.constant(b.numbers((3,), 0.1)), reduction=reduction)


def sliced(b: Builder, x: str) -> str:
    """All rows by bounds far outside, forward or backward."""
    wide = [2**63 - 1, 2**31, 2**32, 2**62, 4]
    if b.pick(0, 1):
        return b.node("Slice", x, b.ints(-int(b.pick(*wide))), b.ints(int(b.pick(*wide))), b.ints(1))
    stop = int(b.pick(-(2**63), -(2**31), -(2**32) + 1))
    return b.node("Slice", x, b.ints(int(b.pick(*wide))), b.ints(stop), b.ints(1), b.ints(-1))


def padded(b: Builder, x: str) -> str:
    """A row of constants in the place of one that is cut off."""
    inner = b.node("Slice", x, b.ints(1), b.ints(2**63 - 1), b.ints(0))
    return b.node("Pad", inner, b.ints(1, 0, 0, 0), b.scalar())


def concatenated(b: Builder, x: str) -> str:
    """Rows of constants behind others."""
    parts = b.node("Split", x, b.ints(1, 2), outputs=2, axis=0)
    return b.node("Concat", parts[1], b.constant(b.numbers((1, 4), 0.1)), axis=0)


def tiled(b: Builder, x: str) -> str:
    """A row repeated, or a constant expanded and added."""
    if b.pick(0, 1):
        return b.node("Tile", b.node("Slice", x, b.ints(0), b.ints(1)), b.ints(3, 1))
    return b.node("Add", x, b.node("Expand", b.scalar(0.2), b.ints(*SHAPE)))


def one_hot(b: Builder, x: str) -> str:
    """One of two constants, which may be extremes."""
    name = b.name("index")
    b.inputs[name] = b.draw.integers(-4, 4, 3)
    values = b.numbers((2,), 0.15)
    # onnxruntime and the reference subtract the two: infinities would become NaN.
    finite = values if b.is_integer else np.nan_to_num(values, posinf=1e300, neginf=-1e300)
    return b.node("OneHot", name, b.constant(np.int64(4)), b.constant(finite))


def filled(b: Builder, x: str) -> str:
    """A filled array, added or masked."""
    tensor = numpy_helper.from_array(b.numbers((1,), 0.3), "value")
    return b.node(b.pick("Add", "Max", "Min"), x, b.node("ConstantOfShape", b.ints(*SHAPE), value=tensor))


def counted(b: Builder, x: str) -> str:
    """A range from a constant on, added."""
    start = b.numbers((), 0.2)
    with np.errstate(over="ignore"):
        limit = (start + np.array(4, b.dtype)).astype(b.dtype)
    if b.dtype == "uint64" or not np.isfinite(np.float64(limit)) or limit <= start:
        return unary(b, x)
    step = b.constant(np.array(1, b.dtype))
    return b.node("Add", x, b.node("Range", b.constant(start), b.constant(limit), step))


def accumulated(b: Builder, x: str) -> str:
    """Running sums."""
    if b.dtype == "uint64":
        return unary(b, x)
    return b.node("CumSum", x, b.constant(np.int64(b.pick(0, 1, -1))), reverse=int(b.pick(0, 1)))


def converted(b: Builder, x: str) -> str:
    """Another element type and back; of doubles none whose range they may exceed, which ONNX leaves open."""
    types = (TensorProto.INT32, TensorProto.DOUBLE, TensorProto.FLOAT, TensorProto.INT64)
    types = types if b.is_integer else types[1:3]
    return b.cast(b.node("Cast", x, to=int(b.pick(*types))))


def reduced(b: Builder, x: str) -> str:
    """A reduction."""
    ops = ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceSumSquare")
    op = b.pick(*ops)
    if b.dtype == "uint64":
        return unary(b, x)
    return b.node("Expand", b.node(op, x, b.ints(int(b.pick(0, 1)))), b.ints(*SHAPE))


def sorted_top(b: Builder, x: str) -> str:
    """All elements of each row in order."""
    return b.node("TopK", x, b.ints(4), outputs=2, axis=1, largest=int(b.pick(0, 1)))[0]


def positions(b: Builder, x: str) -> str:
    """Positions of constants that are not zero, added."""
    where = b.node("NonZero", b.constant(np.array([0, 2**40, 3, 2**32, 1], np.int64)))
    return b.node("Add", x, b.cast(where))


def _graph(b: Builder, inputs: Sequence[Any], outputs: Sequence[Any], nodes: Sequence[Any], constants: Any) -> Any:
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    return helper.make_graph(nodes, b.name("body"), inputs, outputs, tensors)


def _info(b: Builder, name: str, shape: Sequence[int] = SHAPE, dtype: Any = None) -> Any:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype or b.dtype)), shape)


def branched(b: Builder, x: str) -> str:
    """One of two branches with constants of their own."""
    graphs = {}
    for branch in ("then_branch", "else_branch"):
        name = b.name("branch")
        op = b.pick("Add", "Max", "Min", "Mul")
        node = helper.make_node(op, [x, f"{name}_c"], [name])
        graphs[branch] = _graph(b, [], [_info(b, name)], [node], {f"{name}_c": b.numbers((), 0.3)})
    condition = b.name("flag")
    flag = np.array(bool(b.pick(0, 1)))
    if b.pick(0, 1):
        b.inputs[condition] = flag
    else:
        b.initializers[condition] = flag
    return b.node("If", condition, **graphs)


def looped(b: Builder, x: str) -> str:
    """A loop that is as long as it can be, or of few iterations."""
    stem = b.name("loop")
    op = b.pick("Add", "Max", "Min")
    nodes = [
        helper.make_node("Less", [f"{stem}_i", f"{stem}_last"], [f"{stem}_go"]),
        helper.make_node(op, [f"{stem}_v", f"{stem}_c"], [f"{stem}_w"]),
    ]
    constants = {f"{stem}_c": b.numbers((), 0.2), f"{stem}_last": np.array(2)}
    is_conditional = b.pick(0, 1)
    if not is_conditional:
        nodes[0] = helper.make_node("Identity", [f"{stem}_c0"], [f"{stem}_go"])
    inputs = [_info(b, f"{stem}_i", (), np.int64), _info(b, f"{stem}_c0", (), bool), _info(b, f"{stem}_v")]
    outputs = [_info(b, f"{stem}_go", (), bool), _info(b, f"{stem}_w")]
    body = _graph(b, inputs, outputs, nodes, constants)
    trips = b.constant(np.array(b.pick(2**63 - 1, 2**31, 2**32, 5) if is_conditional else 3, np.int64))
    start = b.constant(np.array(True))
    return b.node("Loop", trips, start, x, body=body)


def scanned(b: Builder, x: str) -> str:
    """A running maximum or minimum from a constant on."""
    stem = b.name("scan")
    op = b.pick("Max", "Min")
    nodes = [
        helper.make_node(op, [f"{stem}_s", f"{stem}_r"], [f"{stem}_t"]),
        helper.make_node("Identity", [f"{stem}_t"], [f"{stem}_o"]),
    ]
    row = (SHAPE[1],)
    body = _graph(
        b,
        [_info(b, f"{stem}_s", row), _info(b, f"{stem}_r", row)],
        [_info(b, f"{stem}_t", row), _info(b, f"{stem}_o", row)],
        nodes,
        {},
    )
    return b.node("Scan", b.constant(b.numbers(row, 0.2)), x, outputs=2, body=body, num_scan_inputs=1)[1]


def triangle(b: Builder, x: str) -> str:
    """A triangle from a diagonal on, which may be far away."""
    k = int(b.pick(0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**31) - 1))
    return b.node("Trilu", x, b.constant(np.int64(k)), upper=int(b.pick(0, 1)))


FAMILIES: Sequence[Callable[[Builder, str], str]] = (
    *(arithmetic, hashed, powers, multiplied, unary, bits, compared, clipped, clipped, extreme_of_two, extreme_of_two),
    *(selected, selected, selected, gathered, gathered_elements, compressed, scattered, sliced, padded, concatenated),
    *(tiled, one_hot, filled, counted, accumulated, converted, reduced, sorted_top, positions, branched, looped),
    *(scanned, triangle),
)


@dataclass(frozen=True)
class Case:
    """A model and its arguments.

    Args:
        model: the model.
        inputs: arguments by name.
        families: names of its families.
    """

    model: onnx.ModelProto
    inputs: Mapping[str, np.ndarray]
    families: tuple[str, ...]


def random_case(seed: int, number: int) -> Case:
    """Return a random model of one to three families."""
    draw = np.random.default_rng([seed, number])
    dtype = str(draw.choice(["int64", "int64", "int64", "uint64", "float64"]))
    b = Builder(draw, dtype, extreme=float(draw.choice([0.05, 0.15, 0.5])))
    x = b.argument(SHAPE, is_extreme=draw.random() < 0.08)
    chosen = [FAMILIES[n] for n in draw.integers(0, len(FAMILIES), draw.integers(1, 4))]
    for family in chosen:
        x = family(b, x)
    infos = [_info(b, name, value.shape, value.dtype) for name, value in b.inputs.items()]
    tensors = [numpy_helper.from_array(array, name) for name, array in b.initializers.items()]
    output = helper.make_tensor_value_info(x, helper.np_dtype_to_tensor_dtype(np.dtype(b.dtype)), None)
    graph = helper.make_graph(b.nodes, "random", infos, [output], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return Case(model, b.inputs, tuple(family.__name__ for family in chosen))


# Oracles. -------------------------------------------------------------------------------------------------------------


def _exposed(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with the results of all nodes as outputs, the model's own first."""
    inferred = onnx.shape_inference.infer_shapes(model)
    types = {info.name: info for info in inferred.graph.value_info}
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    outputs = {info.name for info in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name in types and name not in outputs]
    copied.graph.output.extend(types[name] for name in names)
    return copied


Results = Mapping[str, np.ndarray]


def by_onnxruntime(model: onnx.ModelProto, inputs: Results) -> Results | None:
    """Return the results of all nodes by onnxruntime; None where it lacks an operator or refuses the model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(_exposed(model).SerializeToString(), options, ["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))
    except Exception:  # of onnxruntime's many classes: the reference decides
        return None


def by_reference(model: onnx.ModelProto, inputs: Results) -> Results | None:
    """Return the results of all nodes by onnx's reference; None where it fails."""
    exposed = _exposed(model)
    names = [output.name for output in exposed.graph.output]
    try:
        with np.errstate(all="ignore"):
            return dict(zip(names, ReferenceEvaluator(exposed).run(None, dict(inputs)), strict=True))
    except Exception:  # of NumPy and onnx: there is no oracle then
        return None


def is_held(value: np.ndarray) -> bool:
    """Return whether 32 bits hold all elements; of doubles exactly."""
    dtype = str(value.dtype)
    if dtype not in LIMITS or not value.size:
        return True
    if dtype == "float64":
        with np.errstate(over="ignore"):
            return bool(np.all((value == value.astype(np.float32)) | np.isnan(value)))
    low, high = LIMITS[dtype]
    return bool(np.all((value >= low) & (value <= high)))


def fits(model: onnx.ModelProto, results: Results, inputs: Results) -> bool:
    """Return whether 32 bits hold all results that depend on arguments, but masked values before a selection."""
    dependent = set(inputs)
    marked: set[str] = set()
    for node in model.graph.node:
        inner = [name for a in node.attribute if a.type == a.GRAPH for each in a.g.node for name in each.input]
        if dependent.isdisjoint([*node.input, *inner]):
            continue
        dependent.update(node.output)
        is_marking = node.op_type in MARKED or (node.op_type in MOVING and node.input[0] in marked)
        for name in node.output:
            if not is_held(results.get(name, np.zeros(0))):
                if not is_marking or name == model.graph.output[0].name:
                    return False
                marked.add(name)
    return True


def limited(case: Case) -> Case:
    """Return the case with all constants and arguments limited to what 32 bits hold."""

    def limit(array: np.ndarray) -> np.ndarray:
        if str(array.dtype) not in LIMITS:
            return array
        low, high = LIMITS[str(array.dtype)]
        clipped = np.clip(array, np.array(low, array.dtype), np.array(high, array.dtype))
        return clipped if array.dtype != np.float64 else np.where(np.isfinite(array), clipped, array)

    def limit_graph(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(limit(numpy_helper.to_array(tensor)), tensor.name))
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == attribute.TENSOR:
                    tensor = numpy_helper.from_array(limit(numpy_helper.to_array(attribute.t)), "value")
                    attribute.t.CopyFrom(tensor)
                if attribute.type == attribute.INT:
                    attribute.i = int(limit(np.array(attribute.i)))
                if attribute.type == attribute.INTS:
                    values = limit(np.array(attribute.ints, np.int64)).tolist()
                    del attribute.ints[:]
                    attribute.ints.extend(values)
                if attribute.type == attribute.GRAPH:
                    limit_graph(attribute.g)

    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    limit_graph(model.graph)
    return Case(model, {name: limit(value) for name, value in case.inputs.items()}, case.families)


def is_equal(result: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether results are the same numbers, whatever their widths."""
    if result.shape != expected.shape:
        return False
    if expected.dtype == np.float64:
        return bool(np.allclose(result.astype(np.float64), expected, rtol=1e-5, atol=1e-6, equal_nan=True))
    return bool(np.array_equal(result.astype(object), expected.astype(object)))


# Outcomes. ------------------------------------------------------------------------------------------------------------


def outcome_of(case: Case, is_compiled: bool) -> tuple[str, str]:
    """Return the outcome of a case, and a text about it."""
    oracles = [x for x in (by_onnxruntime(case.model, case.inputs), by_reference(case.model, case.inputs)) if x]
    if not oracles:
        return "left out: no oracle", ""
    if not any(fits(case.model, results, case.inputs) for results in oracles):
        return "left out: intermediate", ""
    output = case.model.graph.output[0].name
    expected = [results[output] for results in oracles]
    arguments = list(case.inputs.values())
    try:
        model = ipujax.onnx.load(case.model)
        result = np.asarray((ipu.jit(model) if is_compiled else model)(model.params, *arguments))
    except ipu.IpuError as error:
        if "jax_enable_x64" not in str(error):
            return "wrong: another error", str(error)
        plain = limited(case)
        results = by_onnxruntime(plain.model, plain.inputs) or by_reference(plain.model, plain.inputs)
        is_needless = (
            results is not None
            and all(map(is_held, case.inputs.values()))
            and any(is_equal(results[output], x) for x in expected)
            and fits(plain.model, results, plain.inputs)
        )
        return ("refused without need" if is_needless else "refused"), str(error)
    except Exception as error:  # any other class is a fault
        return "wrong: untyped error", f"{type(error).__name__}: {error}"
    if any(is_equal(result, x) for x in expected):
        return "right", ""
    return "wrong: numbers", f"got {result.tolist()}, expected {expected[0].tolist()}"


def described(case: Case) -> str:
    """Return a listing of a case."""
    values = "\n".join(f"    {name} = {value.tolist()}" for name, value in case.inputs.items())
    return f"{onnx.printer.to_text(case.model)}\n{values}"


def main() -> int:
    """Print outcomes by family; return 1 if any model is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="models that are not left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", type=int, default=20, help="every n-th model goes through ipu.jit")
    parser.add_argument("--show", type=int, default=3, help="wrong models that are printed")
    parser.add_argument("--refused", action="store_true", help="print each refusal without need")
    arguments = parser.parse_args()
    outcomes: Counter[str] = Counter()
    by_family: dict[str, Counter[str]] = {}
    number = 0
    printed = 0
    evaluated = 0
    while evaluated < arguments.count:
        case = random_case(arguments.seed, number)
        outcome, text = outcome_of(case, number % arguments.compiled == 0)
        if not outcome.startswith("left out"):
            evaluated += 1
            for family in set(case.families):
                by_family.setdefault(family, Counter())[outcome.partition(":")[0]] += 1
        outcomes[outcome] += 1
        if outcome.startswith("wrong") and printed < arguments.show:
            printed += 1
            print(f"model {number}: {outcome}: {text}\n{described(case)}\n")
        if arguments.refused and outcome == "refused without need":
            print(f"model {number}: {text.splitlines()[0]}")
        number += 1
    columns = ("right", "refused", "refused without need", "wrong")
    print(f"{'family':<18}" + "".join(f"{column:>22}" for column in columns))
    for family, counts in sorted(by_family.items()):
        print(f"{family:<18}" + "".join(f"{counts[column]:>22}" for column in columns))
    wrong = sum(count for outcome, count in outcomes.items() if outcome.startswith("wrong"))
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    print(f"{evaluated} models: {wrong} wrong, bar 0")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
