"""Cycles of programs with shardings: within 2 % of the same programs written by hand with `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu

MESH = ipu.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
DEVICE = ipu.IPUModel(num_ipus=4, tiles_per_ipu=64)


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, np.float32)


def mlp(x: Any, w: Any, v: Any) -> Any:
    return jax.nn.relu(x @ w) @ v


def mlp_part(x: Any, w: Any, v: Any) -> Any:
    return lax.psum(mlp(x, w, v), "x")


def attention(x: Any, w: Any, out: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dhe->bhse", x, w[n]) for n in range(3))
    weights = jax.nn.softmax(jnp.einsum("bhse,bhte->bhst", q, k))
    return jnp.einsum("bhst,bhte,hed->bsd", weights, v, out)


def attention_part(x: Any, w: Any, out: Any) -> Any:
    return lax.psum(attention(x, w, out), "x")


def updated(w: Any, v: Any, x: Any) -> Any:
    grads = jax.grad(lambda w, v: (mlp(x, w, v) ** 2).mean(), (0, 1))(w, v)
    return w - 0.1 * grads[0], v - 0.1 * grads[1]


def updated_part(w: Any, v: Any, x: Any) -> Any:
    whole = [lax.all_gather(p, "x", tiled=True) for p in (w, v)]
    grads = jax.grad(lambda w, v: (mlp(x, w, v) ** 2).sum() / (4 * x.shape[0] * v.shape[1]), (0, 1))(*whole)
    return tuple(p - 0.1 * lax.psum_scatter(g, "x", tiled=True) for p, g in zip((w, v), grads, strict=True))


def ring_part(q: Any, k: Any, v: Any) -> Any:
    ring = [(n, (n + 1) % 4) for n in range(4)]
    top = jnp.full(q.shape[:-1], -jnp.inf)
    total = jnp.zeros(q.shape[:-1])
    out = jnp.zeros(q.shape)
    for _ in range(4):
        scores = jnp.einsum("hse,hte->hst", q, k)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.exp(scores - new_top[..., None])
        scale = jnp.exp(top - new_top)
        total = scale * total + weights.sum(-1)
        out = scale[..., None] * out + jnp.einsum("hst,hte->hse", weights, v)
        top = new_top
        k, v = (lax.ppermute(x, "x", ring) for x in (k, v))
    return out / total[..., None]


def ring(q: Any, k: Any, v: Any) -> Any:
    spec = P(None, "x")
    q, k, v = (lax.with_sharding_constraint(x, NamedSharding(MESH, spec)) for x in (q, k, v))
    return jax.shard_map(ring_part, mesh=MESH, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(q, k, v)


ROWS = P("x")
HEADS = P(None, None, "x")
PROGRAMS = {
    "tensor-parallel MLP": (
        mlp,
        mlp_part,
        (P(), P(None, "x"), ROWS),
        P(),
        (shape(256, 64), shape(64, 256), shape(256, 64)),
    ),
    "tensor-parallel attention": (
        attention,
        attention_part,
        (P(), HEADS, ROWS),
        P(),
        (shape(2, 64, 64), shape(3, 64, 8, 16), shape(8, 16, 64)),
    ),
    "FSDP": (updated, updated_part, (ROWS,) * 3, (ROWS, ROWS), (shape(64, 128), shape(128, 64), shape(256, 64))),
    "ring attention": (ring, ring_part, (P(None, "x"),) * 3, P(None, "x"), (shape(4, 128, 16),) * 3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_cycles_are_those_of_shard_map_by_hand(name: str) -> None:
    fun, part, in_specs, out_specs, args = PROGRAMS[name]

    def named(specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs)

    def cycles(program: Callable[..., Any], **settings: Any) -> int:
        return ipu.jit(program, device=DEVICE, **settings).profile(*args).cycles

    by_hand = jax.shard_map(part, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    sharded = cycles(fun, in_shardings=named(in_specs), out_shardings=named(out_specs))
    assert sharded == pytest.approx(cycles(by_hand), rel=0.02)
