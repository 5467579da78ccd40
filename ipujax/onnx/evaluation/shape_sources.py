"""Floating-point initialisers that decide shapes: scales of a `Resize`, factors on the way from one shape to another.

They are constants of a model, not parameters: a traced value cannot decide a shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ipujax.onnx.graphs import Graph, Node
from ipujax.onnx.registry import EARLY_DOMAIN, OPERATORS

# Operators of which operands at these positions decide a size, regions or a branch, and may be traced too: with a
# bound, or as control flow of `lax`. Those that must be static are said by the operators.
_DECIDING_OPERANDS: Mapping[str, tuple[int, ...] | None] = {
    "Compress": (1,),
    "If": (0,),
    "Loop": (0, 1),
    "MaxRoiPool": (1,),
    "NonMaxSuppression": None,
    "NonZero": (0,),
    "RoiAlign": (1, 2),
    "Unique": (0,),
}
# Their results are static whatever their operands are.
_STATIC_RESULTS = frozenset({"Shape", "Size", "SequenceLength", "OptionalHasElement"})


def shape_sources(graph: Graph, traced: Collection[str] = ()) -> frozenset[str]:
    """Return the names of values that operands which decide shapes depend on.

    Args:
        graph: a graph.
        traced: names of inputs that are traced; values that depend on them cannot be static, and are left out.
    """
    nodes = list(graph.all_nodes())
    producers = {name: node for node in nodes for name in node.outputs}
    dependent = dependent_on(nodes, traced)
    sources: set[str] = set()
    pending = [name for node in nodes for name in _shape_operands(node)]
    while pending:
        name = pending.pop()
        if name in sources or name in dependent:
            continue
        sources.add(name)
        producer = producers.get(name)
        if producer is not None and producer.op_type not in _STATIC_RESULTS:
            pending += [*filter(None, producer.inputs), *_results_of_subgraphs(producer)]
    return frozenset(sources)


def dependent_on(nodes: Sequence[Node], traced: Collection[str]) -> set[str]:
    """Return the names of traced values and of all that are computed from them, shapes left out."""
    dependent = set(traced)
    for node in nodes:
        if node.op_type not in _STATIC_RESULTS and not dependent.isdisjoint(node.names_read()):
            dependent.update(node.outputs)
    return dependent


def _shape_operands(node: Node) -> Iterator[str]:
    entry = OPERATORS.get((node.domain, node.op_type))
    deciding = _DECIDING_OPERANDS.get(node.op_type, ()) if node.domain in ("", EARLY_DOMAIN) else ()
    positions = range(len(node.inputs)) if deciding is None else (*deciding, *(entry.static_operands if entry else ()))
    for n in positions:
        if n < len(node.inputs) and node.inputs[n]:
            yield node.inputs[n]


def _results_of_subgraphs(node: Node) -> Iterator[str]:
    for graph in node.subgraphs():
        yield from (output.name for output in graph.outputs)
