"""What is outside of a traced program: the host, a recorder, clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ipujax.runtime.engine.values import Values
from ipujax.runtime.graph import ComputeSet, Program
from ipujax.runtime.host import GuardedHost, HostCalls
from ipujax.runtime.tensor import Variable

Record = Callable[[Program, Any], None]


class StepClock(Protocol):
    """Clocks that are traced with a program, see `timeline.cycle_counter`."""

    variable: Variable
    readings: frozenset[ComputeSet]

    def before(self, step: Program, arrays: Values) -> None: ...

    def decide(self, loop: Program, arrays: Values) -> None: ...

    def settle(self, arrays: Values) -> None: ...

    def write_counts(self, compute_set: ComputeSet, arrays: Values) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Outside:
    """What a traced program talks to.

    Args:
        record: is called with each node of data-dependent control and its outcome, see `engine_function`.
        host: answers transfers as they happen; without it a stream has one value a run.
        calls: calls the host's functions.
        clock: clocks that codelets read; without it those codelets read zeros.
    """

    record: Record | None = None
    host: GuardedHost | None = None
    calls: HostCalls = field(default_factory=lambda: HostCalls(guarded=False))
    clock: StepClock | None = None
