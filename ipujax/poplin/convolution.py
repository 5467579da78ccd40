"""Convolution, its operands, the addition of biases, and the passes of gradients and updates.

Shapes are PopLibs': input [batch, channels, field…], weights [groups, out, in, kernel…] with the channels of one group.
Source: poplin `ConvParams.hpp`, `Convolution.hpp`.

The gradient of the input is a convolution itself, of the gradients of the output with the weights transposed and
flipped: `convolution(graph, deltas, weights, get_gradient_params(params), prog, transpose_and_flip_weights=True)`.
Source: `ConvUtil.hpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.emit import placing
from ipujax.lowering.layout import map_linearly
from ipujax.lowering.poplin import convolution as _convolution
from ipujax.poplar.library import add
from ipujax.poplin.operands import Options, create_mapped_operands, settings
from ipujax.popops.elementwise import scaled_add_to
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Builder, Copy, Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, dtype_name


@dataclass(frozen=True, slots=True)
class ConvParams:
    """Parameters of a convolution.

    Args:
        dtype: type of input and weights.
        batch_size: number of images.
        input_field_shape: spatial sizes of the input.
        kernel_shape: spatial sizes of the weights.
        input_channels_per_conv_group: number of channels that a group reads.
        output_channels_per_conv_group: number of channels that a group writes.
        num_conv_groups: number of groups.
        stride: step of the output in each spatial dimension, 1 when empty.
        padding_lower: zeros before the input, 0 when empty.
        padding_upper: zeros after it, 0 when empty.
        input_dilation: spacing of input elements, 1 when empty.
        kernel_dilation: spacing of weights, 1 when empty.
    """

    dtype: Any
    batch_size: int
    input_field_shape: tuple[int, ...]
    kernel_shape: tuple[int, ...]
    input_channels_per_conv_group: int
    output_channels_per_conv_group: int
    num_conv_groups: int = 1
    stride: tuple[int, ...] = ()
    padding_lower: tuple[int, ...] = ()
    padding_upper: tuple[int, ...] = ()
    input_dilation: tuple[int, ...] = ()
    kernel_dilation: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise GraphError("dtype of a convolution", expected="FLOAT or HALF", got=dtype_name(np.dtype(self.dtype)))
        rank = len(self.input_field_shape)
        steps = (self.stride, self.input_dilation, self.kernel_dilation)
        by_dimension = (*steps, self.padding_lower, self.padding_upper)
        ranks_fit = len(self.kernel_shape) == rank and all(len(numbers) in (0, rank) for numbers in by_dimension)
        if not ranks_fit or min((self.num_conv_groups, *self.kernel_shape, *(n for step in steps for n in step))) < 1:
            expected = "kernel, steps and dilations of at least 1, one for each dimension of the field"
            raise GraphError("parameters of a convolution", expected=expected, got=self)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """[batch, channels, field…]."""
        channels = self.num_conv_groups * self.input_channels_per_conv_group
        return (self.batch_size, channels, *self.input_field_shape)

    @property
    def weights_shape(self) -> tuple[int, ...]:
        """[groups, out, in, kernel…]."""
        channels = self.output_channels_per_conv_group, self.input_channels_per_conv_group
        return (self.num_conv_groups, *channels, *self.kernel_shape)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """[batch, channels, field…]."""
        # From JAX's own shape rule, so that the formula is in one place.
        x, weights = (jax.ShapeDtypeStruct(s, self.dtype) for s in (self.input_shape, self.weights_shape))
        return jax.eval_shape(self.convolve, x, weights).shape

    def convolve(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """Convolve arrays [batch, channels, field…] and [groups, out, in, kernel…]."""
        # XLA numbers output channels over all groups, PopLibs within a group.
        kernels = weights.reshape(-1, *self.weights_shape[2:])
        return lax.conv_general_dilated(x, kernels, **self.keywords())

    def keywords(self) -> dict[str, Any]:
        """Return the parameters as keywords of the op library's convolution."""
        rank = len(self.input_field_shape)
        ones = (1,) * rank
        zeros = (0,) * rank
        dims = tuple(range(rank + 2))  # batch or output channels, then channels, then the field, in all three arrays
        return {
            "dimension_numbers": lax.ConvDimensionNumbers(dims, dims, dims),
            "window_strides": self.stride or ones,
            "padding": tuple(zip(self.padding_lower or zeros, self.padding_upper or zeros, strict=True)),
            "lhs_dilation": self.input_dilation or ones,
            "rhs_dilation": self.kernel_dilation or ones,
            "feature_group_count": self.num_conv_groups,
        }


def convolution(
    graph: Graph,
    x: Tensor,
    weights: Tensor,
    params: ConvParams,
    prog: Program,
    name: str = "convolution",
    *,
    transpose_and_flip_weights: bool = False,
    options: Options = None,
) -> Tensor:
    """Convolve an input with weights, as neural networks do (the kernel is not flipped).

    Args:
        graph: graph to add to.
        x: [batch, channels, field…].
        weights: [groups, out, in, kernel…].
        params: the convolution.
        prog: program to add to.
        name: debug name.
        transpose_and_flip_weights: `weights` are those of the forward pass, [groups, in, out, kernel…]: their channels
            are swapped and their kernel is reversed first. With `get_gradient_params` that is the backward pass.
        options: as of `mat_mul`.

    Returns:
        A new tensor [batch, channels, field…].

    Raises:
        GraphError: tensors without the shapes of `params`, or without a tile mapping.
    """
    # A view: PopLibs may copy the weights first, see `weights_transpose_chans_flip_xy`.
    weights = transposed_and_flipped(weights) if transpose_and_flip_weights else weights
    if x.shape != params.input_shape or weights.shape != params.weights_shape:
        expected = f"{list(params.input_shape)} and {list(params.weights_shape)}"
        got = f"{list(x.shape)} and {list(weights.shape)}"
        raise GraphError(f"{name}: tensors must have the shapes of params", expected=expected, got=got)
    with placing(graph, [x, weights]):
        return _convolve(graph, x, weights, params, prog, name, options)


def transposed_and_flipped(weights: Tensor) -> Tensor:
    """Return a view of weights with the channels of each group swapped and the kernel reversed."""
    return weights.transpose((0, 2, 1, *range(3, weights.ndim))).reverse(range(3, weights.ndim))


def _convolve(
    graph: Graph, x: Tensor, weights: Tensor, params: ConvParams, prog: Program, name: str, options: Options
) -> Tensor:
    """Return the result, whose variable has the channels of an element of its field in one row, as the input's has.

    Source: poplibs `Convolution.cpp`, whose internal shape of activations is [group, batch, field…, channels].
    """
    kernels = weights.reshape((weights.shape[0] * weights.shape[1], *weights.shape[2:]))
    rank = len(params.kernel_shape)
    channels_last = (0, rank + 1, *range(1, rank + 1))  # positions of batch, channels and field
    numbers = lax.ConvDimensionNumbers(channels_last, tuple(range(rank + 2)), channels_last)
    keywords = params.keywords() | {"dimension_numbers": numbers} | settings("convolution", options)
    x = x.transpose((0, *range(2, rank + 2), 1))
    return _channels_second(_convolution(Builder(graph, prog, name), x, kernels, **keywords))


def create_input(graph: Graph, params: ConvParams, name: str = "input", options: Options = None) -> Tensor:
    """Create an input tensor mapped as `convolution` uses it, the channels of an element of its field in one row.

    Source: poplin::createInput, whose variable has a group of channels innermost.
    """
    return _channels_second(_create_operand(graph, params, 0, name, options))


def create_weights(graph: Graph, params: ConvParams, name: str = "weights", options: Options = None) -> Tensor:
    """Create a weights tensor mapped as `convolution` uses it, the channels of an element of the kernel in one row.

    Source: poplin::createWeights, whose variable has groups of output and of input channels innermost.
    """
    return _weights_view(_create_operand(graph, params, 1, name, options))


def _create_operand(graph: Graph, params: ConvParams, position: int, name: str, options: Options) -> Tensor:
    """Return a new variable of an operand, [batch, field…, channels] or [groups, kernel…, out, in]."""

    def build(scratch: Graph, operands: Sequence[Tensor]) -> None:
        x, weights = operands
        _convolve(scratch, _channels_second(x), _weights_view(weights), params, Program(), name, options)

    batch, channels, *field = params.input_shape
    groups, outs, ins, *kernel = params.weights_shape
    shapes = [((batch, *field, channels), params.dtype), ((groups, *kernel, outs, ins), params.dtype)]
    return create_mapped_operands(graph, shapes, build, [position], [name])[0]


def _channels_second(x: Tensor) -> Tensor:
    """Return a view [batch, channels, field…] of a tensor [batch, field…, channels]."""
    return x.transpose((0, x.ndim - 1, *range(1, x.ndim - 1)))


def _weights_view(weights: Tensor) -> Tensor:
    """Return a view [groups, out, in, kernel…] of a variable [groups, kernel…, out, in]."""
    return weights.transpose((0, weights.ndim - 2, weights.ndim - 1, *range(1, weights.ndim - 2)))


def create_biases(graph: Graph, activations: Tensor, name: str = "biases") -> Tensor:
    """Create a tensor [channels] for `add_bias` to activations [batch, channels, field…], mapped linearly.

    Source: poplin::createBiases.
    """
    _check_activations(name, activations)
    biases = graph.add_variable(activations.shape[1:2], activations.dtype, name)
    with placing(graph):
        map_linearly(graph, biases)
    return biases


def add_bias(graph: Graph, activations: Tensor, biases: Tensor, prog: Program, name: str = "add_bias") -> None:
    """Add to each channel of [batch, channels, field…] its bias, in place.

    Raises:
        GraphError: another number of biases than of channels.

    Source: poplin::addBias.
    """
    _check_activations(name, activations, biases)
    # [channels, 1…] broadcasts over batch and field.
    by_channel = biases.reshape((biases.size, *([1] * (activations.ndim - 2))))
    add(graph, lambda x, b: x + b, [activations, by_channel], prog, name, [activations])


def _check_activations(name: str, activations: Tensor, biases: Tensor | None = None) -> None:
    if activations.ndim < 2 or (biases is not None and biases.shape != activations.shape[1:2]):
        got = [list(t.shape) for t in (activations, biases) if t is not None]
        expected = "[batch, channels, field…] and [channels]"
        raise GraphError(f"{name}: must have one bias a channel", expected=expected, got=got)


def get_gradient_params(params: ConvParams) -> ConvParams:
    """Return the convolution that maps gradients of the output of `params` to gradients of its input.

    Strides and dilations of the input are swapped; a dilated kernel of k elements has padding `k - 1 - padding`.

    Source: poplin::getGradientParams.
    """
    rank = len(params.input_field_shape)
    ones = (1,) * rank
    strides = params.stride or ones
    dilations = params.input_dilation or ones
    # Sizes with dilation: of the kernel, of the input, and of the output, which the strides dilate in the gradient.
    kernels = [(k - 1) * d + 1 for k, d in zip(params.kernel_shape, params.kernel_dilation or ones, strict=True)]
    inputs = [(n - 1) * d + 1 for n, d in zip(params.input_field_shape, dilations, strict=True)]
    out_field = params.output_shape[2:]
    outputs = [(n - 1) * s + 1 for n, s in zip(out_field, strides, strict=True)]
    before = [k - 1 - low for k, low in zip(kernels, params.padding_lower or (0,) * rank, strict=True)]
    # So that the result has the size of the input: its elements after the last window have zero gradients.
    after = [n + k - 1 - o - b for n, k, o, b in zip(inputs, kernels, outputs, before, strict=True)]
    # Input and output exchange field, channels, stride and dilation.
    return ConvParams(
        params.dtype,
        params.batch_size,
        out_field,
        params.kernel_shape,
        params.output_channels_per_conv_group,
        params.input_channels_per_conv_group,
        params.num_conv_groups,
        tuple(dilations),
        tuple(before),
        tuple(after),
        tuple(strides),
        params.kernel_dilation,
    )


def weights_transpose_chans_flip_xy(
    graph: Graph, weights_in: Tensor, weights_out: Tensor, prog: Program, name: str = "weights_transpose_chans_flip_xy"
) -> None:
    """Copy weights [groups, out, in, kernel…] to [groups, in, out, kernel…], the kernel reversed.

    Raises:
        GraphError: tensors of other shapes or types.

    Source: poplin::weightsTransposeChansFlipXY.
    """
    if weights_in.ndim < 3:
        expected = "[groups, out, in, kernel…]"
        raise GraphError(f"{name}: must have weights of a convolution", expected=expected, got=list(weights_in.shape))
    prog.add(Copy(transposed_and_flipped(weights_in), weights_out, name, graph.origin))


def calculate_weight_deltas(
    graph: Graph, z_deltas: Tensor, activations: Tensor, params: ConvParams, prog: Program, name: str = "weight_deltas"
) -> Tensor:
    """Compute the gradients of a convolution's weights.

    Args:
        graph: graph to add to.
        z_deltas: gradients of the output, [batch, channels, field…].
        activations: input of the convolution, [batch, channels, field…].
        params: the forward convolution.
        prog: program to add to.
        name: debug name.

    Returns:
        A new tensor [groups, out, in, kernel…].

    Raises:
        GraphError: tensors without the shapes of `params`.

    Source: poplin::calculateWeightDeltas.
    """
    if z_deltas.shape != params.output_shape or activations.shape != params.input_shape:
        expected = f"{list(params.output_shape)} and {list(params.input_shape)}"
        got = f"{list(z_deltas.shape)} and {list(activations.shape)}"
        raise GraphError(f"{name}: tensors must have the shapes of params", expected=expected, got=got)

    # A convolution is linear in its weights: its transpose in them maps gradients of outputs to those of weights.
    def deltas(z: jax.Array, x: jax.Array) -> jax.Array:
        weights = jax.ShapeDtypeStruct(params.weights_shape, x.dtype)
        (gradient,) = jax.linear_transpose(lambda w: params.convolve(x, w), weights)(z)
        return gradient

    return add(graph, deltas, [z_deltas, activations], prog, name)


def convolution_weight_update(
    graph: Graph,
    z_deltas: Tensor,
    weights: Tensor,
    activations: Tensor,
    params: ConvParams,
    scale: float | Tensor,
    prog: Program,
    name: str = "weight_update",
) -> None:
    """Add `scale` times the gradients of a convolution's weights to them, in place.

    Arguments as of `calculate_weight_deltas`; the scale is a number or a tensor of one element.

    Source: poplin::convolutionWeightUpdate.
    """
    deltas = calculate_weight_deltas(graph, z_deltas, activations, params, prog, f"{name}/deltas")
    scaled_add_to(graph, weights, deltas, scale, prog, name)


def convolution_bias_update(
    graph: Graph, z_deltas: Tensor, biases: Tensor, scale: float | Tensor, prog: Program, name: str = "bias_update"
) -> None:
    """Add `scale` times the gradients of biases [channels] to them, in place.

    Source: poplin::convolutionBiasUpdate.
    """

    # A bias is added to all samples and field positions of its channel: its gradient is their sum.
    def deltas(z: jax.Array) -> jax.Array:
        return jnp.sum(z, axis=(0, *range(2, z.ndim)))

    scaled_add_to(graph, biases, add(graph, deltas, [z_deltas], prog, f"{name}/deltas"), scale, prog, name)
