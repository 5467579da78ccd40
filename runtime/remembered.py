"""Answers to questions that are asked again and again, as many as fit some memory.

Input: a question, of hashable parts that hold all the answer depends on. Output: its answer, found once as long as it
is remembered. The answers that were asked for least recently are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Remembered(Generic[Answer]):
    """A memory of answers that are immutable.

    Args:
        most_bytes: what all answers together may take.
        size_bytes: what one answer takes.
    """

    def __init__(self, most_bytes: int, size_bytes: Callable[[Answer], int]) -> None:
        self._most_bytes, self._size_bytes = most_bytes, size_bytes
        self._answers: OrderedDict[Hashable, Answer] = OrderedDict()
        self._taken_bytes, self._lock = 0, Lock()

    def __call__(self, question: Hashable, find: Callable[[], Answer]) -> Answer:
        """The answer to a question, by `find` if it is not remembered."""
        with self._lock:
            if question in self._answers:
                self._answers.move_to_end(question)
                return self._answers[question]
        answer = find()
        with self._lock:
            if question not in self._answers:
                self._answers[question] = answer
                self._taken_bytes += self._size_bytes(answer)
            while self._taken_bytes > self._most_bytes:
                self._taken_bytes -= self._size_bytes(self._answers.popitem(last=False)[1])
        return answer

    def __len__(self) -> int:
        return len(self._answers)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._answers.clear()
            self._taken_bytes = 0
