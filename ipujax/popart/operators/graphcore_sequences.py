"""Sequences of ai.graphcore: the LSTM, and those of several lengths that are packed in one tensor.

Packed sequences are unpacked for a function of padded batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.front_end import recurrent
from ipujax.onnx.front_end import in_iteration
from ipujax.popart.operators.domain import graphcore


@graphcore("PackedDataBlock")
def packed_data_block(
    *operands: Any,
    maxSequenceLengths: Sequence[int],
    resultSize: int,
    callbackBatchSize: int,
    callback: Callable[..., Any],
) -> jax.Array:
    """Return the packed results of a function of padded batches.

    Args:
        operands: for each input its rows, offsets and lengths; then offsets and lengths of the result.
        maxSequenceLengths: rows of a padded sequence of each input.
        resultSize: rows of the result.
        callbackBatchSize: sequences of a batch.
        callback: function of padded batches [sequences, rows, …].
    """
    *inputs, result_offsets, result_lengths = operands
    groups = [inputs[i : i + 3] for i in range(0, len(inputs), 3)]
    padded = [
        _padded(data, offsets, lengths, rows)
        for (data, offsets, lengths), rows in zip(groups, maxSequenceLengths, strict=True)
    ]
    count = padded[0].shape[0] // callbackBatchSize
    batches = [x[: count * callbackBatchSize].reshape(count, callbackBatchSize, *x.shape[1:]) for x in padded]

    def result(args: tuple[jax.Array, list[jax.Array]]) -> Any:
        number, batch = args
        with in_iteration(number):
            return _first_result(callback(*batch))

    results = jax.lax.map(result, (jnp.arange(count), batches))
    flat = results.reshape(-1, *results.shape[2:])
    packed = jnp.zeros((resultSize, *flat.shape[2:]), flat.dtype)
    rows = jnp.arange(flat.shape[1])
    for i in range(flat.shape[0]):
        is_inside = rows < result_lengths[i].astype(jnp.int32)
        # Rows behind the end of a sequence go to a place that the scatter drops.
        place = jnp.where(is_inside, result_offsets[i].astype(jnp.int32) + rows, resultSize)
        packed = packed.at[place].set(flat[i], mode="drop")
    return packed


def _padded(data: jax.Array, offsets: jax.Array, lengths: jax.Array, rows: int) -> jax.Array:
    """Return the sequences that lie behind one another in `data`, each as `rows` rows with zeros behind its end."""
    positions = jnp.arange(rows)
    index = offsets.astype(jnp.int32)[:, None] + positions
    chosen = data[jnp.clip(index, 0, data.shape[0] - 1)]
    is_inside = positions < lengths.astype(jnp.int32)[:, None]
    return jnp.where(is_inside.reshape(*is_inside.shape, *[1] * (data.ndim - 1)), chosen, 0)


def _first_result(results: Any) -> Any:
    return results[0] if isinstance(results, tuple | list) else results


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
