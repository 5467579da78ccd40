"""Rows of the op table for Python functions called from a program."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import io_callback

from tests.lowering.rules.op_case import MAIN, OpCase, normal


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
    return [
        OpCase("pure_callback", "two", lambda x, y: jax.pure_callback(np.hypot, same, x, y), (x, x)),
        OpCase("pure_callback", "keys", words_of_keys, (lambda rng: jax.random.split(jax.random.key(3), 5),)),
        OpCase("io_callback", "ordered", lambda x: io_callback(np.sign, same, x, ordered=True) + x, (x,)),
        OpCase("debug_callback", "called", watched, (x,), grad=True),
        OpCase("dce_sink", "not removed", sunk, (x,)),
        OpCase("debug_print", "shape", printed, (x,), grad=True),
    ]
