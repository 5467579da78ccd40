"""Nodes of static operands, evaluated while a model is traced.

The operator's own function runs at once, with 64-bit types, and its results become NumPy arrays: shapes are computed
exactly whatever `jax_enable_x64` says. Large results stay traced, so that no program holds them as constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ipujax.onnx.graphs import Node
from ipujax.onnx.registry import is_static

MAX_ELEMENTS = 1 << 16  # assumed: more than any shape or table of indices, less than weights that matter

# Results of these can be far larger than their operands.
_GROWING = frozenset({"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Range", "Resize", "Tile"})
_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)


def is_foldable(node: Node, operands: Sequence[Any], function: Callable[..., Any]) -> bool:
    """Return whether a node is evaluated at once; one with subgraphs is not: its nodes fold by themselves."""
    if node.op_type in _RANDOM or not is_static(tuple(operands)) or next(node.subgraphs(), None) is not None:
        return False
    if sum(map(_elements, operands)) > MAX_ELEMENTS:
        return False
    return node.op_type not in _GROWING or _result_elements(function, operands) <= MAX_ELEMENTS


def fold(function: Callable[..., Any], operands: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results of an operator as static values."""
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        results = function(*operands)
        return tuple(map(_as_static, results if isinstance(results, tuple) else (results,)))


def _as_static(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_as_static, value))
    return None if value is None else np.asarray(value)


def _elements(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(map(_elements, value))
    return 0 if value is None else np.size(value)


def _result_elements(function: Callable[..., Any], operands: Sequence[Any]) -> int:
    with jax.enable_x64(True):
        shapes = jax.eval_shape(lambda: function(*operands))
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
