"""Reports plans that need more of a tile's memory than the available proportion."""

from __future__ import annotations

from ipujax.lowering.poplin.product_plan import Plan
from ipujax.runtime.graph import Graph, UnmetBound
from ipujax.runtime.logs import Log

_LOG = Log("poplin")


def report_unmet_bound(graph: Graph, plan: Plan, available_memory_proportion: float | None, name: str) -> None:
    """Logs a plan that could not meet its bound, and keeps it for the profile; a bound of 0 only asks for little.

    Args:
        graph: what the operation is added to.
        plan: its plan.
        available_memory_proportion: that was asked for, default the target's.
        name: debug name of the operation.
    """
    share = available_memory_proportion
    share = graph.target.available_memory_proportion if share is None else share
    bound_bytes = int(share * graph.target.bytes_per_tile)
    if share == 0 or plan.temp_bytes <= bound_bytes:
        return
    unmet = UnmetBound(name, bound_bytes, plan.temp_bytes, graph.origin)
    graph.unmet_bounds.append(unmet)
    _LOG.warning("%s (%s)", unmet, graph.origin)
