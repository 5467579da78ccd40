"""Collectives inside stages: bubbles against the closed form of the schedule, and the IPUs that each stops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu
from ipujax.runtime.graph import CrossReplicaCopy
from ipujax.runtime.report import Profile
from ipujax.runtime.timeline.clocks import SYNC
from tests.ipujax.pipeline.test_pipeline_figures import check

EXCHANGES = ("lockstep", "buffered")
MICRO_BATCHES = 8
WIDTH = 128
shape = jax.ShapeDtypeStruct


def weights_of(stages: int, width: int = WIDTH, dtype: Any = jnp.float16) -> list[Any]:
    return [(shape((width, width), dtype),) * 2] * stages


def sharded_profile(
    exchange: str, stages: int, shards: int, schedule: str = "1f1b", options: Any = None, replicas: int = 1
) -> Profile:
    """Two dense layers a stage, split over the IPUs of the stage as in Megatron, trained."""
    mesh = ipu.make_mesh((shards,), ("model",), axis_types=(AxisType.Auto,))

    def split(w: Any, spec: P) -> Any:
        return lax.with_sharding_constraint(w, NamedSharding(mesh, spec)) if shards > 1 else w

    def loss(weights: Any, x: Any) -> Any:
        for stage, (up, down) in enumerate(weights):
            with ipu.stage(stage):
                x = jnp.tanh(x @ split(up, P(None, "model"))) @ split(down, P("model"))
        with ipu.stage(stages - 1):
            return (x.astype(jnp.float32) ** 2).mean()

    def step(weights: Any, x: Any) -> Any:
        train = ipu.pipeline(jax.value_and_grad(loss), micro_batches=MICRO_BATCHES, schedule=schedule)
        result = train(weights, x)
        return lax.pmean(result, "replica") if replicas > 1 else result

    device = ipu.IPUModel(num_ipus=stages * shards * replicas, tiles_per_ipu=8, global_exchange=exchange)
    specs = {"replicas": replicas, "in_specs": (P(), P("replica")), "out_specs": P()} if replicas > 1 else {}
    jitted = ipu.jit(step, device=device, options=options or ipu.Options(), **specs)
    return jitted.profile(weights_of(stages), shape((replicas * MICRO_BATCHES * 64, WIDTH), jnp.float16))


SIZES = [*product(EXCHANGES, (2, 4, 8, 16))]


@pytest.mark.parametrize(("exchange", "stages"), SIZES)
def test_shards_of_a_stage_wait_as_long_as_one_ipu(exchange: str, stages: int) -> None:
    """The closed form of 1F1B: (S − 1) / (m + S − 1)."""
    one, two, four = (sharded_profile(exchange, stages, shards) for shards in (1, 2, 4))
    ideal = (stages - 1) / (MICRO_BATCHES + stages - 1)
    for several in (two, four):
        check(several)
        bubble = several.pipelines[0].bubble_share
        assert bubble <= one.pipelines[0].bubble_share + 0.03
        assert several.pipelines[0].ideal_share == pytest.approx(ideal, abs=0.01)
        assert exchange == "lockstep" or bubble == pytest.approx(ideal, abs=0.03)
        assert several.cycles < one.cycles


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    "settings", [{"options": ipu.Options(recompute="all")}, {"replicas": 2}, {"schedule": "gpipe"}]
)
def test_recomputed_layers_and_replicas_of_meshes_wait_no_longer(exchange: str, settings: Any) -> None:
    one, two = (sharded_profile(exchange, 4, shards, **settings) for shards in (1, 2))
    check(two)
    assert two.pipelines[0].bubble_share <= one.pipelines[0].bubble_share + 0.03 and two.cycles < one.cycles


# --- the IPUs of each collective --------------------------------------------------------------------------------------

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
INSIDE: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: lax.pmean(x, "replica"),
    "sum of groups": lambda x: lax.psum(x, "replica", axis_index_groups=[[0, 2], [1, 3]]),
    "sum of uneven groups": lambda x: lax.psum(x, "replica", axis_index_groups=[[0, 1, 2], [3]]),
    "gather": lambda x: lax.all_gather(x, "replica").mean(0),
    "exchange": lambda x: lax.all_to_all(x, "replica", 0, 0, tiled=True),
    "ring": lambda x: lax.ppermute(x, "replica", RING),
    "one pair": lambda x: x + lax.ppermute(x, "replica", RING[:1]),
    "loop": lambda x: lax.fori_loop(0, 3, lambda _, x: lax.pmean(x, "replica"), x),
    "branch": lambda x: lax.cond(lax.pmax(x.max(), "replica") > 0, lambda x: lax.pmean(x, "replica"), jnp.sin, x),
}


def replicated(inside: Callable[[Any], Any], exchange: str) -> Any:
    """Four replicas of two stages, with a function of the activations in each."""

    def loss(weights: Any, x: Any) -> Any:
        for stage, w in enumerate(weights):
            with ipu.stage(stage):
                x = jnp.tanh(inside(x @ w))
        with ipu.stage(1):
            return x.sum()

    def step(weights: Any, x: Any) -> Any:
        return lax.pmean(ipu.pipeline(loss, micro_batches=2)(weights, x), "replica")

    device = ipu.IPUModel(num_ipus=8, tiles_per_ipu=4, global_exchange=exchange)
    specs = {"in_specs": (P(), P("replica")), "out_specs": P()}
    return ipu.jit(step, device=device, replicas=4, **specs)


@pytest.mark.parametrize(("name", "exchange"), [*product(INSIDE, EXCHANGES)])
def test_a_collective_stops_only_its_stage(name: str, exchange: str) -> None:
    lowered = replicated(INSIDE[name], exchange).lower([shape((8, 8), jnp.float32)] * 2, shape((32, 8), jnp.float32))
    executable = lowered.compile().profile.executable
    copies = {node: step for node, step in executable.steps.items() if isinstance(node, CrossReplicaCopy)}
    assert {step.ipus for step in copies.values()} == {(0,), (1,)}
    for node, step in copies.items():
        tiles = {int(tile) // 4 for v in node.source.variables() for tile in executable.graph.mappings[v].tiles.flat}
        assert step.ipus == tuple(tiles) and step.barriers == (step.ipus,)
        assert np.flatnonzero(step.work.any(1)).tolist() == np.flatnonzero(step.work[:, SYNC]).tolist() == list(tiles)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_gradients_of_all_stages_are_summed_together_at_the_end(exchange: str) -> None:
    profile = sharded_profile(exchange, 2, 1, replicas=2)
    check(profile)
    copies = [s for node, s in profile.executable.steps.items() if isinstance(node, CrossReplicaCopy)]
    assert {step.ipus for step in copies} <= {(0, 1), (1,)} and (0, 1) in {step.ipus for step in copies}
    assert sum(profile.phase_cycles.values()) == profile.cycles


# --- stages without a pipeline, and phases ----------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [ipu.stage, ipu.phase])
def test_sums_of_different_parts_run_apart(scope: Any) -> None:
    """Sums that do not depend on each other, of two stages or phases: merged, a part would need a later one's value."""

    def loss(weights: Any, x: Any, y: Any) -> Any:
        with scope(0):
            h = jnp.tanh(x @ weights[0])
            h = h - lax.pmean(h.mean(), "replica")
        with scope(1):
            z = jnp.tanh(y @ weights[1])
            z = z - lax.pmean(z.mean(), "replica")
            return ((h - z) ** 2).mean()

    device = ipu.IPUModel(num_ipus=4 if scope is ipu.stage else 2, tiles_per_ipu=4)
    specs = {"in_specs": (P(), P("replica"), P("replica")), "out_specs": P()}
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=size).astype(np.float32) for size in ((2, 8, 8), (8, 8), (8, 8))]
    jitted = ipu.jit(lambda *args: lax.pmean(loss(*args), "replica"), device=device, replicas=2, **specs)
    halves = (v.reshape(2, 4, 8) for v in arrays[1:])
    expected = jax.vmap(loss, (None, 0, 0), axis_name="replica")(arrays[0], *halves).mean()
    np.testing.assert_allclose(jitted(*arrays), expected, rtol=1e-5)
    if scope is ipu.stage:
        steps = jitted.lower(*arrays).compile().profile.executable.steps
        assert {step.ipus for node, step in steps.items() if isinstance(node, CrossReplicaCopy)} == {(0,), (1,)}
