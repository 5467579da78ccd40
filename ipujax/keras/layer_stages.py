"""Stages of Keras models: assignment of layers to stages, and of their operations when a model is traced.

Input: calls inside a `PipelineStage`, of layers of a functional model or in the `call` of a model or a layer; layers
created inside one; or a list for all calls of a model's layers (`stage_assignment`). Output: numbers of stages, stored
on the layers, and `in_stages`, in which a model is traced with its layers' operations in their stages (`ipu.stage`).

A scope around a call, or a list, takes precedence over the scope in which a layer was created, as in Graphcore's Keras;
and as there, stages are not nested.

Stages are counted in one trace of a model, its state and a batch, wherever a scope names them: around calls of layers,
in the `call` of a model or of an inner layer, or in a function of a `Lambda`. In the jaxpr they are all the same. The
settings get the number of stages and the IPU of each; those that do not fit the stages are refused, and those without
effect are warned of.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import jax
import keras

import ipujax as ipu
from ipujax.front_end import ArgumentValueError, Log, as_schedule, named_stages, whole_number
from ipujax.keras.model_state import ModelSettings, replace_attribute, set_untracked

# Attributes of a layer.
_ASSIGNED = "ipu_pipeline_stages"  # the stage of each of its calls, in order
_CREATED_IN = "ipu_made_in_stage"  # the stage in whose scope it was created, for calls in no other
_TRACED = "ipu_stages_of_calls"  # the stages in whose scopes it was called in a trace, in order; for reports
_ATTRIBUTES = (_ASSIGNED, _CREATED_IN, _TRACED)
_OPEN: ContextVar[tuple[int, str] | None] = ContextVar("ipujax_keras_stage", default=None)  # number and origin


@contextmanager
def PipelineStage(number: int) -> Iterator[None]:
    """Assign calls inside to a stage: of layers of a functional model, or operations in a `call`.

    Layers created inside are in the stage wherever no other stage is around their call.

    Args:
        number: number of the stage, from 0.

    Raises:
        ArgumentError: the number is not an integer from 0, or the scope is inside of another stage.
    """
    index = whole_number("PipelineStage needs the number of a stage", number, 0)
    keras_call = keras.layers.Layer.__call__
    keras_init = keras.layers.Layer.__init__
    depth = 0  # of calls inside calls: only the outermost layer is assigned, and its layers go with it

    @functools.wraps(keras_call)
    def recorded_call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if not depth:
            _record_call(layer, index, (args, kwargs))
        depth += 1
        try:
            return keras_call(layer, *args, **kwargs)
        finally:
            depth -= 1

    @functools.wraps(keras_init)
    def recorded_init(layer: Any, *args: Any, **kwargs: Any) -> None:
        keras_init(layer, *args, **kwargs)
        set_untracked(layer, **{_CREATED_IN: index})

    with (
        _open_stage(index, f"PipelineStage({index})"),
        ipu.stage(index),
        replace_attribute(keras.layers.Layer, "__call__", recorded_call),
        replace_attribute(keras.layers.Layer, "__init__", recorded_init),
    ):
        yield


@contextmanager
def _open_stage(number: int, origin: str) -> Iterator[None]:
    """Refuse a stage inside of another; the same stage may be nested."""
    outer = _OPEN.get()
    if outer is not None and outer[0] != number:
        raise ArgumentValueError(
            f"{origin} is inside of another stage",
            expected=f"stage {outer[0]}, as {outer[1]} around it says, or no stage around it",
            got=number,
            hint="PipelineStage around the parts of a call alone, or around the call alone; in "
            "model.set_pipeline_stage_assignment(...) None for a layer with stages of its own",
        )
    token = _OPEN.set(outer or (number, origin))
    try:
        yield
    finally:
        _OPEN.reset(token)


def _record_call(layer: Any, number: int, arguments: Any) -> None:
    """Store the stage of a call on its layer."""
    # A functional model calls its layers again outside of the scope, in this order, so each symbolic call is stored.
    is_symbolic = any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten(arguments))
    attribute = _ASSIGNED if is_symbolic else _TRACED
    earlier = layer.__dict__.get(attribute, ())
    if is_symbolic or number not in earlier:
        set_untracked(layer, **{attribute: (*earlier, number)})


@contextmanager
def in_stages() -> Iterator[None]:
    """Trace models inside with the operations of each layer in its stage."""
    keras_call = keras.layers.Layer.__call__
    calls = Counter[int]()  # by the identity of the layer

    @functools.wraps(keras_call)
    def staged_call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        assigned = layer.__dict__.get(_ASSIGNED)
        created_in = layer.__dict__.get(_CREATED_IN)
        if assigned:
            # The n-th call of a trace is the n-th of the model's definition; a scope with several traces starts over.
            number = assigned[calls[id(layer)] % len(assigned)]
            calls[id(layer)] += 1
            if number is None:
                return keras_call(layer, *args, **kwargs)
            with _open_stage(number, f"the layer {layer.name} of stage {number}"), ipu.stage(number):
                return keras_call(layer, *args, **kwargs)
        if created_in is not None and _OPEN.get() is None:
            with ipu.stage(created_in):  # not `_open_stage`: a layer inside may be in another stage
                return keras_call(layer, *args, **kwargs)
        return keras_call(layer, *args, **kwargs)

    with replace_attribute(keras.layers.Layer, "__call__", staged_call):
        yield


def has_stages(model: Any) -> bool:
    """Return whether layers of a model are in stages without a trace; see `with_stages` for those in a `call`."""
    return any(_ASSIGNED in layer.__dict__ or _CREATED_IN in layer.__dict__ for layer in all_layers(model))


def clear_calls(model: Any) -> None:
    """Remove the stages of calls in scopes from the layers of a model, before another trace."""
    for layer in all_layers(model):
        layer.__dict__.pop(_TRACED, None)


def assign(layer: Any, stages: Sequence[int | None]) -> None:
    """Store the stage of each call of a layer, in order; None for calls that keep the stages inside."""
    if any(number is not None for number in stages):
        set_untracked(layer, **{_ASSIGNED: tuple(stages)})
    else:
        layer.__dict__.pop(_ASSIGNED, None)


def open_stage() -> int | None:
    """Return the number of the stage whose scope is open; None outside of any."""
    opened = _OPEN.get()
    return None if opened is None else opened[0]


def stage_of_call(layer: Any, index: int, opened: int | None) -> int | None:
    """Return the stage of a call of a layer, by the precedence of `in_stages`.

    Args:
        layer: the layer.
        index: number of the call among those of the layer.
        opened: the stage whose scope is around the call; None where that is not known, or none is.
    """
    if assigned := layer.__dict__.get(_ASSIGNED):
        number: int | None = assigned[index % len(assigned)]
        return number
    return next(iter(assigned_stages(layer)), None) if opened is None else opened


def assigned_stages(layer: Any) -> tuple[int | None, ...]:
    """Return the stage of each call of a layer so far, by the precedence of `in_stages`; empty for none."""
    attributes = layer.__dict__
    created_in = (attributes[_CREATED_IN],) if _CREATED_IN in attributes else ()
    stages: tuple[int | None, ...] = attributes.get(_ASSIGNED) or attributes.get(_TRACED) or created_in
    return stages


def remove_stages(model: Any) -> None:
    """Remove the stages of all layers of a model, including inner ones: those of calls, creation and assignment."""
    for layer in all_layers(model):
        for attribute in _ATTRIBUTES if layer is not model else (_CREATED_IN,):  # its calls are of an outer model
            layer.__dict__.pop(attribute, None)


def all_layers(model: Any) -> list[Any]:
    """Return a model and its layers at any depth, each once: layers may be shared."""
    return list(dict.fromkeys(model._flatten_layers()))


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
