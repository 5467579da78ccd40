"""Products with block-sparse matrices on Bow: values multiplied a second, static and dynamic patterns of half."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any

import jax
import numpy as np

import ipujax as ipu
from fidelity_cases.case import Family, Row
from ipujax import popsparse

_SIZE = 4096  # rows and columns of the matrix
_DENSITY = 1 / 16
_BAR = 0.25
# TFLOP/s on values, digitised to ± 2 %, and the columns of the dense operand that are simulated, by form and block.
_MEASURED = {
    ("static", 16): (69.6, 4096),
    ("static", 8): (49.1, 4096),
    ("static", 4): (21.5, 2048),
    ("static", 1): (10.4, 1024),
    ("dynamic", 16): (26.9, 4096),
    ("dynamic", 8): (21.2, 4096),
    ("dynamic", 4): (14.4, 2048),
    ("dynamic", 1): (5.9, 2048),
}


def random_pattern(size: int, block: int, density: float, seed: int = 0) -> popsparse.BlockPattern:
    """A square pattern whose blocks are drawn without replacement, as many as the measured program draws."""
    side = size // block
    drawn = np.random.default_rng(seed).permutation(side * side)[: ceil(density * side * side)]
    rows, columns = np.divmod(np.sort(drawn), side)
    return popsparse.BlockPattern((size, size), block, tuple(rows.tolist()), tuple(columns.tolist()))


def phases(form: str, block: int, columns: int, *, size: int = _SIZE, density: float = _DENSITY) -> dict[str, int]:
    """Cycles of the phases of one product in half on a Bow."""
    pattern = random_pattern(size, block, density)
    product: Callable[..., Any]
    if form == "static":
        product = partial(popsparse.static_matmul, pattern)
        matrix: Any = jax.ShapeDtypeStruct((pattern.num_blocks, block, block), np.float16)
    else:
        plan = popsparse.DynamicPlan(pattern.shape, block, pattern.num_blocks, columns, np.float16)
        product = partial(popsparse.dynamic_matmul, plan)
        values = np.zeros((pattern.num_blocks, block, block), np.float16)
        matrix = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plan.encode(pattern, values))
    dense = jax.ShapeDtypeStruct((size, columns), np.float16)
    options = ipu.Options(allow_out_of_memory=True)  # a published case ran, so it fitted
    step = ipu.jit(product, device=ipu.IPUModel(arch="bow"), options=options)
    return dict(step.lower(matrix, dense).compile().profile.phase_cycles)


def rate(form: str, block: int, columns: int) -> float:
    """TFLOP/s on values, in compute and exchange alone."""
    cycles = phases(form, block, columns)
    operations = 2 * ceil(_DENSITY * (_SIZE // block) ** 2) * block**2 * columns
    clock_hz = ipu.IPUModel(arch="bow").target.clock_hz
    return operations * clock_hz / (cycles["compute"] + cycles["exchange"]) / 1e12


def family() -> Family:
    """A row for each form and block."""
    rows = [
        Row(f"{form} block {block} by {columns} columns", measured, rate(form, block, columns), _BAR, "TFLOP/s")
        for (form, block), (measured, columns) in _MEASURED.items()
    ]
    source = (
        'Li et al. 2023, "PopSparse: accelerated block sparse matrix multiplication on IPU", digitised to ± 2 % from '
        "the figure `ipu_block_size` of graphcore-research/sparsity-benchmarks."
    )
    how = (
        f"Half, {_SIZE} × {_SIZE} with a density of 1/16, on a Bow at 1.85 GHz: operations on values over compute and "
        "exchange cycles, without syncs and host exchange. Measured is the best number of columns; simulated is the "
        "number of columns in the row, the best of those tried. A positive error is too fast. Cycles of vertices are "
        "PopLibs' estimates and counts of its assembly; nothing is fitted to these rows. No cause of the two misses is "
        "known ([what was looked at](decisions.md))."
    )
    return Family("Block-sparse products on Bow", source, how, rows)
