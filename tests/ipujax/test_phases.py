"""`ipu.phase`: the numbers of plain JAX, phases within memory, turns on two IPUs, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipujax as ipu
from ipujax.runtime.graph import RemoteIn, RemoteOut, distinct

LAYERS = 6
WIDTH = 64
ROWS = 16
TILES = 4
ADAM = optax.adam(1e-2)

Step = Callable[..., Any]


def parameters(width: int = WIDTH, layers: int = LAYERS) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(width, width)) / 8, jnp.float32) for _ in range(layers)]


def rows(seed: int, width: int = WIDTH) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(ROWS, width)), jnp.float32)


def forward(ws: list[jax.Array], x: jax.Array, of_phase: int = 2) -> jax.Array:
    for number, w in enumerate(ws):
        with ipu.phase(number // of_phase):
            x = x + jnp.tanh(x @ w)
    return x


def trained(of_phase: int = 2, around: Callable[[Any], Any] = lambda fun: fun) -> Step:
    def loss(ws: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((around(forward)(ws, x, of_phase) - y) ** 2)

    def step(ws: list[jax.Array], state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(ws, x, y)
        updates, state = ADAM.update(grads, state, ws)
        return optax.apply_updates(ws, updates), state, value

    return step


def compiled(step: Step, *args: Any, recompute: str = "none", **changes: Any) -> ipu.Compiled:
    device = ipu.IPUModel(**{"tiles_per_ipu": TILES, **changes})
    options = ipu.Options(recompute=recompute)
    donated = (0, 1) if len(args) == 4 else ()
    return ipu.jit(step, device=device, options=options, donate_argnums=donated).lower(*args).compile()


def check_numbers(step: Step, done: ipu.Compiled, calls: int = 3) -> None:
    ws = parameters()
    x = rows(1)
    y = rows(2)
    own = (ws, ADAM.init(ws))
    theirs = (ws, ADAM.init(ws))
    for _ in range(calls):
        *own, value = done(*jax.tree.map(jnp.copy, own), x, y)
        *theirs, expected = jax.jit(step)(*theirs, x, y)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), own, theirs)


@pytest.mark.parametrize(("of_phase", "num_ipus"), [*product((1, 2, 3), (1, 2))])
def test_training_has_the_numbers_of_plain_jax(of_phase: int, num_ipus: int) -> None:
    step = trained(of_phase)
    args = parameters(), ADAM.init(parameters()), rows(1), rows(2)
    check_numbers(step, compiled(step, *args, num_ipus=num_ipus))


def test_inference_and_checkpoints() -> None:
    ws = parameters()
    x = rows(1)
    np.testing.assert_allclose(compiled(forward, ws, x)(ws, x), forward(ws, x), rtol=1e-4, atol=1e-5)
    step = trained(2, lambda fun: jax.checkpoint(fun, static_argnums=2))
    check_numbers(step, compiled(step, ws, ADAM.init(ws), x, rows(2)), calls=1)


def test_the_jaxpr_has_the_same_numbers() -> None:
    ws = parameters()
    x = rows(1)
    y = rows(2)
    step = trained()
    lowered = ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=TILES), donate_argnums=(0, 1)).lower(
        ws, ADAM.init(ws), x, y
    )
    leaves = jax.tree.leaves((ws, ADAM.init(ws), x, y))
    got = jax.jit(lambda *xs: jax.core.eval_jaxpr(lowered.jaxpr.jaxpr, lowered.jaxpr.consts, *xs))(*leaves)
    want = jax.tree.leaves(jax.jit(step)(ws, ADAM.init(ws), x, y))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_model_three_times_the_memory_of_the_chip_fits() -> None:
    ws = parameters(256, 12)
    args = ws, ADAM.init(ws), rows(1, 256), rows(2, 256)
    size = sum(x.nbytes for x in jax.tree.leaves(args[:2]))
    room = size // 3 // TILES // 8 * 8  # bytes of a tile
    done = compiled(trained(1), *args, bytes_per_tile=room, interleaved_offset_bytes=100_000)
    assert size >= 3 * done.profile.target.total_memory_bytes
    assert done.profile.memory.max_tile_bytes <= room
    assert done.profile.streaming_memory_bytes >= size - 100  # what is spilled is there too


def test_weights_come_again_for_the_gradient_and_activations_leave() -> None:
    args = parameters(), ADAM.init(parameters()), rows(1), rows(2)
    nodes = list(distinct(compiled(trained(1), *args).executable.program))
    loads, stores = ([node.buffer.name for node in nodes if isinstance(node, kind)] for kind in (RemoteIn, RemoteOut))
    assert loads.count("ws[1]") == 3  # forward, gradient, update
    assert stores.count("ws[1]") == 1
    spilled = {name for name in stores if "remote_put" in name}
    assert len(spilled) >= LAYERS - 1


def test_two_ipus_alternate_and_load_meanwhile() -> None:
    args = parameters(), ADAM.init(parameters()), rows(1), rows(2)
    link = {"host_latency_seconds": 0, "streaming_bytes_per_second": 1e9}
    one, two = (compiled(trained(1), *args, num_ipus=count, **link).profile for count in (1, 2))
    assert two.cycles < 0.8 * one.cycles
    loading = np.asarray(two.timeline.work[:, 3])
    assert loading.min() > 0.3 * loading.sum()


# --- recomputation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "num_ipus"), [*product(("all", "standard", "auto"), (1, 2))])
def test_recomputed_phases_have_the_numbers_of_plain_jax(mode: str, num_ipus: int) -> None:
    step = trained(2)
    args = (parameters(), ADAM.init(parameters()), rows(1), rows(2))
    check_numbers(step, compiled(step, *args, num_ipus=num_ipus, recompute=mode), calls=1)


def test_recomputation_in_a_checkpoint() -> None:
    step = trained(2, lambda fun: jax.checkpoint(fun, static_argnums=2))
    args = parameters(), ADAM.init(parameters()), rows(1), rows(2)
    check_numbers(step, compiled(step, *args, recompute="all"), calls=1)


def test_with_all_computed_again_many_phases_take_less_memory() -> None:
    ws = parameters(layers=9)
    x = jnp.zeros((256, WIDTH))
    none, every = (compiled(trained(1), ws, ADAM.init(ws), x, x, recompute=mode) for mode in ("none", "all"))
    assert every.profile.memory.max_tile_bytes < 0.9 * none.profile.memory.max_tile_bytes


# --- which steps there are --------------------------------------------------------------------------------------------


def numbered(numbers: tuple[int, ...]) -> Step:
    """A loss of one layer in each phase."""

    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for number, w in zip(numbers, ws, strict=True):
            with ipu.phase(number):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return loss


def without_gradient(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    """The second phase has none."""
    with ipu.phase(0):
        x = jnp.tanh(x @ ws[0])
    with ipu.phase(1):
        mask = jax.lax.stop_gradient(jax.nn.sigmoid(x @ ws[1]))
    with ipu.phase(2):
        return jnp.mean(jnp.tanh((x * mask) @ ws[2]) ** 2)


def only_viewing(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    """The second phase computes nothing."""
    with ipu.phase(0):
        x = jnp.tanh(x @ ws[0])
    with ipu.phase(1):
        x = x.T.reshape(x.shape)
    with ipu.phase(2):
        return jnp.mean(jnp.tanh(x @ ws[1]) ** 2 @ ws[2])


@pytest.mark.parametrize("num_ipus", [1, 2, 4])
@pytest.mark.parametrize("loss", [without_gradient, only_viewing, numbered((1, 4, 6))], ids=["one", "views", "gaps"])
def test_phases_may_be_without_a_gradient_or_leave_numbers_out(loss: Step, num_ipus: int) -> None:
    ws = parameters(layers=3)
    x = rows(1)
    step = jax.value_and_grad(loss)
    done = compiled(step, ws, x, num_ipus=num_ipus)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), done(ws, x), step(ws, x))


@pytest.mark.parametrize("num_ipus", [1, 2])
def test_only_the_order_of_numbers_counts(num_ipus: int) -> None:
    ws = parameters(layers=4)
    x = rows(1)
    both = [jax.value_and_grad(numbered(numbers)) for numbers in ((0, 1, 2, 3), (1, 4, 6, 7))]
    near, far = (compiled(step, ws, x, num_ipus=num_ipus).profile for step in both)
    assert far.cycles == near.cycles
    assert far.memory.max_tile_bytes == near.memory.max_tile_bytes
    assert far.streaming_memory_bytes == near.streaming_memory_bytes


def test_phases_that_only_view() -> None:
    def fun(x: jax.Array) -> jax.Array:
        with ipu.phase(1):
            return x.T

    np.testing.assert_array_equal(compiled(fun, rows(1), num_ipus=2)(rows(1)), rows(1).T)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_value_of_a_later_phase_is_refused() -> None:
    def fun(x: jax.Array) -> jax.Array:
        with ipu.phase(1):
            x = jnp.sin(x)
        with ipu.phase(0):
            return jnp.cos(x)

    with pytest.raises(ipu.ArgumentError, match=r"phase 0 uses a value of phase 1(.|\n)*test_phases.py"):
        compiled(fun, rows(0))


def test_phases_after_an_update_are_refused() -> None:
    loss = numbered((0, 1, 2))

    def fun(ws: list[jax.Array], x: jax.Array) -> Any:
        ws = jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))
        return ws, loss(ws, x)

    words = r"phase 0 uses a result of a gradient or an update, which runs after all phases(.|\n)*call of its own"
    with pytest.raises(ipu.ArgumentError, match=words):
        compiled(fun, parameters(layers=3), rows(0))


def test_a_phase_inside_a_loop_is_refused() -> None:
    def fun(x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            with ipu.phase(1):
                return jnp.sin(x), None

        return jax.lax.scan(body, x, None, 3)[0]

    with pytest.raises(ipu.ArgumentError, match=r"phase 1 begins inside a scan(.|\n)*try: write the loop"):
        compiled(fun, rows(0))


@pytest.mark.parametrize("stages", [None, 2])
def test_a_phase_inside_a_pipeline_is_refused(stages: int | None) -> None:
    step = ipu.pipeline(jax.value_and_grad(numbered((0, 1, 2))), micro_batches=2, stages=stages)
    with pytest.raises(
        ipu.ArgumentError, match=r"phase \d begins inside ipu\.pipeline(.|\n)*try: leave out ipu\.pipeline"
    ):
        compiled(step, parameters(layers=3), rows(0), num_ipus=2)


def test_a_pipeline_inside_a_phase() -> None:
    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) ** 2)

    def step(ws: list[jax.Array], x: jax.Array) -> Any:
        with ipu.phase(0):
            x = jnp.sin(x)
        with ipu.phase(1):
            return ipu.pipeline(jax.value_and_grad(loss), micro_batches=2)(ws, x)

    ws = parameters(layers=2)
    x = rows(1)
    expected = jax.value_and_grad(loss)(ws, jnp.sin(x))
    got = compiled(step, ws, x)(ws, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, expected)


@pytest.mark.parametrize("number", [-1, 1.5, "0", None, True])
def test_numbers_of_phases_are_whole(number: Any) -> None:
    with pytest.raises(ipu.ArgumentError, match=r"ipu\.phase"), ipu.phase(number):
        pass
