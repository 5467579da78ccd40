"""Models from paths, bytes and `ModelProto`s, with data stored in other files.

External data may only come from regular files inside the model's folder, and not through links, because a model from
elsewhere could name any file of this machine. The cache of a model hub is the exception: below `snapshots/` of a
downloaded repository files are links into `blobs/` of the same repository. There links are followed one by one, and
each must stay inside of the repository.

Source: ONNX, docs/ExternalData.md, whose keys `location`, `offset` and `length` these are.
"""

from __future__ import annotations

import math
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

import onnx

from ipujax.onnx.budget import Budget
from ipujax.onnx.onnx_errors import OnnxModelError
from ipujax.onnx.reading.from_proto import check_declared_size, dtype_name, tensor_dtype
from ipujax.onnx.reading.onnx_protos import check_depth, onnx_step, subgraphs_of

_MAX_LINKS = 40  # as Linux
_BLOBS = "blobs"
_SNAPSHOTS = "snapshots"
_EXPECTED = "a relative path to a regular file inside the model's folder"


def open_regular(path: Path, is_link_followed: bool = True) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be opened.
        OnnxModelError: a folder, a pipe or a device, none of which is waited for.
    """
    # A pipe without a writer would block. Flags that a system lacks are not needed there.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    flags |= 0 if is_link_followed else getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags)
    # The descriptor is looked at, not the path, which others may change meanwhile.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OnnxModelError(f"{path} cannot be read", expected="a regular file", got="a folder, a pipe or a device")
    return os.fdopen(descriptor, "rb")


def inner_path(folder: Path, location: str, name: str) -> Path:
    """Return the path of external data, without a link in it below the folder or the hub's repository.

    Args:
        folder: folder of the model, as the user gives it; it may have links of its own.
        location: as the model names the file.
        name: of the data, in errors.

    Raises:
        OnnxModelError: a location outside of the folder, or a link that leads out of the repository.
    """
    relative = Path(location)
    if not relative.parts or relative.is_absolute() or ".." in relative.parts or set(location) & {"\\", "\0"}:
        raise OnnxModelError(f"{name} are refused", expected=_EXPECTED, got=repr(location))
    real_folder = Path(os.path.realpath(folder))
    repository = _hub_repository(real_folder)
    path = _without_links(repository or real_folder, real_folder, relative, repository is not None, name)
    if not path.exists():
        hint = f"copy {location} into the folder of the model"
        raise OnnxModelError(f"{name} are missing", expected=_EXPECTED, got=f"no file {location!r}", hint=hint)
    return path


def _hub_repository(folder: Path) -> Path | None:
    """Return the downloaded repository that a folder is a snapshot of; None outside of a hub's cache."""
    for parent in (folder, *folder.parents):
        if parent.name == _SNAPSHOTS:
            root = parent.parent
            # A `blobs` that is a link itself could lead anywhere.
            is_repository = (root / _BLOBS).is_dir() and not (root / _BLOBS).is_symlink()
            return root if is_repository else None
    return None


def _without_links(root: Path, folder: Path, relative: Path, is_hub: bool, name: str) -> Path:
    """Follow a path part by part; refuse each step out of `root`, and outside of a hub's cache each link."""
    path = folder
    pending = list(reversed(relative.parts))
    links = 0
    while pending:
        part = pending.pop()
        path = path.parent if part == ".." else path / part
        if not path.is_relative_to(root):
            raise OnnxModelError(f"{name} are refused", expected=_EXPECTED, got=f"a link out of {root}")
        if not path.is_symlink():
            continue
        links += 1
        if not is_hub or links > _MAX_LINKS:
            got = f"{str(relative)!r}, where {part!r} is a link"
            raise OnnxModelError(f"{name} are refused", expected=_EXPECTED, got=got)
        target = Path(os.readlink(path))
        # An absolute target may have links of the user's own above the repository.
        path = Path(os.path.realpath(target.parent)) if target.is_absolute() else path.parent
        pending += [target.name] if target.is_absolute() else reversed(target.parts)
    return path


Source: TypeAlias = str | os.PathLike[str] | bytes | onnx.ModelProto

# Protobuf cannot hold more; such files are cut off or were never valid.
_MAX_PROTOBUF_BYTES = 2**31 - 1
_MAX_READS = 4  # assumed: of each byte of a file of external data, on average; more multiplies a small file
_MAX_DIGITS = 18
_SAVE_APART = "save the weights apart: onnx.save(model, path, save_as_external_data=True)"


def read_model(source: Source, budget: Budget) -> onnx.ModelProto:
    """Return the model of a path, of a file's bytes, or a copy of a `ModelProto`, with external data loaded."""
    folder = None
    if isinstance(source, onnx.ModelProto):
        model = onnx.ModelProto()
        model.CopyFrom(source)
    elif isinstance(source, bytes | bytearray | memoryview):
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
    check_depth(model)
    bytes_by_file: Counter[Path] = Counter()
    of_functions = (node for function in model.functions for node in function.node)
    for tensor in (*_tensors(model.graph), *_tensors_of_nodes(of_functions)):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _load_external(tensor, folder, budget, bytes_by_file)
    return model


def _read_bytes(path: Path) -> bytes:
    """Return the contents of a file; refuse one that protobuf cannot parse, before it is read."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _MAX_PROTOBUF_BYTES:
                message = f"{path} is too large for one protobuf message"
                raise OnnxModelError(message, expected="less than 2 GiB", got=f"{size:,} bytes", hint=_SAVE_APART)
            return file.read(size)
    except (OSError, ValueError) as error:  # ValueError of a path with a zero byte
        if isinstance(error, OnnxModelError):
            raise
        got = getattr(error, "strerror", None) or str(error)
        raise OnnxModelError(f"{path} cannot be read", expected="an ONNX file", got=got) from error


def _parsed(data: bytes, name: str) -> onnx.ModelProto:
    """Parse a model; the error of bytes that are none says how many there are."""
    expected = "an ONNX model (protobuf ModelProto)"
    if not data:
        raise OnnxModelError(f"{name} is empty", expected=expected, got="0 bytes")
    hint = "the file is cut off or of another format: download or export it again"
    with onnx_step(f"{name} is not an ONNX model ({len(data):,} bytes)", hint):
        return onnx.ModelProto.FromString(data)


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
    yield from _tensors_of_nodes(graph.node)


def _tensors_of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            yield from ([attribute.t] if attribute.HasField("t") else [])
            yield from attribute.tensors
            sparse = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
            for each in (*sparse, *attribute.sparse_tensors):
                yield from (each.values, each.indices)
        for subgraph in subgraphs_of(node):
            yield from _tensors(subgraph)


def _load_external(tensor: onnx.TensorProto, folder: Path | None, budget: Budget, bytes_by_file: Counter[Path]) -> None:
    """Read the data of a tensor; `bytes_by_file` counts what is read of each file."""
    name = f"external data of {tensor.name!r}"
    location = {entry.key: entry.value for entry in tensor.external_data}
    if folder is None:
        hint = "give the path of the model's file, or a ModelProto with its data (onnx.load loads them)"
        raise OnnxModelError(
            f"{name} need the model's folder", expected="a path", got="bytes or a ModelProto", hint=hint
        )
    offset = _position(location.get("offset") or "0", name)
    declared_length = _position(location["length"], name) if location.get("length") else None
    try:
        path = inner_path(folder, location.get("location", ""), name)
        with open_regular(path, is_link_followed=False) as file:
            size = os.fstat(file.fileno()).st_size
            length = size - offset if declared_length is None else declared_length
            if length < 0 or offset + length > size:
                got = f"{size:,} bytes, of which {length:,} from {offset:,} on are needed"
                raise OnnxModelError(f"{name} are cut off", expected=f"all bytes in {path}", got=got)
            _check_length(tensor, length, name, budget)
            bytes_by_file[path] += length
            if bytes_by_file[path] > _MAX_READS * size:
                expected = f"each byte is used {_MAX_READS} times at most"
                got = f"{bytes_by_file[path]:,} bytes of a file of {size:,}"
                raise OnnxModelError(f"{name} overlap with others", expected=expected, got=got)
            file.seek(offset)
            tensor.raw_data = file.read(length)
    except OSError as error:
        raise OnnxModelError(f"{name} cannot be read", expected="a regular file", got=error.strerror) from error
    tensor.ClearField("external_data")
    tensor.data_location = onnx.TensorProto.DEFAULT


def _position(text: str, name: str) -> int:
    """Return an offset or a length; digits beyond any file are no number."""
    if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS:
        return int(text)
    raise OnnxModelError(f"{name} have no such place", expected="an offset and a length in bytes", got=repr(text))


def _check_length(tensor: onnx.TensorProto, length: int, name: str, budget: Budget) -> None:
    """Refuse more data than the tensor has elements, before they are read."""
    dtype = tensor_dtype(tensor.data_type)
    check_declared_size(tensor, budget)
    needed = math.prod(tensor.dims) * (dtype.itemsize if dtype else 1)
    if length > needed:
        expected = f"{needed:,} bytes for {dtype_name(tensor.data_type)}{list(tensor.dims)}"
        raise OnnxModelError(f"{name} are of the wrong size", expected=expected, got=f"{length:,} bytes")
