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

from ipujax.popnn.recurrent import RecurrentParams, running_mask, where

NUM_INTERMEDIATES = 6  # of each step: f, i, g, o, tanh of the new cell state, the cell state before
OUTPUT_FACTORS = (3, 4)  # indices of the intermediates whose product is the output: o and tanh(c')

State = tuple[jax.Array, jax.Array]  # output and cell state


@dataclass(frozen=True, slots=True, eq=False)
class LstmParams(RecurrentParams):
    """LSTM layer; see `RecurrentParams`. `cell_order` orders "forget", "input", "candidate" and "output"."""

    UNITS: ClassVar[tuple[str, ...]] = ("forget", "input", "candidate", "output")


def forward(params: LstmParams, keep: bool, pre_calc_weights: bool) -> Callable[..., Any]:
    """Make the function of the forward pass.

    Args:
        params: the layer.
        keep: return the intermediates for the backward pass.
        pre_calc_weights: multiply the input by its weights before the loop.

    Returns:
        A function of input [t, b, in], initial output and cell state [b, out], weights [4, in, out] and [4, out, out],
        biases [4, out], and lengths [b] if the layer has them; it returns the outputs, the last cell state, and a tuple
        of intermediates, each [t, b, out].
    """
    act, gate = params.activations()
    forget, input_, candidate, output = map(params.unit, params.UNITS)

    def run(
        x: jax.Array, h: jax.Array, c: jax.Array, w: jax.Array, u: jax.Array, b: jax.Array, *lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
        def step(state: State, operands: tuple[jax.Array, jax.Array | None]) -> tuple[State, Any]:
            h, c = state
            x, mask = operands
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
        (h, c), (out, intermediates) = lax.scan(step, (h, c), (inputs, running_mask(params, lengths)))
        return out if params.output_full_sequence else h, c, intermediates

    return run


def backward(params: LstmParams, has_cell_gradient: bool) -> Callable[..., Any]:
    """Make the function of the backward pass.

    Args:
        params: the layer.
        has_cell_gradient: the function takes a gradient of the last cell state.

    Returns:
        A function of the gradient of the outputs, weights [4, in, out] and [4, out, out], intermediates, the gradient
        of the last cell state if there is one, and lengths [b] if the layer has them; it returns the gradients of the
        initial output and cell state, of the input (or None), and of the operands of the units' non-linearities,
        [t, b, 4, out].
    """
    act, gate = params.gradients()

    def run(d_out: jax.Array, w: jax.Array, u: jax.Array, *rest: jax.Array) -> tuple[jax.Array | None, ...]:
        intermediates = rest[:NUM_INTERMEDIATES]
        lengths = rest[NUM_INTERMEDIATES + has_cell_gradient :]
        zeros = jnp.zeros(params.state_shape, w.dtype)
        d_c = rest[NUM_INTERMEDIATES] if has_cell_gradient else zeros
        # Only the last output has a gradient, or each step adds that of its output.
        d_h, d_outs = (zeros, d_out) if params.output_full_sequence else (d_out, None)

        def step(state: State, operands: Any) -> tuple[State, jax.Array]:
            d_h, d_c = state
            d_out, (f, i, g, o, s, c_before), mask = operands
            d_new_h = d_h if d_out is None else d_h + d_out
            d_new_c = d_c + act(s, d_new_h * o)  # from the next step, and through the output o tanh(c')
            units = {
                "forget": gate(f, d_new_c * c_before),
                "input": gate(i, d_new_c * g),
                "candidate": act(g, d_new_c * i),
                "output": gate(o, d_new_h * s),
            }
            stacked = jnp.stack([units[k] for k in params.cell_order], 1)
            # The mask is [batch, 1], the units are [batch, 4, out].
            d_units = where(None if mask is None else mask[:, None], stacked, 0)
            d_h_before = jnp.einsum("bko,kio->bi", d_units, u)
            return (where(mask, d_h_before, d_h), where(mask, d_new_c * f, d_c)), d_units

        operands = (d_outs, intermediates, running_mask(params, lengths))
        (d_h, d_c), d_units = lax.scan(step, (d_h, d_c), operands, reverse=True)
        d_x = jnp.einsum("tbko,kio->tbi", d_units, w) if params.calc_input_gradients else None
        return d_h, d_c, d_x, d_units

    return run


def weight_gradients(
    d_units: jax.Array, x: jax.Array, first: jax.Array, *outputs: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return gradients of weights [4, in, out] and [4, out, out], and of biases [4, out].

    Args:
        d_units: from the backward pass, [4, t, b, out].
        x: input [t, b, in].
        first: initial output [b, out].
        outputs: the outputs [t, b, out], or the two factors of them.
    """
    all_outputs = outputs[0] if len(outputs) == 1 else outputs[0] * outputs[1]
    before = jnp.concatenate([first[None], all_outputs[:-1]])
    d_w, d_u = (jnp.einsum("tbi,ktbo->kio", inputs, d_units) for inputs in (x, before))
    return d_w, d_u, jnp.sum(d_units, (1, 2))
