"""The table of ONNX operators: signatures as `register` reads them, and refusals."""

from __future__ import annotations

from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.onnx import TracedOperandError, registry
from ipujax.onnx.operators.operand_types import Array, Static


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.setattr(registry, "OPERATORS", dict(registry.OPERATORS))


def test_register_reads_the_signature():
    @registry.register("com.example", "ScaledAdd")
    def scaled_add(x, y=None, *, scale=1.0, output_count):
        return x + scale * y

    entry = registry.OPERATORS["com.example", "ScaledAdd"]
    assert entry.function is scaled_add and entry.max_inputs == 2
    assert entry.attributes == {"scale"} and entry.node_facts == {"output_count"}


def test_annotations_say_what_operands_are():
    @registry.register("com.example", "Rows")
    def rows(x: Array, count: Static, bound: Static | None = None):
        return x, count, bound

    entry = registry.OPERATORS["com.example", "Rows"]
    x, count, bound = entry(np.arange(3), np.int64(2))
    assert isinstance(x, jax.Array) and isinstance(count, np.ndarray) and bound is None
    with pytest.raises(TracedOperandError, match="count decides a shape and must be static"):
        jax.jit(lambda n: entry(x, n)[0])(jnp.asarray(2))


def test_shared_attributes_are_those_of_a_typed_dict():
    class Limits(TypedDict, total=False):
        low: float
        high: float

    def clamp(x, *, name, **limits):
        return x

    clamp.__annotations__["limits"] = Unpack[Limits]
    registry.register("com.example", "Clamp")(clamp)
    entry = registry.OPERATORS["com.example", "Clamp"]
    assert entry.attributes == {"name", "low", "high"} and entry.required_attributes == {"name"}


def test_variadic_operator_takes_any_number_of_inputs():
    registry.operator("Many")(lambda *xs, **attributes: xs)
    entry = registry.OPERATORS["", "Many"]
    assert entry.max_inputs is None and entry.attributes is None


def test_standard_domain_has_two_names():
    registry.register("ai.onnx", "Many")(lambda *xs: xs)
    assert ("", "Many") in registry.OPERATORS


@pytest.mark.parametrize("arguments", [(1, "Add"), ("", None)])
def test_register_refuses_other_names(arguments):
    with pytest.raises(ipu.IpuError, match="must be text"):
        registry.register(*arguments)


def test_register_refuses_values():
    with pytest.raises(ipu.IpuError, match="operator Add must be a function"):
        registry.register("", "Add")(1)


def test_static_operands():
    assert registry.static(np.arange(2), "shape").tolist() == [0, 1]
    assert registry.is_static((np.arange(2), None)) and not registry.is_static((np.arange(2), jnp.zeros(1)))
    with pytest.raises(TracedOperandError, match="shape decides a shape and must be static"):
        jax.jit(lambda x: registry.static(x, "shape"))(jnp.arange(2))


def test_result_sizes_that_depend_on_data_need_a_bound():
    assert registry.data_dependent_size([("y", 3)], "Y") == 3
    with pytest.raises(TracedOperandError, match="the size of Y depends on traced values") as caught:
        registry.data_dependent_size([("", None), ("y", None)], "Y")
    assert "load(max_sizes={'y': n})" in str(caught.value)
