"""What models have beside Keras' own state: settings for IPUs, and attributes of a scope.

Settings beside those of `compile` are accumulation, replicas, stages, data. Input: arguments of a model's
`set_…_options`. Output: `ModelSettings`, frozen and checked, stored on the model.

A model that does not fit has its remedies in the names of these options; those of `ipu.jit` without an option in Keras
are left out.

Attributes are those of Keras' classes in a scope, and of its objects outside of their tracked state. Those of models
that have run in a scope raise an error that says so if they are read before a run: attributes of `keras.Model`, which
those of a model that has run hide. The error is an `AttributeError`, so that `hasattr` stays false.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import ipujax as ipu
from ipujax.front_end import (
    CHIP_NAMES,
    ArgumentAttributeError,
    Log,
    Recompute,
    as_numbers,
    as_schedule,
    check_recompute,
    checking_calls,
    nearest,
    whole_number,
)

_RUN = "fit, evaluate or predict in `with strategy.scope():`, not with run_eagerly=True"
# Remedy by attribute.
_REMEDIES = {
    "ipu_profile": _RUN,
    "ipu_profiles": _RUN,
    "ipu_outfeed": 'model.set_outfeed_queue_options("all"), and a fit in `with strategy.scope():`',
}


class _Missing:
    """An attribute that models lack until they have run."""

    # Without `__set__`, so that an entry of the instance's `__dict__` hides it.

    def __init__(self, name: str, remedy: str) -> None:
        self._name = name
        self._remedy = remedy

    def __get__(self, model: Any, owner: type) -> Any:
        if model is None:
            return self
        problem = f"{getattr(model, 'name', owner.__name__)} has no {self._name}"
        raise ArgumentAttributeError(problem, expected="a model that has run on IPUs", hint=self._remedy)


def explain_missing(model_class: type) -> None:
    """Set the attributes that explain themselves on a class.

    Args:
        model_class: `keras.Model`.
    """
    for name, remedy in _REMEDIES.items():
        setattr(model_class, name, _Missing(name, remedy))


_MISSING = object()


@contextmanager
def replace_attribute(owner: type, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a class in a scope, and restore the class afterwards.

    Args:
        owner: a class, which defines the attribute, inherits it or lacks it.
        name: name of the attribute.
        value: its value in the scope.
    """
    # Set on the class that defines it: Keras compares methods of models with those to find what users override.
    definer = next((base for base in owner.__mro__ if name in vars(base)), owner)
    original = vars(definer).get(name, _MISSING)
    setattr(definer, name, value)
    try:
        yield
    finally:
        if original is _MISSING:
            delattr(definer, name)
        else:
            setattr(definer, name, original)


def set_untracked(instance: Any, **values: Any) -> None:
    """Set attributes of a model or a layer that are not part of the state that Keras tracks and saves."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)  # past `Layer.__setattr__`, which tracks


_LOG = Log("keras")
REDUCTIONS = ("mean", "sum", "running_mean")
OUTFEEDS = ("last", "all")
KINDS = ("train", "test", "predict")  # of functions that Keras' loops call
_ATTRIBUTE = "ipu_settings"  # of a model
_STEPS = "gradient_accumulation_steps_per_replica"
_METHOD = "gradient_accumulation_reduction_method"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of a model for IPUs.

    Args:
        accumulation: batches whose gradients are accumulated in each replica for an update.
        accumulation_source: the method that set it; empty for the default.
        reduction: reduction of these gradients, of `REDUCTIONS`.
        replicas: copies of the model, each on its share of the IPUs and of the batches.
        schedule: schedule of the pipeline, as `ipu.pipeline` takes it.
        device_mapping: IPU of each stage.
        recompute: as `ipu.pipeline` takes it.
        prefetch_depth: batches that the host prepares ahead; 0 for none.
        outfeed: "last" or "all": the steps whose logs an execution sends to the host.
        stages: number of stages, 0 for none: set by a trace of the model, see `layer_stages`.
    """

    accumulation: int = 1
    accumulation_source: str = ""
    reduction: str = "mean"
    replicas: int = 1
    schedule: Any = None
    device_mapping: tuple[int, ...] | None = None
    recompute: Recompute | None = None
    prefetch_depth: int = 0
    outfeed: str = "last"
    stages: int = 0

    @property
    def batches_of_update(self) -> int:
        """Batches of an update of the weights, over all replicas."""
        return self.accumulation * self.replicas

    @property
    def in_words(self) -> str:
        """Multiple of batches that a run must have, for messages."""
        return f"a multiple of {self.batches_of_update}: {self.accumulation} accumulated × {self.replicas} replicas"


def settings_of(model: Any) -> ModelSettings:
    """Return the settings of a model, by default those without accumulation, replicas and stages."""
    settings: ModelSettings = model.__dict__.get(_ATTRIBUTE, ModelSettings())
    return settings


def clear_functions(model: Any) -> None:
    """Drop the functions of a model's loops, so that Keras creates them again with the settings of now."""
    set_untracked(model, **{f"{kind}_function": None for kind in KINDS})


def _change_settings(model: Any, **changes: Any) -> None:
    set_untracked(model, **{_ATTRIBUTE: replace(settings_of(model), **changes)})
    clear_functions(model)


def _accumulation_changes(model: Any, steps: Any, method: str) -> dict[str, Any]:
    """Return the settings for a number of accumulated batches; refuse one that differs from that of another method."""
    count = whole_number(_STEPS, steps, 1)
    current = settings_of(model)
    if current.accumulation_source not in ("", method) and count != current.accumulation:
        raise ipu.ArgumentError(
            f"two methods of {model.name} set different numbers of accumulated batches",
            expected=f"{current.accumulation}, as {current.accumulation_source} says, or only one of the two methods",
            got=f"{count} of {method}",
        )
    return {"accumulation": count, "accumulation_source": method}


@checking_calls("model.set_gradient_accumulation_options", first="model")
def set_gradient_accumulation_options(
    model: Any, gradient_accumulation_steps_per_replica: int, gradient_accumulation_reduction_method: str = "mean"
) -> None:
    """Accumulate gradients over several batches for each update of the weights.

    Batches have equal weight: with masks the update is not that of one large batch, as each loss is the mean of the
    batch's valid elements; nor is it with batch normalisation, whose statistics are those of each batch.

    Args:
        model: a Keras model.
        gradient_accumulation_steps_per_replica: batches for each replica.
        gradient_accumulation_reduction_method: "mean", "running_mean" or "sum" of the batches.

    Raises:
        ArgumentError: the number is not an integer from 1, the method is unknown, or `set_pipelining_options` set
            another number.
    """
    reduction = _parse_choice(_METHOD, gradient_accumulation_reduction_method, REDUCTIONS)
    steps = gradient_accumulation_steps_per_replica
    changes = _accumulation_changes(model, steps, "set_gradient_accumulation_options")
    _change_settings(model, reduction=reduction, **changes)


@checking_calls("model.set_replication_options", first="model")
def set_replication_options(model: Any, replicas: int = 1) -> None:
    """Run copies of the model side by side, on different batches; gradients are averaged.

    Batches have equal weight, as in `set_gradient_accumulation_options`.

    Args:
        model: a Keras model.
        replicas: number of copies; the IPUs are shared equally.

    Raises:
        ArgumentError: the number is not an integer from 1.
    """
    _change_settings(model, replicas=whole_number("replicas", replicas, 1))


@checking_calls("model.set_pipelining_options", first="model")
def set_pipelining_options(
    model: Any,
    gradient_accumulation_steps_per_replica: int | None = None,
    *,
    gradient_accumulation_reduction_method: str | None = None,
    schedule: Any = None,
    pipeline_schedule: Any = None,
    device_mapping: Any = None,
    recompute: Recompute | None = None,
) -> None:
    """Set the pipeline of a model with stages; arguments that are None leave a setting unchanged.

    Args:
        model: a Keras model whose layers are in stages.
        gradient_accumulation_steps_per_replica: micro-batches for each update, each of one batch.
        gradient_accumulation_reduction_method: as `set_gradient_accumulation_options`.
        schedule: as `ipu.pipeline` takes it.
        pipeline_schedule: a member of `ipu.ops.pipelining_ops.PipelineSchedule`, in place of `schedule`.
        device_mapping: IPU of each stage.
        recompute: as `ipu.pipeline` takes it.

    Raises:
        ArgumentError: a value that its setting does not accept, both forms of the schedule, or a number of batches
            other than that of `set_gradient_accumulation_options`.
    """
    # Stages are known at the first batch: settings that need some are refused there, see `layer_stages`.
    changes: dict[str, Any] = {}
    if gradient_accumulation_steps_per_replica is not None:
        changes |= _accumulation_changes(model, gradient_accumulation_steps_per_replica, "set_pipelining_options")
    if gradient_accumulation_reduction_method is not None:
        changes["reduction"] = _parse_choice(_METHOD, gradient_accumulation_reduction_method, REDUCTIONS)
    if pipeline_schedule is not None:
        if schedule is not None:
            got = f"schedule={schedule!r}, pipeline_schedule={pipeline_schedule!r}"
            problem = "set_pipelining_options has two schedules"
            raise ipu.ArgumentError(problem, expected="schedule= or pipeline_schedule=", got=got)
        schedule = pipeline_schedule.value if isinstance(pipeline_schedule, Enum) else pipeline_schedule
    if schedule is not None:
        changes["schedule"] = as_schedule(schedule)
    if device_mapping is not None:
        changes["device_mapping"] = as_numbers("device_mapping", device_mapping, "set_pipelining_options")
    if recompute is not None:
        check_recompute("recompute of set_pipelining_options", recompute)
        changes["recompute"] = recompute
    _change_settings(model, **changes)


@checking_calls("model.set_infeed_queue_options", first="model")
def set_infeed_queue_options(model: Any, prefetch_depth: int = 2) -> None:
    """Prepare batches on the host, in another thread, while the model trains.

    Args:
        model: a Keras model.
        prefetch_depth: upper bound of batches that are ready; 0 for none ahead.

    Raises:
        ArgumentError: the number is not an integer from 0.
    """
    _change_settings(model, prefetch_depth=whole_number("prefetch_depth", prefetch_depth, 0))


@checking_calls("model.set_outfeed_queue_options", first="model")
def set_outfeed_queue_options(model: Any, outfeed_mode: str = "last", buffer_depth: int | None = None) -> None:
    """Set the logs that an execution of several steps sends to the host.

    Args:
        model: a Keras model.
        outfeed_mode: "last" for those of the last step, "all" for those of all: `model.ipu_outfeed` has a row a step.
        buffer_depth: results that a queue on the host would have space for: without effect, which a warning says.

    Raises:
        ArgumentError: the mode is neither, or the depth is not an integer from 1.
    """
    if buffer_depth is not None:
        depth = whole_number("buffer_depth", buffer_depth, 1)
        text = "buffer_depth=%d of set_outfeed_queue_options has no effect: the host takes all results of an execution"
        _LOG.warning(text, depth)
    _change_settings(model, outfeed=_parse_choice("outfeed_mode", outfeed_mode, OUTFEEDS))


def _parse_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    word = str(getattr(value, "name", value)).lower()  # Graphcore's examples pass members of enumerations
    if word not in choices:
        expected = f"one of {', '.join(map(repr, choices))}"
        raise ipu.ArgumentError(f"{name} is unknown", expected=expected, got=repr(value), hint=nearest(word, choices))
    return word


# Text by remedy of `ipu.jit`: {} is the text of `ipu.jit`, "" leaves the remedy out. Remedies that are not listed keep
# their text.
_IN_KERAS = {
    "batch": "{}; model.set_gradient_accumulation_options(…) lets an update have as many examples as before",
    "code": "fewer different steps on each IPU: fewer layers, or layers in stages",
    "float16": "{}: dtype of layers, or keras.config.set_dtype_policy",
    "checkpoint": "",  # "recompute" below is of all gradients
    "recompute": "config.allow_recompute = True, which keeps less of what gradients need",
    "pipelines": 'model.set_pipelining_options(recompute="auto"), which keeps less of what gradients need',
    "io_tiles": "a smaller config.io_tiles.num_io_tiles: I/O tiles take memory from what computes",
    "mapping": "",
    "offload": "",
    "advise": "",
    "machine": "",
    "allow": "IPUStrategy(config, ipujax.Options(allow_out_of_memory=True)) for a profile even so",
}


def with_keras_remedies(
    error: ipu.TileMemoryError, model: Any, settings: ModelSettings, device: ipu.IPUModel, batches: int
) -> ipu.TileMemoryError:
    """Return the error of a compiled Keras model with remedies in the words of Keras and its strategy."""
    translated = {name: _IN_KERAS.get(name, "{}").format(way) for name, way in error.ways.items()}
    allow = translated.pop("allow", "")  # the last resort comes last
    ways = {**translated, **dict(_model_remedies(model, settings, device, batches)), "allow": allow}
    return error.with_ways({name: way for name, way in ways.items() if way})


def _model_remedies(
    model: Any, settings: ModelSettings, device: ipu.IPUModel, batches: int
) -> Iterator[tuple[str, str]]:
    """Yield name and text of remedies that only Keras models have."""
    updates = batches // settings.batches_of_update
    if updates > 1:
        fewer = f"steps_per_execution={settings.batches_of_update}"
        yield "steps", f"model.compile(..., {fewer}): all {batches} batches of an execution are on the chip at once"
    if settings.stages < 2:
        yield (
            "stages",
            "layers on several IPUs: PipelineStage, or model.set_pipeline_stage_assignment, "
            "config.auto_select_ipus, and model.set_pipelining_options(…) for how the pipeline runs",
        )
    target = device.target
    chip_tiles = ipu.IPUModel(arch=CHIP_NAMES[target.name]).target.tiles_per_ipu
    if target.tiles_per_ipu < chip_tiles:
        yield "tiles", f"config.ipu_model.tiles_per_ipu = 0, for all {chip_tiles:,} tiles of the chip"
