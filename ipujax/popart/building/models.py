"""Models as sessions and builders take them: serialised, as a protobuf, or in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from ipujax.popart.exceptions import popart_exception


def read_model(model: Any) -> onnx.ModelProto:
    """Return a model as a protobuf of its own.

    Args:
        model: serialised, as `onnx.ModelProto`, or the name of a file.

    Raises:
        popart_exception: no model, or no such file.
    """
    if isinstance(model, onnx.ModelProto):
        copied = onnx.ModelProto()
        copied.CopyFrom(model)
        return copied
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        if not path.is_file():
            raise popart_exception("there is no model file of this name", got=str(path))
        return onnx.load(path)
    try:
        return onnx.load_model_from_string(bytes(model))
    except (DecodeError, TypeError, ValueError) as error:
        raise popart_exception("this is no ONNX model", expected="builder.getModelProto() or a file") from error
