"""Checks of the arguments of `load` and of models against the declarations of the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.front_end import nearest
from ipujax.onnx.budget import Budget
from ipujax.onnx.element_types import canonical, check_held, is_floating, typed_array
from ipujax.onnx.graphs import Dim, Graph, ValueInfo
from ipujax.onnx.onnx_errors import OnnxError


def check_mapping(names: Any, label: str) -> None:
    """Refuse an argument by name that is no mapping, as a list of names."""
    if not isinstance(names, Mapping):
        raise OnnxError(f"{label} must name what each value is for", expected="a dict by name", got=repr(names))


def with_shapes(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> Graph:
    """Return a graph whose inputs have other declared shapes; refuse unknown names, other ranks and negative sizes."""
    _check_names(shapes, [info.name for info in graph.inputs], "input_shapes")
    return replace(graph, inputs=tuple(_with_shape(info, shapes.get(info.name)) for info in graph.inputs))


def _with_shape(info: ValueInfo, shape: Sequence[int] | None) -> ValueInfo:
    if shape is None:
        return info
    are_sizes = isinstance(shape, Sequence) and all(isinstance(size, int | np.integer) for size in shape)
    if not are_sizes:
        raise OnnxError(f"input_shapes[{info.name!r}] is no shape", expected=str(info), got=shape)
    sizes = tuple(int(size) for size in shape)
    is_rank_right = info.shape is None or len(sizes) == len(info.shape)
    if not is_rank_right or min(sizes, default=0) < 0:
        raise OnnxError(f"input_shapes[{info.name!r}] does not match this input", expected=str(info), got=sizes)
    return replace(info, shape=sizes)


def check_input_sizes(graph: Graph, budget: Budget) -> None:
    """Refuse declared inputs that are larger than the budget, whatever their open dimensions are."""
    for info in graph.inputs:
        sizes = [dim for dim in info.shape or () if isinstance(dim, int)]
        budget.check(sizes, info.dtype, f"input {info.name!r}")


def checked_static(graph: Graph, static: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of static inputs as NumPy arrays of the declared dtype; refuse traced ones and other shapes."""
    _check_names(static, [info.name for info in graph.inputs], "static")
    infos = {info.name: info for info in graph.inputs}
    return {name: _static_value(infos[name], value) for name, value in static.items()}


def _static_value(info: ValueInfo, value: Any) -> Any:
    place = f"static[{info.name!r}]"
    if isinstance(value, jax.core.Tracer):
        message = f"{place} must be known when the model is loaded"
        raise OnnxError(message, expected="a NumPy array", got="a traced value")
    if info.kind != "tensor" and (value is None or isinstance(value, list | tuple)):
        return None if value is None else tuple(typed_array(item, info.dtype, place) for item in value)
    if value is None:
        raise OnnxError(f"{place} must be an array", expected=str(info), got=value)
    array = typed_array(value, info.dtype, place)
    _check_shape(info, array.shape, {})
    return array


def checked_bounds(graph: Graph, max_sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the bounds on sizes that depend on data, by output of a node, as checked integers."""
    _check_names(max_sizes, [name for node in graph.all_nodes() for name in node.outputs], "max_sizes")
    for name, bound in max_sizes.items():
        if not isinstance(bound, int | np.integer) or bound < 0:
            raise OnnxError(f"max_sizes[{name!r}] must be a size", expected="an int ≥ 0", got=bound)
    return {name: int(bound) for name, bound in max_sizes.items()}


def checked_params(params: Mapping[str, Any], expected: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the parameters of a call as arrays; names and shapes must be those of the model."""
    if not isinstance(params, Mapping):
        hint = "call model(model.params, *inputs)"
        raise OnnxError("the first argument of a model must be its parameters", got=type(params).__name__, hint=hint)
    _check_names(params, expected, "params")
    missing = sorted(set(expected) - set(params))
    if missing:
        hint = "pass a changed copy of model.params"
        raise OnnxError(f"params has no {missing[0]!r}", expected=f"{len(expected)} arrays", got=len(params), hint=hint)
    for name, value in params.items():
        if np.shape(value) != expected[name].shape:
            message = f"params[{name!r}] has the wrong shape"
            raise OnnxError(message, expected=expected[name].shape, got=np.shape(value))
        check_held(value, f"params[{name!r}]")
    arrays = {name: jnp.asarray(value) for name, value in params.items()}
    for name, array in arrays.items():
        if not is_floating(array):  # quotients of integers, for one, are others
            hint = f"convert it: x.astype({expected[name].dtype})"
            raise OnnxError(
                f"params[{name!r}] has the wrong dtype", expected=expected[name].dtype, got=array.dtype, hint=hint
            )
    return arrays


def check_values(params: Any, infos: Sequence[ValueInfo], inputs: Sequence[Any]) -> None:
    """Refuse values of a call that 32 bits do not hold, before anything narrows them; shapes are not looked at."""
    for name, value in params.items() if isinstance(params, Mapping) else ():
        check_held(value, f"params[{name!r}]")
    for info, value in zip(infos, inputs, strict=False):
        for item in jax.tree.leaves(value):
            _held(info, item)


def _held(info: ValueInfo, value: Any) -> Any:
    """Return a value as an array; refuse one that 32 bits do not hold, where JAX is not set to 64."""
    place = f"input {info.name!r}"
    array = value if hasattr(value, "dtype") else typed_array(value, info.dtype, place)
    check_held(array, place)
    return array


def checked_argument(infos: Sequence[ValueInfo], inputs: Sequence[Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Return the inputs of a call by name, as arrays; enter sizes of named dimensions, one size a name, in `sizes`."""
    if len(inputs) != len(infos):
        expected = f"{len(infos)}: {'; '.join(map(str, infos)) or 'none'}"
        raise OnnxError("the model was called with the wrong number of inputs", expected=expected, got=len(inputs))
    return {info.name: _argument(info, value, sizes) for info, value in zip(infos, inputs, strict=True)}


def _argument(info: ValueInfo, value: Any, sizes: dict[str, int]) -> Any:
    if info.kind == "sequence" and isinstance(value, list | tuple):
        return tuple(_array(info, item) for item in value)
    if info.kind == "optional" and (value is None or isinstance(value, list | tuple)):
        return None if value is None else tuple(_array(info, item) for item in value)
    if value is None or (isinstance(value, list | tuple) and info.kind != "tensor"):
        raise OnnxError(f"input {info.name!r} must be an array", expected=str(info), got=type(value).__name__)
    array = _array(info, value)
    _check_shape(info, array.shape, sizes)
    return array


def _array(info: ValueInfo, value: Any) -> jax.Array:
    try:
        array = jnp.asarray(_held(info, value))
    except (TypeError, ValueError) as error:
        raise OnnxError(f"input {info.name!r} is no array of numbers", expected=str(info), got=str(error)) from error
    if info.dtype is not None and not _can_be_passed(array.dtype, info.dtype):
        hint = f"convert it: x.astype({info.dtype})"
        raise OnnxError(f"input {info.name!r} has the wrong dtype", expected=str(info), got=array.dtype, hint=hint)
    # Integers of fewer bits would wrap where those of the file do not.
    is_narrow = info.dtype is not None and array.dtype.kind in "iu" and array.dtype != canonical(info.dtype)
    return array.astype(canonical(info.dtype)) if is_narrow else array


def _can_be_passed(dtype: Any, declared: Any) -> bool:
    """Return whether a dtype is that of the file, fewer bits of the same integers, or a float for another.

    A model in float32 can be called with bfloat16 parameters and inputs.
    """
    if jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(declared, jnp.floating):
        return jnp.issubdtype(dtype, jnp.floating) and jnp.issubdtype(declared, jnp.floating)
    is_alike = np.dtype(dtype).kind == np.dtype(declared).kind
    return is_alike and np.can_cast(dtype, canonical(declared))


def _check_shape(info: ValueInfo, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    if info.shape is None:
        return
    known_sizes = {name: size for name, size in sizes.items() if name in info.shape}
    fits = len(shape) == len(info.shape) and all(map(lambda dim, size: _fits(dim, size, sizes), info.shape, shape))
    if not fits:
        expected = str(info) + (f" with {known_sizes}" if known_sizes else "")
        hint = f"load(…, input_shapes={{{info.name!r}: {shape}}}) declares another shape"
        raise OnnxError(f"input {info.name!r} has the wrong shape", expected=expected, got=shape, hint=hint)


def _fits(dim: Dim, size: int, sizes: dict[str, int]) -> bool:
    if isinstance(dim, str):
        return sizes.setdefault(dim, size) == size
    return dim is None or dim == size


def _check_names(names: Mapping[str, Any], valid: Sequence[str] | Mapping[str, Any], label: str) -> None:
    check_mapping(names, label)
    for name in names:
        if name not in valid:
            message = f"{label} names {name!r}, which the model does not have"
            expected = f"one of {', '.join(valid)}" if valid else "no name"
            raise OnnxError(message, expected=expected, got=name, hint=nearest(name, valid))
