"""The order in which a variable keeps the elements of a view, and new variables that keep them alike.

A view may show the dimensions of its variable in another order (a transposed matrix), and join two of them that do not
lie next to each other (columns that are kept in groups, as PopLibs keeps channels). Tiles exchange what lies in one
piece at once, so operations work on the dimensions of the variable where they can.

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
    """The dimensions of a view, cut finer, in the order of a variable.

    Args:
        sizes: of each dimension of the view the sizes it is cut in, outermost first.
        order: the number of the finer dimension that is the variable's first, second, ….
    """

    sizes: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    @staticmethod
    def own(shape: Sequence[int]) -> MemoryOrder:
        """That of a variable of a shape, seen as it is."""
        return MemoryOrder(tuple((n,) for n in shape), tuple(range(len(shape))))

    @staticmethod
    def with_channels(shape: Sequence[int], dim: int) -> MemoryOrder:
        """The order for a view whose dimension `dim` are channels: in groups, if there are several whole ones.

        The groups are where the channels are, or before the dimension ahead of these if they are the last; what is in a
        group is innermost.
        """
        if len(shape) < 2 or shape[dim] % GROUP_CHANNELS or shape[dim] <= GROUP_CHANNELS:
            return MemoryOrder.own(shape)
        sizes = tuple((n // GROUP_CHANNELS, GROUP_CHANNELS) if d == dim else (n,) for d, n in enumerate(shape))
        rest = [d + (d > dim) for d in range(len(shape)) if d != dim]
        at = min(dim, len(shape) - 2)
        return MemoryOrder(sizes, (*rest[:at], dim, *rest[at:], dim + 1))

    @staticmethod
    def for_argument(shape: Sequence[int], in_groups: bool) -> MemoryOrder:
        """The order for an argument whose columns are in groups, or are not."""
        return MemoryOrder.with_channels(shape, len(shape) - 1) if in_groups else MemoryOrder.own(shape)

    def add_variable(self, graph: Graph, dtype: Any, name: str) -> Tensor:
        """Adds a variable of this order, in the shape of the view."""
        return self.of_view(graph.add_variable(self.variable_shape, dtype, name))

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the view."""
        return tuple(prod(row) for row in self.sizes)

    @property
    def variable_shape(self) -> tuple[int, ...]:
        """That of the variable."""
        finer = self._finer
        return tuple(finer[d] for d in self.order)

    @property
    def view_dims(self) -> list[int]:
        """For each dimension of the variable the dimension of the view that it is part of."""
        of = [d for d, row in enumerate(self.sizes) for _ in row]
        return [of[d] for d in self.order]

    @property
    def is_own(self) -> bool:
        """Whether the dimensions are in the order of the view."""
        return self.order == tuple(range(len(self.order)))

    @property
    def _finer(self) -> tuple[int, ...]:
        return tuple(n for row in self.sizes for n in row)

    def of_variable(self, view: Tensor) -> Tensor:
        """A tensor of the view's shape, with the dimensions of the variable."""
        return view if self == MemoryOrder.own(view.shape) else view.reshape(self._finer).transpose(self.order)

    def of_view(self, variable: Tensor) -> Tensor:
        """A tensor with the dimensions of the variable, in the view's shape."""
        if self == MemoryOrder.own(variable.shape):
            return variable
        back = tuple(int(d) for d in np.argsort(self.order))
        return variable.transpose(back).reshape(self.shape)

    def can_cut(self, view: Tensor) -> bool:
        """Whether `of_variable` of a tensor of the view's shape moves along its variables in even steps."""
        return view.affine is None or view.reshape(self._finer).affine is not None

    def without(self, dims: Sequence[int]) -> MemoryOrder:
        """The order of what is left when some dimensions of the view are taken away."""
        of = [d for d, row in enumerate(self.sizes) for _ in row]
        kept = [d for d in self.order if of[d] not in dims]
        sizes = tuple(row for d, row in enumerate(self.sizes) if d not in dims)
        return MemoryOrder(sizes, tuple(sorted(kept).index(d) for d in kept))

    def with_shape(self, shape: Sequence[int]) -> MemoryOrder:
        """The same order of a view of other sizes along dimensions that are not cut finer."""
        sizes = tuple(row if len(row) > 1 else (n,) for n, row in zip(shape, self.sizes, strict=True))
        return MemoryOrder(sizes, self.order)

    def behind(self, slots: int) -> MemoryOrder:
        """The order of a stack of such views, each in a slot of the outermost dimension."""
        return MemoryOrder(((slots,), *self.sizes), (0, *(d + 1 for d in self.order)))

    def mapping(self, cuts: Sequence[np.ndarray], tile: np.ndarray) -> Blocked:
        """The mapping of a variable by boxes of the view.

        Args:
            cuts: boundaries of each dimension of the view, multiples of what all its sizes but the first contain.
            tile: the tile of each box.
        """
        finer: list[np.ndarray] = []
        for cut, (_, *inner) in zip(cuts, self.sizes, strict=True):
            finer += [frozen(cut // prod(inner), np.int64), *(frozen([0, n], np.int64) for n in inner)]
        tile = tile.reshape([len(cut) - 1 for cut in finer]).transpose(self.order)
        return blocked_mapping([finer[d] for d in self.order], frozen(tile, np.int32))


def memory_order(tensor: Tensor) -> MemoryOrder | None:
    """How a view shows all of its variable, each element once; None where it does not."""
    if tensor.is_whole_variable:
        return MemoryOrder.own(tensor.shape)
    affine = tensor.affine
    if affine is None or tensor.size != affine.variable.size:
        return None
    return _by_strides(affine.dims, affine.variable.size) if affine.offset == 0 else None


@remembered_small
def _by_strides(dims: Sequence[Group], size: int) -> MemoryOrder | None:
    """The dimensions of a view of `size` elements, those of the longest stride outermost; None if they leave gaps."""
    rows = [group or ((1, size),) for group in dims]
    finer = [subdim for row in rows for subdim in row]
    order = tuple(sorted(range(len(finer)), key=lambda d: -finer[d][1]))
    inner = 1
    for d in reversed(order):
        count, stride = finer[d]
        if count > 1 and stride != inner:
            return None
        inner *= count
    return MemoryOrder(tuple(tuple(n for n, _ in row) for row in rows), order)


def variable_like(graph: Graph, tensor: Tensor, name: str, dtype: Any = None) -> Tensor:
    """A new tensor of a tensor's shape that keeps and lies as it does; unmapped where it lies in no simple form.

    Args:
        graph: graph to add to.
        tensor: what it is to be like.
        name: debug name.
        dtype: that of the tensor when None.
    """
    return _like(graph, tensor, name, dtype, None)


def add_like(graph: Graph, tensor: Tensor, name: str, dtype: Any = None) -> Tensor:
    """The same of a tensor of mapped variables; linear where they lie in no simple form."""
    dtype = tensor.dtype if dtype is None else dtype
    return _like(graph, tensor, name, dtype, linear_mapping(graph, tensor.size, dtype))


def _like(graph: Graph, tensor: Tensor, name: str, dtype: Any, otherwise: TileMapping | None) -> Tensor:
    held = memory_order(tensor) or MemoryOrder.own(tensor.shape)
    seen = held.of_variable(tensor)
    shape, mapping = layout_like(graph, seen) or (seen.shape, otherwise)
    new = graph.add_variable(shape, tensor.dtype if dtype is None else dtype, name, mapping)
    return held.of_view(new.reshape(seen.shape))


def map_like(graph: Graph, tensor: Tensor, other: Tensor) -> None:
    """Maps what is not mapped of a tensor as another of its shape lies, where that can be done, else linearly.

    Raises:
        GraphError: for a variable of a graph that leaves placing variables to its user.
    """
    if not graph.is_mapped(tensor):
        held = memory_order(other) or MemoryOrder.own(other.shape)
        map_alike(graph, held.of_variable(tensor), mapping_like(graph, held.of_variable(other)))
