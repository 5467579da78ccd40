"""Cycles of the codelets of matrix multiplications and convolutions on one tile.

Input: lengths of the block of a vertex, as int64 arrays over any grid. Output: tile cycles, int64 arrays of that grid.
A tile issues one instruction a cycle, to its workers in turn, so a vertex costs its supervisor's cycles and, for each
pass, `issue_round_cycles` times those of its slowest worker.

Source: poplibs `lib/poplin/PerformanceEstimation.hpp` (reference machine.md A4, 1.2); of AMP vertices, what a worker
takes is counted in their assembly; the AMP 1x1 formula is checked against 128 measurements on Bow (reference B1).
Limits: the last block of a grain has the cost of a full one, regions that a real vertex would walk as a list are one
region, and figures marked `assumed` have no public source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from ipujax.lowering.layout import Count as Count, ceil_div as ceil_div, total_elements
from ipujax.runtime.target import Target, issue_round_cycles, larger, store_cycles, whole_cycles, wide_load_cycles

Precision = Literal["half", "float"]
product = total_elements  # of lengths that broadcast to one grid

# A weight chain of one conv unit stores 32 bytes: 16 half or 8 float input channels (reference 1.1).
_CHAIN_BYTES = 32
_WIDTH_BYTES = {"half": 2, "float": 4}
_VECTOR_BYTES = 8  # 64 bits: of one operand of a multiplication, and of one vector that is stored

_HMAC_STATE_CYCLES = 6  # saved by state that workers keep from one kernel position to the next
_SLIC_CHANNELS, _SLIC_WINDOW = 4, 4  # channels of a pass, and positions of a row of the kernel
_SCALAR_OUTPUT_CYCLES = 10  # assumed: addresses and the store of one output

# Extra cycles to address the weights of 1, 2 or 4 kernel rows at once (reference 1.2).
_FILTER_HEIGHTS = ((1, 15), (2, 46), (4, 60))

# Instructions of a worker for 0, 1, 2 and 3 rows of activations; from there each row takes as long as the AMP does.
_ByRows = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class WorkerPass:
    """Instructions of a worker in an AMP pass for kernels of one element.

    Args:
        adding: of a pass that adds to sums, by rows.
        zeroing: of the pass that starts the sums, by rows, without the zeros that it stores.
        stores_zeros: whether that pass stores zeros first, and then adds to them.
        state: to load the state that a worker keeps between passes, once.
        input_state: the part of `state` that is loaded again for each group of input channels.
    """

    adding: _ByRows
    zeroing: _ByRows
    stores_zeros: bool
    state: int
    input_state: int


@dataclass(frozen=True, slots=True)
class KernelPass:
    """Instructions of a worker in an AMP pass for one position of a larger kernel.

    Args:
        items: of each item of its work list, a row of output elements or a part of one, by the length of the item.
        state: to load the state that a worker keeps between passes, once.
    """

    items: _ByRows
    state: int


# Counted in poplibs' assembly, `lib/poplin/codelets/asm/conv_partial_1x1_*.S` and `conv_partial_nx1_*.S`; a bundle is
# one instruction. The tables of `PerformanceEstimation.hpp` are of the codelet of floats of 8 units, and save the state
# of larger kernels at each item: of a worker's call, there, it is saved once.
_HALF_PASS = WorkerPass((12, 26, 28, 27), (10, 24, 25, 26), stores_zeros=False, state=14, input_state=2)
_HALF_SUMS_PASS = WorkerPass(  # on an AMP of 8 units
    (10, 33, 33, 33), (12, 35, 35, 35), stores_zeros=True, state=10, input_state=2
)
_FLOAT_PASS = WorkerPass((9, 44, 50, 52), (11, 46, 52, 54), stores_zeros=True, state=11, input_state=3)
_FLOAT_8_UNITS_PASS = WorkerPass((10, 39, 42, 46), (12, 41, 44, 48), stores_zeros=True, state=10, input_state=2)
_HALF_KERNEL = KernelPass((16, 31, 36, 36), 9)
_HALF_SUMS_KERNEL = KernelPass((20, 30, 33, 35), 10)  # on an AMP of 8 units
_FLOAT_KERNEL = KernelPass((17, 45, 51, 57), 10)
_FLOAT_8_UNITS_KERNEL = KernelPass((17, 36, 42, 48), 9)
_KERNEL_CALL = 9  # instructions of a worker beside its items and its state


@dataclass(frozen=True, slots=True)
class AmpBlock:
    """Unit of work of the AMP: the weights that it stores at once."""

    in_channels: int  # input channels of a pass
    out_channels: int  # output channels of a pass, one a conv unit
    row_cycles: Count  # cycles of one row of activations
    load_cycles: Count  # cycles to load the weights


def amp_block(target: Target, precision: Precision) -> AmpBlock:
    """Block of the AMP on a target, for half or float activations."""
    half = precision == "half"
    units = target.conv_units_fp16 if half else target.conv_units_fp32
    macs = target.fp16_amp_macs_per_cycle if half else target.fp32_amp_macs_per_cycle
    in_channels = _CHAIN_BYTES // _WIDTH_BYTES[precision]
    load_cycles = ceil_div(units * _CHAIN_BYTES, target.amp_weight_load_bytes_per_cycle)
    return AmpBlock(in_channels, units, ceil_div(in_channels * units, macs), load_cycles)


def amp_1x1_cycles(
    target: Target,
    precision: Precision,
    rows: Count,
    in_channels: Count,
    out_channels: Count,
    groups: Count = 1,
    half_sums: bool = False,
) -> Count:
    """Cycles of the AMP vertex for kernels of one element (`ConvPartial1x1Out`).

    Args:
        target: the constants.
        precision: of the operands.
        rows: outputs of one channel.
        in_channels: input channels of a group.
        out_channels: output channels of a group.
        groups: groups of channels.
        half_sums: whether sums are half precision.

    Source of the numbers, supervisor cycles around each loop: poplibs `PerformanceEstimation.hpp`.
    """
    block = amp_block(target, precision)
    worker = worker_pass(target, precision, half_sums)
    half_sums_path = int(worker is _HALF_SUMS_PASS)  # 1 for that codelet, whose supervisor takes a cycle more or less
    # Blocks of channels that the AMP holds weights of: it makes a pass over all rows for each pair of them.
    ins = ceil_div(in_channels, block.in_channels)
    outs = ceil_div(out_channels, block.out_channels)
    sum_bytes = _WIDTH_BYTES["half" if half_sums else "float"]
    adding, zeroing = (
        _amp_pass_cycles(target, block, worker, rows, sum_bytes, is_zeroing=is_zeroing) for is_zeroing in (False, True)
    )
    # Passes over input channels: the first one zeroes the sums, the later ones add to them, each over all outputs.
    later_pass = 15 + half_sums_path + outs * (19 + 6 + block.load_cycles + adding)
    first_pass = 11 + outs * (18 + half_sums_path + 7 + block.load_cycles + zeroing)
    state = worker.state + worker.input_state * (ins * groups - 1)
    start = 50 + issue_round_cycles(target) * state  # of the vertex, and of its workers
    return start + groups * (13 - half_sums_path + (ins - 1) * later_pass + first_pass)


def worker_pass(target: Target, precision: Precision, half_sums: bool = False) -> WorkerPass:
    """Part of a worker in an AMP 1x1 pass on a target, for half or float activations, sums in half or float."""
    if precision == "half":
        return _HALF_SUMS_PASS if half_sums and target.conv_units_fp16 < _COMMON_PATH_UNITS else _HALF_PASS
    return _FLOAT_8_UNITS_PASS if target.conv_units_fp32 < _COMMON_PATH_UNITS else _FLOAT_PASS


def kernel_pass(target: Target, precision: Precision, half_sums: bool = False) -> KernelPass:
    """Part of a worker in an AMP nx1 pass on a target, for half or float activations, sums in half or float."""
    if precision == "half":
        return _HALF_SUMS_KERNEL if half_sums and target.conv_units_fp16 < _COMMON_PATH_UNITS else _HALF_KERNEL
    return _FLOAT_8_UNITS_KERNEL if target.conv_units_fp32 < _COMMON_PATH_UNITS else _FLOAT_KERNEL


_COMMON_PATH_UNITS = 16  # an AMP of that many units adds in half as it adds in float


def _amp_pass_cycles(
    target: Target, block: AmpBlock, worker: WorkerPass, rows: Count, sum_bytes: int, *, is_zeroing: bool
) -> Count:
    """Tile cycles of an AMP pass whose rows workers share, from its start to the end of its last worker.

    Args:
        target: the constants.
        block: the weights of the pass.
        worker: instructions of a worker, by its number of rows.
        rows: rows of activations, of all workers.
        sum_bytes: bytes of a sum.
        is_zeroing: whether it is the pass that starts the sums.
    """
    workers = target.worker_contexts
    round_cycles = issue_round_cycles(target)
    table = worker.zeroing if is_zeroing else worker.adding
    zero_bytes = block.out_channels * sum_bytes if is_zeroing and worker.stores_zeros else 0
    busiest, idlest = (
        _by_rows(share, table, block.row_cycles) + share * whole_cycles(store_cycles(zero_bytes, target))
        for share in (ceil_div(rows, workers), rows // workers)
    )
    # A worker of fewer rows may take longer, see the tables. The 14 cycles extra of a pass, which poplibs adds to the
    # least worker's cycles, count where the others take hardly longer.
    slowest, fastest = np.maximum(busiest, idlest), np.minimum(busiest, idlest)
    return np.maximum(round_cycles * slowest, round_cycles * fastest + 14)


def _by_rows(rows: Count, table: _ByRows, row_cycles: Count) -> Count:
    """Worker cycles for rows of activations: from `table` up to 3, then `row_cycles` more for each further row."""
    return np.asarray(table)[np.clip(rows, 0, 3)] + row_cycles * np.maximum(0, np.asarray(rows) - 3)


def amp_nx1_cycles(
    target: Target,
    precision: Precision,
    rows: Count,
    width: Count,
    kernel: Sequence[Count],
    in_channels: Count,
    out_channels: Count,
    groups: Count = 1,
    half_sums: bool = False,
) -> Count:
    """Cycles of the AMP vertex for larger kernels (`ConvPartialnx1`), with the filter height that is best.

    Args:
        target: the constants.
        precision: of the operands.
        rows: rows of output elements, batch and outer field dimensions together.
        width: elements of a row.
        kernel: lengths of the kernel, in at least one dimension.
        in_channels: input channels of a group.
        out_channels: output channels of a group.
        groups: groups of channels.
        half_sums: whether sums are half precision.

    Source of the numbers, supervisor cycles around each loop: poplibs `PerformanceEstimation.hpp`.
    """
    block = amp_block(target, precision)
    round_cycles = issue_round_cycles(target)
    outs = ceil_div(out_channels, block.out_channels)  # blocks of output channels that the AMP holds weights of
    worker = kernel_pass(target, precision, half_sums)
    busiest, idlest = (
        _KERNEL_CALL + share.items * _by_rows(share.item_width, worker.items, block.row_cycles)
        for share in _extreme_shares(rows, width, target.worker_contexts)
    )
    # Of one position of the kernel, which all workers compute together; 9 is the extra that `_amp_pass_cycles` has too.
    position = np.maximum(round_cycles * busiest, round_cycles * idlest + 9)
    totals = []
    for height, extra in _FILTER_HEIGHTS:  # kernel rows in the units at once, and cycles that these add to a load
        # Rows of the filter take the place of input channels in the units. The loops, from outside: groups of input
        # channels, of output channels, then `outer` and `inner_most` positions of the kernel.
        ins = ceil_div(in_channels, max(1, block.in_channels // height))
        outer = product([ceil_div(kernel[0], height), *kernel[1:-1]]) if len(kernel) > 1 else 1
        inner_most = kernel[-1] if len(kernel) > 1 else ceil_div(kernel[0], height)
        loads = outer * (14 + inner_most * (12 + block.load_cycles + extra + 3))
        inner = loads + outer * inner_most * position
        totals.append(ins * (14 + outs * (14 + inner)))
    best = np.minimum.reduce(np.broadcast_arrays(*totals))
    # Of the vertex, and of loops around the passes: over groups of channels, and over blocks of output channels.
    setup = 109 + (worker.state + _ZEROING_STATE) * round_cycles
    setup = setup + groups * (17 * outs + 6 * (outs - 1) + 1) + 6 * (groups - 1) + 1
    # The sums of each group of output channels are zeroed by a pass of the workers (poplibs `ConvModel.cpp` adds it to
    # the estimate of this vertex; that for kernels of one element zeroes in its first pass).
    zeroing = outs * groups * zero_cycles(target, rows * width * block.out_channels, half_sums)
    return setup + groups * (16 + best) + zeroing


_ZEROING_STATE = 9  # instructions to load the state that a worker keeps between zeroings, once


class _WorkerShare(NamedTuple):
    """Items of a worker's list: full rows, or parts of rows when there are few."""

    items: Count
    item_width: Count


def _extreme_shares(rows: Count, width: Count, workers: int) -> tuple[_WorkerShare, _WorkerShare]:
    """Shares of the busiest and of the idlest worker of `rows` of `width` elements; few rows are cut in parts."""
    parts = np.maximum(1, workers // np.maximum(rows, 1))
    busiest = _WorkerShare(ceil_div(rows, workers), ceil_div(width, parts))
    idlest = _WorkerShare(np.where(np.asarray(rows) >= workers, rows // workers, 1), width // parts)
    return busiest, idlest


def hmac_cycles(
    target: Target,
    precision: Precision,
    rows: Count,
    width: Count,
    kernel_positions: Count,
    in_channels: Count,
    out_channels: Count,
    groups: Count = 1,
    half_sums: bool = False,
) -> Count:
    """Cycles of the dot product vertex without AMP (`ConvPartialHorizontalMac`), zeroing of its partials included.

    It computes one output channel after the other, two at once where sums are half precision. A worker reads a work
    list of rows and parts of rows.

    Args:
        target: the constants.
        precision: of the operands.
        rows: rows of output elements.
        width: elements of a row.
        kernel_positions: elements of the kernel.
        in_channels: input channels of a group.
        out_channels: output channels of a group.
        groups: groups of channels.
        half_sums: whether sums are half precision.

    Source of the numbers: poplibs `PerformanceEstimation.hpp`, `getConvPartialHorizontalMacCycleEstimate` of a worker
    and `getConvPartialHorizontalMacSupervisorOuterLoopCycleEstimate` around it.
    """
    is_half = precision == "half"
    at_once = 2 if half_sums and is_half else 1
    round_cycles = issue_round_cycles(target)
    # Worker cycles of an output, and of the whole rows and of the part of one in the work list of the busiest worker.
    output = 7 + _dot_cycles(target, precision, in_channels, at_once)
    share = _row_share(rows, width, target.worker_contexts)
    items = share.whole_rows * (19 + width * output) + np.where(share.part_width > 0, 19 + share.part_width * output, 0)
    # Worker cycles of an output channel: the list is read again for each position of the kernel.
    worker = 16 + kernel_positions * (16 - (_HMAC_STATE_CYCLES if is_half else 0) + items)
    # Tile cycles: of the output channels of a group, then of the supervisor once, with the state that workers keep.
    channels = ceil_div(out_channels, at_once) * (10 + round_cycles * worker)
    setup = (65 if is_half else 58) + round_cycles * ((10 + _HMAC_STATE_CYCLES) if half_sums else 9)
    zeroing = zero_cycles(target, rows * width * out_channels * groups, half_sums)
    return setup + groups * (23 + 15 + channels) + zeroing


class _RowShare(NamedTuple):
    """Whole rows of a worker, and the elements of a row that it has a part of beside them, 0 for none."""

    whole_rows: Count
    part_width: Count


def _row_share(rows: Count, width: Count, workers: int) -> _RowShare:
    """Share of the busiest worker of `rows` of `width` elements.

    Each row is cut in as many parts as make the parts of all rows a multiple of the workers (poplibs
    `estimateConvPartialHorizontalMacInnerLoopCycles`).
    """
    parts = workers // np.gcd(workers, np.asarray(rows).astype(np.int64))
    share = ceil_div(rows * parts, workers)  # parts of a worker: `parts` of them are a whole row
    return _RowShare(share // parts, share % parts * ceil_div(width, parts))


def _dot_cycles(target: Target, precision: Precision, length: Count, at_once: int) -> Count:
    """Worker cycles of `at_once`, one or two, dot products that share an operand.

    Lengths of full vectors take 64 bits of each operand a cycle; others take pairs (of half, if the length is even) or
    single elements all along. Source: poplibs `PerformanceEstimation.hpp`, `getDenseDotProductCycles`.
    """
    width = _VECTOR_BYTES // _WIDTH_BYTES[precision]
    is_half = width > 2
    # One instruction multiplies 64 bits, however much more the ports load.
    vector_cycles = larger(1, wide_load_cycles(2 * _VECTOR_BYTES, target))
    pairs = 2 * ceil_div(length, 2) + at_once  # two cycles each
    singles = 2 * length + at_once
    narrow = np.where(np.asarray(length) % 2 == 0, pairs, singles) if is_half else singles
    vectors = whole_cycles(length // width * vector_cycles)
    around_loop = 3 * at_once + (at_once == 2) + 4 - is_half
    return around_loop + np.where(np.asarray(length) % width == 0, vectors, narrow)


def vmac_cycles(
    target: Target,
    outputs: Count,
    kernel: Sequence[Count],
    groups: Count,
    half_sums: bool = False,
) -> Count:
    """Cycles of the depthwise vertex of half operands (`ConvPartialVerticalMac`): one channel of each group.

    Groups are the vector dimension, four at once, or eight where sums are half precision. A worker has a work list of
    rows of windows for its outputs; each has sums of its own of all outputs, which are zeroed before and added after.

    Args:
        target: the constants.
        outputs: outputs of one channel.
        kernel: lengths of the kernel.
        groups: groups, each of one channel.
        half_sums: whether sums are half precision.

    Source of the numbers: poplibs `PerformanceEstimation.hpp`, `getConvPartialVerticalMacCycleEstimate` of a worker and
    the functions `getConvPartialVerticalMacSupervisor…` around it.
    """
    # Groups of a vector, and worker cycles: of a pass over groups, and of an output's row of the kernel, whose first
    # element has the loads and stores of its sums; then of each further element, which loads a vector of each operand.
    groups_at_once, start, first_element = (8, 13, 7 + 15 + 3) if half_sums else (4, 19, 7 + 5 + 3)
    element = wide_load_cycles(2 * _VECTOR_BYTES * (groups_at_once // 4), target) + 1
    round_cycles = issue_round_cycles(target)
    share = ceil_div(outputs, target.worker_contexts)  # outputs of a worker
    kernel_rows = product(kernel[:-1])
    worker = start + whole_cycles(kernel_rows * share * (first_element + element * (kernel[-1] - 1)))
    # Tile cycles: all workers zero all their sums at once; then each adds those of all issue slots for its share.
    zeroing = 4 + ceil_div(outputs, 4 if half_sums else 2)
    other_slots = round_cycles - 1
    start_adding, vector_adding = (10, 7 + other_slots) if half_sums else (9, 9 + 2 * other_slots)
    combining = start_adding + vector_adding * share // groups_at_once  # rounded down as in the source
    # Of the supervisor: 61 + 14 + 25 or 26 once a vertex; 32 + 24 for each pass over groups.
    passes = ceil_div(groups, groups_at_once)
    return 61 + 14 + (25 if half_sums else 26) + passes * (zeroing + 32 + 24 + round_cycles * worker + combining)


def slic_cycles(
    target: Target,
    rows: Count,
    width: Count,
    kernel: Sequence[Count],
    channels: int,
    groups: Count,
    stride: int,
    half_sums: bool = False,
) -> Count:
    """Cycles of the AMP vertex of few channels (`ConvPartial1x4SLIC`): windows of four, groups of four channels.

    Args:
        target: the constants.
        rows: rows of output elements.
        width: elements of a row.
        kernel: lengths of the kernel, the last one is padded to windows of four.
        channels: of a group, in or out; groups of one and two channels are put beside each other.
        groups: of channels.
        stride: of the window along the last dimension, 1 or 2.
        half_sums: whether sums are half precision.

    Source of the numbers: poplibs `PerformanceEstimation.hpp`, the functions `getConvPartialSlicSupervisor…`.
    """
    round_cycles = issue_round_cycles(target)
    few_units = target.conv_units_fp16 < _COMMON_PATH_UNITS
    passes = 1 if half_sums and not few_units else 2  # over the input: two of four chains of units, or all at once
    merges = half_sums and few_units  # two passes write two results, which are merged
    # Groups that one pass has beside each other: as many, of a power of 2 of channels, as fill its channels.
    beside = max(1, _SLIC_CHANNELS // (1 << max(0, channels - 1).bit_length()))
    # Kernel positions are read in windows of a row. Workers share rows of outputs, of parts of rows, as items.
    windows = product(kernel[:-1]) * ceil_div(kernel[-1], _SLIC_WINDOW)
    (items, item_width), _ = _extreme_shares(rows, width, target.worker_contexts)

    def worker(*, is_first: bool) -> Count:
        """Worker cycles of one window, for its list of items; the first window starts the sums."""
        item = (9 if merges else 10 if half_sums else 13) + is_first  # beside the passes over its row
        row = _slic_row_cycles(item_width, stride, is_first=is_first, merges=merges) - (not half_sums)
        return 17 + 2 * merges + items * (item + passes * row)

    # Of the supervisor: for a window, whose weights it loads (groups beside each other are put so by the workers); for
    # a pass over groups; and once. A loop adds 6 for each repetition, and 1.
    loading = 16 + (18 if beside == 1 else 21 + (12 if beside == 2 else 10) * round_cycles)
    window = loading + (0 if merges else 4) + 2 + 6 + 1 + 6 + 1
    passes_of_groups = ceil_div(groups, beside)
    supervisor = window * windows + 6 * (windows - 1) + 1
    supervisor = supervisor + (12 if merges else 15) * passes_of_groups + 6 * (passes_of_groups - 1) + 1
    supervisor = supervisor + (25 if merges else 28)
    workers = round_cycles * (worker(is_first=True) + (windows - 1) * worker(is_first=False))
    merging = (2 + 2 * rows * width) if merges else 0
    return supervisor + passes_of_groups * (workers + merging)


def _slic_row_cycles(width: Count, stride: int, *, is_first: bool, merges: bool) -> Count:
    """Worker cycles of a pass over a row of outputs, `is_first` to start the sums; the others add to these, or to
    partial sums that are merged at the end (`merges`).

    A loop of one cycle an element, two with a stride, and what starts and ends it. A single output has a path of its
    own. A row shorter than the 5 stages of the units is taken to last as long as one of 5; the source has up to 6
    cycles more for 2 to 4 outputs, by which fewer workers would be faster than more.
    Source: poplibs `getConvPartialSlicSupervisorInnerLoopCycleEstimateHalfFloat`.
    """
    if stride != 1:
        return np.where(np.asarray(width) == 1, 13, 15 + 2 * np.maximum(width - 3, 0))
    return np.where(np.asarray(width) == 1, 13, 10 + np.maximum(width, 5) + (0 if is_first else 3 * merges))


def outer_product_cycles(
    target: Target, precision: Precision, rows: Count, out_channels: Count, groups: Count = 1
) -> Count:
    """Cycles of the outer product vertex: one input channel, every output is one product.

    Rows are shared by the workers, and output channels are in groups of a vector, which are too few for the loop of
    the codelet. Source of the numbers: poplibs `PerformanceEstimation.hpp`, `getOuterProductCycleEstimate`, with the
    channels of a group that `ConvVertexType.cpp` gives it.
    """
    # Worker cycles of a group of channels, and of each of its rows. 25 below is what a worker takes for its call.
    vector, fixed, row = (4, 10, 10 + 4 * 5 // 2) if precision == "half" else (2, 11, 10 + 2 * 2)
    worker = 25 + groups * ceil_div(out_channels, vector) * (fixed + ceil_div(rows, target.worker_contexts) * row)
    return target.supervisor_overhead_cycles + issue_round_cycles(target) * worker


def scalar_mac_cycles(target: Target, instructions_per_mac: int, outputs: Count, reduced: Count) -> Count:
    """Cycles of a plain C++ dot product vertex, for dtypes without a vector or AMP form.

    Args:
        target: the constants.
        instructions_per_mac: instructions of a multiply-add.
        outputs: outputs of the vertex, which its workers share.
        reduced: products that each output adds.
    """
    # Four instructions a multiply-add reproduce the tutorial's measured dot product within 4 % (reference, "what a
    # first-principles model was found to need").
    share = ceil_div(outputs, target.worker_contexts)
    worker = share * (reduced * instructions_per_mac + _SCALAR_OUTPUT_CYCLES)
    return target.supervisor_overhead_cycles + issue_round_cycles(target) * worker


def zero_cycles(target: Target, elements: Count, half_sums: bool = False) -> Count:
    """Cycles to zero partials before they are added to: 64-bit stores shared by the workers."""
    width = _WIDTH_BYTES["half" if half_sums else "float"]
    stores = ceil_div(ceil_div(elements, _VECTOR_BYTES // width), target.worker_contexts)
    return issue_round_cycles(target) * (whole_cycles(store_cycles(stores * _VECTOR_BYTES, target)) + 14 - 9)
