"""Random number library: operations on arrays of PRNG keys, key by key: bits, splits, folds, conversions.

Numbers are JAX's own: a vertex's results depend on its keys and on the index of its block in the result of a key, so
that they are the same for any partition. Computed unsplit it is the JAX primitive itself; a vertex of a part of a key's
result computes all of it and slices its part (so does the tile interpreter).

The cost is that of the machine's own generator, not of threefry arithmetic: poplibs `poprandCycleEstimators.cpp`
(reference machine.md §1.3), of which the uniform row has a slip; the vector loop is that of its neighbours (assumed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering import popops
from ipujax.lowering.layout import map_linearly
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Builder, Codelet, Field
from ipujax.runtime.target import Target, issue_round_cycles, store_cycles, whole_cycles
from ipujax.runtime.tensor import Blocked, Tensor, dtype_name, element_bytes

_SUPERVISOR_CYCLES = 4
_WORKER_CYCLES = 22
_VECTOR_CYCLES = 2  # beside its store; assumed: with it, normal numbers take 4, dropout 2

# From blocks of keys, and of operands by key, to one array or a list of arrays.
KeyFunction = Callable[..., Any]


def per_key(
    builder: Builder,
    fun: KeyFunction,
    title: str,
    operands: Sequence[Tensor],
    keys_rank: int,
    results: Sequence[tuple[tuple[int, ...], Any]],
    *,
    cut_results: bool = False,
) -> list[Tensor]:
    """Applies a function of random keys, as one that draws numbers, to arrays of keys; returns a new tensor a result.

    Args:
        builder: where to add it.
        fun: the function, hashable, of blocks of the operands.
        title: name of the codelet.
        operands: tensors whose first `keys_rank` dimensions are those of the array of keys, or of size 1 for what is
            common to keys along one; or scalars, common to all keys.
        keys_rank: number of dimensions of the array of keys; 0 for operands of one draw.
        results: shape and dtype of each result; its first `keys_rank` dimensions are the keys'.
        cut_results: whether the result of one key may be cut; there is a single result then.
    """
    shape, _ = results[0]
    order = range(len(shape) if cut_results else keys_rank)  # dimensions of the results that may be cut
    # Of an operand a block of the results reads the same keys, and other dimensions whole.
    key_spans = [popops.spans(x.shape, _dims_of_keys(x, keys_rank, shape)) for x in operands]
    dtypes = tuple(x.dtype for x in operands)
    codelet = _key_codelet(fun, title, dtypes, tuple(d for _, d in results), keys_rank, shape)
    read = [popops.FieldUse(s, popops.source_of(builder.graph, x)) for x, s in zip(operands, key_spans, strict=True)]
    written = [popops.FieldUse(popops.spans(shape, range(len(shape))))] * len(results)
    work = popops.Work(codelet, (*read, *written))

    placement = popops.choose(builder.graph, shape, order, work, operands)
    for tensor, tensor_spans in zip(operands, key_spans, strict=True):
        if tensor.ndim:
            popops.place_operand(builder.graph, tensor, tensor_spans, placement)
        map_linearly(builder.graph, tensor)  # a scalar
    return _add_vertices_on_keys(builder, codelet, operands, keys_rank, results, placement)


def _dims_of_keys(x: Tensor, keys_rank: int, shape: tuple[int, ...]) -> list[int | None]:
    """Dimension of the results, of `shape`, that each dimension of an operand follows; None for one that is not cut.

    What is common to several keys is not repeated: generators may draw from it once for all of them, as `unsafe_rbg`.
    """
    return [d if d < keys_rank and n == shape[d] else None for d, n in enumerate(x.shape)]


def _add_vertices_on_keys(
    builder: Builder,
    codelet: Codelet,
    operands: Sequence[Tensor],
    keys_rank: int,
    results: Sequence[tuple[tuple[int, ...], Any]],
    placement: Blocked,
) -> list[Tensor]:
    """Adds vertices that each compute a block of the results of entire keys; returns a new tensor for each result.

    Args:
        builder: where to add them.
        codelet: codelet of the function; the origin of a block tells it which part of a key's result that is.
        operands: tensors whose first dimensions are those of the array of keys, as of `per_key`.
        keys_rank: number of these dimensions.
        results: shape and dtype of each result; shapes are equal.
        placement: blocks of the results, and the tile of each.
    """
    shape = results[0][0]
    axes = popops.placed_axes(placement)
    accesses = []
    outs = []
    rank = len(shape)
    for number, x in enumerate(operands):
        numbers: list[int] = []  # axis of each dimension of the operand
        for d, followed in enumerate(_dims_of_keys(x, keys_rank, shape)):
            numbers.append(len(axes) if followed is None else followed)
            axes += [popops.whole_axis(f"in{number}_{d}", x.shape[d])] if followed is None else []
        accesses.append(popops.along(x, numbers))
    for out_shape, out_dtype in results:
        assert out_shape == shape, "results have equal shapes"
        outs.append(popops.mapped_variable(builder.graph, shape, out_dtype, builder.name, range(rank), placement))
        accesses.append(popops.along(outs[-1], range(rank)))
    tile = popops.tile_grid(placement, len(axes) - rank)
    # Only of these dimensions a block must know where it begins: it has the keys themselves.
    origins = [axis.name for axis in axes[keys_rank:rank]]
    popops.add_vertices(builder, codelet, axes, accesses, tile, origins)
    return outs


@remembered
def _key_codelet(
    fun: KeyFunction,
    title: str,
    dtypes: tuple[Any, ...],
    out_dtypes: tuple[Any, ...],
    keys_rank: int,
    shape: tuple[int, ...],
) -> Codelet:
    """Codelet of a function of random keys, of which a vertex computes a block of the results.

    Args:
        fun: the function.
        title: name of the codelet.
        dtypes: dtypes of the operands.
        out_dtypes: dtypes of the results.
        keys_rank: number of dimensions of the array of keys, which come first in operands and results.
        shape: shape of the whole results.
    """

    def compute(*blocks: jax.Array, origins: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...]) -> Any:
        result = fun(*blocks)
        out_shape, *_ = shapes  # of the blocks of all results, which are equal; it has no shapes of operands
        if out_shape[keys_rank:] == shape[keys_rank:]:
            return tuple(result) if isinstance(result, (list, tuple)) else result
        # A part of the result of each key: such a function has a single result, an array (see `per_key`). It has no
        # partial form: all of it is computed, and the block sliced out. `fun` has got the keys of the block alone, so
        # that nothing is sliced along the dimensions of keys; `origins` are those of the other dimensions.
        starts = [*([0] * keys_rank), *origins]
        return jax.lax.dynamic_slice(result, [jnp.asarray(s, np.int32) for s in starts], out_shape)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        *_, out_shape = shapes  # here of all fields, the operands first; results have one shape
        num_bytes = popops.total_elements(out_shape) * element_bytes(out_dtypes[-1]) * len(out_dtypes)
        vectors = -(-num_bytes // target.vector_width_bytes)
        # Workers share the vectors; where they are fewer than issue slots, the other slots are idle.
        slots = vectors * issue_round_cycles(target) / target.worker_contexts
        vector_cycles = _VECTOR_CYCLES + store_cycles(target.vector_width_bytes, target)
        workers = issue_round_cycles(target) * _WORKER_CYCLES
        return np.asanyarray(_SUPERVISOR_CYCLES + workers + whole_cycles(vector_cycles * slots))

    fields = [Field(f"in{n}", "in", dtype) for n, dtype in enumerate(dtypes)]
    fields += [Field(f"out{n}", "out", dtype) for n, dtype in enumerate(out_dtypes)]
    title = f"poprand::{title}<{dtype_name(out_dtypes[0])}>"
    # The keywords of `compute`: first index of the block in each dimension of the results behind the keys', and shapes.
    # Sizes of state and code are assumed.
    return Codelet(title, tuple(fields), compute, cycles, state_bytes=24, code_bytes=200, takes=("origins", "shapes"))
