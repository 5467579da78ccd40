"""Exported functions as jaxprs: the numbers of plain JAX, the same operations, known trip counts and shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import ipujax as ipu
from ipujax.lowering.jax_compat import jaxpr_as_fun
from ipujax.lowering.jaxpr import primitive_names
from ipujax.lowering.passes.count_loops import count_loops
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.stablehlo.translation import scope_names
from ipujax.runtime.errors import GraphError

X = np.random.default_rng(0).uniform(0.1, 0.9, (8, 32)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32)
IMAGES = X.reshape(1, 8, 8, 4)
KERNEL = W.reshape(-1)[: 3 * 3 * 4 * 8].reshape(3, 3, 4, 8)


def inlined(call: Callable[..., Any], *args: Any) -> Any:
    return inline(jax.make_jaxpr(call)(*args))


def pooled(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "SAME")


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: (x**3 % 0.3, jnp.atan2(x, x + 1), jnp.cbrt(x), jax.nn.gelu(x), lax.rsqrt(x), -x // 0.2),
    "special": lambda x: (lax.lgamma(x), lax.erf_inv(x), lax.erfc(x), lax.nextafter(x, 2 * x), lax.digamma(x)),
    "integers": lambda x: [
        f(jnp.int32(9 * x)) for f in (lax.clz, lax.population_count, lambda n: n % 3, lambda n: ~n << 2)
    ],
    "truths": lambda x: (jnp.all(x > 0.2, 1), jnp.any(x > 0.8), (x > 0.5) ^ (x < 0.7), jnp.sum(x > 0.5)),
    "dtypes": lambda x: (
        x.astype(jnp.bfloat16) * np.arange(32).astype(jnp.bfloat16),
        (x * 9).astype(jnp.int4).astype(jnp.int32),
        x * np.array([1 + 2j] * 31 + [3], np.complex64),
        lax.reduce_precision(x, 5, 3),
        lax.bitcast_convert_type(x, jnp.uint32),
    ),
    "reductions": lambda x: (x.sum(), x.prod(0), x.max(1), x.argmax(1), x.argmin(0), jax.nn.logsumexp(x, 1)),
    "any reduction": lambda x: lax.reduce((x, x), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)),
    "cumulative": lambda x: (jnp.cumsum(x, 1), lax.cummax(x, 0, reverse=True), lax.cumlogsumexp(x, 1)),
    "windows": lambda x: (pooled(x), lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 2), "VALID")),
    "pool gradient": jax.grad(lambda x: (pooled(x) ** 2).sum()),
    "sorts": lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1), lax.sort((x // 0.3, x), num_keys=2), lax.top_k(x, 3)),
    "other order": lambda x: jnp.sort(x, 0, descending=True),
    "indexing": lambda x: (
        x[jnp.argsort(x[:, 0]), 3:5],
        x.at[jnp.array([1, 1, 9])].add(1),
        x.at[:, 2].set(0),
        jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
        lax.dynamic_update_slice(x, x[:2, :2], (x.argmax() // 32, 5)),
    ),
    "shapes": lambda x: (jnp.pad(x, 1), x[::-1, ::3], jnp.concatenate([x, x.T.reshape(8, 32)]), jnp.tile(x, (1, 2))),
    "products": lambda x: (x @ W, jnp.einsum("ij,kj->ik", x, x, precision="highest"), lax.dot(x[0], x[1])),
    "whole products": lambda x: lax.dot(jnp.int8(9 * x), jnp.int8(W), preferred_element_type=jnp.int32),
    "convolution": lambda x: lax.conv_general_dilated(
        x.reshape(1, 8, 8, 4), KERNEL, (1, 2), [(1, 1), (0, 2)], (2, 1), (1, 2), ("NHWC", "HWIO", "NHWC")
    ),
    "grouped convolution": lambda x: lax.conv_general_dilated(
        x.reshape(1, 8, 8, 4), KERNEL[:, :, :2], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=2,
    ),
    "convolution gradient": jax.grad(
        lambda x: lax.conv(x.reshape(1, 4, 8, 8), KERNEL.T.reshape(8, 4, 3, 3), (2, 2), "SAME").sum()
    ),
    "transform": lambda x: (jnp.fft.fft(x), jnp.fft.irfft(jnp.fft.rfft(x))),
    "factors": lambda x: (jnp.linalg.qr(x), jnp.linalg.cholesky(x @ x.T + jnp.eye(8)), jnp.linalg.inv(x[:, :8])),
    "random numbers": lambda x: jax.random.normal(jax.random.key(3), (8, 32)) + x,
    "random bits of hardware": lambda x: jax.random.uniform(jax.random.key(3, impl="rbg"), (4, 4)),
    "scan": lambda x: lax.scan(lambda c, row: (c + jnp.tanh(row), c.sum()), x[0], x),
    "nested loops": lambda x: lax.fori_loop(0, 3, lambda i, c: lax.fori_loop(i, 5, lambda j, d: d * x + j, c), x),
    "loop by data": lambda x: lax.while_loop(lambda c: c.sum() < 1000, lambda c: c * 1.5, x),
    "branches": lambda x: (
        lax.cond(x.sum() > 3, jnp.sin, jnp.cos, x),
        lax.switch(jnp.int32(x[0, 0] * 9) - 3, [jnp.sin, jnp.cos, jnp.tanh], x),
    ),
    "checkpoint": jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())),
    "no operand": lambda x: (jnp.eye(4), jnp.arange(5), jnp.linspace(0, 1, 7)),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_those_of_jax(name: str) -> None:
    call = export.export(jax.jit(FUNCTIONS[name]))(X).call
    jaxpr = inlined(call, X)
    assert "call_exported" not in set(primitive_names(jaxpr.jaxpr))
    results = jax.jit(jaxpr_as_fun(jaxpr))(X)
    for actual, expected in zip(results, jax.tree.leaves(jax.jit(call)(X)), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(_wide(actual), _wide(expected), rtol=1e-6, atol=1e-6)


def _wide(x: Any) -> Any:
    return np.asarray(x).astype(np.complex128)


def test_operations_are_those_that_were_exported() -> None:
    def fun(x: Any) -> Any:
        return lax.sort(jax.nn.softmax(x @ W)).argmax(1), lax.top_k(x, 2), lax.erf(x), jnp.cumsum(x, 1)

    plain = Counter(primitive_names(inline(jax.make_jaxpr(fun)(X)).jaxpr))
    exported = Counter(primitive_names(inlined(export.export(jax.jit(fun))(X).call, X).jaxpr))
    for name in ("sort", "dot_general", "exp", "reduce_sum", "top_k", "erf", "cumsum", "argmax"):
        assert plain[name] == exported[name] == 1, name


def test_a_loop_over_a_counter_is_a_scan() -> None:
    for step, count in ((1, 20), (3, 7)):
        fun = jax.jit(
            lambda x, step=step: lax.while_loop(lambda s: s[0] < 20, lambda s: (s[0] + step, s[1] @ W), (0, x))
        )
        jaxpr = count_loops(inlined(export.export(fun)(X).call, X))
        (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
        assert scan.params["length"] == count
        # The matrix is a constant of the loop, not a carry.
        assert scan.params["num_consts"] == 1


def test_shapes_of_a_polymorphic_module_are_known() -> None:
    rows, columns = export.symbolic_shape("rows, columns")
    fun = jax.jit(lambda x: (x.reshape(-1), (x @ x.T) / x.shape[0], jnp.arange(x.shape[1]) + x.shape[0]))
    call = export.export(fun)(jax.ShapeDtypeStruct((rows, columns), np.float32)).call
    for actual, expected in zip(jaxpr_as_fun(inlined(call, X))(X), fun(X), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_a_module_of_several_platforms_with_arguments_that_it_does_not_use() -> None:
    fun = jax.jit(lambda x, y, z: lax.platform_dependent(x, cpu=lambda x: x * 2, default=lambda x: x * 3) + z)
    call = export.export(fun, platforms=("tpu", "cpu"))(X, X, X).call
    np.testing.assert_array_equal(jaxpr_as_fun(inlined(call, X, X, X))(X, X, X)[0], X * 3)


def test_a_module_of_another_platform_is_refused_with_the_line() -> None:
    call = export.export(jax.jit(jnp.sin), platforms=("tpu",))(X).call
    with pytest.raises(GraphError, match=r"other platforms(.|\n)*at: test_exported_calls(.|\n)*got: 'tpu'"):
        ipu.jit(lambda x: call(x)).lower(X).compile()


def test_a_module_of_another_platform_whose_check_is_disabled() -> None:
    unchecked = [export.DisabledSafetyCheck.platform()]
    call = export.export(jax.jit(jnp.sin), platforms=("tpu",), disabled_checks=unchecked)(X).call
    np.testing.assert_allclose(jaxpr_as_fun(inlined(call, X))(X)[0], np.sin(X), rtol=1e-6)


def test_keys_of_random_numbers() -> None:
    key = jax.random.key(5)
    call = export.export(jax.jit(lambda k: (jax.random.split(k), jax.random.bits(k, (3,)))))(key).call
    keys, bits = jaxpr_as_fun(inlined(call, key))(key)
    np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(jax.random.split(key)))
    np.testing.assert_array_equal(bits, jax.random.bits(key, (3,)))


def test_names_of_scopes() -> None:
    assert scope_names("jit(f)/transpose(jvp(layer))/while/body/closed_call/dot_general") == ["layer"]
    assert scope_names("jit(f)/Dense_0/jit(relu)/max") == ["Dense_0"]
    assert scope_names("add") == []
