"""Functions of sweeps that processes can import."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

import ipujax as ipu

ARGS = (jax.ShapeDtypeStruct((64, 48), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32))
KILLS = "IPUJAX_TEST_KILLS"  # variable of the environment: a file that exists once a worker has died, or "always"


@ipu.jit(device=ipu.IPUModel(1, "mk2", tiles_per_ipu=16))
def layer(weights: Any, x: Any) -> Any:
    return jnp.tanh(x @ weights).sum(1)


@ipu.jit(device=ipu.IPUModel(1, "mk2", tiles_per_ipu=16))
def deadly(weights: Any, x: Any) -> Any:
    """Kill the process that compiles it, once or always."""
    mark = os.environ.get(KILLS, "")
    if mark and not os.path.exists(mark):
        if mark != "always":
            open(mark, "w").close()
        os._exit(1)
    return (x @ weights).sum()


def plain(weights: Any, x: Any) -> Any:
    return x @ weights
