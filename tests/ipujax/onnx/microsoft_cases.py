"""Nodes of `com.microsoft`, in the forms that ONNX Runtime's CPU kernels have; it computes the expected results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

DOMAIN = "com.microsoft"
Operand = np.ndarray | None


@dataclass(frozen=True, slots=True)
class Case:
    """A node.

    Args:
        op_type: of the node.
        operands: its inputs, None for those that are left out.
        attributes: of the node.
        outputs: whether each result is compared; others have no name.
        constants: positions of operands that are initialisers; the others are inputs.
        steps: of quantised results, by which they may differ.
        tolerance: absolute.
        domain: of the node.
    """

    op_type: str
    operands: Sequence[Operand]
    attributes: Mapping[str, Any]
    outputs: Sequence[bool] = (True,)
    constants: Sequence[int] = ()
    steps: int = 0
    tolerance: float = 1e-5
    domain: str = DOMAIN

    def model(self) -> onnx.ModelProto:
        """Return a model of the node."""
        names = ["" if x is None else f"x{n}" for n, x in enumerate(self.operands)]
        outputs = [f"y{n}" if is_compared else "" for n, is_compared in enumerate(self.outputs)]
        node = helper.make_node(self.op_type, names, outputs, "node", domain=self.domain, **self.attributes)
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in self.feeds().items()
        ]
        tensors = [onnx.numpy_helper.from_array(np.asarray(self.operands[n]), f"x{n}") for n in self.constants]
        results = [onnx.ValueInfoProto(name=name) for name in outputs if name]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
        graph = helper.make_graph([node], "case", inputs, results, tensors)
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)

    def feeds(self) -> dict[str, np.ndarray]:
        """Return the operands that are inputs, by name."""
        return {f"x{n}": x for n, x in enumerate(self.operands) if x is not None and n not in self.constants}


RNG = np.random.default_rng(0)


def f(*shape: int, scale: float = 1.0) -> np.ndarray:
    """Return normal numbers, float32."""
    return (scale * RNG.standard_normal(shape)).astype(np.float32)


def q(*shape: int, dtype: Any = np.uint8) -> np.ndarray:
    """Return integers of 8 bits."""
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


def w(*shape: int) -> np.ndarray:
    """Return int8 weights of 7 bits.

    Kernels of onnxruntime for processors without VNNI add two products with uint8 in 16 bits, and saturate wider ones.
    """
    return RNG.integers(-64, 64, shape).astype(np.int8)


def s(value: float) -> np.ndarray:
    """Return a scale."""
    return np.asarray(value, np.float32)


def z(value: int, dtype: Any = np.uint8) -> np.ndarray:
    """Return a zero point."""
    return np.asarray(value, dtype)


def i(*values: Any) -> np.ndarray:
    """Return int32."""
    return np.asarray(values[0] if len(values) == 1 else values, np.int32)


def activations() -> Iterator[Case]:
    """Yield GELU in its forms."""
    yield Case("Gelu", [f(3, 8)], {})
    yield Case("BiasGelu", [f(2, 3, 8), f(8)], {})
    yield Case("FastGelu", [f(3, 8)], {}, tolerance=1e-4)
    yield Case("FastGelu", [f(3, 8), f(8)], {}, tolerance=1e-4)
    yield Case("QuickGelu", [f(3, 8)], {"alpha": 1.702})


def products() -> Iterator[Case]:
    """Yield products and convolutions."""
    yield Case("FusedMatMul", [f(3, 4), f(4, 5)], {"alpha": 0.5})
    yield Case("FusedMatMul", [f(2, 4, 3), f(2, 5, 4)], {"transA": 1, "transB": 1})
    yield Case("FusedMatMul", [f(3, 2, 4), f(2, 4, 5)], {"transBatchA": 1})
    yield Case("FusedMatMul", [f(4, 2, 3), f(5, 2, 4)], {"transBatchA": 1, "transA": 1, "transBatchB": 1, "transB": 1})
    yield Case("TransposeMatMul", [f(4, 3), f(4, 5)], {"transA": 1})
    for name, alpha in (("Relu", 0.0), ("LeakyRelu", 0.2), ("Sigmoid", 0.0), ("Tanh", 0.0)):
        yield Case("FusedGemm", [f(3, 4), f(4, 5), f(5)], {"activation": name, "activation_alpha": alpha})
    yield Case("FusedConv", [f(1, 3, 7, 7), f(4, 3, 3, 3), f(4)], {"activation": "Relu", "pads": [1, 1, 1, 1]})
    yield Case("FusedConv", [f(1, 3, 7, 7), f(4, 3, 3, 3), f(4), f(1, 4, 5, 5)], {"activation": "Relu"})
    clip = {"activation": "Clip", "activation_params": [-0.5, 0.5], "strides": [2, 2]}
    yield Case("FusedConv", [f(2, 3, 7, 7), f(4, 3, 3, 3)], clip)
    leaky = {"activation": "LeakyRelu", "activation_params": [0.3]}
    yield Case("FusedConv", [f(2, 3, 7, 7), f(4, 3, 3, 3)], leaky)
    hard = {"activation": "HardSigmoid", "activation_params": [0.1, 0.4]}
    yield Case("FusedConv", [f(2, 3, 7, 7), f(4, 3, 3, 3)], hard)
    yield Case("NhwcMaxPool", [q(1, 6, 6, 3)], {"kernel_shape": [2, 2], "strides": [2, 2]})


def norms() -> Iterator[Case]:
    """Yield norms."""
    yield Case("SkipLayerNormalization", [f(2, 3, 8), f(2, 3, 8), f(8), f(8), f(8)], {}, (True, False, False, True))
    yield Case("SkipLayerNormalization", [f(2, 3, 8), f(3, 8), f(8)], {"epsilon": 1e-5})
    four = (True, False, False, True)
    yield Case("SkipSimplifiedLayerNormalization", [f(2, 3, 8), f(2, 3, 8), f(8), f(8)], {"epsilon": 1e-6}, four)
    yield Case("SimplifiedLayerNormalization", [f(2, 3, 8), f(8)], {"epsilon": 1e-6}, domain="")
    words = [i(RNG.integers(0, 9, (2, 4))), i(RNG.integers(0, 2, (2, 4)))]
    tables = [f(9, 8), f(6, 8), f(2, 8), f(8), f(8)]
    mask = i([[1, 1, 1, 0], [1, 1, 0, 0]])
    yield Case("EmbedLayerNormalization", [*words, *tables, mask], {"epsilon": 1e-5}, (True, True))
    yield Case("EmbedLayerNormalization", [words[0], None, *tables[:2], None, *tables[3:]], {}, (True, False))
    places = i([[3, 2, 1, 0], [0, 1, 2, 5]])
    yield Case("EmbedLayerNormalization", [*words, *tables, None, places], {}, (True, False))


def attentions() -> Iterator[Case]:
    """Yield attention with projections, with masks, with a cache."""
    x, w, b = f(2, 4, 8), f(8, 24), f(24)
    masks = {
        "none": None,
        "keys": i([[1, 1, 1, 0], [1, 1, 0, 0]]),
        "lengths": i([3, 2]),
        "ends and starts": i([4, 3, 1, 0]),
        "squares": i(RNG.integers(0, 2, (2, 4, 4)) | np.eye(4, dtype=np.int64)),
    }
    for mask in masks.values():
        yield Case("Attention", [x, w, b, mask], {"num_heads": 2})
    yield Case("Attention", [x, w, b], {"num_heads": 2, "unidirectional": 1})
    yield Case("Attention", [x, w, b], {"num_heads": 2, "scale": 0.3})
    yield Case("Attention", [x, f(8, 20), f(20)], {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 4]})
    yield Case("Attention", [x, w, b, None, None, f(2, 2, 4, 4)], {"num_heads": 2})
    past = f(2, 2, 2, 3, 4)
    yield Case("Attention", [x, w, b, None, past], {"num_heads": 2, "unidirectional": 1}, (True, True))
    yield Case("Attention", [x, w, b, i(RNG.integers(0, 2, (2, 7)) | 1), past], {"num_heads": 2}, (True, True))
    query, key, value = f(2, 4, 8), f(2, 5, 8), f(2, 5, 8)
    yield Case("MultiHeadAttention", [query, key, value], {"num_heads": 2})
    yield Case("MultiHeadAttention", [query, key, value, f(24)], {"num_heads": 2})
    yield Case("MultiHeadAttention", [query, key, f(2, 5, 12), None, i([[1] * 5, [1, 1, 1, 0, 0]])], {"num_heads": 2})
    yield Case("MultiHeadAttention", [query, key, value, None, None, f(1, 2, 4, 5)], {"num_heads": 2, "scale": 0.4})
    yield Case("MultiHeadAttention", [query, query, query], {"num_heads": 2, "unidirectional": 1})
    yield Case("MultiHeadAttention", [query, f(2, 2, 5, 4), f(2, 2, 5, 4)], {"num_heads": 2})
    three = (True, True, True)
    new = [query, f(2, 4, 8), f(2, 4, 8), None, None, None, f(2, 2, 3, 4), f(2, 2, 3, 4)]
    yield Case("MultiHeadAttention", new, {"num_heads": 2}, three)
    angles = [np.cos(f(12, 2)), np.sin(f(12, 2))]
    for shape in ((2, 4, 8), (2, 2, 4, 4)):
        yield Case("RotaryEmbedding", [f(*shape), RNG.integers(0, 12, (2, 4)), *angles], {"num_heads": 0})
    yield Case("RotaryEmbedding", [f(2, 4, 8), np.asarray([3]), *angles], {"interleaved": 1})
    partial = {"rotary_embedding_dim": 4, "num_heads": 1}
    yield Case("RotaryEmbedding", [f(2, 4, 8), RNG.integers(0, 12, (2, 4)), *angles], partial)


def decoders() -> Iterator[Case]:
    """Yield attention with groups of queries: a prompt, new tokens, rotations, windows, sinks."""
    three = (True, True, True)
    angles = [np.cos(f(16, 8)), np.sin(f(16, 8))]
    heads = {"num_heads": 4, "kv_num_heads": 2}
    prompt = [f(2, 5, 64), f(2, 5, 32), f(2, 5, 32)]
    for attributes, caches in (({}, []), ({"do_rotary": 1}, angles), ({"local_window_size": 2}, [])):
        operands = [*prompt, None, None, i([4, 4]), i(5), *caches]
        yield Case("GroupQueryAttention", operands, {**heads, **attributes}, three, (6,))
    for interleaved in (0, 1):
        token = [f(2, 1, 64), f(2, 1, 32), f(2, 1, 32), f(2, 2, 6, 16), f(2, 2, 6, 16), i([6, 6]), i(7), *angles]
        attributes = {**heads, "do_rotary": 1, "rotary_interleaved": interleaved}
        yield Case("GroupQueryAttention", token, attributes, three, (6,))
    packed = [f(2, 5, 64), None, None, None, None, i([4, 4]), i(5)]
    yield Case("GroupQueryAttention", packed, {**heads, "softcap": 3.0, "scale": 0.5}, three, (6,))
    yield Case("GroupQueryAttention", packed, {**heads, "smooth_softmax": 1}, three, (6,))
    sink = [*packed, None, None, None, None, f(4)]
    yield Case("GroupQueryAttention", sink, heads, three, (6,))
    window = [f(2, 1, 32), f(2, 1, 16), f(2, 1, 16), f(2, 2, 6, 8), f(2, 2, 6, 8), i([6, 6]), i(7)]
    yield Case("GroupQueryAttention", window, {**heads, "local_window_size": 3}, three, (6,))
    biased = [*window, None, None, None, f(2, 4, 1, 7)]
    yield Case("GroupQueryAttention", biased, heads, three, (6,))


def quantized() -> Iterator[Case]:
    """Yield operators on quantised arrays; rounding of halves may differ by a step."""
    for dtype, zero in ((np.uint8, 120), (np.int8, -3)):
        a, b = q(3, 4, dtype=dtype), q(3, 4, dtype=dtype)
        ends = [s(0.05), z(zero, dtype)]
        for op_type in ("QLinearAdd", "QLinearMul"):
            yield Case(op_type, [a, s(0.03), z(zero, dtype), b, s(0.02), z(zero, dtype), *ends], {}, steps=1)
        yield Case("QLinearSigmoid", [a, s(0.03), z(zero, dtype), s(1 / 256), z(0, dtype)], {}, steps=1)
        yield Case("QLinearLeakyRelu", [a, s(0.03), z(zero, dtype), *ends], {"alpha": 0.1}, steps=1)
        softmax = [a, s(0.03), z(zero, dtype), s(1 / 256), z(0, dtype)]
        yield Case("QLinearSoftmax", softmax, {"axis": -1, "opset": 13}, steps=1)
        parts = [*ends, a, s(0.05), z(zero, dtype), b, s(0.02), z(3, dtype)]
        yield Case("QLinearConcat", parts, {"axis": 1}, steps=1, constants=(0, 1, 3, 4, 6, 7))
        image = [q(1, 3, 6, 6, dtype=dtype), s(0.05), z(zero, dtype), *ends]
        yield Case("QLinearGlobalAveragePool", image, {"channels_last": 0}, steps=1)
        last = [q(1, 6, 6, 3, dtype=dtype), s(0.05), z(zero, dtype), *ends]
        yield Case("QLinearGlobalAveragePool", last, {"channels_last": 1}, steps=1)
        yield Case("QLinearAveragePool", image, {"kernel_shape": [2, 2], "strides": [2, 2]}, steps=1)
    condition = RNG.random((3, 4)) < 0.5
    choice = [condition, q(3, 4), s(0.05), z(9), q(3, 4), s(0.02), z(5), s(0.05), z(7)]
    yield Case("QLinearWhere", choice, {}, steps=1)
    matrix = [q(3, 4), s(0.05), z(9), w(4, 5), s(0.02), z(0, np.int8)]
    yield Case("QGemm", [*matrix, i(RNG.integers(-99, 99, 5)), s(0.1), z(100)], {"alpha": 1.0}, steps=1)
    yield Case("QGemm", [*matrix, i(RNG.integers(-99, 99, 5))], {})
    product = [q(3, 4), w(4, 5), s(0.05), f(5) ** 2, z(9), q(5, dtype=np.int8) // 20, f(5)]
    yield Case("MatMulIntegerToFloat", product, {}, tolerance=1e-4)
    yield Case("DynamicQuantizeMatMul", [f(3, 4), w(4, 5), s(0.02), z(0, np.int8), f(5)], {})
    attention = [q(2, 4, 8), w(8, 24), f(24), s(0.02), s(0.01), i([4, 3]), z(120), z(0, np.int8)]
    yield Case("QAttention", attention, {"num_heads": 2}, tolerance=1e-4)
    yield Case("QuantizeLinear", [f(3, 4), s(0.05), z(7)], {}, steps=1)
    yield Case("DequantizeLinear", [q(3, 4), s(0.05), z(7)], {})
    conv = [q(1, 5, 5, 3), s(0.05), z(9), w(4, 3, 3, 3), s(0.02), z(0, np.int8), s(0.3), z(100)]
    yield Case("QLinearConv", conv, {"channels_last": 1}, steps=1)


def recurrent() -> Iterator[Case]:
    """Yield LSTMs with quantised weights; onnxruntime quantises the parts of a batch that its threads have."""
    hidden, size = 5, 4
    three = (True, True, True)
    for direction, draw, lengths in (("forward", w, None), ("bidirectional", q, i([3]))):
        count = 1 + (direction == "bidirectional")
        weights = [draw(count, rows, 4 * hidden) for rows in (size, hidden)]
        scales = [f(count) ** 2 / 99, np.full(count, 7, weights[0].dtype)]
        operands = [f(4, 1, size), *weights, f(count, 8 * hidden), lengths, None, None, None, *scales, *scales]
        constants = (1, 2, 3, 8, 9, 10, 11)
        yield Case("DynamicQuantizeLSTM", operands, {"hidden_size": hidden, "direction": direction}, three, constants)


def packed() -> Iterator[Case]:
    """Yield weights of few bits."""
    for bits in (4, 8):
        blob = 32 * bits // 8
        for zero_points in (None, q(5, 3 * bits // 8 + (bits == 4))):
            operands = [f(2, 3, 90), q(5, 3, blob), f(5, 3, scale=0.1), zero_points]
            attributes = {"K": 90, "N": 5, "bits": bits, "block_size": 32}
            yield Case("MatMulNBits", operands, attributes, tolerance=1e-3)
    # Of products in integers onnxruntime rounds the operand to int8, where it has a kernel for the size of a block.
    for bits, block_size in ((2, 16), (2, 64), (4, 16), (4, 128), (8, 32), (8, 256)):
        blocks = -(-200 // block_size)
        operands = [f(2, 3, 200), q(5, blocks, block_size * bits // 8), f(5, blocks, scale=0.1)]
        attributes = {"K": 200, "N": 5, "bits": bits, "block_size": block_size, "accuracy_level": 4}
        yield Case("MatMulNBits", operands, attributes, constants=(1, 2), tolerance=1e-3)
    with_bias = [f(3, 64), q(5, 2, 16), f(5, 2, scale=0.1), None, None, f(5)]
    yield Case("MatMulNBits", with_bias, {"K": 64, "N": 5, "bits": 4, "block_size": 32}, tolerance=1e-3)
    table = [q(6, 16), np.asarray([[1, 5], [0, 2]]), f(6, 2)]
    yield Case("GatherBlockQuantized", table, {"bits": 4, "block_size": 16})
    yield Case("GatherBlockQuantized", [*table, q(6, 1)], {"bits": 4, "block_size": 16})


def others() -> Iterator[Case]:
    """Yield small operators."""
    yield Case("Inverse", [f(2, 3, 3)], {}, tolerance=1e-3)
    yield Case("ExpandDims", [f(2, 3), i(1)], {}, constants=(1,))
    yield Case("CDist", [f(3, 4), f(5, 4)], {"metric": "euclidean"}, tolerance=1e-4)
    yield Case("CDist", [f(3, 4), f(5, 4)], {"metric": "sqeuclidean"}, tolerance=1e-4)
    yield Case("Trilu", [f(3, 4), np.asarray(1)], {"upper": 0}, constants=(1,))
    yield Case("GatherND", [f(3, 4), np.asarray([[0, 1], [2, 3]])], {})
    yield Case("Range", [s(1), s(9), s(2)], {}, constants=(0, 1, 2))
    yield Case("Pad", [f(3, 4), np.asarray([1, 0, 2, 1]), s(0.5)], {}, constants=(1,))
    yield Case("GridSample", [f(1, 2, 4, 4), f(1, 3, 3, 2, scale=0.5)], {"mode": "bilinear"})
    yield Case("GridSample", [f(1, 2, 4, 4), f(1, 3, 3, 2)], {"mode": "bicubic", "padding_mode": "border"})


FAMILIES: Mapping[str, Callable[[], Iterator[Case]]] = {
    each.__name__: each
    for each in (activations, attentions, decoders, norms, others, packed, products, quantized, recurrent)
}
