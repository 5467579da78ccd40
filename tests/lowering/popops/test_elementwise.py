"""Elementwise operations: layouts of results, folding, immediates, broadcasts."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.layout import memory_order
from ipujax.lowering.popops.maps.constants import immediate_of
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.vertices.kernel import Op
from ipujax.runtime.cost import compute_set_cost
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Builder
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Execute, Sequence
from ipujax.runtime.tensor.mapping import Flat, TileMapping, grid, on_one_tile, owners
from ipujax.runtime.tensor.tensor import Tensor
from tests.lowering.helpers import check as check_on, lowered, small_target

check = partial(check_on, tiles=(7,))  # the op table tries other sizes of target
ADD = Op("add", lax.add, np.dtype(np.float32))
SINE = Op("sin", lax.sin, np.dtype(np.float32))
RNG = np.random.default_rng(8)
X = RNG.normal(size=(13, 29)).astype(np.float32)


def variable(graph: Graph, shape: tuple[int, ...], mapping: TileMapping | None) -> Tensor:
    """Adds a variable of float32."""
    return graph.add_variable(shape, np.float32, "x", mapping)


def add_variables(
    *mapped: tuple[tuple[int, ...], TileMapping | None], tiles: int = 16
) -> tuple[Graph, Tensor, list[Tensor], Sequence]:
    """Adds variables of shapes and mappings, and their sum."""
    graph = Graph(small_target(tiles))
    prog = Sequence()
    tensors = [variable(graph, shape, mapping) for shape, mapping in mapped]
    return graph, elementwise(Builder(graph, prog, "add"), ADD, tensors), tensors, prog


def tiles_of(graph: Graph, tensor: Tensor) -> np.ndarray:
    """Tile of each element of a variable."""
    (variable,) = tensor.variables()
    return owners(graph.mappings[variable])


def executions(fun: Any, *args: Any, tiles: int = 7) -> list[str]:
    """Codelets that run, in order."""
    program = lowered(fun, args, small_target(tiles))
    sets = [node.compute_set for node in program.program.children() if isinstance(node, Execute)]
    return [group.codelet.name for compute_set in sets for group in program.graph.groups[compute_set]]


def test_result_follows_the_operand_spread_over_more_tiles() -> None:
    spread = grid((12, 8), (4, 4))
    single = on_one_tile(96, 3)
    for order in ((spread, single), (single, spread)):
        graph, out, _, _ = add_variables(*(((12, 8), mapping) for mapping in order))
        (variable,) = out.variables()
        assert graph.mappings[variable] is spread


def test_result_follows_the_first_of_equally_spread_operands() -> None:
    rows = grid((16, 16), (16, 1))
    columns = grid((16, 16), (1, 16))
    graph, out, _, _ = add_variables(((16, 16), rows), ((16, 16), columns))
    assert graph.mappings[out.variables()[0]] is rows


def test_maps_unmapped_operands_as_the_result() -> None:
    graph, out, tensors, _ = add_variables(((13, 29), None), ((13, 29), None))
    for tensor in tensors:
        np.testing.assert_array_equal(tiles_of(graph, out), tiles_of(graph, tensor))
    assert len(np.unique(tiles_of(graph, out))) > 4


def test_result_does_not_follow_a_repeated_operand() -> None:
    graph, out, _, _ = add_variables(((1, 29), on_one_tile(29, 5)), ((13, 29), grid((13, 29), (13, 1))))
    assert out.shape == (13, 29)
    assert len(np.unique(tiles_of(graph, out))) == 13


def test_spreads_an_outer_sum_over_tiles() -> None:
    graph, out, _, _ = add_variables(((40, 1), on_one_tile(40, 5)), ((1, 40), on_one_tile(40, 6)))
    assert out.shape == (40, 40)
    assert len(np.unique(tiles_of(graph, out))) == 16


def test_result_does_not_follow_many_pieces_on_each_tile() -> None:
    """A vertex a piece, one after the other: as of the state of a loop that starts as a transposed product."""
    fragmented = Flat(2048, np.arange(2048), np.arange(2048) % 128)
    graph, out, _, _ = add_variables(((2048,), fragmented), ((2048,), fragmented), tiles=1472)
    assert len(np.unique(tiles_of(graph, out))) == 64
    graph, out, _, _ = add_variables(((512,), Flat(512, np.arange(0, 512, 4), np.arange(128))), tiles=1472)
    assert len(np.unique(tiles_of(graph, out))) == 128


@pytest.mark.parametrize("shapes", [((3,), (4,)), ((3, 1), (3,)), ((2, 3), (3, 2))])
def test_refuses_different_shapes(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(GraphError, match="operands differ in shape"):
        add_variables(*((shape, None) for shape in shapes))


def test_constant_scalars_are_immediates() -> None:
    for fun in (lambda x: 2 * x, lambda x: 2 * x + 1):
        program = lowered(fun, (X,), small_target(7))
        ((group,),) = program.graph.groups.values()
        assert len(group.accesses) == 2


def test_distinguishes_immediates() -> None:
    check(lambda x: (x - 1, 1 - x, x - 2, 2 - x, x / 3, 3 / x, jnp.where(x > 0, 1.0, x)), X, rtol=3e-7)
    check(lambda n: (n + 1, n + 256, n - True), np.arange(70, dtype=np.int32))
    check(lambda x: (x * 0.0, x * -0.0, x + jnp.nan, x * jnp.inf), X)


def test_folds_operations_on_constants() -> None:
    assert executions(lambda x: x * jnp.exp(jnp.float32(2)) + jnp.full((13, 29), 3.0) * 2, X) == [
        "popops::Map<float32>(Mul, Add)"
    ]
    check(lambda x: x * jnp.exp(jnp.float32(2)) + jnp.full((13, 29), 3.0) * 2, X, rtol=1e-6, atol=1e-6)
    check(lambda x: (x, jnp.zeros((3, 4)) + 1, jnp.ones(()) * 2), X)


def test_folded_constants_keep_their_narrow_dtype() -> None:
    half = X.astype(jnp.bfloat16)
    check(lambda x: x + jnp.bfloat16(1.0009) * jnp.bfloat16(3), half, tiles=(7,), rtol=1e-2)
    check(lambda n: n + (jnp.uint8(250) + jnp.uint8(10)), np.arange(9, dtype=np.uint8), tiles=(1, 7))


def test_a_slice_of_a_constant_array_is_no_immediate() -> None:
    graph = Graph(small_target(4))
    table = graph.add_constant(np.arange(3, dtype=np.float32), "table")
    assert immediate_of(table[1:2]) is None
    assert immediate_of(graph.add_constant(np.float32(3), "three").broadcast_in_dim((2, 2), ())) == 3
    check(lambda x: x * np.arange(29, dtype=np.float32) + np.arange(13, dtype=np.float32)[3], X, rtol=3e-7, atol=1e-6)


def test_operand_twice_and_its_transpose() -> None:
    square = X[:, :13].copy()
    check(lambda x: (x * x, x + x.T, x[::-1] * x, x + x[:1]), square)


SHAPES = [((13, 1), (1, 29)), ((1, 1), (13, 29)), ((13, 1, 7), (1, 5, 7)), ((1, 0), (3, 0)), ((1,), (1,)), ((), (5, 3))]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_broadcasts_dimensions_of_size_1(shapes: tuple[tuple[int, ...], ...]) -> None:
    a, b = (RNG.normal(size=shape).astype(np.float32) for shape in shapes)
    check(lambda a, b: (a + b, jnp.maximum(b, a), jnp.where(a > b, a, b)), a, b)


def test_scalar_predicates_and_bounds_that_are_arguments() -> None:
    check(lambda p, x: lax.select_n(p, x, -x), np.bool_(True), X)
    check(lambda low, x: lax.clamp(low, x, low + 1), np.float32(-0.2), X)


def test_views_of_one_variable_and_of_several() -> None:
    check(lambda x, y: jnp.concatenate([x, y]) * 2 + jnp.concatenate([y, x]), X, X[::-1].copy())
    check(lambda x: (x[1:] - x[:-1], x[:, ::2] + 1, x.reshape(29, 13).T * x), X)


def test_removes_casts_to_the_same_dtype() -> None:
    assert executions(lambda x: lax.convert_element_type(x, np.float32) + 1, X) == ["popops::Add<float32>"]


def test_bitcasts_between_widths() -> None:
    check(lambda x: lax.bitcast_convert_type(x, np.uint8), X, tiles=(1, 7))
    check(lambda n: lax.bitcast_convert_type(n, np.int32), RNG.integers(0, 255, (5, 4)).astype(np.uint8), tiles=(1, 7))


def test_nan_signed_zero_and_overflow() -> None:
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e38, -1e-45, 3], np.float32)
    check(
        lambda x: (jnp.maximum(x, 0), jnp.sign(x), x * 1e10, 1 / x, x == x, jnp.signbit(x), x.astype(np.float16)),
        special,
    )
    check(
        lambda a, b: (lax.max(a, b), lax.min(a, b), lax.rem(a, b), lax.nextafter(a, b)), special, special[::-1].copy()
    )


def test_equal_operations_share_a_codelet() -> None:
    program = lowered(lambda x: jnp.sin(jnp.sin(x)), (X,), small_target(4))
    codelets = {id(group.codelet) for groups in program.graph.groups.values() for group in groups}
    assert len(codelets) == 1
    assert jax.eval_shape(jnp.sin, X).shape == (13, 29)


@pytest.mark.parametrize(
    ("fun", "codelets"),
    [
        (lambda x: x / 1.0, []),
        (lambda x: 1.0 * x, []),
        (lambda x: x * np.float32(1), []),
        (lambda x: x**1, []),
        (lambda x: 1.0 / x, ["popops::Div<float32>"]),
        (lambda x: x * 2.0, ["popops::Mul<float32>"]),
        (lambda x: x**2, ["popops::IntegerPow<float32>"]),
    ],
)
def test_removes_operations_without_effect(fun: Any, codelets: list[str]) -> None:
    """Special values are unchanged too: infinities, NaN, zeros with their signs."""
    x = np.concatenate([X[0], [np.inf, -np.inf, np.nan, 0.0, -0.0]]).astype(np.float32)
    assert executions(fun, x) == codelets
    check(fun, x, rtol=1e-6)


def test_results_keep_the_memory_order_of_a_transposed_operand() -> None:
    """Nothing is exchanged, also where the sum of two transposed matrices follows."""
    graph = Graph(small_target(16))
    prog = Sequence()
    x = variable(graph, (8, 12), grid((8, 12), (4, 4)))
    sine = elementwise(Builder(graph, prog, "sine"), SINE, [x.transpose((1, 0))])
    assert memory_order(sine).order == (1, 0) and sine.shape == (12, 8)
    total = elementwise(Builder(graph, prog, "total"), ADD, [sine, x.transpose((1, 0))])
    assert memory_order(total).order == (1, 0)
    costs = [compute_set_cost(graph, node.compute_set) for node in prog.children() if isinstance(node, Execute)]
    assert all(not cost.before.received_bytes.any() for cost in costs)
    check(lambda x: jnp.sin(x.T) + x.T, X, rtol=1e-6, atol=1e-6)
