"""Model parallelism, `ipu.stage` outside of a pipeline: numbers, mappings, values that cross, refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.ipus.placement import assign_stages
from ipujax.lowering.passes import PASSES
from ipujax.runtime.graph.program import Copy
from ipujax.runtime.graph.walks import distinct
from ipujax.runtime.tensor.mapping import owners
from tests.ipujax.pipeline.pipeline_models import MODELS, batch, no_stage, parameters
from tests.lowering.helpers import (
    assert_rounded_alike,
    assert_same,
    lowered,
    quick_jit,
    run_engine,
    run_tiles,
    small_target,
)

TILES = 5
ADAM = optax.adam(1e-2)


def system(ipus: int, tiles: int = TILES) -> ipu.IPUModel:
    return ipu.IPUModel(num_ipus=ipus, tiles_per_ipu=tiles)


def train(loss: Any, optimizer: Any = ADAM) -> Any:
    def step(params: Any, state: Any, key: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, key, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def arguments(stages: int, optimizer: Any = ADAM) -> tuple[Any, ...]:
    params = jax.tree.map(jnp.asarray, parameters(stages))
    return params, optimizer.init(params), jax.random.key(2), batch(4)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "stages"), [(name, stages) for name in MODELS for stages in (2, 4)])
def test_numbers_are_those_of_plain_jax(name: str, stages: int) -> None:
    """Of the engine, the literal engine and the tile interpreter."""
    args = arguments(stages)
    expected = jax.tree.leaves(quick_jit(train(MODELS[name](stages, no_stage)))(*args))
    program = lowered(train(MODELS[name](stages)), args, small_target(TILES, num_ipus=stages))
    assert_same(run_engine(program, args), expected, 1e-5, 1e-6, "engine")
    assert_same(run_engine(program, args, exact_splits=True), expected, 1e-4, 1e-5, "literal engine")
    if stages == 2:
        assert_same(run_tiles(program, args), expected, 1e-4, 1e-5, "interpreter")


@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_donated_state_is_that_of_plain_jax(name: str) -> None:
    """Of steps in a row; a parameter of `tied` is read on both IPUs."""
    expected, *rest = arguments(2, optax.adam(1e-2))
    plain = jax.jit(train(MODELS[name](2, no_stage)))
    fun = train(MODELS[name](2))
    step = ipu.jit(fun, device=system(2), donate_argnums=(0, 1))
    params, state = jax.tree.map(jnp.copy, (expected, rest[0]))
    held = rest[0]
    for _ in range(3):
        expected, held, value = plain(expected, held, *rest[1:])
        params, state, got = step(params, state, *rest[1:])
        np.testing.assert_allclose(got, value, rtol=1e-5)
    assert_same(jax.tree.leaves((params, state)), jax.tree.leaves((expected, held)), 1e-4, 1e-5, name)


def test_plain_jax_ignores_stages() -> None:
    args = arguments(3)
    got, expected = (jax.jit(train(MODELS["tied"](3, stage)))(*args) for stage in (ipu.stage, no_stage))
    assert_rounded_alike(got, expected)


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_one_stage_costs_as_much_as_none(donated: tuple[int, ...]) -> None:
    args = arguments(1)
    profiles = [
        ipu.jit(train(MODELS["mlp"](1, stage)), device=system(1), donate_argnums=donated).lower(*args).compile().profile
        for stage in (ipu.stage, no_stage)
    ]
    assert profiles[0].phase_cycles == profiles[1].phase_cycles
    np.testing.assert_array_equal(profiles[0].memory.tile_bytes, profiles[1].memory.tile_bytes)


# --- where things lie -------------------------------------------------------------------------------------------------


def ipus_of(lowered: ipu.Lowered, name: str) -> set[int]:
    """The IPUs that hold an argument."""
    (variable,) = [v for v in lowered.graph.variables if v.name == name]
    return set((owners(lowered.graph.mappings[variable]) // TILES).tolist())


def test_parameters_and_optimiser_state_are_on_the_ipu_of_their_stage() -> None:
    args = arguments(4)
    program = ipu.jit(train(MODELS["tied"](4)), device=system(4), donate_argnums=(0, 1)).lower(*args)
    for number in range(4):
        for name in (f"w{number}", f"b{number}"):
            for where in (f"params['{name}']", f"state[0].mu['{name}']", f"state[0].nu['{name}']"):
                assert ipus_of(program, where) == {number}, where
    for where in ("params['table']", "state[0].mu['table']", "batch['x']"):
        assert ipus_of(program, where) == {0}
    assert ipus_of(program, "batch['words']") == {0}


def test_only_activations_and_their_gradients_cross_between_ipus() -> None:
    args = arguments(3)
    program = ipu.jit(train(MODELS["mlp"](3), optax.sgd(0.1)), device=system(4)).lower(
        args[0], (optax.EmptyState(),) * 2, *args[2:]
    )
    tiles = {v: set((owners(m) // TILES).tolist()) for v, m in program.graph.mappings.items()}
    crossing = [
        node
        for node in distinct(program.program)
        if isinstance(node, Copy)
        if set.union(*(tiles[v] for v in node.source.variables())) != tiles[node.destination.variables()[0]]
    ]
    assert [node.source.size for node in crossing] == [4 * 6] * 4


def test_the_profile_shows_exchange_between_ipus_and_memory_by_ipu() -> None:
    args = arguments(2)
    compiled = ipu.jit(train(MODELS["mlp"](2)), device=system(4)).lower(*args).compile()
    assert compiled.profile.phase_cycles["global_exchange"] > 0
    by_ipu = compiled.profile.memory.tile_bytes.reshape(4, TILES).sum(1)
    assert min(by_ipu[:2]) > max(by_ipu[2:])


def test_stages_of_equations_without_one() -> None:
    """By the rules of `placement`, found by hand."""

    def fun(w: Any, v: Any, y: Any) -> Any:
        mask = jnp.sin(y) > 0  # 1, 1: used first in stage 1
        cast = w * 2  # 0: used in stage 0
        with ipu.stage(0):
            h = cast @ cast
        h = jnp.exp(h)  # 0: operand in stage 0
        with ipu.stage(1):
            h = h @ v * mask
        total = jnp.sum(h)  # 1
        # where most bytes are: 0, 1
        scaled_w = w * total
        scaled_v = v * total
        return scaled_w, scaled_v, jnp.cos(jnp.float32(3))  # used by nothing: 0

    w = jnp.ones((3, 3))
    jaxpr = jax.jit(fun).trace(w, w, w).jaxpr
    for _, run in PASSES:
        jaxpr = run(jaxpr)
    actual = dict(zip([eqn.primitive.name for eqn in jaxpr.jaxpr.eqns], assign_stages(jaxpr.jaxpr), strict=True))
    names = {"sin": 1, "gt": 1, "exp": 0, "reduce_sum": 1, "cos": 0}
    assert {name: actual[name] for name in names} == names
    pairs = zip(jaxpr.jaxpr.eqns, assign_stages(jaxpr.jaxpr), strict=True)
    products = [stage for eqn, stage in pairs if eqn.primitive.name == "mul"]
    assert products == [0, 1, 0, 1]


def test_results_of_sums_over_replicas_are_on_the_ipus_of_operands() -> None:
    def fun(x: jax.Array) -> Any:
        with ipu.stage(0):
            first = jnp.sin(x)
        with ipu.stage(1):
            second = jnp.cos(first)
        sums = lax.psum((first, second), "replica")
        return jnp.tanh(sums[0]), jnp.exp(sums[1])

    jaxpr = jax.make_jaxpr(fun, axis_env=[("replica", 2)])(jnp.ones((3, 3)))
    for _, run in PASSES:
        jaxpr = run(jaxpr)
    actual = dict(zip([eqn.primitive.name for eqn in jaxpr.jaxpr.eqns], assign_stages(jaxpr.jaxpr), strict=True))
    assert {name: actual[name] for name in ("tanh", "exp")} == {"tanh": 0, "exp": 1}


# --- bad input --------------------------------------------------------------------------------------------------------


def backwards(x: Any) -> Any:
    with ipu.stage(0):
        h = jnp.sin(x)
    with ipu.stage(1):
        h = jnp.tanh(h)
    h = h * 2
    with ipu.stage(0):
        return jnp.exp(h)


def in_a_loop(x: Any) -> Any:
    def body(h: Any, _: Any) -> Any:
        with ipu.stage(0):
            h = jnp.sin(h)
        with ipu.stage(1):
            return jnp.cos(h), None

    return lax.scan(body, x, None, 3)[0]


def in_a_stage(x: Any) -> Any:
    with ipu.stage(0):
        x = jnp.sin(x)
    with ipu.stage(1):
        return lax.cond(x[0] > 0, lambda x: jax.named_call(jnp.cos, name="ipu_stage_2")(x), jnp.sin, x)


BAD: dict[str, tuple[Any, int, str]] = {
    "backwards": (
        backwards,
        2,
        r"stage 1 flows back to stage 0\n.*\(backwards\)\n.*\n.*float32\[3\] that tanh makes at test_pipe.*by exp",
    ),
    "in a loop": (in_a_loop, 2, "a stage begins inside a scan"),
    "in a branch": (in_a_stage, 4, "a stage begins inside a cond"),
    "too few IPUs": (MODELS["mlp"](3), 2, "stage 2 has no IPU\n.*\n.*3 IPUs.*\n.*2 for each.*\n.*num_ipus=4"),
}


@pytest.mark.parametrize("name", BAD)
def test_stages_that_make_no_sense_are_refused(name: str) -> None:
    fun, ipus, match = BAD[name]
    args = (jnp.ones(3),) if name != "too few IPUs" else (parameters(3), jax.random.key(0), batch(4))
    with pytest.raises(ipu.ArgumentError, match=match):
        ipu.jit(fun, device=system(ipus))(*args)


@pytest.mark.parametrize("number", [-1, 1.5, True, "0", None, int, np.array([1, 2]), jnp.array([1, 2])])
def test_refuses_a_non_number_of_a_stage(number: Any) -> None:
    with pytest.raises(ipu.ArgumentError, match="needs the number of a stage"), ipu.stage(number):
        pass


def test_a_loop_in_one_stage_belongs_to_it() -> None:
    def fun(x: Any) -> Any:
        def body(h: Any, _: Any) -> Any:
            with ipu.stage(1):
                return jnp.cos(h), None

        with ipu.stage(0):
            x = jnp.sin(x)
        return lax.scan(body, x, None, 3)[0]

    x = jnp.linspace(0, 1, 7)
    np.testing.assert_allclose(ipu.jit(fun, device=system(2))(x), jax.jit(fun)(x), rtol=1e-6)
