"""The rows of operations to which each step of a run belongs.

Input: what ran, its rows of `step_costs`, and steps with the calls that run them. Output: numbers of rows, by which
pages, traces and the execution profile look up the line, the layer and the part of training of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ipujax.runtime.compile import Executable
from ipujax.runtime.graph import Program
from ipujax.runtime.profile.attribution import Attribution
from ipujax.runtime.profile.step_costs import StepCost, has_backward, origin_of_row, row_key
from ipujax.runtime.tensor import Origin, compose


class StepRows:
    """Finds the rows of steps.

    Args:
        executable: what ran.
        program: the part of it that ran.
        rows: of `step_costs`, of the same run.
    """

    def __init__(self, executable: Executable, program: Program, rows: Sequence[StepCost]) -> None:
        self._attribution = Attribution(executable, program)
        self._has_backward = has_backward(map(self._attribution.shares, executable.steps))
        self._numbers = {row_key(row.origin, row.name): number for number, row in enumerate(rows)}
        # Origins that differ in their layer, part or names alone are equal, so these stand beside them.
        self._known: dict[tuple[Program, Origin, str, str, tuple[str, ...]], tuple[int, ...]] = {}

    def of(self, node: Program, caller: Origin) -> tuple[int, ...]:
        """The rows of a step, the one with the largest share of it first.

        Args:
            node: a leaf or a decision.
            caller: the origin of the call that runs it, `Origin()` outside of functions.
        """
        key = node, caller, caller.layer, caller.part, caller.names
        if key not in self._known:
            shares = sorted(self._attribution.own_shares(node), key=lambda share: -share.weight)
            origins = [compose(caller, share.origin) if caller != Origin() else share.origin for share in shares]
            placed = [origin_of_row(origin, has_backward=self._has_backward) for origin in origins]
            keys = [row_key(origin, share.name) for origin, share in zip(placed, shares, strict=True)]
            self._known[key] = tuple(dict.fromkeys(self._numbers[key] for key in keys))
        return self._known[key]

    def of_members(self, members: Iterable[tuple[Program, Origin]]) -> tuple[int, ...]:
        """The rows of several steps, in their order.

        Args:
            members: nodes, each with the origin of the call that runs it.
        """
        return tuple(dict.fromkeys(row for node, caller in members for row in self.of(node, caller)))
