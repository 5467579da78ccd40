"""How the fields of a vertex group repeat their operands: elements that each stand for a row, and rows.

Input: a vertex group. Output: a `Repetition` for each field, by the axes that its access lacks and by the dimensions of
its view along which that has no stride.
Source: poplibs `popops/ElementWise.cpp`, patterns of broadcast operands: inner and outer factors.
Limits: the innermost repetition only; a view that is a list of elements has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from ipujax.runtime.graph.codelet import Repetition
from ipujax.runtime.graph.vertex_group import Access, VertexGroup
from ipujax.runtime.tensor import Affine


def repetitions(group: VertexGroup) -> tuple[Repetition | None, ...]:
    """Return the repetition of each field of a group; None for one that repeats nothing.

    Vertices that combine partial results have none: these are stored by blocks, which begin with a vector.
    """
    read = (a for a, field in zip(group.accesses, group.codelet.fields, strict=True) if field.is_read)
    if any(variable.monoid is not None for access in read for variable in access.tensor.variables()):
        return (None,) * len(group.accesses)
    index_axes = _index_axes(group)
    return tuple(_repetition_of(group, access, index_axes) for access in group.accesses)


class _Factor(NamedTuple):
    """A factor of the index space of vertices, as an operand has it.

    Args:
        size: number of indices.
        is_repeated: whether the operand has equal elements along it.
        missing_axis: the axis, if the operand has no dimension along it; else None.
    """

    size: int
    is_repeated: bool
    missing_axis: int | None


def _repetition_of(group: VertexGroup, access: Access, index_axes: list[int]) -> Repetition | None:
    """Return how an operand repeats by its innermost factors: elements in rows, or whole rows; None for neither."""
    factors = [factor for factor in _factors(group, access, index_axes) if factor.size > 1]
    if all(factor.is_repeated for factor in factors):
        return None  # a scalar, which is loaded once
    repeated = _leading(factors, is_repeated=True)
    row = prod(factor.size for factor in repeated)
    if row > 1:
        axes = {factor.missing_axis for factor in repeated}
        return Repetition("elements", row, () if None in axes else tuple(sorted(a for a in axes if a is not None)))
    distinct = _leading(factors, is_repeated=False)
    return Repetition("rows", prod(factor.size for factor in distinct)) if 0 < len(distinct) < len(factors) else None


def _leading(factors: list[_Factor], is_repeated: bool) -> list[_Factor]:
    """Return the first factors that are all repeated, or none of them."""
    other = next((n for n, factor in enumerate(factors) if factor.is_repeated != is_repeated), len(factors))
    return factors[:other]


def _factors(group: VertexGroup, access: Access, index_axes: list[int]) -> Iterator[_Factor]:
    """Yield the factors of an operand, innermost first."""
    node = access.tensor.node
    dims = {term.axis: number for number, dim in enumerate(access.dims) for term in dim.terms if term.unit == "element"}
    for axis in reversed(index_axes):
        extent = group.axes[axis].extent
        if axis not in dims:
            yield _Factor(extent, True, axis)
        elif isinstance(node, Affine) and access.tensor.shape[dims[axis]] == extent:
            yield from (_Factor(size, stride == 0, None) for size, stride in reversed(node.dims[dims[axis]]))
        else:
            yield _Factor(extent, False, None)


def _index_axes(group: VertexGroup) -> list[int]:
    """Return the axes that some dimension follows alone; others are the reach of windows."""
    dims = (dim for access in group.accesses for dim in access.dims)
    return sorted({dim.terms[0].axis for dim in dims if len(dim.terms) == 1 and not dim.is_squeezed})
