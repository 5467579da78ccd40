"""Where each equation was traced, noted while calls are inlined: frames of the whole call stack, lines of the callers.

Input: equations in the order in which `inline` copies them, and the calls it inlines. Output: the equations with notes
of their layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from ipujax.lowering.jax_compat import Atom, Jaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr.activations import Frames
from ipujax.lowering.jaxpr.gradient_bodies import GradientBodies
from ipujax.lowering.jaxpr.layer_names import LayerNames, Repetition, Traced
from ipujax.lowering.jaxpr.omitted_calls import OmittedCall, OmittedCalls, frames_of
from ipujax.lowering.jaxpr.stage_names import is_transposed
from ipujax.lowering.source_info import Note, name_stack, noted, shown_calls, traced_from
from ipujax.runtime.errors import is_installed, is_of_user

_CHECKPOINTS = ("remat2", "checkpoint")


@dataclass(frozen=True, eq=False, slots=True)
class CallSite:
    """Where an equation is; equal only to itself.

    Args:
        frames: those it was traced in, those of the calls it is inlined from before its own.
        lines: the user's lines that called what it is inlined from, innermost first.
        repetition: the call that computes again what a checkpoint has not kept; None outside of such.
    """

    frames: Frames = Frames()
    lines: tuple[str, ...] = ()
    repetition: Repetition | None = None


class Bodies:
    """All jaxprs of one program.

    Args:
        program: the outermost of them.
    """

    def __init__(self, program: Jaxpr) -> None:
        self.omitted = OmittedCalls(program)
        self.gradients = GradientBodies[LayerNames]()


class CallSites:
    """The places of the equations of one jaxpr, in order.

    Args:
        jaxpr: before inlining.
        bodies: those of the program it is of.
    """

    def __init__(self, jaxpr: Jaxpr, bodies: Bodies) -> None:
        self._jaxpr = jaxpr
        self._bodies = bodies
        self._gradient = bodies.gradients.gradient(jaxpr)
        self._sites: list[CallSite] = []
        self._known: dict[tuple[CallSite, Any, bool, OmittedCall | None], CallSite] = {}
        self._repetitions = 0

    def omitted(self, jaxpr: Jaxpr, of_library: bool) -> dict[int, OmittedCall]:
        """The calls that JAX has left out of the frames of equations of a jaxpr, by number of the equation."""
        return {} if of_library else self._bodies.omitted.of(jaxpr)

    def of(self, eqn: JaxprEqn, site: CallSite, of_library: bool, omitted: OmittedCall | None) -> CallSite:
        """The place of an equation of a function that is called at `site`.

        Args:
            eqn: as the function has it.
            site: of what it calls the function; of nothing for the outermost.
            of_library: whether lines of the function are left out, see `inline`.
            omitted: a call between both that the frames of the equation leave out.
        """
        key = site, eqn.source_info.traceback, of_library, omitted
        if key not in self._known:
            outer = site if omitted is None else _in_call(site, omitted)
            run = 0 if omitted is None else omitted.number
            frames = frames_of(eqn, outer.frames, _no_code if of_library else _is_users, run)
            self._known[key] = replace(outer, frames=frames)
        return self._known[key]

    def inside(self, call: JaxprEqn, callee: Jaxpr, here: CallSite) -> CallSite:
        """The place that a callee is called at.

        Args:
            call: the equation that calls, with its line and name stack after inlining.
            callee: what it calls.
            here: its place.
        """
        if not is_installed(traced_from(callee)[1].rpartition(":")[0]):
            here = replace(here, lines=(*shown_calls(call), *here.lines))
        is_in_gradient = self._gradient is not None or is_transposed(name_stack(call))
        if call.primitive.name in _CHECKPOINTS and is_in_gradient:
            self._repetitions += 1
            here = replace(here, repetition=Repetition(self._repetitions, len(here.frames.calls)))
        return here

    def add(self, site: CallSite) -> None:
        """Notes the place of the next equation that is kept."""
        self._sites.append(site)

    @contextmanager
    def bodies_of(self, eqn: JaxprEqn, operands: Sequence[Atom], results: Sequence[Var]) -> Iterator[None]:
        """Goes through the bodies of loops and branches, which are inlined meanwhile.

        Args:
            eqn: the equation that holds them, with its name stack after inlining.
            operands: its operands after inlining.
            results: its results after inlining.
        """
        self._bodies.gradients.enter(eqn, operands, self._gradient is not None)
        yield
        self._bodies.gradients.leave(eqn, operands, results)

    def with_layers(self, eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> list[JaxprEqn]:
        """All equations that are kept, with their layers.

        Args:
            eqns: the equations.
            results: what the jaxpr returns.
        """
        pairs = list(zip(eqns, self._sites, strict=True))
        names = LayerNames([Traced(eqn, site.frames, site.repetition) for eqn, site in pairs], self._gradient)
        if self._gradient is None:
            self._bodies.gradients.add(self._jaxpr, names, results)
        layers = names.layers
        notes = dict[tuple[Any, str, tuple[str, ...]], Any]()  # equal ones are one object, which is soon compared
        done = []
        for (eqn, site), layer in zip(pairs, layers, strict=True):
            key = eqn.source_info.name_stack, layer, site.lines
            if key not in notes:
                notes[key] = noted(eqn.source_info.name_stack, Note(layer, lines=site.lines))
            done.append(eqn.replace(source_info=eqn.source_info.replace(name_stack=notes[key])))
        return done


def _in_call(site: CallSite, call: OmittedCall) -> CallSite:
    """The place of a call at another."""
    frames = Frames((*site.frames.calls, *call.frames.calls), call.frames.tail)
    return replace(site, frames=frames, lines=(*call.lines, *site.lines))


def _is_users(code: CodeType) -> bool:
    return is_of_user(code.co_filename)


def _no_code(code: CodeType) -> bool:
    return False
