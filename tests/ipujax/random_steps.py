"""Random training steps by seed: stages, schedules, accumulation in loops, optimisers, precisions, shared weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ipujax as ipu

OPTIMISERS: Mapping[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(optax.linear_schedule(0.1, 0.01, 100), momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.01)),
    "lion": lambda: optax.lion(1e-4),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=16),
}


@dataclass(frozen=True)
class Step:
    """A training step with gradients of several micro-batches.

    Args:
        stages: number of stages, one an IPU; 1 for accumulation without stages.
        schedule: of the pipeline; "scan" for a loop of the user's.
        micro_batches: their number.
        layers: of each stage.
        width: of each layer.
        rows: of a micro-batch.
        optimiser: one of `OPTIMISERS`.
        is_half: the forward pass is in half precision, weights are cast outside of it.
        is_tied: the last layer has the weights of the first.
        is_recomputed: each layer is a `jax.checkpoint`.
        has_average: the step averages weights.
        has_metrics: it returns the loss and the norm of gradients.
    """

    stages: int
    schedule: str
    micro_batches: int
    layers: int
    width: int
    rows: int
    optimiser: str
    is_half: bool
    is_tied: bool
    is_recomputed: bool
    has_average: bool
    has_metrics: bool


def random_step(seed: int) -> Step:
    """Return the step of a seed."""
    random = Random(seed)
    stages = random.choice([1, 2, 2, 4])
    schedule = random.choice(["scan", "1f1b"]) if stages == 1 else random.choice(["gpipe", "1f1b", "grouped"])
    return Step(
        stages,
        schedule,
        random.choice([8, 12, 16]),
        random.choice([1, 2]),
        random.choice([32, 64, 128]),
        random.choice([16, 64]),
        random.choice(sorted(OPTIMISERS)),
        *(random.random() < share for share in (0.3, 0.25, 0.3, 0.3, 0.6)),
    )


def step_of(case: Step) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the step function, and the shapes of its arguments: its state, and a batch."""
    optimiser = OPTIMISERS[case.optimiser]()
    number = case.stages * case.layers

    def dense(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.nn.gelu(x @ w)

    layer = jax.checkpoint(dense) if case.is_recomputed else dense

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for stage in range(case.stages):
            with ipu.stage(stage):
                for n in range(stage * case.layers, (stage + 1) * case.layers):
                    x = layer(weights[0 if case.is_tied and n == number - 1 else n], x)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def gradients(weights: list[jax.Array], batch: jax.Array) -> Any:
        if case.schedule != "scan":
            schedule: dict[str, Any] = {"schedule": case.schedule} if case.stages > 1 else {}
            return ipu.pipeline(jax.value_and_grad(loss), micro_batches=case.micro_batches, **schedule)(weights, batch)

        def add(total: Any, x: jax.Array) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(weights, x)), None

        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, weights)
        total, _ = jax.lax.scan(add, zeros, batch.reshape(case.micro_batches, case.rows, case.width))
        return jax.tree.map(lambda x: x / case.micro_batches, total)

    def step(state: Any, batch: jax.Array) -> Any:
        weights, optimiser_state, average = state
        used = jax.tree.map(lambda w: w.astype(jnp.float16), weights) if case.is_half else weights
        value, grads = gradients(used, batch)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, optimiser_state = optimiser.update(grads, optimiser_state, weights)
        weights = optax.apply_updates(weights, updates)
        if case.has_average:
            average = jax.tree.map(lambda a, w: 0.99 * a + 0.01 * w, average, weights)
        metrics = (value, optax.tree.norm(grads)) if case.has_metrics else ()
        return (weights, optimiser_state, average), metrics

    weights = [jax.ShapeDtypeStruct((case.width, case.width), jnp.float32)] * number
    state = weights, jax.eval_shape(optimiser.init, weights), weights if case.has_average else None
    dtype = jnp.float16 if case.is_half else jnp.float32
    return step, (state, jax.ShapeDtypeStruct((case.micro_batches * case.rows, case.width), dtype))


def profile_of(case: Step) -> ipu.Profile:
    """Return the static profile of a step whose state stays on the device."""
    step, shapes = step_of(case)
    return ipu.jit(step, device=ipu.IPUModel(num_ipus=case.stages), donate_argnums=0).profile(*shapes)
