"""Calls of the package onnx. Its errors, of a dozen classes, become `OnnxModelError`s that name the step of reading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx.checker
import onnx.inliner
import onnx.shape_inference

import ipujax as ipu
from ipujax.onnx.onnx_errors import OnnxModelError

_EXPORT_AGAIN = "export the model again; onnx.checker.check_model(model, full_check=True) looks at more of it"


@contextmanager
def onnx_step(failure: str, hint: str = _EXPORT_AGAIN) -> Iterator[None]:
    """Turn the errors of onnx or protobuf in a block into an `OnnxModelError`; `failure` names the step that fails."""
    try:
        yield
    except ipu.IpuError:
        raise
    # C++ exceptions arrive as bare RuntimeError, IndexError and MemoryError, Python ones as any class.
    except Exception as error:
        text = str(error).strip()
        got = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise OnnxModelError(failure, got=got, hint=hint) from error


def run_checker(model: onnx.ModelProto) -> None:
    """Run onnx's checker; refuse a model with the checker's text."""
    with onnx_step("the model is not valid ONNX", "export the model again"):
        onnx.checker.check_model(model)


def with_inferred_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with the types and shapes that onnx infers.

    Values of shapes are not followed (`data_prop`): onnx would list every element of vectors of 10^18.
    """
    with onnx_step("onnx cannot infer the types and shapes of the model"):
        return onnx.shape_inference.infer_shapes(model)


def with_inlined_functions(model: onnx.ModelProto, convert_version: bool = False) -> onnx.ModelProto:
    """Return a model whose own functions are inlined.

    With `convert_version` functions of another opset are brought to that of the model. onnx is asked for it only where
    there are such: it needs the types of all results of calls, which it cannot infer for functions that call others.
    """
    of_model = {entry.domain: entry.version for entry in model.opset_import}
    imports = (entry for function in model.functions for entry in function.opset_import)
    differs = any(of_model.get(entry.domain, entry.version) != entry.version for entry in imports)
    with onnx_step("onnx cannot inline the functions of the model"):
        return onnx.inliner.inline_local_functions(model, convert_version=convert_version and differs)
