"""Codelets of block-sparse products. A vertex has a bucket: some blocks, and the rows of the dense operands they meet.

Each block is multiplied on the AMP unit, or by vector multiply-adds where blocks are too small for it; a vertex uses
all workers of its tile. Source: Li et al. 2023, "PopSparse: Accelerated block sparse matrix multiplication on IPU"
(buckets, meta-information, both codelets). Limits: cycles of vector multiply-adds are `assumed`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.poplin.cycles import Count, Precision, amp_1x1_cycles, ceil_div
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
def block_products(dtype: Any, slots: int, out_dtype: Any) -> Codelet:
    """Codelet of sums of block products, by slot.

    Fields: blocks [blocks, m, k], x [blocks, k, n], slot [blocks] of int32; out [slots, m, n]. Sums are float32.
    A block whose slot is `slots` is left out.
    """

    def compute(blocks: jax.Array, x: jax.Array, slot: jax.Array) -> jax.Array:
        products = jnp.einsum("bmk,bkn->bmn", blocks, x, preferred_element_type=jnp.float32)
        return jax.ops.segment_sum(products, slot, num_segments=slots).astype(out_dtype)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        (blocks, m, k), (_, _, n), *_ = shapes
        return _cycles(target, dtype, blocks, m, k, n)

    fields = (
        Field("blocks", "in", dtype),
        Field("x", "in", dtype),
        Field("slot", "in", np.dtype(np.int32)),
        Field("out", "out", out_dtype),
    )
    return Codelet(f"popsparse::BlockProducts<{dtype_name(dtype)}>", fields, compute, cycles, flops=_MULTIPLY_ADD)


@remembered
def sampled_products(dtype: Any) -> Codelet:
    """Codelet of the products that blocks of a sparse result need: the gradient of blocks.

    Fields: left [blocks, m, n], right [blocks, k, n]; out [blocks, m, k]. Sums are float32.
    """

    def compute(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum("bmn,bkn->bmk", left, right, preferred_element_type=jnp.float32).astype(dtype)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        (blocks, m, n), (_, k, _), _ = shapes
        return _cycles(target, dtype, blocks, m, n, k)

    fields = (Field("left", "in", dtype), Field("right", "in", dtype), Field("out", "out", dtype))
    return Codelet(f"popsparse::SampledProducts<{dtype_name(dtype)}>", fields, compute, cycles, flops=_MULTIPLY_ADD)


def _cycles(target: Target, dtype: Any, blocks: Count, m: Count, k: Count, n: Count) -> np.ndarray:
    """Tile cycles of products [m, k] by [k, n], with the faster of both ways."""
    precision: Precision = "half" if np.dtype(dtype).itemsize == 2 else "float"
    amp = amp_1x1_cycles(target, precision, n, k, m, blocks)
    vectors = ceil_div(ceil_div(n, target.vector_width_bytes // np.dtype(dtype).itemsize), target.worker_contexts)
    vector_cycles = _VECTOR_CYCLES + load_cycles(target.vector_width_bytes, target)
    worker = _WORKER_CYCLES + blocks * (_BLOCK_CYCLES + m * k * (1 + whole_cycles(vectors * vector_cycles)))
    return np.asarray(np.minimum(amp, target.supervisor_overhead_cycles + issue_round_cycles(target) * worker))
