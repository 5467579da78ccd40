"""The LSTM of ai.graphcore."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipujax.popart.operators.domain import graphcore


@graphcore("LSTM")
def lstm(
    x: jax.Array, weights: jax.Array, biases: Any = None, initial: Any = None, *, outputFullSequence: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Return outputs and the last cell state of an LSTM.

    Args:
        x: [time, batch, features].
        weights: [4, features + units, units] of the gates forget, input, cell, output.
        biases: [4, units], or None.
        initial: first output and cell state, [2, batch, units], or None.
        outputFullSequence: 1 for the outputs of all steps, [time, batch, units], 0 for that of the last.
    """
    units = weights.shape[2]
    shape = (x.shape[1], units)
    bias = jnp.zeros((4, units), x.dtype) if biases is None else biases
    state = jnp.zeros((2, *shape), x.dtype) if initial is None else initial

    def step(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        output, cell = carry
        gates = jnp.einsum("bf,gfu->gbu", jnp.concatenate([row, output], axis=1), weights) + bias[:, None]
        # PopLibs' order of gates; ONNX's is input, output, forget, cell.
        forget, entry, leave = (jax.nn.sigmoid(gates[i]) for i in (0, 1, 3))
        cell = forget * cell + entry * jnp.tanh(gates[2])
        output = leave * jnp.tanh(cell)
        return (output, cell), output

    (last, cell), outputs = jax.lax.scan(step, (state[0], state[1]), x)
    return (outputs if outputFullSequence else last), cell
