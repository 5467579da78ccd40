"""ONNX files in the place of scripts and saved profiles: the door of the commands to `ipujax.onnx`.

Input: a file, `--shape` and `--static`. Output: the profile of one call of the model, see `ipujax.onnx.model`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ipujax.runtime.errors import ArgumentError

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile

_SUFFIX = ".onnx"


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
        from ipujax.onnx.random_call import random_call_profile
    except ImportError as error:
        raise ArgumentError(f"{path} cannot be read", got=str(error), hint="pip install 'ipujax[onnx]'") from error
    return random_call_profile(path, args.shape, args.static)
