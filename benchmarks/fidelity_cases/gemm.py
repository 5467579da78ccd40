"""Dense matrix multiplication on one Bow, by size."""

from __future__ import annotations

import csv
from collections.abc import Sequence as Items

from fidelity_cases.case import DATA, Bar, Family, Row, errors, phase_cycles
from ipujax import poplar, poplin, poputil
from ipujax.poplar.program import Sequence

_LARGE = 256  # columns from which the large cases count


# Ends of the names of rows: operands mapped linearly, or as `createMatMulInputLHS` and `RHS` make them.
_SUFFIXES = {"linear": "", "created": ", operands created"}


def cycles(dtype: str, m: int, k: int, n: int, mapping: str = "linear") -> int:
    """Compute and exchange cycles of [m, k] by [k, n] on a Bow; half precision with half partials."""
    graph = poplar.Graph(poplar.IPUModel("ipu21").create_device().get_target())
    program = Sequence()
    is_half = dtype == "float16"
    kind = poplar.HALF if is_half else poplar.FLOAT
    options = {"partialsType": "half" if is_half else "float"}
    if mapping == "created":
        creators = poplin.create_mat_mul_input_lhs, poplin.create_mat_mul_input_rhs
        operands = [create(graph, kind, [m, k], [k, n], options=options) for create in creators]
    else:
        operands = [graph.add_variable(kind, shape, name) for shape, name in (([m, k], "lhs"), ([k, n], "rhs"))]
        for operand in operands:
            poputil.map_tensor_linearly(graph, operand)
    poplin.mat_mul(graph, *operands, program, options=options)
    phases = phase_cycles(graph, program)
    return phases["compute"] + phases["exchange"]


def rows(path: str = "bow_dense_gemm.csv", mapping: str = "linear") -> list[tuple[int, Row]]:
    """Every measured point, with its number of columns."""
    with (DATA / path).open() as file:
        points = list(csv.DictReader(file))
    found = []
    for point in points:
        m, k, n = (int(point[name]) for name in "mkn")
        name = f"{point['dtype']} {m} × {k} × {n}{_SUFFIXES[mapping]}"
        found.append((n, Row(name, float(point["cycles_at_1.85GHz"]), cycles(point["dtype"], m, k, n, mapping))))
    return found


def _within(some: Items[Row], limit: float) -> float:
    return float((errors(some) <= limit).mean())


def family() -> Family:
    """All points; those of many columns and those of few are judged apart."""
    found, created = (rows(mapping=mapping) for mapping in _SUFFIXES)
    large, small = ([row for n, row in found if (n >= _LARGE) == is_large] for is_large in (True, False))
    bars = (
        Bar("n ≥ 256: mean error", errors(large).mean(), 0.06),
        Bar("n ≥ 256: worst error", errors(large).max(), 0.15),
        Bar("n < 256: points within 15 %", _within(small, 0.15), 2 / 3, at_least=True),
        Bar("n < 256: worst error", errors(small).max(), 0.35),
    )
    source = "the figure of graphcore-research/sparsity-benchmarks, digitised to ± 2 % (reference B6), Bow at 1.85 GHz."
    how = (
        "`poplin.mat_mul`; compute and exchange, as the measurement counts: no sync, no host. The operands lie "
        "linearly, so that they are received in full. The measured program (`ipu/matmul_bench.cpp` of that repository; "
        "default memory proportion, no fully connected pass) made them by `createMatMulInputLHS` and `RHS`, but for "
        "small n its times hold more than the use of weights where they lie: 4096 × 4096 × 4 in float took 35,043 "
        "cycles, of which receiving 46 KB a tile is 11,400. Rows *operands created* have operands as the program made "
        "them; bars are those of the others. With few columns they are far too fast, since the plan reads the large "
        "operand where it is: PopLibs' planner takes such a plan, of a product whose operands are not swapped, for one "
        "that rearranges them (`ConvModel.cpp`, `addTransformCycleEstimate`)."
    )
    return Family("Dense matrix multiplication on Bow", source, how, [row for _, row in (*found, *created)], bars)
