"""Sums over replicas that processes share."""

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.runtime.host.instances import AXIS, Instances


def test_sums_floats_of_eight_bits_once_rounded() -> None:
    values = jnp.full((2, 2, 3), 0.3).astype(jnp.float8_e4m3fn)  # [instances, local replicas, 3]
    total = jax.vmap(Instances(2).sum, axis_name=AXIS)(values)
    assert total.dtype == values.dtype
    expected = (4 * values[0, 0].astype(jnp.float32)).astype(values.dtype)
    np.testing.assert_array_equal(total, jnp.broadcast_to(expected, values.shape))
