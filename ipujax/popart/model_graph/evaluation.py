"""A graph as a JAX function of one micro-batch, with intermediate values as further results.

Nodes are evaluated in order, each in the scope of its placement. Zeros that are added to named values make their
gradients: those of the zeros. Runs of nodes that are annotated for recomputation are functions under `jax.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.onnx.front_end import Node, Saturated, Settings, is_static, narrowed, run_node
from ipujax.popart.building import Annotations
from ipujax.popart.building.annotations import RECOMPUTE
from ipujax.popart.enumerations import RecomputeType
from ipujax.popart.model_graph.annotated_graph import AnnotatedGraph
from ipujax.popart.model_graph.operand_checks import check_operands
from ipujax.popart.model_graph.overridden_operators import common_type, overridden
from ipujax.popart.model_graph.stage_placement import Placement
from ipujax.popart.onnx_failures import as_popart_exception

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
    settings = Settings().for_evaluation(graph.graph)
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
    for node, notes in rows:
        operands: Sequence[Any] = [values[name] if name else None for name in node.inputs]
        check_operands(node, operands, opset)
        operands, dtype = common_type(node, operands)
        with placement.scope(node, notes):
            results = None if _has_saturated(operands) else overridden(node, operands)
            with as_popart_exception():
                results = run_node(node, operands, values, settings) if results is None else results
                results = results if dtype is None else tuple(x.astype(dtype) for x in results)
            for name, result in zip(node.outputs, results, strict=False):
                if name:
                    values[name] = _plus(result, name, zeros)


def _has_saturated(operands: Sequence[Any]) -> bool:
    return any(isinstance(value, Saturated) for value in operands)


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
