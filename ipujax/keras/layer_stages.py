"""Stages of Keras models: assignment of layers to stages, and of their operations when a model is traced.

Input: calls inside a `PipelineStage`, of layers of a functional model or in the `call` of a model or a layer; layers
created inside one; or a list for all layers of a model. Output: numbers of stages, stored on the layers, and
`in_stages`, in which a model is traced with its layers' operations in their stages (`ipu.stage`).

A scope around a call, or a list, takes precedence over the scope in which a layer was created, as in Graphcore's Keras;
and as there, stages are not nested.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from numbers import Integral
from typing import Any

import keras

from ipujax.arguments import whole_number
from ipujax.keras.attributes import replace_attribute, set_untracked
from ipujax.keras.settings import clear_functions
from ipujax.pipeline import stage
from ipujax.runtime.errors import ArgumentError, ArgumentValueError
from ipujax.runtime.logs import Log
from ipujax.runtime.signatures import checking_calls

_LOG = Log("keras")
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
        stage(index),
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
            with _open_stage(number, f"the layer {layer.name} of stage {number}"), stage(number):
                return keras_call(layer, *args, **kwargs)
        if created_in is not None and _OPEN.get() is None:
            with stage(created_in):  # not `_open_stage`: a layer inside may be in another stage
                return keras_call(layer, *args, **kwargs)
        return keras_call(layer, *args, **kwargs)

    with replace_attribute(keras.layers.Layer, "__call__", staged_call):
        yield


def assignable_layers(model: Any) -> list[Any]:
    """Return the layers of a model that may be in a stage, in order."""
    return [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]


def set_pipeline_stage_assignment(model: Any, assignment: Sequence[int | None]) -> None:
    """Assign the layers of a model to stages.

    Args:
        model: a Keras model.
        assignment: the stage of each layer of `model.layers` but inputs, in order, from 0 without a gap; None for a
            layer with stages inside.

    Raises:
        ArgumentError: the length is not the number of layers, a stage is not an integer from 0 or has no layers, or
            layers of a sequential model go back to an earlier stage.
    """
    if isinstance(assignment, str) or not isinstance(assignment, Iterable):
        problem = "assignment of set_pipeline_stage_assignment must be a list"
        raise ArgumentError(problem, expected="the stage of each layer", got=repr(assignment))
    layers = assignable_layers(model)
    numbers = list(assignment)
    if not layers:
        raise ArgumentError(f"{model.name} has no layers to be in stages", expected="a model with layers")
    if len(numbers) != len(layers):
        raise ArgumentError(
            "assignment of set_pipeline_stage_assignment must have an entry for each layer",
            expected=f"{len(layers)} stages, for {', '.join(layer.name for layer in layers)}",
            got=len(numbers),
        )
    assigned = [n for n in numbers if n is not None]
    if invalid := [n for n in assigned if isinstance(n, bool) or not isinstance(n, Integral) or n < 0]:
        problem = "stages of set_pipeline_stage_assignment must be whole numbers from 0"
        raise ArgumentError(problem, expected="whole numbers from 0", got=repr(invalid[0]))
    missing = set(range(max(assigned, default=-1) + 1)) - set(assigned)
    if missing and len(assigned) == len(numbers):  # else layers with None may have the missing stages inside
        raise ArgumentError("a stage has no layers", expected=f"a layer in stage {min(missing)}", got=numbers)
    if isinstance(model, keras.Sequential):  # other models may list layers in another order than they call them
        _check_order([(layer, n) for layer, n in zip(layers, numbers, strict=True) if n is not None])
    for layer, number in zip(layers, numbers, strict=True):
        if number is None:
            layer.__dict__.pop(_ASSIGNED, None)
        else:
            set_untracked(layer, **{_ASSIGNED: (int(number),)})
    clear_functions(model)


def _check_order(assigned: Sequence[tuple[Any, int]]) -> None:
    """Refuse a layer in an earlier stage than the layer before it."""
    for (previous, previous_stage), (layer, number) in pairwise(assigned):
        if number < previous_stage:
            raise ArgumentError(
                "set_pipeline_stage_assignment would have values flow back to an earlier stage",
                expected=f"{layer.name} in stage {previous_stage} or a later one, as {previous.name} before it is in"
                f" {previous_stage}",
                got=number,
            )


def get_pipeline_stage_assignment(model: Any) -> list[int | None]:
    """Return the stage of each layer of `model.layers` but inputs, the first of several; None for layers in none.

    Stages inside a `call` are known once it was traced: after a call or a run of the model.
    """
    _warn_without_stages(model)
    return [next(iter(_known_stages(layer)), None) for layer in assignable_layers(model)]


@checking_calls("model.print_pipeline_stage_assignment_summary", first="model")
def print_pipeline_stage_assignment_summary(model: Any, print_fn: Callable[[str], Any] | None = None) -> None:
    """Print the stages of a model's layers, including inner layers that have any.

    Args:
        model: a Keras model.
        print_fn: called with each line in place of `print`.
    """
    _warn_without_stages(model)
    direct = set(map(id, assignable_layers(model)))
    rows = [("layer", "class", "stages")]
    for layer in _all_layers(model):
        stages = ", ".join(map(str, sorted(set(_known_stages(layer)))))
        if layer is not model and (id(layer) in direct or stages):
            rows.append((layer.path or layer.name, type(layer).__name__, stages or "none of its own"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        (print if print_fn is None else print_fn)(line)


def _warn_without_stages(model: Any) -> None:
    if not any(map(_known_stages, _all_layers(model))):
        text = "no layer of %s is known to be in a stage; stages inside a call are known when it was called, or has run"
        _LOG.warning(text, model.name)


def _known_stages(layer: Any) -> tuple[int, ...]:
    """Return the stages of a layer's calls so far, by the precedence of `in_stages`."""
    attributes = layer.__dict__
    created_in = (attributes[_CREATED_IN],) if _CREATED_IN in attributes else ()
    stages: tuple[int, ...] = attributes.get(_ASSIGNED) or attributes.get(_TRACED) or created_in
    return stages


def reset_pipeline_stage_assignment(model: Any) -> None:
    """Remove the stages of all layers of a model, including inner ones: those of calls, creation and assignment.

    Scopes inside a `call` remain.
    """
    for layer in _all_layers(model):
        for attribute in _ATTRIBUTES if layer is not model else (_CREATED_IN,):  # its calls are of an outer model
            layer.__dict__.pop(attribute, None)
    clear_functions(model)


def has_stages(model: Any) -> bool:
    """Return whether layers of a model are in stages without a trace; see `stage_trace` for those in a `call`."""
    return any(_ASSIGNED in layer.__dict__ or _CREATED_IN in layer.__dict__ for layer in _all_layers(model))


def clear_calls(model: Any) -> None:
    """Remove the stages of calls in scopes from the layers of a model, before another trace."""
    for layer in _all_layers(model):
        layer.__dict__.pop(_TRACED, None)


def _all_layers(model: Any) -> list[Any]:
    """Return a model and its layers at any depth, each once: layers may be shared."""
    return list(dict.fromkeys(model._flatten_layers()))
