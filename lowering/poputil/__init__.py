"""Helpers to place tensors on tiles."""

from ipujax.lowering.poputil.mapping import layout_like as layout_like
from ipujax.lowering.poputil.mapping import linear_mapping as linear_mapping
from ipujax.lowering.poputil.mapping import map_by_plan as map_by_plan
from ipujax.lowering.poputil.mapping import map_linearly as map_linearly
from ipujax.lowering.poputil.mapping import mapping_like as mapping_like
from ipujax.lowering.poputil.mapping import tile_balance as tile_balance
from ipujax.lowering.poputil.mapping import variable_dims as variable_dims
