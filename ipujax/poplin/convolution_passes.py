"""Passes of a convolution beside the forward one: gradients of its input and weights, and their updates.

The gradient of the input is a convolution itself, of the gradients of the output with the weights transposed and
flipped: `convolution(graph, deltas, weights, get_gradient_params(params), prog, transpose_and_flip_weights=True)`.
Source: poplin `Convolution.hpp`, `ConvUtil.hpp`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ipujax.poplar.library import add
from ipujax.poplin.convolution import ConvParams, transposed_and_flipped
from ipujax.popops.scaled import scaled_add_to
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Copy, Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor


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
