"""Products with block-sparse matrices of a dynamic pattern: the pattern is an argument, the plan has its most blocks.

    plan = popsparse.DynamicPlan((m, k), block=16, max_blocks=500, columns=n)
    y = ipu.jit(partial(popsparse.dynamic_matmul, plan))(plan.encode(pattern, values), x)

The three products (sparse by dense, transposed sparse by dense, blocks of dense by dense) have each other as gradients.
Limits: see `dynamic_plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.popsparse.cell_grids import bucket_product, bucket_samples
from ipujax.popsparse.dynamic_plan import DynamicPlan, SparseBlocks
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError

_SUMS = np.dtype(np.float32)


class _Places(NamedTuple):
    """Places of the blocks of a matrix, as `SparseBlocks` has them."""

    row: jax.Array
    slot: jax.Array
    column_slot: jax.Array


def dynamic_matmul(plan: DynamicPlan, sparse: SparseBlocks, x: jax.Array) -> jax.Array:
    """The product of a block-sparse matrix with a dense one; differentiable in `sparse.values` and `x`.

    Args:
        plan: the plan that `sparse` was encoded with.
        sparse: the matrix, [m, k]: `plan.encode(pattern, values)`, of any pattern in the limits of the plan.
        x: dense matrix, [k, n], of the plan's dtype.

    Returns:
        [m, n], of the same dtype; sums are float32.

    Raises:
        ArgumentTypeError: other dtypes, or arguments that are not a DynamicPlan and its SparseBlocks.
        ArgumentValueError: a matrix of another plan, or an `x` whose shape does not match.
    """
    _check("dynamic_matmul", plan, sparse, x, 1)
    return _product(plan, _Places(sparse.row, sparse.slot, sparse.column_slot), sparse.values, x)


def dynamic_transposed_matmul(plan: DynamicPlan, sparse: SparseBlocks, y: jax.Array) -> jax.Array:
    """The product [k, n] of the transposed block-sparse matrix with a dense one, [m, n]; else as `dynamic_matmul`."""
    _check("dynamic_transposed_matmul", plan, sparse, y, 0)
    return _transposed(plan, _Places(sparse.row, sparse.slot, sparse.column_slot), sparse.values, y)


def _check(name: str, plan: DynamicPlan, sparse: SparseBlocks, x: jax.Array, contracted: int) -> None:
    """Refuse operands of other plans, types or shapes; `contracted` is the matrix dimension that `x` begins with."""
    if not isinstance(plan, DynamicPlan) or not isinstance(sparse, SparseBlocks):
        got = f"{type(plan).__name__}, {type(sparse).__name__}"
        raise ArgumentTypeError(name, expected="a DynamicPlan and its SparseBlocks", got=got)
    if sparse.plan != plan:
        raise ArgumentValueError(
            f"{name}: the sparse matrix was encoded with another plan", expected=plan, got=sparse.plan
        )
    dtypes = [getattr(array, "dtype", type(array).__name__) for array in (sparse.values, x)]
    if any(dtype != plan.dtype for dtype in dtypes):
        got = f"{dtypes[0]}, {dtypes[1]}"
        raise ArgumentTypeError(f"{name}: operands", expected=f"arrays, both {plan.dtype}", got=got)
    grid = plan.grid
    shape = grid.cells * plan.size, plan.block, plan.block
    if sparse.values.shape != shape:
        raise ArgumentValueError(f"{name}: values of the sparse matrix", expected=shape, got=sparse.values.shape)
    length = plan.shape[contracted]
    if x.ndim != 2 or x.shape[0] != length or x.shape[1] % grid.column_parts or not x.shape[1]:
        expected = f"({length}, n), n a multiple of {grid.column_parts}"
        raise ArgumentValueError(f"{name}: the dense operand", expected=expected, got=x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(plan: DynamicPlan, places: _Places, values: jax.Array, x: jax.Array) -> jax.Array:
    """The product [m, n] of the matrix by [k, n], each bucket multiplied in each cell that it is passed to."""

    def step_product(step: int) -> jax.Array:
        blocks, rows = (_passed(plan, array, step) for array in (values, places.row))
        return bucket_product(plan.grid, blocks, x, rows, places.slot[step], _SUMS, plan.most_blocks(step))

    return reduce(jnp.add, map(step_product, range(plan.steps + 1)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _transposed(plan: DynamicPlan, places: _Places, values: jax.Array, y: jax.Array) -> jax.Array:
    """The product [k, n] of the transposed matrix by [m, n]."""
    grid = plan.grid.transposed()

    def by_part(array: jax.Array) -> jax.Array:
        bands = array.reshape(plan.grid.bands, grid.bands, -1)
        return bands.swapaxes(0, 1).reshape(array.shape)

    def step_product(step: int) -> jax.Array:
        blocks = by_part(_passed(plan, values, step)).swapaxes(1, 2)
        rows = by_part(places.slot[step])
        slots = by_part(places.column_slot[step])
        return bucket_product(grid, blocks, y, rows, slots, _SUMS, plan.most_blocks(step))

    return reduce(jnp.add, map(step_product, range(plan.steps + 1)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sampled(plan: DynamicPlan, places: _Places, left: jax.Array, right: jax.Array) -> jax.Array:
    """The blocks of left · rightᵀ where the matrix has values: [m, n], [k, n] → [cells · size, block, block].

    It is the gradient of these values. Each cell that a bucket is passed to computes its own blocks of it; they are
    passed back, and added.
    """

    def step_blocks(step: int) -> jax.Array:
        rows = _passed(plan, places.row, step)
        slots = places.slot[step]
        samples = bucket_samples(plan.grid, plan.block, left, right, rows, slots, plan.most_blocks(step))
        return _passed(plan, samples, -step)

    return reduce(jnp.add, map(step_blocks, range(plan.steps + 1)))


def _passed(plan: DynamicPlan, array: jax.Array, step: int) -> jax.Array:
    """Return the buckets after `step` propagation steps: cell n then has the bucket of cell n + `step`."""
    return jnp.roll(array, -step * (len(array) // plan.grid.cells), 0)


def _product_backward(plan: DynamicPlan, saved: Any, g: jax.Array) -> tuple[None, jax.Array, jax.Array]:
    places, values, x = saved
    return None, _sampled(plan, places, g, x), _transposed(plan, places, values, g)


def _transposed_backward(plan: DynamicPlan, saved: Any, g: jax.Array) -> tuple[None, jax.Array, jax.Array]:
    places, values, y = saved
    return None, _sampled(plan, places, y, g), _product(plan, places, values, g)


def _sampled_backward(plan: DynamicPlan, saved: Any, g: jax.Array) -> tuple[None, jax.Array, jax.Array]:
    places, left, right = saved
    return None, _product(plan, places, g, right), _transposed(plan, places, g, left)


def _saving(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda plan, places, a, b: (fun(plan, places, a, b), (places, a, b))


_product.defvjp(_saving(_product), _product_backward)
_transposed.defvjp(_saving(_transposed), _transposed_backward)
_sampled.defvjp(_saving(_sampled), _sampled_backward)
