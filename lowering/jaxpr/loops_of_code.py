"""Loops and `with` blocks in the bytecode of Python functions: those around given instructions."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import NamedTuple


class Loop(NamedTuple):
    """A loop of a function, by the offsets of its first and its last instruction in the bytecode."""

    first: int
    last: int

    def has(self, place: int) -> bool:
        """Return whether the instruction at an offset is in the loop."""
        return self.first <= place <= self.last


_MAX_FUNCTIONS = 4096  # functions in the cache of loops
# Backward jumps but those of `yield from` and `await`.
_BACKWARD = frozenset(n for name, n in dis.opmap.items() if "BACKWARD" in name and "NO_INTERRUPT" not in name)
_EXTENDED = dis.opmap["EXTENDED_ARG"]
_ENDS_WITH = dis.opmap["WITH_EXCEPT_START"]  # second instruction of the handler of a `with` block
_CACHE = bytes([dis.opmap["CACHE"]])


@lru_cache(maxsize=_MAX_FUNCTIONS)
def loops_of(code: CodeType) -> tuple[Loop, ...]:
    """Return the loops of a function, inner ones first."""
    if _BACKWARD.isdisjoint(code.co_code[::2]):  # true of most functions
        return ()
    last_jumps: dict[int, int] = {}  # a loop with `continue` has several jumps to its start
    for offset, target in _backward_jumps(code.co_code):
        last_jumps[target] = max(offset, last_jumps.get(target, 0))
    loops = (Loop(first, last) for first, last in last_jumps.items())
    return tuple(sorted(loops, key=lambda loop: loop.last - loop.first))


def _backward_jumps(instructions: bytes) -> Iterator[tuple[int, int]]:
    """Yield the offset and target, in bytes, of each backward jump of Python bytecode: the ends and starts of loops.

    `dis` would decode all instructions, ten times as slow.
    """
    extended_bits = 0  # higher bytes of the next argument
    for offset in range(0, len(instructions), 2):
        opcode = instructions[offset]
        argument = extended_bits | instructions[offset + 1]
        extended_bits = argument << 8 if opcode == _EXTENDED else 0
        if opcode in _BACKWARD:
            end = offset + 2
            while instructions[end : end + 1] == _CACHE:  # inline caches count as part of the instruction
                end += 2
            yield offset, end - 2 * argument


def loop_around(code: CodeType, *places: int) -> Loop | None:
    """Return the innermost loop of a function around all places, None if there is none."""
    return next((loop for loop in loops_of(code) if all(map(loop.has, places))), None)


class _ProtectedRange(NamedTuple):
    """Instructions whose exceptions go to one handler, by offsets in the bytecode."""

    first: int
    end: int
    handler: int
    is_with: bool  # of a `with` block

    def has(self, place: int) -> bool:
        return self.first <= place < self.end


@lru_cache(maxsize=_MAX_FUNCTIONS)
def _protected_ranges(code: CodeType) -> tuple[_ProtectedRange, ...]:
    """Return the ranges of instructions in `try` and `with` blocks, from the exception table of a function's code."""
    # Format of Python's Objects/exception_handling_notes.txt: numbers of 6 bits a byte, in units of two bytes of code.
    numbers = list[int]()
    has_more = False
    for byte in code.co_exceptiontable:
        bits = byte & 63
        numbers = [*numbers[:-1], numbers[-1] << 6 | bits] if has_more else [*numbers, bits]
        has_more = bool(byte & 64)
    ranges = list[_ProtectedRange]()
    # The fourth number of each range is not needed.
    for start, length, handler in zip(numbers[::4], numbers[1::4], numbers[2::4], strict=True):
        # A handler begins with PUSH_EXC_INFO; that of a `with` block goes on with WITH_EXCEPT_START.
        is_with = code.co_code[2 * handler + 2] == _ENDS_WITH
        ranges.append(_ProtectedRange(2 * start, 2 * (start + length), 2 * handler, is_with))
    return tuple(ranges)


def with_blocks_around(code: CodeType, place: int) -> tuple[int, ...]:
    """Return the `with` blocks around an instruction, outermost first: each by the offset of its first instruction.

    Args:
        code: code of the function.
        place: offset of the instruction.
    """
    if not code.co_exceptiontable:  # true of most functions
        return ()
    ranges = _protected_ranges(code)
    blocks = list[int]()
    # Ranges do not overlap. The handler of a block is behind it, in the block around it.
    while (around := next((x for x in ranges if x.has(place) and x.handler > place), None)) is not None:
        if around.is_with:  # whose instructions may be several ranges
            blocks.insert(0, min(x.first for x in ranges if x.handler == around.handler))
        place = around.handler
    return tuple(blocks)
