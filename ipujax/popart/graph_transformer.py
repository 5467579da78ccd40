"""`GraphTransformer`: changes of a model before a session reads it: element types, constants, training form.

Input: a model. Output: the changed one, serialised.

Source: names and results of `GraphTransformer` of github:graphcore/popart. Limits: an attribute that names an element
type, as that of Cast, stays as it is, as in PopART.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ipujax.popart.building import read_model, save_externally, tensor_proto
from ipujax.popart.exceptions import popart_exception, popart_step
from ipujax.popart.tensor_info import DTYPES, onnx_number

_BATCH_NORM_OUTPUTS = 5  # of a BatchNormalization that trains, before opset 14


class GraphTransformer:
    """Changes a model.

    Args:
        modelProtoOrFilename: serialised, an `onnx.ModelProto`, or the name of a file.

    Raises:
        popart_exception: no model.
    """

    def __init__(self, modelProtoOrFilename: Any) -> None:
        self._model = read_model(modelProtoOrFilename)

    def getModelProto(self) -> bytes:
        """Return the model, serialised."""
        return self._model.SerializeToString()

    # Element types.

    def convertFloatsToHalfs(self) -> None:
        """Convert float32 to float16."""
        self._convert("FLOAT", "FLOAT16")

    def convertDoublesToFloats(self) -> None:
        """Convert float64 to float32."""
        self._convert("DOUBLE", "FLOAT")

    def convertDoublesToHalfs(self) -> None:
        """Convert float64 to float16."""
        self._convert("DOUBLE", "FLOAT16")

    def convertBFloats16ToFloat32(self) -> None:
        """Convert bfloat16 to float32."""
        self._convert("BFLOAT16", "FLOAT")

    def convertUINT8ToINT32(self) -> None:
        """Convert uint8 to int32."""
        self._convert("UINT8", "INT32")

    def convertUINT16ToINT32(self) -> None:
        """Convert uint16 to int32."""
        self._convert("UINT16", "INT32")

    def convertINT8ToINT32(self) -> None:
        """Convert int8 to int32."""
        self._convert("INT8", "INT32")

    def convertINT16ToINT32(self) -> None:
        """Convert int16 to int32."""
        self._convert("INT16", "INT32")

    def convertINT64ToINT32(self, clip: bool = False) -> None:
        """Convert int64 to int32.

        Args:
            clip: whether a number that is out of range becomes the nearest in range.

        Raises:
            popart_exception: a number that is out of range, without `clip`; the model stays as it was.
        """
        if not clip:
            limits = np.iinfo(np.int32)
            for tensor in _tensors(self._model.graph):
                array = _array(tensor) if _has_type(tensor, "INT64") else np.zeros(0, np.int64)
                outside = array[(array < limits.min) | (array > limits.max)]
                if outside.size:
                    message = f"tensor {tensor.name!r} has a number outside of the range of int32"
                    raise popart_exception(message, expected="32 bits", got=int(outside[0]), hint="clip=True")
        self._convert("INT64", "INT32")

    def _convert(self, old: str, new: str) -> None:
        for tensor in _tensors(self._model.graph):
            if _has_type(tensor, old):
                tensor.CopyFrom(_converted(tensor, DTYPES[new]))
        for value in _values(self._model.graph):
            if value.type.tensor_type.elem_type == onnx_number(old):
                value.type.tensor_type.elem_type = onnx_number(new)

    # Parameters and inputs.

    def convertInitializersToConstants(self, ids: Sequence[str]) -> None:
        """Make constants of parameters.

        Args:
            ids: names of the parameters.

        Raises:
            popart_exception: a name of no parameter; the model stays as it was.
        """
        graph = self._model.graph
        by_name = {tensor.name: tensor for tensor in graph.initializer}
        for name in ids:
            if name not in by_name:
                # The sentence is PopART's: programs compare it.
                listed = ", ".join(by_name) or "no parameter"
                raise popart_exception(f"TensorId {name} not in the model initalizers", expected=listed, got=name)
        chosen = dict.fromkeys(ids)  # a name that is given twice is one parameter
        constants = [onnx.helper.make_node("Constant", [], [name], name, value=by_name[name]) for name in chosen]
        # Operands come before the nodes that read them.
        nodes = [*constants, *map(_copied, graph.node)]
        initialisers = [_copied(tensor) for tensor in graph.initializer if tensor.name not in ids]
        inputs = [_copied(value) for value in graph.input if value.name not in ids]
        for field, rows in (("node", nodes), ("initializer", initialisers), ("input", inputs)):
            graph.ClearField(field)
            getattr(graph, field).extend(rows)

    def convertAllFixedPointInitializersToConstants(self) -> None:
        """Make constants of all parameters of whole numbers."""
        integer_types = [name for name, dtype in DTYPES.items() if dtype.kind in "iu"]
        names = [t.name for t in self._model.graph.initializer if any(_has_type(t, name) for name in integer_types)]
        self.convertInitializersToConstants(names)

    def removeUnusedInputs(self) -> None:
        """Remove inputs and parameters that no node reads."""
        graph = self._model.graph
        read = _names_read(graph)
        for field in ("input", "initializer"):
            used = [_copied(row) for row in getattr(graph, field) if row.name in read]
            graph.ClearField(field)
            getattr(graph, field).extend(used)

    def saveInitializersExternally(self, ids: Sequence[str], fn: str | Path) -> None:
        """Move values of parameters to a file beside that of the model.

        Args:
            ids: names of the parameters.
            fn: name of the file.

        Raises:
            popart_exception: a tensor that is not a parameter, or one whose values are in a file already.
        """
        save_externally(self._model.graph, ids, fn)

    # Training.

    def prepareNodesForTraining(self) -> None:
        """Give batch normalisations the outputs of training."""
        names = {name for node in self._model.graph.node for name in node.output}
        for number, node in enumerate(self._model.graph.node):
            if node.op_type == "BatchNormalization":
                for position in range(len(node.output), _BATCH_NORM_OUTPUTS):
                    name = f"{node.op_type}_{node.name}_oi{position}_{number}"
                    assert name not in names
                    node.output.append(name)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and those of its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            inner = [attribute.g] if attribute.HasField("g") else []
            for each in [*inner, *attribute.graphs]:
                yield from _graphs(each)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the parameters and constants of a graph."""
    for each in _graphs(graph):
        yield from each.initializer
        for node in each.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors


def _values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Yield the declarations of inputs, results and outputs of a graph."""
    for each in _graphs(graph):
        yield from each.input
        yield from each.value_info
        yield from each.output


def _names_read(graph: onnx.GraphProto) -> set[str]:
    return {name for each in _graphs(graph) for node in each.node for name in node.input}


def _has_type(tensor: onnx.TensorProto, name: str) -> bool:
    return bool(tensor.data_type == onnx_number(name))


def _array(tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
    with popart_step(f"tensor {tensor.name!r} cannot be read"):
        return onnx.numpy_helper.to_array(tensor)


def _converted(tensor: onnx.TensorProto, dtype: np.dtype[Any]) -> onnx.TensorProto:
    """Return a tensor in another type; numbers beyond int32 become its limits."""
    array = _array(tensor)
    if dtype == np.int32:
        limits = np.iinfo(np.int32)
        numbers = np.clip(array, limits.min, limits.max).ravel().tolist()
        # In `int32_data`, where PopART's programs read them.
        return onnx.helper.make_tensor(tensor.name, onnx.TensorProto.INT32, tensor.dims, numbers)
    return tensor_proto(array.astype(dtype), tensor.name)


def _copied(row: Any) -> Any:
    """Copy a message of protobuf: clearing a field would empty the original one."""
    copied = type(row)()
    copied.CopyFrom(row)
    return copied
