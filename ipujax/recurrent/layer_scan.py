"""Recurrent layers: one scan over time that runs a cell of `CELLS`.

A sequence of the batch may be shorter than the others: after its end its state stays as it is, and its outputs are
zeros. Weights of popnn, ONNX and PopART are reshaped to [units, in, out], with the units in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.recurrent.cells import Cell, Functions, Group, Stack, State


@dataclass(frozen=True, slots=True)
class CellWeights:
    """Parameters of a cell.

    Args:
        order: units in the order of the arrays.
        inputs: W, [units, in, out].
        outputs: U, [units, out, out].
        biases: b, [units, out].
        output_biases: b', [units, out], or None.
    """

    order: tuple[str, ...]
    inputs: jax.Array
    outputs: jax.Array
    biases: jax.Array
    output_biases: jax.Array | None = None


def run_layer(
    cell: Cell,
    weights: CellWeights,
    functions: Functions,
    x: jax.Array,
    start: State,
    running: jax.Array | None = None,
    *,
    multiplies_before_loop: bool = True,
    returns_outputs: bool = True,
    keeps_intermediates: bool = False,
) -> tuple[Any, State, tuple[jax.Array, ...]]:
    """Run a cell over sequences.

    Args:
        cell: the cell.
        weights: its parameters.
        functions: its non-linearities, by role.
        x: inputs [steps, batch, in].
        start: state before the first step.
        running: mask of `running_mask`.
        multiplies_before_loop: multiply all inputs by W at once, which takes memory for [steps, batch, units, out].
        returns_outputs: return the outputs of all steps.
        keeps_intermediates: return the intermediates of all steps.

    Returns:
        Outputs [steps, batch, out] or None, last state, and intermediates, each [steps, batch, out].
    """
    # One product of x and h is cheaper than two; where r multiplies h U + b', that one is needed by itself.
    joins = not multiplies_before_loop and weights.output_biases is None
    multiplied = jnp.concatenate([weights.inputs, weights.outputs], 1) if joins else weights.outputs
    # Split here, before the loop.
    outputs = Stack(weights.order, multiplied, axis=0).split(cell.groups)
    output_biases: list[jax.Array | None] = [None] * len(outputs)
    if weights.output_biases is not None:
        output_biases = [each.array for each in Stack(weights.order, weights.output_biases, axis=0).split(cell.groups)]

    def weighted(inputs: jax.Array) -> jax.Array:
        return jnp.einsum("...bi,kio->...bko", inputs, weights.inputs) + weights.biases

    def step(state: State, operands: tuple[jax.Array, jax.Array | None]) -> tuple[State, Any]:
        inputs, runs = operands
        terms = inputs if multiplies_before_loop else weights.biases[None] if joins else weighted(inputs)
        parts = zip(Stack(weights.order, terms).split(cell.groups), outputs, output_biases, strict=True)
        groups = [Group(each, u.array, biases, inputs if joins else None) for each, u, biases in parts]
        new, kept = cell.step(groups, state, functions)
        output = where(runs, new[0], 0) if returns_outputs else None
        return where_each(runs, new, state), (output, kept if keeps_intermediates else ())

    scanned = weighted(x) if multiplies_before_loop else x
    last, (all_outputs, intermediates) = lax.scan(step, tuple(start), (scanned, running))
    return all_outputs, last, intermediates


def running_mask(steps: int, lengths: jax.Array | None = None) -> jax.Array | None:
    """Return a mask [steps, batch, 1] of the steps before each sequence's end; None without lengths [batch]."""
    # None, not a mask of ones: no select is traced where all sequences run to the end.
    if lengths is None:
        return None
    return (jnp.arange(steps, dtype=lengths.dtype)[:, None] < lengths[None])[..., None]


def where(running: jax.Array | None, chosen: jax.Array, other: jax.Array | float) -> jax.Array:
    """Return `chosen` where a sequence runs, else `other`."""
    return chosen if running is None else jnp.where(running, chosen, jnp.asarray(other, chosen.dtype))


def where_each(running: jax.Array | None, chosen: State, other: State) -> State:
    """Return the arrays of `chosen` where a sequence runs, else those of `other`."""
    return tuple(where(running, *arrays) for arrays in zip(chosen, other, strict=True))
