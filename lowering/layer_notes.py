"""Layer of an equation: the scopes of its name stack, or a note that a pass has added to it.

Inlined and outlined equations have lost the call that they came from: a scope of the name stack, unseen by users, notes
the layer and the lines of the calls.

Input: equations of JAX. Output: origins of what they are lowered to, and equations with notes that hold for several.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, NamedTuple

from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params, scopes_in
from ipujax.lowering.source_info import MADE_AT, NOTE, MadeAt, frame_text, name_stack, printable, without_notes
from ipujax.runtime.cache import remembered_small
from ipujax.runtime.errors import is_installed, is_of_user
from ipujax.runtime.tensor import MAX_CALLERS, OF_CALLER, REMATERIALISED, Origin, caller_name, join_layers, part_of_name

_SEPARATOR = "\x1f"  # between texts of a note; ASCII's separator of units, which no name has
_END = "\x1e"  # between groups of them
_INTERNAL = re.compile(
    rf"ipu_(stage|phase)_\d+|ipu_recompute_\w+|ipu_micro_batches|{NOTE}.*|{MADE_AT}.*|{REMATERIALISED}|checkpoint"
    r"|.*/stage \d+ [a-z]+(/.*)?|.*/result \d+",  # of parts of pipelines, and their accumulators
    re.S,
)


def origin_of(eqn: JaxprEqn, outer: Origin, *, is_called: bool = True) -> Origin:
    """Origin of an equation, which profiles show: the user's line, layer, part of training, and line of a library.

    An equation without a line of the user's, as one that a pass has made, has line and callers of `outer`.

    Args:
        eqn: the equation.
        outer: origin of the equation that holds it, or of the program; it has what the equation lacks.
        is_called: whether the line of `outer` calls the function of the equation; one that fuses equations does not.
    """
    path = name_stack(eqn) or outer.path
    traceback = eqn.source_info.traceback
    users, file, library = _lines_of(traceback) if traceback else ((), "", "")
    # A note from inlining has the layer and calls; without one the scopes are the layer.
    stack = eqn.source_info.name_stack
    note = _note(stack) or Note("/".join(scopes_of(eqn)), made_at=MadeAt.of(stack))
    inner_layer = join_layers(outer.layer, note.layer)
    part = part_of_name(name_stack(eqn)) or note.part or outer.part
    # A front end's place stands for the user's line: the frames are those of the front end, and so the callers too.
    if note.made_at.line:
        made_at = note.made_at
        return Origin(
            made_at.line, path, library, made_at.file, inner_layer, part, names=note.names, places=note.places
        )
    # From the innermost line outwards: in the function that was traced, where it was inlined, where `outer` was called.
    around = _callers_of(outer) if is_called else outer.callers
    line, *callers = [*users, *note.lines, *around] or [""]
    if users and library == line:  # the innermost line is the user's own
        library = ""
    return Origin(
        line=line if users else outer.line,
        path=path,
        library=library if users else library or outer.library,
        file=file if users else outer.file,
        layer=inner_layer,
        part=part,
        callers=tuple(callers[:MAX_CALLERS]) if users else outer.callers,
        names=note.names,
        places=note.places,
    )


@remembered_small
def _lines_of(traceback: Any) -> tuple[tuple[str, ...], str, str]:
    """User's lines in a traceback, innermost first, the file of the first, and the innermost line of a library."""
    frames = traceback.frames
    innermost = next((frame for frame in frames if is_of_user(frame.file_name)), None)
    users = [frame for frame in frames if not is_installed(frame.file_name)][: MAX_CALLERS + 1]
    return tuple(map(frame_text, users)), users[0].file_name if users else "", frame_text(innermost)


def _callers_of(outer: Origin) -> tuple[str, ...]:
    """Lines that called the function of `outer`; none if several lines call it."""
    return () if outer.layer == OF_CALLER or not outer.line else (outer.line, *outer.callers)


def scopes_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """User's scopes of an equation, outermost first, without transformations and internal scopes."""
    return _scopes(eqn.source_info.name_stack)


@remembered_small
def _scopes(stack: Any) -> tuple[str, ...]:
    # A Flax module may put a path in one scope, "encoder/layer_0".
    users = (scope for scope in scopes_in(stack) if not (_INTERNAL.fullmatch(scope) or _is_einsum(scope)))
    names = (name for scope in users for name in scope.split("/"))
    return tuple(name for name in names if name)


def _is_einsum(scope: str) -> bool:
    """Whether a scope is the specification of a product, `bqd,bkd->bqk`, which `jnp.einsum` opens."""
    operands, arrow, result = scope.replace(" ", "").replace("...", "").partition("->")
    letters = operands.replace(",", "")
    is_text = (letters + result).isalpha() or not letters + result
    return bool(arrow) and is_text and len(set(result)) == len(result) and set(result) <= set(letters)


@dataclass(frozen=True, slots=True)
class Note:
    """Layer and calls of an equation, noted in its name stack.

    Args:
        layer: of the equation.
        names: of a call of a function that several layers call, layers inside of it; see `Origin.names`.
        lines: those that called the function the equation was inlined from.
        part: of a training step, where the names of the stack tell none; see `step_parts`.
        made_at: place that a front end gave it; its line may be a placeholder.
        places: of a call of a function, lines of such places inside of it; see `Origin.places`.
    """

    layer: str
    names: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    part: str = ""
    made_at: MadeAt = MadeAt()
    places: tuple[str, ...] = ()


def noted(stack: Any, note: Note) -> Any:
    """Name stack with a note in place of any that it has."""
    single = note.part, note.made_at.line, note.made_at.file, printable(note.layer)
    fields = single, note.names, note.places
    text = _END.join(map(_SEPARATOR.join, fields))
    return without_notes(stack).extend(NOTE + "\n".join([text, *note.lines]))


def layer_of(eqn: JaxprEqn) -> str:
    """Noted layer of an equation, "" if there is none."""
    note = _note(eqn.source_info.name_stack)
    return note.layer if note is not None else ""


@remembered_small
def _note(stack: Any) -> Note | None:
    """Note (layer, part of training, lines of calls) that a pass has put into an equation's name stack; None without.

    An equation that was inlined after it got a note has the call's too, outside of its own: they are read as one.
    """
    notes = [_read(name) for name in scopes_in(stack) if name.startswith(NOTE)]
    if not notes:
        return None
    *outer, inner = notes
    for around in reversed(outer):
        inner = replace(
            inner,
            layer=join_layers(around.layer, inner.layer),
            lines=(*inner.lines, *around.lines),
            part=inner.part or around.part,
            made_at=inner.made_at if inner.made_at.line else around.made_at,
        )
    return inner


def _read(scope: str) -> Note:
    text, *lines = scope.removeprefix(NOTE).split("\n")
    single, *several = text.split(_END)
    part, line, file, layer = single.split(_SEPARATOR)
    names, places = (tuple(texts.split(_SEPARATOR)) if texts else () for texts in several)
    return Note(layer, names, tuple(lines), part, MadeAt(line, file), places)


def step_part(eqn: JaxprEqn) -> str:
    """Part of an equation in a training step, by its name stack or its note; "" for none."""
    note = _note(eqn.source_info.name_stack)
    return part_of_name(name_stack(eqn)) or (note.part if note is not None else "")


def with_part(eqn: JaxprEqn, part: str) -> JaxprEqn:
    """Equation with a part in its note."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=_with_part(info.name_stack, part))) if part else eqn


@remembered_small
def _with_part(stack: Any, part: str) -> Any:
    note = _note(stack) or Note("/".join(_scopes(stack)), made_at=MadeAt.of(stack))
    return noted(stack, replace(note, part=part))


def _common_part(notes: Sequence[Note]) -> str:
    """Part of several notes, "" if they differ."""
    parts = {note.part for note in notes}
    return parts.pop() if len(parts) == 1 else ""


def at_source_of(
    eqn: JaxprEqn, place: JaxprEqn, eqns: Sequence[JaxprEqn], name: str, layers: LayersOfRun | None = None
) -> JaxprEqn:
    """A new equation that stands for several, as one fused of them, with their source: line, common scopes, and layer.

    Args:
        eqn: the new equation.
        place: equation whose line and calling lines it gets.
        eqns: the equations that it stands for.
        name: scope inside of those in common, "" for none.
        layers: layer of the equations, if they are a run that is called; None for the common prefix of their layers.
    """
    stack = common_stack([without_notes(member.source_info.name_stack) for member in eqns])
    stack = stack.extend(name) if name else stack
    note = _note(place.source_info.name_stack)
    if note is not None:
        outer = layers or LayersOfRun("/".join(_common_start([layer_of(member).split("/") for member in eqns])))
        notes = [_note(member.source_info.name_stack) for member in eqns]
        part = _common_part([note for note in notes if note is not None])
        stack = noted(stack, Note(outer.layer, outer.names, note.lines, part, note.made_at, outer.places))
    return eqn.replace(source_info=place.source_info.replace(name_stack=stack))


def common_stack(stacks: Sequence[Any]) -> Any:
    """Common prefix of several name stacks."""
    reference = stacks[0]
    length = 0
    while all(length < len(stack) and stack[: length + 1] == reference[: length + 1] for stack in stacks):
        length += 1
    return reference[:length]


@dataclass(frozen=True, slots=True)
class LayersOfRun:
    """Layers of one of several equal runs of equations.

    Args:
        layer: common prefix of all.
        names: layers inside of it that are named otherwise in other runs, by number; see `Origin.names`.
        places: the same of lines that a front end gave.
    """

    layer: str
    names: tuple[str, ...] = ()
    places: tuple[str, ...] = ()


_Numbers = dict[tuple[str, ...], int]  # number of each tuple of texts, one of each run, that are not all equal


class _Differences(NamedTuple):
    """Differences between equal runs: the number of each combination of names, one a run, and likewise of lines."""

    names: _Numbers
    places: _Numbers


def common_equations(runs: Sequence[Sequence[JaxprEqn]], name: str) -> tuple[list[JaxprEqn], list[LayersOfRun]]:
    """Equations of a function in the place of equal runs, with a source that holds for all; and the layers of each run.

    Layers are relative to the common prefix of the layers of a run, which is the layer of its call; a number stands
    for one that is named otherwise in other runs.

    Args:
        runs: equations, equal at the same place of each run.
        name: scope between the common prefix of all name stacks and the names that are common at a place.
    """
    outer = common_stack([without_notes(eqn.source_info.name_stack) for run in runs for eqn in run])
    scope = outer.extend(name)
    prefixes = [_common_start([layer_of(eqn).split("/") for eqn in run]) for run in runs]
    differences = _Differences({}, {})
    eqns = []
    for equal_eqns in zip(*runs, strict=True):  # one of each run
        info = equal_eqns[0].source_info
        stack = scope + _common_ends([without_notes(eqn.source_info.name_stack)[len(outer) :] for eqn in equal_eqns])
        notes = [note for eqn in equal_eqns if (note := _note(eqn.source_info.name_stack)) is not None]
        if len(notes) == len(equal_eqns):
            inner_layers = tuple(
                "/".join(note.layer.split("/")[len(prefix) :]) for note, prefix in zip(notes, prefixes, strict=True)
            )
            stack = noted(stack, _common_note(notes, inner_layers, differences))
        eqn = _with_common_jaxprs(equal_eqns, differences)
        eqns.append(eqn.replace(source_info=info.replace(name_stack=stack)))
    # From the names of a number in all runs to the names of a run by number.
    names_of_runs, places_of_runs = (list(zip(*numbers, strict=True)) or [()] * len(runs) for numbers in differences)
    layers = map("/".join, prefixes)
    return eqns, [LayersOfRun(*of_run) for of_run in zip(layers, names_of_runs, places_of_runs, strict=True)]


def _common_name(names: tuple[str, ...], numbers: _Numbers) -> str:
    """Name that all runs have, else one that stands for their names by a number, which the caller's run replaces.

    Args:
        names: the name that each run has.
        numbers: number of each combination of names; updated.
    """
    return names[0] if len(set(names)) == 1 else caller_name(numbers.setdefault(names, len(numbers)))


def _common_note(notes: Sequence[Note], layers: tuple[str, ...], differences: _Differences) -> Note:
    """Note of an equation in a function, from those of the equal equations that it stands for.

    A name that differs between the runs is replaced by the number of that difference; each call has its own names for
    these numbers. The lines are those of the first run.

    Args:
        notes: note of the equation of each run.
        layers: layer of each, relative to that of the call.
        differences: names that differ between runs; updated.
    """
    names, places = (
        tuple(_common_name(of_runs, numbers) for of_runs in zip(*texts, strict=True))
        for texts, numbers in (
            ([note.names for note in notes], differences.names),
            ([note.places for note in notes], differences.places),
        )
    )
    files = {note.made_at.file for note in notes}
    line = _common_name(tuple(note.made_at.line for note in notes), differences.places)
    made_at = MadeAt(line, files.pop() if len(files) == 1 else "")
    layer = _common_name(layers, differences.names)
    return Note(layer, names, notes[0].lines, _common_part(notes), made_at, places)


def _common_equation_inside(equal_eqns: Sequence[JaxprEqn], differences: _Differences) -> JaxprEqn:
    """First of equal equations in the body of a loop or branch, to whose layer its own is relative, with a common note.

    Args:
        equal_eqns: the equation of each run.
        differences: names that differ between runs; updated.
    """
    eqn = _with_common_jaxprs(equal_eqns, differences)
    stacks = [each.source_info.name_stack for each in equal_eqns]
    notes = [_note(stack) or Note("/".join(_scopes(stack)), made_at=MadeAt.of(stack)) for stack in stacks]
    if all(replace(note, lines=notes[0].lines) == notes[0] for note in notes):
        return eqn
    note = _common_note(notes, tuple(x.layer for x in notes), differences)
    stack = noted(_common_ends(list(map(without_notes, stacks))), note)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def _with_common_jaxprs(equal_eqns: Sequence[JaxprEqn], differences: _Differences) -> JaxprEqn:
    """First of equal equations, whose bodies have the common equations of the bodies of all.

    Args:
        equal_eqns: the equation of each run.
        differences: names that differ between runs; updated.
    """

    def of_jaxprs(jaxprs: Sequence[Jaxpr]) -> Jaxpr:
        first = jaxprs[0]
        if all(jaxpr is first for jaxpr in jaxprs):
            return first
        equations = zip(*(jaxpr.eqns for jaxpr in jaxprs), strict=True)
        eqns = [_common_equation_inside(equals, differences) for equals in equations]
        return first if all(map(is_, eqns, first.eqns)) else first.replace(eqns=eqns)

    def of_values(values: Sequence[Any]) -> Any:
        # Values of one parameter; an unchanged one stays the same object.
        first = values[0]
        if isinstance(first, ClosedJaxpr):
            jaxpr = of_jaxprs([value.jaxpr for value in values])
            return first if jaxpr is first.jaxpr else ClosedJaxpr(jaxpr, first.consts)
        if isinstance(first, Jaxpr):
            return of_jaxprs(values)
        if type(first) is tuple and any(isinstance(item, ClosedJaxpr) for item in first):
            items = tuple(map(of_values, zip(*values, strict=True)))
            return first if all(map(is_, items, first)) else items
        return first

    eqn = equal_eqns[0]
    if not any(jaxprs_in_params(eqn.params)):
        return eqn
    params = {key: of_values([each.params[key] for each in equal_eqns]) for key in eqn.params}
    return eqn if all(params[key] is value for key, value in eqn.params.items()) else eqn.replace(params=params)


def _common_start(paths: Sequence[list[str]]) -> list[str]:
    """Common prefix of several paths."""
    reference = paths[0]
    length = 0
    while all(path[: length + 1] == reference[: length + 1] and length < len(path) for path in paths):
        length += 1
    return reference[:length]


def _common_ends(stacks: Sequence[Any]) -> Any:
    """Name stack of the scopes that all of several name stacks begin with, then those that the rest of all end with.

    Scopes between, which differ, are left out.
    """
    reference = stacks[0]
    shortest = min(map(len, stacks))
    prefix = common_stack(stacks)
    suffix_length = 0
    while suffix_length < shortest - len(prefix) and all(
        _end(stack, suffix_length + 1) == _end(reference, suffix_length + 1) for stack in stacks
    ):
        suffix_length += 1
    return prefix + _end(reference, suffix_length)


def _end(stack: Any, count: int) -> Any:
    """Last names of a name stack."""
    return stack[len(stack) - count :]
