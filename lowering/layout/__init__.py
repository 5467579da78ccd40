"""Tile mappings and memory orders: candidates, their costs, the choice, and the mapping of variables."""

from ipujax.lowering.layout.digits import view_digits as view_digits
from ipujax.lowering.layout.grids import (
    Count as Count,
    Grids as Grids,
    ceil_div as ceil_div,
    cut_again as cut_again,
    split_candidates as split_candidates,
    total_elements as total_elements,
)
from ipujax.lowering.layout.in_place import must_be_set_aside as must_be_set_aside, overwrite as overwrite
from ipujax.lowering.layout.mapping import (
    check_may_place as check_may_place,
    layout_like as layout_like,
    linear_mapping as linear_mapping,
    map_alike as map_alike,
    map_by_plan as map_by_plan,
    map_linearly as map_linearly,
    mapping_like as mapping_like,
)
from ipujax.lowering.layout.memory_order import (
    GROUP_CHANNELS as GROUP_CHANNELS,
    MemoryOrder as MemoryOrder,
    add_like as add_like,
    map_like as map_like,
    memory_order as memory_order,
    variable_like as variable_like,
)
from ipujax.lowering.layout.neighbours import (
    SharedWindow as SharedWindow,
    neighbour_mappings as neighbour_mappings,
    shared_windows as shared_windows,
)
from ipujax.lowering.layout.trial import (
    Operand as Operand,
    choose_cheapest as choose_cheapest,
    choose_cheapest_alone as choose_cheapest_alone,
    weighted_cost as weighted_cost,
    weighted_cost_with_data as weighted_cost_with_data,
)
