"""Attributes, types and constants of operations of StableHLO as values of Python and NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import mlir
from ipujax.lowering.stored_modules import StoredModule
from ipujax.runtime.names_at_import import jax_jit

ir = mlir.ir
_DTYPES = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint2", "uint4", "uint8", "uint16", "uint32"),
    *("uint64", "bfloat16", "float16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)
SMALL_ELEMENTS = 64  # of arrays that are computed while a module is read: indices, shapes


class UntranslatedError(ValueError):
    """An operation that has no counterpart in JAX; the text names it."""


@cache
def _dtypes_by_name() -> dict[str, np.dtype[Any]]:
    with mlir.make_ir_context():
        return {str(mlir.dtype_to_ir_type(jnp.dtype(name))): jnp.dtype(name) for name in _DTYPES}


def has_64_bits() -> bool:
    """True if JAX computes with numbers of 64 bits."""
    return jax.dtypes.canonicalize_dtype(np.int64) == np.int64


def dtype_of(kind: Any) -> np.dtype[Any]:
    """Dtype of the elements of a tensor type."""
    name = str(ir.RankedTensorType(kind).element_type) if isinstance(kind, ir.RankedTensorType) else str(kind)
    dtype = _dtypes_by_name().get(name)
    if dtype is None:
        raise UntranslatedError(f"a value of type {name}")
    return dtype


def shape_of(kind: Any) -> tuple[int, ...]:
    """Shape of a tensor type; −1 for a dimension that only values have."""
    tensor = ir.RankedTensorType(kind)
    return tuple(-1 if tensor.is_dynamic_dim(n) else int(tensor.get_dim_size(n)) for n in range(tensor.rank))


def static_shape(kind: Any) -> tuple[int, ...]:
    """Shape of a tensor type whose dimensions are all known."""
    shape = shape_of(kind)
    if -1 in shape:
        raise UntranslatedError(f"a result of type {kind}, whose shape only a run knows")
    return shape


def ints(op: Any, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
    """Integers of an attribute; the default where it is absent."""
    return tuple(int(n) for n in op.attributes[name]) if name in op.attributes else tuple(default)


def integer(op: Any, name: str, default: int = 0) -> int:
    """Integer of an attribute; the default where it is absent."""
    return int(ir.IntegerAttr(op.attributes[name]).value) if name in op.attributes else default


def flag(op: Any, name: str) -> bool:
    """Truth of an attribute; False where it is absent."""
    return name in op.attributes and bool(ir.BoolAttr(op.attributes[name]).value)


def flags(op: Any, name: str, length: int) -> tuple[bool, ...]:
    """Truths of an attribute; all False where it is absent."""
    return tuple(bool(x) for x in op.attributes[name]) if name in op.attributes else (False,) * length


def pairs(op: Any, name: str, length: int) -> list[tuple[int, int]]:
    """Pairs of integers of an attribute; zeros where it is absent."""
    if name not in op.attributes:
        return [(0, 0)] * length
    return [(int(low), int(high)) for low, high in np.array(op.attributes[name]).reshape(length, 2)]


def text(op: Any, name: str) -> str:
    """Text of an attribute, or the name of a symbol; "" where it is absent."""
    if name not in op.attributes:
        return ""
    attribute = op.attributes[name]
    return str(ir.StringAttr(attribute).value) if isinstance(attribute, ir.StringAttr) else str(attribute).lstrip("@")


def word(op: Any, name: str) -> str:
    """Word of an enumeration, as LT of `#stablehlo<comparison_direction LT>`; "" where it is absent."""
    return str(op.attributes[name]).rstrip(">").rpartition(" ")[2] if name in op.attributes else ""


def constant_value(op: Any, *, is_broadcast: bool = False) -> Any:
    """Array of a constant; with `is_broadcast` one of many equal elements is no stored array."""
    kind = op.results[0].type
    dtype = dtype_of(kind)
    shape = static_shape(kind)
    is_of_numpy = dtype.kind in "biuf" and "int2" not in dtype.name and "int4" not in dtype.name
    # A copy: the attribute ends with its module.
    value = np.array(op.attributes["value"]).astype(dtype) if is_of_numpy else _computed(op, shape, dtype)
    first = value.reshape(-1)[:1]
    if is_broadcast and value.size > SMALL_ELEMENTS and bool((value == first).all()):
        return jax.lax.full(shape, first[0], dtype)
    return value.reshape(shape)


def _computed(op: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Array of a constant that XLA computes: MLIR gives Python no buffer of these dtypes."""
    kind = str(op.results[0].type)
    line = str(op).partition(" = ")[2]
    module = f"module {{ func.func public @main() -> {kind} {{ %0 = {line}\n return %0 : {kind} }} }}"
    stored = StoredModule(module, "constant", (), (jax.ShapeDtypeStruct(shape, dtype),))
    return np.asarray(jax_jit(stored).lower().compile()()[0])
