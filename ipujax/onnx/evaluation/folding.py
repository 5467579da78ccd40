"""Nodes of static operands, evaluated while a model is traced.

The operator's own function runs at once, with 64-bit types, and its results become NumPy arrays: shapes are computed
exactly whatever `jax_enable_x64` says. Large results stay traced, so that no program holds them as constants. Of text,
which JAX has not, positions in a list are moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ipujax.onnx.budget import MAX_STATIC_ELEMENTS
from ipujax.onnx.element_types import is_text
from ipujax.onnx.graphs import Node
from ipujax.onnx.registry import OPERATORS, as_texts, is_static

# Their results have at most as many elements as the product, or the sum, of those of their operands: what arithmetic on
# shapes is made of. Whatever else may grow is measured by its abstract result.
_BOUNDED_BY_OPERANDS = frozenset({
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Compress", "Concat", "Cos", "CumSum",
    "Div", "Equal", "Exp", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual",
    "Identity", "Less", "LessOrEqual", "Log", "MatMul", "Max", "Mean", "Min", "Mod", "Mul", "Neg", "NonZero", "Not",
    "Or", "Pow", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Round", "ScatterElements", "ScatterND", "SequenceAt",
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "Shape", "Sign", "Sin",
    "Size", "Slice", "Sqrt", "Squeeze", "StringConcat", "StringNormalizer", "StringSplit", "Sub", "Sum", "Transpose",
    "Unsqueeze", "Where", "Xor",
})  # fmt: skip
# They move elements, or compare them, and compute none: of text they have positions in a sorted list.
_MOVING = frozenset({
    "ArrayFeatureExtractor", "CenterCropPad", "Compress", "Concat", "DepthToSpace", "Equal", "Expand", "Flatten",
    "Gather", "GatherElements", "GatherND", "Pad", "Reshape", "ReverseSequence", "ScatterElements", "ScatterND",
    "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unique", "Unsqueeze", "Where",
})  # fmt: skip
_POSITION = np.dtype(np.uint32)  # no operator has other results of this type


def is_foldable(node: Node, operands: Sequence[Any], function: Callable[..., Any]) -> bool:
    """Return whether a node is evaluated at once; one with subgraphs is not: its nodes fold by themselves."""
    is_random = "seed" in (OPERATORS[node.domain, node.op_type].attributes or ())
    if is_random or not is_static(tuple(operands)) or next(node.subgraphs(), None) is not None:
        return False
    sizes = [_elements(operand) for operand in operands]
    if sum(sizes) > MAX_STATIC_ELEMENTS:
        return False
    if node.op_type in _BOUNDED_BY_OPERANDS and math.prod(map(_at_least_one, sizes)) <= MAX_STATIC_ELEMENTS:
        return True
    return _result_elements(function, operands) <= MAX_STATIC_ELEMENTS


def fold(function: Callable[..., Any], operands: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results of an operator as static values."""
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        results = function(*operands)
        return tuple(map(_as_static, results if isinstance(results, tuple) else (results,)))


def moves_text(node: Node, operands: Sequence[Any]) -> bool:
    """Return whether a node moves text, by what is known."""
    return node.op_type in _MOVING and any(map(is_text, operands)) and is_static(tuple(operands))


def numbered(operands: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """Return operands with their texts as positions in a sorted list, and the list; 0 is ONNX's default, empty text."""
    texts = [as_texts(x, "text") for x in operands if is_text(x)]
    known = np.unique(np.concatenate([np.asarray([""], object), *map(np.ravel, texts)]))
    positions = iter(np.searchsorted(known, each).astype(_POSITION) for each in texts)
    return [next(positions) if is_text(x) else x for x in operands], known


def with_texts(results: Sequence[Any], known: np.ndarray) -> tuple[Any, ...]:
    """Return static results with positions in the list of `numbered` as texts."""
    # A scalar index picks an element, which is no array.
    return tuple(np.asarray(known[x], object) if x is not None and x.dtype == _POSITION else x for x in results)


def _as_static(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_as_static, value))
    return None if value is None else np.asarray(value)


def _elements(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(map(_elements, value))
    return 0 if value is None else np.size(value)


def _at_least_one(elements: int) -> int:
    return max(elements, 1)


def _result_elements(function: Callable[..., Any], operands: Sequence[Any]) -> int:
    with jax.enable_x64(True):
        shapes = jax.eval_shape(lambda: function(*operands))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
