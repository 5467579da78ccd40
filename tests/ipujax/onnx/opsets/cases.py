"""Random nodes of any opset: for each operator whose form or meaning changed, a function that draws a valid node."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from tests.ipujax.onnx.opsets import elementwise, layers, shapes, windows
from tests.ipujax.onnx.opsets.draw import Draw, Generator

# Operator → function that draws a node of it.
GENERATORS: Mapping[str, Generator] = {
    **elementwise.GENERATORS,
    **layers.GENERATORS,
    **shapes.GENERATORS,
    **windows.GENERATORS,
}


def opsets_of(op_type: str) -> list[int]:
    """Return the opsets in which an operator has a schema: first to the one before its removal."""
    schemas = [s for s in onnx.defs.get_all_schemas_with_history() if s.name == op_type and not s.domain]
    first = min(schema.since_version for schema in schemas)
    gone = [s.since_version for s in schemas if s.deprecated and op_type in ("Scatter", "Upsample")]
    return list(range(first, min(gone, default=onnx.defs.onnx_opset_version() + 1)))


def draw(op_type: str, opset: int, seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return a model of one random node, and its inputs."""
    drawn = Draw(np.random.default_rng([seed, opset, *op_type.encode()]), opset, op_type)
    GENERATORS[op_type](drawn)
    return drawn.model(), drawn.inputs
