"""Errors for users: one family, one form.

Every error has a message, the user's source line, expected and actual value with units, and a hint. Faults of ipujax
itself are plain `AssertionError`s.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Number, Real
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import jax

from ipujax.runtime.cache import remembered_small

# Files that are not the user's: ipujax, JAX, generated code ("<string>", "<frozen …>"), and the standard library.
_IPUJAX = f"{Path(__file__).parent.parent}{os.sep}"
_JAX = f"{Path(jax.__file__).parent}{os.sep}"
_SCRIPTS = sysconfig.get_path("scripts") + os.sep  # of installed packages, as the command `ipujax`
_SKIPPED_FILES = (_IPUJAX, _JAX, _SCRIPTS, "<")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib", "scripts")})
_CONSOLE_CELL = re.compile(r"<ipython-input-(\d+)-")  # file name of a cell of an IPython console
_NOTEBOOK_CELL = re.compile(r"In\[(\d+)\]")  # IPython's label of any cell
_TYPED_IN = ("<stdin>", "<python-input", "<ipython-input")  # file names of lines typed into a console


def user_line() -> str | None:
    """Return the innermost line of the user's in the running call stack, as `file:line (function)`.

    That is a line outside of installed packages; if there is none, one of a package other than JAX and ipujax.
    """
    place = user_place()
    return None if place is None else shown_place(place)


Place = tuple[str, int, str]  # file, line, function


def user_place() -> Place | None:
    """Return the place of `user_line`; smaller than its text, for code that stores very many."""
    frame = sys._getframe(1)
    return _innermost_place(frame, _is_in_project) or _innermost_place(frame, is_of_user)


def calling_line() -> str:
    """Return the innermost running line outside of installed packages, `file:line (function)`; "" if there is none."""
    place = _innermost_place(sys._getframe(1), _is_in_project)
    return "" if place is None else shown_place(place)


def calling_file() -> str:
    """Return the file of `calling_line`, as `file_name` does; "" if there is none."""
    place = _innermost_place(sys._getframe(1), _is_in_project)
    return "" if place is None else file_name(place[0])


def line_of(error: BaseException) -> str | None:
    """Return the innermost line of the user's in the traceback of an exception, as `user_line` does."""
    traceback = error.__traceback__
    places: list[Place] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append((code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    innermost = (
        place for is_wanted in (_is_in_project, is_of_user) for place in reversed(places) if is_wanted(place[0])
    )
    place = next(innermost, None)
    return None if place is None else shown_place(place)


def _innermost_place(frame: FrameType | None, is_wanted: Callable[[str], bool]) -> Place | None:
    """Return the place of the innermost frame that is in a wanted file, or was typed into a console."""
    while frame is not None:
        code = frame.f_code
        # Generated code has such a file name too, but not the globals of the main module.
        typed_in = code.co_filename.startswith("<") and frame.f_globals.get("__name__") == "__main__"
        if typed_in or is_wanted(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None


def shown_place(place: Place) -> str:
    """Return a place as errors show it, `file:line (function)`; `cell 3, line 5 (function)` in a notebook."""
    file, line, function = place
    name = file_name(file)
    return f"{name}, line {line} ({function})" if name.startswith(_CELL) else f"{name}:{line} ({function})"


_CELL = "cell "


def file_name(file: str) -> str:
    """Return the name of a file without its folder, or `cell 3` for the temporary file of a notebook's cell."""
    number = _cell_number(file)
    return os.path.basename(file) if number is None else f"{_CELL}{number}"


def _cell_number(file: str) -> str | None:
    """Return the number of the cell that IPython compiled under this file name; None for other files."""
    # Source: `IPython.core.compilerop.CachingCompiler.format_code_name`, since IPython 8. IPython is looked up, not
    # imported: in a process without it there are no cells.
    match = _CONSOLE_CELL.match(file)
    if not match:
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
        match = _NOTEBOOK_CELL.fullmatch(named[1] if named else "")
    return match[1] if match else None


@remembered_small
def is_of_user(file: str) -> bool:
    """Return whether a file is neither of ipujax, nor of JAX, nor of the standard library, nor generated code."""
    # Code typed into a console is the user's, though its file names look like those of generated code.
    # Packages may be installed in a folder of the standard library.
    is_standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return file.startswith(_TYPED_IN) or (not is_standard and not file.startswith(_SKIPPED_FILES))


def is_of_ipujax(file: str) -> bool:
    """Return whether a file is of ipujax."""
    return file.startswith(_IPUJAX)


def is_of_jax(file: str) -> bool:
    """Return whether a file is of JAX."""
    return file.startswith(_JAX)


@remembered_small
def is_installed(file: str) -> bool:
    """Return whether a file is of an installed package, the standard library or ipujax, or generated code."""
    if file.startswith("<"):
        return not file.startswith(_TYPED_IN)
    folders = file.split(os.sep)
    return file.startswith((*_INSTALLED, _IPUJAX)) or "site-packages" in folders or "dist-packages" in folders


def _is_in_project(file: str) -> bool:
    return not is_installed(file)


class IpuError(Exception):
    """Base of all ipujax errors.

    Args:
        what: message, with the name of the function, operation or variable.
        where: the user's source line, as `file:line (function)`; `user_line()` if None.
        expected: the valid values, with units.
        got: the actual value, with units.
        hint: change that may help.
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
        # "unknown" is the text of an empty `Origin`.
        where = user_line() if where is None or str(where) == "unknown" else where
        self.what = what
        self.where = where
        self.expected = expected
        self.got = got
        self.hint = hint
        rows = (("at", where), ("expected", expected), ("got", got), ("try", hint))
        super().__init__("\n".join([what, *(f"  {label}: {value}" for label, value in rows if value is not None)]))

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by `__init__`, which takes other arguments than `args`. An error has to leave a process whatever it names,
        # arrays and graphs too: such facts become texts.
        return _rebuilt, (type(self), self.args, {name: _portable(value) for name, value in vars(self).items()})


def _rebuilt(kind: type[IpuError], args: tuple[Any, ...], facts: dict[str, Any]) -> IpuError:
    error = kind.__new__(kind, *args)
    error.args = args  # an OSError leaves them to `__init__`
    error.__dict__.update(facts)
    return error


def _portable(fact: Any) -> Any:
    """Return a fact of an error as a value that any process can read."""
    if fact is None or type(fact) is str or isinstance(fact, Number):
        return fact
    if isinstance(fact, Mapping):
        return {str(name): _portable(value) for name, value in fact.items()}
    return type(fact)(map(_portable, fact)) if type(fact) in (list, tuple) else str(fact)


@contextmanager
def raised_at(where: str | None) -> Iterator[None]:
    """Give an `ArgumentError` raised inside the context the line `where`, `file:line (function)`, if there is one."""
    try:
        yield
    except ArgumentError as error:
        if not where:
            raise
        raise type(error)(error.what, where=where, expected=error.expected, got=error.got, hint=error.hint) from error


class TargetError(IpuError):
    """An inconsistent machine description, or an unknown name in one."""


class TensorError(IpuError):
    """A view of a tensor that does not exist: bad slice, reshape to another size, write through a broadcast."""


class MappingError(IpuError):
    """A tile mapping that leaves elements out, has them twice, or names tiles the target lacks."""


class GraphError(IpuError):
    """An invalid graph: unconnected field, wrong dtype or shape, unknown name."""


MAX_COUNT = (1 << 32) - 1  # of iterations, and of cycles of one vertex: Poplar's unsigned int


def whole_number(value: Any, what: str, highest: int = MAX_COUNT, *, where: object = None) -> int:
    """Return a value as an int, if it is a whole number from 0 to `highest` and no bool; else raise with `what`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not 0 <= int(value) <= highest:
        expected = f"a whole number, 0 … {highest}"
        raise GraphError(what, where=where, expected=expected, got=shortened(value))
    return int(value)


def shortened(value: Any) -> str:
    """Return a value as errors show it: numbers, text and None in full, the type of others."""
    return repr(value) if value is None or isinstance(value, str | Real) else f"a {type(value).__name__}"


class VerifyError(IpuError):
    """A rule of the verifier is broken; `rule` names it."""

    def __init__(self, rule: str, what: str, **details: object) -> None:
        self.rule = rule
        super().__init__(f"[{rule}] {what}", **details)  # type: ignore[arg-type]


class TileMemoryError(IpuError):
    """A program that does not fit in the memory of a tile.

    Args:
        what: message.
        where: as of `IpuError`.
        expected: as of `IpuError`.
        got: as of `IpuError`.
        ways: hints, by the choice that each changes: "batch", "recompute"… The hint of the error has all of them.
        needed_bytes: bytes that the fullest tile needs; 0 if unknown.
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
        self.ways = ways
        self.needed_bytes = needed_bytes
        hint = "\n    or: ".join(ways.values()) or None
        super().__init__(what, where=where, expected=expected, got=got, hint=hint)

    def with_ways(self, ways: Mapping[str, str]) -> TileMemoryError:
        """Return a copy with the hints `ways`, such as those of a front end."""
        details = {"where": self.where, "expected": self.expected, "got": self.got}
        return TileMemoryError(self.what, **details, ways=ways, needed_bytes=self.needed_bytes)


class StreamingMemoryError(IpuError):
    """Remote buffers that do not fit in streaming memory."""


class ArgumentError(IpuError):
    """A call with arguments that cannot be compiled or run."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An `ArgumentError` where Python and JAX raise a `TypeError`, so that code written for `jax.jit` catches it."""


class ArgumentValueError(ArgumentError, ValueError):
    """An `ArgumentError` where JAX raises a `ValueError`."""


class ArgumentOverflowError(ArgumentError, OverflowError):
    """A Python number outside of the range of its dtype, where JAX raises an `OverflowError`."""


class DeletedArgumentError(ArgumentError, RuntimeError, ValueError):
    """A call with an array that was donated, before or in it, where JAX raises a `RuntimeError` or a `ValueError`."""


class ArgumentRuntimeError(ArgumentError, RuntimeError):
    """A call that fails while it runs, where JAX raises a `RuntimeError`: a host function returns other shapes, say."""


class ScheduleError(ArgumentError):
    """A pipeline schedule that is unknown, does not suit so many stages or micro-batches, or has tasks out of order."""


class ArgumentNameError(ArgumentError, NameError):
    """An unknown axis, where JAX raises a `NameError`."""


class ArgumentAttributeError(ArgumentError, AttributeError):
    """An attribute that an object lacks, or lacks yet, where Python raises an `AttributeError`; `hasattr` is false."""


class EngineError(IpuError):
    """A run that cannot start or continue: no program loaded, unknown program, unconnected stream, abort."""


class ResultMismatchError(IpuError):
    """An equation whose value, as the lowered program computes it, is not that of plain JAX; see `ipu.check`."""


class ProfileError(IpuError):
    """A figure that this profile does not have."""
