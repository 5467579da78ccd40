"""The AMP on every tile: [N, 16] by [16, 16] in half precision, 128 sizes measured on Bow."""

from __future__ import annotations

import numpy as np

from fidelity_cases.case import DATA, Bar, Family, Row, errors, phase_cycles
from ipujax import poplar, poplin
from ipujax.poplar.program import Sequence

_SHOWN = (16, 32, 64, 128, 256, 512, 1024, 1536, 2048)


def compute_cycles(rows: int) -> int:
    """Compute cycles of one product on each tile of a Bow."""
    target = poplar.IPUModel("ipu21").create_device().get_target()
    graph, program = poplar.Graph(target), Sequence()
    left, right = [target.get_num_tiles(), rows, 16], [target.get_num_tiles(), 16, 16]
    a = poplin.create_mat_mul_grouped_input_lhs(graph, poplar.HALF, left, right)
    b = poplin.create_mat_mul_grouped_input_rhs(graph, poplar.HALF, left, right)
    poplin.mat_mul_grouped(graph, a, b, program)
    phases = phase_cycles(graph, program)
    assert not phases["exchange"], "every product lies on a tile"
    return phases["compute"]


def family() -> Family:
    """All sizes judged together, some shown."""
    sizes, _, measured = np.loadtxt(DATA / "bow_amp_fp16_Nx16x16.csv", delimiter=",", skiprows=1).T
    rows = [Row(f"N = {int(n)}", cycles, compute_cycles(int(n))) for n, cycles in zip(sizes, measured, strict=True)]
    off = errors(rows)
    bars = (Bar("mean error of 128 points", off.mean(), 0.005), Bar("worst error", off.max(), 0.06))
    shown = [row for row, n in zip(rows, sizes, strict=True) if n in _SHOWN]
    source = "tessellate-ipu's notebook *IPU Peak Flops* (reference B1), Bow at 1.85 GHz; cycles are its times × clock."
    how = (
        "`poplin.mat_mul_grouped` of 1,472 products, operands made by `create_mat_mul_grouped_input_lhs` and `_rhs`, "
        "so that each lies on a tile; the compute phase. 9 of 128 points are shown."
    )
    return Family("AMP, fp16, on every tile of a Bow", source, how, shown, bars)
