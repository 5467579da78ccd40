"""Nodes of early opsets as nodes of the newest, in a model and its subgraphs.

`REWRITES` has a row for each change of an operator's form or meaning with an opset: a node of an opset before the row's
is rewritten. Changes that only allow more (broadcasting, negative axes, element types, attributes with the earlier
meaning as default) need no row.

onnx's own converter is not used: it takes nodes of early opsets over whose meaning is another one today (Hardmax,
Resize, Pad, PRelu), and stops at others (Scan, If, Loop, arithmetic with an axis).
Source: ONNX, docs/Changelog.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ipujax.onnx.onnx_errors import OnnxModelError
from ipujax.onnx.reading.onnx_protos import (
    STANDARD_DOMAINS,
    all_nodes,
    graphs_of,
    is_standard,
    marked_domain,
    opset_of,
    replace_nodes,
)
from ipujax.onnx.registry import EARLY_DOMAIN, MICROSOFT_DOMAIN

Nodes = list[onnx.NodeProto]


def left_out(*names: str) -> dict[str, Any]:
    """Return the changes that leave attributes out."""
    return dict.fromkeys(names)


@dataclass(frozen=True, slots=True)
class OldNode:
    """A node to be rewritten.

    Args:
        proto: the node.
        name: its name or number in the graph, for errors.
    """

    proto: onnx.NodeProto
    name: str

    @property
    def attributes(self) -> dict[str, Any]:
        """Values of the attributes, by name."""
        return {each.name: helper.get_attribute_value(each) for each in self.proto.attribute}

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""
        return list(self.proto.input)

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return list(self.proto.output)

    def value(self, role: str) -> str:
        """Return a name for a new value; names of outputs are unique in their graph, so those made of them are too."""
        return f"{next(filter(None, self.outputs))}·{role}"

    def changed(self, inputs: Sequence[str] | None = None, *, domain: str = "", **attributes: Any) -> onnx.NodeProto:
        """Return the node with other inputs, domain and attributes; None leaves an attribute out."""
        operands = self.inputs if inputs is None else inputs
        new = helper.make_node(self.proto.op_type, operands, self.outputs, self.proto.name, domain=domain)
        new.attribute.extend(each for each in self.proto.attribute if each.name not in attributes)
        added = {name: value for name, value in attributes.items() if value is not None}
        new.attribute.extend(helper.make_attribute(name, value) for name, value in added.items())
        return new

    def with_defaults(self, *dropped: str, domain: str = "", **defaults: Any) -> onnx.NodeProto:
        """Return the node without some attributes, and with others where it leaves them at a default that changed."""
        names = {each.name for each in self.proto.attribute}
        missing = {name: value for name, value in defaults.items() if name not in names}
        return self.changed(domain=domain, **missing, **left_out(*dropped))

    def refused(self, reason: str, expected: str, got: str) -> OnnxModelError:
        """Return the error of a node that the newest opset has no counterpart of."""
        return OnnxModelError(f"node {self.name!r} ({self.proto.op_type}) {reason}", expected=expected, got=got)


Rewrite = Callable[[OldNode], Nodes]


def constant(name: str, values: Any, dtype: type = np.int64) -> onnx.NodeProto:
    """Return a node of a constant."""
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(values, dtype), name))


def scalar_like(name: str, value: float, like: str) -> Nodes:
    """Return nodes of a scalar in the element type of another value."""
    single = constant(f"{name}·single", value, np.float32)
    return [single, helper.make_node("CastLike", [f"{name}·single", like], [name])]


def without(*names: str, **defaults: Any) -> Rewrite:
    """Leave attributes out, and write out the defaults that others had."""
    return lambda node: [node.with_defaults(*names, **defaults)]


def in_early_domain(**defaults: Any) -> Rewrite:
    """Keep the form of an operator that is evaluated as it was."""
    return lambda node: [node.with_defaults(domain=EARLY_DOMAIN, **defaults)]


def as_operands(*names: str, first: int = 1, dropped: Sequence[str] = (), **defaults: Any) -> Rewrite:
    """Make operands of attributes that are integers, from a position on."""

    def rewrite(node: OldNode) -> Nodes:
        values = {**defaults, **node.attributes}
        present = [name for name in names if name in values]
        constants = [constant(node.value(name), values[name]) for name in present]
        # Those that are left out in front of others keep their place.
        operands = [node.value(name) if name in present else "" for name in names[: _count_up_to(names, present)]]
        absent = [""] * (first - len(node.inputs) if operands else 0)
        return [*constants, node.changed([*node.inputs, *absent, *operands], **left_out(*names, *dropped))]

    return rewrite


def _count_up_to(names: Sequence[str], present: Sequence[str]) -> int:
    return 1 + names.index(present[-1]) if present else 0


def _broadcast(node: OldNode) -> Nodes:
    """Say where the second operand's dimensions go: `axis` of `broadcast=1`, else the last ones."""
    a, b = node.inputs
    changes = left_out("axis", "broadcast", "consumed_inputs")
    if not node.attributes.get("broadcast") or "axis" not in node.attributes:
        return [node.changed(**changes)]
    return [*_aligned(node, b, a, node.attributes["axis"]), node.changed([a, node.value("aligned")], **changes)]


def _aligned(node: OldNode, operand: str, x: str, axis: int, **attributes: Any) -> Nodes:
    names = [node.value("aligned")]
    return [helper.make_node("AlignedOperand", [operand, x], names, domain=EARLY_DOMAIN, axis=axis, **attributes)]


def _prelu(node: OldNode) -> Nodes:
    """Align a slope for each channel with the second dimension; today it would be one for each last index."""
    x, slope = node.inputs
    aligned = _aligned(node, slope, x, 1, vectors_only=1)
    return [*aligned, node.changed([x, node.value("aligned")], consumed_inputs=None)]


def _batch_normalization_by_element(node: OldNode) -> Nodes:
    """Normalise with statistics of each element, not of each channel, if `spatial` is 0."""
    if node.attributes.get("spatial", 1):
        return [node.changed(spatial=None)]
    if any(node.outputs[1:]):
        raise node.refused("trains with statistics of each element", "spatial=1, or one output", "spatial=0")
    x, scale, bias, mean, variance = node.inputs
    steps = [
        ("Sub", [x, mean], "centred"),
        ("Add", [variance, node.value("epsilon")], "shifted"),
        ("Sqrt", [node.value("shifted")], "deviation"),
        ("Div", [node.value("centred"), node.value("deviation")], "standard"),
        ("Mul", [node.value("standard"), scale], "scaled"),
    ]
    return [
        *scalar_like(node.value("epsilon"), node.attributes.get("epsilon", 1e-5), x),
        *(helper.make_node(op_type, operands, [node.value(result)]) for op_type, operands, result in steps),
        helper.make_node("Add", [node.value("scaled"), bias], node.outputs[:1], node.proto.name),
    ]


def _batch_normalization_by_outputs(node: OldNode) -> Nodes:
    """Say whether the node trains: before opset 14 it does if it has further outputs."""
    if any(node.outputs[3:]):
        raise node.refused("gives the statistics of a batch", "at most 3 outputs", f"{len(node.outputs)}")
    return [node.changed(training_mode=int(any(node.outputs[1:])))]


def _cast(node: OldNode) -> Nodes:
    return [node.changed(to=TensorProto.DataType.Value(node.attributes["to"].decode()))]


def _clip(node: OldNode) -> Nodes:
    """Make operands of the bounds, in the element type of the array; by default they are the largest float32."""
    (x,) = node.inputs
    bounds = {"min": -_LARGEST, "max": _LARGEST, **node.attributes}
    finite = [name for name in ("min", "max") if np.isfinite(bounds[name])]
    constants = [new for name in finite for new in scalar_like(node.value(name), bounds[name], x)]
    operands = [node.value(name) if name in finite else "" for name in ("min", "max")]
    return [*constants, node.changed([x, *operands], min=None, max=None)]


def _dropout(node: OldNode) -> Nodes:
    """Make an operand of the ratio: without an operand that says so, the node does not train."""
    ratio = constant(node.value("ratio"), node.attributes.get("ratio", 0.5), np.float32)
    return [ratio, node.changed([*node.inputs, node.value("ratio")], ratio=None)]


def _dropout_mask(node: OldNode) -> Nodes:
    """Give the mask in the element type of the array."""
    if len(node.outputs) < 2 or not node.outputs[1]:
        return [node.changed()]
    y, mask = node.outputs
    outputs = [y, node.value("mask")]
    main = helper.make_node("Dropout", node.inputs, outputs, node.proto.name, **node.attributes)
    return [main, helper.make_node("CastLike", [node.value("mask"), node.inputs[0]], [mask])]


def _pad(node: OldNode) -> Nodes:
    """Make operands of the amounts and, where the mode reads it, of the value."""
    (x,) = node.inputs
    changes = left_out("pads", "value")
    operands = [x, node.value("pads")]
    pads = constant(node.value("pads"), node.attributes["pads"])
    if node.attributes.get("mode", b"constant") != b"constant" or not node.attributes.get("value"):
        return [pads, node.changed(operands, **changes)]
    value = scalar_like(node.value("value"), node.attributes["value"], x)
    return [pads, *value, node.changed([*operands, node.value("value")], **changes)]


def _resize(node: OldNode) -> Nodes:
    """Resize by scales, with the positions of that time."""
    attributes = {name: value for name, value in node.attributes.items() if name == "mode"}
    return [helper.make_node("Resize", node.inputs, node.outputs, node.proto.name, domain=EARLY_DOMAIN, **attributes)]


def _scatter(node: OldNode) -> Nodes:
    attributes = {name: value for name, value in node.attributes.items() if name == "axis"}
    return [helper.make_node("ScatterElements", node.inputs, node.outputs, node.proto.name, **attributes)]


def _upsample_by_axes(node: OldNode) -> Nodes:
    """Make `scales` of the scales of the last two axes; "linear" was called "bilinear"."""
    scales = [1.0, 1.0, node.attributes["height_scale"], node.attributes["width_scale"]]
    mode = {b"bilinear": b"linear"}.get(node.attributes.get("mode", b"nearest"), node.attributes.get("mode"))
    return [node.changed(height_scale=None, width_scale=None, scales=scales, mode=mode)]


def _upsample_by_attribute(node: OldNode) -> Nodes:
    scales = constant(node.value("scales"), node.attributes["scales"], np.float32)
    return [scales, node.changed([*node.inputs, node.value("scales")], scales=None)]


def _tile(node: OldNode) -> Nodes:
    """Rewrite `Tile(x, tiles, axis)`: repeats are 1 but for one axis."""
    x, tiles, axis = node.inputs
    roles = ("unit", "shape", "rank", "ones", "axis", "tiles", "repeats", "whole_axis", "whole_tiles")
    unit, shape, rank, ones, index, update, repeats, whole_index, whole_update = map(node.value, roles)
    return [
        constant(unit, [1]),
        helper.make_node("Shape", [x], [shape]),
        helper.make_node("Shape", [shape], [rank]),
        helper.make_node("Expand", [unit, rank], [ones]),
        helper.make_node("Cast", [axis], [whole_index], to=TensorProto.INT64),
        helper.make_node("Reshape", [whole_index, unit], [index]),
        helper.make_node("Cast", [tiles], [whole_update], to=TensorProto.INT64),
        helper.make_node("Reshape", [whole_update, unit], [update]),
        helper.make_node("ScatterElements", [ones, index, update], [repeats]),
        node.changed([x, repeats]),
    ]


_FLATTENING = ("Hardmax", "LogSoftmax", "Softmax")
_ARITHMETIC = ("Add", "Div", "Mul", "Pow", "Sub")
_LOGIC = ("And", "Equal", "Greater", "Less", "Or", "Xor")
_REDUCTIONS = tuple(
    f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
)
_IN_PLACE = (
    *("Abs", "Ceil", "Elu", "Exp", "Floor", "HardSigmoid", "InstanceNormalization", "LeakyRelu", "Log", "Max", "Mean"),
    *("Min", "Neg", "Reciprocal", "Relu", "Sigmoid", "Sqrt", "Sum", "Tanh"),
)
_RECURRENT = ("GRU", "LSTM", "RNN")
_LARGEST = float(np.finfo(np.float32).max)

# Operator → (opset of the change, rewrite of nodes before it), earliest first.
REWRITES: Mapping[str, Sequence[tuple[int, Rewrite]]] = {
    **dict.fromkeys(_ARITHMETIC + _LOGIC, ((7, _broadcast),)),
    **dict.fromkeys(_FLATTENING, ((13, in_early_domain(axis=1)),)),
    **dict.fromkeys(_IN_PLACE, ((6, without("consumed_inputs")),)),
    **dict.fromkeys(_RECURRENT, ((7, without("output_sequence")),)),
    **dict.fromkeys(_REDUCTIONS, ((18, as_operands("axes")),)),
    "BatchNormalization": (
        (7, without("consumed_inputs", "is_test")),
        (9, _batch_normalization_by_element),
        (14, _batch_normalization_by_outputs),
    ),
    "Cast": ((6, _cast),),
    "Clip": ((6, without("consumed_inputs", min=-np.inf, max=np.inf)), (11, _clip)),
    "Concat": ((4, without(axis=1)),),
    "DFT": ((20, as_operands("axis", first=2, axis=1)),),
    "Dropout": ((7, without("consumed_inputs", "is_test")), (10, _dropout_mask), (12, _dropout)),
    "Gemm": ((7, without("broadcast")),),
    "GridSample": ((20, in_early_domain()),),
    "GroupNormalization": ((21, in_early_domain()),),
    "PRelu": ((7, _prelu),),
    "Pad": ((2, lambda node: [node.changed(paddings=None, pads=node.attributes["paddings"])]), (11, _pad)),
    "ReduceSum": ((13, as_operands("axes")),),
    "Reshape": ((5, as_operands("shape", dropped=("consumed_inputs",))),),
    "Resize": ((11, _resize),),
    "RoiAlign": ((16, without(coordinate_transformation_mode="output_half_pixel")),),
    "Scan": ((9, in_early_domain()),),
    "Scatter": ((11, _scatter),),
    "Selu": ((6, without("consumed_inputs", alpha=1.6732, gamma=1.0507)),),
    "Slice": ((10, as_operands("starts", "ends", "axes")),),
    "Split": ((13, as_operands("split")),),
    "Squeeze": ((13, as_operands("axes")),),
    "Tile": ((6, _tile),),
    "TopK": ((10, as_operands("k")),),
    "Unsqueeze": ((13, as_operands("axes")),),
    "Upsample": ((7, _upsample_by_axes), (9, _upsample_by_attribute), (10, _resize)),
}


# Operators that ONNX Runtime has among ONNX's own, and that ONNX lacks: they are read as those of its own domain.
# Source: ONNX Runtime, its schemas of the domain ai.onnx.
_UNOFFICIAL = frozenset({"Affine", "ImageScaler", "ParametricSoftplus", "ScaledTanh", "SimplifiedLayerNormalization"})


def adopt_unofficial(model: onnx.ModelProto) -> None:
    """Move the nodes of ONNX Runtime's own operators among ONNX's to their domain, in place."""
    in_functions = (node for function in model.functions for node in all_nodes(function.node))
    adopted = [
        node
        for node in (*all_nodes(model.graph.node), *in_functions)
        if node.op_type in _UNOFFICIAL and node.domain in STANDARD_DOMAINS
    ]
    for node in adopted:
        node.domain = MICROSOFT_DOMAIN
    for importer in (model, *model.functions) if adopted else ():
        if all(entry.domain != MICROSOFT_DOMAIN for entry in importer.opset_import):
            importer.opset_import.append(helper.make_opsetid(MICROSOFT_DOMAIN, 1))


def rewrite_old_nodes(model: onnx.ModelProto, opset: int) -> None:
    """Rewrite the nodes in place, and the model's opsets with them; `opset` is its version of ONNX's own operators.

    Raises:
        OnnxModelError: a node that has no counterpart in the newest opset.
    """
    for graph in graphs_of(model.graph):
        opsets = [opset_of(node, opset) for node in graph.node]
        for node, version in zip(graph.node, opsets, strict=True):
            node.domain = node.domain if version is None else ""
        if any(map(_row, graph.node, opsets)):
            # Subgraphs are part of their nodes: a node is replaced before they are visited.
            names = [node.name or str(n) for n, node in enumerate(graph.node)]
            rewritten = map(_rewritten, graph.node, opsets, names)
            replace_nodes(graph, [new for nodes in rewritten for new in nodes])
    imports = ((entry.domain, entry.version) for entry in model.opset_import)
    by_domain = {domain: version for domain, version in imports if not is_standard(domain)}
    model.ClearField("opset_import")
    versions = {"": onnx.defs.onnx_opset_version(), **by_domain, EARLY_DOMAIN: 1}
    model.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in versions.items())


def mark_opsets(model: onnx.ModelProto, opset: int) -> None:
    """Name the opset of standard nodes in their domain, in functions of another opset than the model's, `opset`.

    A function is read by its own opset: once it is inlined, its nodes stand beside those of the model.

    Raises:
        OnnxModelError: a function that is newer than onnx.
    """
    own = {(function.domain, function.name) for function in model.functions}  # may be called as ONNX's operators are
    for function in model.functions:
        for entry in [each for each in function.opset_import if each.domain in STANDARD_DOMAINS]:
            check_known(entry.version, f"function {function.domain}:{function.name}")
            if entry.version == opset:
                continue
            marked = marked_domain(entry.version)
            for node in all_nodes(function.node):
                if node.domain in STANDARD_DOMAINS and (node.domain, node.op_type) not in own:
                    node.domain = marked
            entry.version = opset
            function.opset_import.append(helper.make_opsetid(marked, 1))


def check_known(opset: int, owner: str) -> None:
    """Refuse an opset that the installed onnx does not have; `owner` imports it."""
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        hint = "upgrade onnx, or export for an earlier opset"
        raise OnnxModelError(f"{owner} is newer than onnx", expected=f"opset ≤ {newest}", got=f"{opset}", hint=hint)


def _rewritten(node: onnx.NodeProto, opset: int | None, name: str) -> Iterator[onnx.NodeProto]:
    row = _row(node, opset)
    if row is None:
        yield node
        return
    newer, rewrite = row
    for new in rewrite(OldNode(node, name)):
        # A rewrite makes its own operator in the form of the row's opset, all others in the newest.
        yield from _rewritten(new, newer, name) if new.op_type == node.op_type else [new]


def _row(node: onnx.NodeProto, opset: int | None) -> tuple[int, Rewrite] | None:
    """Return the first rewrite that a node of an opset, None if no standard one, needs, and the opset of its form."""
    if opset is None:
        return None
    return next((row for row in REWRITES.get(node.op_type, ()) if opset < row[0]), None)
