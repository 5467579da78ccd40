"""The pass `shard_map`: the numbers of plain JAX, by jaxprs of an abstract mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec as P

from ipujax.lowering.jax_compat import jaxpr_as_fun
from ipujax.lowering.passes.shard_map import shard_map

MESH = AbstractMesh((4,), ("x",))


def test_reductions_over_an_axis_of_the_mesh_and_one_of_vmap() -> None:
    """`vmap` makes a dimension of its axis, over which each device reduces by itself."""

    def of_row(row: Any) -> Any:
        return lax.psum(row, ("i", "x")), lax.pmax(row, ("x", "i")), row - lax.pmin(row, "i")

    def of_device(x: Any) -> Any:
        return jax.vmap(of_row, axis_name="i")(x)

    x = jnp.arange(8.0) ** 2
    mapped = jax.shard_map(of_device, mesh=MESH, in_specs=P("x"), out_specs=(P(), P(), P("x")), check_vma=False)
    total, most, above_least = jaxpr_as_fun(shard_map(jax.make_jaxpr(mapped)(x)))(x)
    np.testing.assert_array_equal(total, jnp.full(2, x.sum()))
    np.testing.assert_array_equal(most, jnp.full(2, x.max()))
    np.testing.assert_array_equal(above_least, [0, 1, 0, 5, 0, 9, 0, 13])


def test_broadcasts_from_one_device_of_each_group() -> None:
    """JAX has no such collective on CPU."""
    mesh = AbstractMesh((2, 2), ("x", "y"))
    x = jnp.array([1.0, jnp.nan, -0.0, 4.0])
    for axis, expected in (("x", [x[2], x[3], x[2], x[3]]), ("y", [x[1], x[1], x[3], x[3]])):
        mapped = jax.shard_map(
            lambda x, axis=axis: lax.pbroadcast(x, axis, 1), mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y"))
        )
        (result,) = jaxpr_as_fun(shard_map(jax.make_jaxpr(mapped)(x)))(x)
        np.testing.assert_array_equal(result, jnp.array(expected))


def test_permutes_in_the_order_of_the_mesh() -> None:
    """JAX counts ranks in that order, whatever the order in which axes are named."""
    mesh = AbstractMesh((2, 4), ("x", "y"))
    pairs = [(rank, (3 * rank + 1) % 8) for rank in range(8)]
    expected = np.zeros(8)
    expected[[destination for _, destination in pairs]] = np.arange(8.0)
    for axes in (("x", "y"), ("y", "x")):
        mapped = jax.shard_map(
            lambda x, axes=axes: lax.ppermute(x, axes, pairs),
            mesh=mesh,
            in_specs=P(("x", "y")),
            out_specs=P(("x", "y")),
        )
        x = jnp.arange(8.0)
        (result,) = jaxpr_as_fun(shard_map(jax.make_jaxpr(mapped)(x)))(x)
        np.testing.assert_array_equal(result, expected)
