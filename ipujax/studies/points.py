"""Points of a sweep and the jobs that cost them.

Input: a machine, a grid or a list of changes, and the kind of plan. Output: the target of each point, and `Job`s. A job
is a plan, compiled for one machine, and the points whose costs it gives:

    held     for all points of equal tiles, workers… one plan, of the machine itself
    again    for each point a plan of its own
    best     for each point a plan of its own, which costs all others of equal tiles, workers… too

Limits: points of plans that are held are costed in jobs of at most `JOB_POINTS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, cast, get_args

from ipujax.device import IPUModel, device_of
from ipujax.runtime.errors import ArgumentError, TargetError
from ipujax.runtime.target import Arch, Target, held_over, nearest, preset, program_constants

Plan = Literal["held", "again", "best"]
Changes = Mapping[str, Any]
JOB_POINTS = 1024


@dataclass(frozen=True, slots=True)
class Point:
    """A machine of a sweep.

    Args:
        changes: constants that differ from those of the function's device, by name.
        target: the machine.
        base: the machine of plans that are held: the function's device, but for constants that programs depend on.
    """

    changes: Changes
    target: Target
    base: Target


@dataclass(frozen=True, slots=True)
class Job:
    """A plan and the points that it costs.

    Args:
        plan: the machine for which the function is compiled.
        points: numbers of the points.
        point: number of the point whose machine that is; None for the base of plans that are held.
    """

    plan: Target
    points: tuple[int, ...]
    point: int | None = None


def points_of(device: IPUModel, grid: Mapping[str, Sequence[Any]] | Sequence[Changes]) -> list[Point]:
    """Return the points of a grid, the last constant varying fastest, or of a list of changes.

    Raises:
        TargetError: an unknown constant, or a value that it cannot have.
        ArgumentError: no points, or values that are no lists.
    """
    expected = '{"exchange_bytes_per_cycle": [4, 8], …}, or a list of changes'
    if isinstance(grid, Mapping):
        for name, values in grid.items():
            if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
                hint = f"{name}=[{values!r}], values to try"
                raise ArgumentError(f"grid of ipu.sweep has no values for {name}", expected=hint, got=repr(values))
        rows = [dict(zip(grid, values, strict=True)) for values in product(*map(list, grid.values()))] if grid else []
    elif isinstance(grid, str) or not isinstance(grid, Iterable):
        raise ArgumentError("grid of ipu.sweep has no points", expected=expected, got=repr(grid))
    else:
        points = list(grid)
        for changes in points:
            if not isinstance(changes, Mapping):
                hint = '{"exchange_bytes_per_cycle": 8}'
                raise ArgumentError("a point of ipu.sweep is no dict of changes", expected=hint, got=repr(changes))
        rows = [dict(changes) for changes in points]
    if not rows:
        raise ArgumentError("grid of ipu.sweep has no points", expected=expected, got=repr(grid))
    return [point_of(device.target, {name: _plain(value) for name, value in row.items()}) for row in rows]


def _plain(value: Any) -> Any:
    """Return a number of NumPy as one of Python."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def point_of(base: Target, changes: Mapping[str, Any]) -> Point:
    """Return the point of a machine with changes."""
    constants = {name: value for name, value in changes.items() if name != "arch"}
    if "arch" in changes:
        base = preset(cast(Arch, changes["arch"]), base.num_ipus).replace(**base.changes())
    if unknown := [name for name in constants if name not in Target.__dataclass_fields__ or name == "sources"]:
        raise TargetError(
            f"grid of ipu.sweep names an unknown constant: {unknown[0]!r}",
            expected="arch, num_ipus, or a field of ipu.Target",
            got=repr(unknown[0]),
            hint=nearest(unknown[0], {*Target.__dataclass_fields__, "arch"} - {"sources"}),
        )
    target = device_of(base.replace(**constants)).target if constants else base
    return Point(changes, target, held_over(target, base))


def jobs_of(points: Sequence[Point], plan: Plan) -> list[Job]:
    """Return the jobs of a sweep, in order."""
    if plan not in get_args(Plan):
        hint = nearest(plan, get_args(Plan))
        raise ArgumentError(
            f"plan of ipu.sweep cannot be {plan!r}", expected=f"one of {get_args(Plan)}", got=repr(plan), hint=hint
        )
    numbers = range(len(points))
    if plan == "again":
        return [Job(points[number].target, (number,), number) for number in numbers]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number in numbers:
        key = tuple(getattr(points[number].target, name) for name in program_constants())
        groups.setdefault(key if plan == "best" else (key, points[number].base), []).append(number)
    if plan == "best":
        return [Job(points[number].target, tuple(group), number) for group in groups.values() for number in group]
    parts = [group[n : n + JOB_POINTS] for group in groups.values() for n in range(0, len(group), JOB_POINTS)]
    return [Job(points[part[0]].base, tuple(part)) for part in parts]
