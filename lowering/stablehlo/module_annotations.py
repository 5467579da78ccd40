"""Annotations of JAX that stand in the module of an exported function, as parameters of equations.

A program is warned of annotations that have no effect on an IPU: accuracies, algorithms of products, machines and
metadata. Equations have them as parameters; a function that was exported has only its module.

Input: an exported function. Output: for each operation that has some, their values by the names of JAX's parameters.
Source: jax 0.10, which writes metadata and machines as frontend attributes of operations.
Limits: memory kinds, which modules for CPUs have of results alone, and unrolled loops are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax import lax

from ipujax.lowering.jax_compat import mlir, stablehlo
from ipujax.lowering.stablehlo.numerics import algorithm_name
from ipujax.lowering.stablehlo.translation import Operation, dtype_of, module_of

ir = mlir.ir
_FRONTEND = "mhlo.frontend_attributes"
_ACCURACY = "result_accuracy"
_ALGORITHM = "algorithm"
_MACHINE = "_xla_compute_type"
_STREAM = "_xla_stream_annotation"
_COMPUTE_TYPES = {"host": "device_host", "sparseoffload": "tpu_sparsecore", "dense": "device"}  # names of JAX
# Written by JAX itself; placements are in branches for other platforms.
_OF_JAX = (_MACHINE, _STREAM, "_xla_buffer_placement", "inlineable", "num_batch_dims")
_OF_MESHES = "xla.sdy."


class Annotations(NamedTuple):
    """Annotations of an operation.

    Args:
        values: by parameter: `accuracy`, `precision` as the name of an algorithm, `compute_type`, `xla_metadata_kvs`.
        operand_dtypes: of a product with a `precision`, the dtypes of its operands; empty for other operations.
    """

    values: dict[str, Any]
    operand_dtypes: list[Any]


def module_annotations(exported: Any) -> list[Annotations]:
    """Annotations (parameters that the machine reads, as precision) of the operations of an exported function.

    In the order of the module, of operations inside of another first; operations without annotations are left out.

    Args:
        exported: a `jax.export.Exported`.
    """
    annotations: list[Annotations] = []

    def note_annotations(op: Operation) -> Any:
        values = dict(_parameter_values(op))
        if values:
            dtypes = [dtype_of(x.type) for x in op.operands] if "precision" in values else []
            annotations.append(Annotations(values, dtypes))
        return ir.WalkResult.ADVANCE

    module = module_of(exported.mlir_module_serialized)
    with module.context:
        module.operation.walk(note_annotations)
    return annotations


def _parameter_values(op: Operation) -> Iterator[tuple[str, Any]]:
    """Parameters of JAX that the attributes of an operation stand for, with their values."""
    if _ACCURACY in op.attributes:
        yield "accuracy", _accuracy(stablehlo.ResultAccuracyAttr(op.attributes[_ACCURACY]))
    if _ALGORITHM in op.attributes and op.name.startswith("stablehlo.dot"):
        yield "precision", algorithm_name(stablehlo.DotAlgorithm(op.attributes[_ALGORITHM]))
    if _FRONTEND in op.attributes:
        frontend: Any = ir.DictAttr(op.attributes[_FRONTEND])
        yield from _values_of_frontend({x.name: ir.StringAttr(x.attr).value for x in frontend})


def _accuracy(attribute: Any) -> Any:
    """Accuracy as JAX has it."""
    mode = str(attribute.mode)
    if mode in lax.AccuracyMode.__members__:
        return lax.AccuracyMode[mode]
    return lax.Tolerance(attribute.atol, attribute.rtol, attribute.ulps)


def _values_of_frontend(attributes: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Parameters that frontend attributes stand for; those that are not JAX's own are the user's metadata."""
    if _MACHINE in attributes:
        yield "compute_type", _COMPUTE_TYPES.get(attributes[_MACHINE], attributes[_MACHINE])
    if _STREAM in attributes:
        yield "compute_type", f"gpu_stream:{attributes[_STREAM]}"
    metadata = {k: v for k, v in attributes.items() if k not in _OF_JAX and not k.startswith(_OF_MESHES)}
    if metadata:
        yield "xla_metadata_kvs", metadata
