"""Shared by recurrent layers: parameters, checks of tensors, masks of sequences that have ended.

A sequence of the batch may be shorter than the others, by `var_time_steps`. After its end its state stays as it is, its
outputs are zeros, and its gradients are zeros (the meaning of TensorFlow's `dynamic_rnn`; assumed of popnn).
Source: popnn `Rnn.hpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.poplar.library import add, look_up
from ipujax.poplin.operands import create_mapped_operands
from ipujax.popnn.non_linearity import GRADIENTS_BY_RESULT, NON_LINEARITIES
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, dtype_name

# Elementwise non-linearities with gradients by result: only results are among the intermediates.
Activation = Literal["sigmoid", "hard_sigmoid", "relu", "tanh"]
ACTIVATIONS = {kind: NON_LINEARITIES[kind] for kind in GRADIENTS_BY_RESULT if kind != "softmax"}


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentParams:
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

    UNITS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "data_type", np.dtype(self.data_type))
        object.__setattr__(self, "cell_order", tuple(self.cell_order) or self.UNITS)
        if sorted(self.cell_order) != sorted(self.UNITS):
            raise GraphError("cell_order", expected=f"each of {', '.join(self.UNITS)} once", got=self.cell_order)
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
        return (len(self.UNITS), self.output_size)

    @property
    def weights_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the weights of inputs [units, in, out] and outputs [units, out, out], and of the biases."""
        units = len(self.UNITS)
        weights = [(units, size, self.output_size) for size in self.layer_sizes]
        return [*weights, self.biases_shape]

    @property
    def lengths(self) -> list[Tensor]:
        """Operands of lengths: one, or none if all sequences run to the end."""
        return [] if self.var_time_steps is None else [self.var_time_steps]

    def unit(self, name: str) -> int:
        """Return the index of a unit in weights and biases."""
        return self.cell_order.index(name)

    def activations(self) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
        """Return the non-linearities of candidates and of gates."""
        return ACTIVATIONS[self.activation], ACTIVATIONS[self.recurrent_activation]

    def gradients(self) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
        """Return for candidates and gates the gradient of the operand, a function of result and its gradient."""
        return GRADIENTS_BY_RESULT[self.activation], GRADIENTS_BY_RESULT[self.recurrent_activation]


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
    graph: Graph,
    params: RecurrentParams,
    forward: Callable[..., Any],
    shapes: Sequence[tuple[int, ...]],
    which: Sequence[int],
    names: Sequence[str],
) -> list[Tensor]:
    """Create operands of a layer's forward pass, mapped as it uses them.

    Args:
        graph: graph to add to.
        params: the layer.
        forward: the pass, a function of arrays of `shapes` and of lengths if the layer has them.
        shapes: of all its operands but lengths.
        which: indices of the operands to create.
        names: debug name of each of `which`.
    """

    # The program of the trial is dropped: only the mappings that it leaves on the scratch graph count.
    def build(scratch: Graph, operands: Sequence[Tensor]) -> None:
        add(scratch, forward, operands, Program(), "layer")

    operands = [*((shape, params.data_type) for shape in shapes), *((t.shape, t.dtype) for t in params.lengths)]
    return create_mapped_operands(graph, operands, build, which, names)


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


def running_mask(params: RecurrentParams, lengths: Sequence[jax.Array]) -> jax.Array | None:
    """Return a mask [steps, batch, 1] of the steps before each sequence's end; None without lengths."""
    # None, not a mask of ones: no select is traced where all sequences run to the end.
    if not lengths:
        return None
    (length,) = lengths
    return (jnp.arange(params.time_steps, dtype=length.dtype)[:, None] < length[None])[..., None]


def where(mask: jax.Array | None, chosen: jax.Array, other: jax.Array | float) -> jax.Array:
    """Return `chosen` where a sequence runs, else `other`."""
    return chosen if mask is None else jnp.where(mask, chosen, jnp.asarray(other, chosen.dtype))
