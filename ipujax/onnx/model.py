"""`load`: an ONNX model as a pure JAX function.

The commands `ipujax profile` and `ipujax report` call a model once on random data, by texts of the options `--shape`
and `--static`.
Limits: sizes that the file leaves open are 1, integers are 0 or 1, unless the options say otherwise.

Arguments of `load` and of models are checked against the declarations of the file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ipujax as ipu
from ipujax.front_end import Log, nearest
from ipujax.onnx import operators as operators
from ipujax.onnx.element_types import check_held, is_wide_enabled, narrowed, sides_of, typed_array
from ipujax.onnx.evaluation import Settings, check_constants, check_operators, evaluate, shape_sources
from ipujax.onnx.graphs import Dim, Graph, ValueInfo
from ipujax.onnx.onnx_errors import DEFAULT_MAX_BYTES, DEFAULT_MAX_UNROLLED_NODES, Budget, OnnxError, checked_budget
from ipujax.onnx.reading import Source, read_graph


def with_shapes(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> Graph:
    """Return a graph whose inputs have other declared shapes; refuse unknown names, other ranks and negative sizes."""
    _check_names(shapes, [info.name for info in graph.inputs], "input_shapes")
    return replace(graph, inputs=tuple(_with_shape(info, shapes.get(info.name)) for info in graph.inputs))


def _with_shape(info: ValueInfo, shape: Sequence[int] | None) -> ValueInfo:
    if shape is None:
        return info
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
    if value is None or (isinstance(value, list | tuple) and info.kind != "tensor"):
        return None if value is None else tuple(typed_array(item, info.dtype, place) for item in value)
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
    return {name: jnp.asarray(value) for name, value in params.items()}


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
    array = jnp.asarray(_held(info, value))
    if info.dtype is not None and _dtype_kind(array.dtype) != _dtype_kind(info.dtype):
        hint = f"convert it: x.astype({info.dtype})"
        raise OnnxError(f"input {info.name!r} has the wrong dtype", expected=str(info), got=array.dtype, hint=hint)
    return array


def _dtype_kind(dtype: Any) -> str:
    """Return the kind of a dtype: a model in float32 can be called with bfloat16 parameters and inputs."""
    return "floating" if jnp.issubdtype(dtype, jnp.floating) else np.dtype(dtype).kind


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
    for name in names:
        if name not in valid:
            message = f"{label} names {name!r}, which the model does not have"
            expected = f"one of {', '.join(valid)}" if valid else "no name"
            raise OnnxError(message, expected=expected, got=name, hint=nearest(name, valid))


_LOG = Log("jit")
_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


class Model:
    """An ONNX model as a pure function of its parameters and inputs, made by `load`.

    Calls can be traced: by `jax.jit`, `ipu.jit`, `jax.grad`, `jax.vmap`, in stages of `ipu.pipeline`.

    Attributes:
        params: floating-point initialisers by name, as arrays: a pytree for optimisers. Integer initialisers, and
            floating-point ones that decide shapes, are constants of the function.
        inputs: name, dtype and shape of each argument; dimensions that the file names or leaves open are text or None.
        outputs: the same of results.

    Example::

        model = ipujax.onnx.load("model.onnx")
        scores = ipu.jit(model)(model.params, images)
    """

    def __init__(
        self, graph: Graph, params: dict[str, jax.Array], static: Mapping[str, np.ndarray], settings: Settings
    ) -> None:
        self.params = params
        self.inputs: tuple[ValueInfo, ...] = tuple(info for info in graph.inputs if info.name not in static)
        self.outputs: tuple[ValueInfo, ...] = graph.outputs
        self.__name__ = graph.name or "onnx_model"
        self._graph = graph
        self._static = static
        self._settings = settings

    def __call__(self, params: Mapping[str, Any], *inputs: Any) -> Any:
        """Return the model's outputs.

        Args:
            params: arrays by the names of `self.params`.
            inputs: one for each of `self.inputs`: an array, a sequence of arrays, or None for an empty optional.

        Returns:
            The output, or a tuple of them if there are several.

        Raises:
            OnnxError: arguments of other names, shapes or dtypes; a node that cannot be evaluated on its operands.
        """
        values = self._values(params, inputs)
        if not isinstance(jnp.zeros(()), jax.core.Tracer):
            jax.eval_shape(self._evaluated, values)  # refuses values that are too large before one is computed
        arrays = self._evaluated(values)
        return arrays[0] if len(arrays) == 1 else arrays

    def __check_arguments__(self, params: Any = None, *inputs: Any) -> None:
        """Refuse 64-bit arguments that 32 bits do not hold; `ipu.jit` calls it before it converts them."""
        check_values(params, self.inputs, inputs)

    def _evaluated(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        settings = self._settings.for_evaluation(self._graph)
        results = evaluate(self._graph, {**values, **self._static}, settings)
        pairs = zip(results, self.outputs, strict=True)
        return tuple(narrowed(value, f"output {info.name!r}") for value, info in pairs)

    def _values(self, params: Mapping[str, Any], inputs: Sequence[Any]) -> dict[str, Any]:
        sizes: dict[str, int] = {}
        weights = checked_params(params, self.params)
        arguments = checked_argument(self.inputs, inputs, sizes)
        return {**weights, **arguments}

    def __repr__(self) -> str:
        inputs, outputs = ("; ".join(map(str, infos)) for infos in (self.inputs, self.outputs))
        return f"<ONNX model {self.__name__}: ({inputs}) → ({outputs}), {len(self.params)} parameters>"


def load(
    model: Source,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    static: Mapping[str, Any] | None = None,
    max_sizes: Mapping[str, int] | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    max_unrolled_nodes: int = DEFAULT_MAX_UNROLLED_NODES,
) -> Model:
    """Return an ONNX model as a JAX function.

    Args:
        model: path of a file, its bytes, or an `onnx.ModelProto`. External data are read from the file's folder alone.
        input_shapes: shapes of graph inputs by name, in place of those that the file declares.
        static: values of graph inputs by name, for inputs that decide shapes or branches; they are no arguments then.
        max_sizes: bounds on results whose size depends on data, by name of an output of the node; the rest is padded,
            as `jnp.nonzero(size=)` does.
        max_bytes: bound on the bytes of one value: a constant, an input or a result of a node. A value may have an
            element for each four of them. Larger ones are refused before anything is allocated.
        max_unrolled_nodes: bound on the nodes that unrolled loops add to a traced program.

    Returns:
        A pure function `model(params, *inputs)` with `params`, `inputs` and `outputs`.

    Raises:
        OnnxModelError: a file that is not valid ONNX, refers to data outside of its folder, or grows too far.
        UnsupportedOperatorError: operators without an implementation, all at once.
        OnnxError: names or shapes that do not belong to the model.
    """
    budget = checked_budget(max_bytes, max_unrolled_nodes)
    graph = with_shapes(read_graph(model, budget), input_shapes or {})
    check_input_sizes(graph, budget)
    check_operators(graph)
    values = checked_static(graph, static or {})
    bounds = checked_bounds(graph, max_sizes or {})
    _say_narrowed(graph)
    params = _params(graph, values)
    check_constants(graph, [*params, *(info.name for info in graph.inputs if info.name not in values)])
    file = Path(model).name if isinstance(model, str | PathLike) else graph.name or "model"
    return Model(graph, params, values, Settings(bounds, budget=budget, file=file))


def _params(graph: Graph, static: Mapping[str, Any]) -> dict[str, jax.Array]:
    sources = shape_sources(graph, [info.name for info in graph.inputs if info.name not in static])
    floating = {name: array for name, array in graph.constants.items() if jnp.issubdtype(array.dtype, jnp.floating)}
    # One with values that 32 bits do not hold is a constant: a sentinel can saturate.
    params = {name: x for name, x in floating.items() if name in graph.initializers and sides_of(x) is None}
    return {name: jnp.asarray(x) for name, x in params.items() if name not in sources}


def _say_narrowed(graph: Graph) -> None:
    """Log that 64-bit types become 32-bit ones, where a model has them and JAX is not set to have them."""
    dtypes = {info.dtype for info in (*graph.inputs, *graph.outputs)} | {x.dtype for x in graph.constants.values()}
    wide = sorted(str(dtype) for dtype in dtypes & _WIDE)
    if wide and not is_wide_enabled():
        text = "%s of ONNX model %s are computed with 32 bits; jax_enable_x64 computes them exactly"
        _LOG.info(text, " and ".join(wide), graph.name)


_OPEN_SIZE = 1


def random_call_profile(path: str, shapes: Sequence[str], static: Sequence[str]) -> ipu.Profile:
    """Return the profile of one call of an ONNX model on random data.

    Args:
        path: of the file.
        shapes: shapes of inputs, each as "images=8,3,224,224".
        static: values of inputs that decide a shape or a branch, each as "rate=16000".

    Raises:
        ArgumentError: a text of another form, an input whose shape is unknown, or as `ipujax.onnx.load`.
    """
    input_shapes = {name: tuple(map(int, sizes)) for name, sizes in _options("shape", shapes, int).items()}
    values = {name: _scalar_or_list(numbers) for name, numbers in _options("static", static, float).items()}
    model = load(path, input_shapes=input_shapes, static=values)
    model.__name__ = Path(path).stem
    inputs = [_random(info, n) for n, info in enumerate(model.inputs)]
    open_sizes = [f"{info.name}: {x.shape}" for info, x in zip(model.inputs, inputs, strict=True) if _is_open(info)]
    if open_sizes:
        text = f"open sizes are {_OPEN_SIZE}, --shape NAME=SIZES sets them: {', '.join(open_sizes)}"
        print(text, file=sys.stderr)
    _, profile = ipu.jit(model).lower(model.params, *inputs).compile().profile_call(model.params, *inputs)
    return profile


def _options(option: str, texts: Sequence[str], kind: type) -> Mapping[str, list[Any]]:
    return dict(_option(option, text, kind) for text in texts)


def _option(option: str, text: str, kind: type) -> tuple[str, list[Any]]:
    """Return the name of an input and the values of `NAME=VALUE,VALUE,…`."""
    name, equals, values = text.rpartition("=")
    try:
        if not equals:
            raise ValueError("no =")
        return name, [kind(value) for value in values.split(",") if value]
    except ValueError as error:
        expected = f"--{option} NAME=N,N,…"
        raise ipu.ArgumentError(f"--{option} must name an input and numbers", expected=expected, got=text) from error


def _scalar_or_list(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _is_open(info: Any) -> bool:
    return info.shape is None or not all(isinstance(dim, int) for dim in info.shape)


def _random(info: Any, seed: int) -> Any:
    """Return an array for an input: normal numbers, 0 and 1 for integers."""
    if info.kind != "tensor" or info.shape is None:
        hint = f"declare it: --shape {info.name}=…"
        raise ipu.ArgumentError(f"the shape of input {info.name!r} is unknown", got=str(info), hint=hint)
    shape = tuple(dim if isinstance(dim, int) else _OPEN_SIZE for dim in info.shape)
    draw = np.random.default_rng(seed)
    is_floating = jnp.issubdtype(info.dtype, jnp.floating)
    return (draw.standard_normal(shape) if is_floating else draw.integers(0, 2, shape)).astype(info.dtype)
