"""The name of the domain, and non-linearities that its fused operators call by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.activation_functions import hard_sigmoid, leaky_relu
from ipujax.onnx.operators.operand_types import Array

DOMAIN = "com.microsoft"

_FUSED: Mapping[str, tuple[int, Callable[..., Array]]] = {  # number of parameters, function
    "Relu": (0, jax.nn.relu),
    "Sigmoid": (0, jax.nn.sigmoid),
    "Tanh": (0, jnp.tanh),
    "LeakyRelu": (1, lambda x, alpha=0.01: leaky_relu(x, alpha=alpha)),
    "Clip": (2, lambda x, low, high: jnp.clip(x, low, high)),
    "HardSigmoid": (2, lambda x, alpha=0.2, beta=0.5: hard_sigmoid(x, alpha=alpha, beta=beta)),
    "HardSwish": (0, lambda x: x * hard_sigmoid(x, alpha=1 / 6, beta=0.5)),
    "Gelu": (0, lambda x: jax.nn.gelu(x, approximate=False)),
}


def activated(x: Array, name: str, parameters: Sequence[float]) -> Array:
    """Return a fused non-linearity of an array; refuse an unknown one."""
    if not name:
        return x
    if name not in _FUSED:
        raise OnnxError("the attribute 'activation' is unknown", expected=f"one of {', '.join(_FUSED)}", got=name)
    count, function = _FUSED[name]
    return function(x, *parameters[:count]).astype(x.dtype)
