"""Products with static block-sparse matrices on Bow by block, density and columns: cycles of compute and exchange."""

from __future__ import annotations

import csv
from fractions import Fraction

import numpy as np

from fidelity_cases.case import DATA, Bar, Family, Row, errors
from fidelity_cases.popsparse import cycles

_BAR = 0.25
_LARGE = 4096  # rows and columns of the matrices that have a row each
_MOST_BLOCKS = 1 << 18  # larger patterns, all of single elements, take a minute each to compile


def _dense_cycles() -> dict[tuple[int, int], float]:
    """Measured cycles of the dense product in half, by rows of the square matrix and columns of the operand."""
    with (DATA / "bow_dense_gemm.csv").open() as file:
        return {
            (int(point["m"]), int(point["n"])): float(point["cycles_at_1.85GHz"])
            for point in csv.DictReader(file)
            if point["dtype"] == "float16"
        }


def rows() -> dict[int, list[Row]]:
    """Every measured point, by rows of the matrix."""
    dense = _dense_cycles()
    results = dict[int, list[Row]]()
    with (DATA / "bow_static_sparse.csv").open() as file:
        points = list(csv.DictReader(file))
    for point in points:
        size, block, columns = (int(point[name]) for name in ("m", "block", "columns"))
        density = Fraction(point["density"])
        if density * (size // block) ** 2 > _MOST_BLOCKS:
            continue
        measured = dense[size, columns] / float(point["speedup"])
        simulated, interval = cycles("static", block, columns, size=size, density=float(density))
        name = f"block {block}, density {density}, {columns} columns"
        row = Row(name, measured, simulated, interval=interval)
        results.setdefault(size, []).append(row)
    return results


def family() -> Family:
    """A row for each point of the large matrices, and bars for both sizes."""
    by_size = rows()
    bars = [
        bar
        for size, points in by_size.items()
        for bar in (
            Bar(f"{size} × {size}: median error", float(np.median(errors(points))), _BAR),
            Bar(f"{size} × {size}: share within 25 %", float(np.mean(errors(points) <= _BAR)), 1.0, at_least=True),
        )
    ]
    source = (
        'Li et al. 2023, "PopSparse: accelerated block sparse matrix multiplication on IPU", speed-ups digitised to '
        "± 2 % from the figure `ipu_static_grid` of graphcore-research/sparsity-benchmarks, times the dense products "
        "of the same source (reference B6)."
    )
    how = (
        "Half on a Bow at 1.85 GHz; compute and exchange cycles, without syncs and host exchange. Products of "
        f"{_LARGE} rows have a row each, those of 1024 count in the bars alone; patterns of more than {_MOST_BLOCKS:,} "
        "blocks are left out. Plans are those of this project, not of PopLibs; nothing is fitted to these rows. Small "
        "matrices take longer on hardware, probably since PopLibs adds the terms of each row of blocks in small pieces "
        "([decisions.md](decisions.md))."
    )
    return Family("Static block-sparse products on Bow, by columns", source, how, by_size[_LARGE], bars)
