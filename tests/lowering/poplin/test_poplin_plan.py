"""Planner and cycle formulas against measurements, brute force, and the cost model of compilation."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ipujax.lowering.layout import map_linearly
from ipujax.lowering.layout.grids import grids, split_candidates
from ipujax.lowering.layout.trial import trial_cycles, weighted_cost
from ipujax.lowering.poplin import ConvSpec, matmul, plan_convolution, plan_matmul
from ipujax.lowering.poplin.candidates import Candidates, _regions
from ipujax.lowering.poplin.cycles import (
    amp_1x1_cycles,
    amp_block,
    amp_nx1_cycles,
    hmac_cycles,
    outer_product_cycles,
    slic_cycles,
    vmac_cycles,
    zero_cycles,
)
from ipujax.lowering.poplin.product_plan import _divides, trial_plans
from ipujax.lowering.poplin.spec import BATCH, FIELD, OUT_CHANNELS, Dims, arithmetic
from ipujax.lowering.poplin.vertex_kinds import KINDS, block_cycles, grains
from ipujax.runtime.compile import compile
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import Builder
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import HostStream, Sequence, StreamIn, StreamOut
from ipujax.runtime.target.presets import preset
from ipujax.runtime.tensor.mapping import even_cuts

DATA = Path(__file__).resolve().parents[2] / "data"
BOW = preset("bow")
MK2 = preset("mk2")
MK1 = preset("mk1")
FLOAT = np.dtype("float32")
HALF = np.dtype("float16")
products = import_module("ipujax.lowering.poplin.matmul")


def conv_spec(batch=8, groups=1, out=64, in_channels=32, field=(14, 14), kernel=(3, 3), dtype=FLOAT, dilation=1):
    rank = len(field)
    extents = Dims(batch, groups, out, in_channels, field, kernel)
    in_field = tuple(-(-(f + k - 1) // dilation) for f, k in zip(field, kernel, strict=True))
    return ConvSpec(extents, in_field, (1,) * rank, (dilation,) * rank, (1,) * rank, *(dtype,) * 4)


def test_amp_formula_against_128_measurements_on_bow():
    """Source: tessellate, IPU Peak Flops notebook, [N, 16] by [16, 16] in half on every tile of a Bow."""
    rows, _, measured = np.loadtxt(DATA / "bow_amp_fp16_Nx16x16.csv", delimiter=",", skiprows=1).T
    assert len(rows) == 128
    error = np.abs(amp_1x1_cycles(BOW, "half", rows.astype(np.int64), 16, 16) / measured - 1)
    assert error.mean() <= 0.005 and error.max() <= 0.06


@pytest.mark.parametrize(
    ("target", "precision", "macs"), [(MK2, "half", 64), (MK2, "float", 16), (MK1, "half", 32), (MK1, "float", 8)]
)
def test_amp_approaches_its_peak(target, precision, macs):
    rows = 600_000
    groups = 4096  # the first group of input channels also zeroes the sums
    block = amp_block(target, precision)
    cycles = amp_1x1_cycles(target, precision, rows, groups * block.in_channels, 4 * block.out_channels)
    assert 4 * groups * rows * block.in_channels * block.out_channels / cycles == pytest.approx(macs, rel=1e-3)


def test_amp_adds_worker_setup_of_every_group():
    one_group, two_groups = (amp_1x1_cycles(BOW, "half", 60, 16, 16, groups) for groups in (1, 2))
    single = 13 + 11 + 18 + 7 + 64 + (6 * (26 + 4 * 7) + 14)
    assert one_group == 50 + 6 * 14 + single
    assert two_groups == one_group + single + 6 * 2


@pytest.mark.parametrize(
    ("rows", "cycles"),
    [
        (6, (44, 46 + 8 * 1)),
        (12, (50, 52 + 8 * 2)),
        (18, (52, 54 + 8 * 3)),
        (60, (52 + 8 * 7, 54 + 8 * 7 + 8 * 10)),
    ],
)
def test_amp_of_floats_adds_to_zeros_that_it_stores(rows, cycles):
    """By hand from the codelet of 16 units, rows by 16 × 16 on a Mk2: two passes of 8 channels."""
    adding, zeroing = (6 * worker + 14 for worker in cycles)
    passes = (15 + 25 + 64 + adding) + (11 + 25 + 64 + zeroing)
    assert amp_1x1_cycles(MK2, "float", rows, 16, 16) == 50 + 6 * (11 + 3) + 13 + passes


@pytest.mark.parametrize(("rows", "adding"), [(6, 26), (12, 28), (18, 27), (60, 27 + 4 * 7)])
def test_amp_of_halves_adds_to_sums(rows, adding):
    """By hand from the codelet of 16 units: what another 16 input channels take."""
    one, two = (amp_1x1_cycles(MK2, "half", rows, channels, 16) for channels in (16, 32))
    assert two - one == 15 + 25 + 64 + 6 * adding + 14 + 6 * 2


def test_amp_of_floats_of_eight_units_has_a_codelet_of_its_own():
    """By hand, 60 rows by 8 × 8 on a Mk1: 4 stores of zeros a row."""
    worker = 48 + 8 * 7 + 4 * 10
    assert amp_1x1_cycles(MK1, "float", 60, 8, 8) == 50 + 6 * 10 + 13 + 11 + 25 + 32 + 6 * worker + 14


def test_amp_of_eight_units_has_a_codelet_of_half_sums():
    """A Mk1 has 8 units: 256 bytes of weights a pass."""
    worker = 35 + 4 * 7 + 2 * 10
    half_sums_cycles = 50 + 6 * 10 + 12 + 11 + 19 + 7 + 32 + 6 * worker + 14
    assert amp_1x1_cycles(MK1, "half", 60, 16, 8, half_sums=True) == half_sums_cycles
    assert amp_1x1_cycles(MK1, "half", 60, 16, 8) < half_sums_cycles
    assert amp_1x1_cycles(MK2, "half", 60, 16, 8, half_sums=True) == amp_1x1_cycles(MK2, "half", 60, 16, 8)


@pytest.mark.parametrize(
    ("precision", "half_sums", "length", "dot"),
    [
        ("float", False, 10, 7 + 5),
        ("float", False, 9, 7 + 18 + 1),
        ("half", False, 8, 6 + 2),
        ("half", False, 6, 6 + 6 + 1),
        ("half", False, 7, 6 + 14 + 1),
        ("half", True, 8, 10 + 2),
    ],
)
def test_dot_products_without_amp(precision, half_sums, length, dot):
    """By hand from poplibs' estimator: 12 outputs of 4 channels, two at once with half sums."""
    worker = 16 + (16 - (6 if precision == "half" else 0) + 19 + 2 * (7 + dot))  # a row of 12 in six parts
    setup = 65 + 6 * (10 + 6) if half_sums else (65 if precision == "half" else 58) + 6 * 9
    zeroing = 6 * ((2 if half_sums else 4) + 14 - 9)  # 12 or 24 stores of 64 bits
    expected = setup + 23 + 15 + (2 if half_sums else 4) * (10 + 6 * worker) + zeroing
    assert hmac_cycles(MK2, precision, 1, 12, 1, length, 4, half_sums=half_sums) == expected


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("dilation", [1, 2, 4])
def test_no_vertex_without_amp_exceeds_the_rate_of_vectors(dtype, dilation):
    """A dilated input meets one of `dilation` kernel positions in each dimension: no product is left out twice."""
    spec = conv_spec(batch=1, out=4, in_channels=8, field=(16, 16), kernel=(4, 4), dtype=dtype, dilation=dilation)
    block = Dims.of([np.int64(n) for n in spec.extents])
    multiply_adds = 4 * 8 * (16 * 4 // dilation) ** 2
    vector = 8 // dtype.itemsize
    kinds = [
        kind for kind in KINDS if kind.applies(spec, arithmetic(spec, MK2)) and not (kind.uses_amp or kind.is_wide)
    ]
    assert "ConvPartialHorizontalMac" in {kind.name for kind in kinds}
    for kind in kinds:
        assert block_cycles(kind, spec, block, MK2) >= multiply_adds / vector, kind.name


def test_dot_products_of_rows_start_each_row():
    """By hand: of 7 rows of 10 each worker has one, and a sixth of another, padded to 2."""
    # four channels are one vector
    dot = 6 + 1
    kernel = 9
    items = (19 + 10 * (7 + dot)) + (19 + 2 * (7 + dot))
    worker = 16 + kernel * (16 - 6 + items)
    zeroing = 6 * (-(-70 // 2 // 6) + 14 - 9)
    expected = 65 + 6 * 9 + 23 + 15 + (10 + 6 * worker) + zeroing
    assert hmac_cycles(MK2, "half", 7, 10, kernel, 4, 1) == expected


@pytest.mark.parametrize(
    ("half_sums", "passes", "item", "start", "reduction"), [(True, 1, 25 + 6, 13, 12), (False, 2, 15 + 4, 19, 19)]
)
def test_depthwise_kernels_start_each_row_of_a_window(half_sums, passes, item, start, reduction):
    """By hand from poplibs' estimator: 12 outputs of 8 groups, windows of 3 × 3."""
    worker = start + 3 * 2 * item
    zeroing = 4 + 12 // (4 if half_sums else 2)
    combining = (10 if half_sums else 9) + reduction * 2 // (8 if half_sums else 4)
    expected = 61 + 14 + (25 if half_sums else 26) + passes * (zeroing + 32 + 24 + 6 * worker + combining)
    assert vmac_cycles(MK2, 12, (3, 3), 8, half_sums=half_sums) == expected


def test_windows_of_few_channels():
    """By hand from poplibs' estimator: six rows of 10 outputs, 8 groups of one channel, windows of 3 × 3 as 3 × 4."""
    loading = 16 + 21 + 10 * 6
    positions = 3
    groups = 2
    # half sums, all four chains: one pass
    first = 17 + 10 + 1 + (10 + 10)
    later = 17 + 10 + (10 + 10)
    supervisor = 28 + 15 * groups + 6 * (groups - 1) + 1 + (loading + 4 + 2 + 6 + 1 + 6 + 1) * positions + 6 * 2 + 1
    expected = supervisor + groups * 6 * (first + 2 * later)
    assert slic_cycles(MK2, 6, 10, (3, 3), 1, 8, 1, half_sums=True) == expected
    two_passes = 17 + 13 + 1 + 2 * (10 + 10 - 1), 17 + 13 + 2 * (10 + 10 - 1)
    expected = supervisor + groups * 6 * (two_passes[0] + 2 * two_passes[1])
    assert slic_cycles(MK2, 6, 10, (3, 3), 1, 8, 1) == expected


@pytest.mark.parametrize(("precision", "groups", "worker"), [("half", 3, 10 + 2 * 20), ("float", 5, 11 + 2 * 14)])
def test_outer_products_have_a_vector_of_channels_in_a_group(precision, groups, worker):
    """By hand from poplibs' estimator: two of 12 rows a worker, by 10 channels."""
    assert outer_product_cycles(MK2, precision, 12, 10) == 11 + 6 * (25 + groups * worker)


@pytest.mark.parametrize("half_sums", [True, False])
def test_larger_kernels_zero_their_sums(half_sums):
    """Two groups of 16 output channels, 60 sums each: 64-bit stores of six workers."""
    row = (MK2, "half", 6, 10, (1,), 16)
    settings = amp_nx1_cycles(*row, 32, half_sums=half_sums) - amp_nx1_cycles(*row, 16, half_sums=half_sums)
    zeroing = 6 * (60 * 16 // (4 if half_sums else 2) // 6 + 14 - 9)
    worker = 9 + 36 + 4 * 7
    assert settings == zeroing + 17 + 6 + 14 + (14 + 12 + 64 + 15 + 3) + 6 * worker + 9


def test_half_sums_of_larger_kernels():
    """By hand: zeroing of 4 instead of 2 elements a store."""
    row = (MK2, "half", 6, 10, (1,), 16, 16)
    assert amp_nx1_cycles(*row, half_sums=True) - amp_nx1_cycles(*row) == -6 * (80 - 40)


@pytest.mark.parametrize(
    ("target", "precision", "half_sums", "channels", "rows"),
    [
        (MK2, "half", True, 16, (31, 36, 36, 40)),
        (MK2, "float", False, 8, (45, 51, 57, 65)),
        (MK1, "float", False, 8, (36, 42, 48, 56)),
        (MK1, "half", True, 16, (30, 33, 35, 39)),
    ],
)
def test_larger_kernels_keep_their_state_once_a_call(target, precision, half_sums, channels, rows):
    """By hand from the codelets: workers of two rows of each width take one row longer than those of one."""
    block = channels, amp_block(target, precision).out_channels
    for width, item in enumerate(rows, start=1):
        one, two = (
            amp_nx1_cycles(target, precision, 6 * n, width, (1,), *block, half_sums=half_sums)
            - zero_cycles(target, 6 * n * width * block[1], half_sums)
            for n in (1, 2)
        )
        assert two - one == 6 * item


def test_steps_of_rows_and_of_columns_compete():
    """Where memory limits a plan, that of the second axis is taken although steps of the first one fit."""
    extents = Dims(1, 1, 8192, 1024, (1024,), (1,))
    float32 = (np.dtype(np.float32),) * 4
    spec = ConvSpec(extents, (1024,), (1,), (1,), (1,), *float32, True, True, is_product=True)
    columns, rows, either, other = (
        plan_convolution(spec, BOW, None, axes)
        for axes in ((OUT_CHANNELS,), (FIELD,), (OUT_CHANNELS, FIELD), (FIELD, OUT_CHANNELS))
    )
    assert columns.steps > 1 and columns.memory_bound_met and rows.memory_bound_met
    assert rows.total_cycles < columns.total_cycles
    assert either.total_cycles == other.total_cycles == rows.total_cycles


@pytest.mark.parametrize(("extent", "grain"), [(1, 1), (7, 1), (96, 16), (999, 3), (16, 16), (100, 1)])
def test_split_candidates_have_all_largest_blocks(extent, grain):
    max_splits = -(-extent // grain)
    largest = {int(np.diff(even_cuts(extent, n, grain)).max()) for n in range(1, max_splits + 1)}
    candidates = split_candidates(extent, grain, 10_000)
    assert candidates[0] == 1 and len(candidates) == len(largest)
    assert {int(np.diff(even_cuts(extent, int(n), grain)).max()) for n in candidates} == largest
    thinned = split_candidates(extent, grain, 5)
    assert len(thinned) <= 5 and set(thinned) <= set(candidates)


def test_grids_have_all_products_within_the_bound():
    values = [np.array([1, 2, 5]), np.array([1, 3]), np.array([1, 4, 7])]
    expected = {(a, b, c) for a in values[0] for b in values[1] for c in values[2] if a * b * c <= 20}
    assert set(map(tuple, grids(values, 20).T)) == expected


SPECS = {
    "3x3": conv_spec(),
    "half": conv_spec(dtype=HALF),
    "few channels": conv_spec(in_channels=3),
    "weight gradient": conv_spec(batch=16, in_channels=8, field=(3, 3), kernel=(14, 14)),
    "depthwise": conv_spec(groups=32, out=1, in_channels=1),
    "data gradient of a stride": conv_spec(dilation=2),
    "outer product": conv_spec(batch=1, field=(64,), kernel=(1,), in_channels=1),
    "integers": conv_spec(dtype=np.dtype("int32")),
    "0d": conv_spec(field=(), kernel=()),
    "sums in half": replace(conv_spec(dtype=HALF, out=4), partials_dtype=HALF),
}


@pytest.mark.parametrize("name", SPECS)
def test_plan_is_the_best_candidate(name):
    """Pruning by lower bounds changes nothing: bounds hold, and the plan is the best of all candidates."""
    spec = SPECS[name]
    bound = 0.6 * MK2.bytes_per_tile
    best: list[int] = []
    for kind in KINDS:
        if kind.applies(spec, arithmetic(spec, MK2)):
            candidates = Candidates.of(kind, spec, MK2, grains(kind, spec, MK2))
            cycles = candidates.cost_parts(np.arange(candidates.splits.shape[1])).sum(0)
            assert np.all(candidates.lower_bound_cycles <= cycles)
            best.append(cycles[candidates.temp_bytes <= bound].min())
    assert plan_convolution(spec, MK2).total_cycles == min(best)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("depthwise", "ConvPartialnx1Combined"),
        ("outer product", "OuterProduct"),
        ("integers", "ConvPartialScalar"),
        ("0d", "ConvPartial1x1Out"),
    ],
)
def test_kind_of_vertex(name, kind):
    assert plan_convolution(SPECS[name], MK2).kind.name.startswith(kind)


MATMULS = [(1, 256, 256, 256), (1, 1000, 77, 333), (8, 128, 64, 128), (1, 1, 1024, 1024), (1, 4096, 1024, 512)]


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
@pytest.mark.parametrize("shape", MATMULS, ids=str)
def test_matmuls_are_never_slower_on_more_tiles(shape, dtype):
    plans = [plan_matmul(*shape, dtype, MK2.replace(tiles_per_ipu=n)) for n in (64, 256, 1024, 1216, 1472)]
    cycles = [plan.total_cycles for plan in plans if plan.memory_bound_met]
    assert len(cycles) >= 3 and cycles == sorted(cycles, reverse=True)
    assert all(plan.tiles_used <= n for plan, n in zip(plans, (64, 256, 1024, 1216, 1472), strict=True))


@pytest.mark.parametrize("name", ["3x3", "weight gradient", "depthwise"])
def test_convolutions_are_never_slower_on_more_tiles(name):
    cycles = [
        plan_convolution(SPECS[name], MK2.replace(tiles_per_ipu=n)).total_cycles for n in (64, 256, 1024, 1216, 1472)
    ]
    assert cycles == sorted(cycles, reverse=True)


@pytest.mark.parametrize("dim", [1, 2, 3], ids="mkn")
def test_twice_the_work_costs_more(dim):
    shape = [1, 256, 256, 256]
    cycles = []
    for _ in range(4):
        cycles.append(plan_matmul(*shape, HALF, MK2).total_cycles)
        shape[dim] *= 2
    assert all(cost < doubled for cost, doubled in pairwise(cycles))


def test_memory_bound():
    plans = [plan_matmul(1, 1024, 1024, 1024, FLOAT, MK2, available_memory_proportion=p) for p in (0.6, 0.15, 0.001, 0)]
    free, tight, impossible, smallest = plans
    for plan, proportion in ((free, 0.6), (tight, 0.15)):
        assert plan.memory_bound_met and plan.temp_bytes <= proportion * MK2.bytes_per_tile
    assert not free.memory_binds and free.steps == 1
    assert tight.memory_binds or tight.steps > 1
    assert tight.total_cycles > free.total_cycles
    assert not impossible.memory_bound_met
    assert smallest.temp_bytes <= min(plan.temp_bytes for plan in plans)


@pytest.mark.parametrize("shape", [(1, 2048, 2048, 2048), (1, 4096, 4096, 4096), (1, 64, 8192, 8192)], ids=str)
def test_large_products_fit_in_several_steps(shape):
    plan = plan_matmul(*shape, FLOAT, MK2)
    assert plan.memory_bound_met and plan.temp_bytes <= 0.6 * MK2.bytes_per_tile
    _, m, k, n = shape
    assert plan.steps * plan.spec.extents.out_channels * plan.spec.extents.field[0] == m * n
    ideal = m * k * n / (MK2.tiles_per_ipu * MK2.fp32_amp_macs_per_cycle)
    assert ideal < plan.total_cycles < 2 * ideal


@pytest.mark.parametrize("share", [-0.5, 1.5, float("nan")])
def test_refuses_a_number_that_is_not_a_proportion(share):
    with pytest.raises(ArgumentError, match="available_memory_proportion"):
        plan_matmul(1, 8, 8, 8, FLOAT, MK2, available_memory_proportion=share)


def test_neighbouring_tiles_share_activations():
    plan = plan_matmul(1, 256, 256, 256, FLOAT, MK2)
    axis = 4 if plan.kind.is_swapped else 2  # output channels; rows when operands are swapped
    along = np.diff(plan.grid().tile, axis=axis)
    assert plan.splits.out_channels > 1 and np.all(along == 1)


@pytest.mark.parametrize("shape", [(1, 256, 1024, 1024), (1, 100, 300, 77), (4, 128, 64, 128)], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_plan_estimates_the_compiled_cost(shape, dtype):
    """Operands mapped linearly, so that hardly any element is on a tile that uses it, as the plan assumes."""
    groups, m, k, n = shape
    graph = Graph(BOW)
    prog = Sequence()
    tensors = [graph.add_variable(s, dtype) for s in ((groups, m, k), (groups, k, n))]
    for tensor in tensors:
        map_linearly(graph, tensor)
        prog.add(StreamIn(HostStream("in", tensor.shape, dtype, resident=True), tensor))
    out = matmul(Builder(graph, prog, "dot"), *tensors)
    prog.add(StreamOut(out, HostStream("out", out.shape, dtype, resident=True)))
    compiled_cycles = compile(graph, prog).timeline_of(None).cycles
    assert plan_matmul(*shape, dtype, BOW).total_cycles == pytest.approx(compiled_cycles, rel=0.15)


# From a row by a matrix to products of several steps; thin and uneven ones too.
PRODUCTS = [(1, 100, 300, 77), (1, 1, 1024, 1024), (1, 333, 777, 111), (1, 8, 20000, 8), (1, 1024, 1024, 4)]
PRODUCTS += [(24, 65, 32, 65), (1, 128, 784, 300), (1, 1024, 1024, 8192), (1, 4096, 4096, 512)]


@pytest.fixture(scope="module", params=["mk1", "bow"])
def costed_plans(request):
    """For each product and precision its trial plans with the cost of each, operands mapped linearly."""
    target = preset(request.param)
    rows = {}
    for shape in PRODUCTS:
        for dtype in (FLOAT, HALF):
            groups, m, k, n = shape
            by_rows = {"lhs_memory": ((1, groups), (3, m), (2, k)), "rhs_memory": ((0, groups), (2, k), (1, n))}
            plans = trial_plans(plan_matmul(*shape, dtype, target, **by_rows), target, None, 0.5)
            rows[shape, dtype] = [(plan, _cost(target, shape, dtype, plan)) for plan in plans]
    return target, rows


def _cost(target, shape, dtype, plan=None, measure=trial_cycles):
    """Cost of a product by a plan, or by the plan that is chosen."""
    groups, m, k, n = shape
    graph = Graph(target)
    a, b = (graph.add_variable(s, dtype) for s in ((groups, m, k), (groups, k, n)))
    map_linearly(graph, a)
    map_linearly(graph, b)
    if plan is None:
        return measure(graph, lambda builder: matmul(builder, a, b))
    return measure(graph, lambda builder: products._add_steps(builder, a, b, plan, None))


def test_plans_estimate_their_cost(costed_plans):
    """Estimates leave out how scattered operands are: that raises costs, and hardly ever lowers them."""
    _, rows = costed_plans
    ratios = np.array([cost / plan.total_cycles for row in rows.values() for plan, cost in row])
    assert len(ratios) > 25
    assert 1 <= np.median(ratios) <= 1.1
    assert np.mean(ratios <= 1.15) >= 0.9 and ratios.max() < 1.4
    assert ratios.min() > 0.95


def test_chosen_plan_has_the_least_cost(costed_plans):
    target, rows = costed_plans
    for (shape, dtype), row in rows.items():
        costs = [_cost(target, shape, dtype, plan, weighted_cost) for plan, _ in row]
        assert _cost(target, shape, dtype, measure=weighted_cost) == min(costs), (shape, dtype)


ROWS = 512
INNER = 49
IN_GROUPS = ((1, 1), (3, ROWS // 16), (2, INNER), (3, 16))  # rows in groups of 16, the memory order of channels


@pytest.mark.parametrize("block", [8, 16, 34, 48])
def test_counts_regions_of_blocks_that_cut_groups(block):
    order = np.arange(ROWS * INNER).reshape(ROWS // 16, INNER, 16).transpose(0, 2, 1).reshape(ROWS, INNER)
    blocks = [order[start : start + block] for start in range(0, ROWS - block + 1, block)]
    largest = max(int(np.count_nonzero(np.diff(np.sort(read.ravel())) > 1)) + 1 for read in blocks)
    counted = int(_regions(IN_GROUPS, (np.int64(1), np.int64(1), np.int64(INNER), np.int64(block))))
    assert counted / 1.6 <= largest <= counted if block % 16 else counted / 3 <= largest <= counted


def test_tries_no_two_plans_of_equal_blocks():
    """Cuts in groups of channels are often those without: their programs are equal, and were costed twice."""
    plans = trial_plans(plan_matmul(1, 1024, 64, 64, FLOAT, MK2, rhs_is_free=True), MK2, None, 0.5)
    cuts = [(plan.kind, plan.maps_linearly, *(cut.tobytes() for cut in plan.grid().cuts)) for plan in plans]
    assert len(cuts) > 1 and len(set(cuts)) == len(cuts)


def test_cuts_between_groups_of_rows_at_a_high_cost_per_byte():
    best = plan_matmul(1, ROWS, INNER, 512, HALF, MK2, lhs_memory=IN_GROUPS)
    plans = trial_plans(best, MK2, None, 8.0)
    fewest = min(plan.fragments for plan in plans)
    for plan in plans:
        if plan.fragments == fewest:
            assert all(cut % 16 == 0 for cut in plan.grid().cuts[FIELD])
    assert any(plan.splits.field[0] > 1 for plan in plans if plan.fragments == fewest)


def test_loop_receives_few_fragments_at_a_high_cost_per_byte():
    """A gradient of weights by images of 28 × 28, channels in groups: single columns are fragments of 32 bytes."""
    images = 20
    side = 28
    order = ((2, images), (3, side)), ((4, side),)  # images, rows; columns; channel groups in between
    x, g = ((*order[0], (n, size // 16), *order[1], (n, 16)) for n, size in ((0, 256), (1, 512)))
    extents = Dims(256, 1, 512, images, (1, 1), (side, side))
    spec = ConvSpec(extents, (side, side), *[(1, 1)] * 3, HALF, HALF, HALF, HALF, lhs_memory=x, rhs_memory=g)
    best = plan_convolution(spec, MK2, 0.15)
    looped = [plan for plan in trial_plans(best, MK2, 0.15, 8.0) if plan.steps > 1 and plan.is_loop]
    assert best.steps > 1 and all((plan.steps, plan.step_axis) == (best.steps, best.step_axis) for plan in looped)
    assert all(plan.temp_bytes <= 0.15 * MK2.bytes_per_tile for plan in looped)
    assert 3 * min(plan.fragments for plan in looped) < best.fragments


def test_costs_are_not_below_lower_bounds(costed_plans):
    """A wrong bound would end the search too early."""
    _, rows = costed_plans
    assert all(cost >= plan.lower_bound_cycles for row in rows.values() for plan, cost in row)


@pytest.mark.parametrize(
    ("extent", "steps", "axis", "expected"),
    [(64, 4, OUT_CHANNELS, True), (64, 8, OUT_CHANNELS, False), (40, 8, OUT_CHANNELS, True), (64, 8, BATCH, True)],
)
def test_steps_do_not_cut_groups_of_channels(extent, steps, axis, expected):
    assert _divides(extent, steps, axis) == expected


def test_plans_a_dilated_input_whose_bound_exceeds_its_cost() -> None:
    extents = Dims(256, 1, 1, 64, (28, 28), (4, 4))
    spec = ConvSpec(extents, (7, 7), (1, 1), (4, 4), (1, 1), *(np.dtype(np.float32),) * 4, False, True)
    assert plan_convolution(spec, MK2).total_cycles > 0
