"""Plans: steps spread over IPUs compute the numbers of one IPU, by plain JAX; other steps are refused by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu
import ipujax.models
from ipujax.lowering.jax_compat import jaxpr_as_fun
from ipujax.models.workload import OPTIMIZERS
from ipujax.plan_search.accumulation import split_step
from ipujax.plan_search.search_plan import traced_step
from tests.ipujax.plan_search.steps import (
    ROWS,
    TILES,
    WIDTH,
    dense_arguments,
    dense_step,
    scanned_arguments,
    scanned_step,
    scores,
)

_LAYERS = {"[0]['layers']": P(None, None, "model")}
_TABLE = {"[0]['table']": P("model")}  # all shards have the tokens between layers
PLANS = (
    ipu.Plan(),
    ipu.Plan(micro_batches=4),
    ipu.Plan(data=2, micro_batches=4),
    ipu.Plan(stages=2, micro_batches=4, schedule="1f1b", cuts=(2,)),
    ipu.Plan(data=2, stages=2, micro_batches=4, shard_state=True, offload=(1,)),
    ipu.Plan(shards=2, micro_batches=2, specs=_LAYERS, recompute="auto"),
    ipu.Plan(data=2, shards=2, stages=2, micro_batches=2, specs=_LAYERS),
    ipu.Plan(shards=2, micro_batches=2, shard_stored=True, specs=_TABLE),
    ipu.Plan(data=2, shards=2, stages=2, micro_batches=2, shard_stored=True, specs=_TABLE),
    ipu.Plan(serial=4),
    ipu.Plan(data=2, shards=2, stages=2, micro_batches=2, serial=2, specs={**_LAYERS, **_TABLE}),
)


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_weights_are_those_of_one_ipu(plan: ipu.Plan, caplog: pytest.LogCaptureFixture) -> None:
    params, momentum, batch = scanned_arguments()
    device = ipu.IPUModel(plan.num_ipus, tiles_per_ipu=TILES)
    step = plan.jit(scanned_step, batch_argnums=2, device=device)
    got = want = params, momentum
    for _ in range(3):
        *got, got_loss = step(*got, batch)
        *want, want_loss = jax.jit(scanned_step)(*want, batch)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want[0]))
    for a, b in zip(jax.tree.leaves((got, got_loss)), jax.tree.leaves((want, want_loss)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * largest)
    assert "no effect" not in caplog.text


@pytest.mark.parametrize("name", ["vit-b16", "bert-base", "u-net", "gpt2", "llama-7b"])
def test_published_networks_without_batch_normalisation_have_micro_batches(name: str) -> None:
    sizes = {} if name == "u-net" else {"layers": 1}
    training = ipu.models.training(ipu.models.network(name, **sizes), 4, OPTIMIZERS["sgd"]())
    plan = ipu.Plan(micro_batches=2)
    assert plan.jit(training.fun, batch_argnums=training.batch_argnums, device=ipu.IPUModel(1)).trace(*training.args)


@pytest.mark.parametrize("plan", [ipu.Plan(micro_batches=4), ipu.Plan(stages=2, micro_batches=4)], ids=repr)
def test_inference_returns_rows_in_order(plan: ipu.Plan) -> None:
    weights, (x, _) = dense_arguments()
    got = plan.jit(scores, batch_argnums=1, device=ipu.IPUModel(2, tiles_per_ipu=TILES))(weights, x)
    np.testing.assert_allclose(got, scores(weights, x), atol=1e-5)


@pytest.mark.parametrize("plan", [ipu.Plan(micro_batches=4), ipu.Plan(data=2, micro_batches=2)], ids=repr)
def test_dropout_masks_belong_to_their_rows(plan: ipu.Plan) -> None:
    def step(w: Any, key: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0) @ w)

        return w - jax.grad(loss)(w)

    w, x = jnp.ones((WIDTH, 1)), jax.random.normal(jax.random.key(2), (ROWS, WIDTH))
    arguments = w, jax.random.key(3), x
    got = plan.jit(step, batch_argnums=2, device=ipu.IPUModel(2, tiles_per_ipu=TILES))(*arguments)
    np.testing.assert_allclose(got, step(*arguments), atol=1e-5)


def test_plan_is_code() -> None:
    plan = ipu.Plan(data=2, shards=2, schedule="1f1b", offload=(1,), specs=_LAYERS)
    specs = "{\"[0]['layers']\": P(None, None, 'model')}"
    code = f"ipu.Plan(data=2, shards=2, schedule='1f1b', offload=(1,), specs={specs})"
    assert repr(plan) == code
    assert eval(code, {"ipu": ipu, "P": P}) == plan


def test_one_accumulator_for_two_uses_of_a_table() -> None:
    traced = traced_step(scanned_step, scanned_arguments())
    split = split_step(traced.jaxpr, traced.is_of([2]), 4)
    shapes = sorted(aval.shape for aval in split.micro_batch.out_avals)
    assert shapes == sorted([(), (WIDTH,), (32, WIDTH), (4, WIDTH, WIDTH)])
    assert all(split.is_sum)


def _normalised(weights: Any, batch: Any) -> Any:
    """Batch statistics: a micro-batch needs the sum over all."""
    x, y = batch
    h = x @ weights[0]
    return weights, (((h - h.mean(0)) @ weights[1] - y) ** 2).mean()


def _by_valid_rows(weights: Any, batch: Any) -> Any:
    """The loss of all valid rows, whose number the gradient divides by."""
    x, y = batch
    loss = lambda w: ((x @ w - y) ** 2 * (y > 0)).sum() / (y > 0).sum()  # noqa: E731
    return [weights[0] - jax.grad(loss)(weights[0]), *weights[1:]], 0.0


def _sorted_rows(weights: Any, batch: Any) -> Any:
    """Rows in an order that depends on all of them."""
    x, y = batch
    return weights, ((jnp.sort(x, 0) @ weights[0] - y) ** 2).mean()


@pytest.mark.parametrize("step", [_normalised, _by_valid_rows, _sorted_rows], ids=lambda step: step.__name__)
def test_step_without_micro_batches_is_refused(step: Callable[..., Any]) -> None:
    traced = traced_step(step, dense_arguments())
    with pytest.raises(ipu.ArgumentError, match="has no micro-batches") as info:
        split_step(traced.jaxpr, traced.is_of([1]), 4)
    assert "test_plans.py" in str(info.value)


def test_batch_that_does_not_divide_names_the_nearest() -> None:
    step = ipu.Plan(micro_batches=5).jit(dense_step, batch_argnums=1, device=ipu.IPUModel(1))
    with pytest.raises(ipu.ArgumentError, match=f"{ROWS} rows") as info:
        step.lower(*dense_arguments())
    assert "micro_batches=4" in str(info.value)
    assert "20 rows" in str(info.value)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"micro_batches": 0}, "micro_batches of ipu.Plan"),
        ({"data": -1}, "data of ipu.Plan"),
        ({"stages": 2.0}, "stages of ipu.Plan"),
        ({"serial": True}, "serial of ipu.Plan"),
        ({"recompute": "some"}, "recompute of ipu.Plan"),
        ({"shards": 2, "specs": {"[0]['layers']": P("data")}}, "mesh axis 'model'"),
        ({"data": 2, "shard_stored": True}, "shard_stored of ipu.Plan has no effect on one shard"),
    ],
)
def test_plans_that_cannot_be(settings: Any, match: str) -> None:
    with pytest.raises(ipu.ArgumentError, match=match):
        ipu.Plan(**settings)


@pytest.mark.parametrize(
    ("plan", "batch", "match"),
    [
        (ipu.Plan(shards=2, specs={"[0]['layer']": P("model")}), 2, r"name no argument[^±]*'layers'"),
        (ipu.Plan(data=2), 3, "batch_argnums of ipu.Plan.jit"),
        (ipu.Plan(shards=2, shard_stored=True), 2, "shard_stored of ipu.Plan is for the micro-batches"),
    ],
)
def test_plans_of_other_arguments_are_refused(plan: ipu.Plan, batch: int, match: str) -> None:
    function = plan.jit(scanned_step, batch_argnums=batch, device=ipu.IPUModel(2, tiles_per_ipu=TILES))
    with pytest.raises(ipu.ArgumentError, match=match):
        function.lower(*scanned_arguments())


def test_cuts_of_another_function_are_refused() -> None:
    plan = ipu.Plan(stages=2, micro_batches=4, cuts=(10_000,))
    step = plan.jit(dense_step, batch_argnums=1, device=ipu.IPUModel(2, tiles_per_ipu=TILES))
    with pytest.raises(ipu.ArgumentError, match="cuts of ipu"):
        step.lower(*dense_arguments())


def test_gradients_of_a_loop_are_summed_over_devices_once() -> None:
    plan = ipu.Plan(data=2, micro_batches=8)
    step = plan.jit(scanned_step, batch_argnums=2, device=ipu.IPUModel(2, tiles_per_ipu=TILES))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), scanned_arguments())
    moves = step.lower(*shapes).compile().partitioning.notes.moves
    # Each gradient, and the loss, in one all-reduce of its bytes: none inside of the loop over layers.
    sizes = sorted(move.num_bytes for move in moves if move.step.kind == "all_reduce")
    assert sizes == sorted([4, 4 * WIDTH, 4 * 32 * WIDTH, 4 * 4 * WIDTH * WIDTH])


def test_gradients_in_half_precision_that_are_read_in_single_are_accumulated_in_it() -> None:
    def step(w: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)
        return w - (0.1 * grads.astype(jnp.float32)).astype(w.dtype)

    traced = traced_step(step, (jax.ShapeDtypeStruct((8, 8), jnp.float16), jax.ShapeDtypeStruct((4, 8), jnp.float16)))
    split = split_step(traced.jaxpr, (False, True), 2)
    assert [aval.dtype for aval in split.micro_batch.out_avals] == [jnp.float32]


def test_each_use_of_a_table_in_half_precision_is_a_term_of_its_own() -> None:
    """Stages that embed and predict accumulate each their gradient; neither is sent for each micro-batch."""

    def step(table: Any, ids: Any) -> Any:
        grads = jax.grad(lambda table: jnp.mean(jnp.tanh(table[ids] @ table.T)))(table)
        return table - (0.1 * grads.astype(jnp.float32)).astype(table.dtype)

    table, ids = np.linspace(-1, 1, 128, dtype=np.float16).reshape(8, 16), np.arange(4)
    split = split_step(traced_step(step, (table, ids)).jaxpr, (False, True), 2)
    body = split.micro_batch.jaxpr
    (gradient,) = body.outvars
    (addition,) = (eqn for eqn in body.eqns if gradient in eqn.outvars)
    assert addition.primitive.name == "add_any"
    assert [v.aval.dtype for v in addition.invars] == [jnp.float32] * 2
    micro_batch, update = (jax.jit(jaxpr_as_fun(part)) for part in (split.micro_batch, split.update))
    terms = [micro_batch(np.int32(n), table, ids[2 * n : 2 * n + 2])[0] for n in range(2)]
    (got,) = update(table, ids, terms[0] + terms[1])
    np.testing.assert_allclose(got, jax.jit(step)(table, ids), atol=2e-3)
