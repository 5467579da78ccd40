"""`load`: an ONNX model as a pure JAX function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.front_end import Log
from ipujax.onnx import machine_learning as machine_learning, microsoft as microsoft, operators as operators
from ipujax.onnx.budget import DEFAULT_MAX_BYTES, DEFAULT_MAX_UNROLLED_NODES, checked_budget
from ipujax.onnx.call_arguments import (
    check_input_sizes,
    check_values,
    checked_argument,
    checked_bounds,
    checked_params,
    checked_static,
    with_shapes,
)
from ipujax.onnx.element_types import is_text, is_wide_enabled, narrowed, sides_of
from ipujax.onnx.evaluation import Settings, check_constants, check_operators, evaluate, shape_sources
from ipujax.onnx.graphs import Graph, ValueInfo
from ipujax.onnx.reading import Source, read_graph

_LOG = Log("jit")
_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


class Model:
    """An ONNX model as a pure function of its parameters and inputs, made by `load`.

    Calls can be traced: by `jax.jit`, `ipu.jit`, `jax.grad`, `jax.vmap`, in stages of `ipu.pipeline`.

    Attributes:
        params: floating-point weights by name, as arrays: a pytree for optimisers. They are initialisers, and values
            of `Constant` nodes of more than one element. Integers, and what decides shapes, are constants.
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
            jax.eval_shape(self._numbers, values)  # refuses values that are too large before one is computed
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

    def _numbers(self, values: Mapping[str, Any]) -> list[Any]:
        """Return the outputs that are no text."""
        return [x for x in self._evaluated(values) if not is_text(x)]

    def _values(self, params: Mapping[str, Any], inputs: Sequence[Any]) -> dict[str, Any]:
        sizes: dict[str, int] = {}
        weights = checked_params(params, self.params)
        arguments = checked_argument(self.inputs, inputs, sizes)
        return {**weights, **arguments}

    def with_constant_scalars(self) -> Model:
        """Return the model with parameters of one element as constants, as `Constant` nodes have them: exponents."""
        params = {name: x for name, x in self.params.items() if x.size > 1}
        model = Model(self._graph, params, self._static, self._settings)
        model.__name__ = self.__name__
        return model

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
    # Some exporters write weights as `Constant` nodes; scalars among these are numbers of a formula.
    weights = {name: x for name, x in floating.items() if name in graph.initializers or x.size > 1}
    # One with values that 32 bits do not hold is a constant: a sentinel can saturate.
    params = {name: x for name, x in weights.items() if sides_of(x) is None}
    reads = [(name, node.op_type, place) for node in graph.all_nodes() for place, name in enumerate(node.inputs)]
    # A constant decides the precision of other operators.
    exponents = {name for name, *reader in reads if reader == ["Pow", 1]}
    exponents -= {name for name, *reader in reads if reader != ["Pow", 1]}
    # A power of a negative number has no derivative by its exponent, which is whole: that of a square stays 2.
    constants = {
        name for name, x in params.items() if name in exponents and x.size == 1 and float(x.item()).is_integer()
    }
    return {name: jnp.asarray(x) for name, x in params.items() if name not in sources | constants}


def _say_narrowed(graph: Graph) -> None:
    """Log that 64-bit types become 32-bit ones, where a model has them and JAX is not set to have them."""
    dtypes = {info.dtype for info in (*graph.inputs, *graph.outputs)} | {x.dtype for x in graph.constants.values()}
    wide = sorted(str(dtype) for dtype in dtypes & _WIDE)
    if wide and not is_wide_enabled():
        text = "%s of ONNX model %s are computed with 32 bits; jax_enable_x64 computes them exactly"
        _LOG.info(text, " and ".join(wide), graph.name)
