"""Kernels of Pallas of `opaque_calls.py`: products, norms, attention, prefetched scalars, scratch, batches, gradients.

`kernels()` lists them. The second form of each is the same function in plain JAX: XLA's analysis counts one step of a
grid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from opaque_networks import Case

Fun = Callable[..., Any]
N = 64
BLOCK = 16


def _call(kernel: Fun, grid: tuple[int, ...], ins: list[Any], out: Any, shape: Any, **params: Any) -> Fun:
    return pl.pallas_call(kernel, grid=grid, in_specs=ins, out_specs=out, out_shape=shape, interpret=True, **params)


def _square() -> Any:
    return jax.ShapeDtypeStruct((N, N), np.float32)


def _rows() -> Any:
    return pl.BlockSpec((BLOCK, N), lambda i: (i, 0))


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Product by blocks; each block of the result stays while the blocks along the inner dimension are added."""

    def kernel(x_ref: Any, y_ref: Any, o_ref: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...] @ y_ref[...]

    lhs_blocks = pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, k))
    rhs_blocks = pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (k, j))
    out = pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, j))
    steps = N // BLOCK
    return _call(kernel, (steps, steps, steps), [lhs_blocks, rhs_blocks], out, _square())(x, y)


def accumulated(x: jax.Array, y: jax.Array) -> jax.Array:
    """Product that is added up in scratch memory, with an activation at the end."""

    def kernel(x_ref: Any, y_ref: Any, o_ref: Any, total: Any) -> None:
        k = pl.program_id(1)

        @pl.when(k == 0)
        def _() -> None:
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        @pl.when(k == pl.num_programs(1) - 1)
        def _() -> None:
            o_ref[...] = jax.nn.relu(total[...]).astype(o_ref.dtype)

    lhs_blocks = pl.BlockSpec((BLOCK, BLOCK), lambda i, k: (i, k))
    rhs_blocks = pl.BlockSpec((BLOCK, N), lambda i, k: (k, 0))
    out = pl.BlockSpec((BLOCK, N), lambda i, k: (i, 0))
    scratch = [pltpu.VMEM((BLOCK, N), jnp.float32)]
    steps = N // BLOCK
    return _call(kernel, (steps, steps), [lhs_blocks, rhs_blocks], out, _square(), scratch_shapes=scratch)(x, y)


def softmax(x: jax.Array) -> jax.Array:
    """Softmax of rows."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        e = jnp.exp(x_ref[...] - x_ref[...].max(-1, keepdims=True))
        o_ref[...] = e / e.sum(-1, keepdims=True)

    return _call(kernel, (N // BLOCK,), [_rows()], _rows(), _square())(x)


def _plain_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalised rows."""

    def kernel(x_ref: Any, scale_ref: Any, o_ref: Any) -> None:
        o_ref[...] = _plain_norm(x_ref[...], scale_ref[...])

    every = pl.BlockSpec((1, N), lambda i: (0, 0))
    return _call(kernel, (N // BLOCK,), [_rows(), every], _rows(), _square())(x, scale)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention with a running maximum, normaliser and result, in the manner of FlashAttention."""

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, o_ref: Any, top: Any, norm: Any, total: Any) -> None:
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _() -> None:
            top[...] = jnp.full_like(top, -1e30)
            norm[...] = jnp.zeros_like(norm)
            total[...] = jnp.zeros_like(total)

        scores = q_ref[...] @ k_ref[...].T
        new_top = jnp.maximum(top[...], scores.max(-1, keepdims=True))
        weights = jnp.exp(scores - new_top)
        rescale = jnp.exp(top[...] - new_top)
        norm[...] = rescale * norm[...] + weights.sum(-1, keepdims=True)
        total[...] = rescale * total[...] + weights @ v_ref[...]
        top[...] = new_top

        @pl.when(j == pl.num_programs(1) - 1)
        def _() -> None:
            o_ref[...] = total[...] / norm[...]

    of_query = pl.BlockSpec((BLOCK, N), lambda i, j: (i, 0))
    of_key = pl.BlockSpec((BLOCK, N), lambda i, j: (j, 0))
    scratch = [pltpu.VMEM((BLOCK, n), jnp.float32) for n in (1, 1, N)]
    ins = [of_query, of_key, of_key]
    steps = N // BLOCK
    return _call(kernel, (steps, steps), ins, of_query, _square(), scratch_shapes=scratch)(q, k, v)


def _plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(q @ k.T) @ v


def chosen_rows(numbers: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Products of blocks whose numbers are prefetched scalars."""

    def kernel(numbers_ref: Any, x_ref: Any, y_ref: Any, o_ref: Any) -> None:
        o_ref[...] = (x_ref[...] @ y_ref[...]) * (numbers_ref[pl.program_id(0)] + 1).astype(jnp.float32)

    chosen = pl.BlockSpec((BLOCK, N), lambda i, numbers: (numbers[i], 0))
    every = pl.BlockSpec((N, N), lambda i, numbers: (0, 0))
    out = pl.BlockSpec((BLOCK, N), lambda i, numbers: (i, 0))
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(N // BLOCK,), in_specs=[chosen, every], out_specs=out
    )
    return pl.pallas_call(kernel, grid_spec=spec, out_shape=_square(), interpret=True)(numbers, x, y)


def _plain_chosen_rows(numbers: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    blocks = x.reshape(N // BLOCK, BLOCK, N)[numbers]
    return ((blocks @ y) * (numbers + 1)[:, None, None].astype(jnp.float32)).reshape(N, N)


def column_sums(x: jax.Array) -> jax.Array:
    """Sums of squares of columns, in a block that all steps add to."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += (x_ref[...] ** 2).sum(0, keepdims=True)

    out = pl.BlockSpec((1, N), lambda i: (0, 0))
    return _call(kernel, (N // BLOCK,), [_rows()], out, jax.ShapeDtypeStruct((1, N), np.float32))(x)


def updated(x: jax.Array) -> jax.Array:
    """Half of the rows updated in place."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = jnp.tanh(x_ref[...]) * 2 + 1

    return _call(kernel, (N // BLOCK // 2,), [_rows()], _rows(), _square(), input_output_aliases={0: 0})(x)


def _plain_updated(x: jax.Array) -> jax.Array:
    return x.at[: N // 2].set(jnp.tanh(x[: N // 2]) * 2 + 1)


@jax.custom_vjp
def _dense(x: jax.Array, w: jax.Array) -> jax.Array:
    return product(x, w)


_dense.defvjp(lambda x, w: (product(x, w), (x, w)), lambda r, g: (product(g, r[1].T), product(r[0].T, g)))


def _gradient(dense: Fun) -> Fun:
    return jax.grad(lambda x, w: jnp.sin(dense(x, w)).sum(), (0, 1))


def kernels() -> list[Case]:
    """All kernels."""
    x, y, z = (np.random.default_rng(n).standard_normal((N, N)).astype(np.float32) for n in range(3))
    numbers = np.array([2, 0, 3, 1], np.int32)
    several = np.stack([x, y, z])
    return [
        Case("product", product, [x, y], jnp.matmul),
        Case("product in scratch", accumulated, [x, y], lambda x, y: jax.nn.relu(x @ y)),
        Case("softmax", softmax, [x], jax.nn.softmax),
        Case("layer norm", layer_norm, [x, y[:1]], _plain_norm),
        Case("attention", attention, [x / 8, y, z], _plain_attention),
        Case("prefetched scalars", chosen_rows, [numbers, x, y], _plain_chosen_rows),
        Case("sums of columns", column_sums, [x], lambda x: (x**2).sum(0)),
        Case("updated in place", updated, [x], _plain_updated),
        Case("vmap", jax.vmap(product), [several, several], jnp.matmul),
        Case("gradients", _gradient(_dense), [x, y], _gradient(jnp.matmul)),
    ]
