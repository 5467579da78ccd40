"""Recurrent layers RNN, GRU and LSTM: a cell of `ipujax.recurrent` over time for each direction.

Shapes are those of layout 0: x [time, N, input], w [directions, units · hidden, input],
r [directions, units · hidden, hidden], b [directions, 2 · units · hidden]; layout 1 has N first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.activation_functions import elu, hard_sigmoid, leaky_relu, softsign
from ipujax.onnx.operators.operand_types import Array, Optional, Value
from ipujax.onnx.operators.shapes import checked_lengths, reversed_in_time
from ipujax.onnx.registry import operator
from ipujax.recurrent import CELLS, Cell, CellWeights, Functions, lstm_step, run_layer, running_mask

Activation = Callable[[Array], Array]

DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
# Units of a cell in the order of ONNX.
ORDERS = {
    "rnn": ("candidate",),
    "gru": ("update", "reset", "candidate"),
    "gru_reset_after": ("update", "reset", "candidate"),
    "lstm": ("input", "output", "forget", "candidate"),
}
DEFAULTS = {"gate": "Sigmoid", "candidate": "Tanh", "cell": "Tanh"}  # non-linearities by role

ALPHA = {"Affine": 1.0, "Elu": 1.0, "HardSigmoid": 0.2, "LeakyRelu": 0.01, "ScaledTanh": 1.0, "ThresholdedRelu": 1.0}
BETA = {"Affine": 0.0, "HardSigmoid": 0.5, "ScaledTanh": 1.0}
ACTIVATIONS: Mapping[str, Callable[[Array, float, float], Array]] = {
    "Affine": lambda x, alpha, beta: alpha * x + beta,
    "Elu": lambda x, alpha, beta: elu(x, alpha=alpha),
    "HardSigmoid": lambda x, alpha, beta: hard_sigmoid(x, alpha=alpha, beta=beta),
    "LeakyRelu": lambda x, alpha, beta: leaky_relu(x, alpha=alpha),
    "Relu": lambda x, alpha, beta: jax.nn.relu(x),
    "ScaledTanh": lambda x, alpha, beta: alpha * jnp.tanh(beta * x),
    "Sigmoid": lambda x, alpha, beta: jax.nn.sigmoid(x),
    "Softplus": lambda x, alpha, beta: jax.nn.softplus(x),
    "Softsign": lambda x, alpha, beta: softsign(x),
    "Tanh": lambda x, alpha, beta: jnp.tanh(x),
    "ThresholdedRelu": lambda x, alpha, beta: jnp.where(x >= alpha, x, jnp.zeros_like(x)),
}
_BY_LOWER_CASE = {name.lower(): name for name in ACTIVATIONS}


@dataclass(frozen=True, slots=True)
class Activations:
    """Attributes that choose non-linearities.

    Args:
        names: one for each role of the cell and direction, or None for those of `DEFAULTS`.
        alphas: first parameters of the functions that have one, in order; defaults after the last.
        betas: second ones.
        clip: bound of the operands of units, or None.
    """

    names: Sequence[str] | None
    alphas: Sequence[float] | None
    betas: Sequence[float] | None
    clip: float | None

    def by_direction(self, cell: Cell, direction_count: int) -> list[Functions]:
        """Return for each direction the functions by role."""
        roles = cell.roles * direction_count
        names = [DEFAULTS[role] for role in roles] if not self.names else self.names
        if len(names) != len(roles):
            message = "activations are not one for each gate and direction"
            raise OutsideError(message, expected=len(roles), got=len(names))
        alphas = iter(self.alphas or ())
        betas = iter(self.betas or ())
        # onnxruntime limits the units alone, not the cell.
        functions = [
            _activation(_BY_LOWER_CASE[name.lower()], alphas, betas, None if role == "cell" else self.clip)
            for name, role in zip(names, roles, strict=True)
        ]
        count = len(cell.roles)
        return [dict(zip(cell.roles, functions[count * n :], strict=False)) for n in range(direction_count)]


def _activation(name: str, alphas: Iterator[float], betas: Iterator[float], clip: float | None) -> Activation:
    alpha = next(alphas, ALPHA[name]) if name in ALPHA else 0.0
    beta = next(betas, BETA[name]) if name in BETA else 0.0

    def function(x: Array) -> Array:
        return ACTIVATIONS[name](x if not clip else jnp.clip(x, -clip, clip), alpha, beta)

    return function


@dataclass(frozen=True, slots=True)
class Layer:
    """Operands that all recurrent layers have, and their attributes.

    Args:
        order: units of the cell, in the order of the weights.
        x: inputs, time first.
        weights: of each direction.
        lengths: time steps of each sequence, int [N], or None.
        directions: whether each direction is backward.
        batch_first: layout 1.
    """

    order: tuple[str, ...]
    x: Array
    weights: Sequence[CellWeights]
    lengths: Array | None
    directions: tuple[bool, ...]
    batch_first: bool

    @property
    def hidden(self) -> int:
        """Elements of a state."""
        return self.weights[0].outputs.shape[-1]


def _layer(
    cell_name: str,
    x: Value,
    w: Value,
    r: Value,
    b: Optional,
    lengths: Optional,
    direction: str,
    layout: int,
    hidden_size: int | None,
) -> Layer:
    x, w, r = map(jnp.asarray, (x, w, r))
    directions = DIRECTIONS[direction]
    hidden = r.shape[-1]
    if hidden_size not in (None, hidden):
        raise OutsideError("hidden_size is not that of the weights", expected=hidden, got=hidden_size)
    order = ORDERS[cell_name]
    biases = jnp.zeros((len(r), 2 * r.shape[1]), x.dtype) if b is None else jnp.asarray(b)
    biases = biases.reshape(len(r), 2, len(order), hidden)
    inputs, outputs = (jnp.swapaxes(weights.reshape(len(weights), len(order), hidden, -1), 2, 3) for weights in (w, r))
    return Layer(
        order=order,
        x=jnp.swapaxes(x, 0, 1) if layout else x,
        weights=[CellWeights(order, inputs[n], outputs[n], *biases[n]) for n in range(len(directions))],
        lengths=None if lengths is None else checked_lengths(lengths, x.shape[1 if layout else 0]),
        directions=directions,
        batch_first=bool(layout),
    )


def _run(
    layer: Layer, cells: Sequence[Cell], activations: Activations, starts: Sequence[Optional], output_count: int
) -> tuple[Array, ...]:
    """Outputs of all times, [time, directions, N, hidden], and last states, [directions, N, hidden]."""
    outputs = []
    lasts = []
    functions = activations.by_direction(cells[0], len(layer.directions))
    running = running_mask(len(layer.x), layer.lengths)
    for index, backward in enumerate(layer.directions):
        start = tuple(_start(layer, state, index) for state in starts)
        ordered = _backward(layer.x, layer.lengths) if backward else layer.x
        output, last, _ = run_layer(cells[index], layer.weights[index], functions[index], ordered, start, running)
        outputs.append(_backward(output, layer.lengths) if backward else output)
        lasts.append(last)
    y = jnp.stack(outputs, axis=1)
    last_states = [jnp.stack(each) for each in zip(*lasts, strict=True)]
    if layer.batch_first:
        y = jnp.moveaxis(y, 2, 0)
        last_states = [jnp.swapaxes(state, 0, 1) for state in last_states]
    return (y, *last_states)[:output_count]


def _start(layer: Layer, state: Optional, index: int) -> Array:
    if state is None:
        return jnp.zeros((layer.x.shape[1], layer.hidden), layer.x.dtype)
    return jnp.asarray(state)[:, index] if layer.batch_first else jnp.asarray(state)[index]


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
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    output_count: int = 1,
) -> tuple[Array, ...]:
    """Elman layer: hidden = f(W x + R hidden + b)."""
    layer = _layer("rnn", x, w, r, b, sequence_lens, direction, layout, hidden_size)
    functions = Activations(activations, activation_alpha, activation_beta, clip)
    return _run(layer, [CELLS["rnn"]] * len(layer.weights), functions, [initial_h], output_count)


@operator("GRU")
def gru(
    x: Value,
    w: Value,
    r: Value,
    b: Optional = None,
    sequence_lens: Optional = None,
    initial_h: Optional = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
    output_count: int = 1,
) -> tuple[Array, ...]:
    """Gated recurrent units, in the order update, reset, hidden."""
    cell_name = "gru_reset_after" if linear_before_reset else "gru"
    layer = _layer(cell_name, x, w, r, b, sequence_lens, direction, layout, hidden_size)
    functions = Activations(activations, activation_alpha, activation_beta, clip)
    return _run(layer, [CELLS[cell_name]] * len(layer.weights), functions, [initial_h], output_count)


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
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    output_count: int = 1,
) -> tuple[Array, ...]:
    """Long short-term memory, units in the order input, output, forget, cell; peepholes in `p`, without cell."""
    layer = _layer("lstm", x, w, r, b, sequence_lens, direction, layout, hidden_size)
    peepholes: list[Mapping[str, Array]] = [{} for _ in layer.weights]
    if p is not None:
        by_direction = jnp.asarray(p).reshape(len(layer.weights), 3, layer.hidden)
        peepholes = [dict(zip(layer.order, gates, strict=False)) for gates in by_direction]
    cells = [
        replace(CELLS["lstm"], step=partial(lstm_step, peepholes=weights, couples_gates=bool(input_forget)))
        for weights in peepholes
    ]
    functions = Activations(activations, activation_alpha, activation_beta, clip)
    return _run(layer, cells, functions, [initial_h, initial_c], output_count)
