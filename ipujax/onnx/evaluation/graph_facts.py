"""What is asked of a graph before it is evaluated: are its operators known, and which values decide shapes.

Floating-point initialisers that decide shapes (scales of a `Resize`, factors on the way from one shape to another) are
constants of a model, not parameters: a traced value cannot decide a shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from ipujax.front_end import nearest
from ipujax.onnx.graphs import Graph, Node
from ipujax.onnx.onnx_errors import UnsupportedOperatorError
from ipujax.onnx.reading import has_body
from ipujax.onnx.registry import EARLY_DOMAIN, OPERATORS, Key

_MAX_NAMES = 3  # of nodes of one operator, in the error


def check_operators(graph: Graph) -> None:
    """Refuse a graph with operators that are neither in the table nor have a function body.

    Raises:
        UnsupportedOperatorError: names all of them, with the number of nodes and names of the first.
    """
    missing: dict[Key, list[str]] = defaultdict(list)
    for node in graph.all_nodes():
        if (node.domain, node.op_type) not in OPERATORS and not has_body(node.domain, node.op_type):
            missing[node.domain, node.op_type].append(node.name)
    if not missing:
        return
    lines = [_line(key, names) for key, names in sorted(missing.items())]
    first = ", ".join(map(repr, min(missing)))
    raise UnsupportedOperatorError(
        f"{len(missing)} operators of graph {graph.name!r} are not implemented:\n    " + "\n    ".join(lines),
        expected="operators of the table in docs/onnx.md, or registered ones",
        got=", ".join(map(_full_name, sorted(missing))),
        hint=f"add them: @ipujax.onnx.register({first}) on a function of the node's inputs",
    )


def _line(key: Key, names: list[str]) -> str:
    domain, op_type = key
    listed = ", ".join(names[:_MAX_NAMES]) + (", …" if len(names) > _MAX_NAMES else "")
    nodes = "1 node" if len(names) == 1 else f"{len(names)} nodes"
    close = nearest(op_type, [name for each, name in OPERATORS if each == domain])
    return f"{_full_name(key)}, {nodes}: {listed}" + (f" ({close})" if close else "")


def _full_name(key: Key) -> str:
    domain, op_type = key
    return f"{domain or 'ai.onnx'}:{op_type}"


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
