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

from ipujax.runtime.logs.log_levels import DEBUG, ERR, INFO, LEVELS, TRACE, WARN, requested_level, write_line
from ipujax.runtime.logs.progress_line import hide_line

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
