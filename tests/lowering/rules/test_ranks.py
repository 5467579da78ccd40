"""Scalars, arrays of eight dimensions, dimensions of size 1 and arrays without elements, through every family.

Ranks between are for `-m slow`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.lowering.helpers import check

TILES = (5,)
SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (1,),
    (7,),
    (0,),
    (3, 0),
    (0, 3),
    (2, 0, 3),
    (1, 1, 1),
    (2, 1, 3, 1),
    (2, 3, 2, 2, 3),
    (1, 2, 3, 1, 2, 1),
    (2, 1, 2, 2, 1, 2, 3),
    (2, 1, 2, 2, 1, 2, 2, 3),
    (2, 1, 0, 2, 1, 2, 2, 3),
)


def last(x: Any) -> int:
    return x.ndim - 1


def reduced(x: Any) -> list[Any]:
    """Every kind of reduction, over all dimensions, the first, the last, and over every other."""
    sets = {tuple(range(x.ndim)), tuple(range(0, x.ndim, 2)), tuple(range(x.ndim))[-1:], tuple(range(x.ndim))[:1]}
    sums = [f(x, axes) for axes in sorted(sets) for f in (lax.reduce_max, lax.reduce_min)]
    flags = [f(x > 1, axes) for axes in sorted(sets) for f in (lax.reduce_and, lax.reduce_or, lax.reduce_xor)]
    return [*sums, *flags, x.sum(), lax.reduce(x, np.float32(0), lax.max, tuple(range(x.ndim)))]


def searched(x: Any) -> list[Any]:
    along = [d for d, n in enumerate(x.shape) if n]
    return [f(x, d, np.int32) for d in along for f in (lax.argmax, lax.argmin)]


def shaped(x: Any) -> list[Any]:
    reverse = tuple(reversed(range(x.ndim)))
    return [
        x.reshape(-1) * 2,
        x.reshape((1, *x.shape, 1)) * 2 if x.ndim < 7 else x * 2,
        x.transpose(reverse) * 2,
        lax.rev(x, reverse) * 2,
        lax.squeeze(x, [d for d, n in enumerate(x.shape) if n == 1]) * 2,
        lax.slice(x, [min(1, n) for n in x.shape], x.shape) * 2,
        lax.broadcast_in_dim(x, (2, *x.shape), range(1, x.ndim + 1)) * 2 if x.ndim < 8 else x,
    ]


def along_dimensions(x: Any) -> list[Any]:
    if not x.ndim:
        return [x]
    cumulative = [f(x, d) for d in range(x.ndim) for f in (lax.cumsum, lax.cummax, lax.cumprod, lax.cummin)]
    top = lax.top_k(x, min(2, x.shape[-1]))
    doubled = [lax.concatenate([x, x], d) * 2 for d in (0, last(x))]
    return [*cumulative, lax.sort(x, dimension=0), *top, *doubled, jnp.stack([x, x], -1) * 2 if x.ndim < 8 else x]


def padded(x: Any) -> list[Any]:
    low = [(1, 0, 0)] * x.ndim
    high = [(0, 2, int(d == 0)) for d in range(x.ndim)]
    cropped = [(-1 if n else 0, 0, 0) for n in x.shape]
    return [lax.pad(x, np.float32(v), config) for v, config in ((7, low), (0, high), (1, cropped))]


def sliced(x: Any, i: Any) -> list[Any]:
    sizes = [max(n - 1, 0) for n in x.shape]
    part = lax.dynamic_slice(x, [i] * x.ndim, sizes)
    return [part, lax.dynamic_update_slice(x, part + 1, [i] * x.ndim), lax.dynamic_slice(x, [i] * x.ndim, x.shape)]


def looked_up(x: Any, i: Any) -> list[Any]:
    if not x.ndim or not x.shape[0]:
        return [x]
    rows = jnp.stack([i, -i, i * 9])
    no_rows = rows[:0]
    return [
        x[rows],
        x[no_rows],
        jnp.take(x, rows, last(x), mode="clip") if x.shape[-1] else x,
        x.at[rows].set(1.0),
        x.at[rows].add(x[:1]),
        x.at[no_rows].set(2.0),
        x.at[no_rows].add(x[no_rows]),
        x[(i % x.shape[0],)],
        *([x[(i,) * x.ndim], x.at[(i,) * x.ndim].max(3.0)] if x.size else []),
    ]


def multiplied(x: Any) -> list[Any]:
    dims = tuple(range(x.ndim))
    even_dims = tuple(range(0, x.ndim, 2))
    odd_dims = tuple(range(1, x.ndim, 2))
    return [
        lax.dot_general(x, x, ((dims, dims), ((), ()))),
        lax.dot_general(x, x, ((even_dims, even_dims), (odd_dims, odd_dims))),
        lax.dot_general(x, x, (((), ()), (dims, dims))),
        lax.dot_general(x, jnp.ones((2,), np.float32), (((), ()), ((), ()))) if x.ndim < 8 else x,
    ]


def selected(x: Any, i: Any) -> list[Any]:
    return [
        jnp.where(x > 0, x, -1),
        lax.select_n(i > 0, x, x + 1),
        lax.clamp(-1.0, x, x + 1),
        lax.cond(i > 0, lambda: x, lambda: 2 * x),
        lax.fori_loop(0, 3, lambda _, c: c + x, x),
        x.astype(np.int32) + i,
        lax.bitcast_convert_type(x, np.uint16) if x.ndim < 8 else x,
    ]


def looped(x: Any) -> Any:
    return lax.scan(lambda c, r: (c + r.sum(), (r, c)), np.float32(0), x) if x.ndim else x


FAMILIES: dict[str, Callable[..., Any]] = {
    "elementwise": lambda x: [x + x, x * 2, -x, jnp.abs(x), x == x, lax.max(x, x + 1), x + jnp.ones(x.shape[-1:])],
    "shape": shaped,
    "padding": padded,
    "reductions": reduced,
    "arg reductions": searched,
    "along dimensions": along_dimensions,
    "slices": sliced,
    "look-ups": looked_up,
    "products": multiplied,
    "choice and control": selected,
    "scans": looped,
    "iota": lambda x: [lax.broadcasted_iota(np.int32, x.shape, d) for d in range(x.ndim)],
    "random": lambda x: (jax.random.bits(jax.random.key(1), x.shape), jax.random.split(jax.random.key(2), x.shape)),
    "windows": lambda x: (
        [
            f(x, np.float32(v), g, [min(2, max(n, 1)) for n in x.shape], (1,) * x.ndim, "SAME")
            for f, v, g in ((lax.reduce_window, -np.inf, lax.max), (lax.reduce_window, 0.0, lax.add))
        ]
        if x.ndim
        else x
    ),
}


MANY = (1, 2, 1, 2, 1, 2, 1, 3)
CASES = [
    pytest.param(name, shape, id=f"{name}-{'x'.join(map(str, shape)) or 'scalar'}")
    for name in FAMILIES
    for shape in dict.fromkeys((*SHAPES, MANY))
]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_families(name: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    x = np.asarray(rng.integers(-3, 4, shape), np.float32)
    fun = FAMILIES[name]
    if fun in (sliced, looked_up, selected):
        check(fun, x, np.int32(1), tiles=TILES, rtol=1e-6, atol=1e-6)
    else:
        check(fun, x, tiles=TILES, rtol=1e-6, atol=1e-6)
