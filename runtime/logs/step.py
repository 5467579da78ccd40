"""Steps of a compilation: timed, logged at their ends, shown while they run, ended by an interrupt or a deadline.

Input: name of the program, names of its steps, and each step around its work. Output: seconds by name, log lines at
INFO, a line of progress. A compilation within another belongs to the outer one. A program that does not fit its tiles
is planned again: each attempt is shown by its number and its cost per byte; the time is that of all attempts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

from ipujax.runtime.errors import IpuError
from ipujax.runtime.logs.early_ends import check_deadline, check_interrupt, keeping_interrupts
from ipujax.runtime.logs.log import Log, progress_line

_LOG = Log("jit")


@dataclass(slots=True)
class _Compilation:
    """A compilation that is running.

    Args:
        name: of the program.
        step_names: returns the names of its steps, in order.
        running: the steps that have begun, outermost first: name, and text for the line of progress ("" for the name).
        num_parts: parts of the innermost step that are finished.
        parts_name: plural of their kind.
        spent_seconds: of the same compilation before `start`.
        past_seconds: before the present attempt; 0 in the first.
        start: in seconds of `time.perf_counter`.
    """

    name: str
    step_names: Callable[[], Sequence[str]]
    running: tuple[tuple[str, str], ...] = ()
    num_parts: int = 0
    parts_name: str = ""
    spent_seconds: float = 0.0
    past_seconds: float = 0.0
    start: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Time since the compilation began, all attempts together."""
        return self.spent_seconds + time.perf_counter() - self.start

    def text(self) -> str:
        """Return the line of progress; a narrow terminal cuts off its end, so the time comes first."""
        seconds = self.seconds
        # A program that does not fit its tiles is planned again: what that took before the present plan.
        past = f" ({self.past_seconds / seconds:.0%} past attempts)" if self.past_seconds else ""
        parts = [f"{seconds:.0f} s{past}", *(detail for _, detail in self.running if detail)]
        parts += [name for name, detail in self.running[-1:] if not detail]
        names = self.step_names()
        parts += [f"pass {names.index(name) + 1} of {len(names)}" for name, _ in self.running if name in names]
        parts += [f"{self.num_parts:,} {self.parts_name}"] if self.num_parts else []
        return f"ipujax: {self.name}: {', '.join(parts)}"

    def enter(self, running: tuple[tuple[str, str], ...]) -> None:
        """Set the running steps, of which the innermost has finished no part yet."""
        self.running = running
        self.num_parts = 0


# A context variable, because threads may compile at the same time.
_COMPILATION: ContextVar[_Compilation | None] = ContextVar("ipujax_compilation", default=None)


def compilation_name() -> str:
    """Return the name of the program that is being compiled, for log lines."""
    compilation = _COMPILATION.get()
    return "program" if compilation is None else compilation.name


@contextmanager
def watch_compilation(
    name: str, step_names: Callable[[], Sequence[str]], progress: bool = True, spent_seconds: float = 0.0
) -> Iterator[None]:
    """Open a compilation, whose steps run inside; within another compilation, do nothing.

    Args:
        name: of the program.
        step_names: returns their names in order; called for the line of progress alone.
        progress: show a line of progress on a terminal.
        spent_seconds: of the same compilation before this call.
    """
    if _COMPILATION.get() is not None:
        yield
        return
    compilation = _Compilation(name, step_names, spent_seconds=spent_seconds)
    token = _COMPILATION.set(compilation)
    try:
        with keeping_interrupts(), progress_line(compilation.text) if progress else nullcontext():
            yield
    except Exception as error:
        message = error.what if isinstance(error, IpuError) else error
        _LOG.error("%s: %s: %s", name, type(error).__name__, message)
        raise
    finally:
        _COMPILATION.reset(token)


def _check_end() -> None:
    check_deadline()
    check_interrupt()


@contextmanager
def step(log: Log, name: str, timings: dict[str, float] | None = None, detail: str = "") -> Iterator[None]:
    """Time a step, whose work is inside, and log its end.

    Args:
        log: of the module it belongs to.
        name: as in `step_names` of the compilation, or a part of such a step.
        timings: dict to which its seconds are added, by name.
        detail: text for the line of progress; the name when empty.
    """
    _check_end()
    compilation = _COMPILATION.get()
    start = time.perf_counter()
    outer = () if compilation is None else compilation.running
    if compilation is not None:
        compilation.enter((*outer, (name, detail)))
    try:
        yield
    finally:
        if compilation is not None:
            compilation.enter(outer)
    seconds = time.perf_counter() - start  # not reached when the step fails: it has neither time nor log line
    if timings is not None:
        timings[name] = seconds
    log.info("%s: %s took %.1f ms", compilation_name(), name, 1e3 * seconds)


@contextmanager
def attempt(log: Log, number: int, cycles_per_byte: float) -> Iterator[None]:
    """Time an attempt, numbered from 1, to compile a program such that it fits; its work is inside."""
    compilation = _COMPILATION.get()
    if compilation is not None and number > 1:
        compilation.past_seconds = compilation.seconds
    with step(log, f"attempt {number}", detail=f"attempt {number} at {cycles_per_byte:g} cycles/byte"):
        yield


def count_part(parts_name: str) -> None:
    """Count a finished part of the innermost step, such as one of "equations": for progress, and early ends."""
    _check_end()
    if (compilation := _COMPILATION.get()) is not None:
        compilation.num_parts += 1
        compilation.parts_name = parts_name
