"""Recurrent layers as JAX functions, for popnn, ONNX and PopART: a table of cells, and one scan over time.

A sequence of the batch may be shorter than the others: after its end its state stays as it is, and its outputs are
zeros. Weights of popnn, ONNX and PopART are reshaped to [units, in, out], with the units in any order.

A cell has units, each with weights W of the input, U of the output before, and biases b (of outputs: b'). One step
computes, with the output h and an LSTM's cell state c:

    rnn                h' = tanh(x W + h U + b)
    lstm               f, i, o = sigmoid(x W + h U + b)    g = tanh(x W + h U + b)    c' = f c + i g    h' = o tanh(c')
    gru                r, u = sigmoid(x W + h U + b)       c = tanh(x W + (r h) U + b)       h' = u h + (1 - u) c
    gru_reset_after    as gru, but                         c = tanh(x W + b + r (h U + b'))

where the non-linearities may be others.
Source: popnn `LstmDef.hpp`, `GruDef.hpp`; S. Hochreiter and J. Schmidhuber 1997, with the forget gate of Gers 2000;
K. Cho et al. 2014, `reset_after` as in cuDNN and Keras; peepholes and coupled gates as in ONNX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Units = Mapping[str, jax.Array]  # of each unit an array [batch, out]
State = tuple[jax.Array, ...]  # output, and of an LSTM the cell state, [batch, out]
Functions = Mapping[str, Callable[[jax.Array], jax.Array]]  # non-linearities by role


@dataclass(frozen=True, slots=True)
class Stack:
    """Arrays of several units in one.

    Args:
        units: their names.
        array: [batch, units, out], or with `axis` 0 weights and biases, units first.
        axis: dimension of the units.
    """

    units: Sequence[str]
    array: jax.Array
    axis: int = 1

    def by_unit(self) -> Units:
        """Return the array of each unit."""
        count = len(self.units)
        # A split, whose gradient is one concatenation; that of slices is a sum of padded arrays.
        arrays = jnp.split(self.array, count, axis=self.axis) if count > 1 else [self.array]
        return {unit: jnp.squeeze(array, self.axis) for unit, array in zip(self.units, arrays, strict=True)}

    def split(self, groups: Sequence[Sequence[str]]) -> list[Stack]:
        """Return a stack for each group, its units in the order that they have here."""
        if len(groups) == 1:
            return [self]
        ordered = [sorted(group, key=self.units.index) for group in groups]
        by_place = sorted(ordered, key=lambda group: self.units.index(group[0]))
        stack = self._reordered([unit for group in by_place for unit in group])
        cuts = np.cumsum([len(group) for group in by_place])[:-1]
        arrays = jnp.split(stack.array, cuts, axis=self.axis)
        by_first = {group[0]: array for group, array in zip(by_place, arrays, strict=True)}
        return [Stack(group, by_first[group[0]], self.axis) for group in ordered]

    def _reordered(self, units: Sequence[str]) -> Stack:
        """Return the stack with its units in another order."""
        if list(units) == list(self.units):
            return self
        arrays = self.by_unit()
        return Stack(units, jnp.stack([arrays[unit] for unit in units], self.axis), self.axis)


@dataclass(frozen=True, slots=True)
class Group:
    """Units of a step whose weights multiply the same operand.

    Args:
        inputs: x W + b, the part that does not depend on h; b alone if `joined`.
        weights: U, [units, out, out].
        biases: b', [units, out], or None.
        joined: x, if the weights multiply [x, h] together; or None.
    """

    inputs: Stack
    weights: jax.Array
    biases: jax.Array | None
    joined: jax.Array | None

    def product(self, h: jax.Array) -> Stack:
        """Return h U + b' of h, or of a gated h."""
        operand = h if self.joined is None else jnp.concatenate([self.joined, h], 1)
        products = jnp.einsum("bi,kio->bko", operand, self.weights)
        return Stack(self.inputs.units, products if self.biases is None else products + self.biases)

    def sums(self, h: jax.Array) -> Stack:
        """Return x W + b + h U + b'."""
        return Stack(self.inputs.units, self.inputs.array + self.product(h).array)


@dataclass(frozen=True, slots=True)
class Cell:
    """A recurrent cell.

    Args:
        groups: its units; those of a group multiply the same operand by U, in one product.
        roles: non-linearities that it needs.
        num_states: arrays of its state.
        step: function of the groups, the state and the non-linearities; returns the next state, and the intermediates
            from which a backward pass computes gradients.
    """

    groups: tuple[tuple[str, ...], ...]
    roles: tuple[str, ...]
    num_states: int
    step: Callable[..., tuple[State, State]]

    @property
    def units(self) -> tuple[str, ...]:
        """All units, in popnn's order."""
        return tuple(unit for group in self.groups for unit in group)


def _rnn_step(groups: Sequence[Group], state: State, functions: Functions) -> tuple[State, State]:
    (group,) = groups
    new = functions["candidate"](group.sums(*state).by_unit()["candidate"])
    return (new,), (new,)


def lstm_step(
    groups: Sequence[Group],
    state: State,
    functions: Functions,
    *,
    peepholes: Units = MappingProxyType({}),
    couples_gates: bool = False,
) -> tuple[State, State]:
    """Run one step of an LSTM.

    Args:
        groups: the only group.
        state: output and cell state.
        functions: non-linearities of gates, candidates and cells.
        peepholes: weights [out] of the cell state in gates; the output gate's are of the new one.
        couples_gates: forget what the input gate does not let in.

    Returns:
        The next state, and f, i, g, o, the non-linearity of the new cell state, and the cell state before.
    """
    (group,) = groups
    h, c = state
    sums = group.sums(h).by_unit()

    def gate(unit: str, cell_state: jax.Array) -> jax.Array:
        peeped = sums[unit] + peepholes[unit] * cell_state if unit in peepholes else sums[unit]
        return functions["gate"](peeped)

    i = gate("input", c)
    f = 1 - i if couples_gates else gate("forget", c)
    g = functions["candidate"](sums["candidate"])
    new_c = f * c + i * g
    o = gate("output", new_c)
    s = functions["cell"](new_c)
    return (o * s, new_c), (f, i, g, o, s, c)


def _gru_step(groups: Sequence[Group], state: State, functions: Functions) -> tuple[State, State]:
    (h,) = state
    gates, candidate = groups
    sums = gates.sums(h)
    gated = Stack(sums.units, functions["gate"](sums.array)).by_unit()
    r = gated["reset"]
    u = gated["update"]
    c = functions["candidate"](candidate.sums(r * h).by_unit()["candidate"])
    return (u * h + (1 - u) * c,), (r, u, c, h)


def _gru_reset_after_step(groups: Sequence[Group], state: State, functions: Functions) -> tuple[State, State]:
    (h,) = state
    (group,) = groups
    inputs = group.inputs.by_unit()
    recurrent = group.product(h).by_unit()
    r, u = (functions["gate"](inputs[unit] + recurrent[unit]) for unit in ("reset", "update"))
    c = functions["candidate"](inputs["candidate"] + r * recurrent["candidate"])
    return (u * h + (1 - u) * c,), (r, u, c, h, recurrent["candidate"])


_GRU_ROLES = ("gate", "candidate")
CELLS: Mapping[str, Cell] = MappingProxyType({
    "rnn": Cell((("candidate",),), ("candidate",), 1, _rnn_step),
    "lstm": Cell((("forget", "input", "candidate", "output"),), ("gate", "candidate", "cell"), 2, lstm_step),
    "gru": Cell((("reset", "update"), ("candidate",)), _GRU_ROLES, 1, _gru_step),
    "gru_reset_after": Cell((("reset", "update", "candidate"),), _GRU_ROLES, 1, _gru_reset_after_step),
})  # fmt: skip


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
        new, past = cell.step(groups, state, functions)
        output = where(runs, new[0], 0) if returns_outputs else None
        return where_each(runs, new, state), (output, past if keeps_intermediates else ())

    scanned = weighted(x) if multiplies_before_loop else x
    last, (all_outputs, intermediates) = jax.lax.scan(step, tuple(start), (scanned, running))
    return all_outputs, last, intermediates


def running_mask(steps: int, lengths: jax.Array | None = None) -> jax.Array | None:
    """Return a mask [steps, batch, 1] of the steps before each sequence's end; None without lengths [batch]."""
    # None, not a mask of ones: no select is traced where all sequences run to the end.
    if lengths is None:
        return None
    return (jnp.arange(steps, dtype=counting_dtype(lengths.dtype))[:, None] < lengths[None])[..., None]


def counting_dtype(dtype: Any) -> Any:
    """Return the dtype of numbers to compare with integers of a dtype: at least 32 bits, as a narrow one may wrap."""
    return dtype if np.dtype(dtype).itemsize >= 4 else jnp.int32


def where(running: jax.Array | None, chosen: jax.Array, other: jax.Array | float) -> jax.Array:
    """Return `chosen` where a sequence runs, else `other`."""
    return chosen if running is None else jnp.where(running, chosen, jnp.asarray(other, chosen.dtype))


def where_each(running: jax.Array | None, chosen: State, other: State) -> State:
    """Return the arrays of `chosen` where a sequence runs, else those of `other`."""
    return tuple(where(running, *arrays) for arrays in zip(chosen, other, strict=True))
