"""Stages of Keras models: which layers are in which, and how their operations come to be in it.

Input: calls inside a `PipelineStage`, of layers of a functional model or in the `call` of a model or a layer; layers
made inside one; or a list for all layers of a model. Output: numbers of stages, kept with the layers, and `in_stages`,
in which a model that is traced has its layers' operations in their stages (`ipu.stage`).

Of what says a stage, a scope around a call or a list counts more than the scope in which a layer was made, as in
Graphcore's Keras; and as there, a stage is not inside another.
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

from ipujax.calls import whole_number
from ipujax.keras.attributes import keep, replaced
from ipujax.keras.settings import forget_functions
from ipujax.pipeline import stage
from ipujax.runtime.errors import ArgumentError, ArgumentValueError
from ipujax.runtime.logs import Log
from ipujax.runtime.signatures import checking_calls

_LOG = Log("keras")
# Attributes of a layer.
_ASSIGNED = "ipu_pipeline_stages"  # the stage of each of its calls, in order
_MADE_IN = "ipu_made_in_stage"  # the stage in whose scope it was made, of calls in no other
_SEEN = "ipu_stages_of_calls"  # the stages in whose scopes it was called when a model was traced, in order
_ATTRIBUTES = (_ASSIGNED, _MADE_IN, _SEEN)
_OPEN: ContextVar[tuple[int, str] | None] = ContextVar("ipujax_keras_stage", default=None)  # and what said so


@contextmanager
def PipelineStage(number: int) -> Iterator[None]:
    """Puts into a stage what is called inside: layers of a functional model, or operations in a `call`.

    Layers that are made inside are in the stage wherever they are called in no other.

    Args:
        number: of the stage, from 0.

    Raises:
        ArgumentError: for no such number, and inside of another stage.
    """
    checked = whole_number("PipelineStage needs the number of a stage", number, 0)
    calling, making, depth = keras.layers.Layer.__call__, keras.layers.Layer.__init__, 0

    @functools.wraps(calling)
    def recorded(layer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if not depth:
            _record(layer, checked, (args, kwargs))
        depth += 1
        try:
            return calling(layer, *args, **kwargs)
        finally:
            depth -= 1

    @functools.wraps(making)
    def made(layer: Any, *args: Any, **kwargs: Any) -> None:
        making(layer, *args, **kwargs)
        keep(layer, **{_MADE_IN: checked})

    with (
        _opened(checked, f"PipelineStage({checked})"),
        stage(checked),
        replaced(keras.layers.Layer, "__call__", recorded),
        replaced(keras.layers.Layer, "__init__", made),
    ):
        yield


@contextmanager
def _opened(number: int, what: str) -> Iterator[None]:
    """Refuses a stage inside of another."""
    outer = _OPEN.get()
    if outer is not None and outer[0] != number:
        raise ArgumentValueError(
            f"{what} is inside of another stage",
            expected=f"stage {outer[0]}, as {outer[1]} around it says, or no stage around it",
            got=number,
            hint="PipelineStage around the parts of a call alone, or around the call alone; in "
            "model.set_pipeline_stage_assignment(...) None for a layer with stages of its own",
        )
    token = _OPEN.set(outer or (number, what))
    try:
        yield
    finally:
        _OPEN.reset(token)


def _record(layer: Any, number: int, arguments: Any) -> None:
    """Notes a call in a scope: for good in a functional model, whose layers are called again behind the scope."""
    is_symbolic = any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten(arguments))
    attribute = _ASSIGNED if is_symbolic else _SEEN
    before = layer.__dict__.get(attribute, ())
    if is_symbolic or number not in before:
        keep(layer, **{attribute: (*before, number)})


@contextmanager
def in_stages() -> Iterator[None]:
    """While models are traced inside, what their layers do is in their stages."""
    calling, calls = keras.layers.Layer.__call__, Counter[int]()  # by the identity of the layer

    @functools.wraps(calling)
    def called(layer: Any, *args: Any, **kwargs: Any) -> Any:
        assigned, made_in = layer.__dict__.get(_ASSIGNED), layer.__dict__.get(_MADE_IN)
        if assigned:
            number = assigned[calls[id(layer)] % len(assigned)]
            calls[id(layer)] += 1
            with _opened(number, f"the layer {layer.name} of stage {number}"), stage(number):
                return calling(layer, *args, **kwargs)
        if made_in is not None and _OPEN.get() is None:
            with stage(made_in):
                return calling(layer, *args, **kwargs)
        return calling(layer, *args, **kwargs)

    with replaced(keras.layers.Layer, "__call__", called):
        yield


def assignable(model: Any) -> list[Any]:
    """The layers of a model that may be in a stage, in order."""
    return [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]


def set_pipeline_stage_assignment(model: Any, assignment: Sequence[int | None]) -> None:
    """Puts the layers of a model into stages.

    Args:
        model: a Keras model.
        assignment: the stage of each layer of `model.layers` but inputs, in order, from 0, none left out; None for
            layers that have stages of their own inside.

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
    given = [n for n in numbers if n is not None]
    if wrong := [n for n in given if isinstance(n, bool) or not isinstance(n, Integral) or n < 0]:
        what = "set_pipeline_stage_assignment was given what is no stage"
        raise ArgumentError(what, expected="whole numbers from 0", got=repr(wrong[0]))
    missing = set(range(max(given, default=-1) + 1)) - set(given)
    if missing and len(given) == len(numbers):
        raise ArgumentError("a stage has no layers", expected=f"a layer in stage {min(missing)}", got=numbers)
    if isinstance(model, keras.Sequential):
        _check_order([(layer, n) for layer, n in zip(layers, numbers, strict=True) if n is not None])
    for layer, number in zip(layers, numbers, strict=True):
        if number is None:
            layer.__dict__.pop(_ASSIGNED, None)
        else:
            keep(layer, **{_ASSIGNED: (int(number),)})
    forget_functions(model)


def _check_order(assigned: Sequence[tuple[Any, int]]) -> None:
    """Refuses a layer in an earlier stage than the one before it."""
    for (before, high), (layer, low) in pairwise(assigned):
        if low < high:
            raise ArgumentError(
                "set_pipeline_stage_assignment would have values flow back to an earlier stage",
                expected=f"{layer.name} in stage {high} or a later one, as {before.name} before it is in {high}",
                got=low,
            )


def get_pipeline_stage_assignment(model: Any) -> list[int | None]:
    """The stage of each layer of `model.layers` but inputs, the first of several; None for those in none.

    Stages inside a `call` are known once it was traced: when the model was called, or has run.
    """
    _warn_of_unknown(model)
    return [next(iter(_stages_of(layer)), None) for layer in assignable(model)]


@checking_calls("model.print_pipeline_stage_assignment_summary", first="model")
def print_pipeline_stage_assignment_summary(model: Any, print_fn: Callable[[str], Any] | None = None) -> None:
    """Prints the stages of a model's layers, with those of layers inside.

    Args:
        model: a Keras model.
        print_fn: takes each line in place of `print`.
    """
    _warn_of_unknown(model)
    direct = set(map(id, assignable(model)))
    rows = [("layer", "class", "stages")]
    for layer in _all_layers(model):
        stages = ", ".join(map(str, sorted(set(_stages_of(layer)))))
        if layer is not model and (id(layer) in direct or stages):
            rows.append((layer.path or layer.name, type(layer).__name__, stages or "none of its own"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        (print if print_fn is None else print_fn)(line)


def _warn_of_unknown(model: Any) -> None:
    if not any(map(_stages_of, _all_layers(model))):
        what = "no layer of %s is known to be in a stage; stages inside a call are known when it was called, or has run"
        _LOG.warning(what, model.name)


def _stages_of(layer: Any) -> tuple[int, ...]:
    """The stages of a layer's calls, as far as they are known."""
    own = layer.__dict__
    made_in = (own[_MADE_IN],) if _MADE_IN in own else ()
    stages: tuple[int, ...] = own.get(_ASSIGNED) or own.get(_SEEN) or made_in
    return stages


def reset_pipeline_stage_assignment(model: Any) -> None:
    """Takes all layers of a model, and layers inside, out of the stages they are called, made or assigned in.

    Scopes inside a `call` stay where they are.
    """
    for layer in _all_layers(model):
        for attribute in _ATTRIBUTES if layer is not model else (_MADE_IN,):
            layer.__dict__.pop(attribute, None)
    forget_functions(model)


def has_stages(model: Any) -> bool:
    """Whether layers of a model are in stages outside of calls; see `stage_trace` for those inside."""
    return any(_ASSIGNED in layer.__dict__ or _MADE_IN in layer.__dict__ for layer in _all_layers(model))


def forget_calls(model: Any) -> None:
    """Forgets the stages in whose scopes layers of a model were called before it is traced anew."""
    for layer in _all_layers(model):
        layer.__dict__.pop(_SEEN, None)


def _all_layers(model: Any) -> list[Any]:
    """A model, its layers, and those inside of them; each once."""
    return list(dict.fromkeys(model._flatten_layers()))
