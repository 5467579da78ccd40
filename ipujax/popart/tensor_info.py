"""`TensorInfo`: the element type and the shape of a tensor, in PopART's words and NumPy's."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any

import jax.numpy as jnp
import numpy as np
import onnx

from ipujax.popart.exceptions import popart_exception, popart_type_error, unknown_name

# PopART's name of an element type → NumPy's; ONNX numbers the same names.
DTYPES: dict[str, np.dtype[Any]] = {
    "FLOAT": np.dtype(np.float32),
    "FLOAT16": np.dtype(np.float16),
    "BFLOAT16": jnp.dtype(jnp.bfloat16),
    "DOUBLE": np.dtype(np.float64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorInfo:
    """Element type and shape of a tensor.

    `TensorInfo("FLOAT", [2, 3])`, `TensorInfo(np.float32, [2, 3])` or `TensorInfo(array)`.

    Raises:
        popart_exception: an unknown element type, or a negative dimension.
        popart_type_error: other arguments.
    """

    __slots__ = ("_dims", "_name")

    def __init__(self, *args: Any) -> None:
        dtype, shape = _dtype_and_shape(args)
        self._name = type_name(dtype)
        try:
            self._dims = tuple(map(as_index, shape))
        except (TypeError, ValueError):
            message = "a dimension of a TensorInfo is no whole number"
            raise popart_type_error(message, expected="a list of whole numbers", got=shape) from None
        if any(n < 0 for n in self._dims):
            raise popart_exception("a dimension of a TensorInfo is negative", got=list(self._dims))

    def shape(self) -> list[int]:
        """Return the dimensions."""
        return list(self._dims)

    def data_type(self) -> str:
        """Return the element type, as "FLOAT"."""
        return self._name

    def data_type_lcase(self) -> str:
        """Return NumPy's name of the element type, as "float32"."""
        return str(DTYPES[self._name])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type of NumPy."""
        return DTYPES[self._name]

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions, as a tuple."""
        return self._dims

    def rank(self) -> int:
        """Return the number of dimensions."""
        return len(self._dims)

    def nelms(self) -> int:
        """Return the number of elements."""
        return prod(self._dims)

    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self.nelms() * self.dtype.itemsize

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorInfo) and (self._name, self._dims) == (other._name, other._dims)

    def __hash__(self) -> int:
        return hash((self._name, self._dims))

    def __repr__(self) -> str:
        return f"TensorInfo({self._name!r}, {list(self._dims)})"


def _dtype_and_shape(args: tuple[Any, ...]) -> tuple[Any, Sequence[int]]:
    if len(args) == 2:
        return args[0], args[1]
    if len(args) == 1 and hasattr(args[0], "dtype") and hasattr(args[0], "shape"):
        return args[0].dtype, args[0].shape
    raise popart_type_error("TensorInfo needs an element type and a shape, or an array", got=args)


def as_index(number: Any) -> int:
    """Return a whole number; True is 1, and an array of one element is its number, as for PopART's bindings.

    Raises:
        TypeError: a fraction, or no number. `int` would cut fractions off.
        ValueError: an array of several elements.
    """
    return index(number.item() if isinstance(number, np.generic | np.ndarray) else number)


def whole_number(setting: str, number: Any) -> int:
    """Return a whole number as `as_index`; the error of another one names the setting."""
    try:
        return as_index(number)
    except (TypeError, ValueError):
        message = f"the {setting} is no whole number"
        raise popart_exception(message, expected="a whole number", got=number) from None


def getTensorInfo(array: np.ndarray[Any, Any]) -> TensorInfo:
    """Return element type and shape of an array.

    Args:
        array: of NumPy, of an element type that PopART has.

    Raises:
        popart_exception: another element type.
        popart_type_error: another value than an array.
    """
    return TensorInfo(array)


def type_name(dtype: Any) -> str:
    """Return PopART's name of an element type.

    Args:
        dtype: that name, in any case, or a dtype of NumPy.

    Raises:
        popart_exception: an element type that PopART lacks, with the nearest.
    """
    if isinstance(dtype, str) and dtype.upper() in DTYPES:
        return dtype.upper()
    try:
        return _NAMES[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise unknown_name("a TensorInfo has an element type", dtype, DTYPES) from None


def onnx_number(name: str) -> int:
    """Return ONNX's number of an element type.

    Args:
        name: PopART's name, as "FLOAT".
    """
    return int(onnx.TensorProto.DataType.Value(name))


def of_onnx_number(number: int) -> np.dtype[Any]:
    """Return the NumPy dtype of ONNX's number of an element type.

    Args:
        number: a member of `onnx.TensorProto.DataType`.
    """
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(number))
