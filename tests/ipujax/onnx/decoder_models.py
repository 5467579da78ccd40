"""A decoder of two layers with caches of keys and values, as exporters write it: caches that grow, or buffers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

LAYERS, HEADS, SIZE, VOCABULARY, POSITIONS = 2, 2, 16, 50, 80
HIDDEN = HEADS * SIZE


def _weights() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0).standard_normal
    shapes: dict[str, tuple[int, ...]] = {"words": (VOCABULARY, HIDDEN), "places": (POSITIONS, HIDDEN)}
    for n in range(LAYERS):
        shapes |= {f"{part}{n}": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "o")}
        shapes |= {f"up{n}": (HIDDEN, 4 * HIDDEN), f"down{n}": (4 * HIDDEN, HIDDEN), f"norm{n}": (HIDDEN,)}
    return {name: (draw(shape) / np.sqrt(shape[-1]) * 2).astype(np.float32) for name, shape in shapes.items()}


def cache_names(layer: int) -> Sequence[tuple[str, str]]:
    """Return input and output names of the caches of a layer."""
    return [(f"past_key_values.{layer}.{part}", f"present.{layer}.{part}") for part in ("key", "value")]


STATES = {past: present for layer in range(LAYERS) for past, present in cache_names(layer)}


def decoder(is_shared: bool) -> onnx.ModelProto:
    """Return the decoder.

    Args:
        is_shared: whether caches are buffers of one length for past and present, that GroupQueryAttention writes into;
            else they grow by the new tokens, and a mask says which rows stand for tokens.
    """
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["embedded"]),
        helper.make_node("Gather", ["places", "position_ids"], ["placed"]),
        helper.make_node("Add", ["embedded", "placed"], ["x0"]),
    ]
    if is_shared:
        nodes += [
            helper.make_node("Constant", [], ["one"], value_int=1),
            helper.make_node("Constant", [], ["last"], value_ints=[1]),
            helper.make_node("ReduceSum", ["attention_mask", "last"], ["tokens"], keepdims=0),
            helper.make_node("Sub", ["tokens", "one"], ["last_token"]),
            helper.make_node("Cast", ["last_token"], ["seqlens_k"], to=TensorProto.INT32),
            helper.make_node("Shape", ["attention_mask"], ["mask_shape"]),
            helper.make_node("Gather", ["mask_shape", "one"], ["whole"]),
            helper.make_node("Cast", ["whole"], ["total"], to=TensorProto.INT32),
        ]
    else:
        nodes.append(helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.INT32))
    for n in range(LAYERS):
        (past_key, key), (past_value, value) = cache_names(n)
        nodes.append(helper.make_node("SimplifiedLayerNormalization", [f"x{n}", f"norm{n}"], [f"normed{n}"]))
        nodes += [helper.make_node("MatMul", [f"normed{n}", f"{p}{n}"], [f"{p}_of{n}"]) for p in ("q", "k", "v")]
        new = [f"{p}_of{n}" for p in ("q", "k", "v")]
        outputs = [f"attended{n}", key, value]
        if is_shared:
            op_type, operands = "GroupQueryAttention", [*new, past_key, past_value, "seqlens_k", "total"]
            attributes = {"num_heads": HEADS, "kv_num_heads": HEADS}
        else:
            op_type, operands = "MultiHeadAttention", [*new, "", "mask", "", past_key, past_value]
            attributes = {"num_heads": HEADS, "unidirectional": 1}
        nodes.append(helper.make_node(op_type, operands, outputs, f"/layer{n}", domain="com.microsoft", **attributes))
        nodes += [
            helper.make_node("MatMul", [f"attended{n}", f"o{n}"], [f"o_of{n}"]),
            helper.make_node("Add", [f"x{n}", f"o_of{n}"], [f"h{n}"]),
            helper.make_node("MatMul", [f"h{n}", f"up{n}"], [f"up_of{n}"]),
            helper.make_node("QuickGelu", [f"up_of{n}"], [f"wide{n}"], domain="com.microsoft"),
            helper.make_node("MatMul", [f"wide{n}", f"down{n}"], [f"down_of{n}"]),
            helper.make_node("Add", [f"h{n}", f"down_of{n}"], [f"x{n + 1}"]),
        ]
    nodes.append(helper.make_node("Transpose", ["words"], ["columns"], perm=[1, 0]))
    nodes.append(helper.make_node("MatMul", [f"x{LAYERS}", "columns"], ["logits"]))
    ids = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "time"]) for name in ("input_ids",)]
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"])
    places = helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["batch", "time"])
    shape = ["batch", HEADS, "past", SIZE]
    caches = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in STATES]
    results = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "time", VOCABULARY])]
    results += [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", HEADS, "total", SIZE])
        for name in STATES.values()
    ]
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in _weights().items()]
    graph = helper.make_graph(nodes, "decoder", [*ids, mask, places, *caches], results, tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
