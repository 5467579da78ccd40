"""Annotations of JAX that stand in the module of an exported function, as parameters of equations.

Output: for each operation that has some, their values by the names of JAX's parameters.
Source: jax 0.10, which writes metadata and machines as frontend attributes of operations.
Limits: memory kinds, which modules for CPUs have of results alone, and unrolled loops are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax import lax

from ipujax.lowering.jax_compat import mlir, stablehlo
from ipujax.lowering.stablehlo.numerics import algorithm_name
from ipujax.lowering.stablehlo.translation import dtype_of, module_of

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

Annotations = tuple[dict[str, Any], list[Any]]  # values by parameter, and dtypes of the operands of a product


def module_annotations(exported: Any) -> list[Annotations]:
    """Annotations of each operation of an exported function that has some.

    Args:
        exported: a `jax.export.Exported`.

    Returns:
        values by parameter: `accuracy`, `precision` as the name of an algorithm, `compute_type` and `xla_metadata_kvs`;
        and the dtypes of the operands of a product.
    """
    found: list[Annotations] = []

    def look(op: Any) -> Any:
        values = dict(_values(op))
        if values:
            found.append((values, [dtype_of(x.type) for x in op.operands] if "precision" in values else []))
        return ir.WalkResult.ADVANCE

    module = module_of(exported.mlir_module_serialized)
    with module.context:
        module.operation.walk(look)
    return found


def _values(op: Any) -> Iterator[tuple[str, Any]]:
    if _ACCURACY in op.attributes:
        yield "accuracy", _accuracy(stablehlo.ResultAccuracyAttr(op.attributes[_ACCURACY]))
    if _ALGORITHM in op.attributes and op.name.startswith("stablehlo.dot"):
        yield "precision", algorithm_name(stablehlo.DotAlgorithm(op.attributes[_ALGORITHM]))
    if _FRONTEND in op.attributes:
        frontend: Any = ir.DictAttr(op.attributes[_FRONTEND])
        yield from _of_frontend({x.name: ir.StringAttr(x.attr).value for x in frontend})


def _accuracy(attribute: Any) -> Any:
    """Accuracy as JAX has it."""
    mode = str(attribute.mode)
    if mode in lax.AccuracyMode.__members__:
        return lax.AccuracyMode[mode]
    return lax.Tolerance(attribute.atol, attribute.rtol, attribute.ulps)


def _of_frontend(attributes: dict[str, str]) -> Iterator[tuple[str, Any]]:
    if _MACHINE in attributes:
        yield "compute_type", _COMPUTE_TYPES.get(attributes[_MACHINE], attributes[_MACHINE])
    if _STREAM in attributes:
        yield "compute_type", f"gpu_stream:{attributes[_STREAM]}"
    metadata = {k: v for k, v in attributes.items() if k not in _OF_JAX and not k.startswith(_OF_MESHES)}
    if metadata:
        yield "xla_metadata_kvs", metadata
