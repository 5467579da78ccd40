"""Weights apart from a model while onnx checks and converts it.

Every step of onnx serialises the model, at a cost in its bytes and never more than 2 GiB. Large initialisers become
graph inputs of the same type meanwhile.
"""

from __future__ import annotations

import numpy as np
import onnx

from ipujax.onnx.reading.files import sparse_array, tensor_array

# The converter and shape inference read only small tensors: axes, shapes, scales.
_MAX_ELEMENTS = 256


def detach_weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Replace the large and the sparse initialisers of the outermost graph by graph inputs; return their values."""
    graph = model.graph
    weights = {}
    small = []
    types = {}
    for tensor in graph.initializer:
        if int(np.prod(tensor.dims, dtype=np.int64)) <= _MAX_ELEMENTS:
            small.append(tensor)
            tensor_array(tensor)  # refuses wrong sizes
            continue
        weights[tensor.name] = tensor_array(tensor)
        types[tensor.name] = tensor.data_type
    for sparse in graph.sparse_initializer:
        weights[sparse.values.name] = sparse_array(sparse)
        types[sparse.values.name] = sparse.values.data_type
    rest = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in small]
    graph.ClearField("initializer")
    graph.ClearField("sparse_initializer")
    graph.initializer.extend(rest)
    named = {value.name for value in graph.input}
    for name, array in weights.items():
        if name not in named:
            graph.input.append(onnx.helper.make_tensor_value_info(name, types[name], array.shape))
    return weights
