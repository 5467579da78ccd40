"""Check that the batches of an epoch are a whole number of updates, before any of them is read.

Input: a model's settings, and the arguments of its `fit`. Output: nothing, or an `ArgumentError`.
Limits: the batches of generators and `tf.data` are not known before; a batch of theirs that is not a whole update is
refused when it is read, and the model keeps its weights of that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

import ipujax as ipu
from ipujax.keras.device_loop import Execution
from ipujax.keras.model_state import ModelSettings, settings_of

_BATCH_SIZE = 32  # default of `keras.Model.fit` for arrays


def check_last_batch(model: Any, fitting: Mapping[str, Any]) -> None:
    """Refuse data of a `fit` whose last batch is smaller than others, where an update needs batches of one size."""
    settings = settings_of(model)
    data = fitting.get("x")
    if settings.batches_of_update == 1:
        return
    if isinstance(data, keras.utils.PyDataset):
        if fitting.get("steps_per_epoch") is None and data.num_batches:
            _check_dataset(model, settings, data)
    elif (examples := _examples(data)) is not None:
        _check_arrays(model, settings, examples, fitting)


def batches_of_epoch(model: Any, steps: int) -> int:
    """Return the batches that Keras reads for an epoch of so many steps of endless data: those of whole executions."""
    return int(-(-steps // model.steps_per_execution) * model.steps_per_execution)


def _check_dataset(model: Any, settings: ModelSettings, data: Any) -> None:
    # Of a dataset that is read by number, the last batch is known without reading the others.
    first, last = (_examples(keras.utils.unpack_x_y_sample_weight(data[n])[0]) for n in (0, data.num_batches - 1))
    if first is not None and last is not None and first != last:
        hint = f"a dataset without the last {last} examples, or with batches of one size"
        raise _refusal(model, settings, last, first, hint)


def _check_arrays(model: Any, settings: ModelSettings, examples: int, fitting: Mapping[str, Any]) -> None:
    split = fitting.get("validation_split") or 0.0
    if split and fitting.get("validation_data") is None:
        examples = int(np.floor(examples * (1 - split)))  # as Keras rounds
    size = fitting.get("batch_size") or _BATCH_SIZE
    steps = fitting.get("steps_per_epoch")
    full_batches, last = divmod(examples, size)
    epochs = fitting.get("epochs", 1) - fitting.get("initial_epoch", 0)
    if steps is not None and batches_of_epoch(model, steps) * epochs <= full_batches:
        return  # the fit ends before the last batch
    if last:
        raise _refusal(model, settings, last, size, _suggest_data(examples, size, settings.batches_of_update))


def _suggest_data(examples: int, size: int, batches: int) -> str:
    """Return data that are a whole number of updates of so many batches."""
    suggestions = []
    if divisible := examples - examples % (size * batches):
        suggestions.append(f"the first {divisible:,} of {examples:,} examples")
    sizes = range(min(size, examples // batches), 0, -1)  # the largest first: the nearest to the user's
    if divisor := next((n for n in sizes if examples % (n * batches) == 0), 0):
        suggestions.append(f"batch_size={divisor}")
    return ", or ".join(suggestions) or f"at least {batches} batches"


def _refusal(model: Any, settings: ModelSettings, last: int, size: int, hint: str) -> ipu.ArgumentError:
    return ipu.ArgumentError(
        f"the last batch of an epoch is not a whole update of {model.name}",
        expected=f"batches of one size, and of them {settings.in_words}",
        got=f"a batch of {last:,} examples behind those of {size:,}",
        hint=hint,
    )


def _examples(x: Any) -> int | None:
    """Return the number of examples of arrays; None for other data."""
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in keras.tree.flatten(x)]
    return int(shapes[0][0]) if shapes and all(shapes) else None


class CheckUpdates(keras.callbacks.Callback):
    """Callback that refuses an epoch that is not a whole number of updates, and measures the time of the fit."""

    def on_train_begin(self, logs: Any = None) -> None:
        settings = settings_of(self.model)
        steps = self.params.get("steps")  # None for data without a length
        if steps is not None and (remainder := steps % settings.batches_of_update):
            fewer = f"steps_per_epoch={steps - remainder}, or " if steps > remainder else ""
            raise ipu.ArgumentError(
                f"the batches of an epoch are not a whole number of updates of {self.model.name}",
                expected=settings.in_words,
                got=steps,
                hint=f"{fewer}data of {steps - remainder + settings.batches_of_update} batches",
            )
        if isinstance(self.model.train_function, Execution):
            epochs = self.params["epochs"]
            self.model.train_function.begin_fit(None if steps is None else batches_of_epoch(self.model, steps) * epochs)

    def on_train_end(self, logs: Any = None) -> None:
        if isinstance(self.model.train_function, Execution):
            self.model.train_function.end_fit()
