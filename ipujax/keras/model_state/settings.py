"""Settings of a model for IPUs beside those of `compile`: accumulation, replicas, stages, data.

Input: arguments of a model's `set_…_options`. Output: `ModelSettings`, frozen and checked, stored on the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import ipujax as ipu
from ipujax.front_end import (
    Log,
    Recompute,
    as_numbers,
    as_schedule,
    check_recompute,
    checking_calls,
    nearest,
    whole_number,
)
from ipujax.keras.model_state.attributes import set_untracked

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
        stages: number of stages, 0 for none: set by a trace of the model, see `stage_trace`.
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
    # Stages are known at the first batch: settings that need some are refused there, see `stage_trace`.
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
