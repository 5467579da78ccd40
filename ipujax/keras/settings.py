"""What a model is set to do on IPUs beside what `compile` says: accumulation, replicas, stages, data.

Input: what the `set_…_options` of a model are called with. Output: `ModelSettings`, frozen and checked; they are kept
with the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ipujax.calls import as_numbers, whole_number
from ipujax.keras.attributes import keep
from ipujax.lowering.schedules import as_schedule
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.options import check_recompute
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.target import nearest

REDUCTIONS = ("mean", "sum", "running_mean")
OUTFEEDS = ("last", "all")
KINDS = ("train", "test", "predict")  # of functions that Keras' loops call
_KEPT_AS = "ipu_settings"  # attribute of a model
_STEPS, _METHOD = "gradient_accumulation_steps_per_replica", "gradient_accumulation_reduction_method"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a model runs on IPUs.

    Args:
        accumulation: batches whose gradients are accumulated in each replica for an update.
        accumulation_is_of: the method that said so, empty where none did.
        reduction: what becomes of these gradients.
        replicas: copies of the model, each on its share of the IPUs and of the batches.
        schedule: of the pipeline, as `ipu.pipeline` takes it.
        device_mapping: IPU of each stage.
        recompute: as `ipu.pipeline` takes it.
        prefetch_depth: batches that the host prepares ahead; 0 where it prepares each when it is asked for.
        outfeed: whether an execution sends what the last of its steps logs, or what all do.
        stages: how many there are, 0 for none; as a trace of the model found, see `stage_trace`.
    """

    accumulation: int = 1
    accumulation_is_of: str = ""
    reduction: str = "mean"
    replicas: int = 1
    schedule: Any = None
    device_mapping: tuple[int, ...] | None = None
    recompute: str | None = None
    prefetch_depth: int = 0
    outfeed: str = "last"
    stages: int = 0

    @property
    def batches_of_update(self) -> int:
        """Batches that an update of the weights takes, of all replicas."""
        return self.accumulation * self.replicas

    @property
    def in_words(self) -> str:
        """How many batches an update takes, for messages."""
        return f"a multiple of {self.batches_of_update}: {self.accumulation} accumulated × {self.replicas} replicas"


def settings_of(model: Any) -> ModelSettings:
    """The settings of a model."""
    found: ModelSettings = model.__dict__.get(_KEPT_AS, ModelSettings())
    return found


def forget_functions(model: Any) -> None:
    """Has what loops call made anew."""
    keep(model, **{f"{kind}_function": None for kind in KINDS})


def _changed(model: Any, **changes: Any) -> None:
    keep(model, **{_KEPT_AS: replace(settings_of(model), **changes)})
    forget_functions(model)


def _accumulation(model: Any, steps: Any, method: str) -> dict[str, Any]:
    """The setting of a number of batches, which another method may not have set otherwise."""
    count, before = whole_number(_STEPS, steps, 1), settings_of(model)
    if before.accumulation_is_of not in ("", method) and count != before.accumulation:
        raise ArgumentError(
            f"two methods of {model.name} say how many batches are accumulated",
            expected=f"{before.accumulation}, as {before.accumulation_is_of} says, or one of both methods",
            got=f"{count} of {method}",
        )
    return {"accumulation": count, "accumulation_is_of": method}


@checking_calls("model.set_gradient_accumulation_options", first="model")
def set_gradient_accumulation_options(
    model: Any, gradient_accumulation_steps_per_replica: int, gradient_accumulation_reduction_method: str = "mean"
) -> None:
    """Accumulates gradients over several batches for each update of the weights.

    All batches count alike: with masks the update is not that of one large batch, as each loss is the mean of its own
    valid elements; nor is it with batch normalisation, whose statistics are those of each batch.

    Args:
        model: a Keras model.
        gradient_accumulation_steps_per_replica: batches for each replica.
        gradient_accumulation_reduction_method: "mean", "running_mean" or "sum" of the batches.

    Raises:
        ArgumentError: for a number or a method that there is not, or if `set_pipelining_options` says another.
    """
    steps, how = gradient_accumulation_steps_per_replica, gradient_accumulation_reduction_method
    reduction = _one_of(_METHOD, how, REDUCTIONS)
    _changed(model, reduction=reduction, **_accumulation(model, steps, "set_gradient_accumulation_options"))


@checking_calls("model.set_replication_options", first="model")
def set_replication_options(model: Any, replicas: int = 1) -> None:
    """Runs copies of the model side by side, each with its own batches; gradients are averaged.

    All batches count alike, as in `set_gradient_accumulation_options`.

    Args:
        model: a Keras model.
        replicas: number of copies; each has its even share of the IPUs.

    Raises:
        ArgumentError: for no such number.
    """
    _changed(model, replicas=whole_number("replicas", replicas, 1))


@checking_calls("model.set_pipelining_options", first="model")
def set_pipelining_options(
    model: Any,
    gradient_accumulation_steps_per_replica: int | None = None,
    *,
    gradient_accumulation_reduction_method: str | None = None,
    schedule: Any = None,
    device_mapping: Any = None,
    recompute: str | None = None,
) -> None:
    """Says how a model with stages is pipelined; what is None stays as it was set before.

    Args:
        model: a Keras model whose layers are in stages.
        gradient_accumulation_steps_per_replica: micro-batches for each update, each of one batch.
        gradient_accumulation_reduction_method: as `set_gradient_accumulation_options`.
        schedule: as `ipu.pipeline` takes it.
        device_mapping: IPU of each stage.
        recompute: as `ipu.pipeline` takes it.

    Raises:
        ArgumentError: for a setting that there is not, or if `set_gradient_accumulation_options` says another number.
    """
    changes: dict[str, Any] = {}
    if gradient_accumulation_steps_per_replica is not None:
        changes |= _accumulation(model, gradient_accumulation_steps_per_replica, "set_pipelining_options")
    if gradient_accumulation_reduction_method is not None:
        changes["reduction"] = _one_of(_METHOD, gradient_accumulation_reduction_method, REDUCTIONS)
    if schedule is not None:
        changes["schedule"] = as_schedule(schedule)
    if device_mapping is not None:
        changes["device_mapping"] = as_numbers("device_mapping", device_mapping, "set_pipelining_options")
    if recompute is not None:
        check_recompute("recompute of set_pipelining_options", recompute)
        changes["recompute"] = recompute
    _changed(model, **changes)


@checking_calls("model.set_infeed_queue_options", first="model")
def set_infeed_queue_options(model: Any, prefetch_depth: int = 2) -> None:
    """Prepares batches on the host, in a thread of its own, while the model trains.

    Args:
        model: a Keras model.
        prefetch_depth: batches that are ready at most; 0 for none ahead.

    Raises:
        ArgumentError: for no such number.
    """
    _changed(model, prefetch_depth=whole_number("prefetch_depth", prefetch_depth, 0))


@checking_calls("model.set_outfeed_queue_options", first="model")
def set_outfeed_queue_options(model: Any, outfeed_mode: str = "last") -> None:
    """Says what an execution of several steps sends back.

    Args:
        model: a Keras model.
        outfeed_mode: "last", what the last step logs; "all", what all do: `model.ipu_outfeed` has one row a step.

    Raises:
        ArgumentError: for no such mode.
    """
    _changed(model, outfeed=_one_of("outfeed_mode", outfeed_mode, OUTFEEDS))


def _one_of(name: str, given: Any, known: tuple[str, ...]) -> str:
    word = str(getattr(given, "name", given)).lower()  # members of an enumeration too
    if word not in known:
        expected = f"one of {', '.join(map(repr, known))}"
        raise ArgumentError(f"{name} is no such way", expected=expected, got=repr(given), hint=nearest(word, known))
    return word
