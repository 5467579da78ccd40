"""Lowering rules: one for each JAX primitive, and the walk over equations that applies them."""

from ipujax.lowering.rules.arrays.constant_indices import take_rows as take_rows, take_rows_p as take_rows_p
from ipujax.lowering.rules.base.context import LastReads as LastReads
from ipujax.lowering.rules.base.fallback import check_is_array as check_is_array
from ipujax.lowering.rules.base.probes import ProbedEquation as ProbedEquation, Probes as Probes
from ipujax.lowering.rules.equations import Lowering as Lowering
from ipujax.lowering.rules.flow.codelet_calls import codelet_call_p as codelet_call_p
from ipujax.lowering.rules.flow.collectives import reduce_across_ipus as reduce_across_ipus
from ipujax.lowering.rules.table import RULES as RULES
from ipujax.lowering.rules.tiles.tile_primitives import (
    cycle_count_p as cycle_count_p,
    map_rows as map_rows,
    tile_barrier_p as tile_barrier_p,
    tile_put_p as tile_put_p,
)
from ipujax.lowering.rules.tiles.tile_rules import TILE_PRIMITIVES as TILE_PRIMITIVES
