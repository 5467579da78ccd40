"""Codelets of block-sparse products. A vertex has a bucket: some blocks, and the rows of dense operands that they meet.

A block names its row of blocks of each dense operand by a number within the bucket. A number past the last row leaves
the block out. Sums of a vertex are float32; a vertex uses all workers of its tile.
Source: Li et al. 2023, "PopSparse: Accelerated block sparse matrix multiplication on IPU" (buckets, meta-information,
both forms).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.popsparse.product_cycles import dynamic_cycles, static_cycles
from ipujax.lowering.popsparse.sampled_cycles import sampled_cycles
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Codelet, Field
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import dtype_name

_MULTIPLY_ADD = 2  # operations


@remembered
def block_products(dtype: Any, number: Any, slots: int, out_dtype: Any, most_blocks: int | None = None) -> Codelet:
    """Codelet of sums of block products, by slot.

    Fields: blocks [blocks, b, b], x [rows, b, n], row [blocks] and slot [blocks] of dtype `number`; out [slots, b, n].
    A dynamic pattern names the most blocks that are not left out; None is a static one.
    """

    def compute(blocks: jax.Array, x: jax.Array, row: jax.Array, slot: jax.Array) -> jax.Array:
        operands = jnp.take(x, row.astype(np.int32), axis=0, mode="clip")
        products = jnp.einsum("bmk,bkn->bmn", blocks, operands, preferred_element_type=jnp.float32)
        return jax.ops.segment_sum(products, slot.astype(np.int32), num_segments=slots).astype(out_dtype)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        (blocks, _, _), (_, _, n), *_ = shapes
        block = int(np.max(shapes[0][1]))
        if most_blocks is None:
            return static_cycles(target, dtype, block, np.minimum(slots, blocks), blocks, n)
        used = np.minimum(most_blocks, blocks)
        return dynamic_cycles(target, dtype, block, np.minimum(slots, used), used, n)

    fields = (
        Field("blocks", "in", dtype),
        Field("x", "in", dtype),
        Field("row", "in", number),
        Field("slot", "in", number),
        Field("out", "out", out_dtype),
    )
    name = f"popsparse::{'Static' if most_blocks is None else 'Dynamic'}BlockProducts<{dtype_name(dtype)}>"
    return Codelet(name, fields, compute, cycles, flops=_block_flops)


@remembered
def sampled_products(dtype: Any, number: Any, out_dtype: Any, most_blocks: int | None = None) -> Codelet:
    """Codelet of the products that blocks of a sparse result need: the gradient of blocks; zeros for those left out.

    Fields: left [slots, b, n], right [rows, b, n], slot and row [blocks] of dtype `number`; out [blocks, b, b].
    At most `most_blocks` are not left out, if that is known.
    """

    def compute(left: jax.Array, right: jax.Array, slot: jax.Array, row: jax.Array) -> jax.Array:
        operands = (
            jnp.take(y, numbers.astype(np.int32), axis=0, mode="fill", fill_value=0)
            for y, numbers in ((left, slot), (right, row))
        )
        return jnp.einsum("bmn,bkn->bmk", *operands, preferred_element_type=jnp.float32).astype(out_dtype)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        (rows, _, n), (reads, _, _), *_, (blocks, _, _) = shapes
        block = int(np.max(shapes[-1][1]))
        used = blocks if most_blocks is None else np.minimum(most_blocks, blocks)
        return sampled_cycles(target, dtype, block, np.minimum(rows, used), np.minimum(reads, used), used, n)

    fields = (
        Field("left", "in", dtype),
        Field("right", "in", dtype),
        Field("slot", "in", number),
        Field("row", "in", number),
        Field("out", "out", out_dtype),
    )
    return Codelet(f"popsparse::SampledProducts<{dtype_name(dtype)}>", fields, compute, cycles, flops=_sampled_flops)


def _block_flops(shapes: BlockShapes) -> np.ndarray:
    (blocks, m, k), (_, _, n), *_ = shapes
    return np.asarray(_MULTIPLY_ADD * blocks * m * k * n)


def _sampled_flops(shapes: BlockShapes) -> np.ndarray:
    (_, _, n), *_, (blocks, m, k) = shapes
    return np.asarray(_MULTIPLY_ADD * blocks * m * k * n)
