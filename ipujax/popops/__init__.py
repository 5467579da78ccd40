"""popops: operations on tensors, under PopLibs' names in snake_case.

    out = popops.add(graph, a, b, prog, "Add")
    popops.scaled_add_to(graph, weights, gradient, -0.01, prog)

Every function adds steps to `prog`; those that return tensors make them and place them, the others write to an operand.
Source: Poplar & PopLibs user guide, tutorial 2; names from popops.
"""

import sys

from ipujax.poplar.library import registrar as _registrar
from ipujax.popops import expr as expr
from ipujax.popops.elementwise import FUNCTIONS as _FUNCTIONS
from ipujax.popops.elementwise import Operation as _Operation
from ipujax.popops.elementwise import cast as cast
from ipujax.popops.elementwise import map as map
from ipujax.popops.elementwise import map_in_place as map_in_place
from ipujax.popops.fills import MASKED_LABEL_CODE as MASKED_LABEL_CODE
from ipujax.popops.fills import encode_one_hot as encode_one_hot
from ipujax.popops.fills import fill as fill
from ipujax.popops.fills import iota as iota
from ipujax.popops.fills import normalise_image as normalise_image
from ipujax.popops.fills import pad as pad
from ipujax.popops.fills import zero as zero
from ipujax.popops.gathers import gather as gather
from ipujax.popops.gathers import scatter as scatter
from ipujax.popops.gathers import select_scalar_from_rows as select_scalar_from_rows
from ipujax.popops.gathers import update_scalar_in_rows as update_scalar_in_rows
from ipujax.popops.reductions import SingleReduceOp as SingleReduceOp
from ipujax.popops.reductions import all_true as all_true
from ipujax.popops.reductions import has_nan as has_nan
from ipujax.popops.reductions import has_nan_or_inf as has_nan_or_inf
from ipujax.popops.reductions import reduce as reduce
from ipujax.popops.reductions import reduce_many as reduce_many
from ipujax.popops.reductions import reduce_with_output as reduce_with_output
from ipujax.popops.scaled import scaled_add_to as scaled_add_to
from ipujax.popops.scaled import scaled_subtract_from as scaled_subtract_from
from ipujax.popops.slices import create_sliceable_tensor as create_sliceable_tensor
from ipujax.popops.slices import dynamic_slice as dynamic_slice
from ipujax.popops.slices import dynamic_slice_with_output as dynamic_slice_with_output
from ipujax.popops.slices import dynamic_update as dynamic_update
from ipujax.popops.slices import multi_slice as multi_slice
from ipujax.popops.slices import multi_update as multi_update
from ipujax.popops.slices import multi_update_add as multi_update_add
from ipujax.popops.slices import multi_update_max as multi_update_max
from ipujax.popops.sorts import sort as sort
from ipujax.popops.sorts import sort_in_place as sort_in_place
from ipujax.popops.sorts import sort_key_value as sort_key_value
from ipujax.popops.sorts import sort_key_value_in_place as sort_key_value_in_place
from ipujax.popops.sorts import top_k as top_k
from ipujax.popops.sorts import top_k_key_value as top_k_key_value
from ipujax.public import public_names as _public_names

add_codelets = _registrar("popops")


def __getattr__(name: str) -> _Operation:
    """An elementwise operation by its name: `add`, `add_in_place`, `sqrt`… see `popops.elementwise`."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    raise AttributeError(f"popops has no operation {name!r}", name=name, obj=sys.modules[__name__])


__dir__ = _public_names(globals(), "expr", *_FUNCTIONS)
