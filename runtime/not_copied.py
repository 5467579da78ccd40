"""Copies of objects: refused by those that have an identity, allowed of mappings that nobody changes.

Two bases refuse. A `NotCopied` refuses every copy and every pickle: a copy would share half of its state with the
original. A `Shared` never changes, so a copy of it, and of an object that refers to it, is the object itself; pickles
are refused. Both name the remedy in one error. A `ReadOnlyMapping` can be copied and pickled, which Python's
`MappingProxyType` cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, NoReturn, Self, SupportsIndex, TypeVar

from ipujax.runtime.errors import ArgumentTypeError

Key = TypeVar("Key")
Value = TypeVar("Value", covariant=True)


class ReadOnlyMapping(Mapping[Key, Value], Generic[Key, Value]):
    """Mapping with the items of another, as they were.

    Args:
        items: the other mapping.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[Key, Value]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Key) -> Value:
        return self._items[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __or__(self, other: Mapping[Key, Value]) -> dict[Key, Value]:
        return {**self._items, **other}

    def __ror__(self, other: Mapping[Key, Value]) -> dict[Key, Value]:
        return {**other, **self._items}

    def __repr__(self) -> str:
        return repr(self._items)


class NotCopied:
    """Base of objects that cannot be copied or pickled.

    Attributes:
        COPY_HINT: remedy for the error.
    """

    __slots__ = ()
    COPY_HINT: ClassVar[str]
    _REFUSED: ClassVar[str] = "copied or pickled"

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        raise ArgumentTypeError(f"{type(self).__name__} objects cannot be {self._REFUSED}", hint=self.COPY_HINT)


class Shared(NotCopied):
    """Base of objects that never change: copies are the object itself, and pickles are refused."""

    __slots__ = ()
    _REFUSED: ClassVar[str] = "pickled"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class OfGraph(NotCopied):
    """Base of what belongs to one graph of Poplar: equal only to itself, as the memory that it names."""

    __slots__ = ()
    COPY_HINT = "build the graph and its programs again, by a function that each process calls"
