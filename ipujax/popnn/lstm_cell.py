"""The equations of an LSTM, forward and backward, as functions of arrays.

One step computes, for the units forget f, input i, candidate g and output o:

    f, i, o = sigmoid(x W + h U + b)      c' = f c + i g
    g       = tanh   (x W + h U + b)      h' = o tanh(c')

Source: popnn `Lstm.hpp`, `LstmDef.hpp`; S. Hochreiter and J. Schmidhuber 1997, with the forget gate of Gers 2000.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.popnn.recurrent import RecurrentParams, running, where

KEPT = 6  # of each step: f, i, g, o, tanh of the new cell state, the cell state before
OUTPUT_FACTORS = (3, 4)  # those whose product is the output

State = tuple[jax.Array, jax.Array]  # output and cell state


@dataclass(frozen=True, slots=True, eq=False)
class LstmParams(RecurrentParams):
    """An LSTM layer; see `RecurrentParams`. `cell_order` orders "forget", "input", "candidate" and "output"."""

    UNITS: ClassVar[tuple[str, ...]] = ("forget", "input", "candidate", "output")


def forward(params: LstmParams, keep: bool, pre_calc_weights: bool) -> Callable[..., Any]:
    """The forward pass.

    Args:
        params: the layer.
        keep: whether to return the intermediates for the backward pass.
        pre_calc_weights: whether to multiply the input by its weights before the loop.

    Returns:
        A function of input [t, b, in], initial output and cell state [b, out], weights [4, in, out] and [4, out, out],
        biases [4, out], and lengths [b] if the layer has them; it returns the outputs, the last cell state, and a tuple
        of what is kept, each [t, b, out].
    """
    act, gate = params.activations()
    forget, input_, candidate, output = map(params.unit, params.UNITS)

    def run(
        x: jax.Array, h: jax.Array, c: jax.Array, w: jax.Array, u: jax.Array, b: jax.Array, *lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
        def step(state: State, now: tuple[jax.Array, jax.Array | None]) -> tuple[State, Any]:
            (h, c), (x, mask) = state, now
            weighted = x if pre_calc_weights else jnp.einsum("bi,kio->bko", x, w)
            z = weighted + jnp.einsum("bi,kio->bko", h, u) + b
            f, i, o = (gate(z[:, k]) for k in (forget, input_, output))
            g = act(z[:, candidate])
            new_c = f * c + i * g
            s = act(new_c)
            new_h = o * s
            out = where(mask, new_h, 0) if params.output_full_sequence else None
            return (where(mask, new_h, h), where(mask, new_c, c)), (out, (f, i, g, o, s, c) if keep else ())

        inputs = jnp.einsum("tbi,kio->tbko", x, w) if pre_calc_weights else x
        (h, c), (out, kept) = lax.scan(step, (h, c), (inputs, running(params, lengths)))
        return out if params.output_full_sequence else h, c, kept

    return run


def backward(params: LstmParams, has_cell_gradient: bool) -> Callable[..., Any]:
    """The backward pass.

    Args:
        params: the layer.
        has_cell_gradient: whether there is a gradient of the last cell state.

    Returns:
        A function of the gradient of the outputs, weights [4, in, out] and [4, out, out], what was kept, the gradient
        of the last cell state if there is one, and lengths [b] if the layer has them; it returns the gradients of the
        initial output and cell state, of the input (or None), and of what goes into the non-linearities of the units,
        [t, b, 4, out].
    """
    act, gate = params.gradients()

    def run(d_out: jax.Array, w: jax.Array, u: jax.Array, *rest: jax.Array) -> tuple[jax.Array | None, ...]:
        kept, rest = rest[:KEPT], rest[KEPT:]
        zeros = jnp.zeros(params.state_shape, w.dtype)
        d_c, lengths = (rest[0], rest[1:]) if has_cell_gradient else (zeros, rest)
        d_h, d_outs = (zeros, d_out) if params.output_full_sequence else (d_out, None)

        def step(state: State, now: Any) -> tuple[State, jax.Array]:
            (d_h, d_c), (d_out, (f, i, g, o, s, before), mask) = state, now
            here = d_h if d_out is None else d_h + d_out
            cell = d_c + act(s, here * o)
            units = {
                "forget": gate(f, cell * before),
                "input": gate(i, cell * g),
                "candidate": act(g, cell * i),
                "output": gate(o, here * s),
            }
            stacked = jnp.stack([units[k] for k in params.cell_order], 1)
            d_units = where(None if mask is None else mask[:, None], stacked, 0)
            back = jnp.einsum("bko,kio->bi", d_units, u)
            return (where(mask, back, d_h), where(mask, cell * f, d_c)), d_units

        (d_h, d_c), d_units = lax.scan(step, (d_h, d_c), (d_outs, kept, running(params, lengths)), reverse=True)
        d_x = jnp.einsum("tbko,kio->tbi", d_units, w) if params.calc_input_gradients else None
        return d_h, d_c, d_x, d_units

    return run


def weight_gradients(
    d_units: jax.Array, x: jax.Array, first: jax.Array, *outputs: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of weights and biases.

    Args:
        d_units: from the backward pass, [4, t, b, out].
        x: input [t, b, in].
        first: initial output [b, out].
        outputs: the outputs [t, b, out], or the two factors of them.
    """
    every = outputs[0] if len(outputs) == 1 else outputs[0] * outputs[1]
    before = jnp.concatenate([first[None], every[:-1]])
    d_w, d_u = (jnp.einsum("tbi,ktbo->kio", inputs, d_units) for inputs in (x, before))
    return d_w, d_u, jnp.sum(d_units, (1, 2))
