"""Costs of a run by line of source and by layer: sums of the rows of operations.

    Options(metrics={"nanojoules": lambda op: 4e-3 * op.moved_bytes + 6e-4 * op.flops})

Input: `StepCost` rows, and metrics of the user. Output: `Operation`s, one for each line, and `LayerCost`s, one for each
layer and part of the training step. The cycles of either add up to the busy cycles of all IPUs. A `Metric` has the sums
of a function of rows.
Limits: a metric that is no sum over operations, such as a maximum, has no meaning.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from ipujax.runtime.errors import ArgumentError, shortened
from ipujax.runtime.files.figure_kinds import Real
from ipujax.runtime.profile.step_costs import StepCost
from ipujax.runtime.tensor import Origin

NO_LAYER = "(no layer)"  # of steps whose layer is not known, such as transfers of arguments


@dataclass(frozen=True, slots=True)
class Operation:
    """Costs of one line of the user's source in one run.

    Args:
        origin: the line.
        names: its operations, costliest first.
        cycles: busy cycles of all IPUs of one replica.
        share: `cycles` over the busy cycles of all lines.
        phases: `cycles` by phase.
        dominant: the phase with most cycles.
        limiting_cycles: the cycles on the limiting IPU.
        parts: `cycles` by part, one of `runtime.tensor.PARTS`; empty in programs without a gradient.
        callers: `cycles` by the line that called the function of this one.
    """

    origin: Origin
    names: tuple[str, ...]
    cycles: int
    share: float
    phases: dict[str, int]
    dominant: str
    limiting_cycles: int = 0
    parts: dict[str, int] = field(default_factory=dict, hash=False)
    callers: dict[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Costs of one layer in one part of the training step, without the layers inside it.

    Args:
        layer: its path, names joined by "/"; `NO_LAYER` for steps without a layer.
        part: one of `runtime.tensor.PARTS`, empty in programs without a gradient and where none is known.
        cycles: busy cycles of all IPUs of one replica.
        share: `cycles` over the busy cycles of all layers.
        limiting_cycles: the cycles on the limiting IPU.
        phases: `cycles` by phase.
        flops: operations on floating-point numbers.
        moved_bytes: bytes that arrive on tiles or the host.
        always_bytes: size of its variables that are live during the whole run.
        peak_bytes: `always_bytes`, and the size of its variables that are live at the peak.
        lines: its lines of source, costliest first.
    """

    layer: str
    part: str
    cycles: int
    share: float
    limiting_cycles: int
    phases: dict[str, int] = field(hash=False)
    flops: int
    moved_bytes: int
    always_bytes: int
    peak_bytes: int
    lines: tuple[str, ...]


def line_costs(rows: Iterable[StepCost], *, of_libraries: bool) -> tuple[Operation, ...]:
    """Return lines that cost cycles, costliest first: the user's, or the innermost outside JAX and ipujax."""
    lines: dict[str, tuple[Origin, list[StepCost]]] = {}  # by text: its first origin, and its rows
    for row in rows:
        origin = row.origin.in_library() if of_libraries else row.origin
        if row.cycles:
            _, members = lines.setdefault(str(origin), (origin, []))
            members.append(row)
    total = max(1, sum(row.cycles for _, members in lines.values() for row in members))
    operations = [_line_cost(origin, members, total) for origin, members in lines.values()]
    return tuple(sorted(operations, key=lambda line: -line.cycles))


def _line_cost(origin: Origin, rows: list[StepCost], total: int) -> Operation:
    """Return the sums of the operations of one line, their names, parts and callers, most cycles first."""
    names = Counter[str]()
    parts = Counter[str]()
    callers = Counter[str]()
    for row in rows:
        names[row.name] += row.cycles
        if row.origin.part:
            parts[row.origin.part] += row.cycles
        if row.origin.callers:
            callers[row.origin.callers[0]] += row.cycles  # the innermost
    cycles = sum(row.cycles for row in rows)
    phases = _phases(rows)
    dominant = max(phases, key=lambda phase: phases[phase]) if phases else ""
    return Operation(
        origin,
        tuple(name for name, _ in names.most_common()),
        cycles,
        cycles / total,
        phases,
        dominant,
        sum(row.limiting_cycles for row in rows),
        dict(parts.most_common()),
        dict(callers.most_common()),
    )


def layer_costs(rows: Iterable[StepCost]) -> tuple[LayerCost, ...]:
    """Return the layers in program order, from the rows of operations; those without cycles and bytes are left out."""
    layers: dict[tuple[str, str], list[StepCost]] = {}
    for row in rows:
        if row.cycles or row.peak_bytes:
            layers.setdefault((row.origin.layer or NO_LAYER, row.origin.part), []).append(row)
    total = max(1, sum(row.cycles for members in layers.values() for row in members))
    return tuple(_layer_cost(layer, part, members, total) for (layer, part), members in layers.items())


def _layer_cost(layer: str, part: str, rows: list[StepCost], total: int) -> LayerCost:
    """Return the sums of the operations of one layer and part, and their lines, most cycles first."""
    cycles = sum(row.cycles for row in rows)
    lines = Counter[str]()
    for row in rows:
        lines[str(row.origin)] += row.cycles
    return LayerCost(
        layer,
        part,
        cycles,
        cycles / total,
        sum(row.limiting_cycles for row in rows),
        _phases(rows),
        sum(row.flops for row in rows),
        sum(row.moved_bytes for row in rows),
        sum(row.always_bytes for row in rows),
        sum(row.peak_bytes for row in rows),
        tuple(line for line, _ in lines.most_common()),
    )


def _phases(rows: Iterable[StepCost]) -> dict[str, int]:
    phases: dict[str, int] = {}
    for row in rows:
        for name, cycles in row.phases.items():
            phases[name] = phases.get(name, 0) + cycles
    return phases


# --- metrics of the user ---

_MOST = sys.float_info.max
_Number = Annotated[float, Real(-_MOST)]  # which may be below 0, as a saving


@dataclass(frozen=True, slots=True)
class Metric:
    """Sums of a metric of the user over the operations of a run.

    Args:
        total: sum over all operations.
        by_line: sums by line of source, largest first; lines without any are left out.
        by_layer: sums by layer, in program order; layers without any are left out.
    """

    total: _Number
    by_line: dict[str, _Number] = field(hash=False)
    by_layer: dict[str, _Number] = field(hash=False)


def metrics_of_run(metrics: Mapping[str, Callable[[Any], float]], rows: Sequence[StepCost]) -> dict[str, Metric]:
    """Return the sums of each metric.

    Args:
        metrics: functions of a row, by name.
        rows: the rows of operations of a run.

    Raises:
        ArgumentError: a metric raises, or returns no finite number.
    """
    return {name: _metric_sums(name, metric, rows) for name, metric in metrics.items()}


def _metric_sums(name: str, metric: Callable[[Any], float], rows: Sequence[StepCost]) -> Metric:
    """Return the sums of a user's metric over all operations, by line and by layer."""
    by_line: dict[str, float] = {}
    by_layer: dict[str, float] = {}
    for row in rows:
        value = _metric_value(name, metric, row)
        if value:
            line, layer = str(row.origin), row.origin.layer or NO_LAYER
            by_line[line] = by_line.get(line, 0.0) + value
            by_layer[layer] = by_layer.get(layer, 0.0) + value
    lines = dict(sorted(by_line.items(), key=lambda item: -item[1]))
    return Metric(float(sum(by_line.values())), lines, by_layer)


def _metric_value(name: str, metric: Callable[[Any], float], row: StepCost) -> float:
    """Return a metric of an operation."""
    where = f"{row.name}, {row.origin}"
    try:
        value: Any = metric(row)
    except Exception as error:  # code of the user, which may raise anything
        message = f"the metric {name!r} raised {type(error).__name__} for an operation"
        hint = "figures of an operation may be 0, and tile_balance None; see Options.metrics"
        raise ArgumentError(message, where=where, got=str(error), hint=hint) from error
    if getattr(value, "ndim", 1) == 0:
        value = value.item()  # a number of NumPy
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and -_MOST <= value <= _MOST
    if not is_number:
        message = f"the metric {name!r} returned no number for an operation"
        raise ArgumentError(message, where=where, expected="a finite number", got=shortened(value))
    return float(value)
