"""Rows of a profiled run: functions that JAX compiled, and operations that it ran one at a time.

Input: records. Output: `ProfiledCalls` and `SingleOperations`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ipujax.jax_scripts.cycle_estimates import Estimate
from ipujax.jax_scripts.places import CallPlace
from ipujax.jax_scripts.recorder import FunctionRecord
from ipujax.lowering.jaxpr import primitive_names

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile

# Of a function of JAX that is a program, not an operation.
_PROGRAMS = frozenset(("scan", "while", "cond", "shard_map", "call_exported", "custom_linear_solve", "pallas_call"))


@dataclass(frozen=True, slots=True)
class ProfiledCalls:
    """A function with one signature, and its calls in a run.

    Args:
        name: name of the function; of one that JAX defines, with the function of JAX that the script calls.
        calls: number of calls.
        line: line that defines the function; of one that JAX defines, the line of its first call.
        owner: class of a method; "" of other functions.
        types: shapes and dtypes of its arguments, as JAX writes them.
        estimated_cycles: estimated cycles of a call, from shapes.
        profile: profile of a call; None if the function stays JAX's. Of a function with loops or branches on data, that
            of a call that was recorded.
        reason: reason for which it stays JAX's; "" if it is compiled.
        total_cycles: cycles of all calls; 0 if unknown.
        worst_cycles: cycles of a call with the dearest branches; None without branches on data, or if a trip count is
            data.
        sampled_calls: number of calls whose own loops and branches are counted, the others as their mean; None for a
            function whose calls take equally long.
        unrecorded: reason for which no call of a function with loops or branches on data was run again, so that cycles
            have the dearest branches; "" else.
    """

    name: str
    calls: int
    line: str
    owner: str
    types: tuple[str, ...]
    estimated_cycles: int
    profile: Profile | None = field(compare=False)  # equal only to itself
    reason: str = ""
    total_cycles: int = 0
    worst_cycles: int | None = None
    sampled_calls: int | None = None
    unrecorded: str = ""

    @property
    def cycles(self) -> int:
        """Cycles of a call, of different ones the mean; 0 if unknown."""
        return round(self.total_cycles / self.calls) if self.calls else 0


@dataclass(frozen=True, slots=True)
class SingleOperations:
    """Operations that JAX compiled and ran one at a time, on one line.

    Args:
        line: the line.
        operations: number of operations.
        estimated_cycles: estimated cycles of them all.
    """

    line: str
    operations: int
    estimated_cycles: int


def is_operation(record: FunctionRecord, estimate: Estimate) -> bool:
    """Return whether a record is of an operation of JAX that takes no longer than its transfers, not of a program."""
    if not record.is_of_jax or record.jaxpr is None or record.holds_script:
        return False
    if estimate.device > estimate.transfers:
        return False
    return not _PROGRAMS & set(primitive_names(record.jaxpr.jaxpr))


def single_operations(records: Sequence[tuple[FunctionRecord, Estimate]]) -> tuple[SingleOperations, ...]:
    """Return the lines of operations, given with the estimate of a call, the most expensive first."""
    counts: Counter[str] = Counter()
    cycles: Counter[str] = Counter()
    for record, estimate in records:
        for place, calls in record.places.items():
            counts[str(place)] += calls
            cycles[str(place)] += round(calls * estimate.cycles)
    rows = [SingleOperations(line, count, cycles[line]) for line, count in counts.items()]
    return tuple(sorted(rows, key=lambda row: -row.estimated_cycles))


def shown_name(record: FunctionRecord) -> str:
    """Return the name of a function, with the function of JAX that the script calls if JAX defines it."""
    place: CallPlace | None = record.place
    inner = record.inner_name
    if record.body_name:
        return f"{(place.function if place else '') or inner}({record.body_name})"
    if not record.is_of_jax or place is None or place.function in ("", inner):
        return inner
    return f"{place.function} ({inner})"
