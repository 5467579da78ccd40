"""`model.export_for_ipu_serving`: a model's prediction of one batch, as a program in a file.

Input: a built model and a folder. Output: `model.ipujax` in it, which `ipu.load` reads in another process, with the
weights of now and the profile; and the loaded program, a function of the model's inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import keras

import ipujax as ipu
from ipujax.front_end import checking_calls, whole_number
from ipujax.keras.execution.model_steps import first_of, predict_step
from ipujax.keras.model_state.settings import settings_of
from ipujax.keras.stages.stage_trace import with_stages

FILE = "model.ipujax"
_STEP = "a layer of the model, or code around the call of the program that is returned"
_HINTS = {"preprocessing_step": _STEP, "postprocessing_step": _STEP}


def exporter(strategy_of: Callable[[], Any]) -> Callable[..., ipu.LoadedProgram]:
    """Return the method `export_for_ipu_serving`.

    Args:
        strategy_of: returns the strategy whose device and options a program is compiled for.
    """

    @checking_calls("model.export_for_ipu_serving", first="model", hints=_HINTS)
    def export_for_ipu_serving(model: Any, export_dir: Any, batch_size: int | None = None) -> ipu.LoadedProgram:
        """Write the prediction of a batch as a program, `model.ipujax` in a folder, and return it.

        Args:
            model: a functional or sequential Keras model, on the IPUs of the current configuration.
            export_dir: the folder, created if it does not exist.
            batch_size: examples of a call; None for that of the model's inputs.

        Raises:
            ArgumentError: the shapes of inputs are not known, or stages do not fit the IPUs.
        """
        shapes = _input_shapes(model, batch_size)
        strategy = strategy_of()
        values = [[v.value for v in each] for each in (model.trainable_variables, model.non_trainable_variables)]
        settings = replace(settings_of(model), accumulation=1, replicas=1)
        settings = with_stages(model, "predict", settings, strategy.device, values, (_structured(model, shapes),))
        step = predict_step(model, settings)

        def predict(*inputs: Any) -> Any:
            batches = jax.tree.map(lambda x: x[None], (_structured(model, inputs),))
            return first_of(step(values, batches)[0])

        predict.__name__ = f"{model.name}_serving"
        function = ipu.jit(predict, device=strategy.device, options=strategy.options)
        function.unused_ipus.may_idle(strategy.device)
        folder = Path(export_dir)
        folder.mkdir(parents=True, exist_ok=True)
        function.lower(*shapes).compile().save(folder / FILE)
        return ipu.load(folder / FILE)

    return export_for_ipu_serving


def _input_shapes(model: Any, batch_size: int | None) -> list[jax.ShapeDtypeStruct]:
    """Return shape and dtype of each input of a model."""
    inputs = model.inputs if hasattr(model, "inputs") and model.built else None
    if not inputs:
        hint = "model.build(...) of a sequential model; a functional model in place of a subclass"
        raise ipu.ArgumentError(f"the inputs of {model.name} are not known", expected="a model with inputs", hint=hint)
    sizes = [x.shape[0] if batch_size is None else whole_number("batch_size", batch_size, 1) for x in inputs]
    if None in sizes:
        problem = f"the batch size of {model.name} is not known"
        raise ipu.ArgumentError(problem, expected="batch_size= of export_for_ipu_serving, or of keras.Input")
    return [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for size, x in zip(sizes, inputs, strict=True)]


def _structured(model: Any, inputs: Any) -> Any:
    """Return inputs in a list as the model takes them."""
    return keras.tree.pack_sequence_as(model.input, list(inputs))
