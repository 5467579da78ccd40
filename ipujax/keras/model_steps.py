"""Steps of a model as pure functions: of its state and the batches of an update, in one replica.

Input: a compiled Keras model and its settings. Output: functions `(state, batches) → (outputs, state)`, the state as
Keras' JAX trainer has it: lists of the values of trainable, other, optimizer's and metrics' variables.

An update of one batch in one replica is the model's own `train_step`, so one that a subclass defines is used. With
several, the same is done in parts: gradients of each batch, in a pipeline if the model has stages, then one update.
What replicas hold apart is brought together behind each update: averages of what is real, sums of what metrics count
(`Variable.aggregation`), and of all else what the first replica has. Each replica draws numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax

from ipujax.keras.layer_stages import in_stages
from ipujax.keras.settings import ModelSettings
from ipujax.lowering.replicas import AXIS
from ipujax.pipeline import pipeline
from ipujax.runtime.errors import ArgumentError

Step = Callable[[Any, Any], tuple[Any, Any]]
_SEED_OFFSET = np.uint32(0x9E3779B9)  # between seeds of replicas: the golden ratio, so that few are ever equal


def train_step(model: Any, settings: ModelSettings) -> Step:
    """One update: of a state and batches [accumulation, batch, …]."""
    is_plain = settings.batches_of_update == 1 and settings.stages < 2
    if is_plain:
        return lambda state, batches: model.train_step(state, first_of(batches))
    for name in ("train_step", "compute_metrics"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ArgumentError(
                f"{type(model).__name__} has a {name} of its own, which is for one update from one batch",
                expected=f"Keras' {name}, for stages, gradient accumulation or replicas",
                hint="override compute_loss in its place, or give metrics to compile",
            )
    _check_metrics(model, settings)
    return _AccumulatedStep(model, settings)


def test_step(model: Any, settings: ModelSettings) -> Step:
    """Evaluates batches: of a state and batches [accumulation, batch, …]."""
    _check_metrics(model, settings)

    def step(state: Any, batches: Any) -> tuple[Any, Any]:
        trainable, others, metrics = state
        replicas = _Replicas(settings.replicas)
        own = replicas.own_seeds(model.non_trainable_variables, others)
        done = _pipelined(of_batch, settings, {1: ("others",), 2: ("metrics",)})(trainable, own, metrics, batches)
        new_others = replicas.together(model.non_trainable_variables, others, done["others"])
        new_metrics = replicas.together(model.metrics_variables, metrics, done["metrics"])
        logs = done["logs"] if settings.replicas == 1 else _logs(model, new_metrics)
        return logs, (trainable, new_others, new_metrics)

    def of_batch(trainable: Any, others: Any, metrics: Any, batch: Any) -> Any:
        with in_stages():
            logs, (_, others, metrics) = model.test_step((trainable, others, metrics), batch)
        return {"logs": logs, "others": others, "metrics": metrics}

    return step


def predict_step(model: Any, settings: ModelSettings) -> Step:
    """Predicts batches: of a state and batches [accumulation, batch, …]; outputs likewise."""

    def step(state: Any, batches: Any) -> tuple[Any, Any]:
        trainable, others = state
        replicas = _Replicas(settings.replicas)
        own = replicas.own_seeds(model.non_trainable_variables, others)
        done = _pipelined(of_batch, settings, {1: ("others",)}, outputs="stack")(trainable, own, batches)
        others = replicas.together(model.non_trainable_variables, others, done["others"])
        return done["outputs"], (trainable, others)

    def of_batch(trainable: Any, others: Any, batch: Any) -> Any:
        with in_stages():
            outputs, others = model.predict_step((trainable, others), batch)
        return {"outputs": outputs, "others": others}

    return step


def _pipelined(
    fun: Callable[..., Any], settings: ModelSettings, carry: Mapping[int, Any], **reduce: str
) -> Callable[..., Any]:
    """A function of batches [accumulation, batch, …] from one of a batch: a pipeline, or plain for one without stages.

    Results named in `reduce` are reduced so, all others are those of the last batch.
    """

    def of_one(*args: Any) -> Any:
        done = fun(*args[:-1], first_of(args[-1]))
        stacked = [name for name, how in reduce.items() if how == "stack"]
        return {**done, **{name: jax.tree.map(lambda x: x[None], done[name]) for name in stacked}}

    def of_all(*args: Any) -> Any:
        names = jax.eval_shape(of_one, *args)
        pipelined = pipeline(
            fun,
            micro_batches=settings.accumulation,
            schedule=settings.schedule if settings.accumulation > 1 else None,  # one is in no order
            device_mapping=settings.device_mapping,
            recompute=settings.recompute,
            carry=carry if settings.accumulation > 1 else None,  # so that stages may share state of one batch
            reduce={name: reduce.get(name, "last") for name in names},
        )
        return pipelined(*args[:-1], _joined(args[-1]))

    return of_one if settings.accumulation == 1 and settings.stages < 2 else of_all


def _check_metrics(model: Any, settings: ModelSettings) -> None:
    """Refuses metrics of users whose variables may be no sums, where replicas add them up."""
    inside = [each for metric in model.metrics for each in (metric, *getattr(metric, "metrics", ()))]
    for metric in inside if settings.replicas > 1 else ():
        is_sum = isinstance(metric, keras.metrics.Mean | keras.metrics.Sum)
        if not is_sum and not type(metric).__module__.startswith("keras."):
            raise ArgumentError(
                f"the metric {metric.name} may not add up over replicas",
                expected="metrics of Keras, or subclasses of keras.metrics.Mean or keras.metrics.Sum",
                got=type(metric).__name__,
            )


def first_of(tree: Any) -> Any:
    """The first of each array."""
    return jax.tree.map(lambda x: x[0], tree)


class _AccumulatedStep:
    """An update from several batches, of one replica or of many."""

    def __init__(self, model: Any, settings: ModelSettings) -> None:
        self._model, self._settings = model, settings

    def __call__(self, state: Any, batches: Any) -> tuple[Any, Any]:
        model, replicas = self._model, _Replicas(self._settings.replicas)
        trainable, others, optimizer, metrics = state
        own = replicas.own_seeds(model.non_trainable_variables, others)
        carry = {1: ("others",), 2: ("metrics",)}
        gradients_of = _pipelined(self._gradients_of_batch, self._settings, carry, gradients=self._settings.reduction)
        done = gradients_of(trainable, own, metrics, optimizer, batches)
        gradients = replicas.mean(done["gradients"])
        trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
        others = replicas.together(model.non_trainable_variables, others, done["others"])
        metrics = replicas.together(model.metrics_variables, metrics, done["metrics"])
        return _logs(model, metrics), (trainable, others, optimizer, metrics)

    def _gradients_of_batch(self, trainable: Any, others: Any, metrics: Any, optimizer: Any, batch: Any) -> Any:
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with in_stages():
            (_, aux), gradients = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)(
                trainable, others, metrics, x, y, sample_weight, training=True, optimizer_variables=optimizer
            )
        loss, y_pred, others, metrics = aux
        metrics = _counted(model, metrics, loss, x, y, y_pred, sample_weight)
        return {"gradients": gradients, "others": others, "metrics": metrics}


def _joined(batches: Any) -> Any:
    """Batches [accumulation, batch, …] one behind the other."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)


def _counted(model: Any, metrics: Sequence[Any], loss: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """The metrics' variables with a batch counted."""
    variables = model.metrics_variables
    with keras.StatelessScope(state_mapping=list(zip(variables, metrics, strict=True))) as scope:
        tracker = next(metric for metric in model.metrics if metric.name == "loss")
        tracker.update_state(loss, sample_weight=jax.tree.leaves(x)[0].shape[0])
        model.compute_metrics(x, y, y_pred, sample_weight)
    found = [scope.get_current_value(variable) for variable in variables]
    return [old if new is None else new for old, new in zip(metrics, found, strict=True)]


def _logs(model: Any, metrics: Sequence[Any]) -> Any:
    """What metrics say, from their variables."""
    with keras.StatelessScope(state_mapping=list(zip(model.metrics_variables, metrics, strict=True))):
        return model.get_metrics_result()


class _Replicas:
    """What replicas do together; nothing if there is one."""

    def __init__(self, count: int) -> None:
        self._count = count

    def own_seeds(self, variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The values, with a seed of each replica's own in each generator; the first replica's are as they were."""
        if self._count == 1:
            return list(values)
        offset = lax.axis_index(AXIS).astype(jnp.uint32) * _SEED_OFFSET
        pairs = zip(variables, values, strict=True)
        return [value.at[0].add(offset) if _is_seed(variable) else value for variable, value in pairs]

    def mean(self, tree: Any) -> Any:
        return tree if self._count == 1 else lax.pmean(tree, AXIS)

    def together(self, variables: Sequence[Any], before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        """One value of each variable, from those of all replicas."""
        if self._count == 1:
            return list(after)
        return [self._one(*each) for each in zip(variables, before, after, strict=True)]

    def _one(self, variable: Any, before: Any, after: Any) -> Any:
        if variable.aggregation == "sum":
            return before + lax.psum(after - before, AXIS)
        if jnp.issubdtype(after.dtype, jnp.inexact) and variable.aggregation != "only_first_replica":
            return lax.pmean(after, AXIS)
        return lax.all_gather(after, AXIS)[0]


def _is_seed(variable: Any) -> bool:
    return str(variable.name) == "seed_generator_state"
