"""popops: operations on tensors, under PopLibs' names in snake_case.

    out = popops.add(graph, a, b, prog, "Add")
    popops.scaled_add_to(graph, weights, gradient, -0.01, prog)

Every function adds steps to `prog`; those that return tensors make them and place them, the others write to an operand.
Source: Poplar & PopLibs user guide, tutorial 2; names from popops.
"""

import sys

from ipujax.library import registrar
from ipujax.popops import expr as expr
from ipujax.popops.elementwise import FUNCTIONS as _FUNCTIONS
from ipujax.popops.elementwise import Operation as _Operation
from ipujax.popops.elementwise import map as map
from ipujax.popops.elementwise import map_in_place as map_in_place
from ipujax.popops.tensors import cast as cast
from ipujax.popops.tensors import dynamic_slice as dynamic_slice
from ipujax.popops.tensors import dynamic_update as dynamic_update
from ipujax.popops.tensors import encode_one_hot as encode_one_hot
from ipujax.popops.tensors import fill as fill
from ipujax.popops.tensors import iota as iota
from ipujax.popops.tensors import multi_slice as multi_slice
from ipujax.popops.tensors import multi_update as multi_update
from ipujax.popops.tensors import multi_update_add as multi_update_add
from ipujax.popops.tensors import reduce as reduce
from ipujax.popops.tensors import scaled_add_to as scaled_add_to
from ipujax.popops.tensors import scaled_subtract_from as scaled_subtract_from
from ipujax.popops.tensors import sort as sort
from ipujax.popops.tensors import sort_in_place as sort_in_place
from ipujax.popops.tensors import sort_key_value as sort_key_value
from ipujax.popops.tensors import top_k as top_k
from ipujax.popops.tensors import zero as zero

add_codelets = registrar("popops")


def __getattr__(name: str) -> _Operation:
    """An elementwise operation by its name: `add`, `add_in_place`, `sqrt`… see `popops.elementwise`."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    raise AttributeError(f"popops has no operation {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *_FUNCTIONS})
