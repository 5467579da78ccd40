"""A step of a compilation: timed, logged when it ends, shown as progress while it runs.

Input: what is compiled, the steps ahead, and each step around its work. Output: seconds by name, log lines at INFO, a
line of progress. What is compiled within a compilation belongs to that. A program that does not fit its tiles is
planned again: each attempt is shown by its number and its cost per byte; the time shown is that of all attempts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

from ipujax.runtime.errors import IpuError
from ipujax.runtime.logs.log import Log
from ipujax.runtime.logs.progress_line import progress_line

_LOG = Log("jit")


@dataclass(slots=True)
class _Watch:
    """A compilation that is going on.

    Args:
        name: what is compiled.
        ahead: the names of its steps, in order.
        running: the steps that have begun, outermost first: name and what there is to say instead.
        done: how many parts of the innermost step are done, and what they are called.
        spent_seconds: what its compilation took before it was watched.
        past_seconds: what was spent before the present attempt; 0 in the first.
        start: when it began to be watched, in seconds of `time.perf_counter`.
    """

    name: str
    ahead: tuple[str, ...]
    running: tuple[tuple[str, str], ...] = ()
    done: tuple[int, str] = (0, "")
    spent_seconds: float = 0.0
    past_seconds: float = 0.0
    start: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Time of the whole compilation until now."""
        return self.spent_seconds + time.perf_counter() - self.start

    def text(self) -> str:
        """How far it is; what a narrow terminal cuts off comes last."""
        seconds, (count, parts_name) = self.seconds, self.done
        past = f" ({self.past_seconds / seconds:.0%} past attempts)" if self.past_seconds else ""
        parts = [f"{seconds:.0f} s{past}", *(detail for _, detail in self.running if detail)]
        parts += [name for name, detail in self.running[-1:] if not detail]
        parts += [f"pass {self.ahead.index(n) + 1} of {len(self.ahead)}" for n, _ in self.running if n in self.ahead]
        parts += [f"{count:,} {parts_name}"] if count else []
        return f"ipujax: {self.name}: {', '.join(parts)}"


_WATCH: ContextVar[_Watch | None] = ContextVar("ipujax_compilation", default=None)


def subject() -> str:
    """What is being compiled, for log lines."""
    watch = _WATCH.get()
    return "program" if watch is None else watch.name


@contextmanager
def watching(name: str, ahead: Sequence[str], progress: bool = True, spent_seconds: float = 0.0) -> Iterator[None]:
    """A compilation, whose steps run inside; part of the outer one if there is one.

    Args:
        name: what is compiled.
        ahead: the names of its steps, in order.
        progress: whether to show a line of progress on a terminal.
        spent_seconds: what the same compilation took before, while it was not inside.
    """
    if _WATCH.get() is not None:
        yield
        return
    watch = _Watch(name, tuple(ahead), spent_seconds=spent_seconds)
    token = _WATCH.set(watch)
    try:
        with progress_line(watch.text) if progress else nullcontext():
            yield
    except Exception as error:
        what = error.what if isinstance(error, IpuError) else error
        _LOG.error("%s: %s: %s", name, type(error).__name__, what)
        raise
    finally:
        _WATCH.reset(token)


@contextmanager
def step(log: Log, name: str, timings: dict[str, float] | None = None, detail: str = "") -> Iterator[None]:
    """A step, whose work is inside.

    Args:
        log: of the module it belongs to.
        name: as in `ahead` of the compilation, or a part of such a step.
        timings: takes its seconds, by name, once it is done.
        detail: what to show as progress while it runs; its name when empty.
    """
    watch, start = _WATCH.get(), time.perf_counter()
    outer = () if watch is None else watch.running
    if watch is not None:
        watch.running, watch.done = (*outer, (name, detail)), (0, "")
    try:
        yield
    finally:
        if watch is not None:
            watch.running, watch.done = outer, (0, "")
    seconds = time.perf_counter() - start
    if timings is not None:
        timings[name] = seconds
    log.info("%s: %s took %.1f ms", subject(), name, 1e3 * seconds)


@contextmanager
def attempt(log: Log, number: int, cycles_per_byte: float) -> Iterator[None]:
    """An attempt to compile a program such that it fits, whose work is inside.

    Args:
        log: of the module it belongs to.
        number: counted from 1.
        cycles_per_byte: the cost per byte at which it is planned.
    """
    watch = _WATCH.get()
    if watch is not None and number > 1:
        watch.past_seconds = watch.seconds
    with step(log, f"attempt {number}", detail=f"attempt {number} at {cycles_per_byte:g} cycles/byte"):
        yield


def count_part(parts_name: str) -> None:
    """Counts one more part of the innermost step as done, for progress while it runs.

    Args:
        parts_name: plural of what is counted, as "equations".
    """
    if (watch := _WATCH.get()) is not None:
        watch.done = watch.done[0] + 1, parts_name
