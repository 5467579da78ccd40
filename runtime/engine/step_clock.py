"""Interface of clocks that are traced with a program."""

from __future__ import annotations

from typing import Protocol

from ipujax.runtime.engine.values import Values
from ipujax.runtime.graph import ComputeSet, Program
from ipujax.runtime.tensor import Variable


class StepClock(Protocol):
    """Clocks that are traced with a program, see `timeline.cycle_counter`."""

    variable: Variable
    readings: frozenset[ComputeSet]

    def before(self, step: Program, arrays: Values) -> None: ...

    def decide(self, loop: Program, arrays: Values) -> None: ...

    def settle(self, arrays: Values) -> None: ...

    def write_counts(self, compute_set: ComputeSet, arrays: Values) -> None: ...
