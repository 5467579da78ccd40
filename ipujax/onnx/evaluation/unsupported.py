"""All operators of a graph without an implementation, in one error, before anything is traced."""

from __future__ import annotations

from collections import defaultdict

from ipujax.front_end import nearest
from ipujax.onnx.graphs import Graph
from ipujax.onnx.onnx_errors import UnsupportedOperatorError
from ipujax.onnx.reading import has_body
from ipujax.onnx.registry import OPERATORS, Key

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
