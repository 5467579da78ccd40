"""Stages of Keras models: assignment of layers to stages, and of their operations when a model is traced.

Input: calls inside a `PipelineStage`, of layers of a functional model or in the `call` of a model or a layer; layers
created inside one; or a list for all calls of a model's layers (`stage_assignment`). Output: numbers of stages, stored
on the layers, and `in_stages`, in which a model is traced with its layers' operations in their stages (`ipu.stage`).

A scope around a call, or a list, takes precedence over the scope in which a layer was created, as in Graphcore's Keras;
and as there, stages are not nested.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras

import ipujax as ipu
from ipujax.front_end import ArgumentValueError, whole_number
from ipujax.keras.model_state.attributes import replace_attribute, set_untracked

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
    """Return whether layers of a model are in stages without a trace; see `stage_trace` for those in a `call`."""
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
