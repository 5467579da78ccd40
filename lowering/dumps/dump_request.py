"""Dumps requested by environment variables, and their folder.

    IPUJAX_DOT         after:PASS[,after:PASS…]: DOT of the jaxpr after a pass ("trace": before the first), and after
                       "lower" of the graph
    IPUJAX_DUMP        ir, tiles, or both with a comma: JSON of jaxprs, graph and program; tile map of variables
    IPUJAX_DUMP_DIR    their folder, created if absent; by default the current folder

Input: these variables, read at each lowering. Output: `DumpRequest`.
Source: PopART user guide, "Environment variables": DOT checks, tensor tile map, the dump of the IR.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target import nearest

DOT, DUMP, FOLDER = "IPUJAX_DOT", "IPUJAX_DUMP", "IPUJAX_DUMP_DIR"
ENVIRONMENT = (DOT, DUMP, FOLDER)
LOWERED = "lower"  # behind all passes: the graph
TRACE = "trace"  # before all passes
KINDS = ("ir", "tiles")
_AFTER = "after:"


def steps() -> tuple[str, ...]:
    """Steps of a lowering, in order."""
    from ipujax.lowering.passes import PASSES  # a request without dumps needs no passes

    return TRACE, *(name for name, _ in PASSES), LOWERED


@dataclass(frozen=True, slots=True)
class DumpRequest:
    """Dumps to write.

    Args:
        dots: steps after which DOT is written.
        kinds: dumps of KINDS to write.
        folder: folder of the files.
    """

    dots: frozenset[str]
    kinds: frozenset[str]
    folder: Path

    @staticmethod
    def from_environment() -> DumpRequest:
        """Read the request from the environment; refuse unknown passes and kinds of dumps."""
        dots = os.environ.get(DOT, "")
        dumps = os.environ.get(DUMP, "")
        after = [_step_of(part.strip()) for part in dots.split(",") if part.strip()]
        kinds = [part.strip() for part in dumps.split(",") if part.strip()]
        for kind in kinds:
            _check_name(kind, KINDS, f"{DUMP} names an unknown dump: {kind!r}")
        return DumpRequest(frozenset(after), frozenset(kinds), Path(os.environ.get(FOLDER) or "."))


def _step_of(part: str) -> str:
    """The step in `after:STEP`."""
    if not part.startswith(_AFTER):
        raise ArgumentError(f"{DOT} must name a pass", expected="after:PASS, after:PASS, …", got=repr(part))
    name = part.removeprefix(_AFTER)
    _check_name(name, steps(), f"{DOT} names an unknown pass: {name!r}")
    return name


def _check_name(name: str, valid: Sequence[str], message: str) -> None:
    if name not in valid:
        raise ArgumentError(message, expected=f"one of {', '.join(valid)}", got=repr(name), hint=nearest(name, valid))
