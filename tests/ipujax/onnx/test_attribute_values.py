"""Names and codes in attributes that ONNX does not define: refused when a model is loaded, in every graph of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import ipujax.onnx
from ipujax.onnx import OnnxModelError
from ipujax.onnx.reading.attribute_values import _ROWS
from tests.ipujax.onnx.models import OPSET, graph_of, info, model_of
from tests.ipujax.onnx.opsets.cases import GENERATORS, draw

STANDARD = {schema.name: schema for schema in onnx.defs.get_all_schemas() if not schema.domain}
# Attributes whose texts are free, whose numbers are sizes and the like, or of operators without an implementation.
FREE_TEXT = {"equation", "keys_as_string", "value_string", "value_strings", "pool_strings"} | {
    *("locale", "stopwords", "delimiter"),
}


def test_every_attribute_of_text_has_a_row():
    unlisted = set()
    listed = {(operator, attribute) for operators, attribute, _, _ in _ROWS for operator in operators}
    texts = (onnx.defs.OpSchema.AttrType.STRING, onnx.defs.OpSchema.AttrType.STRINGS)
    for name, schema in STANDARD.items():
        if (("", name) in ipujax.onnx.registry.OPERATORS) and not schema.deprecated:
            attributes = {each.name for each in schema.attributes.values() if each.type in texts}
            unlisted |= {(name, attribute) for attribute in attributes - FREE_TEXT} - listed
    assert not unlisted


def test_rows_name_attributes_that_exist():
    history = onnx.defs.get_all_schemas_with_history()
    known = {(schema.name, attribute) for schema in history for attribute in schema.attributes}
    rows = {(operator, attribute) for operators, attribute, _, _ in _ROWS for operator in operators}
    assert rows <= known, rows - known


def test_defaults_are_allowed():
    table: dict[tuple[str, str], Any] = {}
    for operators, attribute, values, _ in _ROWS:
        table.update({(operator, attribute): values for operator in operators})
    for (operator, attribute), values in table.items():
        default = getattr(STANDARD.get(operator), "attributes", {}).get(attribute)
        if default is not None and default.default_value.name:
            value = helper.get_attribute_value(default.default_value)
            for each in value if isinstance(value, list) else [value]:
                assert (each.decode() if isinstance(each, bytes) else each) in values


def with_value(attribute: str, op_type: str, wrong: Any) -> onnx.ModelProto:
    """Return a model of a node, valid but for an attribute."""
    model, _ = draw(op_type, OPSET, 0)
    (node,) = model.graph.node
    kept = [each for each in node.attribute if each.name != attribute]
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    changed.ClearField("attribute")
    changed.attribute.extend([*kept, helper.make_attribute(attribute, wrong)])
    model.graph.ClearField("node")
    model.graph.node.append(changed)
    return model


ROWS = [(operator, attribute, values) for operators, attribute, values, _ in _ROWS for operator in operators]


def test_a_value_that_no_row_has_is_refused():
    for operator, attribute, values in ROWS:
        schema = STANDARD.get(operator)
        if schema is None or schema.deprecated or operator not in GENERATORS or attribute not in schema.attributes:
            continue
        is_list = schema.attributes[attribute].type.name.endswith("S")
        wrong: Any = 77 if isinstance(next(iter(values)), int) else "wrong"
        if (operator, attribute) == ("Cast", "to"):
            wrong = 77
        with pytest.raises(OnnxModelError) as caught:
            ipujax.onnx.load(with_value(attribute, operator, [wrong] if is_list else wrong))
        text = str(caught.value)
        assert "node 'drawn'" in text and repr(attribute) in text and repr(wrong) in text, text


X = info("x", shape=(1, 1, 4, 4))
SCALES = {"s": np.float32([1, 1, 2, 2])}


def resize(opset: int, **attributes: Any) -> onnx.ModelProto:
    """Return a Resize, of any opset that has it."""
    names = ["x", "s"] if opset == 10 else ["x", "", "s"] if opset >= 13 else ["x", "r", "s"]
    constants = {**SCALES, **({"r": np.zeros(0, np.float32)} if "r" in names else {})}
    return model_of(
        [helper.make_node("Resize", names, ["y"], "r", **attributes)], [X], [info("y")], constants, opset=opset
    )


def test_names_are_those_of_the_opset():
    with pytest.raises(OnnxModelError, match=r"node 'r' \(Resize\) has an unknown value of the attribute 'mode'"):
        ipujax.onnx.load(resize(10, mode="area"))
    with pytest.raises(OnnxModelError, match="bilinear") as caught:
        ipujax.onnx.load(with_value("mode", "GridSample", "bilinear"))
    assert "linear, nearest, cubic" in str(caught.value)


def test_names_are_checked_in_subgraphs_and_functions():
    inner = helper.make_node("Pad", ["x", "p"], ["r"], "inner", mode="symmetric")
    amounts = {"p": np.int64([1, 1])}
    branch = graph_of([inner], [], [info("r", shape=(6,))], amounts)
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    vector = info("x", shape=(4,))
    with pytest.raises(OnnxModelError, match=r"node 'inner' \(Pad\).*'mode'"):
        ipujax.onnx.load(model_of([node], [info("c", bool), vector], [info("y", shape=(6,))]))
    body = [helper.make_node("Pad", ["x", "p"], ["r"], "inner", mode="symmetric")]
    function = helper.make_function("local", "Padded", ["x", "p"], ["r"], body, [helper.make_opsetid("", OPSET)])
    call = helper.make_node("Padded", ["x", "p"], ["y"], domain="local")
    model = model_of([call], [vector], [info("y", shape=(6,))], amounts, domains=["local"])
    model.functions.append(function)
    with pytest.raises(OnnxModelError, match="'symmetric'"):
        ipujax.onnx.load(model)


@pytest.mark.parametrize("opset", [11, 13, 18, OPSET])
def test_positions_that_exporters_still_write(opset):
    model = resize(opset, mode="nearest", coordinate_transformation_mode="tf_half_pixel_for_nn")
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    index = [0, 1, 1, 2, 2, 3, 3, 3]  # (i + 0.5) / 2, halves down
    np.testing.assert_array_equal(ipujax.onnx.load(model)({}, x)[0, 0], x[0, 0][index][:, index])


@pytest.mark.parametrize("names", [["Tanh"], ["Sigmoid", "Tanh", "Relu"]])
def test_activations_must_be_as_many_as_the_layer_has(names):
    changed = with_value("activations", "GRU", names)
    with pytest.raises(ipujax.onnx.OnnxError, match="node 'drawn'"):
        loaded = ipujax.onnx.load(changed)
        loaded(loaded.params, *(np.zeros(each.shape, each.dtype) for each in loaded.inputs))
