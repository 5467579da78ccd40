"""Parts of a micro-batch: run one after the other they compute the jaxpr; the part of each equation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.ipus.placement import value_bytes
from ipujax.lowering.jax_compat import ClosedJaxpr, Literal, Var, jaxpr_as_fun
from ipujax.lowering.pipelining.partition import Partition, partition
from ipujax.lowering.pipelining.parts import stage_parts
from ipujax.lowering.pipelining.primitive import PipelineSpec
from ipujax.lowering.schedules import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from tests.ipujax.pipeline.pipeline_models import MODELS, WIDTH, WORDS, batch, parameters
from tests.lowering.helpers import passed


def traced(
    fun: Callable[..., Any], args: tuple[Any, ...], roles: Any, carries: Any = (), reduce: str = "sum"
) -> tuple[Any, Any]:
    """The jaxpr of one micro-batch, and a spec: `roles` by argument."""
    jaxpr = passed(fun, *args)
    leaves = tuple(role for role, arg in zip(roles, args, strict=True) for _ in jax.tree.leaves(arg))
    kinds: Any = (reduce,) * len(jaxpr.out_avals)
    return jaxpr, PipelineSpec("fun", 4, leaves, tuple(carries), kinds)


def evaluate(cut: Partition, args: Any, split: tuple[int, ...] = ()) -> list[Any]:
    """Runs the parts by themselves, with plain JAX."""
    body = cut.jaxpr.jaxpr
    env: dict[Var, Any] = dict(zip(body.invars, jax.tree.leaves(args), strict=True))
    env |= dict(zip(body.constvars, cut.jaxpr.consts, strict=True))

    def run(invars: Any, outvars: Any, eqns: Any) -> None:
        part = body.replace(
            constvars=[], invars=invars, outvars=outvars, eqns=eqns, debug_info=body.debug_info.with_unknown_names()
        )
        env.update(zip(outvars, jaxpr_as_fun(ClosedJaxpr(part, ()))(*(env[v] for v in invars)), strict=True))

    for eqn, _ in cut.shared:
        run([v for v in eqn.invars if not isinstance(v, Literal)], eqn.outvars, [eqn])
    for part in stage_parts(cut, split):
        run(part.jaxpr.invars, part.jaxpr.outvars, part.jaxpr.eqns)
    return [sum(term.val if isinstance(term, Literal) else env[term] for term in terms) for terms in cut.results]


ROLES = ("same", "key", "batch")


def training(name: str, stages: int) -> tuple[Any, Any, Any]:
    args = parameters(stages), jax.random.key(1), batch(4)
    return *traced(jax.value_and_grad(MODELS[name](stages)), args, ROLES), args


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_parts_compute_the_jaxpr(name: str, stages: int) -> None:
    jaxpr, spec, args = training(name, stages)
    cut = partition(jaxpr, spec)
    assert (cut.num_stages, cut.training) == (stages, True)
    expected = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(args))
    for split in ((), tuple(range(1, stages)), tuple(range(stages))):
        for got, expected_value in zip(evaluate(cut, args, split), expected, strict=True):
            np.testing.assert_allclose(got, expected_value, rtol=1e-6, atol=1e-7)


def test_inference_has_forward_parts_only() -> None:
    args = parameters(3), jax.random.key(1), batch(4)
    jaxpr, spec = traced(MODELS["tied"](3), args, ROLES)
    cut = partition(jaxpr, spec)
    assert not cut.training and [part.task for part in cut.parts] == [(s, FORWARD) for s in range(3)]
    np.testing.assert_allclose(evaluate(cut, args)[0], MODELS["tied"](3)(*args), rtol=1e-6)


def test_sends_values_to_neighbouring_stages_only() -> None:
    """Activations forwards, their gradients backwards: nothing else leaves a stage, and residuals stay in it."""
    jaxpr, spec, _ = training("mlp", 4)
    cut = partition(jaxpr, spec)
    parts = stage_parts(cut)
    inputs = {*jaxpr.jaxpr.invars, *(var for eqn, _ in cut.shared for var in eqn.outvars)}
    maker = {var: part.task for part in parts for var in part.jaxpr.outvars}
    arriving: dict[int, set[Any]] = {stage: set() for stage in range(4)}
    for part in parts:
        stage, kind = part.task
        arriving[stage] |= {(maker[v], v) for v in part.jaxpr.invars if v in maker and maker[v][0] != stage}
        stashed = sum(value_bytes(v.aval) for v in part.jaxpr.invars if v in maker and maker[v][0] == stage)
        assert stashed <= (0 if kind == FORWARD else 3 * 4 * 4 * WIDTH), part.task
        assert all(v in inputs or v in maker for v in part.jaxpr.invars)
    for stage, values in arriving.items():
        expected = [((stage - 1, FORWARD), (4, WIDTH))] if stage else []
        expected += [((stage + 1, BACKWARD), (4, WIDTH))] if stage < 3 else []
        assert sorted((task, v.aval.shape) for task, v in values) == expected


def test_accumulates_a_table_of_two_stages_in_each() -> None:
    jaxpr, spec, _ = training("tied", 3)
    cut = partition(jaxpr, spec)
    (terms,) = [t for t in cut.results if t[0].aval.shape == (WORDS, WIDTH)]
    maker = {var: part.task for part in stage_parts(cut) for var in part.jaxpr.outvars}
    assert sorted(maker[term] for term in terms) == [(0, BACKWARD), (2, BACKWARD)]
    assert all(len(t) == 1 for t in cut.results if t is not terms)


def test_splits_off_gradients_of_parameters() -> None:
    jaxpr, spec, _ = training("mlp", 3)
    parts = {part.task: part for part in stage_parts(partition(jaxpr, spec), (1, 2))}
    assert set(parts) == {(0, FORWARD), (1, FORWARD), (2, FORWARD), (0, BACKWARD)} | {
        (s, kind) for s in (1, 2) for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT)
    }
    for stage in (1, 2):
        products = {
            kind: sum(eqn.primitive.name == "dot_general" for eqn in parts[stage, kind].jaxpr.eqns)
            for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT)
        }
        assert products == {BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 1}


def test_computes_values_of_no_micro_batch_once() -> None:
    def fun(w: Any, x: Any) -> Any:
        doubled = w * 2
        with ipu.stage(0):
            h = x @ (doubled + jnp.tri(3))
        with ipu.stage(1):
            return h @ jnp.exp(w)

    jaxpr, spec = traced(fun, (jnp.ones((3, 3)), jnp.ones((2, 3))), ("same", "batch"))
    cut = partition(jaxpr, spec)
    stage_of_shared = {eqn.primitive.name: stage for eqn, stage in cut.shared}
    assert stage_of_shared["mul"] == 0 and stage_of_shared["exp"] == 1
    assert [[eqn.primitive.name for eqn in part.eqns] for part in cut.parts] == [["dot_general"]] * 2


def test_draws_numbers_of_a_state_for_each_micro_batch() -> None:
    def noisy(w: Any, x: Any) -> Any:
        with ipu.stage(0):
            h = x + jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), x.shape)
        with ipu.stage(1):
            return h @ w

    cut = partition(*traced(noisy, (jnp.ones((3, 3)), jnp.ones((2, 3))), ("same", "batch"), reduce="stack"))
    assert not cut.shared
    assert "rng_uniform" in [eqn.primitive.name for eqn in cut.parts[0].eqns]


def test_frozen_stages_have_no_backward_equations() -> None:
    def loss(trained: Any, params: Any, key: Any, rows: Any) -> Any:
        return MODELS["mlp"](3)(params | trained, key, rows)

    params = parameters(3)
    args = {"w2": params["w2"]}, params, jax.random.key(0), batch(4)
    cut = partition(*traced(jax.grad(loss), args, ("same", *ROLES)))
    assert [len(part.eqns) > 0 for part in cut.parts] == [True, True, True, True, False, False]


def test_assigns_state_to_the_stage_that_computes_it() -> None:
    def fun(w: Any, mean: Any, x: Any) -> Any:
        with ipu.stage(0):
            h = x @ w
        with ipu.stage(1):
            following = 0.9 * mean + 0.1 * h.mean(0)
            return jnp.sum((h - mean) ** 2), following

    args = jnp.ones((3, 3)), jnp.ones(3), jnp.ones((2, 3))
    cut = partition(*traced(fun, args, ("same", "carry", "batch"), [(1, 1)]))
    assert list(cut.carried.values()) == [1]
    for got, expected_value in zip(evaluate(cut, args), fun(*args), strict=True):
        np.testing.assert_allclose(got, expected_value, rtol=1e-6)


def spanning(w: Any, x: Any) -> Any:
    @jax.checkpoint
    def both(w: Any, x: Any) -> Any:
        with ipu.stage(0):
            x = jnp.sin(x @ w)
        with ipu.stage(1):
            return jnp.sin(x @ w)

    return jnp.sum(both(w, x))


def test_refuses_a_checkpoint_around_stages() -> None:
    args = jnp.ones((3, 3)), jnp.ones((2, 3))
    with pytest.raises(ipu.ArgumentError, match=r"checkpoint spans stages(.|\n)*checkpoint inside stages"):
        partition(*traced(jax.grad(spanning), args, ("same", "batch")))


def crossing(w: Any, mean: Any, x: Any) -> Any:
    with ipu.stage(0):
        h = (x - mean) @ w
    with ipu.stage(1):
        return jnp.sum(h), h.mean(0)


def test_refuses_state_that_crosses_stages() -> None:
    args = jnp.ones((3, 3)), jnp.ones(3), jnp.ones((2, 3))
    with pytest.raises(ipu.ArgumentError, match=r"state carried .* crosses stages") as caught:
        partition(*traced(crossing, args, ("same", "carry", "batch"), [(1, 1)]))
    assert "test_pipeline_partition.py" in str(caught.value) and "stage 1, used before it" in str(caught.value)


def test_computes_equal_masks_of_a_stage_once() -> None:
    """Each layer computes its own mask from constants alone."""

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for number, w in enumerate(ws):
            with ipu.stage(number // 2):
                scores = x @ w
                x = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, 0.0)
        with ipu.stage(1):
            return (x**2).sum()

    args = [np.eye(4, dtype=np.float32) + n for n in range(4)], np.arange(16, dtype=np.float32).reshape(4, 4)
    jaxpr, spec = traced(jax.value_and_grad(loss), args, ("same", "batch"))
    cut = partition(jaxpr, spec)
    compared = [stage for eqn, stage in cut.shared if eqn.primitive.name == "ge"]
    assert sorted(compared) == [0, 1]
    for got, expected_value in zip(evaluate(cut, args), jax.tree.leaves(jax.value_and_grad(loss)(*args)), strict=True):
        np.testing.assert_array_equal(got, expected_value)
