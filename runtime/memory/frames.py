"""Who makes room for the frames of functions: what lives inside a function lies in the memory of one of its callers.

Input: the liveness of a program. Output: for each step, the functions whose frames occupy memory during it. The frame
of a function has one address for all its calls, so it belongs to the innermost frame that every call of it passes
through: its caller's if it has one, else that of the function, or the program, they all are called from.
Source: immediate dominators of the call graph, which has no cycles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from ipujax.runtime.analysis import Liveness, Step
from ipujax.runtime.graph import Call, Function

Owner = Function | None  # None is the program itself


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """The frames of a program and of every function it calls.

    Args:
        of: the liveness of each, callers before those they call.
        owner: who holds the frame of each function.
        reached: each function with those it calls, and those they call.
    """

    of: Mapping[Owner, Liveness]
    owner: Mapping[Function, Owner]
    reached: Mapping[Function, tuple[Function, ...]]

    def during(self, holder: Owner, step: Step) -> tuple[Function, ...]:
        """The functions whose frames `holder` makes room for during one of its steps."""
        if not isinstance(step, Call):
            return ()
        return tuple(f for f in self.reached[step.function] if self.owner[f] is holder)


def frames_of(program: Liveness) -> Frames:
    """Finds who holds the frame of each function.

    Args:
        program: the liveness of the program itself.
    """
    frames = _callers_first(program)
    dominators: dict[Owner, frozenset[Owner]] = {None: frozenset()}
    owner: dict[Function, Owner] = {}
    for function in frames:
        if function is not None:
            callers = [caller for caller, frame in frames.items() if function in frame.functions]
            common = frozenset.intersection(*(dominators[caller] | {caller} for caller in callers))
            dominators[function] = common
            owner[function] = max(common, key=lambda holder: len(dominators[holder]))
    reached: dict[Function, tuple[Function, ...]] = {}
    for function in reversed(frames):
        if function is not None:
            inner = chain.from_iterable(reached[called] for called in frames[function].functions)
            reached[function] = tuple(dict.fromkeys((function, *inner)))
    return Frames(frames, owner, reached)


def _callers_first(program: Liveness) -> dict[Owner, Liveness]:
    """Every frame once, each after all that call it."""
    done: dict[Owner, Liveness] = {}

    def visit(function: Owner, frame: Liveness) -> None:
        if function not in done:
            for called, inner in frame.functions.items():
                visit(called, inner)
            done[function] = frame

    visit(None, program)
    return dict(reversed(done.items()))
