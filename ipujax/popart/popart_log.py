"""Log lines of PopART's modules: `popart.getLogger("session").setLevel("DEBUG")`, and environment variables.

`IPUJAX_POPART_LOG_LEVEL` sets the level of all modules, `IPUJAX_POPART_LOG_CONFIG` names a JSON file with a level a
module, `IPUJAX_POPART_LOG_DEST` is "stderr", "stdout" or the name of a file. Lines are
`[time] [popart:module] [level] text`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path

from ipujax.popart.exceptions import unknown_name


def initializePoplarDebugInfo(filename: str, format: str = "json") -> None:
    """Warn: names of operations are in profiles, no file has them.

    Args:
        filename: is not written.
        format: has no effect.
    """
    warnings.warn(f"initializePoplarDebugInfo has no effect here: {filename} is not written", UserWarning, stacklevel=2)


def closePoplarDebugInfo() -> None:
    """Do nothing, see `initializePoplarDebugInfo`."""


LEVELS = {
    "TRACE": 5,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    # Above CRITICAL, so that nothing passes.
    "OFF": logging.CRITICAL + 10,
}
ALL_MODULES = ("all", "popart")  # names that stand for every module
_ROOT = "ipujax.popart.log"
LOG_LEVEL = "IPUJAX_POPART_LOG_LEVEL"
LOG_DEST = "IPUJAX_POPART_LOG_DEST"
LOG_CONFIG = "IPUJAX_POPART_LOG_CONFIG"


class Logger:
    """The logger of a module.

    Args:
        name: "session", "ir", "devicex", or another; "all" for all.
    """

    def __init__(self, name: str = "all") -> None:
        self._name = name
        self._log = logger(name)

    def setLevel(self, level: str) -> None:
        """Set the level of a module.

        Args:
            level: TRACE, DEBUG, INFO, WARN, ERR, CRITICAL or OFF.

        Raises:
            popart_exception: an unknown level, with the nearest.
        """
        if level.upper() not in LEVELS:
            raise unknown_name("a logger has a level", level, LEVELS)
        self._log.setLevel(LEVELS[level.upper()])

    def debug(self, info: str) -> None:
        """Log a line of level DEBUG."""
        self._log.debug(info)

    def info(self, info: str) -> None:
        """Log a line of level INFO."""
        self._log.info(info)

    def warn(self, info: str) -> None:
        """Log a line of level WARN."""
        self._log.warning(info)

    def error(self, info: str) -> None:
        """Log a line of level ERR."""
        self._log.error(info)

    def critical(self, info: str) -> None:
        """Log a line of level CRITICAL."""
        self._log.critical(info)


def getLogger(name: str = "all") -> Logger:
    """Return the logger of a module.

    Args:
        name: of the module; "all" for all.
    """
    return Logger(name)


def logger(name: str) -> logging.Logger:
    """Return the logger of a module, of the standard library.

    Args:
        name: of the module.
    """
    root = logging.getLogger(_ROOT)
    if not root.handlers:
        _configure(root)
    return root if name in ALL_MODULES else logging.getLogger(f"{_ROOT}.{name}")


def _configure(root: logging.Logger) -> None:
    """Set destination and levels of the log from PopART's environment variables."""
    target = os.environ.get(LOG_DEST, "stderr")
    streams = {"stderr": sys.stderr, "stdout": sys.stdout}
    handler = logging.StreamHandler(streams[target]) if target in streams else logging.FileHandler(target)
    handler.setFormatter(_Format())
    root.addHandler(handler)
    # Otherwise a program with a root handler would print each line twice.
    root.propagate = False
    root.setLevel(LEVELS.get(os.environ.get(LOG_LEVEL, "OFF").upper(), LEVELS["OFF"]))
    config = os.environ.get(LOG_CONFIG)
    for module, level in (json.loads(Path(config).read_text()) if config else {}).items():
        Logger(module).setLevel(level)


class _Format(logging.Formatter):
    """The guide's form of a line."""

    def format(self, record: logging.LogRecord) -> str:
        time = self.formatTime(record, "%Y-%m-%d %H:%M:%S")
        module = record.name.removeprefix(_ROOT).lstrip(".")
        name = f"popart:{module}" if module else "popart"
        return f"[{time}.{int(record.msecs):03d}] [{name}] [{record.levelname.lower()}] {record.getMessage()}"
