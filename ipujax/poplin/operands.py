"""Options of Poplar as keywords of the op library, and operands mapped as an operation uses them.

In: a mapping of options under Poplar's names; shapes, types and an operation. Out: keywords; new mapped variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from ipujax.lowering.layout import map_linearly
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import Graph
from ipujax.runtime.target import nearest
from ipujax.runtime.tensor import Tensor

Options = Mapping[str, Any] | None  # values by Poplar's option names
_TYPES = {"half": np.dtype(np.float16), "float": np.dtype(np.float32)}


def settings(options: Options) -> dict[str, Any]:
    """Return the keywords of the op library for options of Poplar; refuse unknown options and values."""
    if options is not None and not isinstance(options, Mapping):
        expected = '{"partialsType": "half"}, or None'
        raise ArgumentError("options of poplin must be a mapping", expected=expected, got=repr(options))
    keywords: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if name == "availableMemoryProportion":
            keywords["available_memory_proportion"] = _proportion(value)
        elif name == "partialsType":
            if not isinstance(value, str) or value not in _TYPES:
                message = "option partialsType must be a type of partials"
                raise ArgumentError(message, expected='"half" or "float"', got=repr(value))
            keywords["partials_dtype"] = _TYPES[value]
        else:
            # Poplar refuses unknown options too: a misspelt one must not be ignored in silence.
            names = ("availableMemoryProportion", "partialsType")
            hint = nearest(name, names)
            raise ArgumentError(
                f"no option {name!r} of poplin", expected=f"one of {', '.join(names)}", got=repr(name), hint=hint
            )
    return keywords


def _proportion(value: Any) -> float:
    # Poplar's option values are strings; numbers are accepted too, but True is no proportion.
    try:
        share = float(value) if isinstance(value, str | Real) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        share = None
    if share is None or not 0 <= share <= 1:
        message = "option availableMemoryProportion must be a proportion"
        raise ArgumentError(message, expected="a number from 0 to 1", got=repr(value))
    return share


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
