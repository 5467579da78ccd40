"""The LSTM of ai.graphcore."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipujax.front_end import recurrent
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

    outputs, (last, cell), _ = recurrent.run_layer(
        recurrent.CELLS["lstm"],
        recurrent.CellWeights(recurrent.CELLS["lstm"].units, weights[:, :-units], weights[:, -units:], bias),
        {"gate": jax.nn.sigmoid, "candidate": jnp.tanh, "cell": jnp.tanh},
        x,
        (state[0], state[1]),
        returns_outputs=bool(outputFullSequence),
        multiplies_before_loop=False,
    )
    return (last if outputs is None else outputs), cell
