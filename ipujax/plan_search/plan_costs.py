"""Figures of one plan: its program, compiled, here or in another process.

Input: a `PlanJob`: a step, shapes of its arguments, a plan. Output: a `PointCost`, or None at the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import jax

from ipujax.device import device_of
from ipujax.plan_search.search_plan import Plan, shape_of
from ipujax.runtime.errors import IpuError, TileMemoryError
from ipujax.runtime.logs import OutOfTime, ending_at
from ipujax.studies.point_costs import PointCost


@dataclass(frozen=True, slots=True)
class PlanJob:
    """A plan to compile.

    Args:
        step: the step.
        args: its arguments, or their shapes.
        plan: the plan.
        settings: arguments of `Plan.jit` beside the step.
        is_fitted: whether a program that does not fit as it is planned first is planned again, along the attempts of
            `ipu.jit`.
        deadline: of `time.time`, as other processes have another monotonic clock.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    plan: Plan
    settings: dict[str, Any]
    is_fitted: bool = False
    deadline: float = inf


def compiled_cost(job: PlanJob) -> PointCost | None:
    """Return the figures of a compiled plan; None if the deadline has passed before."""
    try:
        with ending_at(time.monotonic() + job.deadline - time.time()):
            return _cost_of(job)
    except OutOfTime:
        return None
    except TileMemoryError as error:
        return PointCost(None, int(error.needed_bytes), fits=False)
    except IpuError as error:
        return PointCost(None, None, fits=False, error=error.what)


def _cost_of(job: PlanJob) -> PointCost:
    shapes = jax.tree.map(shape_of, job.args)
    options = replace(job.settings["options"], allow_out_of_memory=not job.is_fitted)
    # Of as many IPUs as the plan uses: others have no work.
    num_ipus = 1 << (job.plan.num_ipus - 1).bit_length()
    device = device_of(job.settings["device"].target.replace(num_ipus=num_ipus))
    function = job.plan.jit(job.step, **{**job.settings, "device": device, "options": options})
    profile = function.lower(*shapes).compile().profile
    return PointCost(int(profile.cycles), int(profile.memory.max_tile_bytes), not profile.memory.lacking())
