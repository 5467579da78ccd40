"""The step of an inference session as a JAX function: anchors of all micro-batches, in a loop or a pipeline."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipujax.popart.model_graph.evaluation import evaluate_graph
from ipujax.popart.operators.randomness import seeded
from ipujax.popart.operators.replication import of_replicas
from ipujax.popart.steps.micro_batches import Results, in_loop, in_pipeline, reductions
from ipujax.popart.steps.step_plan import KEY, StepPlan


class InferenceStep:
    """Functions of an inference session.

    Args:
        plan: of the session.
        count: micro-batches of a call.
    """

    def __init__(self, plan: StepPlan, count: int) -> None:
        self.plan = plan
        reduce = reductions(plan.anchors)
        if plan.placement.has_stages:
            self._run = in_pipeline(self.micro_batch, count, reduce, plan.placement)
        else:
            self._run = in_loop(self.micro_batch, count, reduce)

    def micro_batch(self, weights: Any, buffers: Any, frozen: Any, scale: Any, rows: Any) -> Results:
        """Return the anchors of one micro-batch.

        Args:
            weights: parameters by name.
            buffers: parameters that operators update.
            frozen: other parameters.
            scale: has no effect.
            rows: inputs, with a first axis of one.
        """
        plan = self.plan
        inputs = {name: value[0] for name, value in rows.items() if name != KEY}
        with seeded(None), of_replicas(plan.step.replicas):
            evaluation = evaluate_graph(plan.graph, plan.placement, {**inputs, **weights, **buffers, **frozen}, {})
        anchored = {name: evaluation.array(name) for name in plan.anchors.values}
        return {"anchors": anchored, "buffers": {**buffers, **evaluation.updates}}

    def step(self, weights: Any, buffers: Any, frozen: Any, rows: Any) -> dict[str, jax.Array]:
        """Return the anchors of several micro-batches.

        Args:
            weights: by name.
            buffers: by name.
            frozen: by name.
            rows: inputs of a replica, [micro-batches, …].
        """
        scale = jnp.ones((), jnp.float32)
        anchors: dict[str, jax.Array] = self._run(weights, buffers, frozen, scale, rows)["anchors"]
        return anchors
