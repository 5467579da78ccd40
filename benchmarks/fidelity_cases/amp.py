"""The AMP on every tile: [N, 16] by [16, 16] in half precision, 128 sizes measured on Bow."""

from __future__ import annotations

import numpy as np

from fidelity_cases.case import DATA, Bar, Family, Row, errors
from ipujax import poplar
from ipujax.lowering.poplin.cycles import amp_1x1_cycles

_SHOWN_SIZES = (16, 32, 64, 128, 256, 512, 1024, 1536, 2048)


def compute_cycles(rows: int) -> int:
    """Cycles of the vertex of one product on a tile of a Bow."""
    target = poplar.IPUModel("ipu21").create_device().get_target()
    return int(amp_1x1_cycles(target, "half", np.int64(rows), 16, 16))


def family() -> Family:
    """All sizes judged together, some shown."""
    sizes, _, measured = np.loadtxt(DATA / "bow_amp_fp16_Nx16x16.csv", delimiter=",", skiprows=1).T
    rows = [Row(f"N = {int(n)}", cycles, compute_cycles(int(n))) for n, cycles in zip(sizes, measured, strict=True)]
    off = errors(rows)
    bars = (Bar("mean error of 128 points", off.mean(), 0.005), Bar("worst error", off.max(), 0.06))
    shown_rows = [row for row, n in zip(rows, sizes, strict=True) if n in _SHOWN_SIZES]
    source = "tessellate-ipu's notebook *IPU Peak Flops* (reference B1), Bow at 1.85 GHz; cycles are its times × clock."
    how = (
        "Cycles of the vertex `ConvPartial1x1Out`, which the measured program places on each tile by hand, without a "
        "planner. 9 of 128 points are shown."
    )
    return Family("AMP, fp16, on every tile of a Bow", source, how, shown_rows, bars)
