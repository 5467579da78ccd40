"""Recomputation: values that a backward pass computes again instead of reading them from memory."""

from ipujax.lowering.recomputation.recompute import (
    KEEP_ALL as KEEP_ALL,
    ChainTrade as ChainTrade,
    Recomputation as Recomputation,
    may_store_less as may_store_less,
    modes as modes,
    recompute as recompute,
    recomputed_parts as recomputed_parts,
)
