"""Passes of recurrent layers as functions of arrays: forward, backward, and gradients of weights.

The equations of a step are in `ipujax.recurrent`; `GRADIENTS` has those of its gradient, from the intermediates
that the step keeps. The backward pass is one scan from the last step to the first; gradients of weights are products
over all steps, after it. Gradients of a sequence that has ended are zeros.
Source: popnn `Lstm.cpp`, `Gru.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.popnn.non_linearity import GRADIENTS_BY_RESULT
from ipujax.popnn.recurrent_operands import ACTIVATIONS, RecurrentParams
from ipujax.recurrent import CellWeights, Stack, State, Units, run_layer, running_mask, where, where_each

Transposed = Callable[[Units], jax.Array]  # gradients of a product h U → gradient of h
Gradients = Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]]  # by role, from a result and its gradient


@dataclass(frozen=True, slots=True)
class CellGradient:
    """Gradient of a cell.

    Args:
        num_intermediates: intermediates of a step.
        step: function of the gradient of the new state, intermediates, gradients of non-linearities, and the transposed
            product of each group; returns gradients of the state before and of the units' sums.
        products: function of the gradients of the units' sums, the output before, and the reset gate if there is one;
            returns for each group the operand of its product, and the gradient of the product.
    """

    num_intermediates: int
    step: Callable[..., tuple[State, Units]]
    products: Callable[..., Sequence[tuple[jax.Array, Units]]]


def forward(params: RecurrentParams, keep: bool, pre_calc_weights: bool) -> Callable[..., Any]:
    """Make the function of the forward pass.

    Args:
        params: the layer.
        keep: return the intermediates for the backward pass.
        pre_calc_weights: multiply the input by its weights before the loop.

    Returns:
        A function of input [t, b, in], the arrays of the initial state [b, out], weights [units, in, out] and
        [units, out, out], biases, and lengths [b] if the layer has them; it returns the outputs, the last state but the
        output, and a tuple of intermediates, each [t, b, out].
    """
    num_states = params.cell.num_states

    def run(x: jax.Array, *operands: jax.Array) -> tuple[Any, ...]:
        """Run the layer, with its weights and states in the order of popnn's parameters."""
        start = operands[:num_states]
        w, u, b, *lengths = operands[num_states:]
        # Of [units, 2, out] the first are biases of inputs, the second of outputs.
        biases = (b,) if b.ndim == 2 else (b[:, 0], b[:, 1])
        outputs, last, intermediates = run_layer(
            params.cell,
            CellWeights(params.cell_order, w, u, *biases),
            params.by_role(ACTIVATIONS),
            x,
            start,
            running_mask(params.time_steps, *lengths),
            multiplies_before_loop=pre_calc_weights,
            returns_outputs=params.output_full_sequence,
            keeps_intermediates=keep,
        )
        return outputs if params.output_full_sequence else last[0], *last[1:], intermediates

    return run


def backward(params: RecurrentParams, num_state_gradients: int = 0) -> Callable[..., Any]:
    """Make the function of the backward pass.

    Args:
        params: the layer.
        num_state_gradients: gradients of the last state that the function takes, beside that of the output; zeros for
            the others.

    Returns:
        A function of the gradient of the outputs, weights [units, in, out] and [units, out, out], intermediates, the
        gradients of the last state, and lengths [b] if the layer has them; it returns the gradients of the initial
        state, of the input (or None), and of the operands of the units' non-linearities, [t, b, units, out].
    """
    gradient = GRADIENTS[params.cell_name]
    slopes = params.by_role(GRADIENTS_BY_RESULT)

    def run(d_out: jax.Array, w: jax.Array, u: jax.Array, *rest: jax.Array) -> tuple[jax.Array | None, ...]:
        intermediates = rest[: gradient.num_intermediates]
        d_last = rest[gradient.num_intermediates :][:num_state_gradients]
        lengths = rest[gradient.num_intermediates + num_state_gradients :]
        zeros = jnp.zeros(params.state_shape, w.dtype)
        # Only the last output has a gradient, or each step adds that of its output.
        d_h, d_outs = (zeros, d_out) if params.output_full_sequence else (d_out, None)
        d_state = (d_h, *d_last, *[zeros] * (params.cell.num_states - 1 - len(d_last)))
        transposed = [_transposed(group) for group in Stack(params.cell_order, u, axis=0).split(params.cell.groups)]

        def step(d_state: State, operands: Any) -> tuple[State, jax.Array]:
            d_out, past, running = operands
            d_new = d_state if d_out is None else (d_state[0] + d_out, *d_state[1:])
            d_before, units = gradient.step(d_new, past, slopes, transposed)
            d_units = jnp.stack([units[unit] for unit in params.cell_order], 1)
            # The mask is [batch, 1], the units are [batch, units, out].
            d_units = where(None if running is None else running[:, None], d_units, 0)
            return where_each(running, d_before, d_state), d_units

        operands = (d_outs, intermediates, running_mask(params.time_steps, *lengths))
        d_first, d_units = jax.lax.scan(step, d_state, operands, reverse=True)
        d_x = jnp.einsum("tbko,kio->tbi", d_units, w) if params.calc_input_gradients else None
        return *d_first, d_x, d_units

    return run


def weight_gradients(params: RecurrentParams) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """Make the function of the gradients of weights and biases, which have the shapes of these.

    Args:
        params: the layer.

    Returns:
        A function of the units' gradients [units, t, b, out], input [t, b, in], outputs before each step [t, b, out],
        and reset gates [t, b, out] if the cell has them.
    """
    order = params.cell_order

    def run(d_units: jax.Array, x: jax.Array, *operands: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sum products of operands and units' gradients over time and batch, one product for each operand."""
        units = dict(zip(order, d_units, strict=True))
        groups = GRADIENTS[params.cell_name].products(units, *operands)
        d_w = jnp.einsum("tbi,ktbo->kio", x, d_units)
        d_u: dict[str, jax.Array] = {}
        for h, d_products in groups:
            stacked = d_units if d_products is units else jnp.stack(list(d_products.values()))
            d_u |= dict(zip(d_products, jnp.einsum("tbi,ktbo->kio", h, stacked), strict=True))
        d_b = jnp.sum(d_units, (1, 2))
        if len(params.biases_shape) == 3:
            d_products = {unit: d_product for _, group in groups for unit, d_product in group.items()}
            d_b = jnp.stack([d_b, jnp.stack([jnp.sum(d_products[unit], (0, 1)) for unit in order])], 1)
        return d_w, jnp.stack([d_u[unit] for unit in order]), d_b

    return run


def _transposed(weights: Stack) -> Transposed:
    return lambda units: jnp.einsum("bko,kio->bi", jnp.stack([units[unit] for unit in weights.units], 1), weights.array)


def _lstm_step(d_state: State, past: State, slopes: Gradients, transposed: Sequence[Transposed]) -> tuple[State, Units]:
    """Step the backward pass of an LSTM: gradients of a new state → of the state before, and of the units' sums."""
    d_h, d_c = d_state
    f, i, g, o, s, c_before = past
    d_new_c = d_c + slopes["cell"](s, d_h * o)  # from the next step, and through the output o tanh(c')
    units = {
        "forget": slopes["gate"](f, d_new_c * c_before),
        "input": slopes["gate"](i, d_new_c * g),
        "candidate": slopes["candidate"](g, d_new_c * i),
        "output": slopes["gate"](o, d_h * s),
    }
    return (transposed[0](units), d_new_c * f), units


def _lstm_products(units: Units, before: jax.Array) -> Sequence[tuple[jax.Array, Units]]:
    return [(before, units)]


def _gru_step(d_state: State, past: State, slopes: Gradients, transposed: Sequence[Transposed]) -> tuple[State, Units]:
    (d_h,) = d_state
    r, u, c, h = past
    gates, candidate = transposed
    d_u = slopes["gate"](u, d_h * (h - c))
    d_c = slopes["candidate"](c, d_h * (1 - u))
    d_gated = candidate({"candidate": d_c})  # of r h
    units = {"reset": slopes["gate"](r, d_gated * h), "update": d_u, "candidate": d_c}
    return (d_h * u + d_gated * r + gates(units),), units


def _gru_products(units: Units, before: jax.Array, r: jax.Array) -> Sequence[tuple[jax.Array, Units]]:
    gates = {unit: units[unit] for unit in ("reset", "update")}
    return [(before, gates), (r * before, {"candidate": units["candidate"]})]


def _gru_reset_after_step(
    d_state: State, past: State, slopes: Gradients, transposed: Sequence[Transposed]
) -> tuple[State, Units]:
    (d_h,) = d_state
    r, u, c, h, product = past
    d_u = slopes["gate"](u, d_h * (h - c))
    d_c = slopes["candidate"](c, d_h * (1 - u))
    units = {"reset": slopes["gate"](r, d_c * product), "update": d_u, "candidate": d_c}
    ((_, d_products),) = _gru_reset_after_products(units, h, r)
    return (d_h * u + transposed[0](d_products),), units


def _gru_reset_after_products(units: Units, before: jax.Array, r: jax.Array) -> Sequence[tuple[jax.Array, Units]]:
    # The candidate is tanh(… + r (h U + b')).
    return [(before, {**units, "candidate": units["candidate"] * r})]


GRADIENTS: Mapping[str, CellGradient] = MappingProxyType({
    "lstm": CellGradient(6, _lstm_step, _lstm_products),
    "gru": CellGradient(4, _gru_step, _gru_products),
    "gru_reset_after": CellGradient(5, _gru_reset_after_step, _gru_reset_after_products),
})  # fmt: skip
