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

from ipujax.popnn.recurrent import RecurrentParams, running, where


@dataclass(frozen=True, slots=True, eq=False)
class GruParams(RecurrentParams):
    """A GRU layer; see `RecurrentParams`. `cell_order` orders "reset", "update" and "candidate".

    Args:
        reset_after: apply the reset gate after the multiplication with the weights, not before it.
    """

    reset_after: bool = False

    UNITS: ClassVar[tuple[str, ...]] = ("reset", "update", "candidate")

    @property
    def kept(self) -> int:
        """Tensors kept of each step: r, u, c, the output before, and h U + b' with `reset_after`."""
        return 5 if self.reset_after else 4

    @property
    def biases_shape(self) -> tuple[int, ...]:
        """[3, out], or [3, 2, out] with `reset_after`: of inputs and of outputs."""
        return (len(self.UNITS), *((2,) if self.reset_after else ()), self.output_size)


def forward(params: GruParams, keep: bool, pre_calc_weights: bool) -> Callable[..., Any]:
    """The forward pass.

    Args:
        params: the layer.
        keep: whether to return the intermediates for the backward pass.
        pre_calc_weights: whether to multiply the input by its weights before the loop.

    Returns:
        A function of input [t, b, in], initial output [b, out], weights [3, in, out] and [3, out, out], biases, and
        lengths [b] if the layer has them; it returns the outputs and a tuple of what is kept, each [t, b, out].
    """
    act, gate = params.activations()
    reset, update, candidate = map(params.unit, params.UNITS)

    def run(
        x: jax.Array, h: jax.Array, w: jax.Array, u: jax.Array, b: jax.Array, *lengths: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        b_in, b_out = (b[:, 0], b[:, 1]) if params.reset_after else (b, b)
        gates = None if params.reset_after else jnp.stack([u[reset], u[update]])

        def step(h: jax.Array, now: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, Any]:
            x, mask = now
            z = (x if pre_calc_weights else jnp.einsum("bi,kio->bko", x, w)) + b_in
            if gates is None:
                back = jnp.einsum("bi,kio->bko", h, u) + b_out
                r, v = (gate(z[:, k] + back[:, k]) for k in (reset, update))
                extra: tuple[jax.Array, ...] = (back[:, candidate],)
                c = act(z[:, candidate] + r * back[:, candidate])
            else:
                back = jnp.einsum("bi,kio->bko", h, gates)
                r, v = gate(z[:, reset] + back[:, 0]), gate(z[:, update] + back[:, 1])
                extra = ()
                c = act(z[:, candidate] + (r * h) @ u[candidate])
            new = v * h + (1 - v) * c
            out = where(mask, new, 0) if params.output_full_sequence else None
            return where(mask, new, h), (out, (r, v, c, h, *extra) if keep else ())

        inputs = jnp.einsum("tbi,kio->tbko", x, w) if pre_calc_weights else x
        h, (out, kept) = lax.scan(step, h, (inputs, running(params, lengths)))
        return out if params.output_full_sequence else h, kept

    return run


def backward(params: GruParams) -> Callable[..., Any]:
    """The backward pass.

    Args:
        params: the layer.

    Returns:
        A function of the gradient of the outputs, weights [3, in, out] and [3, out, out], what was kept, and lengths
        [b] if the layer has them; it returns the gradients of the initial output, of the input (or None), and of what
        goes into the non-linearities of the units, [t, b, 3, out].
    """
    act, gate = params.gradients()
    reset, update, candidate = map(params.unit, params.UNITS)

    def run(d_out: jax.Array, w: jax.Array, u: jax.Array, *rest: jax.Array) -> tuple[jax.Array | None, ...]:
        kept, lengths = rest[: params.kept], rest[params.kept :]
        zeros = jnp.zeros(params.state_shape, w.dtype)
        d_h, d_outs = (zeros, d_out) if params.output_full_sequence else (d_out, None)

        def step(d_h: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            d_out, (r, v, c, h, *extra), mask = now
            here = d_h if d_out is None else d_h + d_out
            d_v = gate(v, here * (h - c))
            d_c = act(c, here * (1 - v))
            back = here * v
            if extra:
                d_r = gate(r, d_c * extra[0])
                back = back + (d_c * r) @ u[candidate].T
            else:
                d_reset = d_c @ u[candidate].T  # of r h
                d_r = gate(r, d_reset * h)
                back = back + d_reset * r
            back = back + d_r @ u[reset].T + d_v @ u[update].T
            units = {"reset": d_r, "update": d_v, "candidate": d_c}
            d_units = jnp.stack([units[k] for k in params.cell_order], 1)
            return where(mask, back, d_h), where(None if mask is None else mask[:, None], d_units, 0)

        d_h, d_units = lax.scan(step, d_h, (d_outs, kept, running(params, lengths)), reverse=True)
        d_x = jnp.einsum("tbko,kio->tbi", d_units, w) if params.calc_input_gradients else None
        return d_h, d_x, d_units

    return run


def weight_gradients(params: GruParams) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """Gradients of weights and biases.

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
        d_w, d_b = jnp.einsum("tbi,ktbo->kio", x, d_units), jnp.sum(d_units, (1, 2))
        d_gates = jnp.einsum("tbi,ktbo->kio", before, jnp.stack([d_units[reset], d_units[update]]))
        d_c = d_units[candidate]
        if params.reset_after:
            d_u = jnp.einsum("tbi,tbo->io", before, d_c * r)
        else:
            d_u = jnp.einsum("tbi,tbo->io", r * before, d_c)
        every = {"reset": d_gates[0], "update": d_gates[1], "candidate": d_u}
        if params.reset_after:
            own = {"reset": d_b[reset], "update": d_b[update], "candidate": jnp.sum(d_c * r, (0, 1))}
            d_b = jnp.stack([d_b, jnp.stack([own[k] for k in params.cell_order])], 1)
        return d_w, jnp.stack([every[k] for k in params.cell_order]), d_b

    return run
