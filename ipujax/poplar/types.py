"""Poplar's data types, and handles of memory outside the device: streams and remote buffers;
checks of the types, shapes and values that users give to graphs.

A type is a numpy dtype, so that it can be given wherever ipujax takes a dtype.
Source: Poplar & PopLibs user guide, "Using the Poplar library" and "Data streams and remote buffers".
Limits: no 64-bit and no 8-bit floating-point types.

Input of a check: a user's values. Output: a dtype and a tuple of sizes, or an array of a shape. Invalid input is an
error, and so is a value out of the range of a type: values are rounded, never truncated or wrapped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from operator import index as as_int
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import HostStream, program as remote_memory
from ipujax.runtime.not_copied import OfGraph
from ipujax.runtime.tensor import Origin, dtype_name

_NUMBERS = "biufcV"  # kinds of NumPy types; V are those that NumPy itself lacks, such as bfloat16


def type_and_shape(a: Any, b: Any, name: str) -> tuple[Any, tuple[int, ...]]:
    """Return the canonical dtype and sizes of a variable; accepts type and shape in either order."""
    # Poplar's order is type, shape; the runtime's is shape, dtype.
    dtype, shape = (b, a) if isinstance(a, list | tuple) else (a, b)
    try:
        sizes = tuple(as_int(n) for n in shape)
        dtype = dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype or "")
    except TypeError as error:
        got = f"{a!r}, {b!r}"
        raise GraphError(f"{name or 'unnamed'} must have a type and a shape", expected="FLOAT, [4]", got=got) from error
    if isinstance(dtype, np.dtype):
        dtype = element_type(dtype, name or "unnamed")
    if any(n < 0 for n in sizes):
        raise GraphError(f"{name or 'unnamed'} has a negative size", expected="sizes of at least 0", got=list(sizes))
    return dtype, sizes


def element_type(dtype: Any, name: str) -> np.dtype:
    """Return the type of elements that a user gives; refuse one that tensors do not have."""
    try:
        kind = np.dtype("" if dtype is None else dtype)  # None would be float64
    except TypeError as error:
        raise GraphError(f"{name} must have a type", expected="FLOAT, INT, …", got=repr(dtype)) from error
    # Without `jax_enable_x64` JAX would narrow 64-bit types in silence.
    if kind.kind not in _NUMBERS or jax.dtypes.canonicalize_dtype(kind) != kind:
        expected = "a type of at most 32 bits, such as FLOAT or INT"
        raise GraphError(f"{name} is of {dtype_name(kind)}", expected=expected)
    return kind


def fill_array(values: Any, shape: tuple[int, ...], dtype: Any, name: str) -> np.ndarray:
    """Broadcast one value, or reshape one value for each element in row-major order, to an array of a shape."""
    array = cast_values(values, dtype, f"values of {name}")
    if array.size == 1:
        return np.full(shape, array.reshape(())[()], dtype)
    if array.size != np.prod(shape, dtype=int):
        raise GraphError(f"values of {name}", expected=f"{np.prod(shape, dtype=int)} or one", got=array.size)
    return array.reshape(shape)


def cast_values(values: Any, dtype: Any, name: str) -> np.ndarray:
    """Convert values to a type that can represent them; floats may be rounded, anything else must be exact.

    Args:
        values: a number, or an array or nested list of them.
        dtype: the type.
        name: name of the values in error messages.

    Raises:
        GraphError: values that are not numbers, or that the type cannot represent.
    """
    try:
        source = np.asarray(values)
    except ValueError:  # rows of different lengths
        source = np.asarray(None)
    is_representable = source.dtype.kind in _NUMBERS and not (source.dtype.kind == "c" and dtype.kind != "c")
    if is_representable:
        # NumPy warns of every overflowing cast; the comparison below finds them all.
        with np.errstate(all="ignore"):
            array = source.astype(dtype)
            exact = array == source if dtype.kind in "biu" else np.isfinite(array) | ~np.isfinite(source)
        is_representable = bool(np.all(exact))
    if not is_representable:
        raise GraphError(name, expected=f"numbers that {dtype_name(dtype)} holds", got=repr(values))
    return array


Type = np.dtype

FLOAT = np.dtype(np.float32)
HALF = np.dtype(np.float16)
INT = np.dtype(np.int32)
UNSIGNED_INT = np.dtype(np.uint32)
SHORT = np.dtype(np.int16)
UNSIGNED_SHORT = np.dtype(np.uint16)
CHAR = np.dtype(np.int8)
SIGNED_CHAR = np.dtype(np.int8)
UNSIGNED_CHAR = np.dtype(np.uint8)
BOOL = np.dtype(np.bool_)

StreamDirection = Literal["host_to_device", "device_to_host"]


class ReplicatedStreamMode(Enum):
    """Data that a stream delivers to the replicas of a graph: separate data for each, or the same for all."""

    REPLICATE = "replicate"
    BROADCAST = "broadcast"


@dataclass(frozen=True, eq=False, slots=True)
class DataStream(OfGraph):
    """Unidirectional stream between host and device; created by `Graph.add_host_to_device_fifo` and its counterpart.

    Args:
        handle: name of the stream, by which the engine connects it to a buffer or a callback.
        dtype: type of its elements.
        num_elements: elements of one transfer.
        direction: "host_to_device" or "device_to_host".
        host: the runtime's channel, of one flat value a transfer.
        origin: the user's line that added it.
        replicas: replicas of the graph it was added to.
    """

    handle: str
    dtype: np.dtype
    num_elements: int
    direction: StreamDirection
    host: HostStream
    origin: Origin = Origin()
    replicas: int = 1

    @property
    def is_by_replica(self) -> bool:
        """True if each of several replicas has separate data."""
        return self.replicas > 1 and not self.host.broadcast

    @property
    def replication_mode(self) -> ReplicatedStreamMode:
        """The replication mode of the stream."""
        return ReplicatedStreamMode.BROADCAST if self.host.broadcast else ReplicatedStreamMode.REPLICATE

    @property
    def num_bytes(self) -> int:
        """Bytes of one transfer."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, eq=False, slots=True)
class RemoteBuffer(OfGraph):
    """Memory outside the IPU; created by `Graph.add_remote_buffer`.

    Args:
        handle: name of the buffer.
        dtype: type of its elements.
        num_elements: elements of one row.
        repeats: number of rows, each of which can be read and written by itself.
        origin: the user's line that added it.
        replicas: replicas of the graph it was added to, each with a separate buffer.

    Attributes:
        remote: the runtime's memory.
    """

    handle: str
    dtype: np.dtype
    num_elements: int
    repeats: int = 1
    origin: Origin = Origin()
    replicas: int = 1
    remote: remote_memory.RemoteBuffer = field(init=False)

    def __post_init__(self) -> None:
        remote = remote_memory.RemoteBuffer.of(self.handle, self.dtype, self.num_elements, self.repeats)
        object.__setattr__(self, "remote", remote)
