"""Cache of a process: results of pure functions, bounded by the bytes that they and their arguments keep alive.

Planners, exchange counts and tile mappings call a function with equal arguments for every layer and every compilation.
All of them share one memory, large during a compilation. Between two it has the values that the last one used, and few
others (`keep_recent`). The least recently used results are dropped first; `clear_caches` drops all. Functions for names
and views, which are called most often and return few bytes, have small caches of their own.

Values that take long to compute and few bytes to store, as plans and costs of compute sets, may outlive the process: a
`ValueStore` is asked for them when they are not in memory (`values_stored_in`).

Input: a function of hashable arguments whose result depends on them alone and is never changed. Output: the function
with a cache. A key has the function and its arguments, its value is the result.
Limits: an array counts once for all entries that have it; of other objects a fixed size is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import CDLL
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache, wraps
from itertools import count
from math import inf
from operator import is_
from threading import Lock
from typing import Any, ParamSpec, Protocol, TypeVar, get_type_hints

import numpy as np

P = ParamSpec("P")
Value = TypeVar("Value")

MAX_BYTES = 256 << 20  # assumed: during a compilation; a step of a small transformer needs 120 MB of values
IDLE_BYTES = 16 << 20  # assumed: of values that the last compilation did not use, between two compilations
_ENTRY_BYTES = 2048  # measured: 21,313 more keys and values took 41 MB, with few arrays
_PLAIN_TYPES = frozenset({"int", "float", "bool", "str", "bytes", "None", "tuple", "list", "frozenset"})  # no arrays
_WORD = re.compile(r"\w+")
_LEAVES = frozenset({int, float, bool, str, bytes, type(None)})
_CONTAINERS = frozenset({tuple, list, frozenset})


@dataclass(slots=True)
class _Entry:
    """A value, the bytes of each array in it or its key, by id, and the time of its last use."""

    value: Any
    array_bytes: dict[int, int]
    last_use: int


ABSENT: Any = object()  # in the place of a value that no cache has


class Memory:
    """Values by key.

    Args:
        max_bytes: limit for all keys and values together; beyond it the least recently used are dropped, down to
            three quarters.

    Attributes:
        used_bytes: bytes of all keys and values.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.used_bytes = 0
        self._entries: dict[Hashable, _Entry] = {}
        self._references: dict[int, int] = {}  # number of entries that have an array, by its id
        self._clock = count()
        self._period_start = 0
        self._lock = Lock()

    def recall(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the value of a key, from `compute` if it is not in the cache."""
        value: Value = self.find(key)
        # Without the lock: `compute` may read further keys.
        return self.keep(key, compute()) if value is ABSENT else value

    def find(self, key: Hashable) -> Any:
        """Return the value of a key, `ABSENT` if it is not in the cache."""
        entry = self._entries.get(key)
        if entry is None:
            return ABSENT
        entry.last_use = next(self._clock)
        return entry.value

    def keep(self, key: Hashable, value: Value) -> Value:
        """Return the value of a key that was absent, which is in the cache from now on."""
        array_bytes = {id(array): array.nbytes for array in find_arrays((key, value))}
        entry = _Entry(value, array_bytes, next(self._clock))
        self._add_entry(key, entry)
        entry.last_use = next(self._clock)
        return value

    def _add_entry(self, key: Hashable, entry: _Entry) -> None:
        """Add an entry and its bytes, each array once for all entries that have it; drop old ones beyond the limit."""
        with self._lock:
            # Another thread may have added the key in the meantime.
            if self._entries.setdefault(key, entry) is not entry:
                return
            self.used_bytes += _ENTRY_BYTES
            references = self._references
            for array_id, size in entry.array_bytes.items():
                count = references.get(array_id, 0)
                if count == 0:
                    self.used_bytes += size
                references[array_id] = count + 1
            if self.used_bytes > self._max_bytes:
                self._drop_oldest(3 * self._max_bytes // 4)

    def shrink(self, max_bytes: int) -> None:
        """Drop the least recently used values until the others take no more than `max_bytes`."""
        with self._lock:
            self._drop_oldest(max_bytes)

    def end_period(self, max_bytes: int) -> None:
        """Drop values not used since the last call, the oldest first, until all take no more than `max_bytes`."""
        with self._lock:
            self._drop_oldest(max_bytes, self._period_start)
            self._period_start = next(self._clock)

    def _drop_oldest(self, max_bytes: int, used_before: float = inf) -> None:
        """Drop the least recently used values, of those last used before some time, until `max_bytes` remain."""
        for key in self.keys() if self.used_bytes > max_bytes else ():
            if self.used_bytes <= max_bytes or self._entries[key].last_use >= used_before:
                break
            self.used_bytes -= _ENTRY_BYTES
            for array_id, size in self._entries.pop(key).array_bytes.items():
                self._references[array_id] -= 1
                if self._references[array_id] == 0:
                    del self._references[array_id]
                    self.used_bytes -= size

    def keys(self) -> list[Hashable]:
        """Return the keys in the cache, least recently used first."""
        return [key for key, _ in sorted(self._entries.items(), key=lambda item: item[1].last_use)]


def find_arrays(value: object) -> list[np.ndarray]:
    """Return the arrays that a nested value keeps alive; for a view the array that owns its memory."""
    arrays: list[np.ndarray] = []
    pending: list[Any] = [value]
    for item in pending:  # the list grows at its end while it is read
        kind = type(item)
        if kind in _LEAVES:
            continue
        if kind in _CONTAINERS or issubclass(kind, tuple):  # named tuples too
            pending += item
        elif kind is np.ndarray:
            while isinstance(item.base, np.ndarray):
                item = item.base
            arrays.append(item)
        else:
            for name in _array_fields(kind):  # type: ignore[arg-type]
                pending.append(getattr(item, name))  # no comprehension: most classes have no such field
    return arrays


@cache  # by class: there are few, and they stay
def _array_fields(kind: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass that may have arrays, by their annotations; () for other classes."""
    all_fields = fields(kind) if is_dataclass(kind) else ()
    return tuple(field.name for field in all_fields if not _PLAIN_TYPES.issuperset(_WORD.findall(str(field.type))))


_memory = Memory(MAX_BYTES)
recall = _memory.recall
_basis: list[tuple[Any, ...]] = [()]  # of all caches
_clearing: list[Callable[[], None]] = []  # of caches elsewhere


def clear_with_caches(clear: Callable[[], None]) -> None:
    """Let `clear_caches` and `set_basis` clear a cache elsewhere too."""
    _clearing.append(clear)


def set_basis(basis: tuple[Any, ...]) -> None:
    """Drop all values, of caches elsewhere too, if they were computed on another basis than these objects."""
    (earlier,) = _basis
    if len(basis) != len(earlier) or not all(map(is_, basis, earlier)):
        _basis[:] = [basis]
        _memory.shrink(0)
        for clear in _clearing:
            clear()


def remembered(function: Callable[P, Value]) -> Callable[P, Value]:
    """Return a pure function with a cache, in the memory that all such functions share."""
    # Its arguments are hashable, its result depends on them alone and is never changed.

    @wraps(function)
    def cached(*args: P.args, **kwargs: P.kwargs) -> Value:
        key = function, args, tuple(kwargs.items())
        value: Value = _memory.find(key)
        return _memory.keep(key, function(*args, **kwargs)) if value is ABSENT else value

    return cached


class ValueStore(Protocol):
    """Values by key, outside of the process."""

    def recall(
        self, key: Hashable, compute: Callable[[], Value], kind: Any, is_valid: Callable[[Value], bool]
    ) -> Value:
        """Return the value of a key, from `compute` if the store has no valid one of type `kind`."""


_store: ContextVar[ValueStore | None] = ContextVar("store", default=None)  # on disk, while a program is compiled


@contextmanager
def values_stored_in(store: ValueStore) -> Iterator[None]:
    """Ask a store for values that are not in memory inside the `with`."""
    token = _store.set(store)
    try:
        yield
    finally:
        _store.reset(token)


def recall_stored(key: Hashable, compute: Callable[[], Value], kind: Any, is_valid: Callable[[Value], bool]) -> Value:
    """Return the value of a key, from memory, else from the store of `values_stored_in`, else from `compute`.

    Args:
        key: all that the value depends on.
        compute: computes the value.
        kind: annotated type of the value, down to its last field: a store builds the value by it from a file.
        is_valid: whether a value of the type can be that of the key; a store may have any.
    """
    value: Value = _memory.find(key)
    if value is not ABSENT:
        return value
    # Values that `compute` needs are stored too: other programs may need them alone.
    store = _store.get()
    return _memory.keep(key, compute() if store is None else store.recall(key, compute, kind, is_valid))


def remembered_and_stored(
    is_valid: Callable[..., bool],
) -> Callable[[Callable[P, Value]], Callable[P, Value]]:
    """Return a decorator of pure functions with a cache in memory, and in the store of the context.

    Args:
        is_valid: whether a value can be that of some arguments, which follow it.
    """

    def decorated(function: Callable[P, Value]) -> Callable[P, Value]:
        @cache
        def kind() -> Any:
            return get_type_hints(function)["return"]

        @wraps(function)
        def cached(*args: P.args, **kwargs: P.kwargs) -> Value:
            key = function, args, tuple(kwargs.items())
            value: Value = _memory.find(key)
            if value is not ABSENT:
                return value
            store = _store.get()
            if store is None:
                return _memory.keep(key, function(*args, **kwargs))
            compute = lambda: function(*args, **kwargs)  # noqa: E731
            return _memory.keep(key, store.recall(key, compute, kind(), lambda found: is_valid(found, *args, **kwargs)))

        return cached

    return decorated


_numbered: list[tuple[Any, ...]] = []  # no table: an import that adds to it replaces no name of the compiler


def number_values(values: tuple[Value, ...]) -> tuple[Value, ...]:
    """Declare all values of a class; stores have their numbers in the place of what they consist of."""
    _numbered.append(values)
    return values


def numbered_values(kind: type) -> tuple[Any, ...]:
    """Return all values of a class that `number_values` declared; none of another."""
    return next((values for values in _numbered if type(values[0]) is kind), ())


_MAX_SMALL_ENTRIES = 4096  # of each function
_small_caches: list[Any] = []


def remembered_small(function: Callable[P, Value]) -> Callable[P, Value]:
    """Return a function with a cache of its own, for very frequent calls and small results: 0.1 µs a hit, not 0.9."""
    # As `remembered`, with positional arguments; neither they nor its result have arrays.
    cached: Any = lru_cache(maxsize=_MAX_SMALL_ENTRIES)(function)
    _small_caches.append(cached)
    typed: Callable[P, Value] = cached  # `lru_cache` loses the types of parameters
    return typed


def cached_calls() -> list[Any]:
    """Return the cached calls, least recently used first: function, positional and keyword arguments of each."""
    return _memory.keys()


def release_freed_memory() -> None:
    """Return freed memory to the system."""
    # The GNU C library keeps fragments: measured, 60 MiB more than used after 90 small compilations.
    trim = getattr(CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_recent() -> None:
    """Keep the values of the last compilation, at most `IDLE_BYTES` with others; called after each compilation."""
    # The next compilation is often of the same model with one change: in a layer, an option, a constant of the target.
    _memory.end_period(IDLE_BYTES)
    release_freed_memory()


def drop_values() -> None:
    """Drop all values in memory; they are recalled or computed again."""
    _memory.shrink(0)


def clear_caches() -> None:
    """Clear all caches of ipujax; results stay the same, the next compilation takes longer.

    Functions of `ipu.jit` that are alive stay compiled; one that is made anew compiles again. `jax.clear_caches` does
    the same for JAX.
    """
    drop_values()
    for clear in _clearing:
        clear()
    for cached in _small_caches:
        cached.cache_clear()
    release_freed_memory()
