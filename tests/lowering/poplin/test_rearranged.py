"""Operands that a plan reads in another order than its layer keeps are received in full and copied on the tile."""

from dataclasses import replace

import numpy as np
import pytest

from ipujax.lowering.poplin.product_plan import plan_matmul
from ipujax.lowering.poplin.rearranged import rearranged, rearrangement_cycles
from ipujax.lowering.poplin.spec import ConvSpec, Dims, Rearranged
from ipujax.lowering.poplin.vertex_kinds import KINDS
from ipujax.runtime.target.presets import preset

HALF = np.dtype(np.float16)
BOW = preset("bow")
BY_NAME = {kind.name.removeprefix("ConvPartial"): kind for kind in KINDS}
NONE = Rearranged(False, False, False)
ALL = Rearranged(True, True, True)


def product_of(rows: int, inner: int, columns: int) -> ConvSpec:
    shape = Dims(1, 1, columns, inner, (rows,), (1,))
    return ConvSpec(shape, (rows,), (1,), (1,), (1,), HALF, HALF, HALF, HALF, is_product=True)


def convolution_of(ins: int, outs: int) -> ConvSpec:
    shape = Dims(2, 1, outs, ins, (16, 16), (3, 3))
    return ConvSpec(shape, (18, 18), (1, 1), (1, 1), (1, 1), HALF, HALF, HALF, HALF)


@pytest.mark.parametrize(
    ("kind", "spec", "expected"),
    [
        ("1x1OutSwapped", product_of(64, 64, 4), NONE),  # the form of products in a layer
        ("1x1Out", product_of(64, 64, 4), ALL),
        ("HorizontalMac", product_of(64, 64, 4), ALL),
        ("1x1OutSwapped", product_of(197, 64, 64), Rearranged(True, False, True)),  # 197 rows do not fill groups of 16
        ("1x1OutSwapped", product_of(64, 197, 64), Rearranged(True, True, False)),
        ("nx1", convolution_of(64, 64), NONE),
        ("nx1", convolution_of(4, 64), NONE),  # four rows of the kernel fill a group
        ("nx1", convolution_of(3, 64), Rearranged(True, True, False)),
        ("nx1", convolution_of(64, 10), Rearranged(False, True, True)),
        ("1x1OutExpanded", convolution_of(64, 64), Rearranged(True, True, False)),
        ("HorizontalMac", convolution_of(3, 64), NONE),
    ],
)
def test_plans_of_another_order_rearrange(kind, spec, expected):
    found = rearranged(BY_NAME[kind], spec, BOW)
    assert (found.lhs, found.rhs, found.result) == (expected.lhs, expected.rhs, expected.result)
    assert found.has_halo == (BY_NAME[kind].uses_amp and spec.extents.kernel != (1,))


def test_scalar_loops_have_no_order():
    spec = product_of(64, 64, 4)
    full = np.dtype(np.int32)
    spec = replace(spec, lhs_dtype=full, rhs_dtype=full, out_dtype=full, partials_dtype=full)
    assert rearranged(BY_NAME["Scalar"], spec, BOW) == NONE


def test_copies_move_64_bits_a_cycle_or_an_atom():
    kind = BY_NAME["1x1Out"]
    copies = 2 * BOW.copy_startup_cycles  # before and after the product
    aligned = rearrangement_cycles(kind, product_of(32, 16, 64), Dims(1, 1, 64, 16, (32,), (1,)), BOW)
    assert aligned == copies + 2 * (32 * 16 + 16 * 64) / 8 + 2 * 32 * 64 / 8
    # Channels are copied with those that fill the groups of the vertex.
    odd = rearrangement_cycles(kind, product_of(32, 15, 64), Dims(1, 1, 64, 15, (32,), (1,)), BOW)
    assert odd == copies + sum(np.ceil(2 * n * 5.1484 - 2 * n / 8) + 2 * n / 8 for n in (32 * 16, 16 * 64)) + 512
    faster = BOW.replace(memcpy_bytes_per_cycle=10)  # no multiple of an atom
    less = rearrangement_cycles(kind, product_of(32, 16, 64), Dims(1, 1, 64, 16, (32,), (1,)), faster)
    assert less == copies + -(-2 * (32 * 16 + 16 * 64) // 10) + -(-2 * 32 * 64 // 10)
    partial = rearrangement_cycles(kind, product_of(32, 16, 64), Dims(1, 1, 64, 16, (32,), (1,)), BOW, slots=2)
    assert partial == aligned - BOW.copy_startup_cycles - 2 * 32 * 64 / 8


@pytest.mark.parametrize(("columns", "measured"), [(4, 13585), (16, 16217)])
def test_narrow_products_are_near_the_measured_cycles(columns, measured):
    plan = plan_matmul(1, 4096, 4096, columns, HALF, BOW, partials_dtype=HALF, lhs_is_free=True, rhs_is_free=True)
    assert abs((plan.total_cycles - plan.cost.sync_cycles) / measured - 1) < 0.20
