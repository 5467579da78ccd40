"""Operations of a run with their rates: rows of a table, and points of a roofline.

Input: `Figures`. Output: an `OperationRow` for each name on each line, most cycles first.
Rates and peaks are those of one IPU, so that they do not depend on the IPUs that run other operations.
Limits: floating-point operations are counted by codelets, so the rate of a fused operation is a lower bound; rates are
over all busy cycles of a row, those of its exchange and sync included.
"""

from __future__ import annotations

from dataclasses import dataclass

from ipujax.runtime.profile import Figures, StepCost
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import readable_name


@dataclass(frozen=True, slots=True)
class OperationRow:
    """Operation of a line of source.

    Args:
        name: debug name.
        line: of source.
        cycles: busy cycles of all IPUs, all runs together.
        share: `cycles` over the busy cycles of all IPUs.
        moved_bytes: bytes that arrive on tiles or the host.
        variable_bytes: size of its variables.
        exchange_code_bytes: code of its exchanges on the tile with most.
        balance: mean share of compute phases in which a tile computes; None without compute phase.
        flops: floating-point operations of all runs.
        flops_per_second: of each IPU on which it runs: `flops` over its busy IPU-cycles.
        peak_share: `flops_per_second` over the peak of one IPU in its dtype.
        precision: that dtype.
        layer: its layer and part of training, "" where neither is known.
        phase: with most of its cycles; empty if it has none.
        number: position in `Figures.step_costs`.
        layer_path: the layer alone.
        file: path of the file of `line`, "" if unknown.
        largest_read: the largest variable that its exchanges read, "" for none.
    """

    name: str
    line: str
    cycles: int
    share: float
    moved_bytes: int
    variable_bytes: int
    exchange_code_bytes: int
    balance: float | None
    flops: int
    flops_per_second: float
    peak_share: float
    precision: str
    layer: str = ""
    phase: str = ""
    number: int = 0
    layer_path: str = ""
    file: str = ""
    largest_read: str = ""

    @property
    def intensity(self) -> float | None:
        """Floating-point operations for each moved byte; None without operations or bytes."""
        return self.flops / self.moved_bytes if self.flops and self.moved_bytes else None


def peaks(target: Target) -> dict[str, float]:
    """Return the peak rates of one IPU by dtype, in floating-point operations a second."""
    num_ipus = target.num_ipus  # a target's figures are those of all its IPUs
    return {"float16": target.peak_fp16_flops / num_ipus, "float32": target.peak_fp32_flops / num_ipus}


def exchange_bandwidth(target: Target) -> float:
    """Return the bytes that the tiles of one IPU exchange in a second."""
    return target.exchange_bytes_per_second / target.num_ipus


def flops_rate(step: StepCost, target: Target) -> float:
    """Return floating-point operations a second of each IPU on which an operation runs, over its busy cycles."""
    return step.flops * target.clock_hz / step.cycles if step.cycles else 0.0


def share_of_peak(step: StepCost, target: Target) -> float:
    """Return the rate of an operation over the peak of one IPU in its precision."""
    return flops_rate(step, target) / peaks(target)[step.precision]


def operation_rows(profile: Figures) -> tuple[OperationRow, ...]:
    """Return the operations of a run, most cycles first, then most bytes.

    Raises:
        ProfileError: a loop whose trip count is unknown.
    """
    return profile.once(_operation_rows)


def _operation_rows(profile: Figures) -> tuple[OperationRow, ...]:
    total = max(1, profile.busy_cycles)
    rows = [_row(number, step, total, profile.target) for number, step in enumerate(profile.step_costs)]
    return tuple(sorted(rows, key=lambda row: (-row.cycles, -row.moved_bytes, -row.variable_bytes)))


def _row(number: int, step: StepCost, total: int, target: Target) -> OperationRow:
    """Return the row of operation `number`, with its share of `total` cycles and of the peak rate of the target."""
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
        readable_name(step.largest_read) if step.largest_read else "",
    )
