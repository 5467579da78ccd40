"""A product is laid out with the elementwise operations in mind that follow on arrays of its result's shape."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipujax.lowering.followers import operations
from ipujax.lowering.jax_compat import Jaxpr, trace
from ipujax.lowering.passes import PASSES
from ipujax.lowering.poplin import matmul
from ipujax.lowering.poplin.following import Operation
from ipujax.lowering.roles import roles
from ipujax.runtime.compile import compile
from ipujax.runtime.graph import Graph
from ipujax.runtime.presets import preset
from ipujax.runtime.profile import Profile
from ipujax.runtime.program import Execute
from ipujax.runtime.program import Sequence as ProgramSequence
from tests.lowering.helpers import check, lowered

MK2 = preset("mk2")


def traced(fun: Any, *args: Any) -> Jaxpr:
    closed = trace(fun, args, {}, ()).jaxpr
    for _, run in PASSES:
        closed = run(closed)
    return closed.jaxpr


def struct(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def shares(fun: Any, *args: Any) -> list[list[str]]:
    """For each product the names of the operations that are its share."""
    jaxpr = traced(fun, *args)
    found = roles(jaxpr)
    return [
        [name for name, _, _ in found[id(eqn)].on_result] for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"
    ]


def two_layers(x: Any, v: Any, w: Any) -> Any:
    return jnp.exp(2 * (jnp.tanh(x @ v) @ w))


@pytest.mark.parametrize("hidden", [4, 5])
def test_what_follows_is_told_by_chains_of_elementwise_operations(hidden: int) -> None:
    """Not by the shape: with 4 hidden units all results have the same."""
    assert shares(two_layers, struct(3, 4), struct(4, hidden), struct(hidden, 4)) == [["tanh"], ["mul", "exp"]]


def residual(x: Any, v: Any, w: Any) -> Any:
    h = x @ v
    return h + jnp.tanh(h @ w)


def test_products_that_belong_together_share_what_follows_them() -> None:
    assert shares(residual, struct(3, 4), struct(4, 4), struct(4, 4)) == [["tanh"], ["tanh"]]
    assert shares(lambda *args: 2 * residual(*args), struct(3, 4), struct(4, 4), struct(4, 4)) == [["tanh", "mul"]] * 2


@pytest.mark.parametrize("batch", [4, 7])
def test_an_optimizer_does_not_follow_the_forward_pass(batch: int) -> None:
    """Not even where there are as many examples as inputs, so that results and weights have the same shape."""

    def step(w: Any, x: Any) -> Any:
        return w - 0.5 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    forward, _ = shares(step, struct(4, 5), struct(batch, 4))
    assert forward == ["tanh", "sub", "mul", "mul", "add_any"]  # the function and its gradient


def test_what_is_no_elementwise_operation_does_not_follow() -> None:
    (share,) = shares(lambda x, w: jnp.cumsum((x @ w).T.sum(0)), struct(3, 4), struct(4, 4))
    assert share == []


def test_operations_tell_arrays_from_what_is_read_for_all_of_their_elements() -> None:
    jaxpr = traced(lambda x, y: 2 * x + y, struct(3), struct(3))
    assert operations(jaxpr.eqns) == {(3,): [("mul", 1, 1), ("add", 2, 0)]}


def tiles(on_result: tuple[Operation, ...], m: int = 32) -> int:
    """On how many tiles a product [m, 2] by [2, 2] lies."""
    graph, prog = Graph(MK2), ProgramSequence()
    a, b = graph.add_variable((1, m, 2), np.float16, "a"), graph.add_variable((1, 2, 2), np.float16, "b")
    out = matmul(graph, a, b, prog, "dot", on_result=on_result)
    (variable,) = out.variables()
    return int(np.count_nonzero(graph.mappings[variable].elements_per_tile(MK2.num_tiles)))


def test_a_small_product_lies_on_more_tiles_for_many_operations() -> None:
    assert tiles(()) == 1
    assert tiles((("select_n", 3, 0),)) > 1
    assert tiles((("select_n", 3, 0),), m=16) == 1  # not worth it
    assert tiles((("select_n", 3, 0),) * 8, m=16) > 1


def starts(on_result: tuple[Operation, ...]) -> list[int]:
    """Where the blocks of a product [4, 64] by [64, 10] start that sums partial results."""
    graph = Graph(MK2)
    a, b = graph.add_variable((1, 4, 64), np.float32, "a"), graph.add_variable((1, 64, 10), np.float32, "b")
    (variable,) = matmul(graph, a, b, ProgramSequence(), "dot", on_result=on_result).variables()
    return graph.mappings[variable].runs()[0].tolist()


def test_rows_are_kept_together_for_what_follows_only() -> None:
    assert starts(()) == [0, 8, 16, 24, 32]
    assert starts((("exp", 1, 0),)) == [0, 10, 20, 30]


def test_so_it_is_for_a_product_in_several_steps() -> None:
    graph = Graph(MK2.replace(tiles_per_ipu=4))
    a, b = (graph.add_variable((1, 256, 256), np.float32, name) for name in "ab")
    prog = ProgramSequence()
    matmul(graph, a, b, prog, "dot", available_memory_proportion=0.05, on_result=(("exp", 1, 0),))
    assert len([node for node in prog.children() if isinstance(node, Execute)]) >= 8


def loss(params: Any, x: Any, labels: Any) -> Any:
    logits = x @ params[0] + params[1]
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]).sum()


def step(params: Any, x: Any, labels: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.125 * g, params, jax.grad(loss)(params, x, labels))


def cycles(batch: int) -> int:
    params = struct(3, 3, dtype=np.float16), struct(3, dtype=np.float16)
    args = params, struct(batch, 3, dtype=np.float16), struct(batch, dtype=np.int32)
    program = lowered(step, args, MK2)
    return Profile(compile(program.graph, program.program)).cycles


def test_a_loss_is_no_slower_for_half_the_batch() -> None:
    """32 examples lay on one tile, where the product was cheapest, and all of the loss took longer there."""
    found = [cycles(batch) for batch in (8, 16, 32, 64, 128)]
    assert found == sorted(found)


def test_numbers() -> None:
    rng = np.random.default_rng(0)
    params = rng.normal(size=(13, 5)).astype(np.float32), rng.normal(size=5).astype(np.float32)
    x, labels = rng.normal(size=(11, 13)).astype(np.float32), rng.integers(0, 5, 11).astype(np.int32)
    check(step, params, x, labels, tiles=(7,), rtol=1e-5, atol=1e-6)
