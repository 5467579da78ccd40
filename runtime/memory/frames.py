"""Owners of frames: the caller in whose memory the frame of each function is.

Input: the liveness of a program. Output: for each step, the functions whose frames occupy memory during it. The frame
of a function has one address for all its calls, so its owner is the innermost frame that every call of it passes
through: its caller if it has one, else the function, or the program, from which all its callers are called.
Source: immediate dominators of the call graph, which has no cycles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from ipujax.runtime.analysis import Liveness, Step
from ipujax.runtime.graph import Call, Function
from ipujax.runtime.tensor import Variable

Owner = Function | None  # None is the program itself


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """The frames of a program and of every function it calls.

    Args:
        liveness: liveness of each frame, callers before callees.
        owner: owner of the frame of each function.
        reached: each function with all functions that it calls directly or indirectly, itself first.
        memory: variable whose memory a variable takes, for those that take another's (`memory.overwritten_operands`).
    """

    liveness: Mapping[Owner, Liveness]
    owner: Mapping[Function, Owner]
    reached: Mapping[Function, tuple[Function, ...]]
    memory: Mapping[Variable, Variable] = field(default_factory=dict)

    def functions_during(self, owner: Owner, step: Step) -> tuple[Function, ...]:
        """Return the functions whose frames are in the memory of `owner` during one of its steps."""
        if not isinstance(step, Call):
            return ()
        # A function that is reached but has an outer owner takes memory there, during the whole outer call.
        return tuple(f for f in self.reached[step.function] if self.owner[f] is owner)


def frames_of(program: Liveness) -> Frames:
    """Return the frames of a program, given its own liveness."""
    frames = _callers_first(program)
    dominators: dict[Owner, frozenset[Owner]] = {None: frozenset()}
    owner: dict[Function, Owner] = {}
    # In this order the dominators of all callers are known, so one round reaches the fixpoint.
    for function in frames:
        if function is not None:
            callers = [caller for caller, frame in frames.items() if function in frame.functions]
            common = frozenset.intersection(*(dominators[caller] | {caller} for caller in callers))
            dominators[function] = common
            # The dominators of a node form a chain: the innermost has the most dominators itself.
            owner[function] = max(common, key=lambda frame: len(dominators[frame]))
    reached: dict[Function, tuple[Function, ...]] = {}
    for function in reversed(frames):
        if function is not None:
            inner = chain.from_iterable(reached[callee] for callee in frames[function].functions)
            reached[function] = tuple(dict.fromkeys((function, *inner)))
    return Frames(frames, owner, reached)


def _callers_first(program: Liveness) -> dict[Owner, Liveness]:
    """Return every frame once, after all of its callers."""
    finished: dict[Owner, Liveness] = {}

    def visit(function: Owner, frame: Liveness) -> None:
        if function not in finished:
            for callee, inner in frame.functions.items():
                visit(callee, inner)
            finished[function] = frame

    visit(None, program)
    return dict(reversed(finished.items()))
