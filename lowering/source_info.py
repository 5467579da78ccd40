"""Where an equation comes from: lines of source, and the name stack that JAX carries along with it.

Input: equations of JAX, whose `source_info` holds a traceback and a name stack. Output: lines and names as text, and
equations with another source.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, raw_frames, scopes_in, without_scopes
from ipujax.runtime.cache import remembered_small
from ipujax.runtime.errors import is_installed, is_of_user, shown_place
from ipujax.runtime.tensor import MOST_CALLERS, OF_CALLER, Origin, joined_layers

TRANSPOSED = "transpose("
RECOMPUTED = "rematted_computation"  # JAX's scope of what a checkpoint computes again
_NOTE = "ipu_layer:"  # begins our scope that holds the layer, and the lines of calls that were inlined
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
    layer, *calls = _note(eqn.source_info.name_stack) or ["/".join(scopes_of(eqn))]
    inside = joined_layers(outer.layer, layer)
    line, *callers = [*users, *calls, *_lines_around(outer)] or [""]
    return Origin(
        line=line if users else outer.line,
        path=path,
        library="" if users and library == line else library or ("" if users else outer.library),
        file=file if users else outer.file,
        layer=inside,
        part=_part(path) if name_stack(eqn) and _part(path) else outer.part,
        callers=tuple(callers[:MOST_CALLERS]) if users else outer.callers,
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


def noted(stack: Any, layer: str, callers: Sequence[str] = ()) -> Any:
    """A name stack with a note of the layer, and of the lines that called what the equation was inlined from."""
    return _of_jax(stack).extend(_NOTE + "\n".join([layer, *callers]))


def layer_of(eqn: JaxprEqn) -> str:
    """The layer that is noted of an equation, "" if there is none."""
    return "".join(_note(eqn.source_info.name_stack)[:1])


@remembered_small
def _note(stack: Any) -> tuple[str, ...]:
    """The layer that a name stack notes, then the lines of calls; nothing without a note."""
    notes = [name for name in scopes_in(stack) if name.startswith(_NOTE)]
    return tuple(notes[-1].removeprefix(_NOTE).split("\n")) if notes else ()


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


def at_source_of(eqn: JaxprEqn, place: JaxprEqn, eqns: Sequence[JaxprEqn], name: str) -> JaxprEqn:
    """The equation at the line of another, under what names and layers of several begin with, and a name if any."""
    stack = common_stack([_of_jax(other.source_info.name_stack) for other in eqns])
    layer = "/".join(_common_start([layer_of(other).split("/") for other in eqns]))
    stack, note = stack.extend(name) if name else stack, _note(place.source_info.name_stack)
    return eqn.replace(
        source_info=place.source_info.replace(name_stack=noted(stack, layer, note[1:]) if note else stack)
    )


def common_stack(stacks: Sequence[Any]) -> Any:
    """What several name stacks begin with."""
    first = stacks[0]
    same = 0
    while all(same < len(stack) and stack[: same + 1] == first[: same + 1] for stack in stacks):
        same += 1
    return first[:same]


def in_common(runs: Sequence[Sequence[JaxprEqn]], name: str) -> list[JaxprEqn]:
    """The equations of the first of several equal runs, under what name stacks have in common.

    Their layers are those inside of what the layers of their run begin with, which is the layer of its call.

    Args:
        runs: equations, those at the same place in each run equal.
        name: of a scope, between what all name stacks begin with and what those at a place begin and end with besides.
    """
    outer = common_stack([_of_jax(eqn.source_info.name_stack) for run in runs for eqn in run])
    scope = outer.extend(name)
    layers = [[layer_of(eqn).split("/") for eqn in run] for run in runs]
    inside = [len(_common_start(paths)) for paths in layers]
    eqns = []
    for number, place in enumerate(zip(*runs, strict=True)):
        info = place[0].source_info
        stack = scope + _common_ends([_of_jax(eqn.source_info.name_stack)[len(outer) :] for eqn in place])
        rests = [paths[number][start:] for paths, start in zip(layers, inside, strict=True)]
        note = _note(info.name_stack)
        stack = noted(stack, "/".join(_common_names(rests)), note[1:]) if note else stack
        eqns.append(place[0].replace(source_info=info.replace(name_stack=stack)))
    return eqns


def _common_start(paths: Sequence[list[str]]) -> list[str]:
    """What several paths begin with."""
    first, same = paths[0], 0
    while all(path[: same + 1] == first[: same + 1] and same < len(path) for path in paths):
        same += 1
    return first[:same]


def _common_names(paths: Sequence[list[str]]) -> list[str]:
    """What several paths begin with, and what they end with behind that."""
    before = _common_start(paths)
    behind = _common_start([path[len(before) :][::-1] for path in paths])[::-1]
    return before + behind


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
