"""What each operation of each line and layer costs in one run, and what it holds: the rows that all views add up.

Input: an `Executable`, the program that ran, its `Numbering`, and the `Timeline` of the run. Output: a `StepCost` for
each operation of each layer, part of training and line; a variable belongs to the operation that its name and origin
tell. The cycles of all rows add up to the busy cycles of all IPUs, exactly.
Limits: exchange code is that of the tile that has most of it for this row; other rows may have theirs elsewhere.
Operations are counted as codelets say; those of a fallback, and of user codelets that do not say, count one a point.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.runtime.compile import Cost, Executable
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.graph import Execute, Leaf, Program, VertexGroup, is_free
from ipujax.runtime.memory import code_of_exchanges
from ipujax.runtime.profile.attribution import Attribution, Share, divide, operation_name
from ipujax.runtime.sections.ids import Numbering
from ipujax.runtime.sections.liveness import liveness_tree
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin, Variable, dtype_name, is_key_dtype, part_of, visible_layer
from ipujax.runtime.timeline import PHASES, Timeline


@dataclass(frozen=True, slots=True)
class StepCost:
    """All that one operation of one line in one layer costs in one run, and its variables.

    Args:
        origin: the line, the layer and the part of training; of several that differ in their path, the first.
        name: the operation.
        cycles: busy cycles of all IPUs of one replica.
        moved_bytes: bytes that arrive on tiles or the host, all runs together.
        variable_bytes: size of the variables.
        exchange_code_bytes: code of their exchanges, on the tile that has most of it.
        flops: operations on floating-point numbers, all runs together; None in profiles that were saved without.
        precision: the dtype whose peak rate is theirs to reach: "float16" where most operations read numbers in half
            precision only.
        tile_balance: mean share of their compute phases in which a tile computes, as `Figures.tile_balance`; None where
            nothing is computed.
        always_bytes: size of those variables that are live during the whole run, constants included.
        peak_bytes: the same and those that are live when most is, on all tiles together.
        limiting_cycles: the cycles of those on the limiting IPU; None in profiles that were saved without.
        phases: `cycles` by phase; empty in profiles that were saved without.
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
    always_bytes: int = 0
    peak_bytes: int = 0
    limiting_cycles: int | None = None
    phases: dict[str, int] = field(default_factory=dict, hash=False)


RowKey = tuple[str, ...]


def row_key(origin: Origin, name: str) -> RowKey:
    """What the operations of one row have in common: line, caller, layer, part of training and name.

    Args:
        origin: of a step or a variable.
        name: of the operation.
    """
    return str(origin), origin.library, *origin.callers[:1], origin.layer, origin.part, name


def origin_of_row(origin: Origin, *, has_backward: bool) -> Origin:
    """An origin with the layer and the part of training that rows have.

    Args:
        origin: of a share of a step.
        has_backward: whether the program has a backward pass.
    """
    part = part_of(origin, has_backward=has_backward and bool(origin.line))  # transfers have no line
    return replace(origin, layer=visible_layer(origin.layer), part=part)


def has_backward(shares_of_steps: Iterable[Sequence[Share]]) -> bool:
    """Whether a program has a backward pass.

    Args:
        shares_of_steps: of all its steps.
    """
    return any(share.origin.part == "backward" for shares in shares_of_steps for share in shares)


@dataclass(slots=True)
class _Sum:
    """What is added up for one row."""

    origin: Origin
    name: str
    work: np.ndarray  # int64[num_ipus, phases]
    moved_bytes: int = 0
    variable_bytes: int = 0
    always_bytes: int = 0
    peak_bytes: int = 0
    codes: dict[object, tuple[Cost, float]] = field(default_factory=dict)  # exchanges, and this row's fraction of them
    flops: dict[str, int] = field(default_factory=lambda: {"float32": 0, "float16": 0})  # by precision
    busy: int = 0  # cycles of tiles in compute phases, and all that they could compute in
    spent: int = 0

    def row(self, target: Target, limiting_ipu: int) -> StepCost:
        """The sum."""
        phases = {name: int(cycles) for name, cycles in zip(PHASES, self.work.sum(0), strict=True) if cycles}
        return StepCost(
            self.origin,
            self.name,
            sum(phases.values()),
            self.moved_bytes,
            self.variable_bytes,
            self._code_bytes(target),
            sum(self.flops.values()),
            max(self.flops, key=lambda name: self.flops[name]),
            self.busy / self.spent if self.spent else None,
            self.always_bytes,
            self.peak_bytes,
            int(self.work[limiting_ipu].sum()),
            phases,
        )

    def _code_bytes(self, target: Target) -> int:
        total = sum(code_of_exchanges([cost], target) * fraction for cost, fraction in self.codes.values())
        return round(float(np.max(total))) if self.codes else 0


def step_costs(
    executable: Executable, program: Program, ids: Numbering, timeline: Timeline, limiting_ipu: int
) -> tuple[StepCost, ...]:
    """The rows, in program order; those of variables alone come last.

    Args:
        executable: what ran.
        program: the part of it that ran.
        ids: its numbering.
        timeline: the run.
        limiting_ipu: the IPU whose cycles are told apart.
    """
    attribution = Attribution(executable, program)
    steps = {node: attribution.shares(node) for node in executable.steps}
    table = _Table(executable, ids, has_backward(steps.values()))
    for node, shares in steps.items():
        table.add_step(node, shares, timeline.executions.get(node, 0))
    for variable in executable.graph.variables:
        table.sum_of_variable(variable).variable_bytes += variable.num_bytes
    liveness = liveness_tree(executable)
    always = [item.variable for item in liveness.always if item.variable is not None]
    at_peak = [item.variable for item in liveness.at_peak if item.variable is not None]
    for variable in always:
        table.sum_of_variable(variable).always_bytes += variable.num_bytes
    for variable in (*always, *at_peak):
        table.sum_of_variable(variable).peak_bytes += variable.num_bytes
    return tuple(row.row(executable.target, limiting_ipu) for row in table.sums.values())


class _Table:
    """The rows while they are added up."""

    def __init__(self, executable: Executable, ids: Numbering, has_backward: bool) -> None:
        self.executable, self.ids, self.has_backward = executable, ids, has_backward
        self.sums: dict[RowKey, _Sum] = {}

    def sum_of(self, origin: Origin, name: str) -> _Sum:
        """The row of an operation, a new one if need be."""
        origin = origin_of_row(origin, has_backward=self.has_backward)
        key = row_key(origin, name)
        if key not in self.sums:
            work = np.zeros((self.executable.target.num_ipus, len(PHASES)), np.int64)
            self.sums[key] = _Sum(origin, name, work)
        return self.sums[key]

    def sum_of_variable(self, variable: Variable) -> _Sum:
        """The row of the operation that a variable is named after."""
        return self.sum_of(variable.origin, operation_name(variable.name, variable.origin))

    def add_step(self, node: Program, shares: list[Share], runs: int) -> None:
        """Adds one step, divide among its shares."""
        rows = [self.sum_of(share.origin, share.name) for share in shares]
        weights = [share.weight for share in shares]
        work = self.executable.steps[node].work
        for ipu, phase in zip(*np.nonzero(work), strict=True):
            for row, cycles in zip(rows, divide(int(work[ipu, phase]) * runs, weights), strict=True):
                row.work[ipu, phase] += cycles
        moved = runs * sum(activity.moved_bytes for _, activity in self.ids.activities.get(node, ()))
        for row, moved_bytes in zip(rows, divide(moved, weights), strict=True):
            row.moved_bytes += moved_bytes
        if isinstance(node, Leaf) and not is_free(node):
            self._add_code(node, rows, shares)
        if isinstance(node, Execute):
            self._add_vertices(node, rows, shares, runs)

    def _add_code(self, leaf: Leaf, rows: list[_Sum], shares: list[Share]) -> None:
        """Adds the exchange code of a step."""
        cost = self.executable.costs[leaf]
        key = leaf.compute_set if isinstance(leaf, Execute) else leaf
        for row, share in zip(rows, shares, strict=True):
            fraction = row.codes[key][1] if key in row.codes else 0.0
            row.codes[key] = cost, fraction + share.code

    def _add_vertices(self, node: Execute, rows: list[_Sum], shares: list[Share], runs: int) -> None:
        """Adds the arithmetic of a compute set."""
        cost, tiles = self.executable.costs[node], self.executable.target.tiles_per_ipu
        assert isinstance(cost, ComputeSetCost)
        busy = runs * int(cost.compute_cycles.sum())
        spent = runs * tiles * int(cost.compute_cycles.reshape(-1, tiles).max(1).sum())
        for row in {id(row): row for row in rows}.values():
            row.busy += busy
            row.spent += spent
        for number, group in enumerate(self.executable.graph.groups[node.compute_set]):
            flops = _flops(group)
            parts = [(row, share) for row, share in zip(rows, shares, strict=True) if share.group == number]
            if flops == 0 or not parts:
                continue
            reads = {dtype_name(f.dtype) for f in group.codelet.fields if f.is_read and _is_float(f.dtype)}
            weights = [share.weight for _, share in parts]
            shared = divide(flops * runs, weights if any(weights) else [1] * len(weights))
            for (row, _), count in zip(parts, shared, strict=True):
                row.flops["float16" if reads == {"float16"} else "float32"] += count


def _flops(group: VertexGroup) -> int:
    """Operations on floating-point numbers of all vertices of a group."""
    codelet = group.codelet
    computes = not codelet.moves and any(_is_float(field.dtype) for field in codelet.fields)
    return codelet.flops * prod(axis.extent for axis in group.axes) if computes else 0


def _is_float(dtype: Any) -> bool:
    return not is_key_dtype(dtype) and bool(jnp.issubdtype(dtype, jnp.inexact))
