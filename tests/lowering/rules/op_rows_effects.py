"""Rows of the op table for Python functions called from a program, and for code of other libraries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.experimental import io_callback

from tests.lowering.rules.op_case import MAIN, OpCase, normal


def _with_64_bits_inside() -> Any:
    with jax.enable_x64(True):
        fun = jax.jit(lambda x: (x.astype(np.float64) * 2).astype(np.float32))
        return export.export(fun)(jax.ShapeDtypeStruct(MAIN, np.float32)).call


def effects() -> list[OpCase]:
    """Each kind of call once; `tests/ipujax/test_callbacks.py` tests their effects."""
    same = jax.ShapeDtypeStruct(MAIN, np.float32)

    def printed(x: Any) -> Any:
        jax.debug.print("{}", x.shape)  # nothing that hangs on the execution
        return x + 1

    def watched(x: Any) -> Any:
        jax.debug.callback(lambda value: None, x)
        return x * 2

    def sunk(x: Any) -> Any:
        lax.dce_sink(x * 3)
        return x + 1

    def words_of_keys(keys: Any) -> Any:
        shape = jax.ShapeDtypeStruct((5,), np.uint32)
        return jax.pure_callback(lambda words: words[:, 0] ^ words[:, 1], shape, keys)

    x = normal(*MAIN)
    square = jax.ShapeDtypeStruct((6, 6), np.float32)
    return [
        OpCase("pure_callback", "two", lambda x, y: jax.pure_callback(np.hypot, same, x, y), (x, x)),
        OpCase("pure_callback", "keys", words_of_keys, (lambda rng: jax.random.split(jax.random.key(3), 5),)),
        OpCase("io_callback", "ordered", lambda x: io_callback(np.sign, same, x, ordered=True) + x, (x,)),
        OpCase("debug_callback", "called", watched, (x,), grad=True),
        OpCase("dce_sink", "not removed", sunk, (x,)),
        OpCase("debug_print", "shape", printed, (x,), grad=True),
        OpCase("opaque_call", "64 bits inside", _with_64_bits_inside(), (x,)),
        OpCase("module_operation", "factors", export.export(jax.jit(jnp.linalg.qr))(square).call, (normal(6, 6),)),
    ]
