"""Recurrent cells as functions of arrays: equations of one step.

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
