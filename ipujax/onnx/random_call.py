"""One call of a model on random data, for the commands `ipujax profile` and `ipujax report`.

Input: a file, and texts of the options `--shape` and `--static`. Output: the profile of the call.
Limits: sizes that the file leaves open are 1, integers are 0 or 1, unless the options say otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import ipujax as ipu
from ipujax.onnx.sessions import session

_OPEN_SIZE = 1


def random_call_profile(path: str, shapes: Sequence[str], static: Sequence[str]) -> ipu.Profile:
    """Return the profile of one call of an ONNX model on random data.

    Args:
        path: of the file.
        shapes: shapes of inputs, each as "images=8,3,224,224".
        static: values of inputs that decide a shape or a branch, each as "rate=16000".

    Raises:
        ArgumentError: a text of another form, an input whose shape is unknown, or as `ipujax.onnx.load`.
    """
    input_shapes = {name: tuple(map(int, sizes)) for name, sizes in _options("shape", shapes, int).items()}
    values = {name: _scalar_or_list(numbers) for name, numbers in _options("static", static, float).items()}
    model = session(path, input_shapes=input_shapes, static=values)
    inputs = [_random(info, n) for n, info in enumerate(model.inputs)]
    open_sizes = [f"{info.name}: {x.shape}" for info, x in zip(model.inputs, inputs, strict=True) if _is_open(info)]
    if open_sizes:
        text = f"open sizes are {_OPEN_SIZE}, --shape NAME=SIZES sets them: {', '.join(open_sizes)}"
        print(text, file=sys.stderr)
    return model.profile_call(*inputs)[1]


def _options(option: str, texts: Sequence[str], kind: type) -> Mapping[str, list[Any]]:
    return dict(_option(option, text, kind) for text in texts)


def _option(option: str, text: str, kind: type) -> tuple[str, list[Any]]:
    """Return the name of an input and the values of `NAME=VALUE,VALUE,…`."""
    name, equals, values = text.rpartition("=")
    try:
        if not equals:
            raise ValueError("no =")
        return name, [kind(value) for value in values.split(",") if value]
    except ValueError as error:
        expected = f"--{option} NAME=N,N,…"
        raise ipu.ArgumentError(f"--{option} must name an input and numbers", expected=expected, got=text) from error


def _scalar_or_list(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _is_open(info: Any) -> bool:
    return info.shape is None or not all(isinstance(dim, int) for dim in info.shape)


def _random(info: Any, seed: int) -> Any:
    """Return an array for an input: normal numbers, 0 and 1 for integers."""
    if info.kind != "tensor" or info.shape is None:
        hint = f"declare it: --shape {info.name}=…"
        raise ipu.ArgumentError(f"the shape of input {info.name!r} is unknown", got=str(info), hint=hint)
    shape = tuple(dim if isinstance(dim, int) else _OPEN_SIZE for dim in info.shape)
    draw = np.random.default_rng(seed)
    is_floating = jnp.issubdtype(info.dtype, jnp.floating)
    return (draw.standard_normal(shape) if is_floating else draw.integers(0, 2, shape)).astype(info.dtype)
