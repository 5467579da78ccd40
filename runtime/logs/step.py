"""A step of a compilation: timed, logged when it ends, shown as progress while it runs.

Input: what is compiled, the steps ahead, and each step around its work. Output: seconds by name, log lines at INFO, a
line of progress. What is compiled within a compilation belongs to that.
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
        running: the steps that have begun, outermost first: name and what else there is to say.
    """

    name: str
    ahead: tuple[str, ...]
    running: tuple[tuple[str, str], ...] = ()
    start: float = field(default_factory=time.perf_counter)

    def text(self) -> str:
        """How far it is."""
        parts = [name for name, _ in self.running[-1:]]
        parts += [f"pass {self.ahead.index(n) + 1} of {len(self.ahead)}" for n, _ in self.running if n in self.ahead]
        parts += [detail for _, detail in self.running if detail]
        return f"ipujax: {self.name}: {', '.join([*parts, f'{time.perf_counter() - self.start:.0f} s'])}"


_WATCH: ContextVar[_Watch | None] = ContextVar("ipujax_compilation", default=None)


def subject() -> str:
    """What is being compiled, for log lines."""
    watch = _WATCH.get()
    return "program" if watch is None else watch.name


@contextmanager
def watching(name: str, ahead: Sequence[str], progress: bool = True) -> Iterator[None]:
    """A compilation, whose steps run inside; part of the outer one if there is one.

    Args:
        name: what is compiled.
        ahead: the names of its steps, in order.
        progress: whether to show a line of progress on a terminal.
    """
    if _WATCH.get() is not None:
        yield
        return
    watch = _Watch(name, tuple(ahead))
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
        detail: more to show as progress while it runs.
    """
    watch, start = _WATCH.get(), time.perf_counter()
    outer = () if watch is None else watch.running
    if watch is not None:
        watch.running = (*outer, (name, detail))
    try:
        yield
    finally:
        if watch is not None:
            watch.running = outer
    seconds = time.perf_counter() - start
    if timings is not None:
        timings[name] = seconds
    log.info("%s: %s took %.1f ms", subject(), name, 1e3 * seconds)
