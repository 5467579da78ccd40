"""The table of a profiled run: functions that JAX compiled, and operations that it ran one at a time.

Input: records. Output: rows as values, `ProfiledCalls` and `SingleOperations`, and lines of text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from ipujax.jax_scripts.cycle_estimates import Estimate
from ipujax.jax_scripts.places import CallPlace
from ipujax.jax_scripts.recorder import FunctionRecord
from ipujax.lowering.jaxpr import primitive_names
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.profile import Row, duration, size, text_table

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


PROGRAM_HEAD: Row = ("cycles", "time", "fullest tile", "limited by")
_WORST = "worst case"
_CALLS_HEAD: Row = ("function", "calls", "cycles of all", "cycles", _WORST, "device", *PROGRAM_HEAD[1:])
_OTHERS_HEAD: Row = ("function", "calls", "cycles, about", "reason")
NOTHING = (
    "none: JAX ran nothing in this process, neither functions of jax.jit nor operations; other processes are not seen, "
    "so profile the script that calls JAX itself"
)
_MOST_ROWS = 20  # of functions that stay JAX's, and of lines of operations, before the rest is counted
_MOST_NAMES = 3  # of a layer
_MOST_TYPES = 4  # of arguments in a name
_TRIP_COUNTS = "--trip-count LOOP=N, Options(trip_counts=…) make them known"


def program_cells(profile: Profile) -> Row:
    """Return the cells of a program under `PROGRAM_HEAD`."""
    memory = profile.memory
    capacity_bytes = profile.target.bytes_per_tile
    fits = "" if memory.max_tile_bytes <= capacity_bytes else ", does not fit"
    tile = f"{size(memory.max_tile_bytes)} of {size(capacity_bytes)}, tile {memory.worst_tile}{fits}"
    try:
        cycles = f"{profile.cycles:,}"
        time = duration(profile.seconds)
        limit = profile.verdict.limit
        operations = profile.operations()
    except ProfileError as error:  # a trip count is data
        return "depend on data", "", tile, f"{error.what}; {_TRIP_COUNTS}"
    if not operations:
        return cycles, time, tile, ""
    costliest_line = next((row.origin.line for row in operations if row.origin.line), "")
    if limit is not None:  # the cause that the summary and the page name
        line = limit.origin.line
        part = limit.name, f"{100 * limit.alone_cycles / profile.cycles:.0f} %", line or limit.origin.path
    else:
        slowest = operations[0]
        line = slowest.origin.line
        part = f"{slowest.dominant} of {slowest.names[0]}", f"{100 * slowest.share:.0f} %", line
    layer = _layer_inside(profile, line or costliest_line)
    of_line = "" if line or not costliest_line else f"costliest line {costliest_line}"
    return cycles, time, tile, ", ".join(filter(None, (*part, of_line, layer and f"most in layer {layer}")))


def _layer_inside(profile: Profile, line: str) -> str:
    """Return the layer of most cycles among what a library computes for a line, as for `model.fit`; "" without any."""
    cycles: Counter[str] = Counter()
    for row in profile.step_costs:
        if line and row.origin.line == line and row.origin.library and row.origin.layer:
            cycles[row.origin.layer] += row.cycles
    names = max(cycles, key=cycles.__getitem__, default="").split("/")
    return "/".join(names if len(names) <= _MOST_NAMES else ["…", *names[-_MOST_NAMES:]])


def run_lines(
    device: str, selection: str, functions: Sequence[ProfiledCalls], operations: Sequence[SingleOperations]
) -> list[str]:
    """Return the lines of a table.

    Args:
        device: the machine that functions were compiled for.
        selection: which functions were chosen.
        functions: rows of functions, in order.
        operations: lines of single operations, in order.
    """
    if not functions:
        return _lines_of_operations(operations) if operations else [f"Functions of JAX: {NOTHING}"]
    named = list(zip(_distinct_names(functions), functions, strict=True))
    compiled = [(name, row) for name, row in named if row.profile is not None]
    without_profile = [(name, row) for name, row in named if row.profile is None]
    lines = [f"Functions of JAX, compiled for {device} ({selection}):"]
    table = [_CALLS_HEAD, *(_cells(name, row) for name, row in compiled)]
    if all(row.worst_cycles is None for _, row in compiled):
        worst = _CALLS_HEAD.index(_WORST)
        table = [(*cells[:worst], *cells[worst + 1 :]) for cells in table]
    lines += text_table(table) if compiled else ["  none"]
    lines += [f"  {name}: {note}" for name, row in compiled for note in _notes(row)]
    if without_profile:
        lines.append("Computed by JAX alone:")
        rows = [
            (name, f"{row.calls:,}", f"{row.calls * row.estimated_cycles:,}", row.reason)
            for name, row in without_profile[:_MOST_ROWS]
        ]
        lines += text_table([_OTHERS_HEAD, *rows])
        lines += [f"  and {len(without_profile) - _MOST_ROWS} more"] if len(without_profile) > _MOST_ROWS else []
    return [*lines, *_lines_of_operations(operations)] if operations else lines


def _cells(name: str, row: ProfiledCalls) -> Row:
    assert row.profile is not None
    cycles, time, tile, limit = program_cells(row.profile)
    total = f"{row.total_cycles:,}" if row.total_cycles else ""
    if row.total_cycles:
        cycles, time = f"{row.cycles:,}", duration(row.cycles / row.profile.target.clock_hz)
    worst = "" if row.worst_cycles is None else f"{row.worst_cycles:,}"
    return name, f"{row.calls:,}", total, cycles, worst, row.profile.device, time, tile, limit


def _notes(row: ProfiledCalls) -> list[str]:
    if row.unrecorded:
        effect = "each branch on data is the dearest" if row.total_cycles else "trip counts are unknown"
        return [f"{effect}, for no call was run again: {row.unrecorded}"]
    if row.sampled_calls is not None and row.sampled_calls < row.calls:
        return [f"{row.sampled_calls:,} of {row.calls:,} calls were run again for their loops and branches on data"]
    return []


def _lines_of_operations(operations: Sequence[SingleOperations]) -> list[str]:
    """Return the lines of the table of single operations, the most expensive first."""
    count = sum(row.operations for row in operations)
    cycles = sum(row.estimated_cycles for row in operations)
    rows: list[Row] = [
        (f"{row.operations:,}", f"{row.estimated_cycles:,}", row.line) for row in operations[:_MOST_ROWS]
    ]
    hint = "jax.jit around the function that calls them makes them one program"
    noun = "operation" if count == 1 else "operations"
    lines = [f"JAX, one operation at a time: {count:,} {noun}, about {cycles:,} cycles; {hint}:"]
    lines += text_table([("operations", "cycles, about", "line"), *rows])
    return [*lines, f"  and {len(operations) - _MOST_ROWS} more lines"] if len(operations) > _MOST_ROWS else lines


def _distinct_names(rows: Sequence[ProfiledCalls]) -> list[str]:
    """Return the name of each row: with line, and the types of arguments that differ, where others have the same."""
    by_name = Counter(row.name for row in rows)
    types_of_line: dict[tuple[str, str], list[tuple[str, ...]]] = defaultdict(list)
    for row in rows:
        types_of_line[row.name, row.line].append(row.types)
    names = []
    uses: Counter[str] = Counter()
    for row in rows:
        parts = [row.name]
        if by_name[row.name] > 1:
            parts = [f"{row.owner}.{row.name}" if row.owner else row.name, row.line]
        parts.append(types_apart(row.types, types_of_line[row.name, row.line]))
        name = ", ".join(filter(None, parts))
        uses[name] += 1  # as of static arguments with other values
        names.append(name if uses[name] == 1 else f"{name}, program {uses[name]}")
    return names


def types_apart(types: Sequence[str], of_all: Sequence[Sequence[str]]) -> str:
    """Return the first types of a program's arguments that not all programs of its name have; "" without any.

    Args:
        types: of the program.
        of_all: of all programs of its name.
    """
    alike = reduce(and_, map(Counter, of_all))
    apart = []
    for each in types:
        alike[each] -= 1
        if alike[each] < 0:
            apart.append(each)
    more = f" and {len(apart) - _MOST_TYPES} more" if len(apart) > _MOST_TYPES else ""
    return " ".join(apart[:_MOST_TYPES]) + more
