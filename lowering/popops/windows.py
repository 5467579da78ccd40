"""Reductions over sliding windows, and the gradient of a maximum over windows (pooling and its backward pass).

The results are cut in boxes along every dimension; a box reads the hull of its windows, halo included, and what lies
outside of the tensor is padding that the codelet adds. The gradient is cut along dimensions without windows only.

Source of the costs: poplibs `popnn` pooling is a reduction of window elements a result, charged as a strided reduction
(reference machine.md §1.3); that it reaches that rate is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import numpy as np

from ipujax.lowering.popops.blocks import along, mapped_variable, place, placed_axes, tile_grid, whole_axis
from ipujax.lowering.popops.elementwise_cycles import total_elements
from ipujax.lowering.popops.reduce_cycles import reduce_cycles
from ipujax.lowering.poputil.mapping import map_linearly
from ipujax.runtime.codelet import BlockShapes, Codelet, Field
from ipujax.runtime.graph import Graph
from ipujax.runtime.program import Execute
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import dtype_name, element_bytes
from ipujax.runtime.vertices import Access, Axis, Dim, Term, VertexGroup

Pads = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Windows:
    """The geometry of sliding windows, one entry for each dimension.

    Args:
        sizes: elements of a window.
        strides: distance of neighbouring windows.
        padding: `(low, high)` elements put around the tensor, or taken away where negative.
        base_dilation: distance of neighbouring elements of the tensor, as windows see it.
        window_dilation: distance of neighbouring elements of a window.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    base_dilation: tuple[int, ...]
    window_dilation: tuple[int, ...]

    def result_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Number of windows in each dimension of a tensor of `shape`."""
        sizes = []
        for d, n in enumerate(shape):
            padded = max(0, (n - 1) * self.base_dilation[d] + 1 if n else 0) + sum(self.padding[d])
            reach = (self.sizes[d] - 1) * self.window_dilation[d] + 1
            sizes.append(max(0, (padded - reach) // self.strides[d] + 1))
        return tuple(sizes)

    def is_plain(self, d: int) -> bool:
        """Whether dimension `d` has windows of one element, each at its own place."""
        return (self.sizes[d], self.strides[d], self.base_dilation[d], self.padding[d]) == (1, 1, 1, (0, 0))


# What a window reduces by: the function of `lax`'s reduce_window family with keyword geometry, and its monoid.
WindowReducer = Callable[..., jax.Array]


def reduce_window(
    graph: Graph,
    operands: Sequence[Tensor],
    windows: Windows,
    monoid: str,
    reducer: WindowReducer,
    prog: ProgramSequence,
    name: str,
) -> Tensor:
    """Reduces every window of a tensor to one element.

    Args:
        graph: graph to add to.
        operands: tensors of one shape with at least one element, windowed alike.
        windows: geometry; every result must exist.
        monoid: "max", "min", "add" or "mul", for the cost.
        reducer: called with the blocks and the geometry as `Windows` of that block; hashable.
        prog: program the compute set is added to.
        name: debug name.

    Returns:
        A new tensor of `windows.result_shape(shape)`, dtype of the last operand.
    """
    x = operands[0]
    for tensor in operands:
        map_linearly(graph, tensor)
    shape = windows.result_shape(x.shape)
    rank = len(shape)
    plain = [d for d in range(rank) if windows.is_plain(d)]
    order = plain + [d for d in range(rank) if d not in plain]
    halo = prod(min(n, size) for n, size in zip(x.shape, windows.strides, strict=True))
    follow = [d if d in plain else None for d in range(rank)]
    placement = place(graph, shape, order, element_bytes(x.dtype) * max(1, halo), [(x, follow)])
    dtype = operands[-1].dtype
    out = mapped_variable(graph, shape, dtype, name, range(rank), placement)
    windowed = [d for d in range(rank) if windows.sizes[d] > 1]
    axes = placed_axes(placement) + [whole_axis(f"window{d}", windows.sizes[d]) for d in windowed]
    dims = tuple(_window_dim(windows, d, rank + windowed.index(d) if d in windowed else None) for d in range(rank))
    accesses = (*(Access(tensor, dims, _zero(tensor.dtype)) for tensor in operands), along(out, range(rank)))
    codelet = _codelet(tuple(t.dtype for t in operands), windows, monoid, reducer)
    tile = tile_grid(placement, len(windowed))
    compute_set = graph.add_compute_set(name)
    graph.add_vertices(compute_set, VertexGroup(codelet, tuple(axes), accesses, tile, origin=graph.origin))
    prog.add(Execute(compute_set))
    return out


def _zero(dtype: Any) -> np.ndarray:
    """A fill that no codelet sees, for they pad by themselves."""
    return np.zeros((), dtype)


def _window_dim(windows: Windows, d: int, window_axis: int | None) -> Dim:
    """Index of a window's elements: result · stride + element · dilation − padding, in units of the dilated tensor."""
    terms = [Term(d, windows.strides[d])]
    if window_axis is not None:
        terms.append(Term(window_axis, windows.window_dilation[d]))
    return Dim(tuple(terms), -windows.padding[d][0], windows.base_dilation[d])


@lru_cache(maxsize=1024)
def _codelet(dtypes: tuple[Any, ...], windows: Windows, monoid: str, reducer: WindowReducer) -> Codelet:
    def compute(*blocks: jax.Array, pads: Sequence[Pads]) -> jax.Array:
        inner = Windows(windows.sizes, windows.strides, tuple(pads[0]), windows.base_dilation, windows.window_dilation)
        return reducer(*blocks, inner)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        depth = np.asarray(prod(windows.sizes) * len(dtypes), np.int64)
        return reduce_cycles(monoid, dtypes[-1], total_elements(shapes[-1]), depth, target)

    fields = [Field(f"in{n}", "in", dtype) for n, dtype in enumerate(dtypes)]
    title = f"popnn::{monoid.title()}Pooling<{dtype_name(dtypes[-1])}>"
    return Codelet(title, (*fields, Field("out", "out", dtypes[-1])), compute, cycles, 48, 900, takes=("pads",))


def select_and_scatter_add(
    graph: Graph,
    source: Tensor,
    x: Tensor,
    windows: Windows,
    scatter: Callable[..., jax.Array],
    prog: ProgramSequence,
    name: str,
) -> Tensor:
    """Adds each element of `source` to the place of `x` that its window selects.

    Args:
        graph: graph to add to.
        source: one element for each window.
        x: tensor the windows are of.
        windows: geometry without dilations.
        scatter: called with blocks of `source` and `x`, hashable; computes their result.
        prog: program the compute set is added to.
        name: debug name.

    Returns:
        A new tensor like `x`.
    """
    for tensor in (x, source):
        map_linearly(graph, tensor)
    rank = x.ndim
    plain = [d for d in range(rank) if windows.is_plain(d)]
    windowed = [d for d in range(rank) if d not in plain]
    follow = [d if d in plain else None for d in range(rank)]
    # Only plain dimensions are cut: a point of the index space is a whole image of one batch element and channel.
    placement = place(graph, x.shape, plain, 3 * element_bytes(x.dtype), [(x, follow), (source, follow)])
    out = mapped_variable(graph, x.shape, x.dtype, name, range(rank), placement)
    axes: list[Axis] = placed_axes(placement) + [whole_axis(f"window{d}", source.shape[d]) for d in windowed]
    source_dims = [rank + windowed.index(d) if d in windowed else d for d in range(rank)]
    accesses = (along(source, source_dims), along(x, range(rank)), along(out, range(rank)))
    codelet = _scatter_codelet(x.dtype, windows, scatter)
    compute_set = graph.add_compute_set(name)
    tile = tile_grid(placement, len(windowed))
    graph.add_vertices(compute_set, VertexGroup(codelet, tuple(axes), accesses, tile, origin=graph.origin))
    prog.add(Execute(compute_set))
    return out


@lru_cache(maxsize=1024)
def _scatter_codelet(dtype: Any, windows: Windows, scatter: Callable[..., jax.Array]) -> Codelet:
    def compute(source: jax.Array, x: jax.Array) -> jax.Array:
        return scatter(source, x, windows)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        # Comparing the elements of every window, then clearing and adding: two more passes over results (assumed).
        compare = reduce_cycles("max", dtype, total_elements(shapes[0]), np.asarray(prod(windows.sizes)), target)
        return compare + reduce_cycles("add", dtype, total_elements(shapes[2]), np.asarray(2), target)

    fields = (Field("source", "in", dtype), Field("x", "in", dtype), Field("out", "out", dtype))
    title = f"popnn::MaxPoolingGrad<{dtype_name(dtype)}>"
    return Codelet(title, fields, compute, cycles, state_bytes=48, code_bytes=900)


@lru_cache(maxsize=64)
def primitive_reducer(primitive: Any, **params: Any) -> WindowReducer:
    """The reducer that calls a primitive of the reduce_window family, with parameters besides the geometry."""

    def reducer(*arguments: Any) -> jax.Array:
        *blocks, windows = arguments
        return primitive.bind(
            *blocks,
            window_dimensions=windows.sizes,
            window_strides=windows.strides,
            padding=windows.padding,
            base_dilation=windows.base_dilation,
            window_dilation=windows.window_dilation,
            **params,
        )

    return reducer


@lru_cache(maxsize=64)
def primitive_scatter(primitive: Any, **params: Any) -> Callable[..., jax.Array]:
    """The scatter that calls a primitive like `select_and_scatter_add`, with parameters besides the geometry."""

    def scatter(source: jax.Array, x: jax.Array, windows: Windows) -> jax.Array:
        return primitive.bind(
            source,
            x,
            window_dimensions=windows.sizes,
            window_strides=windows.strides,
            padding=windows.padding,
            **params,
        )

    return scatter
