"""Recurrent layers: one scan over time that runs a cell of `CELLS`.

A sequence of the batch may be shorter than the others: after its end its state stays as it is, and its outputs are
zeros. Weights of popnn, ONNX and PopART are reshaped to [units, in, out], with the units in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.recurrent.cells import Cell, Functions, Group, Product, Stack, State


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
) -> tuple[jax.Array | None, State, tuple[jax.Array, ...]]:
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
    groups_of = (_groups_multiplied if multiplies_before_loop else _groups_multiplying)(cell, weights)

    def step(state: State, operands: tuple[jax.Array, jax.Array | None]) -> tuple[State, tuple[object, object]]:
        inputs, runs = operands
        new, kept = cell.step(groups_of(inputs), state, functions)
        output = where(runs, new[0], 0) if returns_outputs else None
        return where_each(runs, new, state), (output, kept if keeps_intermediates else ())

    inputs = jnp.einsum("tbi,kio->tbko", x, weights.inputs) + weights.biases if multiplies_before_loop else x
    last, (outputs, intermediates) = lax.scan(step, tuple(start), (inputs, running))
    return outputs, last, intermediates


def _groups_multiplied(cell: Cell, weights: CellWeights) -> Callable[[jax.Array], list[Group]]:
    """Groups of a step, from its x W + b."""
    products = _products(cell, weights, weights.outputs)

    def groups(weighted: jax.Array) -> list[Group]:
        stacks = Stack(weights.order, weighted).split(cell.groups)
        return [Group(stack.units, stack.array, product) for stack, product in zip(stacks, products, strict=True)]

    return groups


def _groups_multiplying(cell: Cell, weights: CellWeights) -> Callable[[jax.Array], list[Group]]:
    """Groups of a step, from its x."""
    biases = Stack(weights.order, weights.biases, axis=0).split(cell.groups)
    if weights.output_biases is None:
        # One product of x and h is cheaper than two.
        joined = _products(cell, weights, jnp.concatenate([weights.inputs, weights.outputs], 1))

        def joined_groups(x: jax.Array) -> list[Group]:
            products = [_of_both(product, x) for product in joined]
            return [
                Group(each.units, each.array[None], product) for each, product in zip(biases, products, strict=True)
            ]

        return joined_groups
    products = _products(cell, weights, weights.outputs)

    def groups(x: jax.Array) -> list[Group]:
        stacks = Stack(weights.order, jnp.einsum("bi,kio->bko", x, weights.inputs)).split(cell.groups)
        parts = zip(stacks, biases, products, strict=True)
        return [Group(stack.units, stack.array + bias.array, product) for stack, bias, product in parts]

    return groups


def _of_both(product: Product, x: jax.Array) -> Product:
    return lambda h: product(jnp.concatenate([x, h], 1))


def _products(cell: Cell, weights: CellWeights, multiplied: jax.Array) -> list[Product]:
    """Product of each group with its part of the weights, which are split here, before the loop."""
    stacks = Stack(weights.order, multiplied, axis=0).split(cell.groups)
    if weights.output_biases is None:
        return [_product_with(stack.array) for stack in stacks]
    biases = Stack(weights.order, weights.output_biases, axis=0).split(cell.groups)
    return [_product_with(stack.array, bias.array) for stack, bias in zip(stacks, biases, strict=True)]


def _product_with(weights: jax.Array, biases: jax.Array | None = None) -> Product:
    def product(h: jax.Array) -> jax.Array:
        products = jnp.einsum("bi,kio->bko", h, weights)
        return products if biases is None else products + biases

    return product


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
