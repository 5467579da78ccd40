"""Tensors of a file as NumPy arrays, within the budget of a model; weights apart from it while onnx checks it.

Every step of onnx serialises the model, at a cost in its bytes and never more than 2 GiB. Large initialisers become
graph inputs of the same type meanwhile.
"""

from __future__ import annotations

import numpy as np
import onnx

from ipujax.onnx.budget import Budget
from ipujax.onnx.onnx_errors import OnnxModelError
from ipujax.onnx.reading.onnx_protos import onnx_step

# Shape inference reads only small tensors: axes, shapes, scales.
_MAX_ELEMENTS = 256


def tensor_dtype(data_type: int) -> np.dtype | None:
    """Return the NumPy dtype of a data type of ONNX; None where it is not declared."""
    with onnx_step(f"this onnx has no {dtype_name(data_type)}", "upgrade onnx, or export another dtype"):
        return onnx.helper.tensor_dtype_to_np_dtype(data_type) if data_type else None


def check_declared_size(tensor: onnx.TensorProto, budget: Budget) -> None:
    """Refuse a tensor whose declared shape is negative or larger than the budget."""
    name = f"tensor {tensor.name!r}"
    if min(tensor.dims, default=0) < 0:
        raise OnnxModelError(f"{name} has a negative size", expected="sizes ≥ 0", got=list(tensor.dims))
    budget.check(tensor.dims, tensor_dtype(tensor.data_type), name)


def tensor_array(tensor: onnx.TensorProto, budget: Budget) -> np.ndarray:
    """Return the values of a tensor; refuse data of another size than shape and dtype say."""
    check_declared_size(tensor, budget)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        # onnx would look for the file in the working directory.
        raise OnnxModelError(f"external data of tensor {tensor.name!r} were not read", expected="data in the model")
    try:
        return onnx.numpy_helper.to_array(tensor)
    except Exception as error:  # of any class: from NumPy, ml_dtypes and onnx
        dtype = dtype_name(tensor.data_type)
        expected = f"{dtype}{list(tensor.dims)}"
        message = f"tensor {tensor.name!r} cannot be read"
        got = f"{len(tensor.raw_data):,} bytes ({error})" if tensor.raw_data else error
        raise OnnxModelError(message, expected=expected, got=got, hint="export the model again") from error


def sparse_array(sparse: onnx.SparseTensorProto, budget: Budget) -> np.ndarray:
    """Return a sparse tensor as a dense array."""
    name = f"sparse tensor {sparse.values.name!r}"
    values = tensor_array(sparse.values, budget)
    indices = tensor_array(sparse.indices, budget)
    if min(sparse.dims, default=0) < 0:
        raise OnnxModelError(f"{name} has a negative size", expected="sizes ≥ 0", got=list(sparse.dims))
    budget.check(sparse.dims, values.dtype, name)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    try:
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
    except (IndexError, ValueError, TypeError) as error:
        message = f"{name} cannot be read"
        raise OnnxModelError(message, expected=f"indices into {list(sparse.dims)}", got=error) from error
    return dense


def dtype_name(data_type: int) -> str:
    """Return the name of a data type of ONNX, also of one that this onnx does not know."""
    names = onnx.TensorProto.DataType
    return names.Name(data_type).lower() if data_type in names.values() else f"data type {data_type}"


def detach_weights(model: onnx.ModelProto, budget: Budget) -> dict[str, np.ndarray]:
    """Replace the large and the sparse initialisers of the outermost graph by graph inputs; return their values."""
    graph = model.graph
    weights = {}
    small = []
    types = {}
    for tensor in graph.initializer:
        array = tensor_array(tensor, budget)  # refuses wrong sizes
        if array.size <= _MAX_ELEMENTS:
            small.append(tensor)
            continue
        weights[tensor.name] = array
        types[tensor.name] = tensor.data_type
    for sparse in graph.sparse_initializer:
        weights[sparse.values.name] = sparse_array(sparse, budget)
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
