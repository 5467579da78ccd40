"""What a backward pass computes again in place of keeping it."""

from ipujax.lowering.recomputation.chain import (
    ChainStep as ChainStep,
    RecomputePlan as RecomputePlan,
    peak_bytes as peak_bytes,
    plan_recompute as plan_recompute,
    trade_off as trade_off,
)
