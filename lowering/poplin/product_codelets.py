"""Codelets of matrix multiplications and convolutions, each a block of a JAX operation.

Computed unsplit a codelet is the very operation that `jax.jit` would run; its cycles come from the vertex kind of the
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.poplin.rearranged import rearrangement_of_whole_rows, slow_rearrangement
from ipujax.lowering.poplin.spec import ConvSpec, Dims
from ipujax.lowering.poplin.vertex_kinds import Block, VertexKind, block_cycles
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BlockShapes, Codelet, Field, SlowPath
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import dtype_name

# Assumed: size of one assembly codelet and of its vertex state with the pointers to its edges.
_CODE_BYTES = 1500
_STATE_BYTES = 48
_MULTIPLY_ADD = 2  # operations of one multiply-add
# Assumed: number of convolutions of replicas that XLA still compiles in little time.
_MAX_UNROLLED_REPLICAS = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """Dimensions of an operand of a codelet by kind; −1 for a kind that it lacks."""

    batch: int
    group: int
    channel: int
    field: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConvParams:
    """Parameters of `lax.conv_general_dilated` that a codelet needs, with the layout of its blocks."""

    dimension_numbers: lax.ConvDimensionNumbers  # those of operands without a group dimension
    lhs: Layout  # of the activations
    rhs: Layout  # of the weights: `batch` is their output channel, `channel` their input channel
    out: Layout
    groups_in_batch: bool  # whether groups divide the batch of the activations (`batch_group_count`)
    precision: Any  # argument of JAX


def _without_groups(array: jax.Array, group: int) -> jax.Array:
    """Joins the group dimension, if there is one, with the one it divides, which follows it."""
    if group < 0:
        return array
    shape = array.shape
    return array.reshape((*shape[:group], shape[group] * shape[group + 1], *shape[group + 2 :]))


def _with_groups(array: jax.Array, group: int, groups: int) -> jax.Array:
    """Inverse of `_without_groups`."""
    if group < 0:
        return array
    shape = array.shape
    return array.reshape((*shape[:group], groups, shape[group] // groups, *shape[group + 1 :]))


@remembered
def matmul_codelet(kind: VertexKind, spec: ConvSpec, out_dtype: Any, precision: Any) -> Codelet:
    """Codelet of the product of blocks [g, m, k] by [g, k, n], for vertices of a kind.

    Of `spec` only dtypes and rearranged operands matter, not the extents: a vertex has those of its blocks. `precision`
    is that of `lax.dot_general`.
    """

    def compute(a: jax.Array, b: jax.Array) -> jax.Array:
        if a.shape[0] == 1:  # XLA's fast path is the product without a batch dimension
            # As of `dot_general`: (contracted dimensions of each operand), (batch dimensions of each).
            dims: Any = (((1,), (0,)), ((), ()))
            return lax.dot_general(a[0], b[0], dims, precision=precision, preferred_element_type=out_dtype)[None]
        dims = (((2,), (1,)), ((0,), (0,)))
        return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=out_dtype)

    def extents_of(shapes: BlockShapes) -> Block:
        """Extents of a vertex's product as a convolution, from the shapes of both operands."""
        groups, rows, inner = shapes[0]
        columns = shapes[1][2]
        single = np.int64(1)
        return Dims(single, groups, columns, inner, (rows,), (single,))

    codelet = _product_codelet(kind, spec, out_dtype, ("a", "b"), compute, extents_of)
    # An array kept in other axes would need another dot product, with a transposition by XLA.
    own_axes = [(axis,) for axis in range(4)]  # g, m, k, n, each of one dimension
    return replace(codelet, with_axes=lambda sources: codelet if list(sources) == own_axes else None)


def _makes_xla_abort(lengths: Sequence[int], windows: Sequence[int], dilation: Sequence[int]) -> bool:
    """True if XLA may abort: a dilated input that is shorter than the window along a dimension.

    Its simplifier swaps operands into a window that does not fit (`Window dimensions do not match RHS shape`,
    jax 0.10.2). Padded before it, behind an optimization barrier, all run.
    """
    is_short = any(length < window for length, window in zip(lengths, windows, strict=True))
    return is_short and any(step > 1 and length > 1 for length, step in zip(lengths, dilation, strict=True))


@remembered
def convolution_codelet(kind: VertexKind, spec: ConvSpec, out_dtype: Any, params: ConvParams) -> Codelet:
    """Codelet of a convolution of blocks in the layouts of `params`, for vertices of a kind.

    The extents of `spec` do not matter: a vertex has those of its blocks. Its compute function takes `pads`, the
    elements that are missing before and after the block of each field where a window leaves the input.
    """

    def extents_of(shapes: BlockShapes) -> Block:
        """Extents of a vertex's convolution, from the shapes of its weights and its results."""
        _, weights, results = shapes
        groups = results[params.out.group] if params.out.group >= 0 else np.int64(1)  # −1: no such dimension
        return Dims(
            batch=results[params.out.batch],
            groups=groups,
            out_channels=results[params.out.channel],
            in_channels=weights[params.rhs.channel],
            field=tuple(results[d] for d in params.out.field),
            kernel=tuple(weights[d] for d in params.rhs.field),
        )

    compute = partial(_convolve_block, spec, out_dtype, params)
    return _product_codelet(kind, spec, out_dtype, ("x", "w"), compute, extents_of, takes=("pads",))


def _convolve_block(
    spec: ConvSpec,
    out_dtype: Any,
    params: ConvParams,
    x: jax.Array,
    w: jax.Array,
    *,
    pads: Sequence[Sequence[tuple[int, int]]],
) -> jax.Array:
    """JAX's convolution of a block, padded before it where XLA would abort.

    Args:
        spec: the strides and dilations.
        out_dtype: dtype of the results.
        params: positions of the dimensions of both blocks, and those of the convolution without a group dimension.
        x: block of the activations, as far as it is inside of the input.
        w: block of the weights.
        pads: zeros before and after each dimension of each operand; those of `x` come first, others are 0.
    """
    groups = x.shape[params.lhs.group] if params.lhs.group >= 0 else 1  # −1: no such dimension
    field_pads = [pads[0][d] for d in params.lhs.field]
    dilation = spec.lhs_dilation
    lengths = [x.shape[d] for d in params.lhs.field]
    windows = [w.shape[d] for d in params.rhs.field]
    if 0 in lengths or _makes_xla_abort(lengths, windows, dilation):
        dilation_of = dict(zip(params.lhs.field, dilation, strict=True))
        # Zeros before, after and between elements. The barrier keeps XLA from joining them to the convolution again.
        config = [(*pads[0][d], dilation_of.get(d, 1) - 1) for d in range(x.ndim)]
        x = lax.optimization_barrier(lax.pad(x, np.zeros((), x.dtype), config))
        field_pads = [(0, 0)] * len(field_pads)
        dilation = (1,) * len(dilation)
    convolve = partial(
        lax.conv_general_dilated,
        window_strides=spec.strides,
        padding=field_pads,
        lhs_dilation=dilation,
        rhs_dilation=spec.rhs_dilation,
        dimension_numbers=params.dimension_numbers,
        feature_group_count=1 if params.groups_in_batch else groups,
        batch_group_count=groups if params.groups_in_batch else 1,
        precision=params.precision,
        preferred_element_type=out_dtype,
    )
    operands = _without_groups(x, params.lhs.group), _without_groups(w, params.rhs.group)
    result = _unrolled_over_replicas(convolve)(*operands)
    return _with_groups(result, params.out.group, groups)


def _product_codelet(
    kind: VertexKind,
    spec: ConvSpec,
    out_dtype: Any,
    names: tuple[str, str],
    compute: Callable[..., jax.Array],
    extents_of: Callable[[BlockShapes], Block],
    takes: tuple[Literal["pads"], ...] = (),
) -> Codelet:
    """Codelet of a matrix product or a convolution.

    Args:
        kind: kind of vertex, which has the formula of the cycles.
        spec: the convolution.
        out_dtype: dtype of the results.
        names: names of the operands.
        compute: function of the blocks of both.
        extents_of: function from the block shapes of all fields to the extents of the vertex's convolution.
        takes: keywords of `compute` beside the blocks: "pads" for the zeros around the block of each operand.
    """

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        block = extents_of(shapes)
        # Copies of operands to the order in which the vertex reads them. Rows that are no whole vectors take longer,
        # see `slow_paths`.
        copying = rearrangement_of_whole_rows(kind, spec, block, target)
        return np.asanyarray(block_cycles(kind, spec, block, target) + copying)

    def slow_paths(shapes: BlockShapes, repetitions: object, target: Target) -> Sequence[SlowPath]:
        return slow_rearrangement(kind, spec, extents_of(shapes), target)

    def operations(shapes: BlockShapes) -> np.ndarray:
        """Multiply-adds of numbers: zeros between the elements of a dilated input are none."""
        # `_MULTIPLY_ADD` operations for each product of the extents.
        return np.asarray(_MULTIPLY_ADD * prod(extents_of(shapes)) // prod(spec.lhs_dilation))

    return Codelet(
        f"poplin::{kind.name}<{dtype_name(spec.lhs_dtype)},{dtype_name(out_dtype)}>",
        (*_operand_fields(kind, spec, *names), _result_field(kind, out_dtype)),
        compute,
        cycles,
        state_bytes=_STATE_BYTES,
        code_bytes=_CODE_BYTES,
        takes=takes,
        # A number counts at each point of the index space of the vertices' axes; a function gives those of one vertex.
        flops=_MULTIPLY_ADD if prod(spec.lhs_dilation) == 1 else operations,
        is_product=True,
        language=kind.language,
        slow_paths=slow_paths,
    )


def _unrolled_over_replicas(convolve: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Returns `convolve` with a rule for `jax.vmap`, whose mapped dimension is that of replicas.

    Convolutions of a few replicas run one after the other, where both operands differ by replica.
    JAX's batching rule makes one convolution in groups, which XLA's CPU backend does three times slower (measured with
    the gradient of 3 x 3 x 16 x 32 weights for 8 replicas).
    """
    mapped = jax.custom_batching.custom_vmap(convolve)

    @mapped.def_vmap
    def rule(axis_size: int, in_batched: Sequence[bool], x: jax.Array, w: jax.Array) -> tuple[jax.Array, bool]:
        # `in_batched`: whether each operand has the mapped dimension, of `axis_size`. So has the result: True.
        if all(in_batched) and axis_size <= _MAX_UNROLLED_REPLICAS:
            return jnp.stack([convolve(x[n], w[n]) for n in range(axis_size)]), True
        return jax.vmap(convolve, [0 if batched else None for batched in in_batched])(x, w), True

    return mapped


def _operand_fields(kind: VertexKind, spec: ConvSpec, *names: str) -> Iterator[Field]:
    """Fields of operands; the AMP reads a list of vectors, one a group of channels (poplibs ConvPartial1x1Out.cpp)."""
    has_halo = spec.rearranged is not None and spec.rearranged.has_halo
    for name, dtype, is_whole in zip(names, (spec.lhs_dtype, spec.rhs_dtype), (has_halo, False), strict=True):
        yield Field(name, "in", dtype, in_pieces=kind.uses_amp and not is_whole)


def _result_field(kind: VertexKind, dtype: Any) -> Field:
    """Field of results; the AMP accesses its partials 128 bits at a time (poplibs ConvPartial1x1Out.cpp)."""
    return Field("out", "out", dtype, interleaved=kind.uses_amp, in_pieces=kind.uses_amp)
