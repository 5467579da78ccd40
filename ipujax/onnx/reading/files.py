"""Models from paths, bytes and `ModelProto`s, with data stored in other files.

External data may only come from regular files inside the model's folder: a path that leaves the folder, or that passes
through a link, is refused, because a model from elsewhere could name any file of this machine.
Source: ONNX, docs/ExternalData.md, whose keys `location`, `offset` and `length` these are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from ipujax.onnx.onnx_errors import OnnxModelError

Source: TypeAlias = str | os.PathLike[str] | bytes | onnx.ModelProto

# Protobuf cannot hold more; such files are cut off or were never valid.
_MAX_PROTOBUF_BYTES = 2**31 - 1
_SAVE_APART = "save the weights apart: onnx.save(model, path, save_as_external_data=True)"


def read_model(source: Source) -> onnx.ModelProto:
    """Return the model of a path, of a file's bytes, or a copy of a `ModelProto`, with external data loaded."""
    if isinstance(source, onnx.ModelProto):
        folder = None
        model = onnx.ModelProto()
        model.CopyFrom(source)
    elif isinstance(source, bytes | bytearray | memoryview):
        folder = None
        model = _parsed(bytes(source), "the bytes")
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        folder = path.parent
        model = _parsed(_read_bytes(path), str(path))
    else:
        expected = "a path, the bytes of a file, or an onnx.ModelProto"
        raise OnnxModelError(
            "the model must be a path, bytes or a ModelProto", expected=expected, got=type(source).__name__
        )
    _check_content(model)
    for tensor in _tensors(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _load_external(tensor, folder)
    return model


def _read_bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _MAX_PROTOBUF_BYTES:
            message = f"{path} is too large for one protobuf message"
            raise OnnxModelError(message, expected="less than 2 GiB", got=f"{size:,} bytes", hint=_SAVE_APART)
        return path.read_bytes()
    except OSError as error:
        raise OnnxModelError(f"{path} cannot be read", expected="an ONNX file", got=error.strerror) from error


def _parsed(data: bytes, name: str) -> onnx.ModelProto:
    expected = "an ONNX model (protobuf ModelProto)"
    if not data:
        raise OnnxModelError(f"{name} is empty", expected=expected, got="0 bytes")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        got = f"{len(data):,} bytes that protobuf cannot parse"
        hint = "the file is cut off or of another format: download or export it again"
        raise OnnxModelError(f"{name} is not an ONNX model", expected=expected, got=got, hint=hint) from error
    return model


def _check_content(model: onnx.ModelProto) -> None:
    """Refuse messages without a graph: protobuf parses many other files as empty messages."""
    if not model.HasField("graph"):
        expected = "a ModelProto with a graph"
        hint = "the file is cut off or of another format: download or export it again"
        raise OnnxModelError("the model has no graph", expected=expected, got="none", hint=hint)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of a graph: initialisers, and attributes of nodes in it and in subgraphs."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        yield from (attribute.t, *attribute.tensors)
        for subgraph in (attribute.g, *attribute.graphs):
            yield from _tensors(subgraph)


def _load_external(tensor: onnx.TensorProto, folder: Path | None) -> None:
    location = {entry.key: entry.value for entry in tensor.external_data}
    name = f"external data of {tensor.name!r}"
    if folder is None:
        hint = "give the path of the model's file, or a ModelProto with its data (onnx.load loads them)"
        raise OnnxModelError(
            f"{name} need the model's folder", expected="a path", got="bytes or a ModelProto", hint=hint
        )
    path = _safe_path(folder, location.get("location", ""), name)
    try:
        offset = int(location.get("offset") or 0)
        size = path.stat().st_size
        length = int(location["length"]) if location.get("length") else size - offset
    except (OSError, ValueError) as error:
        raise OnnxModelError(f"{name} cannot be read", expected=f"a file {path}", got=error) from error
    if offset < 0 or length < 0 or offset + length > size:
        got = f"{size:,} bytes, of which {length:,} from {offset:,} on are needed"
        raise OnnxModelError(f"{name} are cut off", expected=f"all bytes in {path}", got=got)
    with path.open("rb") as file:
        file.seek(offset)
        tensor.raw_data = file.read(length)
    tensor.ClearField("external_data")
    tensor.data_location = onnx.TensorProto.DEFAULT


def _safe_path(folder: Path, location: str, name: str) -> Path:
    """Return the path of external data; refuse one outside the folder or through a link."""
    expected = "a relative path to a regular file inside the model's folder"
    parts = Path(location).parts
    if not parts or Path(location).is_absolute() or ".." in parts or "\\" in location:
        raise OnnxModelError(f"{name} are refused", expected=expected, got=repr(location))
    path = folder
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise OnnxModelError(
                f"{name} are refused", expected=expected, got=f"{location!r}, where {part!r} is a link"
            )
    if not path.is_file():
        got = f"no file {location!r}"
        hint = f"copy {location} into the folder of the model"
        raise OnnxModelError(f"{name} are missing", expected=expected, got=got, hint=hint)
    return path


def tensor_array(tensor: onnx.TensorProto) -> np.ndarray:
    """Return the values of a tensor; refuse data of another size than shape and dtype say."""
    try:
        return onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError) as error:
        dtype = dtype_name(tensor.data_type)
        expected = f"{dtype}{list(tensor.dims)}"
        message = f"tensor {tensor.name!r} cannot be read"
        got = f"{len(tensor.raw_data):,} bytes ({error})" if tensor.raw_data else error
        raise OnnxModelError(message, expected=expected, got=got, hint="export the model again") from error


def sparse_array(sparse: onnx.SparseTensorProto) -> np.ndarray:
    """Return a sparse tensor as a dense array."""
    values = tensor_array(sparse.values)
    indices = tensor_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    try:
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
    except (IndexError, ValueError) as error:
        message = f"sparse tensor {sparse.values.name!r} cannot be read"
        raise OnnxModelError(message, expected=f"indices into {list(sparse.dims)}", got=error) from error
    return dense


def dtype_name(data_type: int) -> str:
    """Return the name of a data type of ONNX, also of one that this onnx does not know."""
    names = onnx.TensorProto.DataType
    return names.Name(data_type).lower() if data_type in names.values() else f"data type {data_type}"
