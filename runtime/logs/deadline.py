"""The time at which a compilation has to end: checked where its steps begin, and where parts of them end.

    with ending_at(time.monotonic() + 60):
        compile(graph, program)  # raises `OutOfTime` if it is not over within a minute

Input: a time of `time.monotonic`. Work in other threads, which the block has not started itself, has no deadline.
Limits: what has neither steps nor parts ends first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf


class OutOfTime(BaseException):
    """The deadline of a compilation has passed.

    Not an `Exception`: code that goes on with another way where one fails must not go on here, as after an interrupt.
    """


_DEADLINE: ContextVar[float] = ContextVar("ipujax_deadline", default=inf)


@contextmanager
def ending_at(deadline: float) -> Iterator[None]:
    """Raise `OutOfTime` at the next check after a time of `time.monotonic`, or after that of an outer block."""
    token = _DEADLINE.set(min(deadline, _DEADLINE.get()))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def check_deadline() -> None:
    """Raise `OutOfTime` after the deadline."""
    if time.monotonic() > _DEADLINE.get():
        raise OutOfTime
