"""Functions exported for four devices, in a process that has them; prints an outcome for each name as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu

DEVICES = 4
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def on(*parts: Any, kind: AxisType = AxisType.Auto) -> NamedSharding:
    return NamedSharding(jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind)), P(*parts))


def constrained(x: Any, *parts: Any) -> Any:
    return lax.with_sharding_constraint(x, on(*parts))


def functions() -> dict[str, Callable[[Any], Any]]:
    return {
        "result": jax.jit(lambda x: jnp.sin(x) @ x.T, out_shardings=on(None, "y")),
        "both": jax.jit(lambda x: jax.nn.softmax(x @ x.T), in_shardings=on(("x", "y")), out_shardings=on("y")),
        "constraint": jax.jit(lambda x: constrained(jnp.sin(x), "y", "x").sum(1), in_shardings=on("x")),
        "open dimension": jax.jit(lambda x: constrained(x @ x.T, P.UNCONSTRAINED, "y"), in_shardings=on("x")),
        "loop": jax.jit(
            lambda x: lax.fori_loop(0, 3, lambda _, c: constrained(jnp.sin(c), "x"), x), in_shardings=on("x")
        ),
    }


def outcome(fun: Any) -> dict[str, Any]:
    exported = export.deserialize(export.export(fun)(X).serialize())
    device = ipu.IPUModel(tiles_per_ipu=8, num_ipus=DEVICES)
    call = ipu.jit(lambda x: exported.call(x), device=device)
    profile = call.profile(X)
    return {
        "cycles": [profile.cycles, ipu.jit(fun, device=device).profile(X).cycles],
        "unpriced": len(profile.unpriced) + len(profile.fallbacks),
        "difference": float(abs(np.asarray(call(X)) - np.asarray(fun(X))).max()),
    }


def difference_of_explicit_axes() -> float:
    x = jax.device_put(X, on("x", kind=AxisType.Explicit))
    fun = jax.jit(lambda x: jnp.sin(x) * x)
    call = ipu.jit(export.export(fun)(x).call, device=ipu.IPUModel(tiles_per_ipu=8, num_ipus=DEVICES))
    return float(abs(np.asarray(call(x)) - np.asarray(fun(x))).max())


def difference_of_gradients() -> float:
    fun = jax.jit(lambda x: jnp.sin(x) @ x.T, in_shardings=on("x"))
    exported = export.deserialize(export.export(fun)(X).serialize(vjp_order=1))
    device = ipu.IPUModel(tiles_per_ipu=8, num_ipus=DEVICES)
    gradient = ipu.jit(jax.grad(lambda x: (exported.call(x) ** 2).sum()), device=device)
    return float(abs(np.asarray(gradient(X)) - np.asarray(jax.grad(lambda x: (fun(x) ** 2).sum())(X))).max())


def error(exported: Any, num_ipus: int = DEVICES) -> str:
    call = ipu.jit(lambda x: exported.call(x), device=ipu.IPUModel(tiles_per_ipu=8, num_ipus=num_ipus))
    try:
        call.lower(X).compile()
    except ipu.IpuError as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return ""


def errors() -> dict[str, str]:
    split = jax.jit(jnp.sin, in_shardings=on("x"))
    mapped = jax.shard_map(lambda x: lax.psum(x, "x"), mesh=on().mesh, in_specs=P("x"), out_specs=P())
    of_devices = export.export(jax.jit(mapped))(jax.device_put(X, on("x")))
    return {
        "small device": error(export.export(split)(X), num_ipus=1),
        "shard_map": error(of_devices),
        "GSPMD": error(_without_shardy(lambda x: constrained(x, "y"))),
    }


def _without_shardy(fun: Callable[[Any], Any]) -> Any:
    jax.config.update("jax_use_shardy_partitioner", False)
    exported = export.export(jax.jit(fun))(jax.device_put(X, on("x")))
    jax.config.update("jax_use_shardy_partitioner", True)
    return exported


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)
    results = {name: outcome(fun) for name, fun in functions().items()}
    differences = {"explicit axes": difference_of_explicit_axes(), "gradient": difference_of_gradients()}
    print(json.dumps({"outcomes": results, "differences": differences, "errors": errors()}))
