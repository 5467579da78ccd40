"""Failures of reading and evaluating ONNX models, as errors of PopART's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ipujax.onnx import OnnxError
from ipujax.onnx.front_end import onnx_step
from ipujax.popart.exceptions import popart_exception


@contextmanager
def as_popart_exception() -> Iterator[None]:
    """Raise the `OnnxError`s of a block as `popart_exception`s of the same text."""
    try:
        yield
    except OnnxError as error:
        raise popart_exception(error.what, expected=error.expected, got=error.got, hint=error.hint) from error


@contextmanager
def popart_step(failure: str) -> Iterator[None]:
    """Raise what the package onnx raises in a block as a `popart_exception`; `failure` names the step that fails."""
    with as_popart_exception(), onnx_step(failure):
        yield
