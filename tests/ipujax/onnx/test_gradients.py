"""Gradients of operators against finite differences; reverse mode, which contains the forward one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from jax.test_util import check_grads

import ipujax.onnx  # noqa: F401  registers the operators
from ipujax.onnx.registry import OPERATORS
from tests.ipujax.onnx.gradient_cases import CASES, SINGLE, Case

# Results are integers, bools, facts of shapes or random, or there are no operands.
NO_GRADIENT = """
StringConcat StringNormalizer StringSplit
And ArgMax ArgMin BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Equal Greater GreaterOrEqual IsInf IsNaN
Less LessOrEqual Not Or Xor NonMaxSuppression NonZero Shape Size TfIdfVectorizer Unique BlackmanWindow HammingWindow
HannWindow MelWeightMatrix Constant ConstantOfShape EyeLike Range Bernoulli Multinomial RandomNormal RandomNormalLike
RandomUniform RandomUniformLike ConvInteger MatMulInteger QLinearConv QLinearMatMul DynamicQuantizeLinear
QuantizeLinear
"""
WITHOUT_GRADIENT = set(NO_GRADIENT.split())
# Structure of programs, tested with subgraphs.
STRUCTURE = {"If", "Loop", "Scan", "ConcatFromSequence", "SplitToSequence"} | {
    name for domain, name in OPERATORS if not domain and name.startswith(("Sequence", "Optional"))
}


def test_every_operator_has_a_case():
    standard = {name for domain, name in OPERATORS if not domain and onnx.defs.has(name)}
    with_case = {case.op_type for case in [*CASES, *SINGLE] if not case.domain}
    assert standard == with_case | WITHOUT_GRADIENT | STRUCTURE
    assert not with_case & WITHOUT_GRADIENT


def derivative(case: Case) -> tuple[Any, list[np.ndarray]]:
    """Return the floating-point results as a function of the operands that are differentiated, and these."""
    entry = OPERATORS[case.domain, case.op_type]

    def function(*operands: Any) -> list[Any]:
        inputs = list(case.inputs)
        for position, operand in zip(case.wrt, operands, strict=True):
            inputs[position] = operand
        results = jax.tree.leaves(entry.function(*inputs, **case.attributes))
        return [result for result in results if jnp.issubdtype(result.dtype, jnp.floating)]

    return function, [case.inputs[position] for position in case.wrt]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_equals_finite_differences(case):
    with jax.enable_x64(True):
        function, operands = derivative(case)
        check_grads(jax.jit(function), operands, order=1, modes=("rev",), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_gradient_in_single_precision(case):
    function, operands = derivative(case)
    check_grads(function, [x.astype(np.float32) for x in operands], order=1, modes=("rev",), atol=0.02, rtol=0.02)


def test_gradient_of_a_masked_row_is_zero():
    q, k, v = (np.ones((1, 1, 2, 3)) * n for n in (1.0, 2.0, 3.0))
    mask = np.array([[True, True], [False, False]])
    attention = OPERATORS["", "Attention"].function
    gradient = jax.grad(lambda q: attention(q, k, v, mask).sum())(jnp.asarray(q))
    assert np.isfinite(gradient).all() and not gradient[0, 0, 1].any()
