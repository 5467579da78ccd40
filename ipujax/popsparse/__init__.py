"""popsparse: products with block-sparse matrices and their softmax, from JAX code.

    from ipujax import popsparse

    pattern = popsparse.BlockPattern.of_mask(mask, block=16)  # mask: [m, k], booleans
    y = popsparse.static_matmul(pattern, pattern.blocks_of(w), x)

A pattern that is an argument needs a plan for the most blocks that it has: `DynamicPlan`, `dynamic_matmul`.
Source: PopLibs, `popsparse/MatMul.hpp`; Li et al. 2023, "PopSparse".
"""

from ipujax.popsparse.block_pattern import BLOCK_SIZES as BLOCK_SIZES, BlockPattern as BlockPattern
from ipujax.popsparse.dynamic_plan import DynamicPlan as DynamicPlan, SparseBlocks as SparseBlocks
from ipujax.popsparse.dynamic_product import dynamic_matmul as dynamic_matmul
from ipujax.popsparse.static_product import (
    static_matmul as static_matmul,
    static_sampled_matmul as static_sampled_matmul,
)
from ipujax.popsparse.static_softmax import static_softmax as static_softmax
from ipujax.public import public_names as _public_names

__dir__ = _public_names(globals())
