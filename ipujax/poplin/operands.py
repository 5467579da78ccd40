"""Options of Poplar as keywords of the op library, and operands mapped as an operation uses them.

In: a mapping of options under Poplar's names; shapes, types and an operation. Out: keywords; new mapped variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ipujax.arguments.poplar_options import read_options
from ipujax.lowering.layout import map_linearly
from ipujax.runtime.graph import Graph
from ipujax.runtime.logs import Log
from ipujax.runtime.tensor import Tensor

Options = Mapping[str, Any] | None  # values by Poplar's option names
_LOG = Log("poplin")
_KEYWORDS = {"availableMemoryProportion": "available_memory_proportion", "partialsType": "partials_dtype"}
_TYPES = {"half": np.dtype(np.float16), "float": np.dtype(np.float32)}


def settings(operation: str, options: Options) -> dict[str, Any]:
    """Return the keywords of the op library for options of an operation, "matmul" or "convolution"."""
    values, without_effect = read_options(operation, options, _KEYWORDS)
    if without_effect:
        _LOG.warning("%s options without effect here: %s", operation, ", ".join(without_effect))
    keywords = {_KEYWORDS[name]: value for name, value in values.items() if name in _KEYWORDS}
    return keywords | ({"partials_dtype": _TYPES[values["partialsType"]]} if "partialsType" in values else {})


def create_mapped_operands(
    graph: Graph,
    operands: Sequence[tuple[Sequence[int], Any]],
    build: Callable[[Graph, Sequence[Tensor]], object],
    positions: Sequence[int],
    names: Sequence[str],
) -> list[Tensor]:
    """Create variables with the tile mapping that an operation chooses for its unmapped operands.

    Args:
        graph: graph to add to.
        operands: shape and dtype of every operand of the operation.
        build: adds the operation to a graph, on unmapped tensors.
        positions: indices of the operands to create.
        names: debug name of each of `positions`.

    Returns:
        One tensor for each of `positions`.
    """
    # The operation runs once on a scratch graph; with the same cost per byte, so that its plan is that of the graph.
    scratch = Graph(graph.target, byte_cost_cycles=graph.byte_cost_cycles)
    trials = [scratch.add_variable(tuple(shape), np.dtype(dtype), "trial") for shape, dtype in operands]
    build(scratch, trials)
    tensors = []
    for number, name in zip(positions, names, strict=True):
        shape, dtype = operands[number]
        map_linearly(scratch, trials[number])  # no effect if the operation has mapped it
        mapping = scratch.mappings[trials[number].variables()[0]]
        tensors.append(graph.add_variable(tuple(shape), np.dtype(dtype), name, mapping))
    return tensors
