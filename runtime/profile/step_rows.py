"""Rows of operations to which each step of a run belongs.

Input: a program, its rows of `step_costs`, and steps with the calls that run them. Output: numbers of rows, by which
pages, traces and the execution profile look up the line, the layer and the part of the training step of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ipujax.runtime.compile import Executable
from ipujax.runtime.graph import Program
from ipujax.runtime.profile.attribution import Attribution
from ipujax.runtime.profile.step_costs import StepCost, has_backward, origin_of_row, row_key
from ipujax.runtime.tensor import Origin, compose


class StepRows:
    """Index from steps to their rows.

    Args:
        executable: the compiled program.
        program: the program of the run, of the executable's steps.
        rows: result of `step_costs` for the same run.
    """

    def __init__(self, executable: Executable, program: Program, rows: Sequence[StepCost]) -> None:
        self._attribution = Attribution(executable, program)
        self._has_backward = has_backward(map(self._attribution.shares, executable.steps))
        self._numbers = {row_key(row.origin, row.name): number for number, row in enumerate(rows)}
        # Origins that differ in layer, part or names only compare equal, so these are part of the key.
        self._cached: dict[tuple[Program, Origin, str, str, tuple[str, ...]], tuple[int, ...]] = {}

    def of(self, node: Program, caller: Origin) -> tuple[int, ...]:
        """Return the numbers of the rows of a leaf or decision, the one with its largest share first."""
        # `caller` is the origin of the call that runs it, `Origin()` outside of functions.
        key = node, caller, caller.layer, caller.part, caller.names
        if key not in self._cached:
            shares = sorted(self._attribution.own_shares(node), key=lambda share: -share.weight)
            origins = [compose(caller, share.origin) if caller != Origin() else share.origin for share in shares]
            row_origins = [origin_of_row(origin, has_backward=self._has_backward) for origin in origins]
            keys = [row_key(origin, share.name) for origin, share in zip(row_origins, shares, strict=True)]
            self._cached[key] = tuple(dict.fromkeys(self._numbers[key] for key in keys))
        return self._cached[key]

    def of_members(self, members: Iterable[tuple[Program, Origin]]) -> tuple[int, ...]:
        """Return the numbers of the rows of several steps, in their order, each step with the origin of its call."""
        return tuple(dict.fromkeys(row for node, caller in members for row in self.of(node, caller)))
