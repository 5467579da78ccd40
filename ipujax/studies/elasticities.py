"""Elasticities of a program's cycles to the constants of its machine, the plan held.

Input: an `Executable`. Output: `Elasticities`, computed in one pass over all perturbed machines: of each constant that
is a rate one that is 0.1 % larger and one that is 0.1 % smaller. Cycles are not rounded there (`target.machines`), so
that they are smooth, but for kinks where another tile becomes the slowest: a central difference has the mean of both
sides.
Limits: numbers of transfers stay whole, and cycles that a user's codelet declares. A constant of value 0 has no
relative change, and is left out. Cycles of a step are divided among its lines as in profiles; those of other IPUs than
the limiting one, and waits, belong to none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.many_machines import ProgramCounts
from ipujax.runtime.profile import Attribution, has_backward, origin_of_row
from ipujax.runtime.target import Machines, perturbed_constants
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline import MachineClocks

_STEP = 1e-3  # relative change of a constant, each way


@dataclass(frozen=True, slots=True)
class ShareElasticity:
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
class Elasticities:
    """Relative change of cycles over that of a constant: −0.4 means 1 % more of it makes 0.4 % fewer cycles.

    Args:
        cycles: cycles of one run, not rounded.
        constants: elasticity to each constant.
        shares: the parts of lines and layers.
    """

    cycles: float
    constants: Mapping[str, float]
    shares: tuple[ShareElasticity, ...]


def elasticities(executable: Executable) -> Elasticities:
    """Return the elasticities of a compiled program.

    Raises:
        ProfileError: the trip count of a loop is data and not in `Options.trip_counts`.
    """
    target = executable.target
    names = perturbed_constants(target)
    factors = np.ones((len(names), 1 + 2 * len(names)))
    for number in range(len(names)):
        factors[number, 1 + 2 * number :][:2] = 1 + _STEP, 1 - _STEP
    numbers = {name: getattr(target, name) * row for name, row in zip(names, factors, strict=True)}
    steps, slots = executable.once(ProgramCounts).steps(Machines(target, numbers, factors.shape[1], is_exact=True))
    cycles = MachineClocks.of(executable.program, steps, slots, executable.options.trip_counts).cycles()

    def per_constant(values: np.ndarray) -> dict[str, float]:
        """Return the elasticity of all cycles that is due to some cycles, of all machines."""
        changes = (values[1::2] - values[2::2]) / (2 * _STEP * cycles[0])
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
    rows = (ShareElasticity(origin, float(row[0]), per_constant(row)) for origin, row in sums.values())
    return Elasticities(float(cycles[0]), per_constant(cycles), tuple(rows))
