"""Stages that a model's operations are in, found by one trace, wherever they are named.

Input: a model, its state and a batch. Output: settings with the number of stages and the IPU of each; what does not fit
them is refused, and what has no effect is named. A stage may be named around calls of layers, in the `call` of a model
or of a layer inside of it, or in a function of a `Lambda`: in the jaxpr they are all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import keras

from ipujax.device import IPUModel
from ipujax.keras.layer_stages import forget_calls, in_stages
from ipujax.keras.settings import ModelSettings
from ipujax.lowering.jaxpr import named_stages
from ipujax.lowering.schedules import as_schedule, schedule_plan
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.logs import Log

_LOG = Log("keras")
_SCOPES = "`with PipelineStage(i):` around parts of its call, or model.set_pipeline_stage_assignment([...])"


def with_stages(
    model: Any, kind: str, settings: ModelSettings, device: IPUModel, state: Any, batch: Any
) -> ModelSettings:
    """The settings of a model with the number of its stages, and with an IPU for each.

    Args:
        model: a Keras model that is built, and compiled.
        kind: "train", "test" or "predict".
        settings: what it is set to do.
        device: the IPUs.
        state: lists of values, as Keras' JAX trainer has it, or of their shapes.
        batch: one of its batches.

    Raises:
        ArgumentError: for stages with a gap, settings that are for stages and find none, and more stages than IPUs.
    """
    numbers = _named(model, kind, state, batch)
    count = max(numbers, default=-1) + 1
    if missing := set(range(count)) - numbers:
        raise ArgumentError(
            f"{model.name} has no operations in stage {min(missing)}, but in stage {max(numbers)}",
            expected="stages numbered 0, 1, 2, … without a gap",
            got=f"stages {', '.join(map(str, sorted(numbers)))}",
            hint="give the stages behind the gap lower numbers",
        )
    if count < 2:
        _check_without_stages(model, kind, settings, count)
    else:
        settings = replace(settings, device_mapping=_ipus(model, kind, settings, count))
        if kind == "train" and settings.accumulation == 1:
            _warn_of_turns(model, settings, count)
    settings = replace(settings, stages=count)
    _check_ipus(model, kind, settings, device)
    return settings


def _named(model: Any, kind: str, state: Any, batch: Any) -> set[int]:
    """The stages that operations of a step are named after; of the forward part where Keras takes the gradients."""
    steps: Mapping[str, Callable[[Any, Any], Any]] = {
        "train": model.train_step,
        "test": model.test_step,
        "predict": model.predict_step,
    }
    step = steps[kind]
    if kind == "train" and type(model).train_step is keras.Model.train_step:
        step = _loss_of(model)

    def run(state: Any, batch: Any) -> None:
        with in_stages():
            step(state, batch)

    forget_calls(model)
    return named_stages(jax.make_jaxpr(run)(*jax.tree.map(shape_of, (state, batch))).jaxpr)


def _loss_of(model: Any) -> Callable[[Any, Any], Any]:
    """A function of a state and a batch that computes a model's loss."""

    def loss(state: Any, batch: Any) -> Any:
        trainable, others, optimizer, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        return model.compute_loss_and_updates(
            trainable, others, metrics, x, y, sample_weight, training=True, optimizer_variables=optimizer
        )

    return loss


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array."""
    kind = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def _check_without_stages(model: Any, kind: str, settings: ModelSettings, count: int) -> None:
    """Refuses settings that are for stages where there are none, and names what only accumulates."""
    schedule, mapping = settings.schedule, settings.device_mapping
    # Forward and backward in turn on one stage is accumulation: "1f1b" says what happens.
    given = [] if schedule is None or schedule == as_schedule("1f1b") else [("schedule", schedule.name)]
    given += [] if mapping is None else [("device_mapping", list(mapping))]
    if kind == "train" and settings.recompute is not None and settings.accumulation == 1:
        given.append(("recompute", settings.recompute))
    if given:
        name, value = given[0]
        raise ArgumentError(
            f"{name} of set_pipelining_options is for stages, and {model.name} has {'one' if count else 'none'}",
            expected="at least two stages",
            got=f"{name}={value!r}",
            hint=_SCOPES + ("; or config.allow_recompute" if name == "recompute" else ""),
        )
    if kind == "train" and (settings.accumulation_is_of == "set_pipelining_options" or schedule is not None):
        what = "%s has no stages: set_pipelining_options has it accumulate %d batches on one IPU; what makes stages: %s"
        _LOG.warning(what, model.name, settings.accumulation, _SCOPES)


def _ipus(model: Any, kind: str, settings: ModelSettings, count: int) -> tuple[int, ...]:
    """The IPU of each stage: as mapped, as the schedule has it, or one for each."""
    mapping, schedule = settings.device_mapping, settings.schedule
    if mapping is not None:
        if len(mapping) != count or min(mapping) < 0:
            raise ArgumentError(
                f"device_mapping of set_pipelining_options does not fit the stages of {model.name}",
                expected=f"an IPU, from 0, for each of {count} stages",
                got=list(mapping),
            )
        return mapping
    if schedule is None:
        return tuple(range(count))
    training = kind == "train"
    domain = schedule.domain(count, training)
    micro_batches = -(-max(1, domain.least) // domain.multiple) * domain.multiple
    return schedule_plan(schedule, count, micro_batches, training).ipus


def _warn_of_turns(model: Any, settings: ModelSettings, count: int) -> None:
    """Says that stages work in turns, one on one batch, and that a schedule has no effect on that."""
    what = "the %d stages of %s work one after the other, as an update takes one batch%s; %s has them work at once"
    schedule = "" if settings.schedule is None else f": the schedule {settings.schedule.name!r} has no effect"
    way = "model.set_pipelining_options(gradient_accumulation_steps_per_replica=...)"
    _LOG.warning(what, count, model.name, schedule, way)


def _check_ipus(model: Any, kind: str, settings: ModelSettings, device: IPUModel) -> None:
    """Refuses more IPUs than the device has, and warns of IPUs that training leaves idle."""
    ipus_per_replica = max(settings.device_mapping) + 1 if settings.device_mapping else 1
    needed = settings.replicas * ipus_per_replica
    available = device.target.num_ipus
    enough = 1 << (needed - 1).bit_length()  # devices have powers of two
    if kind == "train" and enough < available:
        what = "%s trains on %d of %d IPUs; auto_select_ipus = %d is enough (replicas and stages use more)"
        _LOG.warning(what, model.name, needed, available, enough)
    if needed > available:
        on_fewer = "" if ipus_per_replica >= settings.stages else f" on {ipus_per_replica} IPUs"
        stages = f"{max(1, settings.stages)} stages{on_fewer}"
        fewer = "; or several stages on an IPU: model.set_pipelining_options(device_mapping=[...])"
        raise ArgumentError(
            f"{model.name} needs more IPUs than the device has",
            expected=f"{needed}: {settings.replicas} replicas of {stages}",
            got=available,
            hint=f"ipu_config.auto_select_ipus = {enough}" + (fewer if settings.stages > 1 else ""),
        )
