"""popsparse: products with block-sparse matrices and their softmax, from JAX code.

    from ipujax import popsparse

    pattern = popsparse.BlockPattern.of_mask(mask, block=16)  # mask: [m, k], booleans
    y = popsparse.static_matmul(pattern, pattern.blocks_of(w), x)

A pattern that is an argument needs a plan for the most blocks that it has: `DynamicPlan`, `dynamic_matmul`.
Graphs have PopLibs' namespaces, `static_` and `dynamic`.
Source: PopLibs, `popsparse/MatMul.hpp`; Li et al. 2023, "PopSparse".
"""

from ipujax.poplar.library import registrar as _registrar
from ipujax.popsparse import dynamic as dynamic, static_ as static_
from ipujax.popsparse.block_pattern import (
    BLOCK_SIZES as BLOCK_SIZES,
    BlockPattern as BlockPattern,
    COOMatrix as COOMatrix,
    CSRMatrix as CSRMatrix,
)
from ipujax.popsparse.dynamic_plan import DynamicPlan as DynamicPlan, SparseBlocks as SparseBlocks
from ipujax.popsparse.dynamic_product import (
    dynamic_matmul as dynamic_matmul,
    dynamic_transposed_matmul as dynamic_transposed_matmul,
)
from ipujax.popsparse.static_product import (
    static_matmul as static_matmul,
    static_sampled_matmul as static_sampled_matmul,
    static_softmax as static_softmax,
)
from ipujax.public import public_names as _public_names

add_codelets = _registrar("popsparse")
__dir__ = _public_names(globals())
