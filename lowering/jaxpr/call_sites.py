"""Call sites of equations, recorded while calls are inlined: frames of the call stack, and lines of the callers.

Input: equations in the order in which `inline` copies them, and the calls it inlines. Output: the equations with notes
of their layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr.function_runs import Frames
from ipujax.lowering.jaxpr.gradient_bodies import GradientBodies
from ipujax.lowering.jaxpr.layer_names import LayerNames, Repetition, TracedEquation
from ipujax.lowering.jaxpr.omitted_calls import OmittedCall, OmittedCalls, frames_of
from ipujax.lowering.jaxpr.stage_names import is_transposed
from ipujax.lowering.layer_notes import Note, noted
from ipujax.lowering.source_info import MadeAt, name_stack, shown_calls, traced_from
from ipujax.runtime.errors import is_installed, is_of_user

_PART_OF_NAME = re.compile(r"\.?\w+|\[[^\]]*\]")
_CHECKPOINTS = ("remat2", "checkpoint")


@dataclass(frozen=True, eq=False, slots=True)
class CallSite:
    """Call stack of an equation; equal only to itself.

    Args:
        frames: frames that it was traced in, after those of the calls that it is inlined from.
        lines: the user's lines that called the inlined functions around it, innermost first.
        repetition: the recomputing call of a checkpoint around it; None without one.
    """

    frames: Frames = Frames()
    lines: tuple[str, ...] = ()
    repetition: Repetition | None = None


class Bodies:
    """Omitted calls and gradients among all jaxprs of one program.

    Args:
        program: the outermost jaxpr.
    """

    def __init__(self, program: ClosedJaxpr) -> None:
        self.omitted = OmittedCalls(program)
        self.gradients = GradientBodies[LayerNames]()


class CallSites:
    """Call sites of the equations of one jaxpr, in order.

    Args:
        jaxpr: the jaxpr before inlining.
        bodies: all jaxprs of its program.
    """

    def __init__(self, jaxpr: Jaxpr, bodies: Bodies) -> None:
        self._jaxpr = jaxpr
        self._bodies = bodies
        self._gradient = bodies.gradients.gradient(jaxpr)
        self._sites: list[CallSite] = []
        self._site_of: dict[tuple[CallSite, Any, bool, OmittedCall | None], CallSite] = {}
        self._repetitions = 0

    def omitted(self, jaxpr: Jaxpr, of_library: bool) -> dict[int, OmittedCall]:
        """Return the calls that JAX leaves out of the frames of a jaxpr's equations, by number of the equation."""
        return {} if of_library else self._bodies.omitted.of(jaxpr)

    def of(self, eqn: JaxprEqn, site: CallSite, of_library: bool, omitted: OmittedCall | None) -> CallSite:
        """Return the call site of an equation: the Python frames from the program down to its line.

        JAX records frames within the traced function alone; those around it are the call site of its call.

        Args:
            eqn: the equation before inlining.
            site: call site of the call of the function that it is in; an empty one for the outermost jaxpr.
            of_library: leave out lines of the function, see `inline`.
            omitted: a call between both that the frames of the equation leave out.
        """
        # Memoised, so that equations of one traceback share a site: sites are compared by identity.
        key = site, eqn.source_info.traceback, of_library, omitted
        if key not in self._site_of:
            outer = site if omitted is None else _nest_call(site, omitted)
            number = 0 if omitted is None else omitted.number
            frames = frames_of(eqn, outer.frames, _no_code if of_library else _is_user_code, number)
            self._site_of[key] = replace(outer, frames=frames)
        return self._site_of[key]

    def inside(self, call: JaxprEqn, callee: Jaxpr, site: CallSite) -> CallSite:
        """Return the call site (frames, and lines to show) that is around all equations of a callee once it is inlined.

        Args:
            call: the equation that calls, with its line and name stack after inlining.
            callee: jaxpr of the called function.
            site: call site of `call`.
        """
        _, file_and_line = traced_from(callee)
        if not is_installed(file_and_line.rpartition(":")[0]):
            site = replace(site, lines=(*shown_calls(call), *site.lines))
        is_in_gradient = self._gradient is not None or is_transposed(name_stack(call))
        if call.primitive.name in _CHECKPOINTS and is_in_gradient:
            self._repetitions += 1
            site = replace(site, repetition=Repetition(self._repetitions, len(site.frames.calls)))
        return site

    def add(self, site: CallSite) -> None:
        """Record the call site of the next equation of the inlined jaxpr."""
        self._sites.append(site)

    @contextmanager
    def bodies_of(self, eqn: JaxprEqn, operands: Sequence[Atom], results: Sequence[Var]) -> Iterator[None]:
        """Relate values in the bodies of a loop or branch, inlined inside the `with`, to the values outside.

        So the body of a gradient's loop finds the layers of the forward loop that it shares values with.

        Args:
            eqn: the loop or branch, with its name stack after inlining.
            operands: its operands after inlining.
            results: its results after inlining.
        """
        self._bodies.gradients.enter(eqn, operands, self._gradient is not None)
        yield
        self._bodies.gradients.leave(eqn, operands, results)

    def with_layers(self, eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> list[JaxprEqn]:
        """Return the inlined equations, with notes in their name stacks: the layer, and lines of calls around them.

        Args:
            eqns: equations after inlining, one for each call site that was recorded, in the same order.
            results: results of the jaxpr.
        """
        pairs = list(zip(eqns, self._sites, strict=True))
        equations = [TracedEquation(eqn, site.frames, site.repetition) for eqn, site in pairs]
        names = LayerNames(equations, self._gradient, _input_names(self._jaxpr))
        if self._gradient is None:
            self._bodies.gradients.add(self._jaxpr, names, results)
        notes = dict[tuple[Any, str, tuple[str, ...]], Any]()  # equal notes are one object, quick to compare
        labelled = []
        for (eqn, site), layer in zip(pairs, names.layers, strict=True):
            key = eqn.source_info.name_stack, layer, site.lines
            if key not in notes:
                stack = eqn.source_info.name_stack
                notes[key] = noted(stack, Note(layer, lines=site.lines, made_at=MadeAt.of(stack)))
            labelled.append(eqn.replace(source_info=eqn.source_info.replace(name_stack=notes[key])))
        return labelled


def _input_names(jaxpr: Jaxpr) -> dict[Var, tuple[str, ...]]:
    """Return the names of inputs in the user's code as paths: `ps[3].w` is `("ps", "[3]", ".w")`."""
    names = jaxpr.debug_info.arg_names or ()
    return {
        var: tuple(_PART_OF_NAME.findall(name)) or (name,)
        for var, name in zip(jaxpr.invars, names, strict=False)
        if name
    }


def _nest_call(site: CallSite, call: OmittedCall) -> CallSite:
    frames = Frames((*site.frames.calls, *call.frames.calls), call.frames.tail)
    return replace(site, frames=frames, lines=(*call.lines, *site.lines))


def _is_user_code(code: CodeType) -> bool:
    return is_of_user(code.co_filename)


def _no_code(code: CodeType) -> bool:
    return False
