"""Element types and shapes of the tensors of a model that is being built."""

from __future__ import annotations

import jax
import onnx

from ipujax.onnx import OnnxError, load
from ipujax.popart import operators as operators
from ipujax.popart.building.plain_models import detach_annotations
from ipujax.popart.exceptions import popart_exception
from ipujax.popart.onnx_failures import popart_step
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
        info = _declared(_inferred(model), name)
    return _traced(model, name) if info is None else info


def _traced(model: onnx.ModelProto, name: str) -> TensorInfo:
    """Return element type and shape by tracing the model in JAX, which knows operators that ONNX does not."""
    # ONNX's checker refuses attributes that a schema lacks, and annotations are such.
    detach_annotations(model)
    del model.graph.output[:]
    model.graph.output.append(onnx.ValueInfoProto(name=name))
    try:
        loaded = load(model)
        sizes = [jax.ShapeDtypeStruct(tuple(map(_static_size, info.shape or ())), info.dtype) for info in loaded.inputs]
        traced = jax.eval_shape(loaded, loaded.params, *sizes)
    except (OnnxError, TypeError) as error:
        raise popart_exception(f"shape and type of {name!r} are not known", got=str(error)) from error
    return TensorInfo(traced.dtype, traced.shape)


def _static_size(size: int | str | None) -> int:
    if not isinstance(size, int):
        raise TypeError(f"an input has an open dimension: {size}")
    return size


def declare_outputs(model: onnx.ModelProto) -> None:
    """Write element type and shape of the outputs into a model, where they are known.

    Args:
        model: model to change in place.
    """
    if not model.graph.output:
        return
    inferred = _inferred(model)
    for output, declared in zip(model.graph.output, inferred.graph.output, strict=True):
        output.CopyFrom(declared)


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    with popart_step("onnx cannot infer the types and shapes of the model"):
        return onnx.shape_inference.infer_shapes(model, data_prop=True)


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
