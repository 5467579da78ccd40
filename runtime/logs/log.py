"""Log lines of one module: to the environment's destination, and to handlers of the host program.

Input: a module of `MODULES`, a level and a text. Output: a line in PopART's form, if the environment asks for it,

    [2026-03-01 12:00:00.000] [ipujax:passes] [info] step: fuse took 12.3 ms

and a record of the logger `ipujax.<module>` of the standard library, if that is enabled for the level. Where nobody has
configured logging, that library prints warnings; not if the environment asks for levels.
Source: PopART user guide, "Output format".
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from ipujax.runtime.logs.log_levels import DEBUG, ERR, INFO, LEVELS, TRACE, WARN, asked_level, write_line
from ipujax.runtime.logs.progress_line import hide_line

_NAMES = {level: name for name, level in LEVELS.items()}
_CALLER = 3  # frames from where a record is made up to who called one of the five methods


@dataclass(frozen=True, slots=True)
class Log:
    """The log of a module.

    Args:
        module: one of `MODULES`.
    """

    module: str

    def error(self, text: str, *args: object) -> None:
        """Something went wrong; `text % args`, as with the standard library."""
        self._say(ERR, text, args)

    def warning(self, text: str, *args: object) -> None:
        """Something cannot be done as asked."""
        self._say(WARN, text, args)

    def info(self, text: str, *args: object) -> None:
        """What is going on, at large."""
        self._say(INFO, text, args)

    def debug(self, text: str, *args: object) -> None:
        """Facts of a graph."""
        self._say(DEBUG, text, args)

    def trace(self, text: str, *args: object) -> None:
        """Facts of a tile."""
        self._say(TRACE, text, args)

    def is_on(self, level: int) -> bool:
        """Whether anybody gets lines of a level: what is dear to find out is asked for only then."""
        asked = asked_level(self.module)
        return self._reaches_host(level, asked) or (asked is not None and level >= asked)

    def _reaches_host(self, level: int, asked: int | None) -> bool:
        logger = self._logger
        has_last_resort = asked is None and level < ERR  # an error is raised too: nobody misses it
        return logger.isEnabledFor(level) and (has_last_resort or logger.hasHandlers())

    @property
    def _logger(self) -> logging.Logger:
        return logging.getLogger(f"ipujax.{self.module}")

    def _say(self, level: int, text: str, args: tuple[object, ...]) -> None:
        asked = asked_level(self.module)
        to_host, to_own = self._reaches_host(level, asked), asked is not None and level >= asked
        if not (to_host or to_own):
            return
        hide_line()
        logger = self._logger
        file, line, function, _ = logger.findCaller(stacklevel=_CALLER)
        record = logger.makeRecord(logger.name, level, file, line, text, args, None, function)
        if level == TRACE:
            record.levelname = _NAMES[TRACE]  # the standard library has no such level
        if to_host:
            logger.handle(record)
        if to_own:
            write_line(self._line(record))

    def _line(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        level = _NAMES[record.levelno].lower()
        return f"[{when}.{int(record.msecs):03d}] [ipujax:{self.module}] [{level}] {record.getMessage()}"
