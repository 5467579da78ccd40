"""Losses of earlier releases of PopART, as objects: `popart.NllLoss(probabilities, labels, name)`.

They become operators of ai.graphcore at the end of the model; several are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from ipujax.popart.building import DOMAIN, read_model
from ipujax.popart.building.annotations import VIRTUAL_GRAPH
from ipujax.popart.enumerations import ReductionType


@dataclass
class Loss:
    """A loss.

    Args:
        inputs: names of its operands.
        name: name of its value.
        reduction: over its elements.
    """

    inputs: tuple[str, ...]
    name: str
    reduction: ReductionType
    ipu: int | None = None

    op_type = ""

    def output(self, index: int = 0) -> str:
        """Return the name of its value."""
        return self.name

    def input(self, index: int) -> str:
        """Return the name of an operand."""
        return self.inputs[index]

    def virtualGraph(self, value: int) -> Loss:
        """Assign the loss to an IPU; return it."""
        self.ipu = value
        return self

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of its operator."""
        return {"reduction": int(self.reduction)}


class NllLoss(Loss):
    """Negative logarithm of the probabilities of labels.

    Args:
        probabilities: name of a tensor [..., classes].
        labels: name of a tensor of whole numbers.
        output: name of the loss.
        reduction: over the labels.
    """

    op_type = "Nll"

    def __init__(
        self, probabilities: str, labels: str, output: str, reduction: ReductionType = ReductionType.Sum
    ) -> None:
        super().__init__((probabilities, labels), output, reduction)


class L1Loss(Loss):
    """Sum of absolute values, times a factor.

    Args:
        tensor: name of a tensor.
        output: name of the loss.
        scale: factor.
        reduction: over the elements.
    """

    op_type = "L1"

    def __init__(self, tensor: str, output: str, scale: float, reduction: ReductionType = ReductionType.Sum) -> None:
        super().__init__((tensor,), output, reduction)
        self._scale = scale

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of its operator."""
        return {**super().attributes(), "lambda": float(self._scale)}


class IdentityLoss(Loss):
    """A tensor that is a loss itself.

    Args:
        tensor: name of a tensor.
        output: name of the loss.
        reduction: over the elements.
    """

    op_type = "IdentityLoss"

    def __init__(self, tensor: str, output: str, reduction: ReductionType = ReductionType.Sum) -> None:
        super().__init__((tensor,), output, reduction)


def with_losses(model: Any, losses: Sequence[Loss]) -> tuple[onnx.ModelProto, str]:
    """Return a model with losses at its end, and the name of their sum.

    Args:
        model: serialised, a protobuf, or the name of a file.
        losses: none leave the model as it is.
    """
    read = read_model(model)
    graph = read.graph
    for loss in losses:
        attributes = loss.attributes() | ({} if loss.ipu is None else {VIRTUAL_GRAPH: loss.ipu})
        node = onnx.helper.make_node(
            loss.op_type, list(loss.inputs), [loss.name], loss.name, domain=DOMAIN, **attributes
        )
        graph.node.append(node)
    # One loss keeps its name, by which programs anchor it; a sum gets a name of its own.
    if len(losses) < 2:
        return read, losses[0].name if losses else ""
    names = [loss.name for loss in losses]
    total = "/".join(names)
    graph.node.append(onnx.helper.make_node("Sum", names, [total], total))
    return read, total
