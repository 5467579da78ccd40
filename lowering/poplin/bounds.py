"""Record of plans that need more of a tile's memory than the available proportion, for the profile and its warnings."""

from __future__ import annotations

from ipujax.lowering.poplin.product_plan import Plan
from ipujax.runtime.graph import Graph, UnmetBound


def record_unmet_bound(graph: Graph, plan: Plan, available_memory_proportion: float | None, name: str) -> None:
    """Records a plan that exceeds its memory bound; a proportion of 0 asks for least memory and is no bound."""
    share = available_memory_proportion
    share = graph.target.available_memory_proportion if share is None else share
    bound_bytes = int(share * graph.target.bytes_per_tile)
    if share == 0 or plan.temp_bytes <= bound_bytes:
        return
    graph.notes.unmet_bounds.append(UnmetBound(name, bound_bytes, plan.temp_bytes, graph.origin))
