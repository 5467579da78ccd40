"""Loops and `with` blocks in the bytecode of Python functions: those around given instructions."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

Loop = tuple[int, int]  # the first and the last place in a function's bytecode

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
    return tuple(sorted(last_jumps.items(), key=lambda loop: loop[1] - loop[0]))


def _backward_jumps(instructions: bytes) -> Iterator[Loop]:
    """Yield the place and target of each backward jump; `dis` would decode all instructions, ten times as slow."""
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
    return next((loop for loop in loops_of(code) if all(loop[0] <= x <= loop[1] for x in places)), None)


@lru_cache(maxsize=_MAX_FUNCTIONS)
def _protected_ranges(code: CodeType) -> tuple[tuple[int, int, int, bool], ...]:
    """Return first place, end, handler, and whether it is a `with` block's, of each protected range of a function."""
    # Format of Python's Objects/exception_handling_notes.txt: numbers of 6 bits a byte, in units of two bytes of code.
    numbers = list[int]()
    has_more = False
    for byte in code.co_exceptiontable:
        bits = byte & 63
        numbers = [*numbers[:-1], numbers[-1] << 6 | bits] if has_more else [*numbers, bits]
        has_more = bool(byte & 64)
    ranges = list[tuple[int, int, int, bool]]()
    for start, length, handler in zip(numbers[::4], numbers[1::4], numbers[2::4], strict=True):
        is_with = code.co_code[2 * handler + 2] == _ENDS_WITH
        ranges.append((2 * start, 2 * (start + length), 2 * handler, is_with))
    return tuple(ranges)


def with_blocks_around(code: CodeType, place: int) -> tuple[int, ...]:
    """Return the first place of each `with` block around a place, outermost first."""
    if not code.co_exceptiontable:  # true of most functions
        return ()
    ranges = _protected_ranges(code)
    blocks = list[int]()
    while (handlers := [(x[2], x[3]) for x in ranges if x[0] <= place < x[1] and x[2] > place]) != []:
        place, is_with = handlers[0]  # the handler of a block is in the block around it
        if is_with:
            blocks.insert(0, min(x[0] for x in ranges if x[2] == place))
    return tuple(blocks)
