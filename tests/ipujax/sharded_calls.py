"""Calls with arrays of several devices: a script that prints, as JSON, the outcome of each of its calls by name.

A process of its own runs it: how many devices JAX has on a CPU is settled when it starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu

DEVICES = 4
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def on(sharding: Any) -> jax.Array:
    return jax.device_put(X, sharding)


def ipu_jit(fun: Callable[..., Any], **settings: Any) -> Any:
    return ipu.jit(fun, device=ipu.IPUModel(num_ipus=DEVICES, tiles_per_ipu=8), **settings)


def sine(x: Any) -> Any:
    return jnp.sin(x)


def total(x: Any) -> Any:
    mesh = jax.make_mesh((1, DEVICES), ("one", "x"), axis_types=(AxisType.Auto, AxisType.Auto))
    return jax.shard_map(lambda x: lax.psum(x.sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x)


def calls() -> dict[str, Callable[[], Any]]:
    """Functions of no arguments by name; those whose name begins with "whole" are right, all others refused."""
    auto = jax.make_mesh((1, DEVICES), ("one", "x"), axis_types=(AxisType.Auto, AxisType.Auto))
    explicit = jax.make_mesh((1, DEVICES), ("one", "x"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    split, split_explicit = on(NamedSharding(auto, P("x"))), on(NamedSharding(explicit, P(None, "x")))
    copies, copies_explicit = on(NamedSharding(auto, P("one"))), on(NamedSharding(explicit, P()))
    last, twice = on(jax.devices()[-1]), ipu_jit(sine)
    compiled = ipu_jit(sine).lower(X).compile()

    def called_twice() -> Any:
        twice(copies)
        return twice(split)

    def under(mesh: Any, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with jax.set_mesh(mesh):
                return call()

        return run

    over_replicas = ipu_jit(sine, replicas=DEVICES, in_specs=P("replica"), out_specs=P("replica"))
    return {
        "whole: copies": lambda: ipu_jit(sine)(copies),
        "whole: copies, explicit": lambda: ipu_jit(sine)(copies_explicit),
        "whole: last device": lambda: ipu_jit(sine)(last),
        "whole: auto mesh is set": under(auto, lambda: ipu_jit(sine)(X)),
        "whole: replicas": lambda: over_replicas(copies),
        "whole: on CPU": lambda: ipu.jit(sine, device=ipu.CPU())(split),
        "whole: under jax.jit": lambda: jax.jit(ipu_jit(sine))(split),
        "whole: static": lambda: ipu_jit(lambda how, x: jnp.sin(x), static_argnums=0)(NamedSharding(auto, P("x")), X),
        "whole: shard_map": lambda: jnp.sin(X) + 0 * ipu_jit(total)(X),
        "whole: shard_map, auto mesh is set": under(auto, lambda: jnp.sin(X) + 0 * ipu_jit(total)(X)),
        "argument": lambda: ipu_jit(lambda tree: jnp.sin(tree["w"]))({"w": split}),
        "argument, explicit": lambda: ipu_jit(sine)(split_explicit),
        "keyword": lambda: ipu_jit(lambda *, x: jnp.sin(x))(x=split),
        "replicas": lambda: over_replicas(split),
        "shape": lambda: ipu_jit(sine).lower(jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=split.sharding)),
        "a Ref": lambda: ipu_jit(lambda ref: jnp.sin(ref[...]))(jax.new_ref(split)),
        "second call": called_twice,
        "compiled": lambda: compiled(split),
        "closed over": lambda: ipu_jit(lambda x: x + split)(X),
        "closed over, inside": lambda: ipu_jit(
            lambda x: lax.cond(x[0, 0] > 0, lambda: jax.jit(lambda: split * 2)(), lambda: x)
        )(X),
        "explicit mesh is set": under(explicit, lambda: ipu_jit(sine)(X)),
    }


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"result": np.asarray(call()).tolist()}
    except ipu.IpuError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(json.dumps({name: outcome(call) for name, call in calls().items()}))
