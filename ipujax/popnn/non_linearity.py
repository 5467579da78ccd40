"""Non-linearities and the gradients of their operands.

Source: popnn `NonLinearityDef.hpp`, `NonLinearity.hpp`, `LogSoftmax.hpp`; formulas are those of JAX where JAX has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ipujax.poplar.library import add, add_elementwise, look_up
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor

# By PopLibs' names; softmax is over the last dimension, and always in its stable form.
NonLinearity = Literal["sigmoid", "hard_sigmoid", "relu", "tanh", "gelu", "swish", "softmax"]
NON_LINEARITIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sigmoid": jax.nn.sigmoid,
    "hard_sigmoid": lambda x: jnp.clip(x * 0.2 + 0.5, 0, 1),  # slope and offset of popnn's
    "relu": lambda x: jnp.maximum(x, 0),
    "tanh": jnp.tanh,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "swish": jax.nn.swish,
    "softmax": jax.nn.softmax,
}
# Gradients that are functions of the result, as in popnn; the others are functions of the operand.
GRADIENTS_BY_RESULT: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sigmoid": lambda out, g: g * out * (1 - out),
    "hard_sigmoid": lambda out, g: jnp.where((out > 0) & (out < 1), g * 0.2, 0).astype(g.dtype),
    "relu": lambda out, g: jnp.where(out > 0, g, 0).astype(g.dtype),
    "tanh": lambda out, g: g * (1 - out * out),
    "softmax": lambda out, g: out * (g - jnp.sum(g * out, axis=-1, keepdims=True)),
}


def non_linearity(graph: Graph, kind: NonLinearity, x: Tensor, prog: Program, name: str = "non_linearity") -> Tensor:
    """Return a non-linearity of a tensor: "relu", "sigmoid", "tanh", "gelu", "swish", "hard_sigmoid" or "softmax"."""
    return _adder(kind)(graph, look_up(kind, NON_LINEARITIES, "non-linearity"), [x], prog, name)


def non_linearity_in_place(
    graph: Graph, kind: NonLinearity, x: Tensor, prog: Program, name: str = "non_linearity"
) -> None:
    """Overwrite a tensor by a non-linearity of it; kinds as of `non_linearity`."""
    _adder(kind)(graph, look_up(kind, NON_LINEARITIES, "non-linearity"), [x], prog, name, [x])


def non_linearity_input_gradient(
    graph: Graph,
    kind: NonLinearity,
    activations: Tensor,
    gradient: Tensor,
    prog: Program,
    name: str = "non_linearity_gradient",
) -> Tensor:
    """Return the gradient of a non-linearity's operand.

    Args:
        graph: graph to add to.
        kind: see `non_linearity`.
        activations: its result; for "gelu" and "swish" its operand.
        gradient: gradient of its result.
        prog: program to add to.
        name: debug name.
    """
    forward = look_up(kind, NON_LINEARITIES, "non-linearity")

    def from_operand(x: jax.Array, g: jax.Array) -> jax.Array:
        (grad,) = jax.vjp(forward, x)[1](g)
        return grad

    return _adder(kind)(graph, GRADIENTS_BY_RESULT.get(kind, from_operand), [activations, gradient], prog, name)


def _adder(kind: NonLinearity) -> Callable[..., Any]:
    # A softmax reduces rows, so its layout is planned.
    return add if kind == "softmax" else add_elementwise


def softmax(graph: Graph, x: Tensor, prog: Program, name: str = "softmax") -> Tensor:
    """Return the softmax over the last dimension."""
    return non_linearity(graph, "softmax", x, prog, name)


def log_softmax(graph: Graph, x: Tensor, prog: Program, name: str = "log_softmax") -> Tensor:
    """Return the logarithm of the softmax over the last dimension, not computed from the softmax.

    Source: popnn::logSoftmax.
    """
    return add(graph, jax.nn.log_softmax, [x], prog, name)
