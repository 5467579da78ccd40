"""Answers to the first questions about a profile, in sentences with numbers.

Input: `Figures`. Output: an `Answer` for each question: the costliest operation, the fullest tile and its
contents, the IPU that waits longest, and the line of source to change. `subject` and `share` repeat the sentence as
values, so that tests can check them.
Limits: hints are rules of thumb, see `hints`; no change is compiled (`ipu.advise` does that).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.graph import HOST_LATENCY
from ipujax.runtime.memory import LIVE, LiveItem
from ipujax.runtime.profile import TRACE_PHASES, Figures, slices
from ipujax.runtime.profile.text import size
from ipujax.runtime.tensor import OF_CALLER, readable_name
from ipujax.runtime.views.hints import MEMORY_HINTS, TIME_HINTS, WAIT_HINTS, hints
from ipujax.runtime.views.operation_view import OperationRow, operation_rows
from ipujax.runtime.views.part_answers import LAYER, STAGE, Answer, layer_answer, stage_answer
from ipujax.runtime.views.situation import (
    allowed_by_exchange,
    largest_variable,
    memory_situation,
    part_situation,
    parts_of_tile,
    program_situation,
)
from ipujax.runtime.views.time_view import wait_view


def answers(profile: Figures) -> tuple[Answer, ...]:
    """Return the answers in the order of `QUESTIONS`, most useful first; an unknown one names the missing figure.

    A question that does not arise, as that of the stages of no pipeline, has no answer.
    """
    replies = (_reply(question, answer, profile) for question, answer in QUESTIONS.items())
    return tuple(reply for reply in replies if reply.sentence)


def _reply(question: str, answer: Callable[[Figures], Answer], profile: Figures) -> Answer:
    try:
        return answer(profile)
    except ProfileError as error:  # an unknown trip count
        return Answer(question, f"Not known: {error.what}.", error.hint or "")


MOST = "Which operation takes most?"
FULLEST = "Which tile is fullest, and with what?"
WAITS = "Where does an IPU wait?"
LINE = "Which line should change?"
UNPRICED = "Which operations have no price?"

_NUM_UNPRICED = 3  # unpriced operations that are listed
_FAR_MORE = 2  # times the cycles of the costliest operation
_MAJORITY = 0.5  # of the cycles of a line
_ALIKE = 0.15  # of a run: IPUs whose waits differ by less wait alike
_SMALL_SHARE = 0.02  # of a run: a smaller part is not worth a change
_PARTS = np.array([0, 1, 1, 2])  # of filling, steady and draining, by position in `WAIT_CAUSES`


def costliest_operation(profile: Figures) -> Answer:
    """Name the operation with most busy cycles, its rate and the bound of exchange."""
    rows = [row for row in operation_rows(profile) if row.line != str(HOST_LATENCY)]  # of no operation
    if not rows or not rows[0].cycles:
        return Answer(MOST, "No operation takes time.")
    top = rows[0]
    cycles = profile.busy_cycles
    share = top.cycles / max(1, cycles)
    total = "the run" if profile.target.num_ipus == 1 else "the busy cycles of all IPUs"
    text = f"{top.name} takes {share:.1%} of {total}: {top.cycles:,} of {cycles:,} cycles, at {top.line}."
    if top.flops:
        text += f" It computes {_rate(top.flops_per_second)}, {top.peak_share:.1%} of an IPU's peak"
        text += f" in {top.precision}."
        text += f" {_exchange_bound(top, profile)}"
    elif top.moved_bytes:
        text += f" It moves {size(top.moved_bytes)} and computes nothing."
    text += _repeated_operation(rows, top, cycles)
    hint = hints(TIME_HINTS, part_situation(profile, [top], top.phase))
    return Answer(MOST, text, hint, top.name, share, "operations")


def _repeated_operation(rows: Sequence[OperationRow], top: OperationRow, total: int) -> str:
    """Name the operation of one line in several layers that takes far more than the costliest row; "" without one."""
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in rows:
        if row.cycles:
            alike[row.name, row.line].append(row.cycles)
    (name, line), each = max(alike.items(), key=lambda item: sum(item[1]))
    if sum(each) < _FAR_MORE * top.cycles:
        return ""
    return f" All {len(each)} rows of {name} at {line} together take {sum(each) / max(1, total):.1%}."


def _exchange_bound(row: OperationRow, profile: Figures) -> str:
    rate = allowed_by_exchange(row, profile)
    if rate is None:
        return ""
    return f"At its {row.intensity:,.1f} operations for each exchanged byte, exchange allows {_rate(rate)}."


def _rate(flops_per_second: float) -> str:
    """Format a rate in the largest unit of which it is at least one."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops_per_second >= factor:
            return f"{flops_per_second / factor:,.1f} {unit}FLOP/s"
    return f"{flops_per_second:,.1f} FLOP/s"


def fullest_tile(profile: Figures) -> Answer:
    """Name the tile with most bytes, its three largest roles and its largest variable."""
    memory = profile.memory
    capacity_bytes = profile.target.bytes_per_tile
    tile = memory.worst_tile
    used_bytes = memory.max_tile_bytes
    fullness = used_bytes / capacity_bytes
    text = f"Tile {tile:,}, with {size(used_bytes)} of {size(capacity_bytes)} ({fullness:.1%})"
    if used_bytes > capacity_bytes:
        text += f", {size(used_bytes - capacity_bytes)} more than it has"
    parts = parts_of_tile(memory)
    text += ": " + ", ".join(f"{size(num_bytes)} {name}" for num_bytes, name in parts[:3]) + "."
    named = [item for item in memory.largest if item.category in (*LIVE, "constant")]
    largest = largest_variable(memory)
    if named and named[0] is not largest:
        text += f" The largest thing with a name is {named[0].readable}{_describe(named[0])}."
    if largest is not None:
        text += f" The largest variable is {largest.readable}{_describe(largest)}."
    try:
        situation = program_situation(profile)
    except ProfileError:  # memory does not depend on trip counts
        situation = memory_situation(profile)
    hint = hints(MEMORY_HINTS, situation)
    return Answer(FULLEST, text, hint, f"tile {tile}", fullness, "memory")


def _describe(item: LiveItem) -> str:
    total = f" of {size(item.whole_bytes)} on all tiles" if item.whole_bytes > item.num_bytes else ""
    role = f" ({item.role})" if item.role else ""
    layer = f", in {item.layer}" if item.layer else ""
    is_known = bool(item.origin.line or item.origin.path) and not item.origin.line.startswith(OF_CALLER)
    line = f", at {item.origin}" if is_known else ""
    return f"{role}, {size(item.num_bytes)}{total}{line}{layer}"


def waiting_ipu(profile: Figures) -> Answer:
    """Name the IPU with most idle cycles, divided into filling, steady and draining."""
    if profile.target.num_ipus == 1:
        return _collective_waits(profile)
    idle = idle_cycles(profile)
    by_ipu = idle.sum(1)
    total = max(1, profile.cycles)
    ipu = int(by_ipu.argmax())
    share = float(by_ipu[ipu] / total)
    if share < _SMALL_SHARE:
        return Answer(WAITS, f"No IPU waits for more than {share:.1%} of the run.", "", f"IPU {ipu}", share, "trace")
    parts = dict(zip(("filling", "steady", "draining"), (idle[ipu] / total).tolist(), strict=True))
    busiest = int(by_ipu.argmin())
    longest = max(parts, key=lambda name: parts[name])
    text = (
        f"IPU {ipu} does nothing for {share:.1%} of the run ({int(by_ipu[ipu]):,} of {total:,} cycles): "
        f"{parts['filling']:.1%} before its first computation (filling), {parts['steady']:.1%} between its "
        f"computations, {parts['draining']:.1%} after its last (draining). "
        f"The mean of all IPUs is {by_ipu.mean() / total:.1%}."
    )
    if (awaited := _awaited_phase(profile, ipu)) is not None:
        text += f" It waits most before {awaited}."
    waits_alike = bool(by_ipu.max() - by_ipu.min() < _ALIKE * total)
    situation = replace(program_situation(profile), wait=longest, waits_alike=waits_alike, busiest_ipu=busiest)
    hint = hints(WAIT_HINTS, situation)
    return Answer(WAITS, text, hint, f"IPU {ipu}", share, "trace")


def _collective_waits(profile: Figures) -> Answer:
    """Name the share of the run in which replicas of one IPU each exchange data, and the costliest such operation."""
    if profile.num_ipus == 1:
        return Answer(WAITS, "")  # it waits for no other
    cycles = profile.phase_cycles["global_exchange"]
    share = cycles / max(1, profile.cycles)
    if not cycles:
        return Answer(
            WAITS, f"The {profile.num_ipus:,} IPUs exchange no data; none waits for another.", section="trace"
        )
    rows = [row for row in profile.step_costs if row.phases.get("global_exchange")]
    top = max(rows, key=lambda row: row.phases["global_exchange"])
    text = (
        f"The {profile.num_ipus:,} IPUs run one program in step; for {share:.1%} of the run ({cycles:,} of "
        f"{profile.cycles:,} cycles) each waits for data of others in collectives. Most of that is "
        f"{readable_name(top.name)}, {top.phases['global_exchange'] / cycles:.0%}, at {top.origin}."
    )
    return Answer(WAITS, text, "", "collectives", share, "trace")


def idle_cycles(profile: Figures) -> np.ndarray:
    """Sum the idle cycles of each IPU, int64[ipus, 3]: before its first computation, between computations, after."""
    waits = wait_view(profile)
    idle = np.zeros((len(profile.execution_trace.clocks), 3), np.int64)
    np.add.at(idle, (waits.ipu, _PARTS[waits.cause]), waits.cycles)
    return idle


def _awaited_phase(profile: Figures, ipu: int) -> str | None:
    """Return the phase for which an IPU waits longest; None when it never waits."""
    cut = slices(profile.execution_trace)
    on_ipu = np.flatnonzero(cut.ipu == ipu)
    # After its last slice an IPU waits for the end of the run, and for no phase.
    before_last = on_ipu[:-1]
    waits = before_last[cut.phase[before_last] == TRACE_PHASES.index("idle")]
    if not len(waits):
        return None
    work = profile.execution_trace.work[cut.span[waits]]
    # IPUs wait for others at global and host exchanges (columns 2 and 3), else for the longest phase of the step.
    awaited = np.where(work[:, 2] > 0, 2, np.where(work[:, 3] > 0, 3, work.argmax(1)))
    cycles = np.bincount(awaited, cut.cycles[waits], len(TRACE_PHASES))
    return TRACE_PHASES[int(cycles.argmax())].replace("_", " ")


def line_to_change(profile: Figures) -> Answer:
    """Name the line of the user's source with most cycles, its phases and its fallback."""
    lines = profile.operations()
    with_line = [row for row in lines if row.origin.line]
    if not with_line:
        return Answer(LINE, "No line of source is known for what takes time.", section="source")
    top = with_line[0]
    if top.share < _SMALL_SHARE and lines[0] is not top:
        other = f"{lines[0].origin} takes {lines[0].share:.1%}"
        text = f"No line of source takes more than {top.share:.1%} of the run; {other}."
        return Answer(LINE, text, "", top.origin.line, top.share, "source")
    phases = sorted(top.phases, key=lambda name: -top.phases[name])
    shares = {name: top.phases[name] / max(1, top.cycles) for name in phases}
    main_phases = phases[: 1 if shares[phases[0]] > _MAJORITY else 2]
    listed = " and ".join(f"{_in_words(name)} ({shares[name]:.0%})" for name in main_phases)
    text = f"{top.origin.line}: {top.share:.1%} of the run, {top.cycles:,} cycles, of them {listed}."
    fallbacks = [item for item in profile.fallbacks if item.cycles > _SMALL_SHARE * profile.cycles]
    if fallbacks:
        item = fallbacks[0]
        text += f" {item.operation} at {item.origin} runs on one tile only, {item.cycles:,} cycles each time."
    rows = [row for row in operation_rows(profile) if row.line == str(top.origin)]
    by_phase = {name: hints(TIME_HINTS, part_situation(profile, rows, name)) for name in main_phases}
    has_several = len(main_phases) > 1
    hint = "; ".join(f"{_in_words(name)}: {text}" if has_several else text for name, text in by_phase.items() if text)
    return Answer(LINE, text, hint, top.origin.line, top.share, "source")


def _in_words(phase: str) -> str:
    return phase.replace("_", " ")


# In the order of a report's first screen: time, its layers, stages and lines, then memory and waiting.
def unpriced_operations(profile: Figures) -> Answer:
    """Name the operations that the cycles do not count, with their lines and runs; empty where there are none."""
    rows = profile.unpriced
    if not rows:
        return Answer(UNPRICED, "")
    listed = [f"{row.operation} at {row.origin} ({_runs(row.runs)} on the {row.place})" for row in rows[:_NUM_UNPRICED]]
    more = f" and {len(rows) - _NUM_UNPRICED} more" if len(rows) > _NUM_UNPRICED else ""
    text = f"{', '.join(listed)}{more}: only their transfers are counted."
    hint = "the operation in JAX, or a codelet with its cycles, see ipu.codelet_call"
    return Answer(UNPRICED, text, hint, rows[0].origin.line, section="warnings")


def _runs(runs: int | None) -> str:
    return "runs depend on data" if runs is None else f"{runs:,} run{'' if runs == 1 else 's'}"


QUESTIONS: dict[str, Callable[[Figures], Answer]] = {
    MOST: costliest_operation,
    LAYER: layer_answer,
    STAGE: stage_answer,
    LINE: line_to_change,
    FULLEST: fullest_tile,
    WAITS: waiting_ipu,
    UNPRICED: unpriced_operations,
}
