"""Convolutions of ai.graphcore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.popart.operators.domain import graphcore


@graphcore("ConvFlipWeights")
def conv_flip_weights(w: jax.Array, **_: Any) -> jax.Array:
    """Return weights for the gradient of the input: input and output channels swapped, space backwards."""
    return jnp.flip(jnp.swapaxes(w, 0, 1), tuple(range(2, w.ndim)))


@graphcore("MultiConv")
def multi_conv(
    *operands: jax.Array,
    inputsPerConv: Sequence[int],
    dilations: Sequence[int] = (),
    inDilations: Sequence[int] = (),
    pads: Sequence[int] = (),
    outPads: Sequence[int] = (),
    strides: Sequence[int] = (),
    output_count: int = 1,
    **plans: Any,
) -> tuple[jax.Array, ...]:
    """Return several convolutions.

    Args:
        operands: for each data, weights, and bias where there is one.
        inputsPerConv: operands of each.
        dilations: of the kernels, those of all convolutions in a row.
        inDilations: of the data, likewise.
        pads: lower then upper padding of the data of each, likewise.
        outPads: of the results, likewise.
        strides: likewise.
        output_count: number of convolutions.
        plans: settings of PopLibs' planner, which have no effect here.
    """
    settings = {"dilations": dilations, "inDilations": inDilations, "strides": strides}
    results: list[jax.Array] = []
    first = 0
    space = 0
    for count in inputsPerConv:
        data, weights, *bias = operands[first : first + count]
        rank = data.ndim - 2
        of_convolution = {name: _part(values, space, rank, 1) for name, values in settings.items()}
        convolved = jax.lax.conv_general_dilated(
            data,
            weights,
            window_strides=of_convolution["strides"],
            padding=_pairs(_part(pads, 2 * space, 2 * rank, 0)),
            lhs_dilation=of_convolution["inDilations"],
            rhs_dilation=of_convolution["dilations"],
            feature_group_count=data.shape[1] // weights.shape[1],
        )
        out_pads = _pairs(_part(outPads, 2 * space, 2 * rank, 0))
        convolved = jnp.pad(convolved, [(0, 0), (0, 0), *out_pads])
        results.append(convolved + bias[0].reshape(1, -1, *[1] * rank) if bias else convolved)
        first += count
        space += rank
    return tuple(results)


def _part(values: Sequence[int], start: int, count: int, default: int) -> list[int]:
    return list(values[start : start + count]) if len(values) else [default] * count


def _pairs(pads: list[int]) -> list[tuple[int, int]]:
    half = len(pads) // 2
    return list(zip(pads[:half], pads[half:], strict=True))
