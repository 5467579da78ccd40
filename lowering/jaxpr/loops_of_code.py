"""Loops in the bytecode of Python functions: whether what runs twice at one place is in a loop, and in which."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType

Loop = tuple[int, int]  # the first and the last place in a function's bytecode

_MOST_FUNCTIONS = 4096  # of which loops are remembered
_BACKWARD = frozenset(number for name, number in dis.opmap.items() if "BACKWARD" in name)


@lru_cache(maxsize=_MOST_FUNCTIONS)
def loops_of(code: CodeType) -> tuple[Loop, ...]:
    """The loops of a function, inner ones before those they are in."""
    if _BACKWARD.isdisjoint(code.co_code[::2]):  # most functions; decoding takes a hundred times as long
        return ()
    jumps = [x for x in dis.get_instructions(code) if x.opcode in dis.hasjrel and x.argval < x.offset]
    last: dict[int, int] = {}  # a loop may be continued from several places
    for jump in jumps:
        if not jump.opname.startswith("JUMP_BACKWARD_NO_INTERRUPT"):  # of `yield from` and `await`
            last[jump.argval] = max(jump.offset, last.get(jump.argval, 0))
    return tuple(sorted(last.items(), key=lambda loop: loop[1] - loop[0]))


def loop_around(code: CodeType, *places: int) -> Loop | None:
    """The innermost loop of a function that holds all places, None without one."""
    return next((loop for loop in loops_of(code) if all(loop[0] <= x <= loop[1] for x in places)), None)
