"""Rows of the op table with devices or axes of devices: on one machine, reductions or identities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.shard_alike import shard_alike
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.lowering.rules.op_case import MAIN, OpCase, booleans, distinct, integers, normal

_LAYOUT = Layout(major_to_minor=(1, 0))


def _mapped(fun: Callable[[Any, str], Any]) -> Callable[[Any], Any]:
    return jax.vmap(lambda x: x - fun(x, "batch"), axis_name="batch")


def _moments(x: Any) -> Any:
    """Normalises a batch by its own moments, as batch normalisation across devices does."""
    mean = lax.pmean(x, "batch")
    return (x - mean) * lax.rsqrt(lax.pmean((x - mean) ** 2, "batch") + 1e-3)


def _spread(x: Any) -> Any:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    return 2 * lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))


def devices() -> list[OpCase]:
    """Collectives under `vmap(axis_name=...)`, forward and backward, and placements."""
    x = normal(*MAIN)
    sums = {"rtol": 1e-5, "atol": 1e-5}
    both = partial(lax.psum, axis_name=("rows", "columns"))
    nested = jax.vmap(jax.vmap(both, axis_name="columns"), axis_name="rows")
    return [
        OpCase("psum", "sum", _mapped(lax.psum), (x,), **sums, grad=True),
        OpCase("psum", "moments", jax.vmap(_moments, axis_name="batch"), (x,), **sums, grad=True, grad_rtol=1e-4),
        OpCase("psum", "tree", jax.vmap(lambda t: lax.psum((t, t.sum()), "batch"), axis_name="batch"), (x,), **sums),
        OpCase("psum", "two axes", nested, (x,), **sums, grad=True),
        OpCase("psum", "int", _mapped(lax.psum), (integers(*MAIN),)),
        OpCase("psum", "flags", jax.vmap(partial(lax.psum, axis_name="b"), axis_name="b"), (booleans(*MAIN),)),
        OpCase("psum", "empty", jax.vmap(partial(lax.psum, axis_name="b"), axis_name="b"), (normal(3, 0),)),
        OpCase("pmax", "max", _mapped(lax.pmax), (distinct(*MAIN),)),
        OpCase("pmin", "min", _mapped(lax.pmin), (distinct(*MAIN),)),
        OpCase("device_put", "device", lambda x: 2 * jax.device_put(x, jax.devices()[0]), (x,), grad=True),
        OpCase("device_put", "key", _drawn_after_move, (lambda rng: jax.random.key(int(rng.integers(99))),)),
        OpCase("sharding_constraint", "one device", _spread, (x,), grad=True),
        OpCase("shard_alike", "one device", lambda x: shard_alike(x, x + 1), (x,), grad=True),
        OpCase("layout_constraint", "order", lambda x: with_layout_constraint(x * 2, _LAYOUT), (x,)),
        OpCase("xla_metadata_value", "value", lambda x: set_xla_metadata(x * 2, key="value"), (x,)),
        OpCase("reshard", "gradient", jax.grad(lambda x: (_spread(x) ** 2).sum()), (x,)),
    ]


def _drawn_after_move(key: Any) -> Any:
    return jax.random.bits(jax.device_put(key), (3,)) + jnp.uint32(np.uint32(1))
