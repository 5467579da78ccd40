"""Control programs under Poplar's names; each makes nodes of the runtime's program tree.

    Sequence(a, b)  Repeat(10, body)  If(flag, then, otherwise)  Copy(stream, tensor)  PrintTensor("v1", v1) …

Tensors of equal size and dtype can be copied whatever their shapes, in row-major order, as in Poplar. Host
actions of a program (printing, aborting) are streams to the host: the profile shows them as host exchanges.
Source: Poplar & PopLibs user guide, tutorials 1 to 3 and "Program structure"; names from poplar/Program.hpp.
Limits: predicates are single BOOL elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Items
from dataclasses import dataclass
from operator import index as as_int
from typing import Any

import numpy as np

from ipujax.poplar.types import BOOL, INT, UNSIGNED_INT, DataStream, RemoteBuffer
from ipujax.public import public_names
from ipujax.runtime.errors import GraphError, user_line, user_place
from ipujax.runtime.graph import (
    Call as Call,
    Execute as Execute,
    Function as Function,
    HostStream,
    Program as Program,
    Sequence as Sequence,
    SyncKind,
    WriteUndef as WriteUndef,
    program as nodes,
)
from ipujax.runtime.tensor import Origin, Tensor, dtype_name

Place = Tensor | DataStream | RemoteBuffer  # source or destination of a copy


@dataclass(frozen=True, eq=False, slots=True)
class PrintStream(HostStream):
    """Stream of a `PrintTensor`: the host prints the tensor under a title.

    Args:
        title: printed before the tensor.
        replicated: True if dimension 0 counts replicas.
    """

    title: str = ""
    replicated: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class AbortStream(HostStream):
    """Stream of an `AbortOn` (a flag) or an `ErrorProgram` (the tensor to show).

    Args:
        message: the error message.
        is_flag: True for the flag of an `AbortOn`; False if the run always ends and the error shows the value.
        where: the user's line.
        replicated: True if dimension 0 counts replicas.
    """

    message: str = ""
    is_flag: bool = True
    where: Origin = Origin()
    replicated: bool = False


def _user_origin() -> Origin:
    return Origin.at(user_place())


def Copy(source: Place, destination: Place, offset: Tensor | None = None, name: str = "copy") -> Program:
    """Move data between tensors, from or to a stream, or from or to rows of a remote buffer.

    Args:
        source: tensor, host-to-device stream or remote buffer.
        destination: tensor, device-to-host stream or remote buffer; at most one of the two is not a tensor.
        offset: INT or UNSIGNED_INT numbers of the rows of a remote buffer; all rows in order when None. Rows that the
            buffer lacks read as zeros, and are not written.
        name: debug name of a copy between tensors.

    Raises:
        GraphError: for different sizes or types, a stream of the other direction, or an offset without remote buffer or
            of another type.
    """
    origin = _user_origin()
    match source, destination:
        case Tensor(), Tensor():
            program: Program = _tensor_copy(source, destination, name, origin)
        case DataStream(), Tensor():
            program = nodes.StreamIn(
                _channel(source, destination, "host_to_device", origin), destination.flatten(), origin
            )
        case Tensor(), DataStream():
            program = nodes.StreamOut(source.flatten(), _channel(destination, source, "device_to_host", origin), origin)
        # An offset is valid from here on only: the cases above fall through to its check.
        case RemoteBuffer(), Tensor():
            return nodes.RemoteIn(source.remote, *_rows_of_buffer(source, destination, offset, origin), origin)
        case Tensor(), RemoteBuffer():
            rows, numbers = _rows_of_buffer(destination, source, offset, origin)
            return nodes.RemoteOut(rows, destination.remote, numbers, origin)
        case _:
            got = f"{type(source).__name__} to {type(destination).__name__}"
            raise GraphError("a copy needs a tensor on one side", where=origin, got=got)
    if offset is not None:
        raise GraphError(
            "only copies of remote buffers take an offset", where=origin, got=f"{source!r} to {destination!r}"
        )
    return program


def CrossReplicaCopy(
    source: Tensor,
    destination: Tensor,
    replica_map: Mapping[int, int] | Items[tuple[int, int]],
    name: str = "cross-replica copy",
) -> Program:
    """Copy a tensor of each replica to a tensor of others.

    Args:
        source: the tensor to send.
        destination: written in the receiving replicas, unchanged in the others.
        replica_map: receiver of each sender; or pairs of both, where one sends to several.
        name: debug name.

    Raises:
        GraphError: for different sizes or types, or a map of anything but numbers of replicas.
    """
    origin = _user_origin()
    try:
        pairs = tuple((as_int(sender), as_int(receiver)) for sender, receiver in _pairs(replica_map))
    except (TypeError, ValueError) as error:
        expected = "{source replica: destination replica}, or pairs"
        raise GraphError(
            "a cross-replica copy must have a replica map", where=origin, expected=expected, got=repr(replica_map)
        ) from error
    if not isinstance(source, Tensor) or not isinstance(destination, Tensor):
        got = f"{_describe(source)} to {_describe(destination)}"
        raise GraphError("a cross-replica copy joins tensors", where=origin, expected="two tensors", got=got)
    copy = _tensor_copy(source, destination, name, origin)
    return nodes.CrossReplicaCopy(copy.source, copy.destination, pairs, name, origin)


def _tensor_copy(source: Tensor, destination: Tensor, name: str, origin: Origin) -> nodes.Copy:
    if source.size != destination.size or source.dtype != destination.dtype:
        message = f"copy {name} joins tensors of different sizes or types"
        raise GraphError(message, where=origin, expected=_describe(source), got=_describe(destination))
    # Poplar copies tensors of different shapes in row-major order; a view of equal shape stays the same object.
    is_equal_shape = source.shape == destination.shape
    return nodes.Copy(source, destination if is_equal_shape else destination.reshape(source.shape), name, origin)


def _channel(stream: DataStream, tensor: Tensor, direction: str, origin: Origin) -> HostStream:
    if stream.direction != direction:
        message = f"stream {stream.handle} has the wrong direction"
        raise GraphError(message, where=origin, expected=direction, got=stream.direction)
    if stream.num_elements != tensor.size or stream.dtype != tensor.dtype:
        message = f"copy joins stream {stream.handle} and a tensor of another size or type"
        expected = f"{dtype_name(stream.dtype)}[{stream.num_elements}]"
        raise GraphError(message, where=origin, expected=expected, got=_describe(tensor))
    return stream.host


def _rows_of_buffer(
    buffer: RemoteBuffer, tensor: Tensor, offset: Tensor | None, origin: Origin
) -> tuple[Tensor, Tensor | None]:
    """Return the tensor as rows of a remote buffer, and the row numbers."""
    rows = buffer.repeats if offset is None else offset.size
    if tensor.size != rows * buffer.num_elements or tensor.dtype != buffer.dtype:
        message = f"copy joins {rows} rows of remote buffer {buffer.handle} and a tensor of another size or type"
        expected = f"{dtype_name(buffer.dtype)}[{rows}, {buffer.num_elements}]"
        raise GraphError(message, where=origin, expected=expected, got=_describe(tensor))
    if offset is not None and offset.dtype not in (INT, UNSIGNED_INT):
        message = f"offset into remote buffer {buffer.handle}"
        expected = "int32 or uint32 numbers of rows"
        raise GraphError(message, where=origin, expected=expected, got=_describe(offset))
    return tensor.reshape((rows, buffer.num_elements)), None if offset is None else offset.flatten()


def Repeat(count: int, body: Program) -> Program:
    """Run a program a fixed number of times.

    Raises:
        GraphError: a count that is not a whole number from 0 to 4,294,967,295.
    """
    return nodes.Repeat(count, body, _user_origin())


def RepeatWhileTrue(condition: Program, predicate: Tensor, body: Program) -> Program:
    """Run `condition`; while the BOOL element it wrote to `predicate` is true, `body` and `condition` again."""
    return nodes.RepeatWhile(condition, _scalar(predicate, "predicate", BOOL), body, _user_origin())


def RepeatWhileFalse(condition: Program, predicate: Tensor, body: Program) -> Program:
    """Run `condition`; while the BOOL element it wrote to `predicate` is false, `body` and `condition` again."""
    return nodes.RepeatWhile(condition, _scalar(predicate, "predicate", BOOL), body, _user_origin(), until=True)


RepeatWhile = RepeatWhileTrue


def If(predicate: Tensor, true_body: Program, false_body: Program | None = None) -> Program:
    """Run one of two programs by a BOOL element."""
    return nodes.If(_scalar(predicate, "predicate", BOOL), true_body, false_body or Sequence(), _user_origin())


def Switch(
    control: Tensor,
    cases: Mapping[int, Program] | Items[tuple[int, Program]] | None = None,
    default: Program | None = None,
) -> Program:
    """Run the program of the case that an INT or UNSIGNED_INT element names.

    Args:
        control: one element.
        cases: programs by value; there is no default, as no case can be added later.
        default: program for any other value; nothing runs when None.

    Raises:
        GraphError: a control of another type, no cases, or a value that has two programs or is not of its type.
    """
    origin = _user_origin()
    try:
        pairs = [(as_int(value), program) for value, program in _pairs(cases)]
    except (TypeError, ValueError) as error:
        expected = "{value: program}, or pairs"
        raise GraphError("a switch must have cases", where=origin, expected=expected, got=repr(cases)) from error
    values = tuple(value for value, _ in pairs)
    programs = tuple(program for _, program in pairs)
    if len(set(values)) < len(values):
        raise GraphError("a value of a switch has two programs", where=origin, got=values)
    selector = _scalar(control, "control", INT, UNSIGNED_INT)
    limits = np.iinfo(selector.dtype)
    if any(not limits.min <= value <= limits.max for value in values):
        message = f"a case of a switch is out of the range of {dtype_name(selector.dtype)}"
        raise GraphError(message, where=origin, expected=f"{limits.min} … {limits.max}", got=values)
    return nodes.Switch(selector, programs, default or Sequence(), origin, values)


def Sync(kind: SyncKind = "external") -> Program:
    """Make the tiles of each IPU ("internal"), or all IPUs and the host ("external"), wait for one another."""
    if kind not in ("internal", "external"):
        raise GraphError("unknown kind of sync", expected='"internal" or "external"', got=repr(kind))
    return nodes.Sync(kind, _user_origin())


def PrintTensor(title: str | Tensor, tensor: Tensor | None = None) -> Program:
    """Print a tensor on the host, as `title: {1,2}`; the title may be left out for the name of its variable."""
    if isinstance(title, Tensor):
        names = ", ".join(v.name or "<anon>" for v in title.variables())
        return PrintTensor(names, title)
    if not isinstance(tensor, Tensor):
        raise GraphError(f"PrintTensor({title!r}) must have a tensor", got=tensor, hint="PrintTensor(title, tensor)")
    # A print is a transfer to the host: the profile counts it as host exchange.
    return nodes.StreamOut(
        tensor, PrintStream(f"print {title}", tensor.shape, tensor.dtype, title=title), _user_origin()
    )


def AbortOn(predicate: Tensor, message: str = "") -> Program:
    """End the run with an `EngineError` if a BOOL element is true."""
    origin = _user_origin()
    predicate = _scalar(predicate, "predicate", BOOL)
    name = f"abort {message}".rstrip()
    stream = AbortStream(name, (), predicate.dtype, message=message, is_flag=True, where=origin)
    return nodes.StreamOut(predicate, stream, origin)


def ErrorProgram(message: str, tensor: Tensor) -> Program:
    """End the run with an `EngineError` that shows a tensor."""
    origin = _user_origin()
    if not isinstance(tensor, Tensor):
        raise GraphError(f"ErrorProgram({message!r}) must have a tensor", got=repr(tensor))
    stream = AbortStream(f"error {message}", tensor.shape, tensor.dtype, message=message, is_flag=False, where=origin)
    return nodes.StreamOut(tensor, stream, origin)


def _pairs(pairs: Any) -> Any:
    return pairs.items() if isinstance(pairs, Mapping) else pairs


def _scalar(tensor: Tensor, role: str, *dtypes: Any) -> Tensor:
    if not isinstance(tensor, Tensor) or tensor.size != 1 or tensor.dtype not in dtypes:
        expected = f"a tensor of one {' or '.join(map(dtype_name, dtypes))}"
        raise GraphError(f"a {role} must be one element", where=user_line(), expected=expected, got=_describe(tensor))
    return tensor.reshape(())


def _describe(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return repr(tensor)
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)} of {', '.join(map(repr, tensor.variables()))}"


__all__ = [
    "AbortOn",
    "Call",
    "Copy",
    "CrossReplicaCopy",
    "ErrorProgram",
    "Execute",
    "Function",
    "If",
    "PrintTensor",
    "Program",
    "Repeat",
    "RepeatWhile",
    "RepeatWhileFalse",
    "RepeatWhileTrue",
    "Sequence",
    "Switch",
    "Sync",
    "WriteUndef",
]
__dir__ = public_names(globals())
