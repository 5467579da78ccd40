"""Record of the functions that a script compiles with JAX: signatures, how often each was called, where.

Floating-point operations are counted from the shapes of a jaxpr before anything is lowered: 2 for a multiply-add, 1 for
each element of any other result. Of a loop whose trip count is data one iteration counts, of several branches the
largest; moves, and operations on whole numbers, count nothing.

Input: calls of jitted functions. Output: a `FunctionRecord` for each function and signature.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock, local
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.arguments import FunctionName
from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, is_eager, jaxprs_in_params
from ipujax.lowering.jaxpr import elements_of, primitive_names
from ipujax.sharding import NO_SHARDINGS, CallShardings

_COSTS_OF_MOVES = ("view", "part", "joined", "look-up")
_MOVES = frozenset(
    ("pad", "scatter", "select_n", "iota", "convert_element_type", "device_put", "stop_gradient", "name")
)
_READERS = ("reduce_", "arg", "cum", "sort", "top_k")  # prefixes of operations that cost by the elements they read


def flops_of(jaxpr: Jaxpr) -> int:
    """Return the floating-point operations of one evaluation."""
    return sum(map(_flops_of_equation, jaxpr.eqns))


def _flops_of_equation(eqn: JaxprEqn) -> int:
    name = eqn.primitive.name
    inner = [flops_of(getattr(nested, "jaxpr", nested)) for nested in jaxprs_in_params(eqn.params)]
    if name == "cond":
        return max(inner, default=0)
    if name == "scan":
        return int(eqn.params["length"]) * sum(inner)
    if inner and not name.startswith(("reduce", "scatter", "custom_linear_solve", "sort")):  # a call of functions
        return sum(inner)
    from ipujax.lowering.primitives import record_of  # a script without functions needs no compiler

    record = record_of(eqn)
    is_move = record.cost in _COSTS_OF_MOVES or name in _MOVES
    if is_move or not any(map(_is_inexact, eqn.outvars)):
        return 0
    if record.cost == "product":
        return 2 * record.macs(eqn)
    if name.startswith(_READERS):
        return sum(map(elements_of, eqn.invars))
    return sum(map(elements_of, eqn.outvars))


def _is_inexact(atom: Any) -> bool:
    return hasattr(atom.aval, "dtype") and bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))


_CALLBACKS = frozenset(("debug_callback", "io_callback", "pure_callback", "debug_print"))
_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of Python functions in a jaxpr


@dataclass(eq=False)
class FunctionRecord:
    """A function of JAX with one signature.

    Args:
        name: its name, with the file that defines it.
        traced: its trace; None of a function that is counted alone.
        arguments: names of its positional arguments that are not static.
        line: line of the first call.
        reason: reason for which it cannot be compiled for an IPU; "" if it can.
        sample: arguments of the first call, if its loops depend on them.
        shardings: shardings of the first call over meshes of devices.
        is_forward_alone: True if a transformation that JAX runs operation by operation called it: what the
            transformation adds, as a backward pass, is no part of the trace.
        calls: number of calls.
    """

    name: FunctionName
    traced: jax.stages.Traced | None
    arguments: tuple[str, ...] = ()
    line: str = ""
    reason: str = ""
    sample: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    shardings: CallShardings = NO_SHARDINGS
    is_forward_alone: bool = False
    calls: int = 0

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of one call."""
        return 0 if self.traced is None else flops_of(self.traced.jaxpr.jaxpr)

    @property
    def total_flops(self) -> int:
        """Floating-point operations of all calls."""
        return self.calls * self.flops


def loops_on_data(traced: jax.stages.Traced) -> bool:
    """Return whether a function has loops or branches that depend on data, and can be run again: it calls nothing."""
    names = set(primitive_names(traced.jaxpr.jaxpr))
    return bool(names & {"while", "cond"}) and not names & _CALLBACKS and not traced.jaxpr.effects


@dataclass(eq=False)
class Recorder:
    """Records of a run; threads add to them."""

    is_active: bool = True
    _records: dict[Any, FunctionRecord] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _thread: local = field(default_factory=local)

    @property
    def counts_now(self) -> bool:
        """True if a call now computes results that no recorded call has as a part."""
        is_part = getattr(self._thread, "is_part", False)
        return self.is_active and not is_part and not jax.config.jax_disable_jit and is_eager()  # type: ignore[attr-defined]

    @contextmanager
    def counting_no_parts(self) -> Iterator[None]:
        """Count no calls of this thread inside: they are parts of a call that is counted."""
        self._thread.is_part = True
        try:
            yield
        finally:
            self._thread.is_part = False

    @property
    def records(self) -> list[FunctionRecord]:
        """All records, in the order of first calls."""
        with self._lock:
            return list(self._records.values())

    def add(self, record: FunctionRecord) -> FunctionRecord:
        """Return the record of an equal function, a new one else: functions made in a loop are one function."""
        text = "" if record.traced is None else _ADDRESS.sub("", str(record.traced.jaxpr))
        with self._lock:
            return self._records.setdefault((str(record.name), record.name.file, record.is_forward_alone, text), record)

    def count(self, record: FunctionRecord) -> None:
        """Count a call."""
        with self._lock:
            record.calls += 1
