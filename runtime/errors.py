"""Errors a user can meet: one family, one form.

Every error says what happened, where in the user's code, what was expected and found (with units), and what to try.
Errors that are faults of ipujax itself are plain `AssertionError`s.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import jax

from ipujax.runtime.cache import remembered_small

# Frames of ipujax itself, of JAX and of generated code are not the user's; nor is the standard library.
_IPUJAX = f"{Path(__file__).parent.parent}{os.sep}"
_OWN_FILES = (_IPUJAX, f"{Path(jax.__file__).parent}{os.sep}", "<")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib")})
_CONSOLE_CELL = re.compile(r"<ipython-input-(\d+)-")  # what IPython calls a cell of a console
_NOTEBOOK_CELL = re.compile(r"In\[(\d+)\]")  # and its label of any cell
_TYPED_IN = ("<stdin>", "<python-input", "<ipython-input")  # what a console calls the lines typed into it


def user_line() -> str | None:
    """The innermost line of the running call stack that is the user's, as `file:line (function)`.

    That is one outside of installed packages; where all are inside, one of a package that is neither JAX nor ipujax.
    """
    place = user_place()
    return None if place is None else shown_place(place)


Place = tuple[str, int, str]  # file, line, function


def user_place() -> Place | None:
    """What `user_line` says, not yet put in words: for those who keep very many."""
    frame = sys._getframe(1)
    return _innermost(frame, _is_in_project) or _innermost(frame, is_of_user)


def calling_line() -> str:
    """The innermost running line outside all installed packages, `file:line (function)`; "" if there is none."""
    place = _innermost(sys._getframe(1), _is_in_project)
    return "" if place is None else shown_place(place)


def calling_file() -> str:
    """The name of the file of `calling_line`, as `file_name` has it; "" if there is none."""
    place = _innermost(sys._getframe(1), _is_in_project)
    return "" if place is None else file_name(place[0])


def line_of(error: BaseException) -> str | None:
    """The innermost line of the user's that an exception came through, as `user_line` finds it."""
    traceback, places = error.__traceback__, list[Place]()
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append((code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    innermost = (
        place for is_wanted in (_is_in_project, is_of_user) for place in reversed(places) if is_wanted(place[0])
    )
    found = next(innermost, None)
    return None if found is None else shown_place(found)


def _innermost(frame: FrameType | None, is_wanted: Callable[[str], bool]) -> Place | None:
    """The first frame, going outwards, of a wanted file, or that was typed into a console."""
    while frame is not None:
        code = frame.f_code
        typed_in = code.co_filename.startswith("<") and frame.f_globals.get("__name__") == "__main__"
        if typed_in or is_wanted(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None


def shown_place(place: Place) -> str:
    """A place as errors show it, `file:line (function)`; `cell 3, line 5 (function)` in a notebook."""
    file, line, function = place
    name = file_name(file)
    return f"{name}, line {line} ({function})" if name.startswith(_CELL) else f"{name}:{line} ({function})"


_CELL = "cell "


def file_name(file: str) -> str:
    """The name of a file without its folder; `cell 3` for the temporary file of a notebook's cell.

    Args:
        file: its path, as code objects have it.
    """
    number = _cell_number(file)
    return Path(file).name if number is None else f"{_CELL}{number}"


def _cell_number(file: str) -> str | None:
    """The number of the cell that IPython compiled under this name; None for other files.

    Source: `IPython.core.compilerop.CachingCompiler.format_code_name`, since IPython 8.
    """
    label = file
    if not (found := _CONSOLE_CELL.match(file)):
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
        label = named[1] if named else ""
        found = _NOTEBOOK_CELL.fullmatch(label)
    return found[1] if found else None


@remembered_small
def is_of_user(file: str) -> bool:
    """Whether a file is neither ipujax's own, nor JAX's, nor the standard library's, nor generated code."""
    is_standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return not is_standard and not file.startswith(_OWN_FILES)


@remembered_small
def is_installed(file: str) -> bool:
    """Whether a file is an installed package's, the standard library's, ipujax's own, or holds generated code."""
    if file.startswith("<"):
        return not file.startswith(_TYPED_IN)
    folders = file.split(os.sep)
    return file.startswith((*_INSTALLED, _IPUJAX)) or "site-packages" in folders or "dist-packages" in folders


def _is_in_project(file: str) -> bool:
    return not is_installed(file)


class IpuError(Exception):
    """Base of all ipujax errors.

    Args:
        what: what happened, naming the thing it happened to.
        where: the user's source line, as `file:line (function)`; the line that is running when None.
        expected: what would have been right, with units.
        got: what was found instead, with units.
        hint: what to try.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        where = user_line() if where is None or str(where) == "unknown" else where
        self.what, self.where, self.expected, self.got, self.hint = what, where, expected, got, hint
        rows = (("at", where), ("expected", expected), ("got", got), ("try", hint))
        super().__init__("\n".join([what, *(f"  {label}: {value}" for label, value in rows if value is not None)]))


@contextmanager
def raised_at(where: str | None) -> Iterator[None]:
    """Makes errors about arguments name a line that is not running any more; leaves them as they are when None.

    Args:
        where: as `file:line (function)`.
    """
    try:
        yield
    except ArgumentError as error:
        if not where:
            raise
        raise type(error)(error.what, where=where, expected=error.expected, got=error.got, hint=error.hint) from error


class TargetError(IpuError):
    """A machine description that makes no sense, or names nothing known."""


class TensorError(IpuError):
    """A view of a tensor that does not exist: bad slice, reshape to another size, write through a broadcast."""


class MappingError(IpuError):
    """A tile mapping that leaves elements out, holds them twice, or names tiles the target lacks."""


class GraphError(IpuError):
    """A graph built wrongly: unconnected field, wrong dtype or shape, unknown name."""


MAX_COUNT = (1 << 32) - 1  # of iterations, and of cycles of one vertex: Poplar's unsigned int


def whole_number(value: Any, what: str, highest: int = MAX_COUNT, *, where: object = None) -> int:
    """A whole number from 0 to `highest`; booleans are none.

    Args:
        value: what was given.
        what: how the error calls it.
        highest: the greatest that is taken.
        where: as in `IpuError`.

    Raises:
        GraphError: anything else.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) <= highest:
        expected = f"a whole number, 0 … {highest}"
        raise GraphError(what, where=where, expected=expected, got=shortened(value))
    return int(value)


def shortened(value: Any) -> str:
    """What a value is, for an error."""
    return repr(value) if value is None or isinstance(value, str | Real) else f"a {type(value).__name__}"


class VerifyError(IpuError):
    """A rule of the verifier is broken; `rule` names it."""

    def __init__(self, rule: str, what: str, **facts: object) -> None:
        self.rule = rule
        super().__init__(f"[{rule}] {what}", **facts)  # type: ignore[arg-type]


class TileMemoryError(IpuError):
    """A program that does not fit in the memory of a tile.

    Args:
        what: what happened.
        where: as in `IpuError`.
        expected: as in `IpuError`.
        got: as in `IpuError`.
        ways: what to try, by what each changes: "batch", "recompute"… The hint has all of them.
        needed_bytes: what the fullest tile needs; 0 where that is not known.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        got: object = None,
        ways: Mapping[str, str] = MappingProxyType({}),
        needed_bytes: int = 0,
    ) -> None:
        self.ways, self.needed_bytes = ways, needed_bytes
        hint = "\n    or: ".join(ways.values()) or None
        super().__init__(what, where=where, expected=expected, got=got, hint=hint)

    def with_ways(self, ways: Mapping[str, str]) -> TileMemoryError:
        """The same error with other ways out, as a front end has them.

        Args:
            ways: as above.
        """
        facts = {"where": self.where, "expected": self.expected, "got": self.got}
        return TileMemoryError(self.what, **facts, ways=ways, needed_bytes=self.needed_bytes)


class StreamingMemoryError(IpuError):
    """What is kept in streaming memory does not fit there."""


class ArgumentError(IpuError):
    """A call with arguments that cannot be compiled or run."""


class ArgumentTypeError(ArgumentError, TypeError):
    """Such a call where Python and JAX raise a `TypeError`: what is written for `jax.jit` still catches it."""


class ArgumentValueError(ArgumentError, ValueError):
    """Such a call where JAX raises a `ValueError`."""


class ArgumentOverflowError(ArgumentError, OverflowError):
    """Such a call with a Python number that its dtype cannot hold, where JAX raises an `OverflowError`."""


class DeletedArgumentError(ArgumentError, RuntimeError, ValueError):
    """A call with an array that was donated, before or in it, where JAX raises a `RuntimeError` or a `ValueError`."""


class ArgumentRuntimeError(ArgumentError, RuntimeError):
    """A call that fails while it runs, where JAX raises a `RuntimeError`: a function on the host breaks its promise."""


class ScheduleError(ArgumentError):
    """A pipeline schedule that is unknown, does not suit so many stages or micro-batches, or has tasks out of order."""


class ArgumentNameError(ArgumentError, NameError):
    """Such a call where JAX raises a `NameError`: an axis it does not know."""


class ArgumentAttributeError(ArgumentError, AttributeError):
    """An attribute that an object lacks, or lacks yet, where Python raises an `AttributeError`; `hasattr` is false."""


class EngineError(IpuError):
    """A run that cannot start or go on: nothing loaded, no such program, a stream nobody connected, an abort."""


class ProfileError(IpuError):
    """A figure was asked for that this profile cannot know."""
