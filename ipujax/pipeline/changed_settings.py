"""Pipelines with other settings than the user's function has: what `ipu.advise` compiles.

Input: a function that calls `ipu.pipeline`, and a change. Output: a function whose pipelines have the change, wherever
they were made. Limits: a function of `jax.jit` around a pipeline is traced once by JAX, and keeps its settings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ipujax.lowering.schedules import SCHEDULES, Schedule


@dataclass(frozen=True, slots=True)
class PipelineChange:
    """Other settings of pipelines.

    Args:
        schedule: name of a schedule; None for that of the function.
        numerator: the number of micro-batches is multiplied by this,
        denominator: and divided by this.
    """

    schedule: str | None = None
    numerator: int = 1
    denominator: int = 1

    def schedule_of(self, schedule: Schedule | None) -> Schedule | None:
        """Return the changed schedule."""
        return schedule if self.schedule is None else SCHEDULES[self.schedule]

    def micro_batches_of(self, micro_batches: int) -> int:
        """Return the changed number of micro-batches, at least 1."""
        return max(1, micro_batches * self.numerator // self.denominator)


# Per context: other threads may trace functions as they are.
_CHANGE: ContextVar[PipelineChange | None] = ContextVar("ipujax_pipeline_change", default=None)


def current_change() -> PipelineChange | None:
    """Return the change of the pipelines that are traced now; None for none."""
    return _CHANGE.get()


def with_changed_pipelines(change: PipelineChange, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with changed pipelines."""

    @functools.wraps(fun)
    def changed(*args: Any, **kwargs: Any) -> Any:
        token = _CHANGE.set(change)
        try:
            return fun(*args, **kwargs)
        finally:
            _CHANGE.reset(token)

    return changed
