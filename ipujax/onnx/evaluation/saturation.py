"""Nodes that are traced with 32 bits, some of whose static operands only 64 bits hold.

A sentinel becomes the limit of 32 bits where the result stays right: SATURATING says where. Elements that `Where` takes
from one are marked, with the value that they stand for: its result may be moved, and read by operators that compare or
order elements, as long as marks on one side stand for one value. A maximum of marks alone stays marked for comparisons,
and is the limit of 32 bits for all others. Operands that decide shapes are read exactly, those that are passed on stay
static, and all others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.front_end import Log
from ipujax.onnx.element_types import Saturated, check_held, is_wide_enabled, not_held, saturated, sides_of
from ipujax.onnx.evaluation.graph_facts import dependent_on
from ipujax.onnx.graphs import Graph, Node
from ipujax.onnx.registry import OPERATORS

_LOG = Log("jit")

Function = Callable[..., Any]
Sides = frozenset[int]

BELOW: Sides = frozenset({-1})
ABOVE: Sides = frozenset({1})
_COMPARING = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
# Operator → sides of the operand at a position that may saturate; None: at all positions. No element of 32 bits is less
# than what is below the lower limit, none is greater than what is above the upper one.
SATURATING: Mapping[str, Mapping[int | None, Sides]] = {
    "Clip": {1: BELOW, 2: ABOVE},
    "Max": {None: BELOW},
    "Min": {None: ABOVE},
    "Trilu": {1: BELOW | ABOVE},  # a diagonal outside of the matrix
    "Where": {1: BELOW | ABOVE, 2: BELOW | ABOVE},
    **{name: {None: BELOW | ABOVE} for name in _COMPARING},
}
# Operators that read the marks of their own operands.
_MARKING = _COMPARING | {"Where"}
_CHOOSING = frozenset({"Max", "Min"})  # one of their operands must be held: it may be the result
# Operators that read no elements: those of sequences and subgraphs pass them on.
_PASSING = frozenset(
    {"If", "Loop", "Optional", "OptionalGetElement", "OptionalHasElement", "Scan", "SequenceAt", "SequenceConstruct"}
    | {"SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap", "Shape", "Size"}
)


def run_narrowed(node: Node, operands: Sequence[Any], function: Function, logged: set[str]) -> Any:
    """Return the results of a node that is not folded.

    Args:
        node: the node.
        operands: values of its inputs.
        function: its operator, of operands alone.
        logged: names of nodes whose sentinels have been logged; the node's is added.

    Raises:
        WideValueError: the operator needs a value that 32 bits do not hold.
    """
    if is_wide_enabled() or _is_passing(node):
        return function(*operands)
    _check_attributes(node)
    narrow = [_narrowed(node, position, value) for position, value in enumerate(operands)]
    marked = [value for value in narrow if isinstance(value, Saturated)]
    saturating = [before for before, value in zip(operands, narrow, strict=True) if value is not before]
    chosen = [value for value in marked if not value.is_of_masked_rows]
    if node.op_type in _CHOOSING and len(saturating) + len(chosen) == len(operands):
        check_held(operands[0], _place(node, 0))
    if saturating and node.name not in logged:
        _LOG.info("%s: values beyond 32 bits become their limits; jax_enable_x64 keeps them", node.label)
        logged.add(node.name)
    return _read_marked(node, narrow, function) if marked else function(*narrow)


def check_constants(graph: Graph, traced: Collection[str]) -> None:
    """Refuse constants that meet traced values, or are results, and need 64 bits: before anything is traced.

    Args:
        graph: a graph; nodes of subgraphs, which may be in a branch that is not taken, are checked when traced.
        traced: names of values that are surely traced.

    Raises:
        WideValueError: names node and value.
    """
    if is_wide_enabled():
        return
    dependent = dependent_on(graph.nodes, traced)
    for node in graph.nodes:
        if not dependent.isdisjoint(node.inputs) and (node.domain, node.op_type) in OPERATORS:
            for position, name in enumerate(node.inputs):
                check_operand(node, position, graph.constants.get(name))
    for info in graph.outputs:
        check_held(graph.constants.get(info.name), f"output {info.name!r}")


def check_operand(node: Node, position: int, value: Any) -> np.ndarray | None:
    """Return the sides of the elements of an operand that saturate; None if there are none, or it is read exactly.

    Raises:
        WideValueError: the operator needs a value that 32 bits do not hold.
    """
    entry = OPERATORS.get((node.domain, node.op_type))
    is_exact = entry is not None and position in entry.static_operands
    if _is_passing(node) or is_exact or isinstance(value, Saturated):
        return None
    if isinstance(value, tuple):
        check_held(value, _place(node, position))
    sides = sides_of(value)
    if sides is None:
        return None
    allowed = _saturating(node).get(position, _saturating(node).get(None, frozenset()))
    refused = (sides != 0) & ~np.isin(sides, list(allowed))
    if refused.any():
        raise not_held(np.asarray(value)[refused][0], _place(node, position))
    return sides


def _saturating(node: Node) -> Mapping[int | None, Sides]:
    return {} if node.domain else SATURATING.get(node.op_type, {})


def _is_passing(node: Node) -> bool:
    return not node.domain and node.op_type in _PASSING


def _place(node: Node, position: int) -> str:
    return f"{node.label}: input {node.inputs[position]!r}"


def _narrowed(node: Node, position: int, value: Any) -> Any:
    """Return an operand with 32 bits; one that has no others stays as it is."""
    sides = check_operand(node, position, value)
    if sides is None:
        return value
    array = saturated(np.asarray(value), sides)
    if node.op_type not in _MARKING:
        return array
    present = frozenset(np.unique(np.asarray(value)[sides != 0]).tolist())
    return Saturated(jnp.asarray(array), jnp.asarray(sides), present, node.label)


def _check_attributes(node: Node) -> None:
    for name, value in node.attributes.items():
        numbers = value if isinstance(value, list) else [value]
        is_integer = not node.domain and bool(numbers) and isinstance(numbers[0], int)
        check_held(np.asarray(value, np.int64) if is_integer else value, f"{node.label}: attribute {name!r}")


def _moved(node: Node, operands: Sequence[Any], function: Function) -> Any:
    """Move the marks as the elements."""
    positions = _MOVING[node.op_type]
    marked = [(n, x) for n, x in enumerate(operands) if isinstance(x, Saturated)]
    if positions is not None and any(n not in positions for n, _ in marked):
        return None
    marks = [
        x.sides if isinstance(x, Saturated) else jnp.zeros(np.shape(x), np.int8) if _is_in(positions, n) else x
        for n, x in enumerate(operands)
    ]
    key = (_present(operands), marked[0][1].source, all(x.is_of_masked_rows for _, x in marked))
    arrays, sides = function(*_arrays(operands)), function(*marks)
    if isinstance(arrays, tuple):
        return tuple(Saturated(x, y, *key) for x, y in zip(arrays, sides, strict=True))
    return Saturated(arrays, sides, *key)


def _is_in(positions: Collection[int] | None, position: int) -> bool:
    return positions is None or position in positions


def _arrays(operands: Sequence[Any]) -> list[Any]:
    return [x.array if isinstance(x, Saturated) else x for x in operands]


def _present(operands: Sequence[Any]) -> frozenset[int | float]:
    return frozenset().union(*(x.present for x in operands if isinstance(x, Saturated)))


def _sides_present(operands: Sequence[Any]) -> Sides:
    return frozenset(-1 if value < 0 else 1 for value in _present(operands))


def _is_one_each(operands: Sequence[Any]) -> bool:
    """Return whether marks on one side stand for one value, so that ranks order them."""
    return len(_present(operands)) == len(_sides_present(operands))


def _weighted(node: Node, operands: Sequence[Any], function: Function) -> Any:
    return function(*_arrays(operands)) if _sides_present(operands) <= BELOW else None


def _chosen(node: Node, operands: Sequence[Any], function: Function) -> Any:
    """Choose elements that have no mark; where all have one, the result has."""
    if not _sides_present(operands) <= _LOSING[node.op_type] or not _is_one_each(operands):
        return None
    is_reduction = node.op_type not in _CHOOSING  # whose second operand are its axes
    marks = [x.sides if isinstance(x, Saturated) else _no_marks(x, is_reduction) for x in operands]
    source = next(x.source for x in operands if isinstance(x, Saturated))
    return Saturated(function(*_arrays(operands)), function(*marks), _present(operands), source, True)


def _no_marks(value: Any, is_axes: bool) -> Any:
    """Return marks of an operand without any; the axes of a reduction stay as they are."""
    return value if is_axes else jnp.zeros(np.shape(value), np.int8)


def _compared(node: Node, operands: Sequence[Any], function: Function) -> Any:
    """Compare ranks where there are marks: 0 for numbers of 32 bits, ±1 for marks, ±2 for infinities."""
    if not _is_one_each(operands) and not _sides_present(operands[:1]).isdisjoint(_sides_present(operands[1:])):
        return None
    arrays = list(map(jnp.asarray, _arrays(operands)))
    sides = [x.sides if isinstance(x, Saturated) else np.int8(0) for x in operands]
    ranks = [side + jnp.where(jnp.isinf(x), 2 * jnp.sign(x), 0) for side, x in zip(sides, arrays, strict=True)]
    is_marked = (sides[0] != 0) | (sides[1] != 0)
    is_ordered = ~(jnp.isnan(arrays[0]) | jnp.isnan(arrays[1]))
    return jnp.where(is_marked & is_ordered, function(*ranks), function(*arrays))


def _extreme(node: Node, operands: Sequence[Any], function: Function) -> Any:
    """Index of the largest or smallest element: of those that are equal with 32 bits, the one that is it with 64."""
    x = operands[0]
    if not _is_one_each(operands):
        return None
    find, sign = _EXTREMES[node.op_type]
    best = find(x.array, axis=node.attributes.get("axis", 0), keepdims=True)
    return function(jnp.where(x.array == best, x.sides + np.int8(2 * sign), np.int8(0)))


def _top(node: Node, operands: Sequence[Any], function: Function) -> Any:
    """Largest or smallest elements: of those that are equal with 32 bits, first the ones that are not marked."""
    x, count = operands
    axis = node.attributes.get("axis", -1)
    side = BELOW if node.attributes.get("largest", 1) else ABOVE
    if _sides_present(operands) != side or not _is_one_each(operands):
        return None
    order = jnp.argsort(x.sides != 0, axis=axis, stable=True)
    values, indices = function(jnp.take_along_axis(x.array, order, axis), count)
    return values, jnp.take_along_axis(order, indices, axis).astype(indices.dtype)


# Operators that move elements → positions of operands whose elements they move; None: all.
_MOVING: Mapping[str, Collection[int] | None] = {
    "Concat": None,
    "Where": (1, 2),
    **dict.fromkeys(("Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze"), (0,)),
    **dict.fromkeys(("Tile", "Transpose", "Unsqueeze"), (0,)),
}
# Operators → sides of elements that are not in the result, as long as there are others.
_LOSING: Mapping[str, Sides] = {"Max": BELOW, "Min": ABOVE, "ReduceMax": BELOW, "ReduceMin": ABOVE}
_EXTREMES: Mapping[str, tuple[Callable[..., jax.Array], int]] = {"ArgMax": (jnp.max, 1), "ArgMin": (jnp.min, -1)}
# Operators that may read marked elements; their functions return None for elements that they may not.
READERS: Mapping[str, Callable[[Node, Sequence[Any], Function], Any]] = {
    **dict.fromkeys(_MOVING, _moved),
    **dict.fromkeys(_LOSING, _chosen),
    "Softmax": _weighted,
    **dict.fromkeys(_COMPARING, _compared),
    **dict.fromkeys(_EXTREMES, _extreme),
    "TopK": _top,
}


def _read_marked(node: Node, operands: Sequence[Any], function: Function) -> Any:
    read = None if node.domain else READERS.get(node.op_type)
    results = None if read is None else read(node, operands, function)
    if results is not None:
        return results
    for position, value in enumerate(operands):
        check_held(value if isinstance(value, Saturated) else None, _place(node, position))
    return function(*_arrays(operands))  # of rows that are masked altogether
