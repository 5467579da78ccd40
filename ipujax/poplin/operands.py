"""Options of Poplar as keywords of the library, and operands mapped as an operation uses them."""

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

Options = Mapping[str, Any] | None
_TYPES = {"half": np.dtype(np.float16), "float": np.dtype(np.float32)}


def settings(options: Options) -> dict[str, Any]:
    """The keywords of the library for options of Poplar.

    Raises:
        ArgumentError: something else than a mapping, an unknown option, or value of one.
    """
    if options is not None and not isinstance(options, Mapping):
        expected, got = '{"partialsType": "half"}, or None', repr(options)
        raise ArgumentError("options of poplin are no mapping", expected=expected, got=got)
    keywords: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if name == "availableMemoryProportion":
            keywords["available_memory_proportion"] = _proportion(value)
        elif name == "partialsType":
            if not isinstance(value, str) or value not in _TYPES:
                what = "option partialsType is no type of partials"
                raise ArgumentError(what, expected='"half" or "float"', got=repr(value))
            keywords["partials_dtype"] = _TYPES[value]
        else:
            known = ("availableMemoryProportion", "partialsType")
            expected, hint = f"one of {', '.join(known)}", nearest(name, known)
            raise ArgumentError(f"no option {name!r} of poplin", expected=expected, got=repr(name), hint=hint)
    return keywords


def _proportion(given: Any) -> float:
    try:
        share = float(given) if isinstance(given, str | Real) and not isinstance(given, bool) else None
    except (ValueError, OverflowError):
        share = None
    if share is None or not 0 <= share <= 1:
        what = "option availableMemoryProportion is no proportion"
        raise ArgumentError(what, expected="a number from 0 to 1", got=repr(given))
    return share


def create_mapped_operands(
    graph: Graph,
    operands: Sequence[tuple[Sequence[int], Any]],
    build: Callable[[Graph, Sequence[Tensor]], object],
    which: Sequence[int],
    names: Sequence[str],
) -> list[Tensor]:
    """New variables with the tile mapping that an operation gives its operands, found on a scratch graph.

    Args:
        graph: graph to add to.
        operands: shape and dtype of every operand of the operation.
        build: adds the operation to a graph, on unmapped tensors.
        which: operands to make.
        names: debug name of each of those.

    Returns:
        One tensor for each of `which`.
    """
    scratch = Graph(graph.target, byte_cost_cycles=graph.byte_cost_cycles)
    tried = [scratch.add_variable(tuple(shape), np.dtype(dtype), "trial") for shape, dtype in operands]
    build(scratch, tried)
    made = []
    for number, name in zip(which, names, strict=True):
        shape, dtype = operands[number]
        map_linearly(scratch, tried[number])  # where the operation does not map it
        mapping = scratch.mappings[tried[number].variables()[0]]
        made.append(graph.add_variable(tuple(shape), np.dtype(dtype), name, mapping))
    return made
