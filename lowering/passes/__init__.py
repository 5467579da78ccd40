"""The passes over jaxprs, in order. Each is a pure function ClosedJaxpr → ClosedJaxpr that keeps the numbers."""

from __future__ import annotations

from collections.abc import Callable

from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.passes.dce import dce
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.passes.merge_collectives import merge_collectives
from ipujax.lowering.passes.shard_map import shard_map
from ipujax.lowering.passes.share import share

Pass = Callable[[ClosedJaxpr], ClosedJaxpr]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("share", share),
    ("inline", inline),
    ("shard_map", shard_map),
    ("merge_collectives", merge_collectives),
    ("dce", dce),
)
