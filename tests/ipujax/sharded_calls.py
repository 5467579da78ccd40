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


def reads_from_outside(ref: Any) -> jax.Array:
    return ipu_jit(lambda x: x + ref[...])(X)


def total(x: Any) -> Any:
    mesh = jax.make_mesh((1, DEVICES), ("one", "x"), axis_types=(AxisType.Auto, AxisType.Auto))
    return jax.shard_map(lambda x: lax.psum(x.sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x)


def calls() -> dict[str, Callable[[], Any]]:
    """Functions of no arguments by name.

    The results of those whose name begins with "whole" or "split" are compared with `jax.jit`, and the shardings of
    those that begin with "split"; all others are refused.
    """
    auto = jax.make_mesh((1, DEVICES), ("one", "x"), axis_types=(AxisType.Auto, AxisType.Auto))
    explicit = jax.make_mesh((1, DEVICES), ("one", "x"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    other = jax.make_mesh((DEVICES,), ("y",), axis_types=(AxisType.Auto,))
    split = on(NamedSharding(auto, P("x")))
    split_explicit = on(NamedSharding(explicit, P(None, "x")))
    copies = on(NamedSharding(auto, P("one")))
    copies_explicit = on(NamedSharding(explicit, P()))
    last = on(jax.devices()[-1])
    twice = ipu_jit(sine)
    compiled = ipu_jit(sine).lower(X).compile()
    compiled_split = ipu_jit(sine).lower(split).compile()

    def called_twice() -> Any:
        twice(copies)
        return twice(split)

    def under(mesh: Any, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with jax.set_mesh(mesh):
                return call()

        return run

    def shaped(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    def inner(x: Any) -> Any:
        return ipu.jit(sine, in_shardings=NamedSharding(auto, P("x")), out_shardings=NamedSharding(auto, P("x")))(x)

    def times_ratio_of_a_sweep() -> Any:
        (row,) = ipu.sweep(ipu_jit(sine), split, grid=[{}], progress=False)
        return jnp.sin(X) * (row["cycles"] / ipu_jit(sine).profile(split).cycles)

    over_replicas = ipu_jit(sine, replicas=DEVICES, in_specs=P("replica"), out_specs=P("replica"))
    return {
        "whole: copies": lambda: ipu_jit(sine)(copies),
        "whole: copies, explicit": lambda: ipu_jit(sine)(copies_explicit),
        "whole: last device": lambda: ipu_jit(sine)(last),
        "whole: auto mesh is set": under(auto, lambda: ipu_jit(sine)(X)),
        "whole: explicit mesh is set": under(explicit, lambda: ipu_jit(sine)(X)),
        "whole: replicas": lambda: over_replicas(copies),
        "whole: on CPU": lambda: ipu.jit(sine, device=ipu.CPU())(split),
        "whole: under jax.jit": lambda: jax.jit(ipu_jit(sine))(split),
        "whole: inside jax.jit": lambda: jax.jit(
            lambda: ipu_jit(sine, in_shardings=NamedSharding(auto, P("x")))(split)
        )(),
        "whole: static": lambda: ipu_jit(lambda how, x: jnp.sin(x), static_argnums=0)(NamedSharding(auto, P("x")), X),
        "whole: shard_map": lambda: jnp.sin(X) + 0 * ipu_jit(total)(X),
        "whole: shard_map, auto mesh is set": under(auto, lambda: jnp.sin(X) + 0 * ipu_jit(total)(X)),
        "whole: closed over": lambda: jnp.sin(X) + 0 * ipu_jit(lambda x: x + split)(X),
        "split: argument": lambda: ipu_jit(lambda tree: jnp.sin(tree["w"]))({"w": split}),
        "split: argument, explicit": lambda: ipu_jit(lambda x: jnp.sin(x).T)(split_explicit).T,
        "split: keyword": lambda: ipu_jit(lambda *, x: jnp.sin(x))(x=split),
        "split: second call": called_twice,
        "split: compiled": lambda: compiled_split(split),
        "split: in_shardings": lambda: ipu_jit(sine, in_shardings=NamedSharding(auto, P("x")))(X),
        "split: out_shardings": lambda: ipu_jit(sine, out_shardings=NamedSharding(auto, P("x")))(X),
        "split: constraint": lambda: ipu_jit(
            lambda x: jnp.sin(lax.with_sharding_constraint(x, NamedSharding(auto, P("x"))))
        )(X),
        "split: inner jit": lambda: ipu_jit(lambda x: jax.jit(sine, in_shardings=NamedSharding(auto, P("x")))(x))(X),
        "split: inner ipu.jit": lambda: ipu_jit(inner)(X),
        "whole: ratio of a sweep": times_ratio_of_a_sweep,
        "split: shapes": lambda: jax.device_put(
            jnp.sin(X), ipu_jit(sine).lower(shaped(split)).compile().output_shardings
        ),
        "replicas": lambda: over_replicas(split),
        "a Ref": lambda: ipu_jit(lambda ref: jnp.sin(ref[...]))(jax.new_ref(split)),
        "a Ref closed over": lambda: reads_from_outside(jax.new_ref(split)),
        "compiled for one IPU": lambda: compiled(split),
        "compiled otherwise": lambda: compiled_split(on(NamedSharding(auto, P(None, "x")))),
        "another mesh": lambda: ipu_jit(lambda x, y: x + y)(split, on(NamedSharding(other, P("y")))),
        "in_shardings differ": lambda: ipu_jit(sine, in_shardings=NamedSharding(auto, P(None, "x")))(split),
    }


def sums() -> dict[str, tuple[Callable[..., Any], jax.Array]]:
    """Functions with an argument whose results are unreduced sums, by name."""
    row = jax.device_put(np.arange(8.0, dtype=np.float32), P())
    reduced = jax.device_put(np.arange(8.0, dtype=np.float32), P(reduced={"x"}))
    split = jax.device_put(np.arange(8, dtype=np.int32), P("x"))
    left = P(unreduced={"x"})
    return {
        "of a whole value": (lambda x: jax.sharding.reshard(x, left), row),
        "of a split value": (lambda x: jax.sharding.reshard(x, left), split),
        "gradient of a sum": (jax.grad(lambda x: (x + x).reshape(4, 2).sum()), reduced),
        "gradient of a split": (jax.grad(lambda x: jax.sharding.reshard(x, P("x")).sum()), reduced),
        "counts": (lambda x: jnp.bincount(x, length=8, out_sharding=left), split),
        "reduced, by a number": (lambda x: x * 2, reduced),
        "reduced, moved": (lambda x: jnp.concatenate([x[4:], x[:4] + 1]).reshape(2, 4).T, reduced),
        "reduced, product": (lambda x: jnp.outer(x, x + 1).sum(0), reduced),
        "reduced, in a loop": (lambda x: lax.fori_loop(0, 3, lambda i, c: c * 2, x), reduced),
        "reduced, beside a split": (lambda x: (jax.sharding.reshard(x, P("x")), x * 2)[1], reduced),
        "reduced, unused": (lambda x: jnp.arange(8.0), reduced),
    }


def over_one_device() -> dict[str, tuple[Callable[..., Any], jax.Array]]:
    """Functions with an argument that an axis of one device splits, by name."""
    row = jax.device_put(np.arange(8.0, dtype=np.float32), P("x"))
    return {
        "one device": (lambda x: x * 2, row),
        "one device, moved": (lambda x: jax.sharding.reshard(x, P()).reshape(4, 2).T, row),
        "one device, split inside": (lambda x: jax.sharding.reshard(jnp.arange(4.0) + x[:4].sum(), P("x")), row),
        "one device, dimension added": (lambda x: x[:, None] + jnp.zeros((8, 3)), row),
    }


def terms(result: jax.Array) -> list[Any]:
    """The term of each device, and the type."""
    return [str(jax.typeof(result)), *(shard.data.tolist() for shard in result.addressable_shards)]


def terms_of_sums() -> dict[str, Any]:
    """For each name True if each device has the term of `jax.jit`, and the type is equal; else both."""
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Explicit,))
    equal: dict[str, Any] = {}
    one = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    for each, functions in ((mesh, sums), (one, over_one_device)):
        with jax.set_mesh(each):
            for name, (fun, x) in functions().items():
                results = [terms(jit(fun)(x)) for jit in (ipu_jit, jax.jit)]
                equal[f"terms: {name}"] = results[0] == results[1] or results
    return equal


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        result = call()
        return {"result": np.asarray(result).tolist(), "devices": len(result.sharding.device_set)}
    except ipu.IpuError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(json.dumps({name: outcome(call) for name, call in calls().items()} | terms_of_sums()))
