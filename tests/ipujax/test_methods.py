"""`ipu.jit` functions as class and static methods, and as parts of copied and printed objects."""

from __future__ import annotations

import copy
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

import ipujax as ipu

DEVICE = ipu.IPUModel(tiles_per_ipu=8)
ipu_jit = functools.partial(ipu.jit, device=DEVICE)
X = np.arange(6, dtype=np.float32).reshape(2, 3)


class Table:
    scale = 2.0

    @classmethod
    @functools.partial(ipu.jit, device=DEVICE, static_argnums=0)
    def scaled(cls, x: Any) -> Any:
        return x * cls.scale

    @staticmethod
    @ipu_jit
    def tripled(x: Any) -> Any:
        return x * 3


def test_methods_of_classes_and_copies() -> None:
    for owner in (Table, Table()):
        np.testing.assert_array_equal(owner.scaled(X) + owner.tripled(X), X * 5)
    fun = ipu_jit(jnp.sin)
    assert copy.deepcopy({"fun": fun})["fun"] is fun and repr(fun) == "ipu.jit(sin)"
