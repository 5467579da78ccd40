"""Floating-point initialisers that decide shapes: scales of a `Resize`, factors on the way from one shape to another.

They are constants of a model, not parameters: a traced value cannot decide a shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ipujax.onnx.graphs import Graph, Node
from ipujax.onnx.registry import EARLY_DOMAIN, MICROSOFT_DOMAIN

# Operator → positions of operands that decide the shape of a result; None: all.
SHAPE_OPERANDS: Mapping[str, tuple[int, ...] | None] = {
    "AffineGrid": (1,),
    "BlackmanWindow": None,
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": None,
    "CumProd": (1,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Expand": (1,),
    "HammingWindow": None,
    "HannWindow": None,
    "Loop": (0, 1),
    "MaxUnpool": (2,),
    "MelWeightMatrix": None,
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": None,
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"), (1,)),
    **dict.fromkeys(("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"), (1,)),
}
# The same of `com.microsoft`, of floats.
_SHAPE_OPERANDS_OF_MICROSOFT: Mapping[str, tuple[int, ...] | None] = {"Range": None}
# Operators of which operands at these positions decide a size, regions or a branch, and may be traced too: with a
# bound, or as a `lax.cond`.
_DECIDING_OPERANDS: Mapping[str, tuple[int, ...] | None] = {
    "Compress": (1,),
    "If": (0,),
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
    is_standard = node.domain in ("", EARLY_DOMAIN)
    operands = {**_DECIDING_OPERANDS, **SHAPE_OPERANDS} if is_standard else _SHAPE_OPERANDS_OF_MICROSOFT
    positions = operands.get(node.op_type, ()) if is_standard or node.domain == MICROSOFT_DOMAIN else ()
    for n in range(len(node.inputs)) if positions is None else positions:
        if n < len(node.inputs) and node.inputs[n]:
            yield node.inputs[n]


def _results_of_subgraphs(node: Node) -> Iterator[str]:
    for graph in node.subgraphs():
        yield from (output.name for output in graph.outputs)
