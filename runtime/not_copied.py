"""Refusal of copies and pickles by objects that have an identity: graphs, programs, and what runs them.

Two bases. A `NotCopied` refuses every copy and every pickle: a copy would share half of its state with the original.
A `Shared` never changes, so a copy of it, and of an object that refers to it, is the object itself; pickles are
refused. Both name the remedy in one error.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Self, SupportsIndex

from ipujax.runtime.errors import ArgumentTypeError


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
