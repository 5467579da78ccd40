"""Rows that are padded to whole vectors: their costs, and the choice which lengths to pad.

A variable that has a dimension of a padded length has that dimension longer in memory: 200 elements for 197. Nothing
of the program changes but its costs: the elements beyond take memory, travel and are computed with the others, and no
code takes the slow path of a row of that length. `Graph.padded_lengths` has the padded length of each.

Input: a graph, and the cycles of its program with some lengths padded. Output: `PaddedRows`, a row a length.
Limits: a length is padded in all variables or in none; plans and layouts are those of rows without padding; a length
counts where it is a dimension of a variable, not where it is part of one. A vertex, or an exchange, takes longer by the
whole proportion of its longest operand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from math import prod

import numpy as np

from ipujax.runtime.exchange import Traffic
from ipujax.runtime.graph import Graph, PaddedRows, VertexGroup
from ipujax.runtime.tensor import Tensor, Variable, element_bytes

Lengths = Mapping[int, int]
_COUNTED_BYTES = ("received_bytes", "sent_bytes", "local_bytes", "shared_bytes", "copied_bytes")


def padding_factor(shape: Iterable[int], lengths: Lengths) -> float:
    """Return the elements of a variable in memory over those of its shape."""
    return prod(lengths[n] / n for n in shape if n in lengths) if lengths else 1.0


def padding_of_tensor(tensor: Tensor, lengths: Lengths) -> float:
    """Return the largest factor of a tensor's variables."""
    if not lengths:
        return 1.0
    return max((padding_factor(variable.shape, lengths) for variable in tensor.variables()), default=1.0)


def padding_of_group(group: VertexGroup, lengths: Lengths) -> float:
    """Return the largest factor of the operands and results of a vertex group."""
    if not lengths:
        return 1.0
    return max((padding_of_tensor(access.tensor, lengths) for access in group.accesses), default=1.0)


def with_padding(traffic: Traffic, factor: float) -> Traffic:
    """Return an exchange whose rows are longer by a factor."""
    if factor == 1:
        return traffic
    longer = {name: np.ceil(getattr(traffic, name) * factor).astype(np.int64) for name in _COUNTED_BYTES}
    assert {field.name for field in fields(Traffic)} >= longer.keys(), "bytes of an exchange"
    return replace(traffic, **longer)


def choose_padded_rows(
    graph: Graph, slow_cycles: Mapping[tuple[int, int], int], cycles_of: Callable[[Lengths], int]
) -> list[PaddedRows]:
    """Return the lengths whose padding saves more cycles than its bytes cost, the slowest rows first.

    Args:
        graph: variables, mappings, and the cost per byte of the fullest tile.
        slow_cycles: cycles of the slow paths of each row length and vector, in elements.
        cycles_of: cycles of a run with some lengths padded.
    """
    vectors: dict[int, int] = {}
    total = Counter[int]()
    for (length, vector), cycles in slow_cycles.items():
        vectors[length] = max(vector, vectors.get(length, 1))
        total[length] += cycles
    present = {n for variable in graph.variables for n in variable.shape}
    rows: list[PaddedRows] = []
    padded: dict[int, int] = {}
    cycles = cycles_of(padded)
    for length, _ in total.most_common():
        if length not in present:
            continue
        candidate = {**padded, length: -(-length // vectors[length]) * vectors[length]}
        fewer = cycles - cycles_of(candidate)
        added_bytes = _added_bytes(graph, candidate) - _added_bytes(graph, padded)
        if fewer > graph.byte_cost_cycles * added_bytes:
            rows.append(PaddedRows(length, candidate[length], fewer, added_bytes))
            padded = candidate
            cycles -= fewer
    return rows


def _added_bytes(graph: Graph, lengths: Lengths) -> int:
    """Return the bytes that padding adds on the fullest tile, if all variables were live at once."""
    added = np.zeros(graph.target.num_tiles)
    for variable in graph.variables:
        factor = padding_factor(variable.shape, lengths)
        if factor > 1 and variable in graph.mappings:
            counts = graph.mappings[variable].elements_per_tile(graph.target.num_tiles)
            added += counts * (factor - 1) * element_bytes(variable.dtype)
    return int(np.ceil(added.max()))


def bytes_in_memory(variable: Variable, lengths: Lengths) -> float:
    """Return the bytes that an element of a variable takes, its share of padding included."""
    return element_bytes(variable.dtype) * padding_factor(variable.shape, lengths)
