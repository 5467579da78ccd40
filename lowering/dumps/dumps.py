"""Dumps of one lowering, as environment variables ask, each written as soon as its form exists: they are on disk if a
later pass fails.

    IPUJAX_DOT         after:PASS[,after:PASS…]: DOT of the jaxpr after a pass ("trace": before the first), and after
                       "lower" of the graph
    IPUJAX_DUMP        ir, tiles, or both with a comma: JSON of jaxprs, graph and program; tile map of variables
    IPUJAX_DUMP_DIR    their folder, created if absent; by default the current folder

Input: these variables, read at each lowering; the jaxpr after each pass, then graph and program. Output: files
`FUNCTION.PASS.dot`, `FUNCTION.ir.json` and `FUNCTION.tiles.json`. They are replaced when the program is planned again,
and by another function, or another shape, of the same name. The file of intermediate forms holds

    {"format": "ipujax ir", "version": 1, "function": "step", "passes": [{"name": "trace", "jaxpr": 0}, …],
     "jaxprs": see `json_forms`, "graph": the same, "failed": {"step": "fuse", "error": "TypeError: …"}}

"graph" is null where there is none yet, "failed" where nothing did. A pass that changes nothing names the jaxpr before.
Source: PopART user guide, "Environment variables": DOT checks, tensor tile map, the dump of the IR.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ipujax.lowering.dumps.dot import graph_dot, jaxpr_dot
from ipujax.lowering.dumps.json_forms import JaxprList, graph_json, tile_map
from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, IpuError
from ipujax.runtime.files import file_problem, write_file
from ipujax.runtime.graph import Graph, Program
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


VERSION = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """The step that failed, and its error."""

    step: str
    error: BaseException


class Dumps:
    """Writer of the dumps of one lowering.

    Args:
        name: name of the function.
        request: dumps to write.

    Attributes:
        jaxprs: the jaxpr after each pass so far, by step of `steps`, in their order.
    """

    def __init__(self, name: str, request: DumpRequest) -> None:
        self._name = name
        self._request = request
        self.jaxprs: dict[str, ClosedJaxpr] = {}

    def passed(self, step: str, jaxpr: ClosedJaxpr) -> None:
        """Takes the jaxpr after a pass, as soon as the pass ends; writes its drawing if it is requested."""
        self.jaxprs[step] = jaxpr
        if step in self._request.dots:
            self._write(f"{step}.dot", jaxpr_dot(jaxpr, f"{self._name} after {step}"))

    def lowered(self, graph: Graph, program: Program) -> None:
        """Writes the dumps of the lowered program that were requested: as DOT, as JSON, and the map of tiles.

        Raises:
            ArgumentError: a file that cannot be written.
        """
        if LOWERED in self._request.dots:
            self._write(f"{LOWERED}.dot", graph_dot(graph, program, f"{self._name} after {LOWERED}"))
        if "ir" in self._request.kinds:
            self._write("ir.json", _text(intermediate_json(self._name, self.jaxprs, (graph, program))))
        if "tiles" in self._request.kinds:
            self._write("tiles.json", _text(tile_map(graph)))

    @contextmanager
    def writing_on_failure(self) -> Iterator[None]:
        """Context of a compilation: if a step of it fails, the error gets a note that names the step.

        Where dumps of intermediate forms are requested, those from before the step are written; the note says where.
        """
        try:
            yield
        except Exception as error:
            # Every step but the last has noted its jaxpr when it ended.
            step = next(step for step in steps() if step not in self.jaxprs)
            where = f"{DUMP}=ir writes what was made before it"
            if "ir" in self._request.kinds:
                forms = intermediate_json(self._name, self.jaxprs, failure=Failure(step, error))
                where = f"what was made before it is in {self._write('ir.json', _text(forms))}"
            # An `IpuError` names the failure itself: it needs a note only where it leads to a file.
            if "ir" in self._request.kinds or not isinstance(error, IpuError):
                error.add_note(f"the step {step!r} of compiling {self._name} failed; {where}")
            raise

    def _write(self, suffix: str, text: str) -> Path:
        """Writes a dump to a file in the folder of the request, which is made if need be; returns the file's path.

        The file is named after the function that is compiled, then the suffix.
        """
        folder = self._request.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from error
        name = re.sub(r"[^\w.-]+", "_", self._name).strip("_")  # no brackets, as of `<lambda>`
        path = folder / f"{name}.{suffix}"
        _write_text(path, text)
        return path


def intermediate_json(
    name: str,
    jaxprs: Mapping[str, ClosedJaxpr],
    lowered: tuple[Graph, Program] | None = None,
    failure: Failure | None = None,
) -> dict[str, Any]:
    """Return what each step of a compilation made, as data for a JSON file: jaxprs after each pass, then the graph.

    Args:
        name: name of the function.
        jaxprs: the jaxpr after each pass, by its name.
        lowered: graph and program; None where there are none yet.
        failure: the step that failed; None where none did.
    """
    numbered = JaxprList()
    passes = [{"name": step, "jaxpr": numbered.number_of(jaxpr)} for step, jaxpr in jaxprs.items()]
    failed = None
    if failure is not None:
        failed = {"step": failure.step, "error": f"{type(failure.error).__name__}: {failure.error}"}
    return {
        "format": "ipujax ir",
        "version": VERSION,
        "function": name,
        "passes": passes,
        "jaxprs": numbered.json(),
        "graph": None if lowered is None else graph_json(*lowered),
        "failed": failed,
    }


def write_json(path: str | PathLike[str], data: Any) -> None:
    """Writes lists and dicts of texts and finite numbers as JSON; an existing file is replaced."""
    if not isinstance(path, str | PathLike):
        raise ArgumentTypeError("a dump needs a path", expected="a str or an os.PathLike", got=type(path).__name__)
    _write_text(path, _text(data))


def _write_text(path: str | PathLike[str], text: str) -> None:
    try:
        write_file(path, text.encode())
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def _text(data: Any) -> str:
    return json.dumps(data, allow_nan=False, ensure_ascii=False) + "\n"


def _unwritable(path: object, error: OSError | ValueError) -> ArgumentError:
    hint = "a path to a file in a folder that exists"
    return ArgumentError(f"the dump cannot be written to {str(path)!r}", got=file_problem(error), hint=hint)
