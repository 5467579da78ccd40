"""The operations of a run with their rates: rows of a table, and points of a roofline.

Input: `Figures`. Output: an `OperationRow` for each name on each line, dearest first.
Limits: operations are counted as codelets say, so a rate is a lower bound for what is fused; the rate is over all
cycles of a row, those of its exchange and sync included.
"""

from __future__ import annotations

from dataclasses import dataclass

from ipujax.runtime.profile import Figures, StepCost
from ipujax.runtime.target import Target


@dataclass(frozen=True, slots=True)
class OperationRow:
    """One operation of one line.

    Args:
        name: debug name.
        line: of source.
        cycles: on the IPU that spends most on it, all runs together.
        share: `cycles` over those of the run.
        moved_bytes: bytes that arrive on tiles or the host.
        variable_bytes: size of its variables.
        exchange_code_bytes: code of its exchanges on the tile that has most.
        balance: mean share of compute phases in which a tile computes; None where nothing is computed.
        flops: floating-point operations of all runs; None where that is not known.
        flops_per_second: over all its cycles.
        peak_share: `flops_per_second` over the peak of its dtype; None where flops are not known.
        precision: that dtype.
    """

    name: str
    line: str
    cycles: int
    share: float
    moved_bytes: int
    variable_bytes: int
    exchange_code_bytes: int
    balance: float | None
    flops: int | None
    flops_per_second: float
    peak_share: float | None
    precision: str

    @property
    def intensity(self) -> float | None:
        """Floating-point operations for each byte that is moved; None where there are none of either."""
        return self.flops / self.moved_bytes if self.flops and self.moved_bytes else None


def peaks(target: Target) -> dict[str, float]:
    """Peak rates of a machine by dtype, in floating-point operations a second.

    Args:
        target: the machine.
    """
    return {"float16": target.peak_fp16_flops, "float32": target.peak_fp32_flops}


def operation_rows(profile: Figures) -> tuple[OperationRow, ...]:
    """All rows, most cycles first, then most bytes.

    Args:
        profile: of a run.

    Raises:
        ProfileError: a loop whose trip count is unknown.
    """
    total, rates = max(1, profile.busy_cycles), peaks(profile.target)
    rows = [_row(step, total, profile.target.clock_hz, rates[step.precision]) for step in profile.step_costs]
    return tuple(sorted(rows, key=lambda row: (-row.cycles, -row.moved_bytes, -row.variable_bytes)))


def _row(step: StepCost, total: int, clock_hz: float, peak: float) -> OperationRow:
    rate = (step.flops or 0) * clock_hz / step.cycles if step.cycles else 0.0
    return OperationRow(
        step.name,
        str(step.origin),
        step.cycles,
        step.cycles / total,
        step.moved_bytes,
        step.variable_bytes,
        step.exchange_code_bytes,
        step.tile_balance,
        step.flops,
        rate,
        None if step.flops is None else rate / peak,
        step.precision,
    )
