"""Recurrent layers RNN, GRU and LSTM: a cell of `ipujax.recurrent` over time for each direction.

Shapes are those of layout 0: x [time, N, input], w [directions, units · hidden, input],
r [directions, units · hidden, hidden], b [directions, 2 · units · hidden]; layout 1 has N first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.front_end import recurrent
from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.elementwise import elu, hard_sigmoid, leaky_relu
from ipujax.onnx.operators.operand_types import Array, Optional, Value
from ipujax.onnx.operators.quantization import centred_levels
from ipujax.onnx.operators.shapes import checked_lengths, reversed_in_time
from ipujax.onnx.registry import operator

DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
# Units of a cell in the order of ONNX.
ORDERS = {
    "rnn": ("candidate",),
    "gru": ("update", "reset", "candidate"),
    "gru_reset_after": ("update", "reset", "candidate"),
    "lstm": ("input", "output", "forget", "candidate"),
}
DEFAULTS = {"gate": "Sigmoid", "candidate": "Tanh", "cell": "Tanh"}  # non-linearities by role

# Functions, and defaults of the parameters that they have.
ACTIVATIONS: Mapping[str, tuple[Callable[..., Array], tuple[float, ...]]] = {
    "Affine": (lambda x, alpha, beta: alpha * x + beta, (1.0, 0.0)),
    "Elu": (lambda x, alpha: elu(x, alpha=alpha), (1.0,)),
    "HardSigmoid": (lambda x, alpha, beta: hard_sigmoid(x, alpha=alpha, beta=beta), (0.2, 0.5)),
    "LeakyRelu": (lambda x, alpha: leaky_relu(x, alpha=alpha), (0.01,)),
    "Relu": (jax.nn.relu, ()),
    "ScaledTanh": (lambda x, alpha, beta: alpha * jnp.tanh(beta * x), (1.0, 1.0)),
    "Sigmoid": (jax.nn.sigmoid, ()),
    "Softplus": (jax.nn.softplus, ()),
    "Softsign": (jax.nn.soft_sign, ()),
    "Tanh": (jnp.tanh, ()),
    "ThresholdedRelu": (lambda x, alpha: jnp.where(x >= alpha, x, jnp.zeros_like(x)), (1.0,)),
}
_BY_LOWER_CASE = {name.lower(): name for name in ACTIVATIONS}


class LayerAttributes(TypedDict, total=False):
    """Attributes of recurrent layers, with ONNX's defaults in `run_directions`.

    `activations` has a non-linearity for each role of the cell and direction; `activation_alpha` and `activation_beta`
    have first and second parameters of those that have one, in order; `clip` bounds the operands of units.
    """

    activation_alpha: Sequence[float] | None
    activation_beta: Sequence[float] | None
    activations: Sequence[str] | None
    clip: float | None
    direction: str
    hidden_size: int | None


class LayerForm(LayerAttributes, total=False):
    """Attributes of ONNX's own layers."""

    layout: int


def _functions(
    cell: recurrent.Cell,
    count: int,
    names: Sequence[str] | None,
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
    clip: float | None,
) -> list[recurrent.Functions]:
    """Return for each of `count` directions the functions by role."""
    roles = cell.roles * count
    names = names or [DEFAULTS[role] for role in roles]
    if len(names) != len(roles):
        message = "activations are not one for each gate and direction"
        raise OutsideError(message, expected=len(roles), got=len(names))
    parameters = (iter(alphas or ()), iter(betas or ()))
    # onnxruntime limits the units alone, not the cell.
    clips = [None if role == "cell" else clip for role in roles]
    functions = [
        _activation(_BY_LOWER_CASE[name.lower()], parameters, bound) for name, bound in zip(names, clips, strict=True)
    ]
    size = len(cell.roles)
    return [dict(zip(cell.roles, functions[n * size : (n + 1) * size], strict=True)) for n in range(count)]


def _activation(name: str, parameters: Sequence[Iterator[float]], clip: float | None) -> Callable[[Array], Array]:
    """Return a non-linearity with the next of the parameters that it has."""
    activation, defaults = ACTIVATIONS[name]
    values = [next(given, default) for given, default in zip(parameters, defaults, strict=False)]
    return lambda x: activation(x if not clip else jnp.clip(x, -clip, clip), *values)


def run_directions(
    cell_name: str,
    operands: tuple[Value, Value, Value, Optional, Optional],
    starts: Sequence[Optional],
    step_settings: Sequence[Mapping[str, Any]] = ({}, {}),
    step: Callable[..., tuple[recurrent.State, recurrent.State]] | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
) -> tuple[Array, ...]:
    """Outputs of all times, [time, directions, N, hidden], and last states, [directions, N, hidden].

    `step` replaces that of the cell.
    """
    x, w, r = map(jnp.asarray, operands[:3])
    b, lengths = operands[3:]
    hidden = r.shape[-1]
    if hidden_size not in (None, hidden):
        raise OutsideError("hidden_size is not that of the weights", expected=hidden, got=hidden_size)
    if layout:
        x = jnp.swapaxes(x, 0, 1)
        starts = [None if state is None else jnp.swapaxes(state, 0, 1) for state in starts]
    steps, batch, _ = x.shape
    order = ORDERS[cell_name]
    directions = DIRECTIONS[direction]
    rows = len(order) * hidden
    expected = {
        "W": (w, (len(directions), rows, x.shape[2])),
        "R": (r, (len(directions), rows, hidden)),
        "B": (b, (len(directions), 2 * rows)),
        "sequence_lens": (lengths, (batch,)),
    }
    expected |= {f"initial state {n}": (state, (len(directions), batch, hidden)) for n, state in enumerate(starts)}
    for name, (operand, shape) in expected.items():
        if operand is not None and np.shape(operand) != shape:
            message = f"{name} has another shape than the layer needs"
            raise OutsideError(message, expected=list(shape), got=list(np.shape(operand)))
    zeros = jnp.zeros((len(directions), batch, hidden), x.dtype)
    states = [zeros if state is None else jnp.asarray(state) for state in starts]
    biases = jnp.zeros((len(r), 2, len(order), hidden), x.dtype) if b is None else jnp.asarray(b)
    biases = biases.reshape(len(r), 2, len(order), hidden)
    inputs, outputs = (jnp.swapaxes(each.reshape(len(r), len(order), hidden, -1), 2, 3) for each in (w, r))
    checked = None if lengths is None else checked_lengths(lengths, steps)
    cell = recurrent.CELLS[cell_name]
    functions = _functions(cell, len(directions), activations, activation_alpha, activation_beta, clip)
    running = recurrent.running_mask(steps, checked)
    all_outputs = []
    lasts = []
    for index, backward in enumerate(directions):
        start = tuple(state[index] for state in states)
        directed = replace(cell, step=partial(step or cell.step, **step_settings[index]))
        weights = recurrent.CellWeights(order, inputs[index], outputs[index], *biases[index])
        ordered = _backward(x, checked) if backward else x
        output, last, _ = recurrent.run_layer(directed, weights, functions[index], ordered, start, running)
        all_outputs.append(_backward(output, checked) if backward else output)
        lasts.append(last)
    y = jnp.stack(all_outputs, axis=1)
    last_states = [jnp.stack(each) for each in zip(*lasts, strict=True)]
    if layout:
        y = jnp.moveaxis(y, 2, 0)
        last_states = [jnp.swapaxes(state, 0, 1) for state in last_states]
    return y, *last_states


def _backward(x: Array, lengths: Array | None) -> Array:
    if lengths is None:
        return x[::-1]
    return jnp.swapaxes(reversed_in_time(jnp.swapaxes(x, 0, 1), lengths), 0, 1)


@operator("RNN")
def rnn(
    x: Value,
    w: Value,
    r: Value,
    b: Optional = None,
    sequence_lens: Optional = None,
    initial_h: Optional = None,
    *,
    output_count: int = 1,
    **attributes: Unpack[LayerForm],
) -> tuple[Array, ...]:
    """Elman layer: hidden = f(W x + R hidden + b)."""
    operands = (x, w, r, b, sequence_lens)
    return run_directions("rnn", operands, [initial_h], **attributes)[:output_count]


@operator("GRU")
def gru(
    x: Value,
    w: Value,
    r: Value,
    b: Optional = None,
    sequence_lens: Optional = None,
    initial_h: Optional = None,
    *,
    linear_before_reset: int = 0,
    output_count: int = 1,
    **attributes: Unpack[LayerForm],
) -> tuple[Array, ...]:
    """Gated recurrent units, in the order update, reset, hidden."""
    operands = (x, w, r, b, sequence_lens)
    cell_name = "gru_reset_after" if linear_before_reset else "gru"
    return run_directions(cell_name, operands, [initial_h], **attributes)[:output_count]


@operator("LSTM")
def lstm(
    x: Value,
    w: Value,
    r: Value,
    b: Optional = None,
    sequence_lens: Optional = None,
    initial_h: Optional = None,
    initial_c: Optional = None,
    p: Optional = None,
    *,
    input_forget: int = 0,
    output_count: int = 1,
    **attributes: Unpack[LayerForm],
) -> tuple[Array, ...]:
    """Long short-term memory, units in the order input, output, forget, cell; peepholes in `p`, without cell."""
    operands = (x, w, r, b, sequence_lens)
    settings = lstm_settings(p, attributes.get("direction", "forward"), bool(input_forget))
    return run_directions("lstm", operands, [initial_h, initial_c], settings, **attributes)[:output_count]


def lstm_settings(p: Optional, direction: str, couples_gates: bool) -> list[dict[str, Any]]:
    """Return what a step of an LSTM takes beside its groups and state, for each direction."""
    peepholes: list[Mapping[str, Array]] = [{}, {}]
    if p is not None:
        by_direction = jnp.asarray(p).reshape(len(DIRECTIONS[direction]), 3, -1)
        peepholes = [dict(zip(ORDERS["lstm"], gates, strict=False)) for gates in by_direction]
    return [{"peepholes": each, "couples_gates": couples_gates} for each in peepholes]


@dataclass(frozen=True, slots=True)
class _QuantizedGroup(recurrent.Group):
    """Units whose products are of whole numbers, which float32 adds exactly, as onnxruntime does in integers.

    Args:
        input_scales: of the products with inputs, [units, out].
        output_scales: of the weights of outputs, [units, out].
        total_biases: of both products, [units, out].
    """

    input_scales: Array
    output_scales: Array
    total_biases: Array

    def sums(self, h: Array) -> recurrent.Stack:
        """Return x W + b + h U + b', h quantised to uint8, each sequence by itself."""
        levels, scale = centred_levels(h, -1)
        products = jnp.einsum("bi,kio->bko", levels, self.weights)
        scaled = self.inputs.array * self.input_scales + products * (scale[..., None] * self.output_scales)
        return recurrent.Stack(self.inputs.units, scaled + self.total_biases)


def quantized_lstm_step(
    groups: Sequence[recurrent.Group],
    state: recurrent.State,
    functions: recurrent.Functions,
    *,
    scales: tuple[Array, Array, Array],
    **settings: Any,
) -> tuple[recurrent.State, recurrent.State]:
    """Run one step of an LSTM of whole numbers; `scales` are the last three arguments of `_QuantizedGroup`."""
    (group,) = groups
    quantized = _QuantizedGroup(group.inputs, group.weights, group.biases, group.joined, *scales)
    return recurrent.lstm_step([quantized], state, functions, **settings)
