"""Products with block-sparse matrices on Bow: values multiplied a second, static and dynamic patterns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any

import jax
import numpy as np

import ipujax as ipu
from fidelity_cases.case import Ends, Family, Row, interval_of, of_rate
from ipujax import popsparse

_SIZE = 4096  # rows and columns of the matrix
_DENSITY = 1 / 16
_BAR = 0.25
_PHASES = ("compute", "exchange")
# TFLOP/s on values of the best number of columns, and the columns of the dense operand that are simulated, by dtype,
# form and block. Rates of half are digitised to ± 2 %; those of float are published speed-ups, of two digits, over the
# best dense product, 58.59 TFLOP/s (reference B6).
_DENSE_FLOAT = 58.59 * _DENSITY
_MEASURED = {
    ("half", "static", 16): (69.6, 4096),
    ("half", "static", 8): (49.1, 4096),
    ("half", "static", 4): (21.5, 1024),
    ("half", "static", 1): (10.4, 1024),
    ("half", "dynamic", 16): (26.9, 4096),
    ("half", "dynamic", 8): (21.2, 4096),
    ("half", "dynamic", 4): (14.4, 1024),
    ("half", "dynamic", 1): (5.9, 1024),
    ("float", "static", 16): (5.6 * _DENSE_FLOAT, 2048),
    ("float", "static", 1): (1.4 * _DENSE_FLOAT, 256),
    ("float", "dynamic", 16): (3.8 * _DENSE_FLOAT, 2048),
    ("float", "dynamic", 1): (0.9 * _DENSE_FLOAT, 1024),
}
_DTYPES = {"half": np.float16, "float": np.float32}


def random_pattern(size: int, block: int, density: float, seed: int = 0) -> popsparse.BlockPattern:
    """A square pattern whose blocks are drawn without replacement, as many as the measured program draws."""
    side = size // block
    drawn = np.random.default_rng(seed).permutation(side * side)[: ceil(density * side * side)]
    rows, columns = np.divmod(np.sort(drawn), side)
    return popsparse.BlockPattern((size, size), block, tuple(rows.tolist()), tuple(columns.tolist()))


def cycles(
    form: str, block: int, columns: int, *, dtype: Any = np.float16, size: int = _SIZE, density: float = _DENSITY
) -> tuple[int, Ends]:
    """Compute and exchange cycles of one product on a Bow, and their interval."""
    pattern = random_pattern(size, block, density)
    product: Callable[..., Any]
    if form == "static":
        product = partial(popsparse.static_matmul, pattern)
        matrix: Any = jax.ShapeDtypeStruct((pattern.num_blocks, block, block), dtype)
    else:
        plan = popsparse.DynamicPlan(pattern.shape, block, pattern.num_blocks, columns, dtype)
        product = partial(popsparse.dynamic_matmul, plan)
        values = np.zeros((pattern.num_blocks, block, block), dtype)
        matrix = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plan.encode(pattern, values))
    dense = jax.ShapeDtypeStruct((size, columns), dtype)
    options = ipu.Options(allow_out_of_memory=True)  # a published case ran, so it fitted
    step = ipu.jit(product, device=ipu.IPUModel(arch="bow"), options=options)
    profile = step.lower(matrix, dense).compile().profile
    return sum(profile.phase_cycles[phase] for phase in _PHASES), interval_of(profile, _PHASES)


def rate(precision: str, form: str, block: int, columns: int) -> tuple[float, Ends]:
    """TFLOP/s on values, in compute and exchange alone, and their interval."""
    taken_cycles, interval = cycles(form, block, columns, dtype=_DTYPES[precision])
    operations = 2 * ceil(_DENSITY * (_SIZE // block) ** 2) * block**2 * columns
    clock_hz = ipu.IPUModel(arch="bow").target.clock_hz
    return operations * clock_hz / taken_cycles / 1e12, of_rate(interval)


def family() -> Family:
    """A row for each dtype, form and block."""
    rows = [
        Row(
            f"{precision}, {form} block {block} by {columns} columns",
            measured,
            simulated,
            _BAR,
            "TFLOP/s",
            interval,
        )
        for (precision, form, block), (measured, columns) in _MEASURED.items()
        for simulated, interval in [rate(precision, form, block, columns)]
    ]
    source = (
        'Li et al. 2023, "PopSparse: accelerated block sparse matrix multiplication on IPU"; graphcore-research/'
        "sparsity-benchmarks, half digitised to ± 2 % from the figure `ipu_block_size`, float of the table "
        "`static_vs_dynamic`."
    )
    how = (
        f"{_SIZE} × {_SIZE} with a density of 1/16, on a Bow at 1.85 GHz: operations on values over compute and "
        "exchange cycles, without syncs and host exchange. Measured is the best number of columns: of static blocks "
        "of 4 and 1 in half that of 1024, as the next source shows; of the others it is not published, and the row has "
        "the best of 256, 1024, 2048 and 4096 that fits a tile. A positive error is too fast. Cycles of vertices are "
        "PopLibs' estimates and counts of its assembly; nothing is fitted to these rows."
    )
    return Family("Block-sparse products on Bow", source, how, rows)
