"""Compiled programs: their warnings, and a list of them for tools such as the command line.

Input: code that compiles. Output: a `CompiledProgram` for each program of `ipu.jit`, of Keras and of Poplar engines; a
`TracedCall` for each call of `ipu.jit` that is traced.
All threads of the process append to these lists, the innermost ones if they are nested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from ipujax.runtime.logs import Log

if TYPE_CHECKING:
    from ipujax.runtime.compile import Executable

_T = TypeVar("_T")
_LOG = Log("poplin")


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A compiled program.

    Args:
        name: name of the function.
        profile: returns the static profile of the program, a `Profile`.
    """

    name: str
    profile: Callable[[], Any]


# Of the process, innermost last: threads of a script compile too.
_COLLECTED: list[list[CompiledProgram]] = []
_CALLS: list[list[TracedCall]] = []


@contextmanager
def collected_programs() -> Iterator[list[CompiledProgram]]:
    """Yield a list to which each program that is compiled inside is appended."""
    with _innermost(_COLLECTED) as programs:
        yield programs


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call of a function of `ipu.jit` that was traced.

    Args:
        fun: the user's function.
        settings: settings of `ipu.jit`.
        args: shapes of positional arguments, static ones as they are.
        kwargs: those of keyword arguments.
    """

    fun: Callable[..., Any]
    settings: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def traced_calls() -> Iterator[list[TracedCall]]:
    """Yield a list to which each call that is traced inside is appended; equal shapes of a function are traced once."""
    with _innermost(_CALLS) as calls:
        yield calls


@contextmanager
def _innermost(lists: list[list[_T]]) -> Iterator[list[_T]]:
    """Yield an empty list, which is the last of `lists` inside."""
    new: list[_T] = []
    lists.append(new)
    try:
        yield new
    finally:
        lists[:] = [each for each in lists if each is not new]


def note_call(fun: Callable[..., Any], settings: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Append a call to the list of `traced_calls`, if any, with shapes in the place of arrays."""
    if _CALLS:
        shapes, named_shapes = jax.tree.map(_as_shape, (args, kwargs))
        _CALLS[-1].append(TracedCall(fun, settings, shapes, named_shapes))


def _as_shape(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct) or not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def bound_warnings(executable: Executable) -> tuple[str, ...]:
    """Return a line for each memory bound that a program exceeds."""
    # Equal lines once: a bound is unmet again in each layer.
    return tuple(dict.fromkeys(f"{unmet} ({unmet.origin})" for unmet in executable.graph.notes.unmet_bounds))


def announce(name: str, warnings: Sequence[str], profile: Callable[[], Any]) -> None:
    """Warn of memory bounds that a program exceeds, and append it to the list of `collected_programs`, if any.

    Args:
        name: name of the function.
        warnings: lines of `bound_warnings`.
        profile: returns its static profile.
    """
    # Called for the program that is run, not for attempts that did not fit.
    for line in warnings:
        _LOG.warning("%s", line)
    if _COLLECTED:
        _COLLECTED[-1].append(CompiledProgram(name, profile))
