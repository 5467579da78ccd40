"""Which log lines the environment asks for, and where they go.

    IPUJAX_LOG_LEVEL     a level, for all modules; OFF if it is not set
    IPUJAX_LOG_CONFIG    a JSON file, or JSON itself, {"passes": "DEBUG", …}: levels of single modules, which go first
    IPUJAX_LOG_DEST      stderr (if it is not set), stdout, or a file, to which lines are added

Input: these variables, read whenever a line may be written. Output: a level, and a written line.
Source: Poplar & PopLibs user guide, "Logging" (levels, destination); PopART user guide, "Environment variables"
(`POPART_LOG_CONFIG`) and "Output format".
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target import nearest

LEVEL, CONFIG, DESTINATION = "IPUJAX_LOG_LEVEL", "IPUJAX_LOG_CONFIG", "IPUJAX_LOG_DEST"

TRACE, DEBUG, INFO, WARN, ERR = 5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR
_OFF = logging.CRITICAL + 1
LEVELS: dict[str, int] = {"OFF": _OFF, "ERR": ERR, "WARN": WARN, "INFO": INFO, "DEBUG": DEBUG, "TRACE": TRACE}

MODULES: dict[str, str] = {
    "jit": "tracing, calls that run as plain JAX, gradients summed over replicas, IPUs that nothing uses, compilations"
    " that fail",
    "passes": "each pass over the jaxpr",
    "lowering": "from the jaxpr to a graph, ways to cut it into stages, primitives without a tile-parallel rule",
    "poplin": "products whose plan needs more memory than it may take",
    "fit": "each cost per byte at which a program is planned, and whether it fits",
    "compile": "verification, costs, memory and clocks; the graph, and the fullest tiles",
    "keras": "the cycles of each batch that a Keras model compiles",
}


def asked_level(module: str) -> int | None:
    """The level that the environment asks of a module; None where it asks for nothing.

    Args:
        module: one of `MODULES`.

    Raises:
        ArgumentError: an unknown level or module, with the nearest known name, or a map that cannot be read.
    """
    config, given = os.environ.get(CONFIG), os.environ.get(LEVEL)
    if config and module in (levels := _levels(config)):
        return levels[module]
    if given:
        return _level(given, LEVEL)
    return _OFF if config else None


def check_environment() -> None:
    """Looks at what the environment asks for, before anything is done.

    Raises:
        ArgumentError: as `asked_level`.
    """
    for module in MODULES:
        asked_level(module)


def write_line(line: str) -> None:
    """Writes a line to where the environment says.

    Args:
        line: without its end.

    Raises:
        ArgumentError: a file that cannot be written.
    """
    where = os.environ.get(DESTINATION) or "stderr"
    if where in ("stderr", "stdout"):
        print(line, file=getattr(sys, where), flush=True)
        return
    try:
        with open(where, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        what, expected = f"{DESTINATION} names a file that cannot be written", "stderr, stdout, or a file"
        raise ArgumentError(what, expected=expected, got=f"{where!r}: {error.strerror}") from error


def _levels(config: str) -> dict[str, int]:
    """The levels of a map of modules."""
    inline = config.lstrip().startswith("{")
    try:
        given = json.loads(config if inline else Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        what, expected = f"{CONFIG} names a file that cannot be read", "a JSON file, or JSON that begins with {"
        raise ArgumentError(what, expected=expected, got=f"{config!r}: {error.strerror}") from error
    except ValueError as error:
        raise ArgumentError(f"{CONFIG} is not JSON", expected=_EXAMPLE, got=f"{config!r}: {error}") from error
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{CONFIG} is no map of modules", expected=_EXAMPLE, got=type(given).__name__)
    for module in given:
        if module not in MODULES:
            what, expected = f"{CONFIG} names no module of ipujax: {module!r}", f"one of {', '.join(MODULES)}"
            raise ArgumentError(what, expected=expected, got=repr(module), hint=nearest(module, MODULES))
    return {module: _level(level, f"{CONFIG}, of {module!r},") for module, level in given.items()}


_EXAMPLE = '{"passes": "DEBUG", "compile": "INFO"}'


def _level(given: object, where: str) -> int:
    if not isinstance(given, str) or given.upper() not in LEVELS:
        what, expected = f"{where} is no log level", f"one of {', '.join(LEVELS)}"
        raise ArgumentError(what, expected=expected, got=repr(given), hint=nearest(given, LEVELS))
    return LEVELS[given.upper()]
