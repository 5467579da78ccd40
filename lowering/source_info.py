"""Source of an equation: lines of the user's code, and the name stack of JAX.

Input: equations of JAX, whose `source_info` has a traceback and a name stack. Output: lines and names as text, and
equations with another source. The layers of a model that name stacks have are read by `lowering.layer_notes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, raw_frames, scopes_in, without_scopes
from ipujax.runtime.cache import remembered_small
from ipujax.runtime.errors import is_installed, is_of_user, shown_place, user_place
from ipujax.runtime.tensor import REMATERIALISED

NOTE = "ipu_layer:"  # prefix of an internal scope with the layer, and the lines of inlined calls
MADE_AT = "ipu_made_at:"  # prefix of an internal scope with a `MadeAt`


@dataclass(frozen=True, slots=True)
class MadeAt:
    """Place in a model that a front end evaluates: its equations have this line, and none of the call.

    Args:
        line: as `file:line (function)`, or a node of a file; empty for the lines that the equations were traced at.
        file: path of the file of `line`, whose text reports show; empty for none.
    """

    line: str = ""
    file: str = ""

    @classmethod
    def here(cls) -> MadeAt:
        """Return the innermost running line of the user's."""
        place = user_place()
        return cls() if place is None else cls(shown_place(place), place[0])

    @classmethod
    def of(cls, stack: Any) -> MadeAt:
        """Return the innermost place of a name stack, an empty one without any."""
        texts = [name for name in scopes_in(stack) if name.startswith(MADE_AT)]
        line, _, file = texts[-1].removeprefix(MADE_AT).rpartition("|") if texts else ("", "", "")
        return cls(line, file)

    def scope(self) -> AbstractContextManager[Any]:
        """Give the place to what is traced inside."""
        return jax.named_scope(f"{MADE_AT}{self.line}|{self.file}")


def source_line(eqn: JaxprEqn) -> str:
    """User's line of an equation, `file.py:12 (loss)`, or "" if JAX has none.

    An inner function has its own name, as in `runtime.errors.user_line`. The line is of the innermost frame outside
    installed packages, so that an optimiser's equations belong to the line that calls it. A traceback ends at the
    traced function: if that is a library's, no line is the user's.
    """
    return frame_text(_user_frame(_frames(eqn)))


@contextmanager
def naming_line(eqn: JaxprEqn) -> Iterator[None]:
    """Add the user's line of an equation to an error of `jax.debug_nans`, unless an equation inside has added its own.

    Raises:
        FloatingPointError: as raised inside, with the line as its note.
    """
    try:
        yield
    except FloatingPointError as error:
        line = source_line(eqn)
        if line and not hasattr(error, "__notes__"):
            error.add_note(f"  at: {line}")
        raise


def _user_frame(frames: Sequence[Any]) -> Any:
    """Innermost frame outside installed packages; None if there is none."""
    return next((frame for frame in frames if not is_installed(frame.file_name)), None)


def _frames(eqn: JaxprEqn) -> Sequence[Any]:
    """Frames an equation was traced in, innermost first."""
    return eqn.source_info.traceback.frames if eqn.source_info.traceback else ()


def frame_text(frame: Any) -> str:
    """Frame as `file:line (function)`, "" for none."""
    if frame is None:
        return ""
    return _place_text(frame.file_name, frame.line_num, frame.function_name)


@remembered_small
def _place_text(file: str, line: int, function: str) -> str:
    return shown_place((file, line, function.rpartition(".<locals>.")[2]))


def call_site(eqn: JaxprEqn) -> tuple[tuple[Any, int], ...]:
    """(code, instruction) of each frame of an equation's trace that is neither JAX's nor ipujax's."""
    return tuple((code, place) for code, place in raw_frames(eqn) if is_of_user(code.co_filename))


def library_function(eqn: JaxprEqn) -> str:
    """Function of an equation that is neither JAX's nor ipujax's, "" if JAX has none.

    The update function of an Optax optimiser is a closure, `scale_by_adam.<locals>.update`, whose name says less than
    that of its maker, `scale_by_adam`, which stands for it.
    """
    names: list[str] = [frame.function_name for frame in _frames(eqn) if is_of_user(frame.file_name)]
    makers = [name.partition(".<locals>.")[0] for name in names if ".<locals>.update" in name]
    return next(iter(makers + names), "")


def name_stack(eqn: JaxprEqn) -> str:
    """Name stack of an equation, `transpose(jvp(stage0))/dense`; unprintable characters are escaped."""
    return _printed(eqn.source_info.name_stack)


@remembered_small
def _printed(stack: Any) -> str:
    text = str(without_notes(stack))
    return printable(text)


def printable(text: str) -> str:
    """Text of a name scope, in which unprintable characters are escaped."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def without_notes(stack: Any) -> Any:
    """Name stack without notes and places."""
    return without_scopes(stack, (NOTE, MADE_AT))


def shown_calls(eqn: JaxprEqn) -> list[str]:
    """User's lines of an equation's trace, innermost first."""
    return [frame_text(frame) for frame in _frames(eqn) if not is_installed(frame.file_name)]


def jaxpr_file(jaxpr: Jaxpr) -> str:
    """File of the function a jaxpr was traced from, "" if unknown."""
    return traced_from(jaxpr)[1].rpartition(":")[0]


def traced_from(jaxpr: Jaxpr) -> tuple[str, str]:
    """Function and `file:line` a jaxpr was traced from, "" if unknown."""
    name, _, place = (getattr(jaxpr.debug_info, "func_src_info", None) or "").partition(" at ")
    return name, place


def with_caller(eqn: JaxprEqn, caller: JaxprEqn, *, keep_line: bool) -> JaxprEqn:
    """Inlined equation: name stack prefixed with the call's, source line kept or the call's."""
    stack = caller.source_info.name_stack + eqn.source_info.name_stack
    info = eqn.source_info if keep_line else caller.source_info
    return eqn.replace(source_info=info.replace(name_stack=stack))


def in_scope(eqn: JaxprEqn, name: str) -> JaxprEqn:
    """Equation with a further name at the end of its name stack."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(name)))


def inside_scope(eqn: JaxprEqn, name: str) -> JaxprEqn:
    """Equation with a further name at the beginning of its name stack."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=type(info.name_stack)().extend(name) + info.name_stack))


def as_recomputed(eqn: JaxprEqn) -> JaxprEqn:
    """Equation in the backward part, named as a checkpoint's recomputation."""
    info = eqn.source_info
    # JAX's own checkpoint makes the same names, so both are recognised in one way.
    scope = type(info.name_stack)().transform("transpose").extend(REMATERIALISED)
    return eqn.replace(source_info=info.replace(name_stack=scope + info.name_stack))


def common_function(eqns: Sequence[JaxprEqn]) -> str:
    """Innermost function of the user that all equations were traced in, "" if there is none."""
    return next(reversed(common_functions(eqns)), "")


def common_functions(eqns: Sequence[JaxprEqn]) -> list[str]:
    """Functions of the user that all equations were traced in: the calls, outermost first, that all tracebacks begin
    with.
    """
    common: list[tuple[str, str]] | None = None
    for eqn in eqns:
        frames = [(f.file_name, f.function_name) for f in reversed(_frames(eqn)) if not is_installed(f.file_name)]
        depth = 0
        while common is not None and depth < min(len(common), len(frames)) and common[depth] == frames[depth]:
            depth += 1
        common = frames if common is None else common[:depth]
    return [function.rpartition(".")[2] for _, function in common or ()]
