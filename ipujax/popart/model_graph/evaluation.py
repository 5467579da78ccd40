"""A graph as a JAX function of one micro-batch, with intermediate values as further results.

Nodes are evaluated in order, each in the scope of its placement. Zeros that are added to named values make their
gradients: those of the zeros. Runs of nodes that are annotated for recomputation are functions under `jax.checkpoint`.

A session evaluates some operators of ai.onnx in its own way: those with random numbers, dropout, and mixed types. Keys
of random numbers come from the session's seed and change with each micro-batch. Dropout is active in training alone, as
in PopART, whatever the node says. A float16 tensor and a float32 scalar make a float16 tensor.

Limits: a random operator in a loop draws the same numbers in each iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.front_end import Node, Saturated, Settings, is_static, narrowed, run_node
from ipujax.popart.building import Annotations
from ipujax.popart.building.annotations import RECOMPUTE
from ipujax.popart.enumerations import RecomputeType
from ipujax.popart.exceptions import as_popart_exception, popart_exception
from ipujax.popart.model_graph.annotated_graph import AnnotatedGraph
from ipujax.popart.model_graph.operand_checks import check_operands
from ipujax.popart.model_graph.stage_placement import Placement
from ipujax.popart.operators.domain import node_key
from ipujax.popart.tensor_info import TensorInfo, of_onnx_number

Override = Callable[[Node, Sequence[Any], jax.Array], tuple[Any, ...]]
_DEFAULT_RATIO = 0.5


def _dropout(node: Node, operands: Sequence[Any], key: jax.Array) -> tuple[Any, ...]:
    x = jnp.asarray(operands[0])
    ratio_operand = operands[1] if len(operands) > 1 and operands[1] is not None else None
    ratio = _DEFAULT_RATIO if ratio_operand is None else jnp.reshape(ratio_operand, ())
    # Kept elements are divided by the probability of keeping: the mean stays, as in PopART's dropout.
    mask = jax.random.bernoulli(key, 1 - ratio, x.shape)
    dropped = jnp.where(mask, x / (1 - jnp.asarray(ratio, x.dtype)), jnp.zeros_like(x))
    return (dropped, mask)[: len(node.outputs)]


def _normal(node: Node, operands: Sequence[Any], key: jax.Array) -> tuple[Any, ...]:
    attributes = node.attributes
    drawn = jax.random.normal(key, _shape(node, operands), _dtype(node, operands))
    scale = jnp.asarray(attributes.get("scale", 1.0), drawn.dtype)
    return (drawn * scale + jnp.asarray(attributes.get("mean", 0.0), drawn.dtype),)


def _uniform(node: Node, operands: Sequence[Any], key: jax.Array) -> tuple[Any, ...]:
    low = node.attributes.get("low", 0.0)
    high = node.attributes.get("high", 1.0)
    return (jax.random.uniform(key, _shape(node, operands), _dtype(node, operands), low, high),)


def _shape(node: Node, operands: Sequence[Any]) -> tuple[int, ...]:
    return tuple(node.attributes["shape"]) if "shape" in node.attributes else tuple(np.shape(operands[0]))


def _dtype(node: Node, operands: Sequence[Any]) -> np.dtype[Any]:
    if "dtype" in node.attributes:
        return of_onnx_number(node.attributes["dtype"])
    return np.dtype(operands[0].dtype) if operands else np.dtype(np.float32)


OVERRIDES: Mapping[str, Override] = MappingProxyType(
    {
        "Dropout": _dropout,
        "RandomNormal": _normal,
        "RandomNormalLike": _normal,
        "RandomUniform": _uniform,
        "RandomUniformLike": _uniform,
    }
)
# Operators of ai.graphcore that draw numbers.
RANDOM_OPERATORS = frozenset({*OVERRIDES, "ShapedDropout"})


# Arithmetic that PopART computes with a float16 tensor and a float32 scalar; others need operands of one type.
_ARITHMETIC = frozenset({"Add", "Clip", "Div", "Max", "Min", "Mul", "Pow", "Sub", "Sum"})


def common_type(node: Node, operands: Sequence[Any]) -> tuple[Sequence[Any], np.dtype[Any] | None]:
    """Return operands of one element type, and that of the result where it is another; refuse float16 with float32."""
    # Scalars of float32 are converted: only tensors of both types are refused.
    arrays = [x for x in operands if x is not None]
    dtypes = {np.dtype(x.dtype) for x in arrays if hasattr(x, "dtype")}
    if node.domain or node.op_type not in _ARITHMETIC or dtypes != {np.dtype(np.float16), np.dtype(np.float32)}:
        return operands, None
    wide = [x for x in arrays if x.dtype == np.float32]
    if any(np.size(x) != 1 for x in wide):
        first, second = (TensorInfo(x.dtype, x.shape) for x in arrays[:2])
        shapes = " and ".join(f"[{' '.join(map(str, info.shape()))}]" for info in (first, second))
        types = f"{first.data_type()} and {second.data_type()}"
        raise popart_exception(f"{node.label}: incompatible types {types} (shapes {shapes})")
    # Computed in float32: a scalar may be out of the range of float16.
    return [None if x is None else jnp.asarray(x, jnp.float32) for x in operands], np.dtype(np.float16)


@jax.custom_jvp
def _magnitude(x: jax.Array) -> jax.Array:
    return jnp.abs(x)


@_magnitude.defjvp
def _magnitude_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x,) = primals
    (tangent,) = tangents
    # PopART's gradient at zero is zero, JAX's one.
    return jnp.abs(x), tangent * jnp.sign(x)


@jax.custom_jvp
def _power(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.power(x, y)


@_power.defjvp
def _power_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    x, y = primals
    of_x, of_y = tangents
    result = jnp.power(x, y)
    # Where one side does not matter its gradient is zero, not 0 · ∞: PopART's and PyTorch's choice.
    slope = jnp.where(y == 0, 0, y * jnp.power(x, y - 1))
    growth = jnp.where((x == 0) & (y >= 0), 0, result * jnp.log(x))
    return result, (of_x * slope + of_y * growth).astype(result.dtype)


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _abs(operands: Sequence[Any]) -> Any:
    return _magnitude(jnp.asarray(operands[0])) if _is_floating(operands[0]) else None


def _pow(operands: Sequence[Any]) -> Any:
    x, y = operands
    # A constant exponent has no gradient, and JAX's own of the base is cheaper.
    is_two_sided = _is_floating(x) and x.dtype == y.dtype and not isinstance(y, np.ndarray)
    return _power(jnp.asarray(x), jnp.asarray(y)) if is_two_sided else None


# Operators with other gradients than JAX's at corners; None where a function does not fit the operands.
_CORNERS: Mapping[str, Callable[[Sequence[Any]], Any]] = MappingProxyType({"Abs": _abs, "Pow": _pow})


def overridden(node: Node, operands: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the results of an operator that the session evaluates itself; None for others.

    Args:
        node: of the graph, or of a subgraph.
        operands: its values.
    """
    if any(isinstance(value, Saturated) for value in operands):
        return None
    if node.domain == "" and node.op_type in _CORNERS and not all(isinstance(x, np.ndarray) for x in operands):
        result = _CORNERS[node.op_type](operands)
        return None if result is None else (result,)
    override = OVERRIDES.get(node.op_type) if node.domain == "" else None
    key = None if override is None else node_key(node.name, is_mask=node.op_type == "Dropout")
    return None if override is None or key is None else override(node, operands, key)


Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Values of a micro-batch.

    Args:
        values: of all tensors, by name.
        updates: new values of parameters that operators change: running statistics, `copyvarupdate`.
    """

    values: Values
    updates: Values = field(default_factory=dict)

    def array(self, name: str) -> jax.Array:
        """Return the value of a tensor as an array of JAX.

        Raises:
            popart_exception: it has numbers that 32 bits do not hold.
        """
        with as_popart_exception():
            array: jax.Array = narrowed(self.values[name], f"tensor {name!r}")
        return array


def evaluate_graph(
    graph: AnnotatedGraph, placement: Placement, operands: Mapping[str, Any], zeros: Mapping[str, Any]
) -> Evaluation:
    """Return the values of all tensors for one micro-batch.

    Args:
        graph: with annotations.
        placement: which of them count.
        operands: inputs and parameters by name.
        zeros: by name of the tensors that they are added to; the derivative by one is the gradient of its tensor.

    Raises:
        popart_exception: an operator that cannot be evaluated on its operands.
    """
    settings = Settings(override=overridden).for_evaluation(graph.graph)
    constants = {name: array for name, array in graph.graph.constants.items() if name not in operands}
    values: Values = {name: _plus(value, name, zeros) for name, value in {**constants, **operands}.items()}
    nodes = list(graph.annotated_nodes())
    for is_recomputed, run in groupby(nodes, key=lambda row: _is_recomputed(row[1])):
        rows = list(run)
        if is_recomputed:
            values |= _recomputed(rows, placement, values, zeros, graph.opset, settings)
        else:
            _run(rows, placement, values, zeros, graph.opset, settings)
    return Evaluation(values, _updates(nodes, operands, values))


def _run(
    rows: Sequence[tuple[Node, Annotations]],
    placement: Placement,
    values: Values,
    zeros: Mapping[str, Any],
    opset: int,
    settings: Settings,
) -> None:
    """Evaluate nodes in order, each at its place, and add their results to the values.

    To each result of a name in `zeros` zeros are added: their gradient is that of the result, for anchors.
    """
    for node, notes in rows:
        operands: Sequence[Any] = [values[name] if name else None for name in node.inputs]
        check_operands(node, operands, opset)
        operands, dtype = common_type(node, operands)
        with placement.scope(node, notes):
            with as_popart_exception():
                results = run_node(node, operands, values, settings)
                results = results if dtype is None else tuple(x.astype(dtype) for x in results)
            for name, result in zip(node.outputs, results, strict=False):
                if name:
                    values[name] = _plus(result, name, zeros)


def _plus(value: Any, name: str, zeros: Mapping[str, Any]) -> Any:
    return value if name not in zeros else jnp.asarray(value) + zeros[name]


def _is_recomputed(annotations: Annotations) -> bool:
    return bool(annotations.get(RECOMPUTE, 0) == RecomputeType.Recompute)


def _recomputed(
    rows: Sequence[tuple[Node, Annotations]],
    placement: Placement,
    values: Values,
    zeros: Mapping[str, Any],
    opset: int,
    settings: Settings,
) -> Values:
    """Return the results of nodes that the backward part computes again, as one `jax.checkpoint`."""
    # All results can be anchors; those that nobody reads are dropped by the compiler.
    names = [name for node, _ in rows for name in node.outputs if name]
    read = {name for node, _ in rows for name in node.inputs}
    # Constants stay outside of the checkpoint: as operands they would be traced, and could decide no shapes.
    traced = {name: values[name] for name in read if not is_static(values.get(name))}
    static: Values = {}
    near = {name: zero for name, zero in zeros.items() if any(name in node.outputs for node, _ in rows)}

    def segment(operands: Values, added: Mapping[str, Any]) -> Values:
        inner = {**values, **operands}
        _run(rows, placement, inner, added, opset, settings)
        static.update({name: inner[name] for name in names if is_static(inner[name])})
        return {name: inner[name] for name in names if name not in static}

    # What is static stays so, with its 64 bits.
    return {**jax.checkpoint(segment)(traced, near), **static}


def _updates(nodes: Sequence[tuple[Node, Annotations]], operands: Mapping[str, Any], values: Values) -> Values:
    updates: Values = {}
    for node, _ in nodes:
        # A running statistic is an operand and a result with another name; here the two become one parameter.
        if node.op_type == "BatchNormalization" and len(node.outputs) > 2:
            pairs = zip(node.inputs[3:5], node.outputs[1:3], strict=False)
            updates |= {name: values[result] for name, result in pairs if name in operands}
        if node.op_type == "CopyVarUpdate" and node.inputs[0] in operands:
            updates[node.inputs[0]] = values[node.outputs[0]]
    return updates
