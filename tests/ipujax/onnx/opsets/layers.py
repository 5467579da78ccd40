"""Reductions, products, normalisations, recurrent layers, attention, losses and control flow."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import helper

from tests.ipujax.onnx.models import info
from tests.ipujax.onnx.opsets.draw import Draw, Generator


def _arg(d: Draw) -> None:
    shape = d.shape()
    d.operand(d.whole(0, 3, *shape, dtype=np.float32))
    d.sometimes(axis=d.axis(len(shape)), keepdims=d.integer(0, 1))
    d.since(12, select_last_index=d.integer(0, 1))


def _reduction(d: Draw) -> None:
    shape = d.shape()
    x = d.normal(*shape)
    d.operand(np.abs(x) + np.float32(0.1) if "Log" in d.op_type else x)
    axes = d.axes(len(shape))
    if d.often(0.8):
        d.moved("axes", axes, 13 if d.op_type == "ReduceSum" else 18)
    d.sometimes(keepdims=d.integer(0, 1))
    if d.opset >= (13 if d.op_type == "ReduceSum" else 18):
        d.sometimes(noop_with_empty_axes=d.integer(0, 1))


def _cumulative(d: Draw) -> None:
    shape = d.shape()
    d.operand(d.normal(*shape))
    d.operand(np.asarray(d.axis(len(shape))), constant=True)
    d.sometimes(exclusive=d.integer(0, 1), reverse=d.integer(0, 1))


def _dft(d: Draw) -> None:
    shape = d.shape(2, 3, 6)
    d.operand(d.normal(*shape, d.one_of([1, 2])))
    axis = d.integer(1, len(shape) - 1)
    d.operand(np.asarray(d.integer(2, 8)) if d.often() else None, constant=True)
    d.sometimes(inverse=d.integer(0, 1))
    if not d.attributes.get("inverse") and d.inputs["x0"].shape[-1] == 1:
        d.sometimes(onesided=d.integer(0, 1))
    if d.often(0.7):
        d.moved("axis", axis, 20)
    while d.names and not d.names[-1]:
        d.names.pop()


def _einsum(d: Draw) -> None:
    sizes = {letter: d.integer(1, 4) for letter in "ijk"}
    equation, terms = d.one_of(
        [("ij,jk->ik", ["ij", "jk"]), ("ij->ji", ["ij"]), ("ij, jk", ["ij", "jk"]), ("...i,ij->...j", ["ki", "ij"])]
    )
    for term in terms:
        d.operand(d.normal(*(sizes[letter] for letter in term)))
    d.attributes["equation"] = equation


def _gemm(d: Draw) -> None:
    m, k, n = (d.integer(1, 4) for _ in range(3))
    d.sometimes(transA=d.integer(0, 1), transB=d.integer(0, 1), alpha=0.5, beta=2.0)
    d.operand(d.normal(*((k, m) if d.attributes.get("transA") else (m, k))))
    d.operand(d.normal(*((n, k) if d.attributes.get("transB") else (k, n))))
    shape = d.one_of([(m, n), (n,), (1, n), (1,)])
    if d.opset < 11 or d.often():
        d.operand(d.normal(*shape))
    if d.opset < 7 and shape != (m, n):
        d.attributes["broadcast"] = 1


def _matmul(d: Draw) -> None:
    m, k, n = (d.integer(1, 4) for _ in range(3))
    batch = d.shape(0, 2)
    d.operand(d.normal(*batch, m, k))
    d.operand(d.normal(*d.one_of([batch, ()]), k, n))


def _batch_normalization(d: Draw) -> None:
    shape = (d.integer(1, 3), d.integer(1, 4), *d.shape(0, 2))
    d.operand(d.normal(*shape))
    by_element = d.opset < 9 and len(shape) > 2 and d.often(0.4)
    statistics = shape[1:] if by_element else shape[1:2]
    for n in range(4):
        values = d.normal(*statistics)
        d.operand(np.abs(values) + np.float32(0.5) if n == 3 else values)
    d.sometimes(epsilon=1e-3, momentum=0.8)
    if by_element or d.opset < 9:
        d.attributes.update({"spatial": 0} if by_element else {})
    if d.opset < 7:
        d.attributes["is_test"] = 1
    if d.opset < 6:
        d.attributes["consumed_inputs"] = [0, 0, 0, 0, 0]
    if d.opset >= 14 and d.often():
        d.attributes["training_mode"] = 1
        d.outputs = 3


def _group_normalization(d: Draw) -> None:
    groups = d.integer(1, 3)
    channels = groups * d.integer(1, 3)
    d.operand(d.normal(d.integer(1, 2), channels, *d.shape(1, 2)))
    count = groups if d.opset < 21 else channels
    d.operand(d.normal(count))
    d.operand(d.normal(count))
    d.attributes["num_groups"] = groups
    d.sometimes(epsilon=1e-3)


def _instance_normalization(d: Draw) -> None:
    channels = d.integer(1, 3)
    d.operand(d.normal(d.integer(1, 2), channels, d.integer(3, 5), d.integer(3, 5)))
    d.operand(d.normal(channels))
    d.operand(d.normal(channels))
    d.sometimes(epsilon=1e-3)
    d.before(6, consumed_inputs=[0])


def _lp_normalization(d: Draw) -> None:
    shape = d.shape()
    d.operand(d.normal(*shape))
    d.sometimes(axis=d.integer(-len(shape), len(shape) - 1), p=d.integer(1, 2))


def _mean_variance(d: Draw) -> None:
    d.operand(d.normal(2, 3, 4, 2))
    d.sometimes(axes=d.axes(4, 99))


def _layer_normalization(d: Draw) -> None:
    shape = d.shape(2, 3)
    axis = d.integer(-len(shape), -1)
    d.operand(d.normal(*shape))
    d.operand(d.normal(*shape[axis:]))
    if d.op_type == "LayerNormalization" and d.often():
        d.operand(d.normal(*shape[axis:]))
    d.attributes["axis"] = axis


def _recurrent(d: Draw) -> None:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[d.op_type]
    time, batch, size, hidden = (d.integer(1, 4) for _ in range(4))
    direction = d.one_of(["forward", "reverse", "bidirectional"])
    count = 2 if direction == "bidirectional" else 1
    # only the reference has a layout, and it ignores much else then
    layout = int(d.opset >= 14 and direction == "forward" and d.often(0.2))
    d.operand(d.normal(*((batch, time) if layout else (time, batch)), size))
    d.operand(d.normal(count, gates * hidden, size))
    d.operand(d.normal(count, gates * hidden, hidden))
    if d.often():
        d.operand(d.normal(count, 2 * gates * hidden))
        if d.often() and not layout:
            d.operand(d.whole(1, time, batch, dtype=np.int32))
    d.attributes.update(hidden_size=hidden, direction=direction)
    if layout:
        d.attributes["layout"] = 1
    if d.op_type == "GRU" and d.opset >= 3:
        d.sometimes(linear_before_reset=d.integer(0, 1))
    if d.op_type == "LSTM":
        d.sometimes(input_forget=0)
    if d.often(0.3) and not layout:
        names = ["Tanh", "Sigmoid", "HardSigmoid", "Softsign", "tanh"]
        functions = {"RNN": 1, "GRU": 2, "LSTM": 3}[d.op_type]
        d.attributes["activations"] = [d.one_of(names) for _ in range(functions * count)]
    if d.often(0.2) and not layout:
        d.attributes["clip"] = 0.5
    if d.opset < 7:
        d.attributes["output_sequence"] = 1
    # the first GRU had to name both of its outputs
    d.outputs = d.integer(2 if d.op_type == "GRU" and d.opset < 3 else 1, 3 if d.op_type == "LSTM" else 2)


def _attention(d: Draw) -> None:
    groups = d.integer(1, 2)
    heads = groups * d.integer(1, 2)
    batch, queries, keys, size = (d.integer(1, 4) for _ in range(4))
    d.operand(d.normal(batch, heads, queries, size))
    d.operand(d.normal(batch, groups, keys, size))
    d.operand(d.normal(batch, groups, keys, size))
    if d.often():
        d.operand(d.normal(queries, keys))
    d.sometimes(is_causal=d.integer(0, 1), scale=0.3, softcap=2.0)


def _rotary(d: Draw) -> None:
    time, half = d.integer(1, 3), d.integer(1, 3)
    d.operand(d.normal(2, 2, time, 2 * half))
    for _ in range(2):
        d.operand(d.normal(5, half))
    d.operand(d.whole(0, 4, 2, time), constant=d.often())
    d.sometimes(interleaved=d.integer(0, 1))


def _loss(d: Draw) -> None:
    shape = (d.integer(1, 3), d.integer(2, 4), *d.shape(0, 1))
    d.operand(d.normal(*shape))
    d.operand(d.whole(0, shape[1] - 1, shape[0], *shape[2:]))
    if d.often():
        d.operand(np.abs(d.normal(shape[1])))
    d.sometimes(reduction=d.one_of(["none", "sum", "mean"]), ignore_index=0)


def _scan(d: Draw) -> None:
    batch, time, size = (d.integer(1, 4) for _ in range(3))
    state, row = (info(name, np.float32, (size,)) for name in ("s", "e"))
    nodes = [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Mul", ["t", "e"], ["o"])]
    results = [info(name, np.float32, (size,)) for name in ("t", "o")]
    d.attributes.update(body=helper.make_graph(nodes, "body", [state, row], results), num_scan_inputs=1)
    lead = (batch,) if d.opset < 9 else ()
    if d.opset < 9:
        lengths = d.whole(1, time, batch) if d.often() else None
        d.operand(lengths, constant=d.often())
        d.sometimes(directions=[d.integer(0, 1)])
    d.operand(d.normal(*lead, size))
    axis = d.integer(0, 1) if d.opset >= 9 else 0
    d.operand(d.normal(*lead, *((size, time) if axis else (time, size))))
    if d.opset >= 9:
        d.sometimes(scan_input_directions=[d.integer(0, 1)], scan_output_directions=[d.integer(0, 1)])
        d.attributes.update(scan_input_axes=[axis], scan_output_axes=[d.integer(0, 1)])
    d.outputs = 2


def _if(d: Draw) -> None:
    d.operand(np.asarray(d.often()), constant=d.often())
    d.operand(d.normal(3))
    name = d.names.pop()
    branches = [
        helper.make_graph([helper.make_node(op, [name], ["r"])], op, [], [info("r", np.float32, (3,))])
        for op in ("Abs", "Neg")
    ]
    d.attributes.update(then_branch=branches[0], else_branch=branches[1])


def _loop(d: Draw) -> None:
    d.operand(np.asarray(d.integer(0, 4)), constant=True)
    d.operand(np.asarray(True), constant=True)
    d.operand(d.normal(3))
    inputs = [info("i", np.int64), info("go", bool), info("v", np.float32, (3,))]
    nodes = [
        helper.make_node("Identity", ["go"], ["on"]),
        helper.make_node("Add", ["v", "v"], ["w"]),
        helper.make_node("Neg", ["v"], ["r"]),
    ]
    results = [info("on", bool), info("w", np.float32, (3,)), info("r", np.float32, (3,))]
    d.attributes["body"] = helper.make_graph(nodes, "body", inputs, results)
    d.outputs = 2


GENERATORS: Mapping[str, Generator] = {
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), _loss),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _layer_normalization),
    **{
        f"Reduce{name}": _reduction
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
    "Attention": _attention,
    "BatchNormalization": _batch_normalization,
    "CumSum": _cumulative,
    "DFT": _dft,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "GroupNormalization": _group_normalization,
    "If": _if,
    "InstanceNormalization": _instance_normalization,
    "Loop": _loop,
    "LpNormalization": _lp_normalization,
    "MatMul": _matmul,
    "MeanVarianceNormalization": _mean_variance,
    "RotaryEmbedding": _rotary,
    "Scan": _scan,
}
