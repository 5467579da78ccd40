"""Variables, tile mappings, and tensors: views of variables, with variable and flat index of each element."""

from typing import TYPE_CHECKING

from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.runtime.tensor.affine import (
        Affine as Affine,
        Group as Group,
        canonical as canonical,
        regroup as regroup,
    )
    from ipujax.runtime.tensor.aliasing import leaves as leaves, surely_disjoint as surely_disjoint
    from ipujax.runtime.tensor.element_order import (
        ElementOrder as ElementOrder,
        Orders as Orders,
        reordered_node as reordered_node,
    )
    from ipujax.runtime.tensor.mapping import (
        MIN_BYTES_PER_TILE as MIN_BYTES_PER_TILE,
        VECTOR_BYTES as VECTOR_BYTES,
        Blocked as Blocked,
        Flat as Flat,
        TileMapping as TileMapping,
        blocked_mapping as blocked_mapping,
        check_mapping as check_mapping,
        even_cuts as even_cuts,
        flat_mapping as flat_mapping,
        frozen as frozen,
        linear as linear,
        on_one_tile as on_one_tile,
        owners as owners,
        pad_tiles as pad_tiles,
        renumber_tiles as renumber_tiles,
        shift_tiles as shift_tiles,
    )
    from ipujax.runtime.tensor.tensor import (
        Tensor as Tensor,
        append as append,
        concat as concat,
        read as read,
        substitute as substitute,
        write as write,
    )
    from ipujax.runtime.tensor.variable import (
        BACKWARD as BACKWARD,
        COLLECTIVES as COLLECTIVES,
        FORWARD as FORWARD,
        MAX_CALLERS as MAX_CALLERS,
        MERGED_WITH as MERGED_WITH,
        OF_CALLER as OF_CALLER,
        PARTS as PARTS,
        PLUMBING as PLUMBING,
        RECOMPUTED as RECOMPUTED,
        REMATERIALISED as REMATERIALISED,
        STREAMS as STREAMS,
        TRANSPOSED as TRANSPOSED,
        UPDATE as UPDATE,
        Origin as Origin,
        Variable as Variable,
        caller_name as caller_name,
        compose as compose,
        dtype_name as dtype_name,
        element_bytes as element_bytes,
        is_key_dtype as is_key_dtype,
        join_layers as join_layers,
        part_of_name as part_of_name,
        readable_name as readable_name,
        visible_layer as visible_layer,
        wide_dtype as wide_dtype,
        without_transformations as without_transformations,
    )
    from ipujax.runtime.tensor.view import (
        Concat as Concat,
        Indexed as Indexed,
        Node as Node,
        Reshaped as Reshaped,
        concat_nodes as concat_nodes,
        elements as elements,
        freeze as freeze,
    )
else:
    __getattr__ = lazy_names(__name__)
