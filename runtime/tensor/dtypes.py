"""Data types of elements: NumPy's, and JAX's PRNG keys. Output: their size in bytes, and their names."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@cache  # by dtype: there are few
def is_key_dtype(dtype: Any) -> bool:
    """Check whether `dtype` is a PRNG key dtype, whose elements are keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


@cache
def element_bytes(dtype: Any) -> int:
    """Return the bytes of one element; a PRNG key counts its key data (threefry: two 32-bit words)."""
    return int(dtype.itemsize) if is_key_dtype(dtype) else int(np.dtype(dtype).itemsize)


@cache
def dtype_name(dtype: Any) -> str:
    """Return the dtype's JAX name, `float32` or `key<fry>`."""
    return str(dtype) if is_key_dtype(dtype) else np.dtype(dtype).name
