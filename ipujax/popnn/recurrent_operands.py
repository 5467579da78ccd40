"""Parameters and operands of recurrent layers: their shapes, checks, and creation.

A sequence of the batch may be shorter than the others, by `var_time_steps`. After its end its state stays as it is, its
outputs are zeros, and its gradients are zeros (the meaning of TensorFlow's `dynamic_rnn`; assumed of popnn).
Source: popnn `Rnn.hpp`.
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
from ipujax.recurrent import CELLS, Cell
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
