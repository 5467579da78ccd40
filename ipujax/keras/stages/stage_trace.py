"""Stages of a model's operations, counted in one trace, wherever a scope names them.

Input: a model, its state and a batch. Output: settings with the number of stages and the IPU of each; settings that do
not fit the stages are refused, and those without effect are warned of. A stage may be named around calls of layers, in
the `call` of a model or of an inner layer, or in a function of a `Lambda`: in the jaxpr they are all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import keras

import ipujax as ipu
from ipujax.front_end import Log, as_schedule, named_stages
from ipujax.keras.model_state.settings import ModelSettings
from ipujax.keras.stages.layer_stages import clear_calls, in_stages

_LOG = Log("keras")
_SCOPES = "`with PipelineStage(i):` around parts of its call, or model.set_pipeline_stage_assignment([...])"


def with_stages(
    model: Any, kind: str, settings: ModelSettings, device: ipu.IPUModel, state: Any, batch: Any
) -> ModelSettings:
    """Return the settings of a built model with the number of its stages and their IPUs; refuse stages with a gap."""
    numbers = _trace_stages(model, kind, state, batch)
    count = max(numbers, default=-1) + 1
    if missing := set(range(count)) - numbers:
        raise ipu.ArgumentError(
            f"{model.name} has no operations in stage {min(missing)}, but in stage {max(numbers)}",
            expected="stages numbered 0, 1, 2, … without a gap",
            got=f"stages {', '.join(map(str, sorted(numbers)))}",
            hint="give the stages behind the gap lower numbers",
        )
    if count < 2:
        _check_without_stages(model, kind, settings, count)
    else:
        settings = replace(settings, device_mapping=_assign_ipus(model, kind, settings, count))
        if kind == "train" and settings.accumulation == 1:
            _warn_without_overlap(model, settings, count)
    settings = replace(settings, stages=count)
    _check_ipus(model, kind, settings, device)
    return settings


def _trace_stages(model: Any, kind: str, state: Any, batch: Any) -> set[int]:
    """Return the stages of a step's operations."""
    steps: Mapping[str, Callable[[Any, Any], Any]] = {
        "train": model.train_step,
        "test": model.test_step,
        "predict": model.predict_step,
    }
    step = steps[kind]
    if kind == "train" and type(model).train_step is keras.Model.train_step:
        step = _loss_function(model)  # the forward part has all stages, and a shorter trace

    def run(state: Any, batch: Any) -> None:
        with in_stages():
            step(state, batch)

    clear_calls(model)
    return named_stages(jax.make_jaxpr(run)(*jax.tree.map(shape_of, (state, batch))).jaxpr)


def _loss_function(model: Any) -> Callable[[Any, Any], Any]:
    def loss(state: Any, batch: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        return model.compute_loss_and_updates(
            trainable, non_trainable, metrics, x, y, sample_weight, training=True, optimizer_variables=optimizer
        )

    return loss


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and weak type of an array."""
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _check_without_stages(model: Any, kind: str, settings: ModelSettings, count: int) -> None:
    """Refuse settings that need stages in a model without, and warn of those that only accumulate."""
    schedule = settings.schedule
    mapping = settings.device_mapping
    # Forward and backward alternate on one stage in accumulation: "1f1b" describes it.
    staged = [] if schedule is None or schedule == as_schedule("1f1b") else [("schedule", schedule.name)]
    staged += [] if mapping is None else [("device_mapping", list(mapping))]
    if kind == "train" and settings.recompute is not None and settings.accumulation == 1:
        # With accumulation it is that of the micro-batches, which need no stages.
        staged.append(("recompute", settings.recompute))
    if staged:
        name, value = staged[0]
        raise ipu.ArgumentError(
            f"{name} of set_pipelining_options is for stages, and {model.name} has {'one' if count else 'none'}",
            expected="at least two stages",
            got=f"{name}={value!r}",
            hint=_SCOPES + ("; or config.allow_recompute" if name == "recompute" else ""),
        )
    if kind == "train" and (settings.accumulation_source == "set_pipelining_options" or schedule is not None):
        text = "%s has no stages: set_pipelining_options makes it accumulate %d batches on one IPU; to make stages: %s"
        _LOG.warning(text, model.name, settings.accumulation, _SCOPES)


def _assign_ipus(model: Any, kind: str, settings: ModelSettings, count: int) -> tuple[int, ...]:
    """Return the IPU of each stage: of the mapping, else of the schedule, else one each."""
    mapping = settings.device_mapping
    schedule = settings.schedule
    if mapping is not None:
        if len(mapping) != count or min(mapping) < 0:
            raise ipu.ArgumentError(
                f"device_mapping of set_pipelining_options does not fit the stages of {model.name}",
                expected=f"an IPU, from 0, for each of {count} stages",
                got=list(mapping),
            )
        return mapping
    if schedule is None:
        return tuple(range(count))
    training = kind == "train"
    # A schedule maps stages to IPUs whatever the number of micro-batches: the smallest that it accepts tells.
    domain = schedule.domain(count, training)
    micro_batches = -(-max(1, domain.least) // domain.multiple) * domain.multiple
    return ipu.schedules.schedule_plan(schedule, count, micro_batches, training).ipus


def _warn_without_overlap(model: Any, settings: ModelSettings, count: int) -> None:
    """Warn that stages run one after the other on one batch, and that a schedule then has no effect."""
    text = "the %d stages of %s work one after the other, as an update takes one batch%s; %s has them work at once"
    schedule = "" if settings.schedule is None else f": the schedule {settings.schedule.name!r} has no effect"
    remedy = "model.set_pipelining_options(gradient_accumulation_steps_per_replica=...)"
    _LOG.warning(text, count, model.name, schedule, remedy)


def _check_ipus(model: Any, kind: str, settings: ModelSettings, device: ipu.IPUModel) -> None:
    """Refuse more IPUs than the device has, and warn of IPUs that training leaves idle."""
    ipus_per_replica = max(settings.device_mapping) + 1 if settings.device_mapping else 1
    needed = settings.replicas * ipus_per_replica
    available = device.target.num_ipus
    sufficient = 1 << (needed - 1).bit_length()  # devices have powers of two
    if kind == "train" and sufficient < available:
        text = "%s trains on %d of %d IPUs; auto_select_ipus = %d is enough (replicas and stages use more)"
        _LOG.warning(text, model.name, needed, available, sufficient)
    if needed > available:
        on_fewer = "" if ipus_per_replica >= settings.stages else f" on {ipus_per_replica} IPUs"
        stages = f"{max(1, settings.stages)} stages{on_fewer}"
        share_ipus = "; or several stages on an IPU: model.set_pipelining_options(device_mapping=[...])"
        raise ipu.ArgumentError(
            f"{model.name} needs more IPUs than the device has",
            expected=f"{needed}: {settings.replicas} replicas of {stages}",
            got=available,
            hint=f"ipu_config.auto_select_ipus = {sufficient}" + (share_ipus if settings.stages > 1 else ""),
        )
