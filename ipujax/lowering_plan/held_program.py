"""A compiled program held over to another machine: the same graph and program, costed again.

Input: a planned program, its executable, and a device. Output: both on that device.
"""

from __future__ import annotations

from dataclasses import replace

from ipujax.device import Device, IPUModel
from ipujax.lowering_plan.planned_program import PlannedProgram
from ipujax.runtime.compile import Executable
from ipujax.runtime.errors import ArgumentError, TargetError
from ipujax.runtime.target import Target, program_changes


def held_on(planned: PlannedProgram, executable: Executable, device: Device) -> tuple[PlannedProgram, Executable]:
    """Return a program and its executable on another device, of the same tiles; see `Compiled.on` for errors."""
    plan = planned.plan
    if not isinstance(device, IPUModel):
        expected = "ipu.IPUModel(...)"
        raise ArgumentError(f"{plan.settings.name} is costed on a machine", expected=expected, got=repr(device))
    check_held(plan.settings.target, device.target, plan.settings.name)
    costed = executable.on(device.target)
    plan = replace(plan, settings=replace(plan.settings, target=device.target))
    return replace(planned, plan=plan, lowered=replace(planned.lowered, graph=costed.graph)), costed


def check_held(before: Target, after: Target, name: str) -> None:
    """Refuse a machine on which a function, compiled for another one, would be another program."""
    if changed := program_changes(before, after):
        values = [", ".join(f"{each}={getattr(target, each)!r}" for each in changed) for target in (before, after)]
        raise TargetError(
            f"{name} depends on {', '.join(changed)} of its machine: its program cannot be held",
            expected=values[0],
            got=values[1],
            hint="compile again: fun.with_options(device=device).lower(*args).compile()",
        )
