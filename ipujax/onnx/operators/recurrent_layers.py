"""Recurrent layers RNN, GRU and LSTM: one `lax.scan` over time for each direction.

Shapes are those of layout 0: x [time, N, input], w [directions, gates · hidden, input],
r [directions, gates · hidden, hidden], b [directions, 2 · gates · hidden]; layout 1 has N first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.activation_functions import elu, hard_sigmoid, leaky_relu, softsign
from ipujax.onnx.operators.operand_types import Array, Optional, Value
from ipujax.onnx.operators.shapes import checked_lengths, reversed_in_time
from ipujax.onnx.registry import operator

Activation = Callable[[Array], Array]
State = tuple[Array, ...]  # hidden, and of an LSTM the cell, each [N, hidden]
Step = Callable[[Array, State], State]  # product of an input with w, and a state → the next state

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


def _activations(
    names: Sequence[str],
    count: int,
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
    clip: float | None,
) -> list[Activation]:
    """`count` functions by name, each taking its own parameters off the lists; inputs limited to ±clip."""
    if len(names) != count:
        raise OutsideError("activations are not one for each gate and direction", expected=count, got=len(names))
    alpha = iter(alphas or ())
    beta = iter(betas or ())
    return [_activation(_BY_LOWER_CASE[name.lower()], alpha, beta, clip) for name in names]


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
        x: inputs, time first.
        w: weights of inputs, [directions, gates · hidden, input].
        r: weights of states, [directions, gates · hidden, hidden].
        b: biases of both, [directions, 2, gates · hidden].
        lengths: time steps of each sequence, int [N], or None.
        directions: whether each direction is backward.
        batch_first: layout 1.
    """

    x: Array
    w: Array
    r: Array
    b: Array
    lengths: Array | None
    directions: tuple[bool, ...]
    batch_first: bool

    @property
    def hidden(self) -> int:
        """Elements of a state."""
        return self.r.shape[-1]


DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def _layer(
    x: Value, w: Value, r: Value, b: Optional, lengths: Optional, direction: str, layout: int, hidden_size: int | None
) -> Layer:
    x, w, r = map(jnp.asarray, (x, w, r))
    if hidden_size not in (None, r.shape[-1]):
        raise OutsideError("hidden_size is not that of the weights", expected=r.shape[-1], got=hidden_size)
    biases = jnp.zeros((len(r), 2, r.shape[1]), x.dtype) if b is None else jnp.asarray(b).reshape(len(r), 2, -1)
    return Layer(
        x=jnp.swapaxes(x, 0, 1) if layout else x,
        w=w,
        r=r,
        b=biases,
        lengths=None if lengths is None else checked_lengths(lengths, x.shape[1 if layout else 0]),
        directions=DIRECTIONS[direction],
        batch_first=bool(layout),
    )


def _run(layer: Layer, starts: Sequence[Optional], steps: Sequence[Step], output_count: int) -> tuple[Array, ...]:
    """Outputs of all times, [time, directions, N, hidden], and last states, [directions, N, hidden]."""
    outputs = []
    lasts = []
    for index, (backward, step) in enumerate(zip(layer.directions, steps, strict=True)):
        start = tuple(_start(layer, state, index) for state in starts)
        ordered = _backward(layer.x, layer.lengths) if backward else layer.x
        # the product with w needs no state: one product for all times
        projected = jnp.matmul(ordered, layer.w[index].T) + layer.b[index, 0]
        output, last = _over_time(step, projected, start, layer.lengths)
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


def _over_time(step: Step, projected: Array, start: State, lengths: Array | None) -> tuple[Array, State]:
    """Outputs are zero, and the state stays, where a sequence has ended."""

    def body(state: State, each: tuple[Array, Array]) -> tuple[State, Array]:
        time, inputs = each
        new = step(inputs, state)
        # Without lengths no element is masked, and XLA sees the plain recurrence.
        if lengths is None:
            return new, new[0]
        alive = (time < lengths)[:, None]
        frozen_state = tuple(jnp.where(alive, after, before) for after, before in zip(new, state, strict=True))
        return frozen_state, jnp.where(alive, new[0], jnp.zeros_like(new[0]))

    last, outputs = lax.scan(body, start, (jnp.arange(len(projected)), projected))
    return outputs, last


def _by_direction(functions: list[Activation], count: int) -> list[list[Activation]]:
    """The functions of each direction, `count` of them."""
    return [functions[first : first + count] for first in range(0, len(functions), count)]


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
    layer = _layer(x, w, r, b, sequence_lens, direction, layout, hidden_size)
    count = len(layer.directions)
    functions = _activations(activations or ("Tanh",) * count, count, activation_alpha, activation_beta, clip)

    def direction_step(index: int, f: Activation) -> Step:
        def step(projected: Array, state: State) -> State:
            return (f(projected + state[0] @ layer.r[index].T + layer.b[index, 1]),)

        return step

    steps = [direction_step(index, functions[index]) for index in range(len(layer.directions))]
    return _run(layer, [initial_h], steps, output_count)


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
    """Gated recurrent units, gates in the order update, reset, hidden."""
    layer = _layer(x, w, r, b, sequence_lens, direction, layout, hidden_size)
    count = 2 * len(layer.directions)
    names = activations or ("Sigmoid", "Tanh") * len(layer.directions)
    functions = _by_direction(_activations(names, count, activation_alpha, activation_beta, clip), 2)

    def direction_step(index: int, f: Activation, g: Activation) -> Step:
        gates = 2 * layer.hidden
        r_gates, r_hidden = jnp.split(layer.r[index], [gates])
        b_gates, b_hidden = jnp.split(layer.b[index, 1], [gates])

        def step(projected: Array, state: State) -> State:
            (hidden,) = state
            update, reset = jnp.split(f(projected[:, :gates] + hidden @ r_gates.T + b_gates), 2, axis=-1)
            if linear_before_reset:
                recurrent = reset * (hidden @ r_hidden.T + b_hidden)
            else:
                recurrent = (reset * hidden) @ r_hidden.T + b_hidden
            return ((1 - update) * g(projected[:, gates:] + recurrent) + update * hidden,)

        return step

    steps = [direction_step(index, *functions[index]) for index in range(len(layer.directions))]
    return _run(layer, [initial_h], steps, output_count)


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
    """Long short-term memory, gates in the order input, output, forget, cell; peepholes in `p`, without cell."""
    layer = _layer(x, w, r, b, sequence_lens, direction, layout, hidden_size)
    count = 3 * len(layer.directions)
    names = activations or ("Sigmoid", "Tanh", "Tanh") * len(layer.directions)
    functions = _by_direction(_activations(names, count, activation_alpha, activation_beta, clip), 3)
    unclipped = _by_direction(_activations(names, count, activation_alpha, activation_beta, None), 3)
    peepholes = None if p is None else jnp.asarray(p).reshape(len(layer.directions), 3, layer.hidden)

    def direction_step(index: int, f: Activation, g: Activation, h: Activation) -> Step:
        peep_in, peep_out, peep_forget = (None,) * 3 if peepholes is None else peepholes[index]

        def step(projected: Array, state: State) -> State:
            hidden, cell = state
            gates = projected + hidden @ layer.r[index].T + layer.b[index, 1]
            gate_in, gate_out, gate_forget, gate_cell = jnp.split(gates, 4, axis=-1)
            enters = f(_peeped(gate_in, peep_in, cell))
            stays = 1 - enters if input_forget else f(_peeped(gate_forget, peep_forget, cell))
            new = stays * cell + enters * g(gate_cell)
            leaves = f(_peeped(gate_out, peep_out, new))
            return leaves * h(new), new

        return step

    # onnxruntime limits the gates alone, not the cell.
    steps = [direction_step(n, functions[n][0], functions[n][1], unclipped[n][2]) for n in range(len(functions))]
    return _run(layer, [initial_h, initial_c], steps, output_count)


def _peeped(gate: Array, weights: Array | None, cell: Array) -> Array:
    return gate if weights is None else gate + weights * cell
