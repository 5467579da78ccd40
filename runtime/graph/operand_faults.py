"""Faults of tensors that an operation gets: of another graph, or with elements that no tile has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import numpy as np

from ipujax.runtime.errors import GraphError
from ipujax.runtime.tensor import Tensor, Variable

_MOST_RANGES = 3  # in a message
_EVERY_ELEMENT = "a tile for each of its elements"


class Owner(Protocol):
    """A graph, as far as its tensors are concerned."""

    owner: object
    tile_noun: str

    def elements_without_tile(self, variable: Variable) -> np.ndarray: ...


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, dicts and records, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, each.name) for each in fields(value)])


def check_owned(graph: Owner, tensors: Iterable[Tensor], user: str) -> None:
    """Refuse a tensor of another graph.

    Args:
        graph: that the user adds to.
        tensors: that are read or written.
        user: what reads or writes them, for the message.

    Raises:
        GraphError: naming the tensor.
    """
    for tensor in tensors:
        foreign = [v for v in tensor.variables() if v.owner is not None and v.owner is not graph.owner]
        if foreign:
            raise GraphError(
                f"{user}: {tensor!r} belongs to another graph",
                expected="a tensor that was added to this graph, or to a view of it",
                got=f"{foreign[0]!r} added at {foreign[0].origin.line or 'no known line'}",
            )


@dataclass(frozen=True, slots=True)
class TileGap:
    """Elements of a variable or tensor that no tile has, as the parts of an error.

    Args:
        what: message.
        got: their number and ranges; None where they are all.
    """

    what: str
    got: str | None

    expected = _EVERY_ELEMENT
    hint = "graph.set_tile_mapping"


def tile_gap(graph: Owner, variable: Variable) -> TileGap:
    """Return the elements of a variable that no tile of a graph has."""
    return described_gap(graph, repr(variable), graph.elements_without_tile(variable), variable.size)


def described_gap(graph: Owner, name: str, elements: np.ndarray, size: int) -> TileGap:
    """Return a gap of some elements, int64[n] in rising order, of a value of `size` elements."""
    noun = graph.tile_noun
    if len(elements) == size:
        return TileGap(f"{name} is mapped to no {noun}", None)
    verb = "has" if len(elements) == 1 else "have"
    fault = f"{name} is mapped in part: {element_ranges(elements)} of it {verb} no {noun}"
    return TileGap(fault, f"{len(elements):,} of {size:,} elements without a tile")


def element_ranges(elements: np.ndarray) -> str:
    """Return flat numbers of elements as text, `elements 2 to 3, 7 and 2 more ranges`."""
    breaks = np.flatnonzero(np.diff(elements) != 1) + 1
    runs = [(int(run[0]), int(run[-1])) for run in np.split(elements, breaks)]
    texts = [f"{first}" if first == last else f"{first} to {last}" for first, last in runs[:_MOST_RANGES]]
    num_omitted = len(runs) - len(texts)
    rest = f" and {num_omitted} more range{'s' if num_omitted > 1 else ''}" if num_omitted else ""
    return f"element{'' if len(elements) == 1 else 's'} {', '.join(texts)}{rest}"
