"""The costs of a run by line of source and by layer: the rows of operations added up.

Input: `StepCost` rows. Output: `Operation`s, one for each line, and `LayerCost`s, one for each layer and part of
training. The cycles of either add up to the busy cycles of all IPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ipujax.runtime.profile.step_costs import StepCost
from ipujax.runtime.tensor import Origin

NO_LAYER = "(no layer)"  # of steps whose layer is not known, such as transfers of arguments


@dataclass(frozen=True, slots=True)
class Operation:
    """All that one line of the user's source costs in one run.

    Args:
        origin: the line.
        names: its operations, most expensive first.
        cycles: busy cycles of all IPUs of one replica.
        share: `cycles` over the busy cycles of all lines.
        phases: `cycles` by phase.
        dominant: the phase that takes most.
        limiting_cycles: the cycles of those on the limiting IPU; None in profiles that were saved without.
        parts: `cycles` by part of training, "forward", "backward", "recomputed" or "update"; empty without a gradient.
        callers: `cycles` by the line that called the function of this one.
    """

    origin: Origin
    names: tuple[str, ...]
    cycles: int
    share: float
    phases: dict[str, int]
    dominant: str
    limiting_cycles: int | None = None
    parts: dict[str, int] = field(default_factory=dict, hash=False)
    callers: dict[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer costs in one part of training, layers inside it left out.

    Args:
        layer: its path, names joined by "/"; `NO_LAYER` for what is in none.
        part: "forward", "backward", "recomputed" or "update"; empty in programs without a gradient.
        cycles: busy cycles of all IPUs of one replica.
        share: `cycles` over the busy cycles of all layers.
        limiting_cycles: the cycles of those on the limiting IPU; None in profiles that were saved without.
        phases: `cycles` by phase.
        flops: operations on floating-point numbers; None in profiles that were saved without.
        moved_bytes: bytes that arrive on tiles or the host.
        always_bytes: size of its variables that are live during the whole run.
        peak_bytes: size of those and of its variables that are live when most is.
        lines: its lines of source, most expensive first.
    """

    layer: str
    part: str
    cycles: int
    share: float
    limiting_cycles: int | None
    phases: dict[str, int] = field(hash=False)
    flops: int | None
    moved_bytes: int
    always_bytes: int
    peak_bytes: int
    lines: tuple[str, ...]


def line_costs(rows: Iterable[StepCost], *, of_libraries: bool) -> tuple[Operation, ...]:
    """The lines, most expensive first; those that take no time are left out.

    Args:
        rows: the operations.
        of_libraries: whether the lines are the innermost ones outside JAX and ipujax, instead of the user's.
    """
    lines: dict[str, tuple[Origin, list[StepCost]]] = {}
    for row in rows:
        origin = row.origin.in_library() if of_libraries else row.origin
        if row.cycles:
            lines.setdefault(str(origin), (origin, []))[1].append(row)
    total = max(1, sum(row.cycles for _, members in lines.values() for row in members))
    made = [_line(origin, members, total) for origin, members in lines.values()]
    return tuple(sorted(made, key=lambda line: -line.cycles))


def _line(origin: Origin, rows: list[StepCost], total: int) -> Operation:
    names, parts, callers = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        names[row.name] += row.cycles
        if row.origin.part:
            parts[row.origin.part] += row.cycles
        if row.origin.callers:
            callers[row.origin.callers[0]] += row.cycles
    cycles, phases = sum(row.cycles for row in rows), _phases(rows)
    dominant = max(phases, key=lambda phase: phases[phase]) if phases else ""
    return Operation(
        origin,
        tuple(name for name, _ in names.most_common()),
        cycles,
        cycles / total,
        phases,
        dominant,
        _limiting(rows),
        dict(parts.most_common()),
        dict(callers.most_common()),
    )


def layer_costs(rows: Iterable[StepCost]) -> tuple[LayerCost, ...]:
    """The layers, in program order; those that take neither time nor memory are left out.

    Args:
        rows: the operations.
    """
    layers: dict[tuple[str, str], list[StepCost]] = {}
    for row in rows:
        if row.cycles or row.peak_bytes:
            layers.setdefault((row.origin.layer or NO_LAYER, row.origin.part), []).append(row)
    total = max(1, sum(row.cycles for members in layers.values() for row in members))
    return tuple(_layer(layer, part, members, total) for (layer, part), members in layers.items())


def _layer(layer: str, part: str, rows: list[StepCost], total: int) -> LayerCost:
    cycles, flops = sum(row.cycles for row in rows), [row.flops for row in rows if row.flops is not None]
    lines = Counter[str]()
    for row in rows:
        lines[str(row.origin)] += row.cycles
    return LayerCost(
        layer,
        part,
        cycles,
        cycles / total,
        _limiting(rows),
        _phases(rows),
        sum(flops) if flops else None,
        sum(row.moved_bytes for row in rows),
        sum(row.always_bytes for row in rows),
        sum(row.peak_bytes for row in rows),
        tuple(line for line, _ in lines.most_common()),
    )


def _phases(rows: Iterable[StepCost]) -> dict[str, int]:
    phases = Counter[str]()
    for row in rows:
        phases.update(row.phases)
    return dict(phases)


def _limiting(rows: Iterable[StepCost]) -> int | None:
    known = [row.limiting_cycles for row in rows]
    return None if None in known else sum(cycles for cycles in known if cycles is not None)
