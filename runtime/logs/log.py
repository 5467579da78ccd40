"""Log lines of one module, to the environment's destination and handlers of the host program; the line of progress.

Input: a module of `MODULES`, a level and a text. Output: a line in PopART's form, if the environment asks for it,

    [2026-03-01 12:00:00.000] [ipujax:passes] [info] step: fuse took 12.3 ms

Levels and destination are read from the environment whenever a line may be written, so that a program can set them
while it runs:

    IPUJAX_LOG_LEVEL     a level, for all modules; OFF if it is not set
    IPUJAX_LOG_CONFIG    a JSON file, or JSON itself, {"passes": "DEBUG", …}: levels of single modules, which go first
    IPUJAX_LOG_DEST      stderr (if it is not set), stdout, or a file, to which lines are added

and a record of the logger `ipujax.<module>` of the standard library, if that is enabled for the level. Where nobody has
configured logging, that library prints warnings; not if the environment asks for levels.

The line of progress is the present text of a function, on standard error, rewritten in place from two seconds on, four
times a second, and cleared at the end; nothing where that is not a terminal. It is written with carriage returns and
spaces alone, which every terminal understands.
Source: PopART user guide, "Output format".
Limits: text that others print begins behind the line of progress; log lines of ipujax hide it first.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TextIO

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target import nearest

WAIT_SECONDS = 2.0  # before the line appears: short compilations show none
_EVERY_SECONDS = 0.25


class _Line:
    """Line drawn by a thread, because a pass that computes reports nothing."""

    def __init__(self, stream: TextIO, text: Callable[[], str]) -> None:
        self._stream = stream
        self._text = text
        self._width = 0  # characters that are on the terminal now
        self._lock = Lock()  # of stream and width: `hide` runs in the thread that compiles
        self._is_over = Event()
        self._thread = Thread(target=self._draw_until_over, name="ipujax progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.hide()

    def hide(self) -> None:
        """Clear the line, until it is drawn again."""
        with self._lock:
            if self._width:
                self._stream.write(f"\r{' ' * self._width}\r")
                self._stream.flush()
                self._width = 0

    def _draw_until_over(self) -> None:
        """Draw the line again and again, in a thread; programs that compile fast never show it."""
        wait = WAIT_SECONDS
        while not self._is_over.wait(wait):
            wait = _EVERY_SECONDS
            # One column is left free: a full line would wrap, and a carriage return would not reach its start.
            text = self._text()[: shutil.get_terminal_size().columns - 1]
            with self._lock:
                self._stream.write(f"\r{text.ljust(self._width)}")
                self._stream.flush()
                self._width = len(text)


_LINE: ContextVar[_Line | None] = ContextVar("ipujax_progress_line", default=None)


@contextmanager
def progress_line(text: Callable[[], str]) -> Iterator[None]:
    """Show progress of the work inside on a terminal; another thread calls `text` for the present line."""
    stream = sys.stderr
    if stream is None or not stream.isatty():  # None in a process without a console
        yield
        return
    line = _Line(stream, text)
    token = _LINE.set(line)
    line.start()
    try:
        yield
    finally:
        _LINE.reset(token)
        line.stop()


def hide_line() -> None:
    """Clear the line of progress, if there is one, before other text is written."""
    if (line := _LINE.get()) is not None:
        line.hide()


LEVEL = "IPUJAX_LOG_LEVEL"
CONFIG = "IPUJAX_LOG_CONFIG"
DESTINATION = "IPUJAX_LOG_DEST"

TRACE = 5  # the standard library has no level below DEBUG, which is 10
DEBUG = logging.DEBUG
INFO = logging.INFO
WARN = logging.WARNING
ERR = logging.ERROR
_OFF = logging.CRITICAL + 1
LEVELS: dict[str, int] = {"OFF": _OFF, "ERR": ERR, "WARN": WARN, "INFO": INFO, "DEBUG": DEBUG, "TRACE": TRACE}

# A module of the log is a subject for users, not a file. A test compares these texts with docs/command_line.md.
MODULES: dict[str, str] = {
    "jit": "tracing, calls that run as plain JAX, gradients summed over replicas, IPUs that nothing uses, compilations"
    " that fail",
    "passes": "each pass over the jaxpr",
    "lowering": "from the jaxpr to a graph, ways to cut it into stages, primitives without a tile-parallel rule",
    "poplin": "products whose plan needs more memory than it may take",
    "fit": "each attempt to fit a program: cost per byte, the tile that it is planned for, whether it fits",
    "compile": "verification, costs, memory and clocks; the graph, and the fullest tiles",
    "search": "each plan that a search estimates and compiles",
    "profiling": "functions of a script that cannot be compiled",
    "cache": "programs read from a cache on disk, programs that are not cached, directories that cannot be used",
    "distributed": "processes that a launcher started, and that are no job",
    "keras": "the cycles of each batch that a Keras model compiles",
}


def requested_level(module: str) -> int | None:
    """Return the level that the environment requests of one of `MODULES`, None without a request."""
    config = os.environ.get(CONFIG)
    level = os.environ.get(LEVEL)
    if config and module in (levels := _parse_config(config)):
        return levels[module]
    if level:
        return _parse_level(level, LEVEL)
    return _OFF if config else None  # a map of some modules turns the others off


def check_environment() -> None:
    """Refuse invalid variables of the environment, before a compilation begins."""
    for module in MODULES:
        requested_level(module)


def write_line(line: str) -> None:
    """Write a line, without its newline, to the destination of the environment."""
    destination = os.environ.get(DESTINATION) or "stderr"
    if destination in ("stderr", "stdout"):
        print(line, file=getattr(sys, destination), flush=True)  # looked up now: tests and notebooks replace streams
        return
    try:
        with open(destination, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        title = f"{DESTINATION} names a file that cannot be written"
        got = f"{destination!r}: {error.strerror}"
        raise ArgumentError(title, expected="stderr, stdout, or a file", got=got) from error


def _parse_config(config: str) -> dict[str, int]:
    """Return the levels by module of a variable of the environment, which is JSON or the path of a file of it."""
    is_inline = config.lstrip().startswith("{")
    try:
        levels = json.loads(config if is_inline else Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        expected = "a JSON file, or JSON that begins with {"
        got = f"{config!r}: {error.strerror}"
        raise ArgumentError(f"{CONFIG} names a file that cannot be read", expected=expected, got=got) from error
    except ValueError as error:
        raise ArgumentError(f"{CONFIG} must be JSON", expected=_EXAMPLE, got=f"{config!r}: {error}") from error
    if not isinstance(levels, Mapping):
        raise ArgumentError(f"{CONFIG} must map modules to levels", expected=_EXAMPLE, got=type(levels).__name__)
    for module in levels:
        if module not in MODULES:
            title = f"{CONFIG} names an unknown module: {module!r}"
            hint = nearest(module, MODULES)
            raise ArgumentError(title, expected=f"one of {', '.join(MODULES)}", got=repr(module), hint=hint)
    return {module: _parse_level(level, f"{CONFIG}, for {module!r},") for module, level in levels.items()}


_EXAMPLE = '{"passes": "DEBUG", "compile": "INFO"}'


def _parse_level(level: object, setting: str) -> int:
    if not isinstance(level, str) or level.upper() not in LEVELS:
        expected = f"one of {', '.join(LEVELS)}"
        raise ArgumentError(
            f"{setting} must be a log level", expected=expected, got=repr(level), hint=nearest(level, LEVELS)
        )
    return LEVELS[level.upper()]


_NAMES = {level: name for name, level in LEVELS.items()}
_CALLER = 3  # frames from `findCaller` up to the caller of `info`: a method that is added in between changes it


@dataclass(frozen=True, slots=True)
class Log:
    """The log of a module.

    Args:
        module: one of `MODULES`.
    """

    module: str

    def error(self, text: str, *args: object) -> None:
        """Log a failure: `text % args`, as the standard library does."""
        self._log(ERR, text, args)

    def warning(self, text: str, *args: object) -> None:
        """Log a request of the user that is not met."""
        self._log(WARN, text, args)

    def info(self, text: str, *args: object) -> None:
        """Log a step of a compilation."""
        self._log(INFO, text, args)

    def debug(self, text: str, *args: object) -> None:
        """Log figures of a graph."""
        self._log(DEBUG, text, args)

    def trace(self, text: str, *args: object) -> None:
        """Log figures of a tile."""
        self._log(TRACE, text, args)

    def is_on(self, level: int) -> bool:
        """Return whether lines of a level are written anywhere, to be asked before costly texts are computed."""
        threshold = requested_level(self.module)
        return self._reaches_host(level, threshold) or (threshold is not None and level >= threshold)

    def _reaches_host(self, level: int, threshold: int | None) -> bool:
        logger = self._logger
        # The last resort of the standard library prints warnings; an error is raised too, and would appear twice.
        has_last_resort = threshold is None and level < ERR
        return logger.isEnabledFor(level) and (has_last_resort or logger.hasHandlers())

    @property
    def _logger(self) -> logging.Logger:
        return logging.getLogger(f"ipujax.{self.module}")

    def _log(self, level: int, text: str, args: tuple[object, ...]) -> None:
        """Write a line to the handlers of the host program, and to the destination that the environment names."""
        threshold = requested_level(self.module)
        to_host = self._reaches_host(level, threshold)
        to_destination = threshold is not None and level >= threshold
        if not (to_host or to_destination):
            return
        hide_line()  # else the text would begin behind the line of progress
        logger = self._logger
        file, line, function, _ = logger.findCaller(stacklevel=_CALLER)
        record = logger.makeRecord(logger.name, level, file, line, text, args, None, function)
        if level == TRACE:
            record.levelname = _NAMES[TRACE]  # the standard library has no such level
        if to_host:
            logger.handle(record)
        if to_destination:
            write_line(self._format_record(record))

    def _format_record(self, record: logging.LogRecord) -> str:
        date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        level = _NAMES[record.levelno].lower()
        return f"[{date}.{int(record.msecs):03d}] [ipujax:{self.module}] [{level}] {record.getMessage()}"
