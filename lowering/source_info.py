"""Where an equation comes from: lines of source, and the name stack that JAX carries along with it.

Input: equations of JAX, whose `source_info` holds a traceback and a name stack. Output: lines and names as text, and
equations with another source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, raw_frames
from ipujax.runtime.cache import remembered_small
from ipujax.runtime.errors import is_installed, is_of_user, shown_place
from ipujax.runtime.tensor import Origin


def source_line(eqn: JaxprEqn) -> str:
    """The user's line an equation comes from, `file.py:12 (loss)`, or "" when JAX does not know.

    A function inside another goes by its own name, as in `runtime.errors.user_line`. That is the innermost frame
    outside installed packages, so that an optimiser's equations belong to the line that calls it. A traceback goes no
    further out than the function that was traced: if that is a library's, no line is the user's.
    """
    return _shown(_user_frame(_frames(eqn)))


def origin_of(eqn: JaxprEqn, outer: Origin) -> Origin:
    """Where an equation comes from: the user's line, or that of `outer`, and the innermost library line inside it."""
    frames = _frames(eqn)
    innermost = next((frame for frame in frames if is_of_user(frame.file_name)), None)
    frame, library, path = _user_frame(frames), _shown(innermost), name_stack(eqn) or outer.path
    if frame is None:
        return Origin(outer.line, path, library or outer.library, outer.file)
    return Origin(_shown(frame), path, "" if library == _shown(frame) else library, frame.file_name)


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
    return shown_place((frame.file_name, frame.line_num, frame.function_name.rpartition(".<locals>.")[2]))


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
    text = str(stack)
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def jaxpr_file(jaxpr: Jaxpr) -> str:
    """The file of the function a jaxpr was traced from, "" when unknown."""
    return _traced_from(jaxpr)[1].rpartition(":")[0]


def _traced_from(jaxpr: Jaxpr) -> tuple[str, str]:
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
    """The equation at the line of another, under what the name stacks of several begin with, and a name if any."""
    stack = common_stack([other.source_info.name_stack for other in eqns])
    info = place.source_info.replace(name_stack=stack.extend(name) if name else stack)
    return eqn.replace(source_info=info)


def common_stack(stacks: Sequence[Any]) -> Any:
    """What several name stacks begin with."""
    first = stacks[0]
    same = 0
    while all(same < len(stack) and stack[: same + 1] == first[: same + 1] for stack in stacks):
        same += 1
    return first[:same]


def in_common(runs: Sequence[Sequence[JaxprEqn]], name: str) -> list[JaxprEqn]:
    """The equations of the first of several equal runs, under what name stacks have in common.

    Args:
        runs: equations, those at the same place in each run equal.
        name: of a scope, between what all name stacks begin with and what those at a place begin and end with besides.
    """
    outer = common_stack([eqn.source_info.name_stack for run in runs for eqn in run])
    scope = outer.extend(name)
    eqns = []
    for place in zip(*runs, strict=True):
        info = place[0].source_info
        stack = scope + _common_ends([eqn.source_info.name_stack[len(outer) :] for eqn in place])
        eqns.append(place[0].replace(source_info=info.replace(name_stack=stack)))
    return eqns


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
