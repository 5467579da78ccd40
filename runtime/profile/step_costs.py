"""Costs and variables of each operation of each line and layer in one run: the rows that all views sum.

Input: an `Executable`, the `Attribution` of the run, its `Numbering`, and its `Timeline`. Output: a `StepCost` for
each operation of each layer, part of the training step and line; a variable belongs to the operation in its name and
origin. The cycles of all rows add up to the busy cycles of all IPUs, exactly. `StepRows` finds the rows of a step.
Limits: exchange code is that of the tile with most of it for this row, which may differ from row to row. Arithmetic is
counted by `Codelet.flops`; user codelets without it count one operation a point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from ipujax.runtime.causes.variants import latency_of
from ipujax.runtime.compile import Cost, Executable
from ipujax.runtime.cost import ComputeSetCost, block_shapes
from ipujax.runtime.files.figure_kinds import Large
from ipujax.runtime.files.kinds import Integer, Map, Text
from ipujax.runtime.graph import (
    NO_TILE,
    Copy,
    CrossReplicaCopy,
    Execute,
    Leaf,
    Program,
    RemoteOut,
    StreamOut,
    VertexGroup,
    is_free,
)
from ipujax.runtime.memory import code_of_exchanges
from ipujax.runtime.profile.attribution import Attribution, Share, divide, operation_name
from ipujax.runtime.sections.ids import Numbering
from ipujax.runtime.sections.live_variables import liveness_tree
from ipujax.runtime.tensor import (
    OF_CALLER,
    Origin,
    Variable,
    compose,
    dtype_name,
    is_key_dtype,
    join_layers,
    visible_layer,
)
from ipujax.runtime.timeline import PHASES, Timeline
from ipujax.runtime.timeline.clocks import HOST_EXCHANGE


@dataclass(frozen=True, slots=True)
class StepCost:
    """Costs in one run, and variables, of one operation of one line in one layer.

    Args:
        origin: line, layer and part of the training step; of several that differ in their path, the first.
        name: the operation.
        cycles: busy cycles of all IPUs of one replica.
        moved_bytes: bytes that arrive on tiles or the host, all runs together.
        variable_bytes: size of the variables.
        exchange_code_bytes: code of its exchanges, on the tile with most of it.
        flops: operations on floating-point numbers, and products of whole ones, all runs together.
        precision: dtype of the peak rate that bounds it: "float16" where most operations read half precision only.
        tile_balance: mean share of its compute phases in which a tile computes, as `Figures.tile_balance`; None without
            compute phases.
        always_bytes: size of the variables that are live during the whole run, constants included.
        peak_bytes: `always_bytes`, and the size of the variables that are live at the peak of all tiles together.
        limiting_cycles: the cycles on the limiting IPU.
        phases: `cycles` by phase.
        ipus: `cycles` by the number of the IPU, of those that have any.
        largest_read: name of the largest variable that its exchanges read; "" for none.
    """

    origin: Origin
    name: str
    cycles: int = 0
    moved_bytes: Large = 0
    variable_bytes: int = 0
    exchange_code_bytes: int = 0
    flops: Large = 0
    precision: Annotated[str, Text(("float16", "float32"))] = "float32"
    tile_balance: float | None = None
    always_bytes: int = 0
    peak_bytes: int = 0
    limiting_cycles: int = 0
    phases: Annotated[dict[str, int], Map(Integer(), Text(PHASES))] = field(default_factory=dict, hash=False)
    ipus: Annotated[dict[str, int], Map(Integer())] = field(default_factory=dict, hash=False)
    largest_read: str = ""


RowKey = tuple[str, ...]
SHARED = "(shared by layers)"  # layer of variables of functions that several layers call


def row_key(origin: Origin, name: str) -> RowKey:
    """Return the key of a row, equal for all its steps and variables: line, caller, layer, part, name of operation."""
    return str(origin), origin.library, *origin.callers[:1], origin.layer, origin.part, name


def origin_of_row(origin: Origin, *, has_backward: bool) -> Origin:
    """Return the origin of a share of a step with the layer and part of rows: no part if there is no backward one."""
    part = origin.part if has_backward else ""
    is_shared = origin.layer.partition("/")[0] == OF_CALLER  # a variable inside of a function that is called
    line = "" if origin.line.startswith(OF_CALLER) else origin.line
    layer = join_layers(SHARED * is_shared, visible_layer(origin.layer))
    is_same = line == origin.line and layer == origin.layer and part == origin.part  # as of most: copies take long
    return origin if is_same else replace(origin, line=line, layer=layer, part=part)


def has_backward(shares_of_steps: Iterable[Sequence[Share]]) -> bool:
    """Return whether a program has a backward part, from the shares of all its steps."""
    return any(share.origin.part == "backward" for shares in shares_of_steps for share in shares)


@dataclass(slots=True)
class _Sum:
    """Sums for one row, while steps and variables are added."""

    origin: Origin
    name: str
    work: np.ndarray  # int64[num_ipus, phases]
    moved_bytes: int = 0
    largest_read: Variable | None = None  # of its exchanges
    variable_bytes: int = 0
    always_bytes: int = 0
    peak_bytes: int = 0
    codes: dict[object, tuple[np.ndarray, float]] = field(default_factory=dict)  # of tiles, and this row's fraction
    flops: dict[str, int] = field(default_factory=lambda: {"float32": 0, "float16": 0})  # by precision
    busy: int = 0  # cycles in which tiles compute
    available: int = 0  # cycles of all tiles in its compute phases

    def row(self, by_phase: list[int], by_ipu: list[int], limiting_ipu: int) -> StepCost:
        """Return the row; `by_phase` and `by_ipu` are sums of its work."""
        phases = {name: cycles for name, cycles in zip(PHASES, by_phase, strict=True) if cycles}
        return StepCost(
            self.origin,
            self.name,
            sum(phases.values()),
            self.moved_bytes,
            self.variable_bytes,
            self._code_bytes(),
            sum(self.flops.values()),
            max(self.flops, key=lambda name: self.flops[name]),
            self.busy / self.available if self.available else None,
            self.always_bytes,
            self.peak_bytes,
            by_ipu[limiting_ipu],
            phases,
            {str(ipu): cycles for ipu, cycles in enumerate(by_ipu) if cycles},
            "" if self.largest_read is None else repr(self.largest_read),
        )

    def _code_bytes(self) -> int:
        if not self.codes:
            return 0
        total = sum(tile_bytes * fraction for tile_bytes, fraction in self.codes.values())
        return round(float(np.max(total)))


def step_costs(
    executable: Executable, attribution: Attribution, ids: Numbering, timeline: Timeline, limiting_ipu: int
) -> tuple[StepCost, ...]:
    """Return the rows in program order, with cycles of the limiting IPU; those of variables without steps come last."""
    steps = {node: attribution.shares(node) for node in executable.steps}
    table = _Table(executable, ids, has_backward(steps.values()))
    for node, shares in steps.items():
        table.add_step(node, shares, timeline.executions.get(node, 0))
    sum_of = {variable: table.sum_of_variable(variable) for variable in executable.graph.variables}
    for variable in executable.graph.variables:
        sum_of[variable].variable_bytes += variable.num_bytes
    liveness = executable.once(liveness_tree)
    always = [item.variable for item in liveness.always if item.variable is not None]
    at_peak = [item.variable for item in liveness.at_peak if item.variable is not None]
    for variable in always:
        sum_of[variable].always_bytes += variable.num_bytes
    for variable in (*always, *at_peak):
        sum_of[variable].peak_bytes += variable.num_bytes
    rows = list(table.sums.values())
    if not rows:
        return ()
    work = np.array([row.work for row in rows])
    sums = zip(rows, work.sum(1).tolist(), work.sum(2).tolist(), strict=True)
    return tuple(row.row(by_phase, by_ipu, limiting_ipu) for row, by_phase, by_ipu in sums)


class _Table:
    """The sums of all rows, by `row_key`."""

    def __init__(self, executable: Executable, ids: Numbering, has_backward: bool) -> None:
        self.executable = executable
        self.ids = ids
        self.has_backward = has_backward
        self.sums: dict[RowKey, _Sum] = {}
        self._codes: dict[tuple[int, ...], np.ndarray] = {}  # code of tiles, by the identity of exchanges

    def sum_of(self, origin: Origin, name: str) -> _Sum:
        """Return the sums of an operation, of a new row if there is none."""
        origin = origin_of_row(origin, has_backward=self.has_backward)
        key = row_key(origin, name)
        if key not in self.sums:
            work = np.zeros((self.executable.target.num_ipus, len(PHASES)), np.int64)
            self.sums[key] = _Sum(origin, name, work)
        return self.sums[key]

    def sum_of_variable(self, variable: Variable) -> _Sum:
        """Return the sums of the operation in a variable's name."""
        return self.sum_of(variable.origin, operation_name(variable.name, variable.origin))

    def add_step(self, node: Program, shares: list[Share], runs: int) -> None:
        """Add the runs of one step, divided among its shares."""
        latency = latency_of(self.executable, node)
        of_latency = [share for share in shares if share.is_latency]
        shares = [share for share in shares if not share.is_latency]
        rows = [self.sum_of(share.origin, share.name) for share in shares]
        weights = [share.weight for share in shares]
        work = self.executable.steps[node].work.copy()
        work[:, HOST_EXCHANGE] -= latency
        # One division a phase and IPU: each sum over rows stays exact, whatever the rounding.
        for ipu, phase in zip(*np.nonzero(work), strict=True):
            for row, cycles in zip(rows, divide(int(work[ipu, phase]) * runs, weights), strict=True):
                row.work[ipu, phase] += cycles
        rows_of_latency = [self.sum_of(share.origin, share.name) for share in of_latency]
        for ipu in np.flatnonzero(latency):
            parts = divide(int(latency[ipu]) * runs, [share.weight for share in of_latency])
            for row, cycles in zip(rows_of_latency, parts, strict=True):
                row.work[ipu, HOST_EXCHANGE] += cycles
        total_bytes = runs * sum(activity.moved_bytes for _, activity in self.ids.activities.get(node, ()))
        largest_read = self._largest_read(node) if total_bytes else None
        for row, moved_bytes in zip(rows, divide(total_bytes, weights), strict=True):
            row.moved_bytes += moved_bytes
            if moved_bytes:
                candidates = (row.largest_read, largest_read)
                row.largest_read = max(filter(None, candidates), key=lambda v: v.num_bytes, default=None)
        if isinstance(node, Leaf) and not is_free(node):
            self._add_code(node, rows, shares)
        if isinstance(node, Execute):
            self._add_vertices(node, rows, shares, runs)

    def _largest_read(self, node: Program) -> Variable | None:
        """Return the largest variable that a step reads; None where it reads none on tiles."""
        if isinstance(node, Execute):
            groups = self.executable.graph.groups[node.compute_set]
            accesses = [pair for group in groups for pair in zip(group.codelet.fields, group.accesses, strict=True)]
            tensors = [access.tensor for field, access in accesses if field.is_read]
        else:
            tensors = [node.source] if isinstance(node, Copy | CrossReplicaCopy | RemoteOut | StreamOut) else []
        variables = (variable for tensor in tensors for variable in tensor.variables())
        return max(variables, key=lambda variable: variable.num_bytes, default=None)

    def _add_code(self, leaf: Leaf, rows: list[_Sum], shares: list[Share]) -> None:
        tile_bytes = self._code_of(self.executable.costs[leaf])
        key = leaf.compute_set if isinstance(leaf, Execute) else leaf
        for row, share in zip(rows, shares, strict=True):
            fraction = row.codes[key][1] if key in row.codes else 0.0
            row.codes[key] = tile_bytes, fraction + share.code

    def _code_of(self, cost: Cost) -> np.ndarray:
        """Return the exchange code of a leaf on each tile; equal compute sets share their exchanges."""
        parts = (cost.before, cost.after) if isinstance(cost, ComputeSetCost) else (cost,)
        key = tuple(map(id, parts))
        if key not in self._codes:
            self._codes[key] = code_of_exchanges([cost], self.executable.target)
        return self._codes[key]

    def _add_vertices(self, node: Execute, rows: list[_Sum], shares: list[Share], runs: int) -> None:
        """Add compute cycles and arithmetic of a compute set."""
        cost = self.executable.costs[node]
        tiles = self.executable.target.tiles_per_ipu
        assert isinstance(cost, ComputeSetCost)
        busy = runs * int(cost.compute_cycles.sum())
        available = runs * tiles * int(cost.compute_cycles.reshape(-1, tiles).max(1).sum())
        for row in {id(row): row for row in rows}.values():  # once, even with several shares of the step
            row.busy += busy
            row.available += available
        parts_of: dict[int, list[tuple[_Sum, Share]]] = defaultdict(list)  # by vertex group
        for row, share in zip(rows, shares, strict=True):
            parts_of[share.group].append((row, share))
        for number, group in enumerate(self.executable.graph.groups[node.compute_set]):
            parts = parts_of[number]
            flops = _flops(group) if parts else 0
            if flops == 0:
                continue
            reads = {dtype_name(f.dtype) for f in group.codelet.fields if f.is_read and _is_float(f.dtype)}
            weights = [share.weight for _, share in parts]
            shared = divide(flops * runs, weights if any(weights) else [1] * len(weights))
            for (row, _), count in zip(parts, shared, strict=True):
                row.flops["float16" if reads == {"float16"} else "float32"] += count


def _flops(group: VertexGroup) -> int:
    """Return the operations on floating-point numbers, and in products, of all vertices of a group."""
    codelet = group.codelet
    computes = not codelet.moves and (codelet.is_product or any(_is_float(field.dtype) for field in codelet.fields))
    if not computes:
        return 0
    if callable(codelet.flops):
        return int(np.broadcast_to(codelet.flops(block_shapes(group)), group.grid)[group.tile != NO_TILE].sum())
    return codelet.flops * prod(axis.extent for axis in group.axes)


def _is_float(dtype: Any) -> bool:
    return not is_key_dtype(dtype) and bool(jnp.issubdtype(dtype, jnp.inexact))


class StepRows:
    """Rows of each step, by which pages, traces and the execution profile look its line, layer and part up.

    Args:
        attribution: of the run.
        rows: result of `step_costs` for the same run.
    """

    def __init__(self, attribution: Attribution, rows: Sequence[StepCost]) -> None:
        self._attribution = attribution
        self._has_backward = any(row.origin.part == "backward" for row in rows)
        self._numbers = {row_key(row.origin, row.name): number for number, row in enumerate(rows)}
        self._groups: dict[tuple[Program, int], dict[int, int]] = {}  # by step and number of its caller
        self._callers: dict[object, int] = {}
        self._caller_by_id: dict[int, tuple[int, Origin]] = {}  # all steps of a call have one object, kept for its id

    def of(self, node: Program, caller: Origin) -> tuple[int, ...]:
        """Return the numbers of the rows of a leaf or decision, the one with its largest share first."""
        return tuple(self.with_groups(node, caller))

    def with_groups(self, node: Program, caller: Origin) -> Mapping[int, int]:
        """Return the numbers of the rows of a leaf or decision, the one with its largest share first, with its group.

        The row of a latency comes last: it is no operation that hands on values.

        Args:
            node: the leaf or decision.
            caller: origin of the call that runs it, `Origin()` outside of functions.
        """
        key = node, self._number_of_caller(caller)
        if key not in self._groups:
            groups: dict[int, int] = {}
            own_shares = self._attribution.own_shares(node)
            for share in sorted(own_shares, key=lambda share: (share.is_latency, -share.weight)):
                origin = compose(caller, share.origin) if caller != Origin() else share.origin
                row_origin = origin_of_row(origin, has_backward=self._has_backward)
                groups.setdefault(self._numbers[row_key(row_origin, share.name)], share.group)
            self._groups[key] = groups
        return self._groups[key]

    def _number_of_caller(self, caller: Origin) -> int:
        """Return a number of a caller, one for equal ones."""
        if id(caller) not in self._caller_by_id:
            # Origins that differ in layer, part, names or places only compare equal, so these are part of the key.
            key = caller, caller.layer, caller.part, caller.names, caller.places
            self._caller_by_id[id(caller)] = self._callers.setdefault(key, len(self._callers)), caller
        return self._caller_by_id[id(caller)][0]

    def of_members(self, members: Iterable[tuple[Program, Origin]]) -> tuple[int, ...]:
        """Return the numbers of the rows of several steps, in their order, each step with the origin of its call."""
        return tuple(dict.fromkeys(row for node, caller in members for row in self.of(node, caller)))
