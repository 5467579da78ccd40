"""Settings of products, as annotations of nodes and as options: partials, and the share of memory of a plan.

The compiler has one setting of each kind for a program. Annotations become it where they are equal on all nodes that it
holds for; where they are not, they stay without effect and are listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from ipujax.popart.building.annotations import AVAILABLE_MEMORY, PARTIALS_TYPE
from ipujax.popart.exceptions import unknown_name
from ipujax.popart.model_graph.annotated_graph import AnnotatedGraph

Partials = Literal["float32", "float16"]  # as `ipu.Options` takes them
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm", "MultiConv", "LSTM", "GRU", "RNN"})
# PopART's name of an element type of partial results → that of `Options.partials`.
_PARTIALS: Mapping[str, Partials | None] = MappingProxyType(
    {"": None, "float": "float32", "FLOAT": "float32", "half": "float16", "HALF": "float16"}
)
SETTINGS = (PARTIALS_TYPE, AVAILABLE_MEMORY)


def common_settings(graph: AnnotatedGraph) -> dict[str, Any]:
    """Return the annotations of `SETTINGS` that are equal on all products of a graph, by their names.

    Args:
        graph: graph of a session.
    """
    products = [notes for node, notes in graph.annotated_nodes() if node.op_type in _PRODUCTS]
    values = {name: {notes.get(name) for notes in products} for name in SETTINGS}
    return {name: next(iter(each)) for name, each in values.items() if len(each) == 1 and None not in each}


def partials_of(settings: Mapping[str, Any], option: str) -> Partials | None:
    """Return the dtype of partial results, as `Options.partials` takes it; annotations go before the option.

    Args:
        settings: result of `common_settings`.
        option: `partialsTypeMatMuls`.

    Raises:
        popart_exception: an unknown element type, with the nearest.
    """
    annotated = settings.get(PARTIALS_TYPE)
    name = option if annotated is None else annotated.decode() if isinstance(annotated, bytes) else str(annotated)
    if name not in _PARTIALS:
        raise unknown_name("partial results have an element type", name, _PARTIALS)
    return _PARTIALS[name]
