"""What a profile says to someone who asks what to change, in sentences with numbers.

Input: `Figures`. Output: an `Answer` for each question: which operation limits the model, which tile is fullest and
with what, which IPU waits and when, and which line of source to change. Each says what it is about in `subject` and how
large it is in `share`, so that it can be checked without reading the sentence.
Limits: hints are rules of thumb, see `hints`; nothing is tried out (`ipu.advise` does that).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.memory import LiveItem
from ipujax.runtime.profile import TRACE_PHASES, Figures, Operation, slices
from ipujax.runtime.profile.text import size
from ipujax.runtime.views.answer import Answer
from ipujax.runtime.views.hints import MEMORY_HINTS, TIME_HINTS, WAIT_HINTS, hints
from ipujax.runtime.views.layer_answer import LAYER, layer_answer
from ipujax.runtime.views.operation_view import OperationRow, operation_rows
from ipujax.runtime.views.situation import (
    allowed_by_exchange,
    largest_variable,
    memory_situation,
    part_situation,
    parts_of_tile,
    program_situation,
)
from ipujax.runtime.views.stage_answer import STAGE, stage_answer


def answers(profile: Figures) -> tuple[Answer, ...]:
    """All answers, in the order in which they are of use; where something is not known, the answer says what.

    A question that does not arise, as that of the stages of no pipeline, has no answer.

    Args:
        profile: of a run.
    """
    found = (_known(question, find, profile) for question, find in QUESTIONS.items())
    return tuple(answer for answer in found if answer.sentence)


def _known(question: str, find: Callable[[Figures], Answer], profile: Figures) -> Answer:
    try:
        return find(profile)
    except ProfileError as error:  # an unknown trip count, or a file of an older version
        return Answer(question, f"Not known: {error.what}.", error.hint or "")


LIMITS = "Which operation limits this model?"
FULLEST = "Which tile is fullest, and with what?"
WAITS = "Where does an IPU wait?"
LINE = "Which line should change?"

_NAMES = 3  # of a line that are looked at
_BEGUN = 0.02  # of the computation of an IPU
_MOST = 0.5  # of the cycles of a line, or of the bytes of a tile
_ALIKE = 0.15  # of a run: IPUs whose waits differ by less wait alike
_SHORT = 0.02  # share of a run that is not worth a change


def limiting_operation(profile: Figures) -> Answer:
    """The operation that takes most time."""
    rows = operation_rows(profile)
    if not rows or not rows[0].cycles:
        return Answer(LIMITS, "Nothing takes time.")
    top, cycles = rows[0], profile.busy_cycles
    share = top.cycles / max(1, cycles)
    whole = "the run" if profile.target.num_ipus == 1 else "the busy cycles of all IPUs"
    text = f"{top.name} takes {share:.1%} of {whole}: {top.cycles:,} of {cycles:,} cycles, at {top.line}."
    if top.peak_share is not None and top.flops:
        text += f" It computes {_rate(top.flops_per_second)}, {top.peak_share:.1%} of an IPU's peak"
        text += f" in {top.precision}."
        text += f" {_roof(top, profile)}"
    elif top.moved_bytes:
        text += f" It moves {size(top.moved_bytes)} and computes nothing."
    hint = hints(TIME_HINTS, part_situation(profile, [top], top.phase or _phase(top, profile)))
    return Answer(LIMITS, text, hint, top.name, share, "operations")


def _phase(row: OperationRow, profile: Figures) -> str:
    """The phase that takes most of an operation in files that do not say: that of the line that it leads."""
    line = next((line for line in profile.operations() if line.names[0] in row.name.split(", ")), None)
    return line.dominant if line is not None else "compute" if row.flops else "exchange"


def _roof(row: OperationRow, profile: Figures) -> str:
    """What exchange allows an operation to compute, where that is less than the peak."""
    allowed = allowed_by_exchange(row, profile)
    if allowed is None:
        return ""
    return f"At its {row.intensity:,.1f} operations for each exchanged byte, exchange allows {_rate(allowed)}."


def _rate(flops_per_second: float) -> str:
    """Operations a second in the largest unit that gives at least one."""
    for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops_per_second >= factor:
            return f"{flops_per_second / factor:,.1f} {unit}FLOP/s"
    return f"{flops_per_second:,.1f} FLOP/s"


def fullest_tile(profile: Figures) -> Answer:
    """The tile that needs most memory, what for, and the variable that takes most of it."""
    memory, have = profile.memory, profile.target.bytes_per_tile
    tile, used = memory.worst_tile, memory.max_tile_bytes
    text = f"Tile {tile:,}, with {size(used)} of {size(have)} ({used / have:.1%})"
    if used > have:
        text += f", {size(used - have)} more than it has"
    parts = parts_of_tile(memory)
    text += ": " + ", ".join(f"{size(number)} {name}" for number, name in parts[:3]) + "."
    named = [item for item in memory.largest if item.name != item.category]
    largest = largest_variable(memory)
    if named and named[0] is not largest:
        text += f" The largest thing with a name is {named[0].readable}{_described(named[0])}."
    if largest is not None:
        text += f" The largest variable is {largest.readable}{_described(largest)}."
    try:
        situation = program_situation(profile)
    except ProfileError:  # without trip counts memory is known, and not what runs
        situation = memory_situation(profile)
    hint = hints(MEMORY_HINTS, situation)
    return Answer(FULLEST, text, hint, f"tile {tile}", used / have, "memory")


def _described(item: LiveItem) -> str:
    """The role, bytes, line and layer of a variable."""
    whole = f" of {size(item.whole_bytes)} on all tiles" if item.whole_bytes > item.num_bytes else ""
    role = f" ({item.role})" if item.role else ""
    layer = f", in {item.layer}" if item.layer else ""
    place = f", at {item.origin}" if item.origin.line or item.origin.path else ""
    return f"{role}, {size(item.num_bytes)}{whole}{place}{layer}"


def waiting_ipu(profile: Figures) -> Answer:
    """The IPU that does nothing for longest, and when: before its first computation, after its last, or between."""
    if profile.target.num_ipus == 1:
        return Answer(WAITS, "There is one IPU; it waits for no other.", section="trace")
    idle = idle_cycles(profile)
    total, by_ipu = max(1, profile.cycles), idle.sum(1)
    ipu = int(by_ipu.argmax())
    share = float(by_ipu[ipu] / total)
    if share < _SHORT:
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


def idle_cycles(profile: Figures) -> np.ndarray:
    """Cycles in which each IPU does nothing, from the start to the end of the whole run.

    Computing begins when an IPU has done a fiftieth of it, and ends when it has done all but a fiftieth: setting a
    counter to zero does not end the filling of a pipeline.

    Args:
        profile: of a run.

    Returns:
        int64[ipus, 3]: before its first computation, between computations, after its last.
    """
    trace, cut = profile.execution_trace, slices(profile.execution_trace)
    idle = np.zeros((len(trace.clocks), 3), np.int64)
    is_idle, is_compute = (cut.phase == TRACE_PHASES.index(name) for name in ("idle", "compute"))
    for ipu, clock in enumerate(trace.clocks.tolist()):
        mine = cut.ipu == ipu
        first, last = _busy_period(cut.start[mine & is_compute], cut.cycles[mine & is_compute])
        waits, start = cut.cycles[mine & is_idle], cut.start[mine & is_idle]
        part = np.where(start < first, 0, np.where(start > last, 2, 1))
        idle[ipu] = np.bincount(part, waits, 3).astype(np.int64)
        idle[ipu, 2] += profile.cycles - clock
    return idle


def _busy_period(start: np.ndarray, cycles: np.ndarray) -> tuple[int, int]:
    """When computing begins and ends, by the starts of its slices; all waiting is filling where there is none."""
    if not len(start):
        return np.iinfo(np.int64).max, 0
    done = cycles.cumsum()
    first, last = np.searchsorted(done, [done[-1] * _BEGUN, done[-1] * (1 - _BEGUN)])
    return int(start[first]), int(start[last])


def _awaited_phase(profile: Figures, ipu: int) -> str | None:
    """What an IPU waits for longest: the first phase of the step after each wait; None when it never waits."""
    cut = slices(profile.execution_trace)
    mine = np.flatnonzero(cut.ipu == ipu)
    waits = mine[:-1][cut.phase[mine[:-1]] == TRACE_PHASES.index("idle")]
    if not len(waits):
        return None
    work = profile.execution_trace.work[cut.span[waits]]
    after = np.where(work[:, 2] > 0, 2, np.where(work[:, 3] > 0, 3, work.argmax(1)))  # exchanges are what is met for
    cycles = np.bincount(after, cut.cycles[waits], len(TRACE_PHASES))
    return TRACE_PHASES[int(cycles.argmax())].replace("_", " ")


def line_to_change(profile: Figures) -> Answer:
    """The line of the user's source that costs most."""
    lines = profile.operations()
    known = [row for row in lines if row.origin.line]
    if not known:
        return Answer(LINE, "No line of source is known for what takes time.", section="source")
    top = known[0]
    if top.share < _SHORT and lines[0] is not top:
        other = f"{lines[0].origin} takes {lines[0].share:.1%}"
        text = f"No line of source takes more than {top.share:.1%} of the run; {other}."
        return Answer(LINE, text, "", top.origin.line, top.share, "source")
    phases = sorted(top.phases, key=lambda name: -top.phases[name])
    shares = {name: top.phases[name] / max(1, top.cycles) for name in phases}
    most = phases[: 1 if shares[phases[0]] > _MOST else 2]
    said = " and ".join(f"{_spoken(name)} ({shares[name]:.0%})" for name in most)
    text = f"{top.origin.line}: {top.share:.1%} of the run, {top.cycles:,} cycles, of them {said}."
    lost = [item for item in profile.fallbacks if item.cycles > _SHORT * profile.cycles]
    if lost:
        text += f" {lost[0].operation} at {lost[0].origin} runs on one tile only, {lost[0].cycles:,} cycles each time."
    rows = _rows_of(top, profile)
    tried = {name: hints(TIME_HINTS, part_situation(profile, rows, name)) for name in most}
    hint = "; ".join(f"{_spoken(name)}: {text}" if len(most) > 1 else text for name, text in tried.items() if text)
    return Answer(LINE, text, hint, top.origin.line, top.share, "source")


def _rows_of(line: Operation, profile: Figures) -> list[OperationRow]:
    """The operations of a line, most cycles first; in older files those that run its costliest with others."""
    names = set(line.names[:_NAMES])
    rows = operation_rows(profile)
    return [row for row in rows if row.line == str(line.origin)] or [
        row for row in rows if names.intersection(row.name.split(", "))
    ]


def _spoken(phase: str) -> str:
    return phase.replace("_", " ")


QUESTIONS: dict[str, Callable[[Figures], Answer]] = {
    LIMITS: limiting_operation,
    LAYER: layer_answer,
    STAGE: stage_answer,
    LINE: line_to_change,
    FULLEST: fullest_tile,
    WAITS: waiting_ipu,
}
