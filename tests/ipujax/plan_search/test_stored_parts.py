"""What loops store for their gradients, in parts on the shards of a plan: numbers, bytes, candidates, estimates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.plan_search.candidate_plans import Candidates, candidates
from ipujax.plan_search.estimates import StepCosts
from ipujax.plan_search.search_plan import traced_step
from tests.ipujax.plan_search.steps import ROWS, TILES, WIDTH, scanned_arguments, scanned_step

DEVICE = ipu.IPUModel(2, tiles_per_ipu=TILES)


def _two_products_step(layers: Any, x: Any) -> Any:
    """Checkpointed layers of two products each, by gradient descent."""

    def loss(layers: Any) -> Any:
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None))
        return jnp.mean(jax.lax.scan(layer, x, layers)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(layers)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads), value


def test_what_loops_store_is_split_over_shards() -> None:
    keys = jax.random.split(jax.random.key(4), 3)
    layers = {
        name: jax.random.normal(key, (4, WIDTH, WIDTH)) / 4 for name, key in zip(("up", "down"), keys[:2], strict=True)
    }
    x = jax.random.normal(keys[2], (ROWS, 4, WIDTH))
    # The split of Megatron-LM: between layers all shards have all of x.
    specs = {"[0]['up']": P(None, None, "model"), "[0]['down']": P(None, "model")}
    whole = ipu.Plan(shards=2, micro_batches=4, specs=specs)
    stored_bytes = []
    for plan in (whole, replace(whole, shard_stored=True)):
        step = plan.jit(_two_products_step, batch_argnums=1, device=DEVICE)
        rows = step.profile(layers, x).memory.breakdown.by("name", "role")
        stored_bytes.append(sum(row.mean_bytes for row in rows if "scan/stack" in row.name and "kept" in row.role))
    assert stored_bytes[1] * 2 == stored_bytes[0] > 0
    results = zip(jax.tree.leaves(step(layers, x)), jax.tree.leaves(_two_products_step(layers, x)), strict=True)
    for got, want in results:
        np.testing.assert_allclose(got, want, atol=1e-5)


def _uneven_step(w: Any, x: Any) -> Any:
    """Layers that store five numbers of a micro-batch of one row, which two shards do not divide."""

    def loss(w: Any) -> Any:
        return jax.lax.scan(lambda x, w: (jnp.sin(x) @ w @ w.T, None), x, w)[0].sum()

    return w - 0.1 * jax.grad(loss)(w)


def _flat_step(w: Any, x: Any) -> Any:
    """No loop."""
    return w - 0.1 * jax.grad(lambda w: jnp.sin(x @ w[0]).sum())(w)


@pytest.mark.parametrize("step", [_uneven_step, _flat_step])
def test_warns_where_no_loop_stores_what_shards_could_have_in_parts(
    step: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plan = ipu.Plan(shards=2, micro_batches=4, specs={"[0]": P(None, None, "model")}, shard_stored=True)
    plan.jit(step, batch_argnums=1, device=DEVICE).lower(jnp.ones((3, 5, 2)), jnp.ones((4, 5)))
    assert "shard_stored of ipu.Plan has no effect" in caplog.text


def _stored_plans() -> tuple[StepCosts, Candidates, ipu.Plan]:
    traced = traced_step(scanned_step, scanned_arguments())
    is_batch = traced.is_of((2,))
    space = candidates(traced, is_batch, DEVICE.target, {}, (0, 1))
    costs = StepCosts(traced, is_batch, DEVICE.target, stored_row_bytes=space.stored_row_bytes)
    plan = next(each for each in space.plans if (each.shards, each.micro_batches) == (2, 4))
    return costs, space, plan


def test_plans_of_less_memory_store_in_parts_what_loops_store_alone() -> None:
    _, space, plan = _stored_plans()
    assert space.stored_row_bytes == 4 * 4 * WIDTH * 4  # layers, tokens, width, bytes of a number
    smaller = list(space.smaller_plans(plan))
    recomputed = [each for each in smaller if each.recompute != "none"]
    assert {each.shard_stored for each in recomputed} == {False, True}
    assert space.smallest(plan).shard_stored
    assert {each.serial for each in smaller} == {4}  # of plans with one part, too
    assert not any(each.shard_stored for each in smaller if each not in recomputed)
    assert not any(each.shard_stored for each in space.smaller_plans(replace(plan, stages=2)))
    assert not any(each.shard_stored for each in replace(space, stored_row_bytes=0.0).smaller_plans(plan))
    assert not any(each.shard_stored for each in space.smaller_plans(ipu.Plan(micro_batches=4)))


def test_estimates_know_what_loops_store() -> None:
    costs, space, plan = _stored_plans()
    whole, parts = (
        costs.estimate(replace(plan, recompute="auto", shard_stored=shard_stored)) for shard_stored in (False, True)
    )
    stored_bytes = space.stored_row_bytes * ROWS / plan.micro_batches
    assert whole.tile_bytes - parts.tile_bytes == pytest.approx(stored_bytes / 2 / TILES)
    assert parts.cycles > whole.cycles
