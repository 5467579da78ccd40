"""Axis of replicas in the functions of replicated programs, and the primitive `axis_rank`.

The rank of a replica along axes of a mesh is a constant of each replica:

    rank = axis_rank_p.bind(ranks=…, axis_name=…)

Unlike arithmetic on `axis_index` its values are known, and so which replicas have equal ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import make_primitive

AXIS = "replica"  # default name


def axis_rank(ranks: Sequence[int]) -> jax.Array:
    """Returns the rank of this replica, int32[]; `ranks` has that of each replica."""
    (rank,) = axis_rank_p.bind(ranks=tuple(map(int, ranks)), axis_name=AXIS)
    return rank


def _compute(*, ranks: tuple[int, ...], axis_name: str) -> list[jax.Array]:
    return [jnp.asarray(ranks, jnp.int32)[lax.axis_index(axis_name)]]


def _shapes(**params: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((), np.int32)]


axis_rank_p = make_primitive("axis_rank", _compute, _shapes)
