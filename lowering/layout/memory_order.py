"""Memory orders: the order in which a variable stores the elements of a view, and new variables in such an order.

A view may have the dimensions of its variable in another order (a transposed matrix), and join dimensions that are
not adjacent in memory (columns stored in groups, as PopLibs stores channels). Contiguous elements move between
tiles in one piece, so operations work on the dimensions of the variable where they can.

Source of groups: poplibs `lib/poplin/ConvUtilInternal.cpp`, activations as [G1][C1][N]...[G2][C2].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ipujax.lowering.layout.mapping import layout_like, linear_mapping, map_alike, mapping_like
from ipujax.runtime.cache import remembered_small
from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import Blocked, Group, Tensor, TileMapping, blocked_mapping, frozen

# The input channels of an AMP block of halves (`poplin.cycles.amp_block`), assumed for other types: groups of 8 floats
# gave a GPT block 15 % more exchange code, and a VAE and an MLP a quarter to a third less.
GROUP_CHANNELS = 16


@dataclass(frozen=True, slots=True)
class MemoryOrder:
    """Dimensions of a view, cut finer, in the order of a variable.

    A dimension of the view with several parts, as channels in groups, is several dimensions of the variable.
    """

    sizes: tuple[tuple[int, ...], ...]  # for each dimension of the view the sizes of its parts, outermost first
    order: tuple[int, ...]  # number of the finer dimension that is the variable's first, second, …

    @staticmethod
    def own(shape: Sequence[int]) -> MemoryOrder:
        """Order of a variable whose view is the variable itself."""
        return MemoryOrder(tuple((n,) for n in shape), tuple(range(len(shape))))

    @staticmethod
    def with_channels(shape: Sequence[int], dim: int) -> MemoryOrder:
        """Order of a view whose dimension `dim` are channels: in groups, if there are several whole groups.

        The groups are at the position of the channels, or before the preceding dimension if channels are last; the
        channels of a group are innermost.
        """
        if len(shape) < 2 or shape[dim] % GROUP_CHANNELS or shape[dim] <= GROUP_CHANNELS:
            return MemoryOrder.own(shape)
        # The dimension is two in memory, groups and the channels of one: dimensions behind it have a number more.
        sizes = tuple((n // GROUP_CHANNELS, GROUP_CHANNELS) if d == dim else (n,) for d, n in enumerate(shape))
        other_dims = [d + (d > dim) for d in range(len(shape)) if d != dim]
        group_position = min(dim, len(shape) - 2)
        return MemoryOrder(sizes, (*other_dims[:group_position], dim, *other_dims[group_position:], dim + 1))

    @staticmethod
    def for_argument(shape: Sequence[int], in_groups: bool) -> MemoryOrder:
        return MemoryOrder.with_channels(shape, len(shape) - 1) if in_groups else MemoryOrder.own(shape)

    def add_variable(self, graph: Graph, dtype: Any, name: str) -> Tensor:
        """Adds a variable of this order and returns it in the shape of the view."""
        return self.of_view(graph.add_variable(self.variable_shape, dtype, name))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(row) for row in self.sizes)

    @property
    def variable_shape(self) -> tuple[int, ...]:
        finer = self._finer
        return tuple(finer[d] for d in self.order)

    @property
    def view_dims(self) -> list[int]:
        """Dimension of the view that each dimension of the variable is part of."""
        view_dim = [d for d, row in enumerate(self.sizes) for _ in row]
        return [view_dim[d] for d in self.order]

    @property
    def inner_dims(self) -> list[int]:
        """Dimensions of the variable that are inner parts of one of the view, as the channels of a group."""
        is_inner = [number > 0 for row in self.sizes for number in range(len(row))]
        return [position for position, d in enumerate(self.order) if is_inner[d]]

    @property
    def is_own(self) -> bool:
        """True if the variable stores the dimensions in the order of the view."""
        return self.order == tuple(range(len(self.order)))

    @property
    def _finer(self) -> tuple[int, ...]:
        return tuple(n for row in self.sizes for n in row)

    def of_variable(self, view: Tensor) -> Tensor:
        """Tensor with the dimensions of the variable, from one with the view's shape."""
        return view if self == MemoryOrder.own(view.shape) else view.reshape(self._finer).transpose(self.order)

    def of_view(self, variable: Tensor) -> Tensor:
        """Tensor with the view's shape, from one with the dimensions of the variable."""
        if self == MemoryOrder.own(variable.shape):
            return variable
        # Argsort of a permutation is its inverse.
        back = tuple(int(d) for d in np.argsort(self.order))
        return variable.transpose(back).reshape(self.shape)

    def can_cut(self, view: Tensor) -> bool:
        """True if `of_variable` of this tensor stays affine."""
        if view.shape != self.shape:  # a dimension that is cut finer has another size
            return False
        return view.affine is None or view.reshape(self._finer).affine is not None

    def without(self, dims: Sequence[int]) -> MemoryOrder:
        """Order of the view without some of its dimensions."""
        view_dim = [d for d, row in enumerate(self.sizes) for _ in row]
        remaining = [d for d in self.order if view_dim[d] not in dims]
        sizes = tuple(row for d, row in enumerate(self.sizes) if d not in dims)
        return MemoryOrder(sizes, tuple(sorted(remaining).index(d) for d in remaining))

    def with_shape(self, shape: Sequence[int]) -> MemoryOrder:
        """Order of a view with other sizes along dimensions that are not cut finer."""
        sizes = tuple(row if len(row) > 1 else (n,) for n, row in zip(shape, self.sizes, strict=True))
        return MemoryOrder(sizes, self.order)

    def behind(self, slots: int) -> MemoryOrder:
        """Order of a stack of such views, one in each slot of the outermost dimension."""
        return MemoryOrder(((slots,), *self.sizes), (0, *(d + 1 for d in self.order)))

    def mapping(self, cuts: Sequence[np.ndarray], tile: np.ndarray) -> Blocked:
        """Mapping of a variable by blocks of the view, each on one tile."""
        # Only the outermost part of a dimension that is cut finer can be cut: a tile has the others in full.
        finer: list[np.ndarray] = []
        for cut, (_, *inner) in zip(cuts, self.sizes, strict=True):
            finer += [frozen(cut // prod(inner), np.int64), *(frozen([0, n], np.int64) for n in inner)]
        tile = tile.reshape([len(cut) - 1 for cut in finer]).transpose(self.order)
        return blocked_mapping([finer[d] for d in self.order], frozen(tile, np.int32))


def memory_order(tensor: Tensor) -> MemoryOrder | None:
    """Order in which the dimensions of a view are in memory; None unless it has each element of its variable once."""
    if tensor.is_whole_variable:
        return MemoryOrder.own(tensor.shape)
    affine = tensor.affine
    if affine is None or tensor.size != affine.variable.size:
        return None
    return _order_by_strides(affine.dims, affine.variable.size) if affine.offset == 0 else None


@remembered_small
def _order_by_strides(dims: Sequence[Group], size: int) -> MemoryOrder | None:
    """Order in memory of a view of `size` elements, its dimensions by falling stride; None if they leave gaps.

    `dims` has the (size, stride) pieces of each dimension, none for a dimension of size 1.
    """
    # A dimension of size 1 has no piece; the longest stride puts it outermost.
    rows = [group or ((1, size),) for group in dims]
    finer = [subdim for row in rows for subdim in row]
    order = tuple(sorted(range(len(finer)), key=lambda d: -finer[d][1]))
    inner = 1  # elements inside of the dimension, which is its stride if there are no gaps
    for d in reversed(order):
        count, stride = finer[d]
        if count > 1 and stride != inner:
            return None
        inner *= count
    return MemoryOrder(tuple(tuple(n for n, _ in row) for row in rows), order)


def variable_like(graph: Graph, tensor: Tensor, name: str) -> Tensor:
    """Adds a variable of the dtype, memory order and mapping of a tensor; unmapped where no simple mapping fits."""
    return _add_variable_like(graph, tensor, name, tensor.dtype, fallback=None)


def add_like(graph: Graph, tensor: Tensor, name: str, dtype: Any = None) -> Tensor:
    """Adds a variable with the shape, memory order and mapping of a mapped tensor; mapped linearly where no simple
    mapping fits.
    """
    dtype = tensor.dtype if dtype is None else dtype
    return _add_variable_like(graph, tensor, name, dtype, fallback=linear_mapping(graph, tensor.size, dtype))


def _add_variable_like(graph: Graph, tensor: Tensor, name: str, dtype: Any, *, fallback: TileMapping | None) -> Tensor:
    """Adds a variable that stores elements in the order and on the tiles of a tensor; by `fallback` if none fits."""
    order = memory_order(tensor) or MemoryOrder.own(tensor.shape)
    in_order = order.of_variable(tensor)
    shape, mapping = layout_like(graph, in_order) or (in_order.shape, fallback)
    new = graph.add_variable(shape, dtype, name, mapping)
    return order.of_view(new.reshape(in_order.shape))


def map_like(graph: Graph, tensor: Tensor, other: Tensor) -> None:
    """Maps the unmapped variables of a tensor as another of its shape is mapped where possible, else linearly."""
    if not graph.is_mapped(tensor):
        order = memory_order(other) or MemoryOrder.own(other.shape)
        map_alike(graph, order.of_variable(tensor), mapping_like(graph, order.of_variable(other)))
