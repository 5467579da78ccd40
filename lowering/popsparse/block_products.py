"""Codelets of block-sparse products. A vertex has a bucket: some blocks, and the rows of dense operands that they meet.

A block names its row of blocks of each dense operand by a number within the bucket. A number past the last row leaves
the block out. Sums of a vertex are float32; a vertex uses all workers of its tile.
Source: Li et al. 2023, "PopSparse: Accelerated block sparse matrix multiplication on IPU" (buckets, meta-information,
both forms). Limits: cycles of vector multiply-adds in sampled products are `assumed`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.poplin.cycles import Count, Precision, amp_1x1_cycles, ceil_div
from ipujax.lowering.popsparse.product_cycles import dynamic_cycles, static_cycles
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Codelet, Field
from ipujax.runtime.target import Target, issue_round_cycles, load_cycles, whole_cycles
from ipujax.runtime.tensor import dtype_name

_MULTIPLY_ADD = 2  # operations
_WORKER_CYCLES = 25  # assumed: start of a worker, pointers to operands
_BLOCK_CYCLES = 8  # assumed: meta-information of a block, and addresses of its operands
# Assumed: beside the load of a vector of the dense operand, which issues with the multiply-add of the last one.
_VECTOR_CYCLES = 1


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
        (_, m, n), *_, (blocks, _, k) = shapes
        used = blocks if most_blocks is None else np.minimum(most_blocks, blocks)
        return _sampled_cycles(target, dtype, used, m, n, k)

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


def _sampled_cycles(target: Target, dtype: Any, blocks: Count, m: Count, k: Count, n: Count) -> np.ndarray:
    """Tile cycles of sampled products, each [m, k] by [k, n]: the faster of the AMP and vector multiply-adds."""
    precision: Precision = "half" if np.dtype(dtype).itemsize == 2 else "float"
    amp = amp_1x1_cycles(target, precision, n, k, m, blocks)
    vectors = ceil_div(ceil_div(n, target.vector_width_bytes // np.dtype(dtype).itemsize), target.worker_contexts)
    vector_cycles = _VECTOR_CYCLES + load_cycles(target.vector_width_bytes, target)
    worker = _WORKER_CYCLES + blocks * (_BLOCK_CYCLES + m * k * (1 + whole_cycles(vectors * vector_cycles)))
    return np.asarray(np.minimum(amp, target.supervisor_overhead_cycles + issue_round_cycles(target) * worker))
