"""A mapping that nobody changes, and that can be copied and pickled, which Python's `MappingProxyType` cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

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
