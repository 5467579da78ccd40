"""Formulas of vertices and the constants of a tile: workers issue in rounds of six slots, ports have a width each."""

from __future__ import annotations

from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest

from ipujax.lowering.poplin.cycles import (
    amp_1x1_cycles,
    amp_nx1_cycles,
    hmac_cycles,
    outer_product_cycles,
    scalar_mac_cycles,
    slic_cycles,
    vmac_cycles,
    zero_cycles,
)
from ipujax.lowering.popops.indexing.indexing_cycles import (
    gather_cycles,
    region_slice_cycles,
    scatter_cycles,
    slice_cycles,
)
from ipujax.lowering.popops.vertices.elementwise_cycles import OP_COSTS, elementwise_cycles
from ipujax.lowering.popops.vertices.kernel_cycles import OpCount, kernel_cycles
from ipujax.lowering.popops.vertices.reducers import reduce_cycles
from ipujax.runtime.target import issue_round_cycles
from ipujax.runtime.target.presets import PRESETS, preset
from tests.lowering.helpers import small_target

SIZES = np.array([1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 64, 100, 1_000])
MK2 = preset("mk2")
DTYPES = {"half": np.float16, "float": np.float32, "int": np.int32, "bfloat16": jnp.bfloat16}
_SUM = (OpCount("mul", np.dtype(np.float32), 2, 0), OpCount("add", np.dtype(np.float32), 2, 0))
FORMULAS = {
    **{
        f"{op} of {operands} {name}": lambda t, op=op, dtype=dtype, operands=operands: elementwise_cycles(
            op, dtype, operands, 0, SIZES, t
        )
        for op, operands in (("add", 2), ("exp", 1), ("copy", 1), ("clamp", 3), ("lt", 2), ("not", 1), ("select_n", 3))
        for name, dtype in DTYPES.items()
    },
    "multiply and add": lambda t: kernel_cycles(_SUM, [np.float32] * 3, [np.float32], SIZES, t),
    "mask": lambda t: kernel_cycles(_SUM, [np.bool_, np.float16], [np.bool_], SIZES, t),
    **{
        f"{monoid} of {n} {name}": lambda t, monoid=monoid, dtype=dtype, n=n: reduce_cycles(
            monoid, dtype, SIZES, np.asarray(n), t
        )
        for monoid in ("add", "max")
        for name, dtype in DTYPES.items()
        for n in (1, 4, 100)
    },
    "slice": lambda t: slice_cycles(np.asarray(5), SIZES, np.float16, t),
    "slice of one worker": lambda t: region_slice_cycles(np.asarray(5), SIZES, np.float32, t),
    "gather": lambda t: gather_cycles(SIZES, np.asarray(0.5), np.asarray(40), np.float32, t),
    "scatter": lambda t: scatter_cycles("add", SIZES, np.asarray(0.5), np.asarray(9), np.asarray(40), np.float32, t),
    "AMP, 1 x 1": lambda t: amp_1x1_cycles(t, "float", SIZES, 32, 32),
    "AMP, 1 x 1, of one row": lambda t: amp_1x1_cycles(t, "half", np.asarray(1), SIZES, 16),
    "AMP, 3 x 3": lambda t: amp_nx1_cycles(t, "half", SIZES, np.asarray(1), (np.asarray(3), np.asarray(3)), 16, 16),
    "dot products": lambda t: hmac_cycles(t, "half", np.asarray(7), np.asarray(1), 1, SIZES, 3),
    "dot products of rows": lambda t: hmac_cycles(t, "half", SIZES, np.asarray(5), 9, np.asarray(3), 3),
    "depthwise": lambda t: vmac_cycles(t, SIZES, (3, 3), np.asarray(8)),
    "depthwise, half sums": lambda t: vmac_cycles(t, SIZES, (3, 3), np.asarray(8), half_sums=True),
    "windows of few channels": lambda t: slic_cycles(t, SIZES, np.asarray(9), (3, 3), 2, np.asarray(8), 1),
    "outer product": lambda t: outer_product_cycles(t, "half", np.asarray(3), SIZES),
    "scalar products": lambda t: scalar_mac_cycles(t, 4, SIZES, 10),
    "zeros": lambda t: zero_cycles(t, SIZES),
}
by_formula = pytest.mark.parametrize("formula", FORMULAS.values(), ids=list(FORMULAS))


@by_formula
def test_fewer_workers_are_never_faster(formula):
    cycles = [formula(MK2.replace(worker_contexts=workers)) for workers in (1, 2, 3, 5, 6)]
    for fewer, settings in pairwise(cycles):
        assert np.all(fewer >= settings)


@by_formula
@pytest.mark.parametrize("rate", ["load_bytes_per_cycle", "store_bytes_per_cycle"])
def test_wider_ports_are_never_slower(formula, rate):
    width = getattr(MK2, rate)
    cycles = [formula(MK2.replace(**{rate: width * part // 4})) for part in (2, 4, 5, 8, 16)]
    for narrow, wide in pairwise(cycles):
        assert np.all(narrow >= wide)


@pytest.mark.parametrize(
    ("rate", "names"),
    [
        ("load_bytes_per_cycle", ("add of 2 float", "add of 100 half", "slice", "gather", "scatter", "depthwise")),
        ("store_bytes_per_cycle", ("add of 2 half", "AMP, 1 x 1", "slice", "gather", "scatter", "zeros")),
    ],
)
def test_formulas_read_the_widths_of_the_ports(rate, names):
    faster = MK2.replace(**{rate: 2 * getattr(MK2, rate)})
    for name in names:
        assert FORMULAS[name](faster)[-1] < FORMULAS[name](MK2)[-1], name


def test_an_iteration_of_a_sum_is_its_accesses():
    """A sum of floats: two loads and one store of 64 bits, and no other cycle."""
    elements = np.array([6 * 2, 6 * 2 * 101])
    for loads, stores, iteration in ((16, 8, 3.0), (32, 8, 2.0), (16, 16, 2.5), (8, 8, 5.0), (20, 10, 2.4)):
        target = MK2.replace(load_bytes_per_cycle=loads, store_bytes_per_cycle=stores)
        one, many = elementwise_cycles("add", np.float32, 2, 0, elements, target)
        assert many - one == pytest.approx(6 * 100 * iteration, abs=6)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("op", OP_COSTS)
def test_presets_cost_the_public_figures(op, name):
    """64 bits a load and a store: one iteration is the row of the table."""
    cycles, vector = OP_COSTS[op].iteration("half")
    one, two = elementwise_cycles(op, np.float16, 2, 0, 6 * vector * np.array([1, 2]), preset(name))
    assert two - one == 6 * cycles


def test_a_tile_issues_each_worker_once_in_a_round():
    assert issue_round_cycles(MK2) == 6
    assert [issue_round_cycles(MK2.replace(worker_contexts=n)) for n in (1, 5, 6, 7, 12)] == [6, 6, 6, 7, 12]
    assert issue_round_cycles(small_target(4, worker_issue_period_cycles=0, worker_contexts=2)) == 2
