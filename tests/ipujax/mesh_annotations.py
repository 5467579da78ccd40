"""Annotations of JAX over a mesh: a script that prints, as JSON, what differs from `jax.jit` in each case by name.

A process of its own runs it: how many devices JAX has on a CPU is settled when it starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import BATCHING, SdyShardingRule, custom_partitioning
from jax.experimental.shard_alike import shard_alike
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import ipujax as ipu

DEVICES = 4
X = np.arange(32, dtype=np.float32).reshape(8, 4)
HELD = "memory: an argument on the host"
SEEN: list[str] = []


def see(x: Any) -> np.ndarray:
    SEEN.append(str(np.asarray(x).tolist()))
    return np.asarray(x)


def see_sharding(sharding: Any) -> None:
    SEEN.append(str(sharding.spec))


def partitioned(rule: Any, function: Any, chosen: Any = None, of_blocks: Any = None, **settings: Any) -> Any:
    """A `custom_partitioning` that takes the shardings it is asked for, but for those that `chosen` changes."""

    def partition(*arguments: Any) -> Any:
        *static, mesh, operands, results = arguments
        into = jax.tree.map(lambda x: x.sharding, operands)
        out = jax.tree.map(lambda x: x.sharding, results)
        if chosen is not None:
            out, into = chosen(mesh, out, into)
        return mesh, partial(of_blocks or function, *static), out, into

    custom = custom_partitioning(function, static_argnums=settings.pop("static_argnums", ()))
    custom.def_partition(partition, sharding_rule=rule, **settings)
    return custom


def summed_over_devices(a: Any, b: Any) -> Any:
    return lax.psum(a @ b, "x")


def by_rows(mesh: Any, out: Any, into: Any) -> Any:
    return NamedSharding(mesh, P("x")), (NamedSharding(mesh, P("x")),)


def whole(mesh: Any, out: Any, into: Any) -> Any:
    return NamedSharding(mesh, P()), (NamedSharding(mesh, P()),)


def rule_of_shapes(static: Any, mesh: Any, operands: Any, results: Any) -> Any:
    return "i j -> i j"


def cases(mesh: Mesh) -> dict[str, tuple[Callable[..., Any], Any]]:
    """Functions, and the spec of their argument."""
    x, y = P("x"), P(None, "x")
    to_x = NamedSharding(mesh, x)
    host, tiles = jax.memory.Space.Host, jax.memory.Space.Device
    twice = lambda v: v * 2  # noqa: E731
    return {
        "alike: a constant": (lambda v: shard_alike(v, jnp.arange(32.0).reshape(8, 4))[1] + 1, x),
        "alike: the first": (lambda v: shard_alike(jnp.ones((8, 4)), v)[0], y),
        "alike: a tree": (lambda v: shard_alike({"a": v, "b": v}, {"a": jnp.ones((8, 4)), "b": jnp.zeros((8, 4))}), x),
        "alike: a chain": (lambda v: shard_alike(shard_alike(v, v.T.T * 2)[1], jnp.zeros((8, 4)))[1], x),
        "alike: what is stated": (
            lambda v: shard_alike(lax.with_sharding_constraint(v * 3, to_x), jnp.ones((8, 4)))[1],
            P(),
        ),
        "alike: a batch": (jax.vmap(lambda v: shard_alike(v, jnp.ones(8))[1], 1, 1), x),
        "alike: a gradient": (jax.grad(lambda v: jnp.sum(jnp.sin(shard_alike(v, jnp.cos(v))[1]))), x),
        "alike: in a function": (jax.jit(lambda v: shard_alike(v, jnp.ones((8, 4)))[1]), x),
        "alike: in a scan": (lambda v: lax.scan(lambda c, _: (shard_alike(v, c + 1)[1], None), v, length=2)[0], x),
        "custom: elementwise": (partitioned("i j -> i j", twice), x),
        "custom: a product": (
            lambda v: partitioned(
                "i k, k j -> i j", lambda a, b: a @ b, of_blocks=summed_over_devices, reduction_factors=("k",)
            )(v.T, v),
            x,
        ),
        "custom: leading dimensions": (
            partitioned(SdyShardingRule(((BATCHING, "i"),), ((BATCHING, "i"),)), twice),
            x,
        ),
        "custom: other shardings": (partitioned("i j -> i j", twice, by_rows), y),
        "custom: whole": (partitioned("i j -> i j", twice, whole), x),
        "custom: a rule of shapes": (
            lambda v: partitioned(
                rule_of_shapes, lambda v, n: v * n, of_blocks=lambda n, v: v * n, static_argnums=(1,)
            )(v, 3),
            x,
        ),
        "custom: a factor that stays whole": (
            partitioned("i j -> i j", twice, need_replication_factors=("j",)),
            x,
        ),
        "custom: several factors": (
            partitioned("(a b) j -> a (b j)", lambda v: v.reshape(4, 8), None, lambda v: v.reshape(-1, 8), b=2),
            x,
        ),
        "custom: trees": (lambda v: partitioned("i j, i j -> i j, i j", lambda t: (t[0] + t[1], t[1]))((v, v + 1)), x),
        "custom: in a function": (jax.jit(partitioned("i j -> i j", jax.jit(twice))), x),
        "print: partitioned": (lambda v: (jax.debug.callback(see, v, partitioned=True), v)[1], x),
        "print: whole": (lambda v: (jax.debug.callback(see, v), v)[1], x),
        "print: in a loop": (
            lambda v: lax.fori_loop(0, 2, lambda i, c: (jax.debug.callback(see, c), c + i)[1], v),
            x,
        ),
        "print: beside a shard_map": (
            lambda v: (jax.debug.callback(see, v), jax.shard_map(twice, mesh=mesh, in_specs=x, out_specs=x)(v))[1],
            x,
        ),
        "print: in a shard_map": (
            jax.shard_map(lambda v: (jax.debug.callback(see, v), v)[1], mesh=mesh, in_specs=x, out_specs=x),
            x,
        ),
        "call: with a result": (lambda v: io_callback(see, jax.ShapeDtypeStruct((8, 4), np.float32), v).sum(), x),
        "memory: a result on the host": (lambda v: jax.device_put(v * 2, host), x),
        "memory: a value on the host": (lambda v: jax.device_put(jax.device_put(v * 2, host), tiles) + 1, y),
        "memory: rows on the host": (
            lambda v: lax.scan(lambda c, row: (c + row, jax.device_put(c * row, host)), jnp.zeros(4), v)[1],
            y,
        ),
        f"{HELD}, read": (lambda v: jax.device_put(v, tiles) + 1, x),
        f"{HELD}, changed": (lambda v: jax.device_put(jax.device_put(v, tiles) * 2, host), y),
        f"{HELD}, returned": (lambda v: v, x),
        "inspect: an argument": (lambda v: (jax.debug.inspect_array_sharding(v, callback=see_sharding), v)[1], x),
        "inspect: a constraint": (
            lambda v: (
                w := lax.with_sharding_constraint(v * 2, NamedSharding(mesh, y)),
                jax.debug.inspect_array_sharding(w, callback=see_sharding),
            )[0],
            x,
        ),
    }


def outcome(jitted: Callable[..., Any], x: jax.Array) -> Any:
    """Values, specs and memories of the results, and what callbacks saw, in any order: devices call at one time."""
    SEEN.clear()
    results = jax.tree.leaves(jitted(x))
    jax.effects_barrier()
    places = [(str(y.sharding.spec), y.sharding.memory_kind) for y in results]
    return [np.asarray(value).tolist() for value in results], places, sorted(SEEN)


def main() -> None:
    """Print the outcomes that differ."""
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,))
    device = ipu.IPUModel(num_ipus=DEVICES, tiles_per_ipu=8)
    outcomes: dict[str, str] = {}
    for name, (function, spec) in cases(mesh).items():
        memory = "pinned_host" if name.startswith(HELD) else "device"
        x = jax.device_put(X, NamedSharding(mesh, spec, memory_kind=memory))
        expected = outcome(jax.jit(function), x)
        actual = outcome(ipu.jit(function, device=device), x)
        outcomes[name] = "" if actual == expected else f"got {actual}, right {expected}"
    print(json.dumps(outcomes))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main()
