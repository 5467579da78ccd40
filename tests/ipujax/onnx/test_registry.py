"""The table of ONNX operators: signatures as `register` reads them, and refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.onnx import TracedOperandError, registry


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
