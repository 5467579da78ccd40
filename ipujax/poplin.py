"""poplin: matrix multiplication, convolution and linear algebra, under PopLibs' names in snake_case.

    out = poplin.mat_mul(graph, a, b, prog, "MatMul")

Operands lie on tiles already; `create_mat_mul_input_lhs` and its like make tensors that lie where the plan uses them.
Convolutions take PopLibs' shapes: input [batch, channels, field…], weights [groups, out, in, kernel…], the channels
those of one group.
Source: Poplar & PopLibs user guide, tutorial 4; names from poplin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.library import add, registrar
from ipujax.lowering.emit import placing
from ipujax.lowering.poplin import convolution as _convolution
from ipujax.lowering.poplin import matmul as _matmul
from ipujax.runtime.errors import ArgumentError, GraphError, user_line
from ipujax.runtime.graph import Graph
from ipujax.runtime.program import Sequence as Program
from ipujax.runtime.target import nearest
from ipujax.runtime.tensor import Tensor

add_codelets = registrar("poplin")

Options = Mapping[str, Any] | None
_TYPES = {"half": np.dtype(np.float16), "float": np.dtype(np.float32)}


def _settings(options: Options) -> dict[str, Any]:
    """The keywords of the library for options of Poplar."""
    settings: dict[str, Any] = {}
    for name, value in (options or {}).items():
        if name == "availableMemoryProportion":
            settings["available_memory_proportion"] = float(value)
        elif name == "partialsType":
            if value not in _TYPES:
                raise ArgumentError("option partialsType", expected='"half" or "float"', got=repr(value))
            settings["partials_dtype"] = _TYPES[value]
        else:
            known = ("availableMemoryProportion", "partialsType")
            expected, hint = f"one of {', '.join(known)}", nearest(name, known)
            raise ArgumentError(f"no option {name!r} of poplin", expected=expected, hint=hint)
    return settings


def mat_mul(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    prog: Program,
    name: str = "mat_mul",
    *,
    output_type: Any = None,
    options: Options = None,
) -> Tensor:
    """Multiplies matrices [m, k] by [k, n].

    Args:
        graph: graph to add to.
        a: left matrix.
        b: right matrix.
        prog: program the steps are added to.
        name: debug name.
        output_type: type of the result, that of `a` when None.
        options: "availableMemoryProportion" of a tile the plan may use, "partialsType" "half" or "float".

    Returns:
        A new tensor [m, n].

    Raises:
        GraphError: shapes that do not match, or an operand that lies on no tile.
    """
    _check_ranks(name, a, b, 2)
    grouped = mat_mul_grouped(
        graph, a.expand_dims(0), b.expand_dims(0), prog, name, output_type=output_type, options=options
    )
    return grouped.reshape(grouped.shape[1:])


def mat_mul_grouped(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    prog: Program,
    name: str = "mat_mul",
    *,
    output_type: Any = None,
    options: Options = None,
) -> Tensor:
    """Multiplies groups of matrices, [g, m, k] by [g, k, n]; as `mat_mul`."""
    _check_ranks(name, a, b, 3)
    with placing(graph, [a, b]):
        return _matmul(graph, a, b, prog, name, out_dtype=output_type, **_settings(options))


def mat_mul_acc(
    graph: Graph, c: Tensor, scale: float, a: Tensor, b: Tensor, prog: Program, name: str = "mat_mul_acc"
) -> None:
    """Adds `scale · a · b` to a matrix `c`, in place."""
    product = mat_mul(graph, a, b, prog, name, output_type=c.dtype)
    add(graph, lambda x, y: x + y * jnp.asarray(scale, x.dtype), [c, product], prog, f"{name}/add", [c])


def _check_ranks(name: str, a: Tensor, b: Tensor, rank: int) -> None:
    if a.ndim != rank or b.ndim != rank:
        got = f"{list(a.shape)} by {list(b.shape)}"
        raise GraphError(f"{name} multiplies tensors of {rank} dimensions", where=user_line(), got=got)


def create_mat_mul_input_lhs(
    graph: Graph, dtype: Any, a_shape: Sequence[int], b_shape: Sequence[int], name: str = "lhs", options: Options = None
) -> Tensor:
    """A matrix [m, k], or groups of them, that lies where `mat_mul` with one of `b_shape` uses it."""
    return _mat_mul_input(graph, dtype, (a_shape, b_shape), 0, name, options)


def create_mat_mul_input_rhs(
    graph: Graph, dtype: Any, a_shape: Sequence[int], b_shape: Sequence[int], name: str = "rhs", options: Options = None
) -> Tensor:
    """A matrix [k, n], or groups of them, that lies where `mat_mul` with one of `a_shape` uses it."""
    return _mat_mul_input(graph, dtype, (a_shape, b_shape), 1, name, options)


def _mat_mul_input(
    graph: Graph, dtype: Any, shapes: tuple[Sequence[int], Sequence[int]], which: int, name: str, options: Options
) -> Tensor:
    def build(scratch: Graph, operands: Sequence[Tensor]) -> None:
        a, b = (x if x.ndim == 3 else x.expand_dims(0) for x in operands)
        _matmul(scratch, a, b, Program(), name, **_settings(options))

    return _where_used(graph, [(shape, dtype) for shape in shapes], build, which, name)


def _where_used(
    graph: Graph,
    operands: Sequence[tuple[Sequence[int], Any]],
    build: Callable[[Graph, Sequence[Tensor]], None],
    which: int,
    name: str,
) -> Tensor:
    """A new variable that lies as an operation would place that operand: tried on a graph of its own."""
    scratch = Graph(graph.target)
    tried = [scratch.add_variable(tuple(shape), dtype, name) for shape, dtype in operands]
    build(scratch, tried)
    mapping = scratch.mappings[tried[which].variables()[0]]
    shape, dtype = operands[which]
    return graph.add_variable(tuple(shape), np.dtype(dtype), name, mapping)


@dataclass(frozen=True, slots=True)
class ConvParams:
    """A convolution.

    Args:
        dtype: type of input and weights.
        batch_size: images.
        input_field_shape: spatial sizes of the input.
        kernel_shape: spatial sizes of the weights.
        input_channels_per_conv_group: channels a group reads.
        output_channels_per_conv_group: channels a group writes.
        num_conv_groups: groups.
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

    def keywords(self) -> dict[str, Any]:
        """The parameters as the library's convolution takes them."""
        rank = len(self.input_field_shape)
        ones, zeros, dims = (1,) * rank, (0,) * rank, tuple(range(rank + 2))
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
    options: Options = None,
) -> Tensor:
    """Convolves an input with weights, as neural networks do (the kernel is not flipped).

    Args:
        graph: graph to add to.
        x: [batch, channels, field…].
        weights: [groups, out, in, kernel…].
        params: the convolution.
        prog: program the steps are added to.
        name: debug name.
        options: as of `mat_mul`.

    Returns:
        A new tensor [batch, channels, field…].

    Raises:
        GraphError: tensors that are not of the shapes of `params`, or lie on no tile.
    """
    if x.shape != params.input_shape or weights.shape != params.weights_shape:
        expected = f"{list(params.input_shape)} and {list(params.weights_shape)}"
        got = f"{list(x.shape)} and {list(weights.shape)}"
        raise GraphError(f"{name}: not the tensors of these parameters", where=user_line(), expected=expected, got=got)
    with placing(graph, [x, weights]):
        return _convolve(graph, x, weights, params, prog, name, options)


def _convolve(
    graph: Graph, x: Tensor, weights: Tensor, params: ConvParams, prog: Program, name: str, options: Options
) -> Tensor:
    kernels = weights.reshape((weights.shape[0] * weights.shape[1], *weights.shape[2:]))
    return _convolution(graph, x, kernels, prog, name, **params.keywords(), **_settings(options))


def create_input(graph: Graph, params: ConvParams, name: str = "input", options: Options = None) -> Tensor:
    """An input tensor that lies where `convolution` uses it."""
    return _conv_operand(graph, params, 0, name, options)


def create_weights(graph: Graph, params: ConvParams, name: str = "weights", options: Options = None) -> Tensor:
    """A weights tensor that lies where `convolution` uses it."""
    return _conv_operand(graph, params, 1, name, options)


def _conv_operand(graph: Graph, params: ConvParams, which: int, name: str, options: Options) -> Tensor:
    def build(scratch: Graph, operands: Sequence[Tensor]) -> None:
        x, weights = operands
        _convolve(scratch, x, weights, params, Program(), name, options)

    shapes = [(params.input_shape, params.dtype), (params.weights_shape, params.dtype)]
    return _where_used(graph, shapes, build, which, name)


def triangular_solve(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    prog: Program,
    name: str = "triangular_solve",
    *,
    left_side: bool = True,
    lower: bool = True,
    unit_diagonal: bool = False,
) -> Tensor:
    """Solves `a · x = b`, or `x · a = b`, for a triangular matrix."""

    def solve(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.linalg.triangular_solve(x, y, left_side=left_side, lower=lower, unit_diagonal=unit_diagonal)

    result: Tensor = add(graph, solve, [a, b], prog, name)
    return result


def cholesky(graph: Graph, a: Tensor, prog: Program, name: str = "cholesky") -> Tensor:
    """The lower Cholesky factor of a symmetric positive definite matrix."""
    result: Tensor = add(graph, jnp.linalg.cholesky, [a], prog, name)
    return result
