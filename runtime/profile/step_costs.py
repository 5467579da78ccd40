"""What each operation of each line of source costs in one run, and what it holds: the rows that two profiles differ by.

Input: an `Executable`, its `Numbering`, and the `Timeline` of a run. Output: one row for each line and name; a variable
belongs to the operation of its own name, which is that of its result, or is a row of its own.
Limits: exchange code is that of the tile that has most of it for this row; other rows may have theirs elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ipujax.runtime.compile import Cost, Executable
from ipujax.runtime.graph import Execute, If, Leaf, Program, RepeatWhile, Switch, is_free, leaf_name, leaf_origin
from ipujax.runtime.memory import code_of_exchanges
from ipujax.runtime.profile.ids import Numbering
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepCost:
    """All that the steps of one name on one line of source cost in one run, and the variables of that name.

    Args:
        origin: the line.
        name: debug name of the steps.
        cycles: cycles on the IPU that spends most on them.
        moved_bytes: bytes that arrive on tiles or the host, all runs together.
        variable_bytes: size of the variables.
        exchange_code_bytes: code of their exchanges, on the tile that has most of it.
    """

    origin: Origin
    name: str
    cycles: int = 0
    moved_bytes: int = 0
    variable_bytes: int = 0
    exchange_code_bytes: int = 0


@dataclass(slots=True)
class _Sum:
    """What is added up for one row."""

    origin: Origin
    name: str
    work: np.ndarray | int = 0
    moved_bytes: int = 0
    variable_bytes: int = 0
    costs: dict[object, Cost] = field(default_factory=dict)


def step_costs(executable: Executable, ids: Numbering, timeline: Timeline) -> tuple[StepCost, ...]:
    """The rows, in program order; those of variables alone come last.

    Args:
        executable: what ran.
        ids: its numbering.
        timeline: the run.
    """
    sums: dict[tuple[str, str], _Sum] = {}

    def row(origin: Origin, name: str) -> _Sum:
        return sums.setdefault((str(origin), name), _Sum(origin, name))

    for node, step in executable.steps.items():
        runs, one = timeline.executions.get(node, 0), row(*place(node))
        one.work = one.work + step.work.sum(1) * runs
        one.moved_bytes += runs * sum(activity.moved_bytes for _, activity in ids.activities.get(node, ()))
        if isinstance(node, Leaf) and not is_free(node):
            one.costs[node.compute_set if isinstance(node, Execute) else node] = executable.costs[node]
    for variable in executable.graph.variables:
        row(variable.origin, variable.name).variable_bytes += variable.num_bytes
    return tuple(
        StepCost(
            one.origin,
            one.name,
            int(np.max(one.work)),
            one.moved_bytes,
            one.variable_bytes,
            int(code_of_exchanges(one.costs.values(), executable.target).max()) if one.costs else 0,
        )
        for one in sums.values()
    )


def place(node: Program) -> tuple[Origin, str]:
    """Where a step comes from, and its name."""
    if isinstance(node, Leaf):
        return leaf_origin(node), leaf_name(node)
    assert isinstance(node, (If, Switch, RepeatWhile))
    return node.origin, "decision"
