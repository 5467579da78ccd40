"""Fourier transforms, windows, and weights of mel filters. Complex numbers are a last axis of two."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.onnx.budget import check_table
from ipujax.onnx.element_types import FLOAT, canonical, element_dtype
from ipujax.onnx.operators.operand_types import Array, Optional, Static, Value, axis_of, integers, numpy_for
from ipujax.onnx.registry import operator, register


@operator("DFT")
def fourier_transform(
    x: Array, dft_length: Static | None = None, axis: Static | None = None, *, inverse: int = 0, onesided: int = 0
) -> Array:
    """Discrete Fourier transform along a static axis, cut or padded to a static length, [N, …, 2]."""
    # The last axis is 2 if complex, 1 if real. One-sided: the first half of the frequencies, of the result or, for an
    # inverse, of the operand; then the result is real.
    along = axis_of(-2 if axis is None else integers(axis)[0], x.ndim)
    # Half of the frequencies of n real samples are n // 2 + 1: even n is assumed, as in NumPy.
    default = 2 * (x.shape[along] - 1) if inverse and onesided else x.shape[along]
    length = default if dft_length is None else integers(dft_length)[0]
    # with x64 in double: zeros of ONNX's cases are zero there, and 1e-6 in single precision
    wide = x.astype(canonical(np.float64))
    signal = wide[..., 0] if x.shape[-1] == 1 else lax.complex(wide[..., 0], wide[..., 1])
    if inverse and onesided:
        return jnp.fft.irfft(signal, length, along)[..., None].astype(x.dtype)
    result = (jnp.fft.ifft if inverse else jnp.fft.fft)(signal, length, along)
    half = lax.slice_in_dim(result, 0, length // 2 + 1, axis=along) if onesided else result
    return _parts(half).astype(x.dtype)


def _parts(x: Array) -> Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)


@operator("STFT")
def short_time_fourier_transform(
    signal: Value, frame_step: Static, window: Optional = None, frame_length: Static | None = None, *, onesided: int = 1
) -> Array:
    """Fourier transforms of overlapping frames, [N, frames, frequencies, 2]; step and length must be static."""
    x = jnp.asarray(signal)
    step = integers(frame_step)[0]
    if frame_length is not None:
        length = integers(frame_length)[0]
    else:
        length = x.shape[1] if window is None else window.shape[0]
    # Samples behind the last complete frame are not transformed.
    count = 1 + (x.shape[1] - length) // step
    xp = numpy_for(max(0, count) * max(0, length))
    frames = jnp.take(x, xp.arange(count)[:, None] * step + xp.arange(length), axis=1)
    weighted = frames if window is None else frames * jnp.asarray(window)[:, None]
    return fourier_transform(weighted, np.asarray(length), np.asarray(2), onesided=onesided)


# Coefficients of cosines of 0, 1, 2 times the angle.
WINDOWS = {
    "BlackmanWindow": (0.42, -0.5, 0.08),
    "HammingWindow": (25 / 46, -21 / 46),
    "HannWindow": (0.5, -0.5),
}


def _window(coefficients: tuple[float, ...]) -> object:
    def window(size: Static, *, output_datatype: int = FLOAT, periodic: int = 1) -> Value:
        """Window of a static size: a sum of cosines, over a period or from end to end."""
        count = integers(size)[0]
        xp = numpy_for(count)
        angle = 2 * math.pi * xp.arange(count) / (count if periodic else max(1, count - 1))
        values = sum(factor * xp.cos(order * angle) for order, factor in enumerate(coefficients))
        return xp.asarray(values).astype(element_dtype(output_datatype))

    return window


for _name, _coefficients in WINDOWS.items():
    register("", _name)(_window(_coefficients))  # type: ignore[type-var]


@operator("MelWeightMatrix")
def mel_weight_matrix(
    num_mel_bins: Static,
    dft_length: Static,
    sample_rate: Static,
    lower_edge_hertz: Static,
    upper_edge_hertz: Static,
    *,
    output_datatype: int = FLOAT,
) -> np.ndarray:
    """Static weights of triangular filters, equidistant in mel, [frequencies, filters]."""
    bins, length, rate = (integers(each)[0] for each in (num_mel_bins, dft_length, sample_rate))
    check_table(max(1, bins) * max(1, length // 2 + 1), "weights of mel filters")
    low, high = (
        # Hertz to mel: 2595 · log10(1 + f / 700), as the schema says.
        2595 * math.log10(1 + float(np.ravel(each)[0]) / 700)
        for each in (lower_edge_hertz, upper_edge_hertz)
    )
    mel = low + np.arange(bins + 2) * (high - low) / (bins + 2)
    edges = ((length + 1) * 700 * (10 ** (mel / 2595) - 1) // rate).astype(int)
    frequency = np.arange(length // 2 + 1)[:, None]
    rise_start = edges[:-2]
    centre = edges[1:-1]
    fall_end = edges[2:]
    rising = np.where(
        centre == rise_start, frequency == centre, (frequency - rise_start) / np.maximum(centre - rise_start, 1)
    )
    falling = (fall_end - frequency) / np.maximum(fall_end - centre, 1)
    up = (frequency >= rise_start) & (frequency <= centre)
    down = (frequency >= centre) & (frequency < fall_end)
    weights = np.where(down, falling, np.where(up, rising, 0))
    return weights.astype(element_dtype(output_datatype))
