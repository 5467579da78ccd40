"""Steps of a model as pure functions: of its state and the batches of an update, in one replica.

Input: a compiled Keras model and its settings. Output: functions `(state, batches) → (outputs, state)`, with the state
of Keras' JAX trainer: lists of the values of trainable, other, optimizer's and metrics' variables.

An update of one batch in one replica is the model's `train_step`, so that of a subclass is used. With several batches
it has parts: gradients of each batch, in a pipeline if the model has stages, then one update. After it the variables
of replicas are made equal: the average of real ones, the sum of counts of metrics (`Variable.aggregation`), and the
first replica's value of all others. Replicas draw different random numbers.

Profiles and errors show a state by kind and path of its variables, in the order of those lists.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax

import ipujax as ipu
from ipujax.keras.layer_stages import in_stages
from ipujax.keras.model_state import ModelSettings

# Kinds of variables by kind of function, in the order of the lists of Keras' JAX trainer.
_KINDS = {
    "train": ("trainable", "other", "optimizer", "metrics"),
    "test": ("trainable", "other", "metrics"),
    "predict": ("trainable", "other"),
}
Named = OrderedDict[str, OrderedDict[str, Any]]  # ordered for JAX too, which sorts the names of a dict


class StateNames:
    """Paths of a model's variables, and conversion of its state between lists and names.

    Args:
        model: a Keras model that is built, and compiled.
        kind: "train", "test" or "predict".
    """

    def __init__(self, model: Any, kind: str) -> None:
        self.variables = _variables(model, kind)
        self._paths = {name: _unique_paths(variables) for name, variables in self.variables.items()}

    @property
    def sizes(self) -> list[int]:
        """Number of variables of each kind."""
        return [len(variables) for variables in self.variables.values()]

    def named(self, state: Sequence[Any]) -> Named:
        """Return lists of values by kind and path."""
        pairs = zip(self._paths.items(), state, strict=True)
        return OrderedDict((kind, OrderedDict(zip(paths, values, strict=True))) for (kind, paths), values in pairs)

    def listed(self, named: Named) -> tuple[list[Any], ...]:
        """Return the lists of values of a named state: the inverse of `named`."""
        return tuple([named[kind][path] for path in paths] for kind, paths in self._paths.items())


def _variables(model: Any, kind: str) -> dict[str, list[Any]]:
    # Functions, as a model that was not compiled has no optimizer to ask.
    variables_of_kind = {
        "trainable": lambda: model.trainable_variables,
        "other": lambda: model.non_trainable_variables,
        "optimizer": lambda: model.optimizer.variables,
        "metrics": lambda: model.metrics_variables,
    }
    return {name: list(variables_of_kind[name]()) for name in _KINDS[kind]}


def _unique_paths(variables: Sequence[Any]) -> list[str]:
    """Return the path of each variable, with a number behind repeated ones: Keras lets layers share a name."""
    uses = Counter[str]()
    paths = []
    for variable in variables:
        path = str(variable.path)
        paths.append(f"{path} {uses[path] + 1}" if uses[path] else path)
        uses[path] += 1
    return paths


Step = Callable[[Any, Any], tuple[Any, Any]]
REPLICA_AXIS = "replica"  # that of `ipu.jit`
_SEED_OFFSET = np.uint32(0x9E3779B9)  # between seeds of replicas: the golden ratio, so that few are ever equal


def train_step(model: Any, settings: ModelSettings) -> Step:
    """Return the function of one update: of a state and batches [accumulation, batch, …].

    Raises:
        ArgumentError: the model overrides a method that an update of several batches replaces, or a metric may not
            add up over replicas.
    """
    is_plain = settings.batches_of_update == 1 and settings.stages < 2
    if is_plain:
        return lambda state, batches: model.train_step(state, first_of(batches))
    for name in ("train_step", "compute_metrics"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ipu.ArgumentError(
                f"{type(model).__name__} has a {name} of its own, which makes one update from one batch",
                expected=f"Keras' {name}, for stages, gradient accumulation or replicas",
                hint="override compute_loss in its place, or give metrics to compile",
            )
    _check_metrics(model, settings)
    return _AccumulatedStep(model, settings)


def test_step(model: Any, settings: ModelSettings) -> Step:
    """Return the function that evaluates batches: of a state and batches [accumulation, batch, …]."""
    _check_metrics(model, settings)

    def step(state: Any, batches: Any) -> tuple[Any, Any]:
        trainable, non_trainable, metrics = state
        replicas = _Replicas(settings.replicas)
        seeded = replicas.offset_seeds(model.non_trainable_variables, non_trainable)
        evaluate = _pipelined(evaluate_batch, settings, {1: ("non_trainable",), 2: ("metrics",)})
        results = evaluate(trainable, seeded, metrics, batches)
        new_non_trainable = replicas.combine(model.non_trainable_variables, non_trainable, results["non_trainable"])
        new_metrics = replicas.combine(model.metrics_variables, metrics, results["metrics"])
        # Logs of one replica's counts are not those of all: the combined counts give them.
        logs = results["logs"] if settings.replicas == 1 else _logs(model, new_metrics)
        return logs, (trainable, new_non_trainable, new_metrics)

    def evaluate_batch(trainable: Any, non_trainable: Any, metrics: Any, batch: Any) -> Any:
        with in_stages():
            logs, (_, non_trainable, metrics) = model.test_step((trainable, non_trainable, metrics), batch)
        return {"logs": logs, "non_trainable": non_trainable, "metrics": metrics}

    return step


def predict_step(model: Any, settings: ModelSettings) -> Step:
    """Return the function that predicts batches: of a state and batches [accumulation, batch, …]; outputs likewise."""

    def step(state: Any, batches: Any) -> tuple[Any, Any]:
        trainable, non_trainable = state
        replicas = _Replicas(settings.replicas)
        seeded = replicas.offset_seeds(model.non_trainable_variables, non_trainable)
        predict = _pipelined(predict_batch, settings, {1: ("non_trainable",)}, outputs="stack")
        results = predict(trainable, seeded, batches)
        non_trainable = replicas.combine(model.non_trainable_variables, non_trainable, results["non_trainable"])
        return results["outputs"], (trainable, non_trainable)

    def predict_batch(trainable: Any, non_trainable: Any, batch: Any) -> Any:
        with in_stages():
            outputs, non_trainable = model.predict_step((trainable, non_trainable), batch)
        return {"outputs": outputs, "non_trainable": non_trainable}

    return step


def _pipelined(
    fun: Callable[..., Any], settings: ModelSettings, carry: Mapping[int, Any], **reduce: str
) -> Callable[..., Any]:
    """Return a function of batches [accumulation, batch, …] from one of a batch: a pipeline, or a plain call."""
    # `reduce`: name of a result → its reduction; other results are those of the last batch.

    def run_plain(*args: Any) -> Any:
        results = fun(*args[:-1], first_of(args[-1]))
        stacked = [name for name, reduction in reduce.items() if reduction == "stack"]
        return {**results, **{name: jax.tree.map(lambda x: x[None], results[name]) for name in stacked}}

    def run_pipeline(*args: Any) -> Any:
        names = jax.eval_shape(run_plain, *args)
        pipelined = ipu.pipeline(
            fun,
            micro_batches=settings.accumulation,
            schedule=settings.schedule if settings.accumulation > 1 else None,  # one micro-batch has no order
            device_mapping=settings.device_mapping,
            recompute=settings.recompute,
            carry=carry if settings.accumulation > 1 else None,  # so that stages may share state of one batch
            reduce={name: reduce.get(name, "last") for name in names},
        )
        return pipelined(*args[:-1], _join_batches(args[-1]))

    return run_plain if settings.accumulation == 1 and settings.stages < 2 else run_pipeline


def _check_metrics(model: Any, settings: ModelSettings) -> None:
    """Refuse metrics of users whose variables may not be sums, where replicas add them up."""
    # `compile` wraps a model's metrics in one, which lists them.
    metrics = [inner for metric in model.metrics for inner in (metric, *getattr(metric, "metrics", ()))]
    for metric in metrics if settings.replicas > 1 else ():
        is_sum = isinstance(metric, keras.metrics.Mean | keras.metrics.Sum)
        if not is_sum and not type(metric).__module__.startswith("keras."):
            raise ipu.ArgumentError(
                f"the metric {metric.name} may not add up over replicas",
                expected="metrics of Keras, or subclasses of keras.metrics.Mean or keras.metrics.Sum",
                got=type(metric).__name__,
            )


def first_of(tree: Any) -> Any:
    """Return the first element along the leading axis of each array."""
    # An axis of one element only goes: what reads the rest still reads rows of the array.
    return jax.tree.map(lambda x: jnp.squeeze(x, 0) if x.shape[0] == 1 else x[0], tree)


class _AccumulatedStep:
    """Function of an update from several batches, in one replica or many."""

    def __init__(self, model: Any, settings: ModelSettings) -> None:
        self._model = model
        self._settings = settings

    def __call__(self, state: Any, batches: Any) -> tuple[Any, Any]:
        model = self._model
        replicas = _Replicas(self._settings.replicas)
        trainable, non_trainable, optimizer, metrics = state
        seeded = replicas.offset_seeds(model.non_trainable_variables, non_trainable)
        carry = {1: ("non_trainable",), 2: ("metrics",)}
        gradients_of = _pipelined(self._gradients_of_batch, self._settings, carry, gradients=self._settings.reduction)
        results = gradients_of(trainable, seeded, metrics, optimizer, batches)
        # The mean before the update: replicas then apply equal gradients to equal weights, which need no collective.
        gradients = replicas.mean(results["gradients"])
        trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
        non_trainable = replicas.combine(model.non_trainable_variables, non_trainable, results["non_trainable"])
        metrics = replicas.combine(model.metrics_variables, metrics, results["metrics"])
        return _logs(model, metrics), (trainable, non_trainable, optimizer, metrics)

    def _gradients_of_batch(self, trainable: Any, non_trainable: Any, metrics: Any, optimizer: Any, batch: Any) -> Any:
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with in_stages():
            (_, aux), gradients = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)(
                trainable, non_trainable, metrics, x, y, sample_weight, training=True, optimizer_variables=optimizer
            )
        loss, y_pred, non_trainable, metrics = aux
        metrics = _update_metrics(model, metrics, loss, x, y, y_pred, sample_weight)
        return {"gradients": gradients, "non_trainable": non_trainable, "metrics": metrics}


def _join_batches(batches: Any) -> Any:
    """Reshape batches [accumulation, batch, …] to [accumulation · batch, …], which the pipeline splits again."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)


def _update_metrics(
    model: Any, metrics: Sequence[Any], loss: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any
) -> Any:
    """Return the metrics' variables after a batch."""
    variables = model.metrics_variables
    with keras.StatelessScope(state_mapping=list(zip(variables, metrics, strict=True))) as scope:
        # As Keras' `train_step`: the loss of an epoch is the mean over examples, not over batches.
        tracker = next(metric for metric in model.metrics if metric.name == "loss")
        examples = next(each for each in keras.tree.flatten(x) if each is not None).shape[0]  # sparse arrays are whole
        tracker.update_state(loss, sample_weight=examples)
        model.compute_metrics(x, y, y_pred, sample_weight)
    updated = [scope.get_current_value(variable) for variable in variables]  # None for one that was not assigned
    return [old if new is None else new for old, new in zip(metrics, updated, strict=True)]


def _logs(model: Any, metrics: Sequence[Any]) -> Any:
    """Return the results of metrics with these values of their variables."""
    with keras.StatelessScope(state_mapping=list(zip(model.metrics_variables, metrics, strict=True))):
        return model.get_metrics_result()


class _Replicas:
    """Collectives over the replicas; the identity for one replica, which has no axis."""

    def __init__(self, count: int) -> None:
        self._count = count

    def offset_seeds(self, variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Return the values with another seed of each generator in each replica, unchanged in the first."""
        if self._count == 1:
            return list(values)
        offset = lax.axis_index(REPLICA_AXIS).astype(jnp.uint32) * _SEED_OFFSET
        pairs = zip(variables, values, strict=True)
        return [value.at[0].add(offset) if _is_seed(variable) else value for variable, value in pairs]

    def mean(self, tree: Any) -> Any:
        return tree if self._count == 1 else lax.pmean(tree, REPLICA_AXIS)

    def combine(self, variables: Sequence[Any], before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        """Return one value of each variable from those of all replicas before and after a step."""
        if self._count == 1:
            return list(after)
        return [self._combine_variable(*values) for values in zip(variables, before, after, strict=True)]

    def _combine_variable(self, variable: Any, before: Any, after: Any) -> Any:
        if variable.aggregation == "sum":
            # Only the increments add up: all replicas start from the same count.
            return before + lax.psum(after - before, REPLICA_AXIS)
        if jnp.issubdtype(after.dtype, jnp.inexact) and variable.aggregation != "only_first_replica":
            return lax.pmean(after, REPLICA_AXIS)
        # Integers and seeds: those of the first replica, whose seeds have no offset.
        return lax.all_gather(after, REPLICA_AXIS)[0]


def _is_seed(variable: Any) -> bool:
    return str(variable.name) == "seed_generator_state"  # as `keras.random.SeedGenerator` names it
