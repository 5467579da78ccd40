"""Points of a sweep, the jobs that cost them, and their costs: a job compiles its plan, and costs it for each machine.

Input: a machine, a grid or a list of changes, and the kind of plan. Output: the target of each point, and `Job`s. A job
is a plan, compiled for one machine, and the points whose costs it gives:

    held     for all points of equal tiles, workers… one plan, of the machine itself
    again    for each point a plan of its own
    best     for each point a plan of its own, which costs all others of equal tiles, workers… too

Of `Work`, a function with the shapes of its arguments, a job gives a `PointCost` a point. All of it can be pickled, so
that processes may do it.
Limits: points of plans that are held are costed in jobs of at most `JOB_POINTS`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import product
from typing import Any, Literal, cast, get_args

import jax

from ipujax.compiled_programs import placed_shape
from ipujax.device import CPU, IPUModel, current_device, device_of
from ipujax.jit import IpuFunction, jit, jitted
from ipujax.runtime.compile import Executable
from ipujax.runtime.errors import ArgumentError, IpuError, TargetError, TileMemoryError
from ipujax.runtime.many_machines import ProgramCounts
from ipujax.runtime.memory import fits
from ipujax.runtime.target import Arch, Target, constants_of, held_over, nearest, preset, program_constants

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


@dataclass(frozen=True, slots=True)
class PointCost:
    """Cost of a function on a machine, with one plan.

    Args:
        cycles: of one call; None if it could not be compiled, as on a machine that no plan fits.
        max_tile_bytes: of the fullest tile, also where no plan fits: of the one that lacks least; None of no plan.
        fits: whether the program fits the machine.
        error: why it could not be compiled, None otherwise.
    """

    cycles: int | None
    max_tile_bytes: int | None
    fits: bool
    error: str | None = None

    @staticmethod
    def of_fields(fields: Any) -> PointCost:
        """Return a cost that was written to a file.

        Raises:
            ValueError: the fields are not those of a cost.
        """
        if not isinstance(fields, dict) or set(fields) != set(PointCost.__slots__):
            raise ValueError("other fields than those of a cost")
        cost = PointCost(**fields)
        is_count = all(x is None or (type(x) is int and x >= 0) for x in (cost.cycles, cost.max_tile_bytes))
        if not is_count or not isinstance(cost.fits, bool) or not isinstance(cost.error, str | None):
            raise ValueError("values that no cost has")
        return cost


@dataclass(frozen=True, slots=True)
class Work:
    """The function that a sweep compiles, and its arguments.

    Args:
        fun: the function, or its path "module:name".
        args: its arguments, shapes in the place of arrays.
    """

    fun: Any  # an `IpuFunction` in an annotation would be a descriptor
    args: tuple[Any, ...]

    @staticmethod
    def of(fun: Any, args: tuple[Any, ...]) -> Work:
        """Return the work of a sweep of a function of `ipu.jit` or of plain JAX, or of the path of one.

        Raises:
            ArgumentError: `fun` is none of them.
        """
        if not isinstance(fun, str | IpuFunction) and not callable(fun):
            expected = 'a function, or its path "module:function"'
            raise ArgumentError("a study needs a function", expected=expected, got=repr(fun))
        function, args = (fun, args) if isinstance(fun, str) else jitted(fun, args)
        return Work(function, jax.tree.map(placed_shape, args))

    def pickled(self) -> bytes:
        """Return it for other processes.

        Raises:
            ArgumentError: the function, or a static argument, cannot be pickled.
        """
        try:
            return pickle.dumps(self)
        except Exception as error:
            raise ArgumentError(
                "ipu.sweep cannot send the function to processes: it cannot be pickled",
                expected="a function at the top of a module, with arguments that can be pickled",
                got=f"{self.fun!r}: {error}",
                hint='define it at the top of a module, or pass its path: ipu.sweep("module:function", …)',
            ) from error

    def device(self, who: str) -> IPUModel:
        """Return the machine of the function.

        Raises:
            ArgumentError: it runs on `ipu.CPU()`; `who` is the caller's name for users.
        """
        device = self.function().device or current_device()
        if isinstance(device, CPU):
            raise ArgumentError(f"{who} costs machines", expected="a function for an ipu.IPUModel", got="ipu.CPU()")
        return device

    def function(self) -> IpuFunction[Any, Any]:
        """Return the function, without lines of progress of its own.

        Raises:
            ArgumentError: nothing is at its path.
        """
        fun = self.fun if isinstance(self.fun, IpuFunction) else _at(self.fun)
        return fun.with_options(options=replace(fun.options, progress=False))


def _at(path: str) -> IpuFunction[Any, Any]:
    module, _, name = path.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        expected = "module:name of a function that can be imported"
        raise ArgumentError(f"ipu.sweep finds no function at {path!r}", expected=expected, got=str(error)) from error
    return function if isinstance(function, IpuFunction) else jit(function)


class PlanCosts:
    """A plan of a function, which is compiled when its first costs are asked for.

    Args:
        work: the function.
        plan: the machine that it is compiled for.
    """

    def __init__(self, work: Work, plan: Target) -> None:
        self._work = work
        self.plan = plan
        self._counts: dict[tuple[Any, ...], ProgramCounts] = {}

    @cached_property
    def executable(self) -> Executable:
        """The function, compiled for the plan's machine."""
        function = self._work.function().with_options(device=device_of(self.plan))
        return function.lower(*self._work.args).compile().executable

    def on(self, targets: Sequence[Target]) -> list[PointCost]:
        """Return the costs of the program on machines that differ in constants over which programs are held.

        Raises:
            ProfileError: the trip count of a loop is data, and not in `Options.trip_counts`.
        """
        try:
            executable = self.executable
        except IpuError as error:  # of this machine alone: it is too small, or has too few tiles or IPUs
            needed = error.needed_bytes or None if isinstance(error, TileMemoryError) else None
            return [PointCost(None, needed, False, f"{type(error).__name__}: {error.what}")] * len(targets)
        # Of one replica, with the share of memory that the user's options give to planners.
        machines = [held_over(executable.target, target) for target in targets]
        if machines == [executable.target]:
            report = executable.memory
            return [PointCost(executable.timeline_of(None).cycles, report.max_tile_bytes, fits(report))]
        costs: dict[int, PointCost] = {}
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for number, target in enumerate(machines):
            kinds.setdefault(_counted(target), []).append(number)
        for numbers in kinds.values():
            counts = self._counts_for(machines[numbers[0]])
            cycles = counts.cycles([machines[number] for number in numbers])
            for number, value in zip(numbers, cycles.tolist(), strict=True):
                memory = counts.memory(machines[number])
                costs[number] = PointCost(value, memory.max_tile_bytes, memory.fits)
        return [costs[number] for number in range(len(targets))]

    def _counts_for(self, target: Target) -> ProgramCounts:
        """Return the counts of the program on machines whose constants, but for rates, are those of a target."""
        key = _counted(target)
        if key not in self._counts:
            executable = self.executable
            is_same = key == _counted(executable.target)
            self._counts[key] = (executable if is_same else executable.on(target)).once(ProgramCounts)
        return self._counts[key]


def _counted(target: Target) -> tuple[Any, ...]:
    return tuple(getattr(target, name) for name in constants_of("counts"))


def costs_in_process(work: bytes, plan: Target, targets: Sequence[Target]) -> list[PointCost]:
    """Return the costs of pickled work, in a process of an executor; successive jobs of one plan compile it once.

    Raises:
        ArgumentError: this process cannot import the function.
    """
    return _plan_costs(work, plan).on(targets)


@lru_cache(maxsize=1)
def _plan_costs(work: bytes, plan: Target) -> PlanCosts:
    """Return the costs of a program in a process of a sweep, to which the function came pickled."""
    try:
        loaded = pickle.loads(work)
    except Exception as error:
        raise ArgumentError(
            "a process of ipu.sweep cannot import the function, or an argument",
            expected="a function of a module; notebooks and python -c have none that another process can import",
            got=str(error),
            hint='write it to a module, and import it or pass its path: ipu.sweep("module:function", …)',
        ) from error
    return PlanCosts(loaded, plan)
