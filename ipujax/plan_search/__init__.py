"""`ipu.search`: the best plan of a step on a machine: data, shards, stages, micro-batches, schedule, memory.

step ──trace──▶ jaxpr ──accumulation──▶ micro-batch, update ──estimates──▶ plans in order ──compile──▶ `Search`, a table
"""

from typing import TYPE_CHECKING

from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.plan_search.search_plan import Plan as Plan
    from ipujax.plan_search.search_table import Search as Search, SearchRow as SearchRow
    from ipujax.plan_search.searching import search as search
else:
    __getattr__ = lazy_names(__name__)
