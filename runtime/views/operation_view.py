"""The operations of a run with their rates: rows of a table, and points of a roofline.

Input: `Figures`. Output: an `OperationRow` for each name on each line, most cycles first.
Rates and peaks are those of one IPU, so that they do not depend on how many IPUs run something else.
Limits: operations are counted as codelets say, so a rate is a lower bound for what is fused; the rate is over all
busy cycles of a row, those of its exchange and sync included.
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
        cycles: busy cycles of all IPUs, all runs together.
        share: `cycles` over the busy cycles of all IPUs.
        moved_bytes: bytes that arrive on tiles or the host.
        variable_bytes: size of its variables.
        exchange_code_bytes: code of its exchanges on the tile that has most.
        balance: mean share of compute phases in which a tile computes; None where nothing is computed.
        flops: floating-point operations of all runs; None where that is not known.
        flops_per_second: of each IPU on which it runs: `flops` over its busy IPU-cycles.
        peak_share: `flops_per_second` over the peak of one IPU in its dtype; None where flops are not known.
        precision: that dtype.
        layer: the layer and the part of training it belongs to, "" where neither is known.
        phase: that takes most of it; empty in files of older versions.
        number: of it in `Figures.step_costs`.
        layer_path: the layer alone.
        file: path of the file of `line`, "" where that is not known.
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
    layer: str = ""
    phase: str = ""
    number: int = 0
    layer_path: str = ""
    file: str = ""

    @property
    def intensity(self) -> float | None:
        """Floating-point operations for each byte that is moved; None where there are none of either."""
        return self.flops / self.moved_bytes if self.flops and self.moved_bytes else None


def peaks(target: Target) -> dict[str, float]:
    """Peak rates of one IPU of a machine by dtype, in floating-point operations a second."""
    ipus = target.num_ipus
    return {"float16": target.peak_fp16_flops / ipus, "float32": target.peak_fp32_flops / ipus}


def exchange_bandwidth(target: Target) -> float:
    """Bytes that the tiles of one IPU of a machine exchange in a second."""
    return target.exchange_bytes_per_second / target.num_ipus


def flops_rate(step: StepCost, target: Target) -> float:
    """Floating-point operations a second of each IPU on which an operation runs, over its busy cycles."""
    return (step.flops or 0) * target.clock_hz / step.cycles if step.cycles else 0.0


def share_of_peak(step: StepCost, target: Target) -> float | None:
    """The rate of an operation over the peak of one IPU in its precision; None where its flops are not known."""
    return None if step.flops is None else flops_rate(step, target) / peaks(target)[step.precision]


def operation_rows(profile: Figures) -> tuple[OperationRow, ...]:
    """All rows, most cycles first, then most bytes.

    Args:
        profile: of a run.

    Raises:
        ProfileError: a loop whose trip count is unknown.
    """
    total = max(1, profile.busy_cycles)
    rows = [_row(number, step, total, profile.target) for number, step in enumerate(profile.step_costs)]
    return tuple(sorted(rows, key=lambda row: (-row.cycles, -row.moved_bytes, -row.variable_bytes)))


def _row(number: int, step: StepCost, total: int, target: Target) -> OperationRow:
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
        flops_rate(step, target),
        share_of_peak(step, target),
        step.precision,
        ", ".join(filter(None, (step.origin.layer, step.origin.part))),
        max(step.phases, key=lambda name: step.phases[name], default=""),
        number,
        step.origin.layer,
        step.origin.file,
    )
