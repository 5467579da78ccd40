"""`ipu.sensitivities`: which constants of the machine a function's cycles depend on, as a whole, by line and by layer.

Input: a function and shapes of its arguments. Output: `Sensitivities`, a table. Nothing is run.

Elasticities are computed in one pass over all perturbed machines, the plan held: of each constant that is a rate one
that is 0.1 % larger and one that is 0.1 % smaller. Cycles are not rounded there (`target.machines`), so that they are
smooth, but for kinks where another tile becomes the slowest: a central difference has the mean of both sides.
Limits: numbers of transfers stay whole, and cycles that a user's codelet declares. A constant of value 0 has no
relative change, and is left out. Cycles of a step are divided among its lines as in profiles; those of other IPUs than
the limiting one, and waits, belong to none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, log
from typing import Any

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.errors import ArgumentError, TargetError
from ipujax.runtime.many_machines import ProgramCounts
from ipujax.runtime.markup import Markup, table
from ipujax.runtime.profile import Attribution, has_backward, origin_of_row
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.target import Machines, Target, constants_of, nearest, perturbed_constants
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline import MachineClocks
from ipujax.studies.point_costs import PlanCosts, Work, point_of

Row = Mapping[str, Any]
_PERTURBATION = 1e-3  # relative change of a constant, each way
_FACTOR = 1.1  # of a constant for which a function is compiled again
_TABLE_ROWS = 12


@dataclass(frozen=True, slots=True)
class Sensitivities:
    """Elasticities of the cycles of a function: −0.4 means 1 % more of a constant makes 0.4 % fewer cycles.

    Args:
        cycles: cycles of one call.
        rows: a dict for each constant over which programs are held, the largest effect first: "constant", "value",
            "unit", "elasticity" and "cycles_per_unit", cycles that one more of its unit adds.
        by_line: a dict for each line: "line", "cycles", and "elasticities", its part of each constant's.
        by_layer: the same for each layer: "layer", "cycles", "elasticities".
        recompiled: rows of constants for which the function was compiled again; "other" and "other_cycles" are the
            value that was tried, and the cycles with it.
    """

    cycles: int
    rows: tuple[Row, ...]
    by_line: tuple[Row, ...]
    by_layer: tuple[Row, ...]
    recompiled: tuple[Row, ...] = ()
    _counts: ProgramCounts | None = field(default=None, repr=False, compare=False)
    _target: Target | None = field(default=None, repr=False, compare=False)

    def __getitem__(self, constant: str) -> float:
        """Return the elasticity to a constant.

        Raises:
            ArgumentError: it has none.
        """
        elasticity = {row["constant"]: row["elasticity"] for row in (*self.rows, *self.recompiled)}
        if constant not in elasticity:
            hint = nearest(constant, elasticity)
            raise ArgumentError(f"there is no elasticity to {constant!r}", got=repr(constant), hint=hint)
        return float(elasticity[constant])

    def cycles_at(self, **constants: float) -> float:
        """Return the cycles, not rounded, on a machine with other values of constants that `rows` has.

        Raises:
            ArgumentError: another constant, or a table that was pickled.
        """
        if self._counts is None or self._target is None:
            raise ArgumentError("a table that was pickled has no program", hint="ipu.sensitivities(fun, *args)")
        for name in constants:
            self[name]
        numbers = {name: np.array([float(getattr(self._target, name))]) for name in perturbed_constants(self._target)}
        numbers |= {name: np.array([float(value)]) for name, value in constants.items()}
        return float(self._counts.cycles_on(Machines(self._target, numbers, 1, is_exact=True))[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return Sensitivities, (self.cycles, self.rows, self.by_line, self.by_layer, self.recompiled)

    def _cells(self) -> list[tuple[str, ...]]:
        largest = [row for row in self.rows if row["elasticity"]][:_TABLE_ROWS]
        return [
            ("constant", "value", "unit", "elasticity"),
            *((row["constant"], f"{row['value']:,g}", row["unit"], f"{row['elasticity']:+.4f}") for row in largest),
        ]

    def __str__(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        )

    def _repr_html_(self) -> Markup:
        head, *rows = self._cells()
        return table(head, rows, f"Elasticity of {self.cycles:,} cycles")


@checking_calls("ipu.sensitivities")
def sensitivities(fun: Any, *args: Any, recompile: Sequence[str] = ()) -> Sensitivities:
    """Return how the cycles of a function depend on each constant of its machine, the plan held; nothing is run::

        print(ipu.sensitivities(step, weights, batch))

    The elasticity to a constant is the relative change of cycles over that of the constant, a central difference of
    ±0.1 % of cycles that are not rounded.

    Args:
        fun: a function of `ipu.jit`, one of plain JAX, for the default device, or the path of one, "module:name".
        args: its arguments, arrays or their shapes.
        recompile: constants that programs depend on, as "tiles_per_ipu": the function is compiled again for 1.1 times
            each, rounded up.

    Raises:
        TargetError: `recompile` names another constant, or one that cannot be larger.
        ArgumentError: `recompile` is no list.
        ProfileError: the trip count of a loop is data, and not in `Options.trip_counts`.
        TileMemoryError: the program does not fit.
    """
    work = Work.of(fun, args)
    device = work.device("ipu.sensitivities")
    _check_recompiled(recompile)
    plan = PlanCosts(work, device.target)
    executable = plan.executable
    counts = executable.once(ProgramCounts)
    analysis = _elasticities(executable)
    units = {item.name: item.metadata.get("unit", "") for item in dataclasses.fields(Target)}
    rows = [
        {
            "constant": name,
            "value": (value := getattr(executable.target, name)),
            "unit": units[name],
            "elasticity": elasticity,
            "cycles_per_unit": elasticity * analysis.cycles / value,
        }
        for name, elasticity in analysis.constants.items()
    ]
    rows.sort(key=lambda row: -abs(row["elasticity"]))
    cycles = executable.timeline_of(None).cycles
    recompiled = tuple(_recompiled(work, device.target, name, cycles, units[name]) for name in recompile)
    by_line = _sums(analysis.shares, "line", lambda share: str(share.origin))
    by_layer = _sums(analysis.shares, "layer", lambda share: share.origin.layer)
    return Sensitivities(cycles, tuple(rows), by_line, by_layer, recompiled, counts, executable.target)


@dataclass(frozen=True, slots=True)
class _ShareElasticity:
    """Part of a line of one layer in the cycles and their elasticities.

    Args:
        origin: line and layer.
        cycles: its cycles, not rounded, on the limiting IPU.
        elasticities: its part of the elasticity of all cycles to each constant; those of all lines add up to it, on
            programs of one IPU.
    """

    origin: Origin
    cycles: float
    elasticities: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Elasticities:
    """Relative change of cycles over that of a constant: −0.4 means 1 % more of it makes 0.4 % fewer cycles.

    Args:
        cycles: cycles of one run, not rounded.
        constants: elasticity to each constant.
        shares: the parts of lines and layers.
    """

    cycles: float
    constants: Mapping[str, float]
    shares: tuple[_ShareElasticity, ...]


def _elasticities(executable: Executable) -> _Elasticities:
    """Return the elasticities of a compiled program.

    Raises:
        ProfileError: the trip count of a loop is data and not in `Options.trip_counts`.
    """
    target = executable.target
    names = perturbed_constants(target)
    factors = np.ones((len(names), 1 + 2 * len(names)))
    for number in range(len(names)):
        factors[number, 1 + 2 * number :][:2] = 1 + _PERTURBATION, 1 - _PERTURBATION
    numbers = {name: getattr(target, name) * row for name, row in zip(names, factors, strict=True)}
    steps, slots = executable.once(ProgramCounts).steps(Machines(target, numbers, factors.shape[1], is_exact=True))
    cycles = MachineClocks.of(executable.program, steps, slots, executable.options.trip_counts).cycles()

    def per_constant(values: np.ndarray) -> dict[str, float]:
        """Return the elasticity of all cycles that is due to some cycles, of all machines."""
        changes = (values[1::2] - values[2::2]) / (2 * _PERTURBATION * cycles[0])
        return dict(zip(names, changes.tolist(), strict=True))

    timeline = executable.timeline_of(None)
    limiting_ipu = int(timeline.clocks.argmax())
    attribution = Attribution(executable, executable.program)
    shares = {node: attribution.shares(node) for node in steps}
    backward = has_backward(shares.values())
    sums: dict[tuple[str, str], tuple[Origin, np.ndarray]] = {}
    for node, step in steps.items():
        of_step = step.cycles[limiting_ipu] * timeline.executions.get(node, 0)
        total = sum(share.weight for share in shares[node])
        for share in shares[node]:
            origin = origin_of_row(share.origin, has_backward=backward)
            first, before = sums.get((str(origin), origin.layer), (origin, np.zeros_like(cycles)))
            sums[str(origin), origin.layer] = first, before + of_step * (share.weight / total)
    rows = (_ShareElasticity(origin, float(row[0]), per_constant(row)) for origin, row in sums.values())
    return _Elasticities(float(cycles[0]), per_constant(cycles), tuple(rows))


def _check_recompiled(names: Sequence[str]) -> None:
    """Refuse names of constants that do not change programs, or are no numbers."""
    fields = {item.name: item for item in dataclasses.fields(Target)}
    names_of_numbers = [name for name in constants_of("program", "counts") if fields[name].type in ("int", "float")]
    if isinstance(names, str) or not isinstance(names, Iterable):
        expected = '["tiles_per_ipu"], names of constants'
        raise ArgumentError("recompile of ipu.sensitivities is no list", expected=expected, got=repr(names))
    for name in names:
        if name not in names_of_numbers:
            expected = f"one of {', '.join(names_of_numbers)}"
            raise TargetError(
                f"ipu.sensitivities cannot compile again for {name!r}",
                expected=expected,
                got=repr(name),
                hint=nearest(name, names_of_numbers),
            )


def _recompiled(work: Work, target: Target, name: str, cycles: int, unit: str) -> Row:
    """Return the row of a constant from a second compilation, for a larger value."""
    value = getattr(target, name)
    other = value * _FACTOR if isinstance(value, float) else max(value + 1, round(value * _FACTOR))
    if name == "num_ipus":
        other = 2 * value  # systems have a power of two
    other = min(other, Target.__dataclass_fields__[name].metadata["maximum"] or inf)
    changed = point_of(target, {name: other}).target
    other_cycles = PlanCosts(work, changed).executable.timeline_of(None).cycles
    elasticity = log(other_cycles / cycles) / log(other / value) if other != value else 0.0
    values = {"constant": name, "value": value, "unit": unit, "elasticity": elasticity}
    return {**values, "other": other, "other_cycles": other_cycles}


def _sums(shares: Sequence[_ShareElasticity], name: str, key: Any) -> tuple[Row, ...]:
    """Return the sums of shares with equal keys, most cycles first."""
    cycles: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    for share in shares:
        of_key = parts.setdefault(key(share), dict.fromkeys(share.elasticities, 0.0))
        cycles[key(share)] = cycles.get(key(share), 0.0) + share.cycles
        for constant, elasticity in share.elasticities.items():
            of_key[constant] += elasticity
    order = sorted(cycles, key=lambda each: -cycles[each])
    return tuple({name: each, "cycles": cycles[each], "elasticities": parts[each]} for each in order)
