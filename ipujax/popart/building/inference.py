"""Element types and shapes of the tensors of a model that is being built."""

from __future__ import annotations

import onnx

from ipujax.popart.exceptions import popart_exception
from ipujax.popart.tensor_info import TensorInfo, of_onnx_number


def inferred_info(model: onnx.ModelProto, name: str) -> TensorInfo:
    """Return element type and shape of a tensor.

    Args:
        model: complete, or with inputs without shapes.
        name: of the tensor.

    Raises:
        popart_exception: they depend on inputs that have none.
    """
    info = _declared(model, name)
    if info is None:
        info = _declared(onnx.shape_inference.infer_shapes(model, data_prop=True), name)
    if info is None:
        raise popart_exception(f"shape and type of {name!r} are not known")
    return info


def declare_outputs(model: onnx.ModelProto) -> None:
    """Write element type and shape of the outputs into a model, where they are known.

    Args:
        model: changed.
    """
    if not model.graph.output:
        return
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    for output, known in zip(model.graph.output, inferred.graph.output, strict=True):
        output.CopyFrom(known)


def _declared(model: onnx.ModelProto, name: str) -> TensorInfo | None:
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.name == name:
            return TensorInfo(of_onnx_number(tensor.data_type), tensor.dims)
    for value in [*graph.input, *graph.output, *graph.value_info]:
        kind = value.type.tensor_type
        dims = [d.dim_value for d in kind.shape.dim if d.HasField("dim_value")]
        if value.name == name and kind.HasField("shape") and len(dims) == len(kind.shape.dim):
            return TensorInfo(of_onnx_number(kind.elem_type), dims)
    return None
