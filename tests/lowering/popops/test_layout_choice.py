"""Choice of partitions of one operation: exactness of estimates, and use of the available tiles.

Costs are those of the compiled program without host exchange. Tile memory is large, so that each operation fits on one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.layout import GROUP_CHANNELS, MemoryOrder
from ipujax.lowering.layout.choose import choose
from ipujax.lowering.layout.grid_cost import Work
from ipujax.lowering.layout.grids import Grids, even_grids
from ipujax.lowering.layout.trial import trial_cycles
from ipujax.lowering.popops.indexing import gather, scatter, windows
from ipujax.lowering.popops.maps import pad, rows
from ipujax.lowering.popops.maps.elementwise import apply_steps
from ipujax.lowering.popops.reductions import arg_reduce, reduce as reduce_module
from ipujax.lowering.popops.reductions.reduce import reduce
from ipujax.lowering.popops.vertices.kernel import Op, Reduction, Step
from ipujax.runtime.compile import compile, leaf_costs
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.engine import engine_function
from ipujax.runtime.graph import Builder, HostStream, Sequence, StreamIn, StreamOut
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.tensor.mapping import Blocked, flat_mapping, grid
from tests.lowering.helpers import lowered, small_target

TILES = (*range(1, 18), 31, 32, 33, 64, 100, 256, 777, 1472)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
Call = tuple[Callable[..., Any], tuple[Any, ...]]
Struct = jax.ShapeDtypeStruct
F32 = np.float32
F16 = np.float16
I32 = np.int32


def cost(call: Call, tiles: int) -> int:
    """Cycles of a call without host exchange."""
    program = lowered(*call, small_target(tiles, bytes_per_tile=1 << 25))
    assert not program.graph.notes.fallbacks
    profile = Profile(compile(program.graph, program.program))
    return profile.cycles - profile.phase_cycles["host_exchange"]


def unary(fun: Callable[..., Any], *shape: int, dtype: Any = F32) -> Call:
    """Call of a function of one array."""
    return fun, (Struct(shape, dtype),)


def product(m: int, k: int, n: int, dtype: Any = np.float32) -> Call:
    """Matrix product."""
    return jnp.dot, (Struct((m, k), dtype), Struct((k, n), dtype))


def convolution(
    batch: int, size: int, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, dtype: Any = np.float32
) -> Call:
    """Convolution of a square image."""
    fun = partial(
        lax.conv_general_dilated,
        window_strides=(stride, stride),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    image = (batch, size, size, inputs)
    weights = (kernel, kernel, inputs, outputs)
    return fun, (Struct(image, dtype), Struct(weights, dtype))


Window = tuple[tuple[int, ...], tuple[int, ...], str]
POOL: Window = ((1, 2, 2, 1), (1, 2, 2, 1), "VALID")
OVERLAP: Window = ((1, 3, 3, 1), (1, 2, 2, 1), "SAME")
DENSE: Window = ((1, 3, 3, 1), (1, 1, 1, 1), "SAME")
SPARSE: Window = ((1, 2, 1, 1), (1, 3, 2, 1), "VALID")
GLOBAL_WINDOW: Window = ((1, 7, 7, 1), (1, 1, 1, 1), "VALID")


def pooled(x: Any, window: Window, op: Any = lax.max, start: float = -np.inf) -> Any:
    return lax.reduce_window(x, np.asarray(start, x.dtype), op, *window)


def pool(window: Window, *shape: int, dtype: Any = F32) -> Call:
    """Maximum over each window."""
    return unary(partial(pooled, window=window), *shape, dtype=dtype)


def average(window: Window, *shape: int) -> Call:
    """Sum over each window."""
    return unary(partial(pooled, window=window, op=lax.add, start=0.0), *shape)


def pool_gradient(window: Window, *shape: int, dtype: Any = F32) -> Call:
    """Gradient of the maximum over windows."""
    fun = partial(pooled, window=window)
    x = Struct(shape, dtype)
    return lambda x, g: jax.vjp(fun, x)[1](g)[0], (x, jax.eval_shape(fun, x))


def rows_of(table: Any, ids: Any) -> Any:
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lax.gather(table, ids, numbers, (1, table.shape[1]))


def lookup(rows: int, width: int, count: int, dtype: Any = F32) -> Call:
    """Look-up of rows of a table."""
    return rows_of, (Struct((rows, width), dtype), Struct((count, 1), I32))


def columns(rows: int, width: int, count: int) -> Call:
    """Look-up of columns of a table."""
    numbers = lax.GatherDimensionNumbers((0,), (1,), (1,))
    args = Struct((rows, width), F32), Struct((count, 1), I32)
    return lambda t, i: lax.gather(t, i, numbers, (t.shape[0], 1)), args


def labels(count: int, classes: int) -> Call:
    """Look-up of one element of each row."""
    numbers = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
    args = Struct((count, classes), F32), Struct((count, 1), I32)
    return lambda x, i: lax.gather(x, i, numbers, (1, 1)), args


def added_rows(table: Any, ids: Any, updates: Any) -> Any:
    return lax.scatter_add(table, ids, updates, lax.ScatterDimensionNumbers((1,), (0,), (0,)))


def update(rows: int, width: int, count: int, dtype: Any = F32) -> Call:
    """Addition of updates to rows of a table."""
    return added_rows, (Struct((rows, width), dtype), Struct((count, 1), I32), Struct((count, width), dtype))


def arg(axis: int, *shape: int, dtype: Any = F32) -> Call:
    """Index of the largest element."""
    return unary(lambda x: lax.argmax(x, axis, I32), *shape, dtype=dtype)


OPERATIONS: dict[str, Call] = {
    "sum-all": unary(jnp.sum, 300, 100),
    "sum-columns": unary(lambda x: x.sum(0), 300, 100),
    "sum-columns-half": unary(lambda x: lax.reduce_sum(x, (0,)), 300, 100, dtype=F16),
    "sum-rows-odd": unary(lambda x: x.sum(1), 777, 333),
    "sum-images": unary(lambda x: x.sum((0, 1, 2)), 16, 14, 14, 32),
    "any": unary(jnp.any, 40, 31, dtype=np.bool_),
    "pool": pool(POOL, 8, 28, 28, 6),
    "pool-one-image": pool(POOL, 1, 112, 112, 3),
    "pool-overlapping": pool(OVERLAP, 8, 28, 28, 16),
    "pool-sparse": pool(SPARSE, 3, 16, 11, 5),
    "gradient": pool_gradient(POOL, 8, 28, 28, 6),
    "gradient-one-image": pool_gradient(POOL, 1, 112, 112, 3),
    "argmax-rows": arg(1, 64, 1000),
    "argmax-tall": arg(0, 1000, 64),
    "argmax-half": arg(1, 64, 1000, dtype=F16),
    "lookup": lookup(1000, 64, 128),
    "lookup-odd": lookup(29, 13, 300),
    "lookup-narrow": lookup(100, 1, 1000),
    "lookup-many": lookup(30_000, 16, 2048),
    "lookup-labels": labels(128, 10),
    "update-tiny": update(17, 5, 7),
    "update": update(1000, 64, 128),
    "update-large": update(5000, 128, 256),
    "update-odd": update(29, 13, 300),
    "update-few-rows": update(50, 16, 4000),
    "update-one-column": update(10, 1, 20_000),
    "update-half": update(1000, 64, 128, dtype=F16),
    "cumsum-cube": unary(lambda x: lax.cumsum(x, 1), 64, 128, 3),
    "sort-rows": unary(lambda x: lax.sort(x, dimension=1), 300, 100),
    "pad": unary(lambda x: lax.pad(x, np.float32(0), ((1, 2, 0), (3, 0, 1))), 300, 100),
    "product": product(1024, 1024, 1024),
    "convolution": convolution(4, 14, 64, 128),
    "convolution-stem": convolution(1, 112, 3, 64, kernel=7, stride=2),
}

LARGE = [
    "product", "convolution", "convolution-stem", "sum-columns", "pool-one-image", "gradient-one-image",
    "pool-overlapping", "argmax-rows", "lookup", "pad",
]  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_large_operations_are_faster_on_more_tiles(name: str) -> None:
    """Spatial dimensions are cut, and the exchange does not dominate."""
    on_one, on_sixteen, on_all = (cost(OPERATIONS[name], tiles) for tiles in (1, 16, 1472))
    assert on_one > 2.5 * on_sixteen
    assert on_sixteen > 1.8 * on_all


# Relative difference by which a cost may be below its estimate: uneven blocks, buses shared beyond a block.
ESTIMATED = {
    **dict.fromkeys(["sum-all", "sum-columns-half", "sum-rows-odd", "sum-images", "any", "pool", "pool-sparse"], 0.0),
    **dict.fromkeys(["gradient", "argmax-rows", "argmax-half", "argmax-tall", "cumsum-cube", "sort-rows", "pad"], 0.0),
    **dict.fromkeys(["lookup-labels", "lookup-narrow", "update-odd", "update-half"], 0.0),
    **dict.fromkeys(["lookup", "lookup-odd", "lookup-many", "update", "update-large", "update-few-rows"], 0.04),
    "update-one-column": 0.04,
    "update-tiny": 0.04,
}

# An estimate is of the longest block: rows of three words, of shorter blocks, take longer than those of four.
ABOVE = {"update-odd": 0.1, "update-tiny": 0.1}


@pytest.mark.parametrize(("name", "tiles"), [(name, tiles) for name in ESTIMATED for tiles in (3, 17, 100)])
def test_estimates_the_cost_of_grids(name: str, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Best grids and random ones: the cost is the estimate or slightly below."""
    choices: list[tuple[Grids, np.ndarray]] = []  # of a scatter one for each form: its grids and their estimates
    forced: dict[int, Blocked] = {}  # placement by number of the choice

    def compare(
        graph: Graph,
        shape: Any,
        order: Any,
        work: Work,
        operands: Any,
        cost_after: Any = None,
        unmoved_fields: Any = (),
    ) -> Blocked:
        grids = even_grids(tuple(shape), tuple(order), tiles)
        estimates = work.cycles(grids, graph.target)
        if cost_after is not None:
            estimates = estimates + cost_after(grids, graph.target, graph.byte_cost_cycles)
        choices.append((grids, estimates))
        chosen = choose(graph, shape, order, work, operands, cost_after, unmoved_fields)
        return forced.get(len(choices) - 1, chosen)

    for module in (arg_reduce, gather, pad, reduce_module, rows, scatter, windows):
        monkeypatch.setattr(module, "choose", compare)
    cost(OPERATIONS[name], tiles)
    assert choices
    for number, (grids, estimates) in enumerate(tuple(choices)):
        monkeypatch.setattr(scatter, "choose_cheapest", lambda plans, *_, number=number: plans[number])
        for n in np.unique([*np.argsort(estimates)[:4], *np.random.default_rng(tiles).integers(0, len(estimates), 4)]):
            choices.clear()
            forced[number] = grids.placement(int(n))
            cost_cycles = cost(OPERATIONS[name], tiles)
            most = (1 + ABOVE.get(name, 0)) * estimates[n]
            assert (1 - ESTIMATED[name]) * estimates[n] <= cost_cycles <= most, grids.blocks[:, n]
        forced.clear()


def test_following_steps_are_costed_where_they_decide_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operand on one tile is too slow there to combine anything: what follows is costed for even grids alone."""
    costed: list[int] = []  # grids at once

    def choose_counting(graph: Graph, shape: Any, order: Any, work: Work, operands: Any, cost_after: Any) -> Blocked:
        def count(grids: Grids, target: Any, byte_cost: float) -> np.ndarray:
            costed.append(grids.blocks.shape[1])
            cycles: np.ndarray = cost_after(grids, target, byte_cost)
            return cycles

        return choose(graph, shape, order, work, operands, count)

    monkeypatch.setattr(reduce_module, "choose", choose_counting)
    graph = Graph(small_target(100))
    x = graph.add_variable((4096, 64), F32, "x", grid((4096, 64), (1, 1)))
    trial_cycles(graph, lambda builder: reduce(builder, x, (0,), "add"))
    assert costed and 1 not in costed


def test_reduces_rows_on_their_own_tiles() -> None:
    """A reduction along rows, each on a tile of its own, moves nothing but partial results."""
    graph = Graph(small_target(100))
    x = graph.add_variable((200, 64), F32, "x", grid((200, 64), (100, 1)))
    by_rows = trial_cycles(graph, lambda builder: reduce(builder, x, (1,), "add"))
    target = graph.target
    assert by_rows < target.internal_sync_cycles + target.exchange_startup_cycles + 2 * 64 * 6


@pytest.mark.parametrize("dtype", [F16, F32])
def test_sum_of_products_takes_no_more_than_product_and_sum(dtype: Any) -> None:
    def squares(x: Any) -> Any:
        return x * x

    def sums(x: Any) -> Any:
        return jnp.sum(x, 0)

    shape = (4096, 192)
    both = cost(unary(lambda x: sums(squares(x)), *shape, dtype=dtype), 1472)
    assert both <= cost(unary(squares, *shape, dtype=dtype), 1472) + cost(unary(sums, *shape, dtype=dtype), 1472)


def reduced_sum(graph: Graph, operands: int, mapping: Any) -> tuple[int, int]:
    """Number of compute sets of x0·x1·…, stored and summed over rows, and bytes that its fullest tile receives."""
    shape = (64, 256)
    tensors = [graph.add_variable(shape, F32, f"x{n}", mapping) for n in range(operands)]
    product = Op("mul", lax.mul, np.dtype(F32))
    steps = [Step(product, (0 if n == 1 else operands + n - 2, n)) for n in range(1, operands)]
    last = operands + len(steps) - 1
    prog = Sequence()
    apply_steps(Builder(graph, prog, "f"), steps, [last], tensors, shape, [None], [Reduction(last, "add", (0,))])
    costs = [cost for cost in leaf_costs(graph, prog).values() if isinstance(cost, ComputeSetCost)]
    return len(costs), max(int(cost.before.received_bytes.max()) for cost in costs)


def test_reduces_apart_where_all_operands_would_move() -> None:
    """In pieces of 1,100 elements no vertex can sum columns: operands stay, and the product alone moves."""
    size = 64 * 256
    starts = np.arange(0, size, 1100)
    pieces = flat_mapping(size, starts, np.arange(len(starts), dtype=np.int32))
    _, received = reduced_sum(Graph(small_target(16), byte_cost_cycles=4.0), 6, pieces)
    assert 0 < received <= 2 * 1100 * 4
    columns = grid((64, 256), (1, 16))
    _, received_in_columns = reduced_sum(Graph(small_target(16), byte_cost_cycles=4.0), 6, columns)
    assert received_in_columns == 0  # where vertices can reduce, nothing is reduced apart


@pytest.mark.parametrize("is_reduced_apart", [True, False])
def test_reduces_an_operand_before_a_result_overwrites_it(is_reduced_apart: bool) -> None:
    """A result in place of its operand x leaves the sum of x, in the same vertices or apart, that of the old x."""
    shape = (4, 32)
    pieces = flat_mapping(128, np.arange(0, 128, 20), np.arange(7, dtype=np.int32))
    graph = Graph(small_target(8), byte_cost_cycles=4.0)
    x = graph.add_variable(shape, F32, "x", pieces if is_reduced_apart else grid(shape, (1, 8)))
    source, product, total = (HostStream(name, s, F32) for name, s in (("x", shape), ("xx", shape), ("sum", (32,))))
    prog = Sequence(StreamIn(source, x))
    step = Step(Op("mul", lax.mul, np.dtype(F32)), (0, 0))
    results = apply_steps(Builder(graph, prog, "f"), [step], [1], [x], shape, [x], [Reduction(0, "add", (0,))])
    assert (len(prog.children()) > 2) == is_reduced_apart
    for result, stream in zip(results, (product, total), strict=True):
        prog.add(StreamOut(result, stream))
    value = np.arange(128, dtype=np.float32).reshape(shape)
    for outs in (engine_function(graph, prog)({source: value}), interpret(graph, prog, {source: value})):
        np.testing.assert_array_equal(outs[product], value * value)
        np.testing.assert_array_equal(outs[total], value.sum(0))


def test_results_are_spread_where_bytes_are_dear() -> None:
    """A result follows the operand on half of the tiles only while its bytes cost less than moving that operand."""
    shape = (64, 256)
    tiles = {}
    for byte_cost in (0.0, 64.0):
        graph = Graph(small_target(16), byte_cost_cycles=byte_cost)
        few = [graph.add_variable(shape, F16, f"few{n}", grid(shape, (2, 2))) for n in range(2)]
        even = graph.add_variable(shape, F16, "even", grid(shape, (16, 1)))
        steps = [Step(Op("add", lax.add, np.dtype(F16)), (0, 1)), Step(Op("add", lax.add, np.dtype(F16)), (3, 2))]
        results = apply_steps(Builder(graph, Sequence(), "f"), steps, [4], [*few, even], shape, [None])
        (variable,) = results[0].variables()
        tiles[byte_cost] = int(np.count_nonzero(graph.mappings[variable].elements_per_tile(16)))
    assert tiles[0.0] <= tiles[64.0] == 16


def test_an_unmapped_operand_keeps_its_groups_of_channels() -> None:
    """A gradient of which a bias is summed first is not mapped by columns: products read rows of it."""
    graph = Graph(small_target(1472), byte_cost_cycles=0.5)
    order = MemoryOrder.with_channels((1024, 768), 1)
    gradient = order.add_variable(graph, F16, "gradient")
    reduce(Builder(graph, Sequence(), "bias"), gradient, (0,), "add")
    (variable,) = gradient.variables()
    _, lengths, _ = graph.mappings[variable].runs()
    assert lengths.min() >= GROUP_CHANNELS
