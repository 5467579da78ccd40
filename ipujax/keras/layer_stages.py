"""Stages of Keras models: which layers are in which, and how their operations come to be in it.

Input: layers that are called inside a `PipelineStage`, or a list for all layers of a model. Output: the number of the
stage of each layer, kept with the layer, and `in_stages`, in which a model that is traced has its layers' operations in
their stages (`ipu.stage`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, pairwise
from numbers import Integral
from typing import Any

import keras

from ipujax.keras.attributes import keep, replaced
from ipujax.keras.settings import forget_functions
from ipujax.pipeline import stage
from ipujax.runtime.errors import ArgumentError

_KEPT_AS = "ipu_pipeline_stages"  # attribute of a layer: the stage of each of its calls, in order


@contextmanager
def PipelineStage(number: int) -> Iterator[None]:
    """Puts layers that are called inside into a stage, while a functional model is put together or traced.

    Args:
        number: of the stage.

    Raises:
        ArgumentError: for no such number.
    """
    calling, depth = keras.layers.Layer.__call__, 0

    def recorded(layer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if not depth and any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten((args, kwargs))):
            _add(layer, number)
        depth += 1
        try:
            return calling(layer, *args, **kwargs)
        finally:
            depth -= 1

    with stage(number), replaced(keras.layers.Layer, "__call__", recorded):
        yield


def _add(layer: Any, number: int) -> None:
    keep(layer, **{_KEPT_AS: (*layer.__dict__.get(_KEPT_AS, ()), number)})


def assignable(model: Any) -> list[Any]:
    """The layers of a model that may be in a stage, in order."""
    return [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]


def set_pipeline_stage_assignment(model: Any, assignment: Sequence[int]) -> None:
    """Puts the layers of a model into stages.

    Args:
        model: a sequential or functional Keras model.
        assignment: the stage of each layer of `model.layers` but inputs, in order; from 0, none left out.

    Raises:
        ArgumentError: for a list of another length, numbers that are no stages, or a sequence of layers that goes back.
    """
    if isinstance(assignment, str) or not isinstance(assignment, Iterable):
        what = "set_pipeline_stage_assignment was given no list"
        raise ArgumentError(what, expected="the stage of each layer", got=repr(assignment))
    layers, numbers = assignable(model), list(assignment)
    if not layers:
        raise ArgumentError(f"{model.name} has no layers to be in stages", expected="a model with layers")
    if len(numbers) != len(layers):
        raise ArgumentError(
            "set_pipeline_stage_assignment was given a list of another length than the model has layers",
            expected=f"{len(layers)} stages, for {', '.join(layer.name for layer in layers)}",
            got=len(numbers),
        )
    if wrong := [n for n in numbers if isinstance(n, bool) or not isinstance(n, Integral) or n < 0]:
        what = "set_pipeline_stage_assignment was given what is no stage"
        raise ArgumentError(what, expected="whole numbers from 0", got=repr(wrong[0]))
    if missing := set(range(max(numbers) + 1)) - set(numbers):
        raise ArgumentError("a stage has no layers", expected=f"a layer in stage {min(missing)}", got=numbers)
    if isinstance(model, keras.Sequential):
        _check_order(layers, numbers)
    for layer, number in zip(layers, numbers, strict=True):
        keep(layer, **{_KEPT_AS: (int(number),)})
    forget_functions(model)


def _check_order(layers: Sequence[Any], numbers: Sequence[int]) -> None:
    """Refuses a layer in an earlier stage than the one before it."""
    for (before, high), (layer, low) in pairwise(zip(layers, numbers, strict=True)):
        if low < high:
            raise ArgumentError(
                "set_pipeline_stage_assignment would have values flow back to an earlier stage",
                expected=f"{layer.name} in stage {high} or a later one, as {before.name} before it is in {high}",
                got=low,
            )


def get_pipeline_stage_assignment(model: Any) -> list[int | None]:
    """The stage of each layer of `model.layers` but inputs; None for those in none."""
    return [layer.__dict__.get(_KEPT_AS, (None,))[0] for layer in assignable(model)]


def reset_pipeline_stage_assignment(model: Any) -> None:
    """Takes all layers of a model out of their stages."""
    for layer in _staged(model):
        object.__delattr__(layer, _KEPT_AS)
    forget_functions(model)


def has_stages(model: Any) -> bool:
    """Whether layers of a model are in stages."""
    return bool(_staged(model))


def num_stages(model: Any) -> int:
    """The number of stages that layers of a model are in, 1 for none."""
    return 1 + max((number for layer in _staged(model) for number in layer.__dict__[_KEPT_AS]), default=0)


def _staged(model: Any) -> list[Any]:
    """The layers in stages, also those of models inside; where both are, the inner stage counts."""
    layers = list(getattr(model, "layers", ()))
    return [
        *(layer for layer in layers if _KEPT_AS in layer.__dict__),
        *(x for layer in layers for x in _staged(layer)),
    ]


@contextmanager
def in_stages(model: Any) -> Iterator[None]:
    """While a model is traced inside, what its layers do is in their stages."""
    staged = _staged(model)
    for layer in staged:
        keep(layer, call=_in_stage(layer.call, layer.__dict__[_KEPT_AS]))
    try:
        yield
    finally:
        for layer in staged:
            object.__delattr__(layer, "call")


def _in_stage(call: Any, stages: tuple[int, ...]) -> Any:
    numbers = cycle(stages)

    def called(*args: Any, **kwargs: Any) -> Any:
        with stage(next(numbers)):
            return call(*args, **kwargs)

    return called
