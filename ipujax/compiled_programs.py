"""Programs that have been compiled: their warnings, and a list for those who look at the code from outside.

Input: code that compiles. Output: `CompiledProgram`, one for each: of `ipu.jit`, of Keras, of Poplar engines.
Limits: what other threads compile is not among them, unless they run in a copy of the caller's context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ipujax.runtime.compile import Executable
from ipujax.runtime.logs import Log

_LOG = Log("poplin")


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


def announce(name: str, executable: Executable) -> None:
    """Warns of what a program could not meet, and adds it to the list of the code that runs, if there is one.

    Plans of programs that did not fit are nobody's concern: this is called for what is taken.

    Args:
        name: of the function.
        executable: what it became.
    """
    for line in dict.fromkeys(f"{unmet} ({unmet.origin})" for unmet in executable.graph.unmet_bounds):
        _LOG.warning("%s", line)
    if (found := _COLLECTED.get()) is not None:
        found.append(CompiledProgram(name, executable))
