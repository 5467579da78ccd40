"""The equations of a GRU, forward and backward, as functions of arrays.

One step computes, for the units reset r, update u and candidate c:

    r, u = sigmoid(x W + h U + b)         h' = u h + (1 - u) c
    c    = tanh(x W + (r h) U + b), or with `reset_after` tanh(x W + b + r (h U + b'))

Source: popnn `Gru.hpp`, `GruDef.hpp`; K. Cho et al. 2014; `reset_after` as in cuDNN and Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.popnn.recurrent import RecurrentParams, running_mask, where


@dataclass(frozen=True, slots=True, eq=False)
class GruParams(RecurrentParams):
    """GRU layer; see `RecurrentParams`. `cell_order` orders "reset", "update" and "candidate".

    Args:
        reset_after: apply the reset gate after the multiplication with the weights, not before it.
    """

    reset_after: bool = False

    UNITS: ClassVar[tuple[str, ...]] = ("reset", "update", "candidate")

    @property
    def num_intermediates(self) -> int:
        """Number of intermediates of each step: r, u, c, the output before, and h U + b' with `reset_after`."""
        return 5 if self.reset_after else 4

    @property
    def biases_shape(self) -> tuple[int, ...]:
        """[3, out], or [3, 2, out] with `reset_after`: biases of inputs and of outputs."""
        return (len(self.UNITS), *((2,) if self.reset_after else ()), self.output_size)


def forward(params: GruParams, keep: bool, pre_calc_weights: bool) -> Callable[..., Any]:
    """Make the function of the forward pass.

    Args:
        params: the layer.
        keep: return the intermediates for the backward pass.
        pre_calc_weights: multiply the input by its weights before the loop.

    Returns:
        A function of input [t, b, in], initial output [b, out], weights [3, in, out] and [3, out, out], biases, and
        lengths [b] if the layer has them; it returns the outputs and a tuple of intermediates, each [t, b, out].
    """
    act, gate = params.activations()
    reset, update, candidate = map(params.unit, params.UNITS)

    def run(
        x: jax.Array, h: jax.Array, w: jax.Array, u: jax.Array, b: jax.Array, *lengths: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        # Without `reset_after` there are no biases of outputs: `b_out` is then not read.
        b_in, b_out = (b[:, 0], b[:, 1]) if params.reset_after else (b, b)
        # Without `reset_after` the candidate multiplies r h, known only after the gates: two products a step.
        gates = None if params.reset_after else jnp.stack([u[reset], u[update]])

        def step(h: jax.Array, operands: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, Any]:
            x, mask = operands
            z = (x if pre_calc_weights else jnp.einsum("bi,kio->bko", x, w)) + b_in
            if gates is None:
                recurrent = jnp.einsum("bi,kio->bko", h, u) + b_out
                r, v = (gate(z[:, k] + recurrent[:, k]) for k in (reset, update))
                extra: tuple[jax.Array, ...] = (recurrent[:, candidate],)
                c = act(z[:, candidate] + r * recurrent[:, candidate])
            else:
                recurrent = jnp.einsum("bi,kio->bko", h, gates)
                r, v = (gate(z[:, k] + recurrent[:, n]) for n, k in enumerate((reset, update)))
                extra = ()
                c = act(z[:, candidate] + (r * h) @ u[candidate])
            new = v * h + (1 - v) * c
            out = where(mask, new, 0) if params.output_full_sequence else None
            return where(mask, new, h), (out, (r, v, c, h, *extra) if keep else ())

        inputs = jnp.einsum("tbi,kio->tbko", x, w) if pre_calc_weights else x
        h, (out, intermediates) = lax.scan(step, h, (inputs, running_mask(params, lengths)))
        return out if params.output_full_sequence else h, intermediates

    return run


def backward(params: GruParams) -> Callable[..., Any]:
    """Make the function of the backward pass.

    Args:
        params: the layer.

    Returns:
        A function of the gradient of the outputs, weights [3, in, out] and [3, out, out], intermediates, and lengths
        [b] if the layer has them; it returns the gradients of the initial output, of the input (or None), and of the
        operands of the units' non-linearities, [t, b, 3, out].
    """
    act, gate = params.gradients()
    reset, update, candidate = map(params.unit, params.UNITS)

    def run(d_out: jax.Array, w: jax.Array, u: jax.Array, *rest: jax.Array) -> tuple[jax.Array | None, ...]:
        intermediates = rest[: params.num_intermediates]
        mask = running_mask(params, rest[params.num_intermediates :])
        zeros = jnp.zeros(params.state_shape, w.dtype)
        # Only the last output has a gradient, or each step adds that of its output.
        d_h, d_outs = (zeros, d_out) if params.output_full_sequence else (d_out, None)

        def step(d_h: jax.Array, operands: Any) -> tuple[jax.Array, jax.Array]:
            d_out, (r, v, c, h, *extra), mask = operands
            d_new = d_h if d_out is None else d_h + d_out
            d_v = gate(v, d_new * (h - c))
            d_c = act(c, d_new * (1 - v))
            d_before = d_new * v
            if extra:
                d_r = gate(r, d_c * extra[0])
                d_before = d_before + (d_c * r) @ u[candidate].T
            else:
                d_reset = d_c @ u[candidate].T  # of r h
                d_r = gate(r, d_reset * h)
                d_before = d_before + d_reset * r
            d_before = d_before + d_r @ u[reset].T + d_v @ u[update].T
            units = {"reset": d_r, "update": d_v, "candidate": d_c}
            d_units = jnp.stack([units[k] for k in params.cell_order], 1)
            return where(mask, d_before, d_h), where(None if mask is None else mask[:, None], d_units, 0)

        d_h, d_units = lax.scan(step, d_h, (d_outs, intermediates, mask), reverse=True)
        d_x = jnp.einsum("tbko,kio->tbi", d_units, w) if params.calc_input_gradients else None
        return d_h, d_x, d_units

    return run


def weight_gradients(params: GruParams) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """Make the function of the gradients of weights and biases.

    Args:
        params: the layer.

    Returns:
        A function of the units' gradients [3, t, b, out], input [t, b, in], outputs before each step and reset gates
        [t, b, out].
    """
    reset, update, candidate = map(params.unit, params.UNITS)

    def run(
        d_units: jax.Array, x: jax.Array, before: jax.Array, r: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        d_w = jnp.einsum("tbi,ktbo->kio", x, d_units)
        d_b = jnp.sum(d_units, (1, 2))
        d_gates = jnp.einsum("tbi,ktbo->kio", before, jnp.stack([d_units[reset], d_units[update]]))
        d_c = d_units[candidate]
        # The candidate is tanh(… + r (h U + b')) or tanh(… + (r h) U): r scales the gradient, or the operand.
        if params.reset_after:
            d_u = jnp.einsum("tbi,tbo->io", before, d_c * r)
        else:
            d_u = jnp.einsum("tbi,tbo->io", r * before, d_c)
        d_weights = {"reset": d_gates[0], "update": d_gates[1], "candidate": d_u}
        # Gates add biases of inputs and outputs, whose gradients are equal; in the candidate r multiplies the latter.
        if params.reset_after:
            d_biases = {"reset": d_b[reset], "update": d_b[update], "candidate": jnp.sum(d_c * r, (0, 1))}
            d_b = jnp.stack([d_b, jnp.stack([d_biases[k] for k in params.cell_order])], 1)
        return d_w, jnp.stack([d_weights[k] for k in params.cell_order]), d_b

    return run
