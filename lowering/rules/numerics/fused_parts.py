"""Parts of a fused vertex, one for each of its equations, by which profiles divide its cycles.

Input: a `fused` equation. Output: a `VertexPart` for each of its computing equations, weighted by the cycles that a
tile would take for it alone.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ipujax.lowering.jax_compat import JaxprEqn, Literal, shape_of
from ipujax.lowering.layer_notes import layer_of, origin_of
from ipujax.lowering.layout import ceil_div
from ipujax.lowering.popops import MONOIDS
from ipujax.lowering.popops.vertices.elementwise_cycles import elementwise_cycles
from ipujax.lowering.popops.vertices.reduce_cycles import reduce_cycles
from ipujax.runtime.graph import VertexPart
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin


def fused_parts(
    fused: JaxprEqn, computing: list[tuple[JaxprEqn, str]], origin: Origin, target: Target
) -> tuple[VertexPart, ...]:
    """Parts of a fused vertex, by the rows or monoids of its equations; none if all have one line and layer."""
    outer_layer = origin.layer.removesuffix(layer_of(fused)).rstrip("/")
    origins = [origin_of(eqn, replace(origin, layer=outer_layer)) for eqn, _ in computing]
    if len({(origin, origin.layer, origin.part) for origin in origins}) < 2:
        return ()
    return tuple(
        VertexPart(origin, eqn.primitive.name, _cycles_alone(eqn, row, target))
        for origin, (eqn, row) in zip(origins, computing, strict=True)
    )


def _cycles_alone(eqn: JaxprEqn, row: str, target: Target) -> int:
    """Cycles of one equation on a tile, its elements spread over all tiles of an IPU."""
    operands: list[Any] = [atom.aval for atom in eqn.invars]
    result: Any = eqn.outvars[0].aval
    elements = _per_tile(max((aval.size for aval in operands), default=result.size), target)
    if eqn.primitive.name in MONOIDS:
        outputs = _per_tile(prod(shape_of(eqn.outvars[0])), target)
        return int(reduce_cycles(row, operands[0].dtype, outputs, ceil_div(elements, outputs), target))
    # A comparison, or a conversion from integers, is computed in the dtype of its operand.
    from_integer = eqn.primitive.name == "convert_element_type" and np.issubdtype(operands[0].dtype, np.integer)
    computes_in = operands[-1].dtype if result.dtype == np.bool_ or from_integer else result.dtype
    constants = sum(isinstance(atom, Literal) for atom in eqn.invars)
    cycles = elementwise_cycles(row, computes_in, len(operands) - constants, constants, elements, target)
    return int(cycles)


def _per_tile(elements: int, target: Target) -> np.ndarray:
    return np.asarray(max(1, ceil_div(elements, target.tiles_per_ipu)), np.int64)
