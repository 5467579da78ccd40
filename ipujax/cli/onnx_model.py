"""ONNX files in the place of scripts and saved profiles.

Input: a file, `--shape` and `--static`. Output: the profile of one call of the model on random data.
Limits: sizes that the file leaves open are 1, integers are 0 or 1, unless the arguments say otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from ipujax.jit import jit
from ipujax.runtime.errors import ArgumentError

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile

_SUFFIX = ".onnx"
_OPEN_SIZE = 1


def add_onnx_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ONNX files."""
    help_shape = "shape of an input of an ONNX model, as images=8,3,224,224; sizes that the file leaves open are 1"
    help_static = "value of an input of an ONNX model that decides a shape or a branch, as rate=16000"
    parser.add_argument("--shape", metavar="NAME=SIZES", action="append", default=[], help=help_shape)
    parser.add_argument("--static", metavar="NAME=VALUES", action="append", default=[], help=help_static)


def is_onnx_file(path: str | None) -> bool:
    """Return whether a file is an ONNX model, by the end of its name."""
    return path is not None and path.endswith(_SUFFIX)


def check_no_onnx_arguments(args: argparse.Namespace) -> None:
    """Refuse options of ONNX files where the profiled file is none."""
    for option in ("shape", "static"):
        if getattr(args, option):
            raise ArgumentError(f"--{option} is for ONNX models", expected=f"a file that ends with {_SUFFIX}")


def onnx_profile(path: str, args: argparse.Namespace) -> Profile:
    """Return the profile of one call of an ONNX model on random data."""
    try:
        import ipujax.onnx as ipujax_onnx
    except ImportError as error:
        raise ArgumentError(f"{path} cannot be read", got=str(error), hint="pip install 'ipujax[onnx]'") from error
    shapes = {name: tuple(map(int, sizes)) for name, sizes in _options("shape", args.shape, int).items()}
    static = {name: _scalar_or_list(values) for name, values in _options("static", args.static, float).items()}
    model = ipujax_onnx.load(path, input_shapes=shapes, static=static)
    model.__name__ = Path(path).stem
    inputs = [_random(info, n) for n, info in enumerate(model.inputs)]
    open_sizes = [f"{info.name}: {x.shape}" for info, x in zip(model.inputs, inputs, strict=True) if _is_open(info)]
    if open_sizes:
        text = f"open sizes are {_OPEN_SIZE}, --shape NAME=SIZES sets them: {', '.join(open_sizes)}"
        print(text, file=sys.stderr)
    _, profile = jit(model).lower(model.params, *inputs).compile().profile_call(model.params, *inputs)
    return profile


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
        raise ArgumentError(f"--{option} must name an input and numbers", expected=expected, got=text) from error


def _scalar_or_list(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _is_open(info: Any) -> bool:
    return info.shape is None or not all(isinstance(dim, int) for dim in info.shape)


def _random(info: Any, seed: int) -> Any:
    """Return an array for an input: normal numbers, 0 and 1 for integers."""
    if info.kind != "tensor" or info.shape is None:
        hint = f"declare it: --shape {info.name}=…"
        raise ArgumentError(f"the shape of input {info.name!r} is unknown", got=str(info), hint=hint)
    shape = tuple(dim if isinstance(dim, int) else _OPEN_SIZE for dim in info.shape)
    draw = np.random.default_rng(seed)
    is_floating = jnp.issubdtype(info.dtype, jnp.floating)
    return (draw.standard_normal(shape) if is_floating else draw.integers(0, 2, shape)).astype(info.dtype)
