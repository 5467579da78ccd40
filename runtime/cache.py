"""What a process remembers of earlier compilations: answers of pure functions, bounded by the bytes they keep alive.

Planners, exchange counts and tile mappings ask the same questions for every layer and every compilation. All of them
share one memory, large during a compilation and small from one to the next (`keep_recent`). The answers that were asked
for least recently are forgotten first; `clear_caches` forgets all. Names and views, which are asked for most often and
take few bytes, have small memories of their own.

Input: a function of hashable arguments whose result depends on nothing else and is never changed. Output: the same
function, computed once as long as the answer is remembered.
Limits: an array counts once however many answers hold it; of other objects a fixed size is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from ctypes import CDLL
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache, wraps
from itertools import count
from threading import Lock
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
Answer = TypeVar("Answer")

MOST_BYTES = 256 << 20  # assumed: during a compilation; a step of a small transformer asks for 120 MB of answers
KEPT_BYTES = 16 << 20  # assumed: from one compilation to the next
_ENTRY_BYTES = 2048  # measured: 21,313 more questions and answers took 41 MB, with few arrays
_PLAIN_TYPES = frozenset({"int", "float", "bool", "str", "bytes", "None", "tuple", "list", "frozenset"})  # no arrays
_WORD = re.compile(r"\w+")
_LEAVES = frozenset({int, float, bool, str, bytes, type(None)})
_CONTAINERS = frozenset({tuple, list, frozenset})


@dataclass(slots=True)
class _Entry:
    """An answer, the bytes of each array it or its question holds, and when it was last asked for."""

    answer: Any
    array_bytes: dict[int, int]
    asked: int


class Memory:
    """Answers by question.

    Args:
        most_bytes: what all questions and answers together may take; beyond that the oldest are forgotten, down to
            three quarters.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self.taken_bytes = most_bytes, 0
        self._entries: dict[Hashable, _Entry] = {}
        self._holders: dict[int, int] = {}  # of each array, by its id: the number of entries that hold it
        self._clock, self._lock = count(), Lock()

    def recall(self, question: Hashable, find: Callable[[], Answer]) -> Answer:
        """The answer to a question, by `find` if it is not remembered."""
        entry = self._entries.get(question)
        if entry is None:
            answer = find()  # without the lock: it may ask further questions
            array_bytes = {id(array): array.nbytes for array in held_arrays((question, answer))}
            entry = _Entry(answer, array_bytes, next(self._clock))
            self._add(question, entry)
        entry.asked = next(self._clock)
        found: Answer = entry.answer
        return found

    def _add(self, question: Hashable, entry: _Entry) -> None:
        with self._lock:
            if self._entries.setdefault(question, entry) is not entry:
                return
            self.taken_bytes += _ENTRY_BYTES
            holders = self._holders
            for key, size in entry.array_bytes.items():
                count = holders.get(key, 0)
                if count == 0:
                    self.taken_bytes += size
                holders[key] = count + 1
            if self.taken_bytes > self._most_bytes:
                self._shrink(3 * self._most_bytes // 4)

    def shrink(self, most_bytes: int) -> None:
        """Forgets the least recently asked for until the rest takes no more than `most_bytes`."""
        with self._lock:
            self._shrink(most_bytes)

    def _shrink(self, most_bytes: int) -> None:
        for question in self.questions() if self.taken_bytes > most_bytes else ():
            if self.taken_bytes <= most_bytes:
                break
            self.taken_bytes -= _ENTRY_BYTES
            for key, size in self._entries.pop(question).array_bytes.items():
                self._holders[key] -= 1
                if self._holders[key] == 0:
                    del self._holders[key]
                    self.taken_bytes -= size

    def questions(self) -> list[Hashable]:
        """What is remembered, least recently asked for first."""
        return [question for question, _ in sorted(self._entries.items(), key=lambda item: item[1].asked)]


def held_arrays(value: object) -> list[np.ndarray]:
    """The arrays that a value keeps alive; of a view the array whose memory it shows.

    Args:
        value: arrays, dataclasses, containers and anything else, nested.
    """
    arrays: list[np.ndarray] = []
    pending: list[Any] = [value]
    for item in pending:  # the list grows at its end while it is read
        kind = type(item)
        if kind in _LEAVES:
            continue
        if kind in _CONTAINERS:
            pending += item
        elif kind is np.ndarray:
            while isinstance(item.base, np.ndarray):
                item = item.base
            arrays.append(item)
        else:
            pending += [getattr(item, name) for name in _array_fields(kind)]  # type: ignore[arg-type]
    return arrays


@cache  # by class: there are few, and they stay
def _array_fields(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass that may hold arrays; none of another class."""
    own_fields = fields(kind) if is_dataclass(kind) else ()
    return tuple(field.name for field in own_fields if not _PLAIN_TYPES.issuperset(_WORD.findall(str(field.type))))


_memory = Memory(MOST_BYTES)
recall = _memory.recall


def remembered(function: Callable[P, Answer]) -> Callable[P, Answer]:
    """Makes a pure function answer from memory.

    Args:
        function: its arguments are hashable, its result depends on them alone and is never changed.
    """

    @wraps(function)
    def asked(*args: P.args, **kwargs: P.kwargs) -> Answer:
        return recall((function, args, tuple(kwargs.items())), lambda: function(*args, **kwargs))

    return asked


_SMALL_ANSWERS = 4096  # that each function remembers
_small: list[Any] = []


def remembered_small(function: Callable[P, Answer]) -> Callable[P, Answer]:
    """The same for a function that is asked very often and answers with few bytes, names or tuples: 0.1 µs, not 0.9.

    Args:
        function: as `remembered` takes it, of positional arguments; neither they nor its result hold arrays.
    """
    cached = lru_cache(maxsize=_SMALL_ANSWERS)(function)
    _small.append(cached)
    asked: Any = cached
    found: Callable[P, Answer] = asked
    return found


def remembered_questions() -> list[Any]:
    """What is remembered: function, positional and keyword arguments; the least recently asked for first."""
    return _memory.questions()


def release_freed_memory() -> None:
    """Gives memory that has been freed back to the system; the GNU C library keeps what a compilation leaves in pieces.

    Without it, 90 small compilations whose functions are dropped keep about 60 MiB more than they use.
    """
    trim = getattr(CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_recent() -> None:
    """Forgets what does not fit `KEPT_BYTES`, and gives freed memory back; called after each compilation."""
    _memory.shrink(KEPT_BYTES)
    release_freed_memory()


def clear_caches() -> None:
    """Forgets all that ipujax remembers of earlier compilations; results stay the same, the next one takes longer.

    Compiled functions keep what they hold. `jax.clear_caches` does the same for JAX.
    """
    _memory.shrink(0)
    for asked in _small:
        asked.cache_clear()
    release_freed_memory()
