"""Where an equation comes from: lines of source, and the name stack that JAX carries along with it.

Input: equations of JAX, whose `source_info` holds a traceback and a name stack. Output: lines and names as text, and
equations with another source.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, raw_frames, scopes_in, without_scopes
from ipujax.runtime.cache import remembered_small
from ipujax.runtime.errors import is_installed, is_of_user, shown_place
from ipujax.runtime.tensor import MOST_CALLERS, OF_CALLER, Origin, joined_layers, named_by_caller

TRANSPOSED = "transpose("
RECOMPUTED = "rematted_computation"  # JAX's scope of what a checkpoint computes again
_NOTE = "ipu_layer:"  # begins our scope that holds the layer, and the lines of calls that were inlined
_SEPARATOR = "\x1f"  # of the layer and the names in a note; ASCII's separator of units, which no name has
_INTERNAL = re.compile(
    rf"ipu_(stage|phase)_\d+|ipu_recompute_\w+|ipu_micro_batches|{_NOTE}.*|{RECOMPUTED}|checkpoint"
    r"|.*/stage \d+ [a-z]+(/.*)?|.*/result \d+",  # of parts of pipelines, and what they accumulate
    re.S,
)


def source_line(eqn: JaxprEqn) -> str:
    """The user's line an equation comes from, `file.py:12 (loss)`, or "" when JAX does not know.

    A function inside another goes by its own name, as in `runtime.errors.user_line`. That is the innermost frame
    outside installed packages, so that an optimiser's equations belong to the line that calls it. A traceback goes no
    further out than the function that was traced: if that is a library's, no line is the user's.
    """
    return _shown(_user_frame(_frames(eqn)))


def origin_of(eqn: JaxprEqn, outer: Origin) -> Origin:
    """Where an equation comes from: the user's line, or that of `outer`, and the innermost library line inside it."""
    path, traceback = name_stack(eqn) or outer.path, eqn.source_info.traceback
    users, file, library = _lines_of(traceback) if traceback else ((), "", "")
    note = _note(eqn.source_info.name_stack) or Note("/".join(scopes_of(eqn)))
    inside = joined_layers(outer.layer, note.layer)
    line, *callers = [*users, *note.lines, *_lines_around(outer)] or [""]
    return Origin(
        line=line if users else outer.line,
        path=path,
        library="" if users and library == line else library or ("" if users else outer.library),
        file=file if users else outer.file,
        layer=inside,
        part=_part(path) if name_stack(eqn) and _part(path) else outer.part,
        callers=tuple(callers[:MOST_CALLERS]) if users else outer.callers,
        names=note.names,
    )


@remembered_small
def _lines_of(traceback: Any) -> tuple[tuple[str, ...], str, str]:
    """The user's lines in a traceback, innermost first, the file of the first, and the innermost line of a library."""
    frames = traceback.frames
    innermost = next((frame for frame in frames if is_of_user(frame.file_name)), None)
    users = [frame for frame in frames if not is_installed(frame.file_name)][: MOST_CALLERS + 1]
    return tuple(map(_shown, users)), users[0].file_name if users else "", _shown(innermost)


def _lines_around(outer: Origin) -> tuple[str, ...]:
    """The lines that called a function inside of an equation of `outer`; unknown for one that several call."""
    return () if outer.layer == OF_CALLER or not outer.line else (outer.line, *outer.callers)


@remembered_small
def _part(stack: str) -> str:
    """The part of a training step that a name stack says."""
    if TRANSPOSED in stack.rpartition(RECOMPUTED)[2]:
        return "backward"
    if RECOMPUTED in stack:
        return "recomputed"
    return "forward" if "jvp(" in stack else ""


def _user_frame(frames: Sequence[Any]) -> Any:
    """The innermost frame outside installed packages; None when there is none."""
    return next((frame for frame in frames if not is_installed(frame.file_name)), None)


def _frames(eqn: JaxprEqn) -> Sequence[Any]:
    """The frames an equation was traced in, innermost first."""
    return eqn.source_info.traceback.frames if eqn.source_info.traceback else ()


def _shown(frame: Any) -> str:
    """A frame as `file:line (function)`, "" for none."""
    if frame is None:
        return ""
    return _shown_place(frame.file_name, frame.line_num, frame.function_name)


@remembered_small
def _shown_place(file: str, line: int, function: str) -> str:
    return shown_place((file, line, function.rpartition(".<locals>.")[2]))


def call_site(eqn: JaxprEqn) -> tuple[tuple[Any, int], ...]:
    """The calls in code that is neither JAX's nor ipujax's an equation was traced in: code and place in it, of each."""
    return tuple((code, place) for code, place in raw_frames(eqn) if is_of_user(code.co_filename))


def library_function(eqn: JaxprEqn) -> str:
    """The function an equation comes from that is neither JAX's nor ipujax's, "" when JAX does not know.

    Functions of an Optax optimiser are made by that of its name: `scale_by_adam` for `scale_by_adam.<locals>.update`.
    """
    names: list[str] = [frame.function_name for frame in _frames(eqn) if is_of_user(frame.file_name)]
    makers = [name.partition(".<locals>.")[0] for name in names if ".<locals>.update" in name]
    return next(iter(makers + names), "")


def name_stack(eqn: JaxprEqn) -> str:
    """The name stack of an equation, `transpose(jvp(stage0))/dense`; what does not print is escaped."""
    return _printed(eqn.source_info.name_stack)


@remembered_small
def _printed(stack: Any) -> str:
    text = str(_of_jax(stack))
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def scopes_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """The scopes an equation is in, outermost first, without transformations and scopes that are JAX's or ours."""
    return _scopes(eqn.source_info.name_stack)


@remembered_small
def _scopes(stack: Any) -> tuple[str, ...]:
    users = (scope for scope in scopes_in(stack) if not _INTERNAL.fullmatch(scope))
    names = (name for scope in users for name in scope.split("/"))
    return tuple(name for name in names if name)


# --- the layer, which a scope of ours carries along ---


@dataclass(frozen=True, slots=True)
class Note:
    """What a name stack notes of an equation.

    Args:
        layer: its layer.
        names: of the call of a function that several layers call, names of layers inside of it, see `Origin`.
        lines: the lines that called what the equation was inlined from.
    """

    layer: str
    names: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


def noted(stack: Any, note: Note) -> Any:
    """A name stack with a note of the layer, and of the lines that called what the equation was inlined from."""
    text = _SEPARATOR.join([note.layer, *note.names])
    return _of_jax(stack).extend(_NOTE + "\n".join([text, *note.lines]))


def layer_of(eqn: JaxprEqn) -> str:
    """The layer that is noted of an equation, "" if there is none."""
    note = _note(eqn.source_info.name_stack)
    return note.layer if note is not None else ""


@remembered_small
def _note(stack: Any) -> Note | None:
    """What a name stack notes; None without a note."""
    notes = [name for name in scopes_in(stack) if name.startswith(_NOTE)]
    if not notes:
        return None
    text, *lines = notes[-1].removeprefix(_NOTE).split("\n")
    layer, *names = text.split(_SEPARATOR)
    return Note(layer, tuple(names), tuple(lines))


def _of_jax(stack: Any) -> Any:
    """A name stack without notes."""
    return without_scopes(stack, _NOTE)


def shown_calls(eqn: JaxprEqn) -> list[str]:
    """The user's lines that an equation was traced in, innermost first."""
    return [_shown(frame) for frame in _frames(eqn) if not is_installed(frame.file_name)]


def jaxpr_file(jaxpr: Jaxpr) -> str:
    """The file of the function a jaxpr was traced from, "" when unknown."""
    return traced_from(jaxpr)[1].rpartition(":")[0]


def traced_from(jaxpr: Jaxpr) -> tuple[str, str]:
    """The function and the `file:line` a jaxpr was traced from, "" when unknown."""
    name, _, place = (getattr(jaxpr.debug_info, "func_src_info", None) or "").partition(" at ")
    return name, place


def with_caller(eqn: JaxprEqn, caller: JaxprEqn, *, keep_line: bool) -> JaxprEqn:
    """The equation as seen from the call it is inlined from: name stack prefixed, source line kept or the caller's."""
    stack = caller.source_info.name_stack + eqn.source_info.name_stack
    info = eqn.source_info if keep_line else caller.source_info
    return eqn.replace(source_info=info.replace(name_stack=stack))


def in_scope(eqn: JaxprEqn, name: str) -> JaxprEqn:
    """The equation with a further name at the end of its name stack."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(name)))


def as_recomputed(eqn: JaxprEqn) -> JaxprEqn:
    """The equation in the backward part, named as what a checkpoint repeats."""
    info = eqn.source_info
    scope = type(info.name_stack)().transform("transpose").extend("rematted_computation")
    return eqn.replace(source_info=info.replace(name_stack=scope + info.name_stack))


def at_source_of(
    eqn: JaxprEqn, place: JaxprEqn, eqns: Sequence[JaxprEqn], name: str, layers: LayersOfRun | None = None
) -> JaxprEqn:
    """The equation at the line of another, under what names of several begin with, and a name if any.

    Args:
        eqn: the equation.
        place: where the line and the lines around it are from.
        eqns: whose names, and whose layers if there is nothing else, begin with that of the equation.
        name: of a further scope.
        layers: of a run that the equation calls.
    """
    stack = common_stack([_of_jax(other.source_info.name_stack) for other in eqns])
    stack, note = stack.extend(name) if name else stack, _note(place.source_info.name_stack)
    if note is not None:
        outer = layers or LayersOfRun("/".join(_common_start([layer_of(other).split("/") for other in eqns])))
        stack = noted(stack, Note(outer.layer, outer.names, note.lines))
    return eqn.replace(source_info=place.source_info.replace(name_stack=stack))


def common_stack(stacks: Sequence[Any]) -> Any:
    """What several name stacks begin with."""
    first = stacks[0]
    same = 0
    while all(same < len(stack) and stack[: same + 1] == first[: same + 1] for stack in stacks):
        same += 1
    return first[:same]


@dataclass(frozen=True, slots=True)
class LayersOfRun:
    """The layers of one of several equal runs of equations.

    Args:
        layer: all of them begin with it.
        names: those inside of it that have other names in other runs, by number.
    """

    layer: str
    names: tuple[str, ...] = ()


def in_common(runs: Sequence[Sequence[JaxprEqn]], name: str) -> tuple[list[JaxprEqn], list[LayersOfRun]]:
    """The equations of the first of several equal runs, under what name stacks have in common, and the runs' layers.

    Their layers are those inside of what the layers of their run begin with, which is the layer of its call; a number
    stands for one whose name differs between runs.

    Args:
        runs: equations, those at the same place in each run equal.
        name: of a scope, between what all name stacks begin with and what those at a place begin and end with besides.
    """
    outer = common_stack([_of_jax(eqn.source_info.name_stack) for run in runs for eqn in run])
    scope = outer.extend(name)
    starts = [_common_start([layer_of(eqn).split("/") for eqn in run]) for run in runs]
    numbers: dict[tuple[str, ...], int] = {}  # of names that differ, by those of all runs

    def common_name(names: tuple[str, ...]) -> str:
        return names[0] if len(set(names)) == 1 else named_by_caller(numbers.setdefault(names, len(numbers)))

    eqns = []
    for place in zip(*runs, strict=True):
        info = place[0].source_info
        stack = scope + _common_ends([_of_jax(eqn.source_info.name_stack)[len(outer) :] for eqn in place])
        notes = [note for eqn in place if (note := _note(eqn.source_info.name_stack)) is not None]
        if len(notes) == len(place):
            inside = tuple(
                "/".join(note.layer.split("/")[len(start) :]) for note, start in zip(notes, starts, strict=True)
            )
            names = tuple(common_name(of_runs) for of_runs in zip(*(note.names for note in notes), strict=True))
            stack = noted(stack, Note(common_name(inside), names, notes[0].lines))
        eqns.append(place[0].replace(source_info=info.replace(name_stack=stack)))
    of_runs = list(zip(*numbers, strict=True)) or [()] * len(runs)
    return eqns, [LayersOfRun("/".join(start), names) for start, names in zip(starts, of_runs, strict=True)]


def _common_start(paths: Sequence[list[str]]) -> list[str]:
    """What several paths begin with."""
    first, same = paths[0], 0
    while all(path[: same + 1] == first[: same + 1] and same < len(path) for path in paths):
        same += 1
    return first[:same]


def _common_ends(stacks: Sequence[Any]) -> Any:
    """What several name stacks begin with, and what they end with behind that."""
    first, shortest = stacks[0], min(map(len, stacks))
    before, behind = common_stack(stacks), 0
    while behind < shortest - len(before) and all(
        _end(stack, behind + 1) == _end(first, behind + 1) for stack in stacks
    ):
        behind += 1
    return before + _end(first, behind)


def _end(stack: Any, count: int) -> Any:
    """The last names of a name stack."""
    return stack[len(stack) - count :]


def common_function(eqns: Sequence[JaxprEqn]) -> str:
    """The innermost function of the user's that was at work for all equations, "" when there is none."""
    common: list[tuple[str, str]] | None = None
    for eqn in eqns:
        frames = [(f.file_name, f.function_name) for f in reversed(_frames(eqn)) if not is_installed(f.file_name)]
        same = 0
        while common is not None and same < min(len(common), len(frames)) and common[same] == frames[same]:
            same += 1
        common = frames if common is None else common[:same]
    return common[-1][1].rpartition(".")[2] if common else ""
