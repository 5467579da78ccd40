"""Operators of ai.graphcore on each element."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.popart.operators.domain import graphcore


@graphcore("Scale")
def scale(x: jax.Array, *, scale: float) -> jax.Array:
    """Return scale · x."""
    return (x * scale).astype(x.dtype)


@graphcore("ScaledAdd")
def scaled_add(
    x: jax.Array, y: jax.Array, a: Any = None, b: Any = None, *, scale0: float = 1.0, scale1: float = 1.0
) -> jax.Array:
    """Return a·x + b·y; the factors are attributes where they are not operands."""
    first = scale0 if a is None else jnp.reshape(a, ())
    second = scale1 if b is None else jnp.reshape(b, ())
    return (first * x + second * y).astype(x.dtype)


@graphcore("Square")
def square(x: jax.Array) -> jax.Array:
    """Return x²."""
    return jnp.square(x)


@graphcore("Gelu")
def gelu(x: jax.Array) -> jax.Array:
    """Return GELU by its tanh form, as PopLibs computes it."""
    return jax.nn.gelu(x, approximate=True)


@graphcore("GeluErf")
def gelu_erf(x: jax.Array) -> jax.Array:
    """Return GELU by the error function."""
    return jax.nn.gelu(x, approximate=False)


@graphcore("Swish")
def swish(x: jax.Array) -> jax.Array:
    """Return x · sigmoid(x)."""
    return jax.nn.silu(x)


@graphcore("Expm1")
def expm1(x: jax.Array) -> jax.Array:
    """Return exp(x) − 1."""
    return jnp.expm1(x)


@graphcore("Log1p")
def log1p(x: jax.Array) -> jax.Array:
    """Return log(1 + x)."""
    return jnp.log1p(x)


@graphcore("Atan2")
def atan2(y: jax.Array, x: jax.Array) -> jax.Array:
    """Return the angle of (x, y)."""
    return jnp.arctan2(y, x)


@graphcore("Fmod")
def fmod(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the remainder with the sign of x."""
    return jnp.fmod(x, y)


@graphcore("Remainder")
def remainder(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the remainder with the sign of y."""
    return jnp.remainder(x, y)


@graphcore("IncrementMod")
def increment_mod(x: jax.Array, *, increment: float, modulus: float) -> jax.Array:
    """Return the remainder of x + increment, with its sign, as C's `fmod` has it."""
    return jnp.fmod(x + np.asarray(increment, x.dtype), np.asarray(modulus, x.dtype))


@graphcore("Round")
@graphcore("NearbyInt")
def round_half_to_even(x: jax.Array) -> jax.Array:
    """Return the nearest whole number, halves to even ones."""
    return jnp.round(x)


@graphcore("BitwiseAnd")
def bitwise_and(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return x AND y of each bit."""
    return jnp.bitwise_and(x, y)


@graphcore("BitwiseOr")
def bitwise_or(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return x OR y of each bit."""
    return jnp.bitwise_or(x, y)


@graphcore("BitwiseXor")
def bitwise_xor(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return x XOR y of each bit."""
    return jnp.bitwise_xor(x, y)


@graphcore("BitwiseXnor")
def bitwise_xnor(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return NOT (x XOR y) of each bit."""
    return jnp.bitwise_not(jnp.bitwise_xor(x, y))


@graphcore("BitwiseNot")
def bitwise_not(x: jax.Array) -> jax.Array:
    """Return NOT x of each bit."""
    return jnp.bitwise_not(x)


@graphcore("Detach")
def detach(x: jax.Array) -> jax.Array:
    """Return x, through which no gradient goes."""
    return jax.lax.stop_gradient(x)


@graphcore("Nop")
def nop(x: jax.Array) -> jax.Array:
    """Return x."""
    return x


@graphcore("NormalizeImage")
def normalize_image(image: jax.Array, offsets: jax.Array, scales: jax.Array, *, scale: float = 1.0) -> jax.Array:
    """Return (scale·image − offsets)·scales, with a channel of zeros behind the three of an image."""
    wide = image.astype(offsets.dtype)
    normal = (wide * np.asarray(scale, offsets.dtype) - offsets) * scales
    channels = 4
    padding = [(0, 0)] * (image.ndim - 1) + [(0, channels - image.shape[-1])]
    return jnp.pad(normal, padding)
