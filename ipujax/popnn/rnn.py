"""Recurrent layers: their parameters and operands; forward, backward and gradients of weights as functions of arrays.

A sequence of the batch may be shorter than the others, by `var_time_steps`. After its end its state stays as it is, its
outputs are zeros, and its gradients are zeros (the meaning of TensorFlow's `dynamic_rnn`; assumed of popnn).

The equations of a step are in `ipujax.recurrent`; `GRADIENTS` has those of its gradient, from the intermediates
that the step keeps. The backward pass is one scan from the last step to the first; gradients of weights are products
over all steps, after it.
Source: popnn `Rnn.hpp`, `Lstm.cpp`, `Gru.cpp`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.poplar.library import add, look_up
from ipujax.poplin.operands import create_mapped_operands
from ipujax.popnn.non_linearity import GRADIENTS_BY_RESULT, NON_LINEARITIES
from ipujax.recurrent import CELLS, Cell, CellWeights, Stack, State, Units, run_layer, running_mask, where, where_each
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, dtype_name

# Elementwise non-linearities with gradients by result: only results are among the intermediates.
Activation = Literal["sigmoid", "hard_sigmoid", "relu", "tanh"]
ACTIVATIONS = {kind: NON_LINEARITIES[kind] for kind in GRADIENTS_BY_RESULT if kind != "softmax"}


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentParams(ABC):
    """Parameters of a recurrent layer.

    Args:
        data_type: type of all its tensors, FLOAT or HALF.
        batch_size: sequences.
        time_steps: steps of the longest sequence.
        layer_sizes: sizes of input and output, `[in, out]`.
        var_time_steps: steps of each sequence, integers [batch]; all of them when None.
        output_full_sequence: return outputs of all steps, else of the last step.
        calc_input_gradients: the backward pass returns gradients of the input.
        activation: non-linearity of candidates and cells.
        recurrent_activation: non-linearity of gates.
        cell_order: order of the units in weights and biases; that of the class when empty.
    """

    data_type: Any
    batch_size: int
    time_steps: int
    layer_sizes: Sequence[int]
    var_time_steps: Tensor | None = None
    output_full_sequence: bool = True
    calc_input_gradients: bool = True
    activation: Activation = "tanh"
    recurrent_activation: Activation = "sigmoid"
    cell_order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "data_type", np.dtype(self.data_type))
        object.__setattr__(self, "cell_order", tuple(self.cell_order) or self.cell.units)
        if sorted(self.cell_order) != sorted(self.cell.units):
            raise GraphError("cell_order", expected=f"each of {', '.join(self.cell.units)} once", got=self.cell_order)
        for kind in (self.activation, self.recurrent_activation):
            look_up(kind, ACTIVATIONS, "non-linearity of a recurrent layer")
        if not jnp.issubdtype(self.data_type, jnp.floating):
            raise GraphError("data_type of a recurrent layer", expected="FLOAT or HALF", got=dtype_name(self.data_type))
        sizes = [self.batch_size, self.time_steps, *self.layer_sizes]
        # Batch, steps, input and output.
        if len(sizes) != 4 or not all(isinstance(n, int | np.integer) and n >= 1 for n in sizes):
            got = f"batch {self.batch_size}, {self.time_steps} steps, layer_sizes {list(self.layer_sizes)}"
            raise GraphError("sizes of a recurrent layer must be positive", expected="sizes of at least 1", got=got)
        lengths = self.var_time_steps
        if lengths is not None and (lengths.shape != (self.batch_size,) or np.dtype(lengths.dtype).kind not in "iu"):
            got = f"{dtype_name(lengths.dtype)}{list(lengths.shape)}"
            raise GraphError("var_time_steps", expected=f"integers [{self.batch_size}]", got=got)

    @property
    @abstractmethod
    def cell_name(self) -> str:
        """Name of the cell in `recurrent.CELLS`."""

    @property
    def cell(self) -> Cell:
        """Equations of a step."""
        return CELLS[self.cell_name]

    @property
    def input_size(self) -> int:
        """Elements of one step of the input."""
        return self.layer_sizes[0]

    @property
    def output_size(self) -> int:
        """Elements of one step of the output."""
        return self.layer_sizes[1]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """[steps, batch, in]."""
        return (self.time_steps, self.batch_size, self.input_size)

    @property
    def sequence_shape(self) -> tuple[int, ...]:
        """[steps, batch, out]."""
        return (self.time_steps, self.batch_size, self.output_size)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """[batch, out]."""
        return (self.batch_size, self.output_size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the results: of all steps, or of the last."""
        return self.sequence_shape if self.output_full_sequence else self.state_shape

    @property
    def biases_shape(self) -> tuple[int, ...]:
        """[units, out]."""
        return (len(self.cell_order), self.output_size)

    @property
    def weights_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the weights of inputs [units, in, out] and outputs [units, out, out], and of the biases."""
        weights = [(len(self.cell_order), size, self.output_size) for size in self.layer_sizes]
        return [*weights, self.biases_shape]

    @property
    def lengths(self) -> list[Tensor]:
        """Operands of lengths: one, or none if all sequences run to the end."""
        return [] if self.var_time_steps is None else [self.var_time_steps]

    def by_role(self, functions: Mapping[str, Callable[..., jax.Array]]) -> Mapping[str, Callable[..., jax.Array]]:
        """Return of functions by non-linearity those of the cell's roles: candidates, cells and gates."""
        kinds = {role: self.recurrent_activation if role == "gate" else self.activation for role in self.cell.roles}
        return {role: functions[kind] for role, kind in kinds.items()}


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentWeights:
    """Parameters of a layer, or their gradients.

    Args:
        input_weights: [units, in, out].
        output_weights: [units, out, out].
        biases: [units, out], or the layer's `biases_shape`.
    """

    input_weights: Tensor
    output_weights: Tensor
    biases: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all parameters, in the order of the fields."""
        return [self.input_weights, self.output_weights, self.biases]


def create_operands(
    graph: Graph, params: RecurrentParams, forward: Callable[..., Any], names: Mapping[int, str]
) -> list[Tensor]:
    """Create operands of a layer's forward pass, mapped as it uses them.

    Args:
        graph: graph to add to.
        params: the layer.
        forward: the pass, a function of input, initial state, weights, and lengths if the layer has them.
        names: debug names of the operands to create, by their index among these.
    """

    # The program of the trial is dropped: only the mappings that it leaves on the scratch graph count.
    def build(scratch: Graph, operands: Sequence[Tensor]) -> None:
        add(scratch, forward, operands, Program(), "layer")

    shapes = [params.input_shape, *[params.state_shape] * params.cell.num_states, *params.weights_shapes]
    operands = [*((shape, params.data_type) for shape in shapes), *((t.shape, t.dtype) for t in params.lengths)]
    return create_mapped_operands(graph, operands, build, list(names), list(names.values()))


def check(
    name: str,
    params: RecurrentParams,
    states: Mapping[str, Tensor],
    weights: RecurrentWeights,
    x: Tensor,
    further: Mapping[str, tuple[Tensor, tuple[int, ...]]] = MappingProxyType({}),
) -> None:
    """Check that tensors have the type and shapes of a layer.

    Args:
        name: debug name of the operation.
        params: the layer.
        states: initial states, by their names in errors.
        weights: parameters.
        x: the input sequence.
        further: results and gradients by name, each with the shape it must have.

    Raises:
        GraphError: naming the first that does not fit.
    """
    parts = zip(("input weight", "output weight", "bias"), weights.tensors(), params.weights_shapes, strict=True)
    tensors = {"input": (x, params.input_shape), **further}
    tensors |= {noun: (state, params.state_shape) for noun, state in states.items()}
    tensors |= {noun: (tensor, shape) for noun, tensor, shape in parts}
    for noun, (tensor, shape) in tensors.items():
        if tensor.shape != shape or tensor.dtype != params.data_type:
            expected = f"{dtype_name(params.data_type)}{list(shape)}"
            got = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
            raise GraphError(f"{name}: the {noun} must fit the layer", expected=expected, got=got)


Transposed = Callable[[Units], jax.Array]  # gradients of a product h U → gradient of h
Gradients = Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]]  # by role, from a result and its gradient


@dataclass(frozen=True, slots=True)
class CellGradient:
    """Gradient of a cell.

    Args:
        num_intermediates: intermediates of a step.
        step: function of the gradient of the new state, intermediates, gradients of non-linearities, and the transposed
            product of each group; returns gradients of the state before and of the units' sums.
        products: function of the gradients of the units' sums, the output before, and the reset gate if there is one;
            returns for each group the operand of its product, and the gradient of the product.
    """

    num_intermediates: int
    step: Callable[..., tuple[State, Units]]
    products: Callable[..., Sequence[tuple[jax.Array, Units]]]


def forward(params: RecurrentParams, keep: bool, pre_calc_weights: bool) -> Callable[..., Any]:
    """Make the function of the forward pass.

    Args:
        params: the layer.
        keep: return the intermediates for the backward pass.
        pre_calc_weights: multiply the input by its weights before the loop.

    Returns:
        A function of input [t, b, in], the arrays of the initial state [b, out], weights [units, in, out] and
        [units, out, out], biases, and lengths [b] if the layer has them; it returns the outputs, the last state but the
        output, and a tuple of intermediates, each [t, b, out].
    """
    num_states = params.cell.num_states

    def run(x: jax.Array, *operands: jax.Array) -> tuple[Any, ...]:
        """Run the layer, with its weights and states in the order of popnn's parameters."""
        start = operands[:num_states]
        w, u, b, *lengths = operands[num_states:]
        # Of [units, 2, out] the first are biases of inputs, the second of outputs.
        biases = (b,) if b.ndim == 2 else (b[:, 0], b[:, 1])
        outputs, last, intermediates = run_layer(
            params.cell,
            CellWeights(params.cell_order, w, u, *biases),
            params.by_role(ACTIVATIONS),
            x,
            start,
            running_mask(params.time_steps, *lengths),
            multiplies_before_loop=pre_calc_weights,
            returns_outputs=params.output_full_sequence,
            keeps_intermediates=keep,
        )
        return outputs if params.output_full_sequence else last[0], *last[1:], intermediates

    return run


def backward(params: RecurrentParams, num_state_gradients: int = 0) -> Callable[..., Any]:
    """Make the function of the backward pass.

    Args:
        params: the layer.
        num_state_gradients: gradients of the last state that the function takes, beside that of the output; zeros for
            the others.

    Returns:
        A function of the gradient of the outputs, weights [units, in, out] and [units, out, out], intermediates, the
        gradients of the last state, and lengths [b] if the layer has them; it returns the gradients of the initial
        state, of the input (or None), and of the operands of the units' non-linearities, [t, b, units, out].
    """
    gradient = GRADIENTS[params.cell_name]
    slopes = params.by_role(GRADIENTS_BY_RESULT)

    def run(d_out: jax.Array, w: jax.Array, u: jax.Array, *rest: jax.Array) -> tuple[jax.Array | None, ...]:
        intermediates = rest[: gradient.num_intermediates]
        d_last = rest[gradient.num_intermediates :][:num_state_gradients]
        lengths = rest[gradient.num_intermediates + num_state_gradients :]
        zeros = jnp.zeros(params.state_shape, w.dtype)
        # Only the last output has a gradient, or each step adds that of its output.
        d_h, d_outs = (zeros, d_out) if params.output_full_sequence else (d_out, None)
        d_state = (d_h, *d_last, *[zeros] * (params.cell.num_states - 1 - len(d_last)))
        transposed = [_transposed(group) for group in Stack(params.cell_order, u, axis=0).split(params.cell.groups)]

        def step(d_state: State, operands: Any) -> tuple[State, jax.Array]:
            d_out, past, running = operands
            d_new = d_state if d_out is None else (d_state[0] + d_out, *d_state[1:])
            d_before, units = gradient.step(d_new, past, slopes, transposed)
            d_units = jnp.stack([units[unit] for unit in params.cell_order], 1)
            # The mask is [batch, 1], the units are [batch, units, out].
            d_units = where(None if running is None else running[:, None], d_units, 0)
            return where_each(running, d_before, d_state), d_units

        operands = (d_outs, intermediates, running_mask(params.time_steps, *lengths))
        d_first, d_units = jax.lax.scan(step, d_state, operands, reverse=True)
        d_x = jnp.einsum("tbko,kio->tbi", d_units, w) if params.calc_input_gradients else None
        return *d_first, d_x, d_units

    return run


def weight_gradients(params: RecurrentParams) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """Make the function of the gradients of weights and biases, which have the shapes of these.

    Args:
        params: the layer.

    Returns:
        A function of the units' gradients [units, t, b, out], input [t, b, in], outputs before each step [t, b, out],
        and reset gates [t, b, out] if the cell has them.
    """
    order = params.cell_order

    def run(d_units: jax.Array, x: jax.Array, *operands: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sum products of operands and units' gradients over time and batch, one product for each operand."""
        units = dict(zip(order, d_units, strict=True))
        groups = GRADIENTS[params.cell_name].products(units, *operands)
        d_w = jnp.einsum("tbi,ktbo->kio", x, d_units)
        d_u: dict[str, jax.Array] = {}
        for h, d_products in groups:
            stacked = d_units if d_products is units else jnp.stack(list(d_products.values()))
            d_u |= dict(zip(d_products, jnp.einsum("tbi,ktbo->kio", h, stacked), strict=True))
        d_b = jnp.sum(d_units, (1, 2))
        if len(params.biases_shape) == 3:
            d_products = {unit: d_product for _, group in groups for unit, d_product in group.items()}
            d_b = jnp.stack([d_b, jnp.stack([jnp.sum(d_products[unit], (0, 1)) for unit in order])], 1)
        return d_w, jnp.stack([d_u[unit] for unit in order]), d_b

    return run


def _transposed(weights: Stack) -> Transposed:
    return lambda units: jnp.einsum("bko,kio->bi", jnp.stack([units[unit] for unit in weights.units], 1), weights.array)


def _lstm_step(d_state: State, past: State, slopes: Gradients, transposed: Sequence[Transposed]) -> tuple[State, Units]:
    """Step the backward pass of an LSTM: gradients of a new state → of the state before, and of the units' sums."""
    d_h, d_c = d_state
    f, i, g, o, s, c_before = past
    d_new_c = d_c + slopes["cell"](s, d_h * o)  # from the next step, and through the output o tanh(c')
    units = {
        "forget": slopes["gate"](f, d_new_c * c_before),
        "input": slopes["gate"](i, d_new_c * g),
        "candidate": slopes["candidate"](g, d_new_c * i),
        "output": slopes["gate"](o, d_h * s),
    }
    return (transposed[0](units), d_new_c * f), units


def _lstm_products(units: Units, before: jax.Array) -> Sequence[tuple[jax.Array, Units]]:
    return [(before, units)]


def _gru_step(d_state: State, past: State, slopes: Gradients, transposed: Sequence[Transposed]) -> tuple[State, Units]:
    (d_h,) = d_state
    r, u, c, h = past
    gates, candidate = transposed
    d_u = slopes["gate"](u, d_h * (h - c))
    d_c = slopes["candidate"](c, d_h * (1 - u))
    d_gated = candidate({"candidate": d_c})  # of r h
    units = {"reset": slopes["gate"](r, d_gated * h), "update": d_u, "candidate": d_c}
    return (d_h * u + d_gated * r + gates(units),), units


def _gru_products(units: Units, before: jax.Array, r: jax.Array) -> Sequence[tuple[jax.Array, Units]]:
    gates = {unit: units[unit] for unit in ("reset", "update")}
    return [(before, gates), (r * before, {"candidate": units["candidate"]})]


def _gru_reset_after_step(
    d_state: State, past: State, slopes: Gradients, transposed: Sequence[Transposed]
) -> tuple[State, Units]:
    (d_h,) = d_state
    r, u, c, h, product = past
    d_u = slopes["gate"](u, d_h * (h - c))
    d_c = slopes["candidate"](c, d_h * (1 - u))
    units = {"reset": slopes["gate"](r, d_c * product), "update": d_u, "candidate": d_c}
    ((_, d_products),) = _gru_reset_after_products(units, h, r)
    return (d_h * u + transposed[0](d_products),), units


def _gru_reset_after_products(units: Units, before: jax.Array, r: jax.Array) -> Sequence[tuple[jax.Array, Units]]:
    # The candidate is tanh(… + r (h U + b')).
    return [(before, {**units, "candidate": units["candidate"] * r})]


GRADIENTS: Mapping[str, CellGradient] = MappingProxyType({
    "lstm": CellGradient(6, _lstm_step, _lstm_products),
    "gru": CellGradient(4, _gru_step, _gru_products),
    "gru_reset_after": CellGradient(5, _gru_reset_after_step, _gru_reset_after_products),
})  # fmt: skip
