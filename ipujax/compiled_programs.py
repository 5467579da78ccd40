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
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ipujax.arguments import short_type
from ipujax.runtime.logs import Log

if TYPE_CHECKING:
    from ipujax.runtime.compile import Executable

_T = TypeVar("_T")
_LOG = Log("poplin")
_HOST_KIND = "pinned_host"


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A compiled program.

    Args:
        name: name of the function.
        profile: returns the static profile of the program, a `Profile`.
        types: shapes and dtypes of its arguments; none of a Poplar program.
    """

    name: str
    profile: Callable[[], Any]
    types: tuple[str, ...] = ()


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
    """Yield an empty list, which is the last of `lists` inside: the one that compilations append to."""
    new: list[_T] = []
    lists.append(new)
    try:
        yield new
    finally:
        # By identity, and at any place: blocks of several threads end in any order.
        lists[:] = [each for each in lists if each is not new]


def note_call(fun: Callable[..., Any], settings: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Append a call to the list of `traced_calls`, if any, with shapes in the place of arrays."""
    if _CALLS:
        shapes, named_shapes = jax.tree.map(placed_shape, (args, kwargs))
        _CALLS[-1].append(TracedCall(fun, settings, shapes, named_shapes))


def placed_shape(x: Any) -> Any:
    """Return shape, type, sharding and memory of an array, without its devices, which no other process has.

    Anything else is returned as it is: it may be static.
    """
    if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct | jax.core.ShapedArray):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=bool(getattr(x, "weak_type", False)), sharding=_place(x))


def _place(x: Any) -> NamedSharding | None:
    """Sharding and memory of an array over a mesh without devices; None for a whole one on the chip."""
    if isinstance(x, jax.core.Tracer):
        x = jax.typeof(x)
    sharding = getattr(x, "sharding", None)
    on_host = getattr(x, "memory_space", None) is jax.memory.Space.Host
    kind = _HOST_KIND if on_host else getattr(sharding, "memory_kind", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
        mesh = sharding.mesh.abstract_mesh if isinstance(sharding.mesh, Mesh) else sharding.mesh
        return NamedSharding(mesh, sharding.spec, memory_kind=kind)
    return NamedSharding(AbstractMesh((), ()), PartitionSpec(), memory_kind=kind) if kind == _HOST_KIND else None


def compile_warnings(executable: Executable) -> tuple[str, ...]:
    """Return a line for each memory bound that a program exceeds, and for rows that no compilation pads."""
    notes = executable.graph.notes
    pads_nothing = executable.options.pad_rows and not notes.padded_rows
    unused = ["Options(pad_rows=True) has no effect: no row is cheaper padded"] * pads_nothing
    # Equal lines once: a bound is unmet again in each layer.
    return tuple(dict.fromkeys([*(f"{unmet} ({unmet.origin})" for unmet in notes.unmet_bounds), *unused]))


def announce(name: str, warnings: Sequence[str], profile: Callable[[], Any], avals: Sequence[Any] = ()) -> None:
    """Warn of what compilation has found, and append the program to the list of `collected_programs`, if any.

    Args:
        name: name of the function.
        warnings: lines of `compile_warnings`.
        profile: returns its static profile.
        avals: types of its arguments.
    """
    # Called for the program that is run, not for attempts that did not fit.
    for line in warnings:
        _LOG.warning("%s", line)
    if _COLLECTED:
        _COLLECTED[-1].append(CompiledProgram(name, profile, tuple(map(short_type, avals))))
