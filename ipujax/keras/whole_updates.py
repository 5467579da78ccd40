"""Whether the batches of an epoch are a whole number of updates: asked before any of them is taken.

Input: a model's settings, and the arguments of its `fit`. Output: nothing, or an `ArgumentError`.
Limits: what generators and `tf.data` give is not known before; a batch of theirs that is no whole update is refused
when it comes, and the model keeps the weights it has then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from ipujax.keras.device_loop import Execution
from ipujax.keras.settings import ModelSettings, settings_of
from ipujax.runtime.errors import ArgumentError

_BATCH_SIZE = 32  # Keras' own, of arrays


def check_last_batch(model: Any, fitting: Mapping[str, Any]) -> None:
    """Refuses arrays, and datasets that are read by number, whose last batch is smaller than the others.

    Args:
        model: a Keras model.
        fitting: the arguments of its `fit` by name.

    Raises:
        ArgumentError: if accumulation or replicas need another of the same size, and the loop gets so far.
    """
    settings, data = settings_of(model), fitting.get("x")
    if settings.batches_of_update == 1:
        return
    if isinstance(data, keras.utils.PyDataset):
        if fitting.get("steps_per_epoch") is None and data.num_batches:
            _check_dataset(model, settings, data)
    elif (examples := _examples(data)) is not None:
        _check_arrays(model, settings, examples, fitting)


def batches_of_epoch(model: Any, steps: int) -> int:
    """Batches that Keras takes for an epoch of so many steps where the data goes on: those of whole executions."""
    return int(-(-steps // model.steps_per_execution) * model.steps_per_execution)


def _check_dataset(model: Any, settings: ModelSettings, data: Any) -> None:
    first, last = (_examples(keras.utils.unpack_x_y_sample_weight(data[n])[0]) for n in (0, data.num_batches - 1))
    if first is not None and last is not None and first != last:
        hint = f"a dataset without the last {last} examples, or with batches of one size"
        raise _refusal(model, settings, last, first, hint)


def _check_arrays(model: Any, settings: ModelSettings, examples: int, fitting: Mapping[str, Any]) -> None:
    split = fitting.get("validation_split") or 0.0
    if split and fitting.get("validation_data") is None:
        examples = int(np.floor(examples * (1 - split)))
    size, steps = fitting.get("batch_size") or _BATCH_SIZE, fitting.get("steps_per_epoch")
    whole, last = divmod(examples, size)
    epochs = fitting.get("epochs", 1) - fitting.get("initial_epoch", 0)
    if steps is not None and batches_of_epoch(model, steps) * epochs <= whole:
        return
    if last:
        raise _refusal(model, settings, last, size, _data_that_is_whole(examples, size, settings.batches_of_update))


def _data_that_is_whole(examples: int, size: int, batches: int) -> str:
    """What would be a whole number of updates of so many batches."""
    ways = []
    if kept := examples - examples % (size * batches):
        ways.append(f"the first {kept:,} of {examples:,} examples")
    smaller = next(
        (each for each in range(min(size, examples // batches), 0, -1) if examples % (each * batches) == 0), 0
    )
    if smaller:
        ways.append(f"batch_size={smaller}")
    return ", or ".join(ways) or f"at least {batches} batches"


def _refusal(model: Any, settings: ModelSettings, last: int, size: int, hint: str) -> ArgumentError:
    return ArgumentError(
        f"the last batch of an epoch is no whole update of {model.name}",
        expected=f"batches of one size, and of them {settings.in_words}",
        got=f"a batch of {last:,} examples behind those of {size:,}",
        hint=hint,
    )


def _examples(x: Any) -> int | None:
    """How many examples arrays have; None for what is none."""
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in keras.tree.flatten(x)]
    return int(shapes[0][0]) if shapes and all(shapes) else None


class CheckUpdates(keras.callbacks.Callback):
    """Refuses an epoch that is no whole number of updates before it begins, and begins to measure the host."""

    def on_train_begin(self, logs: Any = None) -> None:
        settings, steps = settings_of(self.model), self.params.get("steps")
        if steps is not None and (left := steps % settings.batches_of_update):
            fewer = f"steps_per_epoch={steps - left}, or " if steps > left else ""
            raise ArgumentError(
                f"the batches of an epoch are no whole number of updates of {self.model.name}",
                expected=settings.in_words,
                got=steps,
                hint=f"{fewer}data of {steps - left + settings.batches_of_update} batches",
            )
        if isinstance(self.model.train_function, Execution):
            epochs = self.params["epochs"]
            self.model.train_function.begin_fit(None if steps is None else batches_of_epoch(self.model, steps) * epochs)

    def on_train_end(self, logs: Any = None) -> None:
        if isinstance(self.model.train_function, Execution):
            self.model.train_function.end_fit()
