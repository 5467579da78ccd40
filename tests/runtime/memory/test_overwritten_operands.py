"""Results that are written over operands: which variables share memory, the bytes that this saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.runtime.graph import Graph
from ipujax.runtime.interpreter.tile_memory import Actor, InterpreterError, TileMemory
from ipujax.runtime.memory.live import Occupancy
from tests.lowering.helpers import assert_same, run_tiles
from tests.runtime.helpers import SIZE, graph_of_variables

TILES = 4
ROWS, COLUMNS = 64, 16
ARRAY_BYTES = ROWS * COLUMNS * 4 // TILES  # of one array on each tile
X = np.linspace(-1, 1, ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
W = np.linspace(-0.5, 0.5, COLUMNS * COLUMNS, dtype=np.float32).reshape(COLUMNS, COLUMNS)


def occupancy_of(fun: Callable[..., Any], *args: Any) -> Occupancy:
    """The occupancy of a program that the tile interpreter has run."""
    device = ipu.IPUModel(tiles_per_ipu=TILES)
    compiled = ipu.jit(fun, device=device).lower(*args).compile()
    assert_same(run_tiles(compiled.lowered.planned.lowered, args), jax.tree.leaves(fun(*args)), 1e-4, 1e-5, "tiles")
    return compiled.memory_analysis().occupancy


def test_a_residual_sum_holds_its_two_operands_alone() -> None:
    def block(x: jax.Array) -> jax.Array:
        a = x @ W
        b = a @ W
        return jnp.tanh(a + b)

    occupancy = occupancy_of(block, X)
    variables = occupancy.peak(None).by_category["variable"].max()
    assert len(occupancy.frames.memory) == 1
    assert variables == 2 * ARRAY_BYTES  # the weights are constants


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: (jnp.exp(a := x @ W), a @ W),  # read again later
        lambda x: (a := x @ W)[::-1] + a,  # by two fields of a vertex
        lambda x: (x @ W).astype(jnp.float16) @ W.astype(jnp.float16),  # of other bytes
        lambda x: jnp.exp(x @ W).sum(1),  # a value that is not stored
    ],
    ids=["read later", "two fields", "narrower", "not stored"],
)
def test_an_operand_that_is_needed_is_kept(fun: Callable[..., Any]) -> None:
    assert not occupancy_of(fun, X).frames.memory


def test_loops_branches_and_calls_work_in_place() -> None:
    """The tile interpreter destroys what is written over, so that a read of it would be an error."""

    def body(_: jax.Array, state: Any) -> Any:
        x, y = state
        a = x @ W
        return jnp.sin(a) + y, lax.cond(y[0, 0] > 0, lambda y: jnp.tanh(y @ W), lambda y: jnp.cos(y), y) * a

    assert occupancy_of(lambda x: lax.fori_loop(0, 3, body, (x, x + 1)), X).frames.memory


def test_memory_that_is_written_over_may_not_be_read() -> None:
    graph: Graph
    graph, tensors = graph_of_variables()
    operand, result = (tensor.variables()[0] for tensor in tensors[:2])
    memory = TileMemory(graph, [operand, result])
    everywhere = np.arange(SIZE)
    home = memory.home(operand)
    memory.write(home, operand, everywhere, np.zeros(SIZE, operand.dtype))
    memory.share({result: operand})
    memory.write(home[:1], result, everywhere[:1], np.ones(1, result.dtype))
    assert memory.read(home[1:], operand, everywhere[1:], Actor("vertex")).tolist() == [0] * (SIZE - 1)
    with pytest.raises(InterpreterError, match="before any write"):
        memory.read(home, operand, everywhere, Actor("vertex"))
