"""Layers with few examples are laid out as with a few more, and twice the batch is more work and takes no less time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipujax as ipu
from ipujax.lowering.poplin.few_examples import FEWEST_EXAMPLES
from ipujax.lowering.popops.elementwise import Op, elementwise
from ipujax.runtime.compile import compile
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.graph import Graph
from ipujax.runtime.mapping import Blocked, blocked_mapping, even_cuts
from ipujax.runtime.presets import preset
from ipujax.runtime.program import Sequence as ProgramSequence
from tests.lowering.helpers import assert_same, check, lowered, quick_jit, run_tiles, small_target
from tests.marks import slow_but

MK2 = preset("mk2")


def perceptron(params: Any, x: Any) -> Any:
    *hidden, (weights, bias) = params
    for w, b in hidden:
        x = jax.nn.relu(x @ w + b)
    return x @ weights + bias


def training_step(optimizer: optax.GradientTransformation) -> Any:
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(perceptron(params, x), y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def layers(sizes: Sequence[int], dtype: Any) -> Any:
    return [(jax.ShapeDtypeStruct(s, dtype), jax.ShapeDtypeStruct(s[1:], dtype)) for s in pairwise(sizes)]


def sgd(params: Any, x: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.125 * g, params, jax.grad(lambda p: jnp.sum(perceptron(p, x) ** 2))(params))


@pytest.mark.parametrize(
    ("sizes", "optimizer", "dtype"),
    [
        pytest.param((100, 64, 10), optax.rmsprop(1e-3), jnp.float32, marks=pytest.mark.slow),
        ((20, 50, 30, 5), optax.adam(1e-3), jnp.float32),
        pytest.param((13, 13), optax.adam(1e-3), jnp.float16, marks=pytest.mark.slow),
        pytest.param((784, 300, 100, 10), optax.adam(1e-3), jnp.float32, marks=pytest.mark.slow),
        pytest.param((512, 512, 10), optax.sgd(0.1, momentum=0.9), jnp.float32, marks=pytest.mark.slow),
    ],
    ids=["rmsprop", "adam", "adam in half", "wide", "momentum"],
)
def test_twice_a_small_batch_is_more_work_and_no_faster(
    sizes: Sequence[int], optimizer: optax.GradientTransformation, dtype: Any
) -> None:
    params = layers(sizes, dtype)
    state = jax.eval_shape(optimizer.init, params)
    run = ipu.jit(training_step(optimizer), device=ipu.IPUModel(), donate_argnums=(0, 1))

    def costs(batch: int) -> tuple[int, int]:
        x, y = jax.ShapeDtypeStruct((batch, sizes[0]), dtype), jax.ShapeDtypeStruct((batch,), jnp.int32)
        profile = run.lower(params, state, x, y).compile().profile
        return profile.total_worker_cycles, profile.cycles

    found = [costs(1 << n) for n in range(6)]
    for (work, cycles), (more_work, more_cycles) in pairwise(found):
        assert more_work > work and more_cycles >= cycles, found


@pytest.mark.parametrize("sizes", [(100, 64, 10), (20, 50, 30)], ids=str)
def test_weights_lie_alike_for_each_small_batch(sizes: Sequence[int]) -> None:
    params = layers(sizes, np.float32)

    def mappings(batch: int) -> list[Any]:
        program = lowered(sgd, (params, jax.ShapeDtypeStruct((batch, sizes[0]), np.float32)), MK2)
        weights = [v for v in program.graph.variables if v.name in ("arg0", "arg2")]
        assert [v.shape for v in weights] == list(pairwise(sizes))
        return [program.graph.mappings[v].elements_per_tile(MK2.num_tiles).tolist() for v in weights]

    alike = [mappings(batch) for batch in (1, 2, 3, 5, FEWEST_EXAMPLES)]
    assert all(found == alike[0] for found in alike)
    assert mappings(64 * FEWEST_EXAMPLES) != alike[0]  # it is not that there is only one way


def products(sizes: Sequence[int], batch: int) -> list[tuple[int, int]]:
    """Tiles and cycles of each product of a training step, in order."""
    program = lowered(sgd, (layers(sizes, np.float32), jax.ShapeDtypeStruct((batch, sizes[0]), np.float32)), MK2)
    executable = compile(program.graph, program.program)
    return [
        (int(np.count_nonzero(cost.vertices)), int(executable.steps[leaf].cycles.max()))
        for leaf, cost in executable.costs.items()
        if isinstance(cost, ComputeSetCost) and cost.compute_set.name.endswith("dot_general")
    ]


def test_backward_passes_take_as_many_tiles_for_each_small_batch() -> None:
    """Two examples had been given to twice as many tiles, one to each."""
    small, large = products((200, 40, 200), 2), products((200, 40, 200), FEWEST_EXAMPLES)
    assert len(small) == 5 and [tiles for tiles, _ in small] == [tiles for tiles, _ in large]


def test_inputs_of_small_batches_lie_in_blocks_too() -> None:
    """A block of two examples has 64 bytes: not worth a tile, but then vertices had to join its rows."""
    forward = [products((31, 20), batch)[0][1] for batch in (1, 2, 4)]
    assert forward == sorted(forward)


@pytest.mark.parametrize(("batch", "tiles"), slow_but([(2, 4)], [(b, t) for b in (1, 2, 3, 7) for t in (4, 7, 16)]))
def test_numbers(batch: int, tiles: int) -> None:
    key = jax.random.key(batch)
    params = [
        (jax.random.normal(key, (13, 21)), jnp.ones(21)),
        (jax.random.normal(key, (21, 5)), jnp.ones(5)),
    ]
    x = jax.random.normal(key, (batch, 13))
    check(sgd, params, x, tiles=[tiles], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.0005, 0.002])
def test_numbers_where_memory_is_short(share: float) -> None:
    """Plans in several steps, or over their bound, are made for the batch there is."""
    key = jax.random.key(0)
    params = [(jax.random.normal(key, (40, 60)), jnp.ones(60)), (jax.random.normal(key, (60, 3)), jnp.ones(3))]
    x = jax.random.normal(key, (2, 40))
    program = lowered(sgd, (params, x), small_target(7, available_memory_proportion=share))
    expected = jax.tree.leaves(quick_jit(sgd)(params, x))
    assert_same(run_tiles(program, (params, x)), expected, 1e-4, 1e-4, f"share {share}")  # gradients reach 100


def test_shreds_are_not_followed() -> None:
    """Of operands that take a vertex equally long, that on fewer tiles is followed; a faster layout is, if not torn."""
    graph = Graph(MK2)

    def on(tiles: int) -> Any:
        cuts = even_cuts(128, tiles)
        return graph.add_variable((128,), np.float32, f"on {tiles}", blocked_mapping((cuts,), np.arange(tiles)))

    def tiles_of(*operands: Any) -> int:
        out = elementwise(graph, Op("add", jax.lax.add, np.dtype(np.float32)), operands, ProgramSequence(), "sum")
        mapping = graph.mappings[out.variables()[0]]
        assert isinstance(mapping, Blocked)
        return int(np.unique(mapping.tile).size)

    shreds, few, crowd = on(128), on(16), on(1)
    assert tiles_of(shreds, few) == tiles_of(few, shreds) == 16
    assert tiles_of(crowd, few) == 16
    assert tiles_of(shreds, shreds) == 128
