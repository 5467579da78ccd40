"""Record of the functions that a script compiles with JAX: signatures, how often each was called, where.

Input: calls of jitted functions. Output: a `FunctionRecord` for each function and signature.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

import jax

from ipujax.arguments import FunctionName
from ipujax.jax_scripts.flop_counts import flops_of
from ipujax.lowering.jaxpr import primitive_names

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
        calls: number of calls.
    """

    name: FunctionName
    traced: jax.stages.Traced | None
    arguments: tuple[str, ...] = ()
    line: str = ""
    reason: str = ""
    sample: tuple[tuple[Any, ...], dict[str, Any]] | None = None
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

    @property
    def records(self) -> list[FunctionRecord]:
        """All records, in the order of first calls."""
        with self._lock:
            return list(self._records.values())

    def add(self, record: FunctionRecord) -> FunctionRecord:
        """Return the record of an equal function, a new one else: functions made anew in a loop are one function."""
        text = "" if record.traced is None else _ADDRESS.sub("", str(record.traced.jaxpr))
        with self._lock:
            return self._records.setdefault((str(record.name), record.name.file, text), record)

    def count(self, record: FunctionRecord) -> None:
        """Count a call."""
        with self._lock:
            record.calls += 1
