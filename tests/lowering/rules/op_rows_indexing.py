"""Rows of the op table for computed indices: gather and the scatter family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.rules import take_rows_p
from tests.lowering.rules.op_case import MAIN, ULP, OpCase, integers, normal


def indexing() -> list[OpCase]:
    table = normal(17, 5)
    rows = integers(7, low=0, high=17)
    labels = integers(13, low=0, high=29)

    def scattered(kind: str, **params: Any) -> Callable[..., Any]:
        return lambda t, i, u: getattr(t.at[i], kind)(u, **params)

    updates = normal(7, 5)

    def all_rows(rng: np.random.Generator) -> Any:
        return rng.permutation(17)[:7].astype(np.int32)

    def nothing(*batch: int) -> Any:
        return jnp.zeros((*batch, 0), np.int32)  # index vectors without components

    def everywhere(scatter: Callable[..., Any]) -> Callable[..., Any]:
        numbers = lax.ScatterDimensionNumbers((1,), (0,), ())
        return lambda t, u: scatter(t, nothing(7), u[:, :4], numbers)

    def copies(t: Any) -> Any:
        return lax.gather(t, nothing(2, 3), lax.GatherDimensionNumbers((1,), (0,), ()), (1, 4), mode="clip")

    int_updates = integers(7, 5)
    many = normal(5, 2), integers(1500, low=0, high=5), normal(1500, 2)
    return [
        OpCase("gather", "rows", lambda t, i: t[i], (table, rows), grad=True),
        OpCase(
            "gather", "labels", lambda x, i: jnp.take_along_axis(x, i[:, None], 1), (normal(*MAIN), labels), grad=True
        ),
        OpCase("gather", "outside", lambda t, i: jnp.take(t, i, 0), (table, integers(7, low=-40, high=40))),
        OpCase("gather", "columns", lambda t, i: t[:, i], (normal(3, 17), rows), grad=True),
        OpCase("gather", "no index", copies, (table,), grad=True),
        OpCase("gather", "int", lambda t, i: t[i], (integers(17), rows)),
        OpCase(
            "scatter", "set", scattered("set"), (table, lambda rng: rng.permutation(17)[:7].astype(np.int32), updates)
        ),
        OpCase("take_rows", "runs", lambda t: take_rows_p.bind(t, rows=(3, 4, 5, 0, 3)), (table,)),
        OpCase("take_rows", "batch", jax.vmap(lambda t: take_rows_p.bind(t, rows=(2, 0)), 1), (normal(3, 17),)),
        OpCase("scatter", "apply", lambda t, i: t.at[i].apply(jnp.sin), (table, all_rows), ULP),
        OpCase("scatter", "apply-window", lambda t, i: t.at[:, i].apply(jnp.sin), (normal(3, 17), all_rows), ULP),
        OpCase("scatter", "interior", lambda t, u: t.at[1:8, :].set(u), (table, updates)),
        OpCase("scatter", "no index", everywhere(lax.scatter), (table, updates)),
        OpCase("scatter-add", "no index", everywhere(lax.scatter_add), (table, updates), 1e-6, 1e-6, grad=True),
        OpCase("scatter-sub", "no index", everywhere(lax.scatter_sub), (integers(17, 5), int_updates)),
        OpCase("scatter-mul", "no index", everywhere(lax.scatter_mul), (integers(17, 5), int_updates)),
        OpCase("scatter-min", "no index", everywhere(lax.scatter_min), (table, updates)),
        OpCase("scatter-max", "interior", lambda t: t.at[1:-1, 2:].max(0.0), (table,)),
        OpCase("scatter-add", "duplicates", scattered("add"), (table, rows, updates), 1e-6, 1e-6, grad=True),
        OpCase("scatter-sub", "duplicates", scattered("subtract"), (table, rows, updates), 1e-6, 1e-6),
        OpCase("scatter-mul", "duplicates", scattered("multiply"), (table, rows, updates), 1e-6, 1e-6),
        OpCase("scatter-min", "duplicates", scattered("min"), (table, rows, updates)),
        OpCase("scatter-max", "duplicates", scattered("max"), (table, rows, updates)),
        OpCase("scatter-add", "many", scattered("add"), many, 1e-5, 1e-5, grad=True),
        OpCase("scatter-min", "many", scattered("min"), many),
    ]
