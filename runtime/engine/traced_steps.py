"""Steps of a program in the order in which the engine traces them.

Input: a program. Output: its steps out of all sequences, and the functions that stay functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from ipujax.runtime.graph import Block, Branch, Call, Execute, Function, Loop, Program, Repeat

CONTROL = (Loop, Branch, Call)
_MIN_LOOP = 16  # executions in a row that become a loop; XLA can fuse fewer ones


def steps_of(program: Program, is_whole: Callable[[Program], bool]) -> Iterator[Program]:
    """Yield the steps of a program in order, out of all sequences and calls for which `is_whole` is false."""
    for _, equal_steps in groupby(_flatten(program, is_whole), lambda step: getattr(step, "compute_set", step)):
        steps = list(equal_steps)
        # A compute set executed many times in a row becomes a loop, so that it is traced once.
        if isinstance(steps[0], Execute) and len(steps) >= _MIN_LOOP:
            yield Repeat(len(steps), steps[0])
        else:
            yield from steps


def _flatten(program: Program, is_whole: Callable[[Program], bool]) -> Iterator[Program]:
    if isinstance(program, Block) and not is_whole(program):
        for child in program.children():
            yield from _flatten(child, is_whole)
    else:
        yield program


def called_around(program: Program) -> set[Function]:
    """Return the functions that are called in several bodies, say in a loop and outside of it."""
    bodies: dict[Function, set[object]] = {}
    stack: list[tuple[Program, object]] = [(program, None)]
    visited = set(stack)
    while stack:
        node, body = stack.pop()
        if isinstance(node, Call):
            bodies.setdefault(node.function, set()).add(body)
            body = node.function
        elif isinstance(node, CONTROL):
            body = node
        # A node counts once in each body, so functions that share bodies do not multiply the walk.
        new = [(child, body) for child in node.children() if (child, body) not in visited]
        visited.update(new)
        stack += new
    return {function for function, callers in bodies.items() if len(callers) > 1}
