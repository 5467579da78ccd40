"""Places of calls: the line of the script, and the function of JAX that it calls.

Input: the running frames. Output: a `CallPlace`, or None for calls of ipujax itself, which are no part of a script.
"""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import jax

from ipujax.runtime.errors import is_installed, is_of_ipujax, is_of_jax, shown_place
from ipujax.runtime.sources import current_texts

_JAX_FOLDER = str(Path(jax.__file__).parent) + os.sep
_OWN_FOLDER = str(Path(__file__).parent) + os.sep  # what watches, which stands between a script and JAX
_JAX, _WATCHING, _IPUJAX, _LIBRARY, _SCRIPT = range(5)


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Where a call of a compiled function comes from.

    Args:
        code: code of the script's innermost frame; of the library's that is nearest to JAX if no frame is the script's.
        line: its line.
        function: name of the function of JAX that other code calls there, as "cg"; "" if none is in between.
    """

    code: CodeType
    line: int
    function: str = ""

    def __str__(self) -> str:
        return shown_place((self.code.co_filename, self.line, self.code.co_name))


@dataclass(slots=True)
class PlaceFinder:
    """Finds places of calls; what it knows of codes stays."""

    _kinds: dict[CodeType, int] = field(default_factory=dict)

    def find(self, frame: FrameType | None) -> CallPlace | None:
        """Return the place of a call from a frame, or from those that called it; None for calls of ipujax."""
        nearest: CallPlace | None = None
        function = ""
        while frame is not None:
            code = frame.f_code
            kind = self._kinds.get(code)
            if kind is None:
                kind = self._kinds[code] = _kind_of(code.co_filename)
            if kind == _IPUJAX:
                return nearest
            if kind == _SCRIPT:
                return CallPlace(code, frame.f_lineno, function)
            if kind == _LIBRARY and nearest is None:
                nearest = CallPlace(code, frame.f_lineno, function)
            if kind == _JAX and nearest is None and not code.co_name.startswith(_WRAPPERS):
                function = code.co_name
            frame = frame.f_back
        return nearest


# Names of functions of JAX that stand around those that a script calls.
_WRAPPERS = ("_", "<", "reraise_with_filtered_traceback", "deferring_", "wrapp", "cache_miss")


def _kind_of(file: str) -> int:
    if file.startswith(_OWN_FOLDER):
        return _WATCHING
    if is_of_jax(file):
        return _JAX
    if is_of_ipujax(file):
        return _IPUJAX
    return _LIBRARY if is_installed(file) else _SCRIPT


def is_of_script_or_library(file: str) -> bool:
    """Return whether a file is neither JAX's nor of ipujax."""
    return _kind_of(file) in (_LIBRARY, _SCRIPT)


def is_defined_by_jax(source: str) -> bool:
    """Return whether the source of a jaxpr, `name at file:line`, is a file of JAX."""
    return source.partition(" at ")[2].startswith(_JAX_FOLDER)


def has_place(source: str) -> bool:
    """Return whether JAX knows where a function is defined; not of a callable object."""
    return " at " in source


def defining_class(path: str, line: int) -> str:
    """Return the name of the innermost class around a line of a file; "" if there is none."""
    try:
        tree = ast.parse("\n".join(current_texts([path]).get(path, [])))
    except SyntaxError:  # the file has changed, or is a cell with commands of IPython
        return ""
    classes = [x for x in ast.walk(tree) if isinstance(x, ast.ClassDef) and x.lineno <= line <= (x.end_lineno or 0)]
    return max(classes, key=lambda x: x.lineno).name if classes else ""
