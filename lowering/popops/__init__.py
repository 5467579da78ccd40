"""Operations on tensors: elementwise, reductions, slices, windows, sorting.

Arguments that most functions share: `builder` has the graph to which compute sets and copies are added, the program
that runs them, and their debug name; `target` is the machine of a cost. "Args" sections list the others.
"""

from ipujax.lowering.layout import total_elements as total_elements
from ipujax.lowering.layout.choose import choose as choose, source_of as source_of
from ipujax.lowering.layout.grid_cost import FieldUse as FieldUse, Work as Work, spans as spans
from ipujax.lowering.layout.place import (
    along as along,
    mapped_variable as mapped_variable,
    place_operand as place_operand,
    placed_axes as placed_axes,
    tile_grid as tile_grid,
    whole_axis as whole_axis,
)
from ipujax.lowering.popops.indexing.dynamic_slices import (
    dynamic_slice as dynamic_slice,
    dynamic_update_slice as dynamic_update_slice,
    dynamic_update_slice_in_place as dynamic_update_slice_in_place,
    is_sliced_in_place as is_sliced_in_place,
    map_for_slicing as map_for_slicing,
)
from ipujax.lowering.popops.indexing.gather import (
    GatherSpec as GatherSpec,
    Mode as Mode,
    fill_of as fill_of,
    frozen_fill as frozen_fill,
    has_few_lookups as has_few_lookups,
    signed as signed,
)
from ipujax.lowering.popops.indexing.loop_state import (
    advance as advance,
    advance_around as advance_around,
    assign as assign,
    moved_for_slicing as moved_for_slicing,
    new_counter as new_counter,
    new_stack as new_stack,
    new_state as new_state,
    push as push,
    push_to_all as push_to_all,
    set_aside as set_aside,
    slot_of as slot_of,
    slots_first as slots_first,
    slots_of as slots_of,
)
from ipujax.lowering.popops.indexing.scatter import (
    ScatterSpec as ScatterSpec,
    plan_in_steps as plan_in_steps,
    plan_scatter as plan_scatter,
)
from ipujax.lowering.popops.indexing.scatter_vertex import SCATTER_MONOIDS as SCATTER_MONOIDS, SCATTERS as SCATTERS
from ipujax.lowering.popops.indexing.slice_by_index import (
    look_up_slice as look_up_slice,
    write_slice as write_slice,
    write_slice_in_place as write_slice_in_place,
)
from ipujax.lowering.popops.indexing.table_order import (
    gather_in_memory_order as gather_in_memory_order,
    scatter_in_memory_order as scatter_in_memory_order,
)
from ipujax.lowering.popops.indexing.windows import (
    Windows as Windows,
    primitive_reducer as primitive_reducer,
    primitive_scatter as primitive_scatter,
    reduce_window as reduce_window,
    scatter_by_functions as scatter_by_functions,
)
from ipujax.lowering.popops.maps.constants import exact_value as exact_value, immediate_of as immediate_of
from ipujax.lowering.popops.maps.elementwise import kept_result as kept_result
from ipujax.lowering.popops.maps.rows import (
    CUMULATIVE as CUMULATIVE,
    RowFunction as RowFunction,
    cumulative as cumulative,
    each_row as each_row,
    reduce_by_function as reduce_by_function,
    sort as sort,
    top_k as top_k,
)
from ipujax.lowering.popops.reductions.partials import (
    longest_share as longest_share,
    reduce_partials as reduce_partials,
    stages as stages,
)
from ipujax.lowering.popops.vertices.add_vertices import add_vertices as add_vertices
from ipujax.lowering.popops.vertices.elementwise_cycles import OP_COSTS as OP_COSTS
from ipujax.lowering.popops.vertices.emulation import kind_of as kind_of
from ipujax.lowering.popops.vertices.kernel import (
    Op as Op,
    Reduction as Reduction,
    Step as Step,
    freeze as freeze,
    thawed as thawed,
)
from ipujax.lowering.popops.vertices.kernel_cycles import scalar_instructions as scalar_instructions
from ipujax.lowering.popops.vertices.reducers import MONOIDS as MONOIDS, neutral as neutral
