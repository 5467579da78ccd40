"""Recomputation: values that a backward pass computes again instead of reading them from memory."""

from ipujax.lowering.recomputation.chain import (
    ChainPlans as ChainPlans,
    RecomputePlan as RecomputePlan,
    peak_bytes as peak_bytes,
    plan_recompute as plan_recompute,
    trade_off as trade_off,
)
from ipujax.lowering.recomputation.recompute import (
    KEEP_ALL as KEEP_ALL,
    ChainTrade as ChainTrade,
    Recomputation as Recomputation,
    may_store_less as may_store_less,
    modes as modes,
    recompute as recompute,
    recomputed_parts as recomputed_parts,
)
from ipujax.lowering.recomputation.segment_table import ChainStep as ChainStep
