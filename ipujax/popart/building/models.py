"""Models as sessions and builders take them: serialised, as a protobuf, or in a file.

A model that is being built has element types and shapes of its tensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx

from ipujax.front_end import nearest, write_file
from ipujax.onnx import OnnxError, load
from ipujax.popart import operators as operators
from ipujax.popart.building.plain_models import detach_annotations
from ipujax.popart.exceptions import popart_exception, popart_step
from ipujax.popart.options import VariableSettings
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
    """Return type and shape of a tensor as the model declares them; None where it does not, or in part."""
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


# The sentences are PopART's: programs compare them.
_NO_MODEL = (
    "Failed to load a ModelProto from the string (this is no ONNX model). Check that it is either a valid path to an"
    " existing onnx model file, or is a valid onnx ModelProto string."
)


def read_model(model: Any) -> onnx.ModelProto:
    """Return a model as a protobuf of its own.

    Args:
        model: serialised, as `onnx.ModelProto`, or the name of a file.

    Raises:
        popart_exception: no model, or no such file.
    """
    if isinstance(model, onnx.ModelProto):
        copied = onnx.ModelProto()
        copied.CopyFrom(model)
        return copied
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        if not path.is_file():
            raise popart_exception(_NO_MODEL, got=f"no file {path}")
        with popart_step(_NO_MODEL):
            return onnx.load(path)
    with popart_step(_NO_MODEL):
        return onnx.load_model_from_string(bytes(model))


def save_externally(graph: onnx.GraphProto, names: Sequence[str], filename: str | Path) -> None:
    """Move values of parameters of a graph to a file.

    Args:
        graph: graph to change in place.
        names: of the parameters.
        filename: of their values.

    Raises:
        popart_exception: a tensor that is not a parameter, or one whose values are in a file already.
    """
    path = Path(filename)
    by_name = {tensor.name: tensor for tensor in graph.initializer}
    for name in names:
        if name not in by_name:
            hint = nearest(name, list(by_name))
            problem = f"Tensor '{name}' is not an initializer"
            raise popart_exception(problem, expected=", ".join(by_name), got=name, hint=hint)
        if by_name[name].data_location == onnx.TensorProto.EXTERNAL:
            raise popart_exception(f"Tensor '{name}' already has an external data_location", got=name)
    contents = {}
    for name in names:
        with popart_step(f"Tensor '{name}' cannot be read"):
            contents[name] = onnx.numpy_helper.to_array(by_name[name]).tobytes()
    write_file(path, b"".join(contents.values()))
    offset = 0
    for name, data in contents.items():
        tensor = by_name[name]
        tensor.raw_data = data
        onnx.external_data_helper.set_external_data(tensor, str(path), offset, len(data))
        tensor.ClearField("raw_data")
        tensor.ClearField("float_data")
        offset += len(data)


_FLOAT_DATA_KEY = b"\x22"  # field 4, of bytes: `float_data` of a TensorProto in protobuf's wire format


_SETTINGS = "ipujax.popart.variableSettings "  # before the name of a parameter, in the metadata of a model


def write_variable_settings(model: onnx.ModelProto, settings: Mapping[str, VariableSettings]) -> None:
    """Write the groups of replicas of parameters into the metadata of a model.

    Args:
        model: model to change in place.
        settings: by name of the parameter.
    """
    for name, each in settings.items():
        model.metadata_props.add(key=_SETTINGS + name, value=each.as_text())


def variable_settings_of(model: onnx.ModelProto) -> dict[str, VariableSettings]:
    """Return the groups of replicas of the parameters of a model, by name of those that have some."""
    properties = {each.key: each.value for each in model.metadata_props}
    return {
        key.removeprefix(_SETTINGS): VariableSettings.of_text(text)
        for key, text in properties.items()
        if key.startswith(_SETTINGS)
    }


def weights_of(model: onnx.ModelProto) -> dict[str, np.ndarray[Any, Any]]:
    """Return the parameters of a model by name.

    Args:
        model: with its weights in itself, or in files of their own.
    """
    with popart_step("the parameters of the model cannot be read"):
        return {tensor.name: np.array(onnx.numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}


def tensor_proto(array: np.ndarray[Any, Any], name: str) -> onnx.TensorProto:
    """Return an array as a protobuf; float32 elements are in `float_data`, where PopART's programs read them.

    Args:
        array: the values.
        name: of the tensor.
    """
    if array.dtype != np.float32:
        return onnx.numpy_helper.from_array(array, name)
    tensor = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=array.shape)
    # In the wire format: appending numbers one by one takes seconds for large weights.
    little_endian = np.ascontiguousarray(array, "<f4").tobytes()
    tensor.MergeFromString(_FLOAT_DATA_KEY + _varint(len(little_endian)) + little_endian)
    return tensor


def _varint(number: int) -> bytes:
    """Return a number as protobuf writes it: seven bits a byte, the lowest first."""
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])
