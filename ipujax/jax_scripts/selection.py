"""Choice of the functions that are worth compiling for an IPU: small ones, such as metrics, stay JAX's.

Input: records of a run. Output: for each the reason for which it stays JAX's, "" if it is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ipujax.jax_scripts.recorder import FunctionRecord

_SHARE = 0.01  # of the floating-point operations of a run: at most a hundred functions, whatever the run


@dataclass(frozen=True, slots=True)
class Selection:
    """Rule that chooses functions.

    Args:
        every: choose all.
        min_flops: choose those with so many floating-point operations a call; None for `_SHARE` of those of the run.
        only: choose those of these names; empty for the other rules.
    """

    every: bool = False
    min_flops: float | None = None
    only: tuple[str, ...] = ()

    def reasons(self, records: Sequence[FunctionRecord]) -> list[str]:
        """Return for each record the reason for which it is not compiled, "" if it is."""
        total = sum(record.total_flops for record in records)
        return [record.reason or self._reason(record, total) for record in records]

    def _reason(self, record: FunctionRecord, total: int) -> str:
        if self.only:
            return "" if record.name in self.only else "not named by --only"
        if self.every:
            return ""
        if self.min_flops is not None:
            return "" if record.flops >= self.min_flops else f"fewer than {self.min_flops:,g} FLOPs a call"
        share = record.total_flops / total if total else 0.0
        return "" if share >= _SHARE else f"{100 * share:.1f} % of the run's FLOPs"

    def __str__(self) -> str:
        if self.only:
            return f"those named {', '.join(self.only)}"
        if self.every:
            return "all"
        if self.min_flops is not None:
            return f"those with at least {self.min_flops:,g} FLOPs a call"
        return f"those with at least {100 * _SHARE:g} % of the run's FLOPs; --all, --min-flops and --only choose others"
