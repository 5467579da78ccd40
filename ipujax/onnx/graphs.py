"""ONNX graphs as frozen values, at the newest opset: the output of `reading`, the input of `evaluation`.

Names are those of the file. An empty input name is an optional input that the node leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Dim = int | str | None  # a size, a name for one, or neither


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """Declared type of a graph input or output.

    Args:
        name: name of the value.
        dtype: dtype of a tensor, or of the tensors of a sequence or optional; None where the file has none.
        shape: dimensions; None where the rank is not declared, or for sequences and optionals.
        kind: "tensor", "sequence" or "optional".
    """

    name: str
    dtype: np.dtype | None
    shape: tuple[Dim, ...] | None
    kind: str = "tensor"

    def __str__(self) -> str:
        shape = "?" if self.shape is None else ",".join("?" if dim is None else str(dim) for dim in self.shape)
        text = f"{self.dtype}[{shape}]"
        return f"{self.name}: " + (text if self.kind == "tensor" else f"{self.kind} of {text}")


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One node.

    Args:
        name: unique in its graph.
        domain: domain of the operator, "" for ONNX's own.
        op_type: type of the operator.
        inputs: names of its inputs.
        outputs: names of its outputs.
        attributes: those that the file gives; subgraphs as `Graph`.
        output_dtypes: of each output, where shape inference knows it.
        proto: the node as onnx has it, for function bodies.
    """

    name: str
    domain: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    output_dtypes: tuple[np.dtype | None, ...]
    proto: Any

    @property
    def label(self) -> str:
        """Name and operator, as errors show them."""
        return f"node {self.name!r} ({self.domain + ':' if self.domain else ''}{self.op_type})"

    def names_read(self) -> set[str]:
        """Return the names that the node and its subgraphs read."""
        names = set(self.inputs)
        for graph in self.subgraphs():
            names.update(output.name for output in graph.outputs)
            names.update(name for node in graph.nodes for name in node.names_read())
        return names

    def subgraphs(self) -> Iterator[Graph]:
        """Yield the graphs among the attributes."""
        for value in self.attributes.values():
            yield from (graph for graph in (value if isinstance(value, list) else [value]) if isinstance(graph, Graph))


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A graph or subgraph.

    Args:
        name: its name.
        inputs: without those that only name an initialiser.
        outputs: results.
        constants: initialisers and the results of `Constant` nodes.
        nodes: in an order in which they can be evaluated.
        initializers: names of constants that are initialisers.
    """

    name: str
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    constants: Mapping[str, np.ndarray]
    nodes: tuple[Node, ...]
    initializers: frozenset[str]

    def all_nodes(self) -> Iterator[Node]:
        """Yield the nodes of this graph and of all subgraphs."""
        for node in self.nodes:
            yield node
            for graph in node.subgraphs():
                yield from graph.all_nodes()
