"""What each operation of each line of source costs in one run, and what it holds: the rows that two profiles differ by.

Input: an `Executable`, its `Numbering`, and the `Timeline` of a run. Output: one row for each line and name; a variable
belongs to the operation of its own name, which is that of its result, or is a row of its own.
Limits: exchange code is that of the tile that has most of it for this row; other rows may have theirs elsewhere.
Operations are counted as codelets say; those of a fallback, and of user codelets that do not say, count one a point.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.runtime.compile import Cost, Executable
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.graph import (
    Execute,
    If,
    Leaf,
    Program,
    RepeatWhile,
    Switch,
    VertexGroup,
    is_free,
    leaf_name,
    leaf_origin,
)
from ipujax.runtime.memory import code_of_exchanges
from ipujax.runtime.profile.ids import Numbering
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin, dtype_name, is_key_dtype
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
        flops: operations on floating-point numbers, all runs together; None in profiles that were saved without.
        precision: the dtype whose peak rate is theirs to reach: "float16" where most operations read numbers in half
            precision only.
        tile_balance: mean share of their compute phases in which a tile computes, as `Figures.tile_balance`; None where
            nothing is computed.
    """

    origin: Origin
    name: str
    cycles: int = 0
    moved_bytes: int = 0
    variable_bytes: int = 0
    exchange_code_bytes: int = 0
    flops: int | None = None
    precision: str = "float32"
    tile_balance: float | None = None


@dataclass(slots=True)
class _Sum:
    """What is added up for one row."""

    origin: Origin
    name: str
    work: np.ndarray | int = 0
    moved_bytes: int = 0
    variable_bytes: int = 0
    costs: dict[object, Cost] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=lambda: {"float32": 0, "float16": 0})  # by precision
    busy: int = 0  # cycles of tiles in compute phases, and all that they could compute in
    spent: int = 0

    def add_vertices(self, executable: Executable, node: Execute, cost: ComputeSetCost, runs: int) -> None:
        """Adds the arithmetic of a compute set."""
        tiles = executable.target.tiles_per_ipu
        self.busy += runs * int(cost.compute_cycles.sum())
        self.spent += runs * tiles * int(cost.compute_cycles.reshape(-1, tiles).max(1).sum())
        for group in executable.graph.groups[node.compute_set]:
            if (flops := _flops(group)) > 0:
                reads = {dtype_name(f.dtype) for f in group.codelet.fields if f.is_read and _is_float(f.dtype)}
                self.flops["float16" if reads == {"float16"} else "float32"] += runs * flops

    def row(self, target: Target) -> StepCost:
        """The sum."""
        code = int(code_of_exchanges(self.costs.values(), target).max()) if self.costs else 0
        precision = max(self.flops, key=lambda name: self.flops[name])
        balance = self.busy / self.spent if self.spent else None
        flops = sum(self.flops.values())
        figures = int(np.max(self.work)), self.moved_bytes, self.variable_bytes, code, flops, precision, balance
        return StepCost(self.origin, self.name, *figures)


def _flops(group: VertexGroup) -> int:
    """Operations on floating-point numbers of all vertices of a group."""
    codelet = group.codelet
    computes = not codelet.moves and any(_is_float(field.dtype) for field in codelet.fields)
    return codelet.flops * prod(axis.extent for axis in group.axes) if computes else 0


def _is_float(dtype: Any) -> bool:
    return not is_key_dtype(dtype) and bool(jnp.issubdtype(dtype, jnp.inexact))


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
            cost = executable.costs[node]
            one.costs[node.compute_set if isinstance(node, Execute) else node] = cost
            if isinstance(node, Execute) and isinstance(cost, ComputeSetCost):
                one.add_vertices(executable, node, cost, runs)
    for variable in executable.graph.variables:
        row(variable.origin, variable.name).variable_bytes += variable.num_bytes
    return tuple(one.row(executable.target) for one in sums.values())


def place(node: Program) -> tuple[Origin, str]:
    """Where a step comes from, and its name."""
    if isinstance(node, Leaf):
        return leaf_origin(node), leaf_name(node)
    assert isinstance(node, (If, Switch, RepeatWhile))
    return node.origin, "decision"
