"""Products with block-sparse matrices: codelets and their cycle formulas."""

from ipujax.lowering.popsparse.block_products import (
    block_products as block_products,
    sampled_products as sampled_products,
)
from ipujax.lowering.popsparse.product_cycles import dynamic_cycles as dynamic_cycles, static_cycles as static_cycles
