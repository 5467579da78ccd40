"""Products with block-sparse matrices: codelets and their cycle formulas."""

from ipujax.lowering.popsparse.block_products import (
    block_products as block_products,
    sampled_products as sampled_products,
)
