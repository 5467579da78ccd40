"""Sums of scaled tensors, in place: the update of an optimiser.

Source: popops `ScaledAdd.hpp`. Scales and the second tensor are cast to the type of the first, as there.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from ipujax.poplar.library import add_elementwise
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor

Scale = float | Tensor
Speciality = Literal["default", "x_minus_ax_plus_by"]


def scaled_add_to(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    scale: Scale,
    prog: Program,
    name: str = "scaled_add_to",
    *,
    scale_a: Scale | None = None,
    speciality: Speciality = "default",
) -> None:
    """Compute `a = scale_a · a + scale · b`, in place.

    Args:
        graph: graph to add to.
        a: written.
        b: of the same shape.
        scale: of `b`; a number, or a tensor of one element.
        prog: program to add to.
        name: debug name.
        scale_a: of `a`, 1 when None.
        speciality: "x_minus_ax_plus_by" computes `a = a - scale_a · a + scale · b` instead.

    Raises:
        GraphError: shapes that differ, a scale of several elements, or an unknown speciality, or one without its scale.

    Source: popops::scaledAddTo, where the order is A, scaleA, B, scaleB; ScaledAddSpecialisation.
    """
    _add_scaled(graph, a, b, scale, scale_a, 1, speciality, prog, name)


def scaled_subtract_from(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    scale: Scale,
    prog: Program,
    name: str = "scaled_subtract_from",
    *,
    scale_a: Scale | None = None,
) -> None:
    """Compute `a = scale_a · a - scale · b`, in place; arguments as of `scaled_add_to`.

    Source: popops::scaledSubtractFrom.
    """
    _add_scaled(graph, a, b, scale, scale_a, -1, "default", prog, name)


def _add_scaled(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    scale: Scale,
    scale_a: Scale | None,
    sign: int,
    speciality: str,
    prog: Program,
    name: str,
) -> None:
    # Scales that are numbers are constants of the vertices, not operands.
    scales = [s for s in (scale, scale_a) if isinstance(s, Tensor)]
    if a.shape != b.shape:
        raise GraphError(f"{name}: tensors differ in shape", expected=a.shape, got=b.shape)
    if any(s.size != 1 for s in scales):
        raise GraphError(f"{name}: a scale is one number", got=[s.shape for s in scales])
    if speciality not in ("default", "x_minus_ax_plus_by") or (speciality != "default" and scale_a is None):
        expected = '"default", or "x_minus_ax_plus_by" with scale_a'
        raise GraphError(f"{name}: unknown speciality", expected=expected, got=repr(speciality))

    def compute(x: jax.Array, y: jax.Array, *scalars: jax.Array) -> jax.Array:
        unused = iter(scalars)

        # Called for `scale` first, then for `scale_a`: the order of `scales`.
        def factor(s: Scale) -> jax.Array:
            return next(unused).reshape(()).astype(x.dtype) if isinstance(s, Tensor) else jnp.asarray(s, x.dtype)

        term_b = y.astype(x.dtype) * factor(scale)
        scaled_a = x if scale_a is None else x * factor(scale_a)
        term_a = scaled_a if speciality == "default" else x - scaled_a
        return term_a + term_b if sign > 0 else term_a - term_b

    add_elementwise(graph, compute, [a, b, *scales], prog, name, [a])
