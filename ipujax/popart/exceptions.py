"""Errors of PopART's names; all are `ipu.IpuError`s, with the failure, its place, the expected value and a hint.

Source: names of the exceptions as PopART's Python module has them.
Failures of reading and evaluating ONNX models are such errors too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ipujax as ipu
from ipujax.front_end import nearest
from ipujax.onnx import OnnxError
from ipujax.onnx.front_end import onnx_step


class popart_exception(ipu.IpuError):
    """Base of all errors of `ipujax.popart`; `args[0]` is the message alone, as PopART's programs compare it."""

    def __init__(self, what: str, **facts: Any) -> None:
        super().__init__(what, **facts)
        self._text = super().__str__()
        self.args = (what,)

    def __str__(self) -> str:
        return self._text


class popart_internal_exception(popart_exception):
    """Never raised here; PopART programs name it in `except`."""


class poplar_exception(popart_exception):
    """A failure of the device, or a report that it does not have."""


class poplar_runtime_error(poplar_exception, RuntimeError):
    """A program that an operation aborted."""


class poplibs_exception(popart_exception):
    """Never raised here; PopART programs name it in `except`."""


class popart_runtime_error(popart_exception, RuntimeError):
    """A call at the wrong time, or an opset that a builder does not have."""


class popart_type_error(popart_exception, TypeError):
    """Arguments that do not fit a signature, where PopART's bindings raise a `TypeError`."""


class popart_attribute_error(popart_exception, AttributeError):
    """A method or an option that does not exist; `hasattr` is false."""


class OutOfMemoryException(popart_exception):
    """A session that does not fit the tiles of its device."""

    def getSummaryReport(self) -> str:
        """Return the text of the error: bytes needed, bytes that a tile has, and ways to make the session fit."""
        return str(self)

    def getProfilePath(self) -> str:
        """Return the empty string: a program that does not fit has no saved profile."""
        return ""


def unknown_name(
    place: str, name: object, candidates: Iterable[str], kind: type[popart_exception] = popart_exception
) -> popart_exception:
    """Return the error for an unknown name, with the nearest known one.

    Args:
        place: beginning of the sentence that the name ends: "DataFlow anchors a tensor".
        name: the unknown name.
        candidates: all names that fit.
        kind: class of the error.
    """
    # Eight names are enough to see the pattern; a model may have thousands of tensors.
    names = sorted(candidates)
    listed = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return kind(f"{place} that does not exist: {name!r}", expected=listed or "no name", hint=nearest(str(name), names))


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
