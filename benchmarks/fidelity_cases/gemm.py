"""Dense matrix multiplication on one Bow, by size."""

from __future__ import annotations

import csv

from fidelity_cases.case import DATA, Bar, Ends, Family, Row, errors, interval_of, profile_of
from ipujax import poplar, poplin, poputil
from ipujax.poplar.program import Sequence

_LARGE = 256  # columns from which the large cases count


_PHASES = ("compute", "exchange")
MAPPINGS = ("created", "linear")  # operands as `createMatMulInputLHS` and `RHS` make them, or mapped linearly


def cycles(dtype: str, m: int, k: int, n: int, mapping: str = "created") -> tuple[int, Ends]:
    """Compute and exchange cycles of [m, k] by [k, n] on a Bow, and their interval; halves have half partials."""
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
    profile = profile_of(graph, program)
    return sum(profile.phase_cycles[phase] for phase in _PHASES), interval_of(profile, _PHASES)


def rows(path: str = "bow_dense_gemm.csv", mapping: str = "created") -> list[tuple[int, Row]]:
    """Every measured point, with its number of columns."""
    with (DATA / path).open() as file:
        points = list(csv.DictReader(file))
    results = []
    for point in points:
        m, k, n = (int(point[name]) for name in "mkn")
        name = f"{point['dtype']} {m} × {k} × {n}, {mapping}"
        simulated, interval = cycles(point["dtype"], m, k, n, mapping)
        results.append(
            (
                n,
                Row(
                    name,
                    float(point["cycles_at_1.85GHz"]),
                    simulated,
                    interval=interval,
                    is_of_measured_program=mapping == "created",
                ),
            )
        )
    return results


def family() -> Family:
    """All points with both mappings; bars are for created operands, of many and of few columns."""
    created, linear = (rows(mapping=mapping) for mapping in MAPPINGS)
    large, small = ([row for n, row in created if (n >= _LARGE) == is_large] for is_large in (True, False))
    bars = (
        Bar("n ≥ 256, created: mean error", errors(large).mean(), 0.06),
        Bar("n ≥ 256, created: worst error", errors(large).max(), 0.12),
        Bar("n < 256, created: mean error", errors(small).mean(), 0.07),
        Bar("n < 256, created: worst error", errors(small).max(), 0.20),
    )
    source = "the figure of graphcore-research/sparsity-benchmarks, digitised to ± 2 % (reference B6), Bow at 1.85 GHz."
    how = (
        "Compute and exchange cycles of `poplin.mat_mul`, without syncs and host exchange, as in the measurement; half "
        "precision with half partials, float with float ones. The measured program (`ipu/matmul_bench.cpp` of that "
        "repository; default memory proportion, no fully connected pass) created its operands by "
        "`createMatMulInputLHS` and `RHS`, as in the rows *created*. The rows *linear* are the same products with "
        "operands that are mapped linearly."
    )
    return Family("Dense matrix multiplication on Bow", source, how, [row for _, row in (*created, *linear)], bars)
