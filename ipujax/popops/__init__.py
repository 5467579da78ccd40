"""popops: operations on tensors, under PopLibs' names in snake_case.

    out = popops.add(graph, a, b, prog, "Add")
    popops.scaled_add_to(graph, weights, gradient, -0.01, prog)

Every function adds to `prog`; functions that return tensors create and map them, the others write to an operand.
Source: Poplar & PopLibs user guide, tutorial 2; names from popops.
"""

import sys

from ipujax.poplar.library import check_arguments as _check_arguments, registrar as _registrar
from ipujax.popops import expr as expr
from ipujax.popops.elementwise import (
    FUNCTIONS as _FUNCTIONS,
    Operation as _Operation,
    cast as cast,
    map as map,
    map_in_place as map_in_place,
    scaled_add_to as scaled_add_to,
    scaled_subtract_from as scaled_subtract_from,
)
from ipujax.popops.fills import (
    MASKED_LABEL_CODE as MASKED_LABEL_CODE,
    encode_one_hot as encode_one_hot,
    fill as fill,
    iota as iota,
    normalise_image as normalise_image,
    pad as pad,
    zero as zero,
)
from ipujax.popops.gathers import (
    gather as gather,
    scatter as scatter,
    select_scalar_from_rows as select_scalar_from_rows,
    update_scalar_in_rows as update_scalar_in_rows,
)
from ipujax.popops.reductions import (
    SingleReduceOp as SingleReduceOp,
    all_true as all_true,
    has_nan as has_nan,
    has_nan_or_inf as has_nan_or_inf,
    reduce as reduce,
    reduce_many as reduce_many,
    reduce_with_output as reduce_with_output,
)
from ipujax.popops.slices import (
    create_sliceable_tensor as create_sliceable_tensor,
    dynamic_slice as dynamic_slice,
    dynamic_slice_with_output as dynamic_slice_with_output,
    dynamic_update as dynamic_update,
    multi_slice as multi_slice,
    multi_update as multi_update,
    multi_update_add as multi_update_add,
    multi_update_max as multi_update_max,
)
from ipujax.popops.sorts import (
    sort as sort,
    sort_in_place as sort_in_place,
    sort_key_value as sort_key_value,
    sort_key_value_in_place as sort_key_value_in_place,
    top_k as top_k,
    top_k_key_value as top_k_key_value,
)
from ipujax.public import public_names as _public_names

add_codelets = _registrar("popops")


def __getattr__(name: str) -> _Operation:
    """An elementwise operation by its name: `add`, `add_in_place`, `sqrt`… see `popops.elementwise`."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    raise AttributeError(f"popops has no operation {name!r}", name=name, obj=sys.modules[__name__])


__dir__ = _public_names(globals(), "expr", *_FUNCTIONS)
_check_arguments(globals())
