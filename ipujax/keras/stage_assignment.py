"""Assignment of the calls of a model's layers to stages: read, set, printed and removed.

Input: a model, and a list with a stage for each layer, or with an assignment for each call of a layer. Output: numbers
of stages, stored on the layers (`layer_stages`). A model has an assignment for each call of its direct layers, in the
order in which it calls them; a model among its layers is called as one layer. The calls of a subclass of `keras.Model`
are known once it was built or called; before, each layer has one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from itertools import pairwise
from numbers import Integral
from typing import Any

import jax
import keras

import ipujax as ipu
from ipujax.front_end import Log, checking_calls
from ipujax.keras.layer_stages import (
    all_layers,
    assign,
    assigned_stages,
    open_stage,
    remove_stages,
    stage_of_call,
)
from ipujax.keras.model_state import clear_functions, replace_attribute

_LOG = Log("keras")


@dataclass(eq=False, slots=True)
class PipelineStageAssignment:
    """The stage of a call of a layer; `pipeline_stage` can be set.

    Args:
        layer: the layer.
        node_index: number of the call among those of the layer, from 0.
        pipeline_stage: number of the stage; None for none of its own.
    """

    layer: Any
    node_index: int = 0
    pipeline_stage: int | None = None


def get_pipeline_stage_assignment(model: Any) -> list[PipelineStageAssignment]:
    """Return an assignment for each call of the layers of a model, inputs excepted.

    Stages inside a `call` are known once it was traced: after a call or a run of the model.
    """
    _warn_without_stages(model)
    counts: dict[int, int] = defaultdict(int)
    assignments = []
    for layer, opened in _calls(model):
        index = counts[id(layer)]
        counts[id(layer)] += 1
        assignments.append(PipelineStageAssignment(layer, index, stage_of_call(layer, index, opened)))
    return assignments


def set_pipeline_stage_assignment(model: Any, assignment: Sequence[int | PipelineStageAssignment | None]) -> None:
    """Assign the layers of a model, or the calls of them, to stages.

    Args:
        model: a Keras model.
        assignment: the stage of each layer of `model.layers` but inputs, in order, from 0 without a gap; None for a
            layer with stages inside. Or the list of `model.get_pipeline_stage_assignment()`, with stages set.

    Raises:
        ArgumentError: the length is not the number of layers, an assignment is of a layer that the model does not have,
            a stage is not an integer from 0 or has no layers, or layers of a sequential model go back to an earlier
            stage.
    """
    if isinstance(assignment, str) or not isinstance(assignment, Iterable):
        problem = "assignment of set_pipeline_stage_assignment must be a list"
        raise ipu.ArgumentError(problem, expected="the stage of each layer", got=repr(assignment))
    layers = _assignable_layers(model)
    if not layers:
        raise ipu.ArgumentError(f"{model.name} has no layers to be in stages", expected="a model with layers")
    entries = list(assignment)
    is_object = [isinstance(entry, PipelineStageAssignment) for entry in entries]
    if any(is_object) and not all(is_object):
        expected = "the stage of each layer, or the list of get_pipeline_stage_assignment"
        raise ipu.ArgumentError(
            "set_pipeline_stage_assignment has numbers and assignments", expected=expected, got=entries
        )
    calls = [layer for layer, _ in _calls(model)] if any(is_object) else layers
    if len(entries) != len(calls):
        raise ipu.ArgumentError(
            f"assignment of set_pipeline_stage_assignment must have an entry for each "
            f"{'call of a layer' if any(is_object) else 'layer'}",
            expected=f"{len(calls)} stages, for {', '.join(layer.name for layer in calls)}",
            got=len(entries),
        )
    numbers = [_stage_of_entry(*pair) for pair in zip(calls, entries, strict=True)]
    _check_numbers(numbers)
    if isinstance(model, keras.Sequential):  # other models may list layers in another order than they call them
        _check_order([(layer, n) for layer, n in zip(calls, numbers, strict=True) if n is not None])
    stages: dict[int, list[int | None]] = defaultdict(list)
    for layer, number in zip(calls, numbers, strict=True):
        stages[id(layer)].append(None if number is None else int(number))
    for layer in layers:
        assign(layer, stages[id(layer)])
    clear_functions(model)


def _stage_of_entry(layer: Any, assignment: int | PipelineStageAssignment | None) -> int | None:
    if not isinstance(assignment, PipelineStageAssignment):
        return assignment
    if assignment.layer is not layer:
        raise ipu.ArgumentError(
            "assignments of set_pipeline_stage_assignment must be in the order of get_pipeline_stage_assignment",
            expected=f"a call of {layer.name}",
            got=f"one of {getattr(assignment.layer, 'name', assignment.layer)}",
        )
    return assignment.pipeline_stage


def _check_numbers(numbers: Sequence[Any]) -> None:
    """Refuse stages that are not numbers from 0, and a stage without layers."""
    assigned = [n for n in numbers if n is not None]
    if invalid := [n for n in assigned if isinstance(n, bool) or not isinstance(n, Integral) or n < 0]:
        problem = "stages of set_pipeline_stage_assignment must be whole numbers from 0"
        raise ipu.ArgumentError(problem, expected="whole numbers from 0", got=repr(invalid[0]))
    missing = set(range(max(assigned, default=-1) + 1)) - set(assigned)
    if missing and len(assigned) == len(numbers):  # else layers with None may have the missing stages inside
        raise ipu.ArgumentError("a stage has no layers", expected=f"a layer in stage {min(missing)}", got=numbers)


def _check_order(assigned: Sequence[tuple[Any, int]]) -> None:
    """Refuse a layer in an earlier stage than the layer before it."""
    for (previous, previous_stage), (layer, number) in pairwise(assigned):
        if number < previous_stage:
            raise ipu.ArgumentError(
                "set_pipeline_stage_assignment would have values flow back to an earlier stage",
                expected=f"{layer.name} in stage {previous_stage} or a later one, as {previous.name} before it is in"
                f" {previous_stage}",
                got=number,
            )


@checking_calls("model.print_pipeline_stage_assignment_summary", first="model")
def print_pipeline_stage_assignment_summary(model: Any, print_fn: Callable[[str], Any] | None = None) -> None:
    """Print the stages of a model's layers, including inner layers that have any.

    Args:
        model: a Keras model.
        print_fn: called with each line in place of `print`.
    """
    _warn_without_stages(model)
    direct = set(map(id, _assignable_layers(model)))
    rows = [("layer", "class", "stages")]
    for layer in all_layers(model):
        stages = ", ".join(map(str, sorted({n for n in assigned_stages(layer) if n is not None})))
        if layer is not model and (id(layer) in direct or stages):
            rows.append((layer.path or layer.name, type(layer).__name__, stages or "none of its own"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        (print if print_fn is None else print_fn)(line)


def reset_pipeline_stage_assignment(model: Any) -> None:
    """Remove the stages of all layers of a model, including inner ones: those of calls, creation and assignment.

    Scopes inside a `call` remain.
    """
    remove_stages(model)
    clear_functions(model)


def _assignable_layers(model: Any) -> list[Any]:
    """Return the layers of a model that may be in a stage, in order."""
    return [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]


def _calls(model: Any) -> list[tuple[Any, int | None]]:
    """Return the direct layer of each call in a call of a model, in order, and the stage whose scope is around it."""
    layers = _assignable_layers(model)
    trace = None if isinstance(model, keras.Sequential) else _trace_of(model)
    if trace is None:
        return [(layer, None) for layer in layers]
    direct = set(map(id, layers))
    calls: list[tuple[Any, int | None]] = []
    keras_call = keras.layers.Layer.__call__

    @wraps(keras_call)
    def recorded_call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if id(layer) in direct:
            calls.append((layer, open_stage()))
        return keras_call(layer, *args, **kwargs)

    with replace_attribute(keras.layers.Layer, "__call__", recorded_call):
        trace()
    called = {id(layer) for layer, _ in calls}
    return calls + [(layer, None) for layer in layers if id(layer) not in called]


def _trace_of(model: Any) -> Callable[[], Any] | None:
    """Return a function that calls a model on shapes alone; None where its inputs are not known."""
    if hasattr(model, "inputs"):  # a functional model, whose class is not public
        variables = [[v.value for v in each] for each in (model.trainable_variables, model.non_trainable_variables)]
        inputs = keras.tree.map_structure(
            lambda x: jax.ShapeDtypeStruct([n or 1 for n in x.shape], x.dtype), model.input
        )
        return lambda: jax.eval_shape(lambda *args: model.stateless_call(*args)[0], *variables, inputs)
    shape = (model.get_build_config() or {}).get("input_shape")
    parameters = signature(model.call).parameters.values()
    has_one_input = sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) == 1
    if not (has_one_input and isinstance(shape, tuple)):
        return None
    return lambda: model.compute_output_spec(keras.KerasTensor(shape))


def _warn_without_stages(model: Any) -> None:
    if not model.built and not any(map(assigned_stages, all_layers(model))):
        text = "no layer of %s is known to be in a stage; stages inside of a call are known once the model was called"
        _LOG.warning(text, model.name)
