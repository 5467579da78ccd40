"""The programs that are compiled while some code runs, for those who look at that code from outside.

Input: code that compiles. Output: `CompiledProgram`, one for each: of `ipu.jit`, of Keras, of Poplar engines.
Limits: what other threads compile is not among them, unless they run in a copy of the caller's context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ipujax.runtime.compile import Executable


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A program that was compiled.

    Args:
        name: of the function.
        executable: what it became.
    """

    name: str
    executable: Executable


_COLLECTED: ContextVar[list[CompiledProgram] | None] = ContextVar("ipujax_compiled_programs", default=None)


@contextmanager
def collected_programs() -> Iterator[list[CompiledProgram]]:
    """A list that gets each program which is compiled inside, in order."""
    found: list[CompiledProgram] = []
    token = _COLLECTED.set(found)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)


def collect(name: str, executable: Executable) -> None:
    """Adds a program to the list of the code that runs, if there is one.

    Args:
        name: of the function.
        executable: what it became.
    """
    if (found := _COLLECTED.get()) is not None:
        found.append(CompiledProgram(name, executable))
