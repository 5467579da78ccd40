"""Operators of ai.onnx that a session evaluates in its own way: those with random numbers, and dropout.

Their keys come from the session's seed and change with each micro-batch. Dropout is active in training alone, as in
PopART, whatever the node says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.graphs import Node
from ipujax.popart.operators.randomness import node_key
from ipujax.popart.tensor_info import of_onnx_number

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


def overridden(node: Node, operands: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return the results of an operator that the session evaluates itself; None for others.

    Args:
        node: of the graph.
        operands: its values.
    """
    override = OVERRIDES.get(node.op_type) if node.domain == "" else None
    # A node with a seed of its own draws ONNX's fixed numbers; the session's seed does not change them.
    key = None if override is None or node.attributes.get("seed") is not None else node_key(node.name)
    return None if override is None or key is None else override(node, operands, key)
