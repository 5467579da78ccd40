"""popnn: what neural networks need beside linear algebra, under PopLibs' names in snake_case.

Non-linearities and their gradients, pooling, losses, normalisation. All are compositions of operations of the other
libraries, with the formulas of JAX where JAX has them.
Source: names from popnn. Limits: no recurrent layers and no CTC loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.library import add, registrar
from ipujax.runtime.errors import GraphError, user_line
from ipujax.runtime.graph import Graph
from ipujax.runtime.program import Sequence as Program
from ipujax.runtime.target import nearest
from ipujax.runtime.tensor import Tensor

add_codelets = registrar("popnn")

# By PopLibs' names; softmax is over the last dimension, and its stable form the only one here.
NON_LINEARITIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "hard_sigmoid": lambda x: jnp.clip(x * 0.2 + 0.5, 0, 1),  # slope and offset of popnn's
    "relu": lambda x: jnp.maximum(x, 0),
    "tanh": jnp.tanh,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "swish": jax.nn.swish,
    "softmax": jax.nn.softmax,
}
# Those whose gradient is a function of their result, as popnn asks for; that of the others is one of their operand.
_GRADIENTS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sigmoid": lambda out, g: g * out * (1 - out),
    "hard_sigmoid": lambda out, g: jnp.where((out > 0) & (out < 1), g * 0.2, 0).astype(g.dtype),
    "relu": lambda out, g: jnp.where(out > 0, g, 0).astype(g.dtype),
    "tanh": lambda out, g: g * (1 - out * out),
    "softmax": lambda out, g: out * (g - jnp.sum(g * out, axis=-1, keepdims=True)),
}


def _known(kind: str, table: dict[str, Any], what: str) -> Any:
    if kind not in table:
        expected = f"one of {', '.join(table)}"
        raise GraphError(f"no {what} {kind!r}", where=user_line(), expected=expected, hint=nearest(kind, table))
    return table[kind]


def non_linearity(graph: Graph, kind: str, x: Tensor, prog: Program, name: str = "non_linearity") -> Tensor:
    """A non-linearity of a tensor: "relu", "sigmoid", "tanh", "gelu", "swish", "hard_sigmoid" or "softmax"."""
    result: Tensor = add(graph, _known(kind, NON_LINEARITIES, "non-linearity"), [x], prog, name)
    return result


def non_linearity_in_place(graph: Graph, kind: str, x: Tensor, prog: Program, name: str = "non_linearity") -> None:
    """As `non_linearity`, but overwrites the tensor."""
    add(graph, _known(kind, NON_LINEARITIES, "non-linearity"), [x], prog, name, [x])


def non_linearity_input_gradient(
    graph: Graph, kind: str, activations: Tensor, gradient: Tensor, prog: Program, name: str = "non_linearity_gradient"
) -> Tensor:
    """The gradient of a non-linearity's operand.

    Args:
        graph: graph to add to.
        kind: see `non_linearity`.
        activations: its result; for "gelu" and "swish" its operand.
        gradient: gradient of its result.
        prog: program the steps are added to.
        name: debug name.
    """
    forward = _known(kind, NON_LINEARITIES, "non-linearity")

    def from_operand(x: jax.Array, g: jax.Array) -> jax.Array:
        (grad,) = jax.vjp(forward, x)[1](g)
        return grad

    result: Tensor = add(graph, _GRADIENTS.get(kind, from_operand), [activations, gradient], prog, name)
    return result


def softmax(graph: Graph, x: Tensor, prog: Program, name: str = "softmax") -> Tensor:
    """Softmax over the last dimension."""
    return non_linearity(graph, "softmax", x, prog, name)


@dataclass(frozen=True, slots=True)
class PoolParams:
    """A pooling of tensors [batch, channels, field…].

    Args:
        pooling_type: "max", "avg" (over elements that are no padding) or "sum".
        kernel_shape: sizes of the window.
        stride: its step.
        padding_lower: padding before the input, 0 when empty.
        padding_upper: padding after it, 0 when empty.
    """

    pooling_type: str
    kernel_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding_lower: tuple[int, ...] = ()
    padding_upper: tuple[int, ...] = ()


def _pooled(params: PoolParams) -> Callable[[jax.Array], jax.Array]:
    if params.pooling_type not in ("max", "avg", "sum"):
        expected, got = '"max", "avg" or "sum"', repr(params.pooling_type)
        raise GraphError("no such pooling", where=user_line(), expected=expected, got=got)

    def pooled(x: jax.Array) -> jax.Array:
        rank = len(params.kernel_shape)
        window, strides = (1, 1, *params.kernel_shape), (1, 1, *params.stride)
        zeros = (0,) * rank
        pairs = zip(params.padding_lower or zeros, params.padding_upper or zeros, strict=True)
        padding = ((0, 0), (0, 0), *pairs)
        if params.pooling_type == "max":
            return lax.reduce_window(x, np.array(-np.inf, x.dtype), lax.max, window, strides, padding)
        total = lax.reduce_window(x, np.array(0, x.dtype), lax.add, window, strides, padding)
        if params.pooling_type == "sum":
            return total
        # How many elements each window has is known now.
        with jax.ensure_compile_time_eval():
            ones = jnp.ones((1, 1, *x.shape[2:]), jnp.float32)
            count = np.asarray(lax.reduce_window(ones, 0.0, lax.add, window, strides, padding)).astype(x.dtype)
        return total / count

    return pooled


def pool(graph: Graph, params: PoolParams, x: Tensor, prog: Program, name: str = "pool") -> Tensor:
    """Pools a tensor [batch, channels, field…]; returns a new one."""
    result: Tensor = add(graph, _pooled(params), [x], prog, name)
    return result


def pool_input_gradient(
    graph: Graph, params: PoolParams, x: Tensor, gradient: Tensor, prog: Program, name: str = "pool_gradient"
) -> Tensor:
    """The gradient of the operand of `pool`, from that operand and the gradient of the result."""

    def backward(a: jax.Array, g: jax.Array) -> jax.Array:
        (grad,) = jax.vjp(_pooled(params), a)[1](g)
        return grad

    result: Tensor = add(graph, backward, [x, gradient], prog, name)
    return result


def calc_loss(
    graph: Graph,
    outputs: Tensor,
    expected: Tensor,
    loss: Tensor,
    deltas: Tensor,
    loss_type: str,
    prog: Program,
    name: str = "loss",
) -> None:
    """Writes a loss of each sample, and its gradient with respect to the outputs.

    Args:
        graph: graph to add to.
        outputs: [batch, classes], of the last layer; for "softmax_cross_entropy" probabilities, after the softmax.
        expected: for "sum_squared" [batch, classes], else indices of classes [batch].
        loss: [batch], written.
        deltas: [batch, classes], written: of the outputs, and of the softmax's operand for cross entropy.
        loss_type: "sum_squared" or "softmax_cross_entropy".
        prog: program the steps are added to.
        name: debug name.
    """

    def sum_squared(x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        delta = x - target
        return 0.5 * jnp.sum(delta * delta, axis=1), delta

    def cross_entropy(p: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        hot = (lax.broadcasted_iota(labels.dtype, p.shape, 1) == labels[:, None]).astype(p.dtype)
        smallest = jnp.finfo(p.dtype).tiny  # keeps the logarithm of what rounded to zero finite
        return -jnp.sum(hot * jnp.log(jnp.maximum(p, smallest)), axis=1), p - hot

    functions = {"sum_squared": sum_squared, "softmax_cross_entropy": cross_entropy}
    add(graph, _known(loss_type, functions, "loss"), [outputs, expected], prog, name, [loss, deltas])


def calc_accuracy(
    graph: Graph, outputs: Tensor, expected: Tensor, num_correct: Tensor, prog: Program, name: str = "accuracy"
) -> None:
    """Writes to a scalar how many samples have their greatest output at the expected class."""

    def correct(x: jax.Array, labels: jax.Array) -> jax.Array:
        hits = jnp.argmax(x, axis=1).astype(labels.dtype) == labels
        return jnp.sum(hits.astype(num_correct.dtype)).astype(num_correct.dtype).reshape(num_correct.shape)

    add(graph, correct, [outputs, expected], prog, name, [num_correct])


def batch_norm(
    graph: Graph, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, prog: Program, name: str = "batch_norm"
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises over batch and field of [batch, channels, field…]; returns it, the mean and the inverse deviation."""
    return _normalised(graph, x, gamma, beta, epsilon, prog, name, groups=None)


def group_norm(
    graph: Graph,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    num_groups: int,
    prog: Program,
    name: str = "group_norm",
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises each sample over groups of channels and the field; as `batch_norm`, statistics [batch, groups]."""
    if x.shape[1] % num_groups:
        got = f"{x.shape[1]} channels, {num_groups} groups"
        raise GraphError(f"{name}: groups of unequal size", where=user_line(), got=got)
    return _normalised(graph, x, gamma, beta, epsilon, prog, name, groups=num_groups)


def instance_norm(
    graph: Graph, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, prog: Program, name: str = "instance_norm"
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises each channel of each sample; as `group_norm` with a group a channel."""
    return _normalised(graph, x, gamma, beta, epsilon, prog, name, groups=x.shape[1])


def layer_norm(
    graph: Graph, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, prog: Program, name: str = "layer_norm"
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises each sample; as `group_norm` with one group."""
    return _normalised(graph, x, gamma, beta, epsilon, prog, name, groups=1)


def _normalised(
    graph: Graph,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
    prog: Program,
    name: str,
    groups: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, channels, *field = x.shape
    # [batch, groups, channels of a group, field]; what is normalised over are all but those statistics are kept of.
    shape = (batch, channels, 1, prod(field)) if groups is None else (batch, groups, channels // groups, prod(field))
    over = (0, 2, 3) if groups is None else (2, 3)

    def normalise(a: jax.Array, g: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        parts = a.reshape(shape)
        mean = jnp.mean(parts, axis=over, keepdims=True)
        inverse = lax.rsqrt(jnp.mean(lax.square(parts - mean), axis=over, keepdims=True) + epsilon)
        by_channel: Sequence[int] = (1, channels, *([1] * len(field)))
        out = ((parts - mean) * inverse).reshape(a.shape) * g.reshape(by_channel) + b.reshape(by_channel)
        kept = [n for d, n in enumerate(shape) if d not in over]
        return out, mean.reshape(kept), inverse.reshape(kept)

    result: tuple[Tensor, Tensor, Tensor] = add(graph, normalise, [x, gamma, beta], prog, name)
    return result
