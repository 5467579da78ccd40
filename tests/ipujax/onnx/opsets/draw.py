"""A random node: operands, attributes, and the model of it.

An attribute that became an operand is written as the opset has it (`Draw.moved`). Operands that decide shapes are
initialisers, all others inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tests.ipujax.onnx.models import info, model_of


@dataclass
class Draw:
    """A node that is being drawn.

    Args:
        rng: source of the numbers.
        opset: of the model.
        op_type: of the node.
    """

    rng: np.random.Generator
    opset: int
    op_type: str
    names: list[str] = field(default_factory=list)
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1

    def integer(self, low: int, high: int) -> int:
        """Return a whole number, both ends included."""
        return int(self.rng.integers(low, high + 1))

    def often(self, probability: float = 0.5) -> bool:
        """Return True with a probability."""
        return bool(self.rng.random() < probability)

    def one_of(self, values: Sequence[Any]) -> Any:
        """Return one of some values."""
        return values[self.integer(0, len(values) - 1)]

    def shape(self, low: int = 1, high: int = 4, size: int = 5) -> tuple[int, ...]:
        """Return a shape of a rank between two."""
        return tuple(self.integer(1, size) for _ in range(self.integer(low, high)))

    def normal(self, *shape: int) -> np.ndarray:
        """Return normal numbers in single precision."""
        return self.rng.standard_normal(shape).astype(np.float32)

    def whole(self, low: int, high: int, *shape: int, dtype: type = np.int64) -> np.ndarray:
        """Return whole numbers, both ends included."""
        return self.rng.integers(low, high + 1, shape).astype(dtype)

    def axis(self, rank: int, since: int = 11) -> int:
        """Return an axis; negative ones are allowed from an opset on."""
        return self.integer(-rank if self.opset >= since else 0, rank - 1)

    def axes(self, rank: int, since: int = 11) -> list[int]:
        """Return some axes in order."""
        chosen = sorted(self.rng.permutation(rank)[: self.integer(1, rank)].tolist())
        return [axis - rank if self.opset >= since and self.often(0.3) else axis for axis in chosen]

    def operand(self, array: np.ndarray | None, *, constant: bool = False) -> np.ndarray | None:
        """Add an operand; None is one that is left out."""
        name = f"{'c' if constant else 'x'}{len(self.names)}" if array is not None else ""
        self.names.append(name)
        if array is not None:
            (self.constants if constant else self.inputs)[name] = array
        return array

    def sometimes(self, **attributes: Any) -> None:
        """Write each attribute, or leave it at its default."""
        self.attributes.update({name: value for name, value in attributes.items() if self.often(0.7)})

    def since(self, opset: int, **attributes: Any) -> None:
        """Write each attribute, or not, if the opset has it."""
        if self.opset >= opset:
            self.sometimes(**attributes)

    def before(self, opset: int, **attributes: Any) -> None:
        """Write each attribute, or not, if the opset still has it."""
        if self.opset < opset:
            self.sometimes(**attributes)

    def moved(self, name: str, values: Any, opset: int, dtype: type = np.int64, *, constant: bool = True) -> None:
        """Write an attribute that is an operand from an opset on."""
        if self.opset < opset:
            self.attributes[name] = values
        else:
            self.operand(np.asarray(values, dtype), constant=constant)

    def model(self) -> onnx.ModelProto:
        """Return the model of this node."""
        outputs = [f"y{n}" for n in range(self.outputs)]
        node = helper.make_node(self.op_type, self.names, outputs, "drawn", **self.attributes)
        inputs = [info(name, array.dtype, array.shape) for name, array in self.inputs.items()]
        results = [onnx.ValueInfoProto(name=name) for name in outputs]
        model = model_of([node], inputs, results, self.constants, opset=self.opset)
        model.ir_version = 3 if self.opset < 9 else 8 if self.opset < 21 else 10
        if model.ir_version == 3:  # initialisers are inputs too
            model.graph.input.extend(info(name, x.dtype, x.shape) for name, x in self.constants.items())
        inferred = onnx.shape_inference.infer_shapes(model).graph.output
        for value, result in zip(model.graph.output, inferred, strict=True):
            known = result.type.tensor_type.elem_type
            first = next(iter(self.inputs.values()))
            value.type.tensor_type.elem_type = known or helper.np_dtype_to_tensor_dtype(first.dtype)
        return model


Generator = Callable[[Draw], None]
