"""The step of a training session as a JAX function: gradients of micro-batches, their reduction, the update.

Gradients of activations are those of zeros that are added to them. The loss is scaled before it is differentiated,
gradients are divided by the scale before the update.

The update is an optimiser of `init` and `update`, as optax has them, so that `ipu.optim.shard` can divide its state
among the replicas: PopART's replicated tensor sharding.

Automatic loss scaling follows the gradients: halved when many of them are large, doubled when few are.
Source: PopART's `AutomaticLossScalingSettings`. Only gradients of weights count; PopART counts others too.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import ipujax as ipu
from ipujax.popart.enumerations import MeanReductionStrategy
from ipujax.popart.flow import AnchorReturnTypeId
from ipujax.popart.model_graph.evaluation import evaluate_graph
from ipujax.popart.operators.domain import REPLICA_AXIS, of_replicas, seeded
from ipujax.popart.optimisers import clip_by_norm, is_constant, state_type
from ipujax.popart.options import AutomaticLossScalingSettings
from ipujax.popart.reserved_names import ACCUMULATOR, GRADIENT, UPDATED
from ipujax.popart.steps.grouped_weights import summed
from ipujax.popart.steps.micro_batches import Results, in_loop, in_phases, in_pipeline, reductions
from ipujax.popart.steps.step_plan import KEY, StepPlan, key_of

_LARGEST = 65504.0  # float16
_FACTOR = 2.0


def next_scale(gradients: Any, states: Any, settings: AutomaticLossScalingSettings) -> dict[str, Any]:
    """Return the loss scale of the next batch, and the number of batches since the last change.

    Args:
        gradients: scaled, by name of the weight.
        states: with "scale" and "batches".
        settings: of the session.
    """
    tracked = settings.toTrackTensors
    chosen = [g for name, g in gradients.items() if not tracked or name in tracked]
    # The gradients are scaled still: a share of float16's range is their distance to overflow.
    edge = settings.binEdgeLocation * _LARGEST
    large = sum(jnp.sum(jnp.abs(g.astype(jnp.float32)) > edge) for g in chosen)
    share = large / sum(g.size for g in chosen)
    is_above = share > settings.thresholdUpperCountProportion
    batches = states["batches"] + 1
    is_due = batches >= settings.updatePeriod
    changed = jnp.where(is_above, states["scale"] / _FACTOR, states["scale"] * _FACTOR)
    return {
        "scale": jnp.where(is_due, changed, states["scale"]),
        "batches": jnp.where(is_due, 0, batches),
    }


class Transformation(NamedTuple):
    """An optimiser in the form of optax; its updates are the new weights, not differences.

    Args:
        init: state of weights.
        update: weights and state after an update, given summed gradients, state, weights, and `values` by weight.
    """

    init: Callable[..., Any]
    update: Callable[..., Any]


def sharded(transformation: Transformation, plan: StepPlan) -> Any:
    """Return the optimiser with the state of large weights divided among replicas; itself where the plan has none.

    Args:
        transformation: of whole arrays.
        plan: of the session.
    """
    if not plan.least_sharded:
        return transformation
    return ipu.optim.shard(
        transformation, REPLICA_AXIS, replicas=plan.step.replicas, reduce="sum", min_elements=plan.least_sharded
    )


DEFAULT_VALUES = ""  # values of the weights that have none of their own


class TrainingStep:
    """Functions of a training session.

    Args:
        plan: of the session.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        assert plan.optimizer is not None
        self._constants = plan.optimizer.constants(plan.trained)
        self._accum_type = plan.optimizer.accum_type
        is_running = plan.is_mean and plan.mean_strategy == MeanReductionStrategy.Running
        reduce = reductions(plan.anchors, "running_mean" if is_running else "sum")
        count = plan.step.accumulation
        if plan.placement.has_stages:
            self._accumulated = in_pipeline(self.micro_batch, count, reduce, plan.placement)
        elif plan.placement.has_phases:
            self._accumulated = in_phases(self.micro_batch, count, reduce)
        else:
            self._accumulated = in_loop(self.micro_batch, count, reduce)
        # A running mean is divided already, but for the replicas.
        self._divisor = plan.step.accumulation if plan.is_mean and not is_running else 1

    def micro_batch(self, weights: Any, buffers: Any, frozen: Any, scale: Any, rows: Any) -> Results:
        """Return gradients, anchors and buffers of one micro-batch.

        Args:
            weights: parameters that are trained, by name.
            buffers: parameters that operators update.
            frozen: all others.
            scale: factor of the loss.
            rows: inputs, with a first axis of one.
        """
        plan = self.plan
        inputs = {name: value[0] for name, value in rows.items() if name != KEY}
        zeros = {name: jnp.zeros(info.dims, info.dtype) for name, info in plan.zeros.items()}
        key = key_of(rows)

        def forward(trained: Any, added: Any) -> tuple[jax.Array, tuple[Any, Any]]:
            operands = {**inputs, **frozen, **buffers, **trained}
            with seeded(key, has_masks=True), of_replicas(plan.step.replicas):
                evaluation = evaluate_graph(plan.graph, plan.placement, operands, added)
            loss = evaluation.array(plan.loss)
            anchored = {name: evaluation.array(name) for name in plan.anchors.values}
            scalar = loss.reshape(())
            scaled = scalar if is_constant(scale, 1) else scalar * jnp.asarray(scale, loss.dtype)
            return scaled, (anchored, {**buffers, **evaluation.updates})

        differentiate = jax.value_and_grad(forward, argnums=(0, 1), has_aux=True)
        (loss, (anchored, updated)), (gradients, of_zeros) = differentiate(weights, zeros)
        by_name = {**gradients, **of_zeros}
        anchored |= {GRADIENT + name: by_name[name] for name in plan.anchors.gradients}
        if plan.step.accumulation > 1:
            gradients = {name: g.astype(state_type(self._accum_type, g.dtype)) for name, g in gradients.items()}
        anchored |= {ACCUMULATOR + name: gradients[name] for name in plan.anchors.accumulators}
        results = {"gradients": gradients, "anchors": anchored, "buffers": updated}
        # The last stage may have the loss alone, which no gradient needs: without a result the stage would be empty.
        return {**results, "loss": loss} if plan.placement.is_pipelined else results

    def batch(
        self, weights: Any, states: Any, buffers: Any, frozen: Any, values: Any, rows: Any
    ) -> tuple[Any, Any, Any, Any]:
        """Return weights, states, buffers and anchors after one update.

        Args:
            weights: by name.
            states: of the optimiser, by name of the weight; and the loss scale, where it is automatic.
            buffers: by name.
            frozen: by name.
            values: of the optimiser, by name of the weight; `DEFAULT_VALUES` for those without values of their own.
            rows: inputs of a replica, [accumulation, …].
        """
        plan = self.plan
        scale = self._scale(states, values)
        replicas = plan.step.replicas
        # A mean over replicas divides the loss, not the sum of gradients, which might overflow in float16.
        divided = scale / replicas if plan.is_mean and replicas > 1 else scale
        results = self._accumulated(weights, buffers, frozen, divided, rows)
        gradients = results["gradients"]
        if replicas > 1 and not plan.least_sharded:
            gradients = summed(gradients, plan.grouped, replicas, plan.is_mean)
        gradients = plan.host_streams.exchanged(gradients)
        transformation = sharded(Transformation(lambda _: states, self.update), plan)
        updated, next_states = transformation.update(gradients, states, weights, values=values)
        accumulators = self._accumulators(results["anchors"])
        anchors = {**results["anchors"], **accumulators, **self._batch_anchors(updated, next_states["optimizer"])}
        return updated, next_states, results["buffers"], anchors

    def _scale(self, states: Any, values: Any) -> Any:
        """Return the factor of the loss: a part of the state where it is automatic, else a value of the optimiser."""
        return states["scale"] if "scale" in states else self._all_values(values)[DEFAULT_VALUES]["lossScaling"]

    def _all_values(self, values: Any) -> Any:
        return {name: {**named, **self._constants.get(name, {})} for name, named in values.items()}

    def update(self, gradients: Any, states: Any, weights: Any, *, values: Any) -> tuple[Any, Any]:
        """Return weights and states after an update.

        Args:
            gradients: summed over micro-batches and replicas, still scaled.
            states: before the update.
            weights: before the update.
            values: of the optimiser, without constants.
        """
        divisor = self._scale(states, values) * self._divisor
        # In float32, as PopART: in half precision the quotients underflow, which the scale is to prevent.
        wide = {name: g.astype(jnp.float32) for name, g in gradients.items()}
        slopes = wide if is_constant(divisor, 1) else {name: g / divisor for name, g in wide.items()}
        updated, optimizer_states = self._update(slopes, weights, states["optimizer"], self._all_values(values))
        next_states = {"optimizer": optimizer_states}
        if "scale" in states:
            next_states |= next_scale(gradients, states, self.plan.loss_scaling)
        return updated, next_states

    def _accumulators(self, anchors: Any) -> dict[str, jax.Array]:
        """Return the sums of gradients after each micro-batch, or what their kind of anchor asks for."""
        anchored = self.plan.anchors
        sums = {ACCUMULATOR + name: jnp.cumsum(anchors[ACCUMULATOR + name], 0) for name in anchored.accumulators}
        reduce = {AnchorReturnTypeId.Final: lambda x: x[-1], AnchorReturnTypeId.Sum: lambda x: x.sum(0)}
        return {name: reduce.get(anchored.kinds[name].id(), lambda x: x)(x) for name, x in sums.items()}

    def _update(self, slopes: Any, weights: Any, states: Any, values: Any) -> tuple[Any, Any]:
        optimizer = self.plan.optimizer
        assert optimizer is not None
        clipped = clip_by_norm(slopes, optimizer.clipNormSettings) if optimizer.clipNormSettings else slopes
        pairs = {
            name: optimizer.updated(clipped[name], weight, states[name], values.get(name, values[DEFAULT_VALUES]))
            for name, weight in weights.items()
        }
        return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}

    def _batch_anchors(self, weights: Any, states: Any) -> dict[str, jax.Array]:
        """Return anchored weights and states after an update, repeated for anchors of each micro-batch."""
        anchors = self.plan.anchors
        values_by_anchor = {name: weights[name] for name in anchors.weights}
        values_by_anchor |= {
            name: weights[weight] if prefix == UPDATED else _whole(states[weight][prefix])
            for name, (prefix, weight) in anchors.states.items()
        }
        count = self.plan.step.accumulation
        kinds = {name: anchors.kinds[name].id() for name in values_by_anchor}
        rows = (AnchorReturnTypeId.All, AnchorReturnTypeId.EveryN)
        return {
            name: jnp.broadcast_to(value, (count, *value.shape)) if kinds[name] in rows else value
            for name, value in values_by_anchor.items()
        }

    def step(
        self, weights: Any, states: Any, buffers: Any, frozen: Any, values: Any, rows: Any
    ) -> tuple[Any, Any, Any, Any]:
        """Return weights, states, buffers and anchors after all batches of a step.

        Args:
            weights: as those of `batch`, like the next four.
            states: see above.
            buffers: see above.
            frozen: see above.
            values: see above.
            rows: inputs of a replica, [batches, accumulation, …].
        """
        kinds = {name: kind.id() for name, kind in self.plan.anchors.kinds.items()}

        def body(carry: Any, row: Any) -> tuple[Any, Any]:
            *before, sums = carry
            *after, anchors = self.batch(*before, frozen, values, row)  # type: ignore[call-arg]
            once = {name: x for name, x in anchors.items() if kinds[name] in _ONCE}
            sums = {name: sums[name] + x if kinds[name] is AnchorReturnTypeId.Sum else x for name, x in once.items()}
            return (*after, sums), {name: x for name, x in anchors.items() if name not in once}

        if self.plan.step.batches == 1:
            row = jax.tree.map(lambda x: jnp.squeeze(x, 0), rows)
            *after, anchors = self.batch(weights, states, buffers, frozen, values, row)
            by_batch = {name: x if kinds[name] in _ONCE else x[None] for name, x in anchors.items()}
            return after[0], after[1], after[2], by_batch
        batch_shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
        *_, sample = jax.eval_shape(self.batch, weights, states, buffers, frozen, values, batch_shapes)
        start = {name: jnp.zeros(x.shape, x.dtype) for name, x in sample.items() if kinds[name] in _ONCE}
        (weights, states, buffers, last), stacked = jax.lax.scan(
            body, (weights, states, buffers, start), rows, length=self.plan.step.batches
        )
        return weights, states, buffers, {**last, **stacked}


def _whole(x: Any) -> Any:
    """Return an array of the state; of a shard, that of all replicas."""
    if not isinstance(x, ipu.optim.Shard):
        return x
    return jax.lax.all_gather(x.value, x.axis, tiled=True)[: prod(x.shape)].reshape(x.shape)


_ONCE = (AnchorReturnTypeId.Final, AnchorReturnTypeId.Sum)  # anchors of which a step has one value
