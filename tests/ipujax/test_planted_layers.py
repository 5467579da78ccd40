"""Planted faults are named in the first screen, in text and page: layers, stages, micro-batches, tiles."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import nnx

import ipujax as ipu
from ipujax import poplar
from tests.ipujax.pipeline.pipeline_models import array

WIDTH = 32
LAYERS = 12
ROWS = 16
DEVICE = ipu.IPUModel(tiles_per_ipu=16)
X = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)


def first_screen_of_text(profile: ipu.Profile) -> str:
    """The title and the answers of a summary."""
    return "\n\n".join(profile.summary().split("\n\n")[:3])


def first_screen_of_page(profile: ipu.Profile, folder: Path) -> str:
    """Heading and cards of a page, as they are before its tables."""
    profile.to_html(folder / "page.html")
    page = (folder / "page.html").read_text(encoding="utf-8")
    return page[page.index("<header") : page.index('class="figures"')]


def check_named(profile: ipu.Profile, told: str, folder: Path) -> None:
    """Asserts that a text is in the first screen: of the summary, also that of a loaded profile, and of the page."""
    profile.save(folder / "saved")
    loaded = ipu.Profile.load(folder / "saved")
    displayed = first_screen_of_text(profile), first_screen_of_text(loaded), first_screen_of_page(profile, folder)
    for screen in displayed:
        assert told in screen, screen


# --- a slow layer among twelve equal ones that one line makes ---------------------------------------------------------


def trained(loss: Callable[..., jax.Array], params: Any) -> ipu.Profile:
    """The profile of a step of gradient descent."""

    def step(params: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return ipu.jit(step, device=DEVICE).profile(params, X)


class LinenBlock(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(self.hidden)(x)))


class LinenModel(nn.Module):
    hidden: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for hidden in self.hidden:
            x = LinenBlock(hidden)(x)
        return x


def linen(hidden: tuple[int, ...]) -> ipu.Profile:
    model = LinenModel(hidden)
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    return trained(lambda params, x: jnp.mean(model.apply(params, x) ** 2), params)


class NnxBlock(nnx.Module):
    def __init__(self, hidden: int, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.up(x)))


class NnxModel(nnx.Module):
    def __init__(self, hidden: tuple[int, ...]) -> None:
        self.blocks = nnx.List([NnxBlock(n, nnx.Rngs(0)) for n in hidden])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def of_nnx(hidden: tuple[int, ...]) -> ipu.Profile:
    graph, params = nnx.split(NnxModel(hidden))
    return trained(lambda params, x: jnp.mean(nnx.merge(graph, params)(x) ** 2), params)


class EquinoxBlock(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, hidden: int) -> None:
        key = jax.random.key(0)
        self.up = eqx.nn.Linear(WIDTH, hidden, key=key)
        self.down = eqx.nn.Linear(hidden, WIDTH, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.relu(self.up(x)))


class EquinoxModel(eqx.Module):
    blocks: list[EquinoxBlock]

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def equinox(hidden: tuple[int, ...]) -> ipu.Profile:
    arrays, static = eqx.partition(EquinoxModel([EquinoxBlock(n) for n in hidden]), eqx.is_array)

    def loss(arrays: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(eqx.combine(arrays, static))(x) ** 2)

    return trained(loss, arrays)


class KerasBlock(keras.layers.Layer):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = keras.layers.Dense(hidden, activation="relu")
        self.down = keras.layers.Dense(WIDTH)

    def build(self, shape: tuple[int, ...]) -> None:
        self.up.build(shape)
        self.down.build((*shape[:-1], self.up.units))

    def call(self, x: Any) -> Any:
        return x + self.down(self.up(x))


def of_keras(hidden: tuple[int, ...]) -> ipu.Profile:
    keras.backend.clear_session()  # numbers of names begin at 0
    x = inputs = keras.Input((WIDTH,))
    for n in hidden:
        x = KerasBlock(n)(x)
    model = keras.Model(inputs, x)
    fixed = [variable.value for variable in model.non_trainable_variables]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.stateless_call(params, fixed, x)[0] ** 2)

    return trained(loss, [variable.value for variable in model.trainable_variables])


# The names of blocks: flax.linen and Keras number those of a class, others have the numbers of calls.
FRAMEWORKS: dict[str, tuple[Callable[[tuple[int, ...]], ipu.Profile], Callable[[int], str]]] = {
    "flax.linen": (linen, lambda n: f"LinenBlock_{n}"),
    "flax.nnx": (of_nnx, lambda n: f"NnxBlock[{n}]"),
    "equinox": (equinox, lambda n: f"EquinoxBlock[{n}]"),
    "keras": (of_keras, lambda n: f"keras_block_{n}" if n else "keras_block"),
}


CASES = [
    *(("flax.linen", 7), ("flax.nnx", 0), ("equinox", 4), ("keras", 0)),
    *(("flax.linen", 0), ("flax.nnx", 11), ("equinox", 0), ("keras", 7)),
]


@pytest.mark.parametrize(("framework", "slow"), CASES)
def test_the_slow_block_of_twelve_is_named(framework: str, slow: int, tmp_path: Path) -> None:
    make, name = FRAMEWORKS[framework]
    profile = make(tuple(32 * WIDTH if n == slow else WIDTH for n in range(LAYERS)))
    names = {part for row in profile.layers for part in row.layer.split("/")}
    assert names >= {name(n) for n in range(LAYERS)}  # layers of one line are rows of their own
    screen = first_screen_of_text(profile)
    actual = re.search(r"(\S+) takes [\d.]+ times the median of the \d+ layers of its kind", screen)
    assert actual is not None and name(slow) in actual[1].split("/"), screen  # the block, or its layer that is why
    check_named(profile, actual[0], tmp_path)


# --- scopes inside the bodies of equal control ------------------------------------------------------------------------


def chosen(layer: Callable[..., jax.Array], x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, lambda x: layer(x, w), lambda x: x * 1.0, x)


def switched(layer: Callable[..., jax.Array], x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.switch(jnp.int32(x.sum() > 0), [lambda x: layer(x, w), lambda x: x * 1.0], x)


def repeated_in_branch(layer: Callable[..., jax.Array], x: jax.Array, w: jax.Array) -> jax.Array:
    return chosen(lambda x, w: jax.lax.fori_loop(0, 3, lambda _, x: layer(x, w), x), x, w)


@pytest.mark.parametrize("run", [chosen, switched, repeated_in_branch])
def test_scopes_inside_equal_control_keep_their_names(run: Callable[..., jax.Array]) -> None:
    """The branches differ in the names of their scopes alone, so they are one function of the device."""

    def model(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for n, w in enumerate(weights):

            def layer(x: jax.Array, w: jax.Array, scope: str = f"layer_{n}") -> jax.Array:
                with jax.named_scope(scope):
                    return jnp.tanh(x @ w)

            x = run(layer, x, w)
        return x

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)] * 4
    cycles = {f"layer_{n}": 0 for n in range(4)}
    for row in ipu.jit(model, device=DEVICE).profile(weights, X).layers:
        for name in set(row.layer.split("/")) & cycles.keys():
            cycles[name] += row.cycles
    assert len(set(cycles.values())) == 1 and min(cycles.values()) > 0, cycles


# --- a slow stage of four ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slow", "schedule", "exchange"), [(0, "gpipe", "lockstep"), (3, "1f1b", "buffered")])
def test_the_slow_stage_of_four_is_named(slow: int, schedule: str, exchange: str, tmp_path: Path) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for stage, weights in enumerate(params):
            with ipu.stage(stage):
                for w in weights:
                    x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    fun = ipu.pipeline(jax.value_and_grad(loss), micro_batches=8, schedule=schedule)
    device = ipu.IPUModel(num_ipus=4, tiles_per_ipu=4, global_exchange=exchange)
    params = [[array(16, 16)] * (6 if stage == slow else 1) for stage in range(4)]
    profile = ipu.jit(fun, device=device).profile(params, array(32, 16))
    check_named(profile, f"Stage {slow} (IPU {slow}) limits", tmp_path)


# --- a micro-batch whose loop runs longer -----------------------------------------------------------------------------


@pytest.mark.parametrize(("slow", "stage"), [(0, 0), (6, 1)])
def test_the_micro_batch_whose_loop_runs_longer_is_named(slow: int, stage: int, tmp_path: Path) -> None:
    def solve(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: jnp.abs(x @ w), x)

    def model(w: jax.Array, x: jax.Array) -> jax.Array:
        for number in range(2):
            with ipu.stage(number):
                x = solve(w, x) if number == stage else 1.01 * x
        return jnp.sum(x)

    x = np.full((8, 2, 8), 1.5, np.float32)
    x[slow] = 2.0**20
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=4)
    run = ipu.jit(ipu.pipeline(model, micro_batches=8, schedule="gpipe"), device=device)
    args = 0.5 * np.eye(8, dtype=np.float32), x.reshape(16, 8)
    _, profile = run.lower(*args).compile().profile_call(*args)
    check_named(profile, f"In stage {stage}, forward of micro-batch {slow} takes", tmp_path)


# --- a full tile ------------------------------------------------------------------------------------------------------


def test_the_operation_and_the_argument_that_fill_a_tile_are_named(tmp_path: Path) -> None:
    def step(planted: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.linalg.svd(planted)[1] * jnp.sum(x)  # runs on one tile

    profile = ipu.jit(step, device=DEVICE).profile(jax.ShapeDtypeStruct((160, 160), np.float32), X)
    check_named(profile, f"Tile {profile.memory.worst_tile}, with", tmp_path)
    screen = first_screen_of_text(profile)
    assert "svd> (buffers of operations)" in screen and "Variable(planted: float32[160, 160]) (arguments)" in screen


@pytest.mark.parametrize("tile", [3, 11])
def test_the_variable_on_one_tile_of_a_poplar_program_is_named(tile: int, tmp_path: Path) -> None:
    graph = poplar.Graph(poplar.IPUModel(tiles_per_ipu=16).create_device().target)
    planted = graph.add_variable(poplar.FLOAT, [60_000], "planted")
    graph.set_tile_mapping(planted, tile)
    small = [graph.add_variable(poplar.FLOAT, [64], f"small{n}") for n in range(16)]
    for number, variable in enumerate(small):
        graph.set_tile_mapping(variable, number)
    program = poplar.program.Sequence(*(poplar.program.Copy(a, b) for a, b in pairwise(small)))
    program.add(poplar.program.Copy(planted[0:64], small[0]))
    profile = poplar.Engine(graph, program).profile
    text = profile.summary()
    assert re.search(rf"Fullest tile: +{tile}, ", text)
    assert re.search(r"Largest on it: .*Variable\(planted: float32\[60000\]\)", text)
    page = first_screen_of_page(profile, tmp_path)
    assert f"Tile {tile}, with" in page and "Variable(planted" in page
