"""Loops in the bytecode of Python functions: whether what runs twice at one place is in a loop, and in which."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

Loop = tuple[int, int]  # the first and the last place in a function's bytecode

_MOST_FUNCTIONS = 4096  # of which loops are remembered
# Jumps back but those of `yield from` and `await`.
_BACKWARD = frozenset(n for name, n in dis.opmap.items() if "BACKWARD" in name and "NO_INTERRUPT" not in name)
_EXTENDED, _CACHE = dis.opmap["EXTENDED_ARG"], bytes([dis.opmap["CACHE"]])


@lru_cache(maxsize=_MOST_FUNCTIONS)
def loops_of(code: CodeType) -> tuple[Loop, ...]:
    """The loops of a function, inner ones before those they are in."""
    if _BACKWARD.isdisjoint(code.co_code[::2]):  # most functions
        return ()
    last: dict[int, int] = {}  # a loop may be continued from several places
    for offset, target in _backward_jumps(code.co_code):
        last[target] = max(offset, last.get(target, 0))
    return tuple(sorted(last.items(), key=lambda loop: loop[1] - loop[0]))


def _backward_jumps(instructions: bytes) -> Iterator[Loop]:
    """Place and target of each jump back; `dis` decodes all instructions, which takes ten times as long."""
    more = 0  # the higher bytes of an argument
    for offset in range(0, len(instructions), 2):
        opcode, argument = instructions[offset], more | instructions[offset + 1]
        more = argument << 8 if opcode == _EXTENDED else 0
        if opcode in _BACKWARD:
            end = offset + 2
            while instructions[end : end + 1] == _CACHE:  # words of the interpreter behind the instruction
                end += 2
            yield offset, end - 2 * argument


def loop_around(code: CodeType, *places: int) -> Loop | None:
    """The innermost loop of a function that holds all places, None without one."""
    return next((loop for loop in loops_of(code) if all(loop[0] <= x <= loop[1] for x in places)), None)
