"""Programs of the families with rules have no fallback: `profile.fallbacks` is empty on 64 tiles.

Half of them are the rows of the op table; the others are forms, dtypes and library functions that it omits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from tests.lowering.rules.op_table import FAMILIES

DEVICE = ipu.IPUModel(tiles_per_ipu=64)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(13, 29)).astype(np.float32)
CUBE = RNG.normal(size=(3, 5, 7)).astype(np.float32)
INTEGERS = RNG.integers(-9, 10, (13, 29)).astype(np.int32)
IMAGE = RNG.normal(size=(2, 7, 6, 3)).astype(np.float32)
KEY = jax.random.key(0)

Form = tuple[Callable[..., Any], tuple[Any, ...]]

DTYPES = (
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "int4", "uint4"),
    *("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "complex64"),
)


def of_every_kind(x: Any) -> list[Any]:
    """One operation of each family on an array of two dimensions and any dtype."""
    results = [
        jnp.where(x == x[:1], x, x[::-1]),
        x.astype(np.float32) if x.dtype.kind != "c" else x.real,
        lax.dynamic_slice(x, (INTEGERS[0, 0], INTEGERS[0, 1]), (3, 4)),
        x[INTEGERS[0] % 13],
        x.at[INTEGERS[:5, 0] % 13].set(x[:5]),
        lax.pad(x, jnp.zeros((), x.dtype), ((1, -2, 1), (0, 3, 0))),
        jnp.concatenate([x.T, x.T], 1),
    ]
    if x.dtype != bool and "int4" not in x.dtype.name:
        results += [x + x, x * x, lax.cumsum(x), x.sum(0), lax.dot_general(x, x, (((1,), (1,)), ((), ())))]
    if x.dtype.kind != "c":
        results += [lax.sort(x, dimension=0), jnp.argmax(x, 1), lax.max(x, x), x.max(1)]
    return results


def _conv(x: Any, w: Any, **params: Any) -> Any:
    return lax.conv_general_dilated(x, w, **{"window_strides": (1,) * (x.ndim - 2), "padding": "SAME", **params})


def _normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


FORMS: dict[str, Form] = {
    "special values": (lambda x: jnp.sinc(jnp.unwrap(x)) + jnp.frexp(x)[0] + jnp.ldexp(x, 3), (X,)),
    "special functions": (lambda x: jax.scipy.special.ndtri(jax.nn.sigmoid(x)) + jax.scipy.special.i1(x), (X,)),
    "complex": (lambda x: jnp.tanh(lax.complex(x, x)) / (lax.complex(x, x) + 3), (X,)),
    "dot batched twice": (lambda c: jnp.einsum("abc,abd->acd", c, c), (CUBE,)),
    "dot of flags": (lambda x: lax.dot_general(x > 0, x > 0, (((1,), (1,)), ((), ()))), (X,)),
    "dot widening": (
        lambda i: lax.dot(i.astype(np.int8), i.T.astype(np.int8), preferred_element_type=np.int32),
        (INTEGERS,),
    ),
    "attention": (lambda c: jax.nn.dot_product_attention(c[None], c[None], c[None]), (CUBE,)),
    "kron and cross": (lambda x: (jnp.kron(x[:2], x[:3]), jnp.cross(x[:, :3], x[:, 3:6])), (X,)),
    "conv 0d": (lambda x, w: lax.conv_general_dilated(x, w, (), ()), (_normal(2, 3), _normal(4, 3))),
    "conv 1d": (_conv, (_normal(2, 3, 9), _normal(4, 3, 3))),
    "conv 3d": (_conv, (_normal(2, 3, 5, 4, 3), _normal(4, 3, 3, 2, 1))),
    "conv batch groups": (
        lambda x, w: _conv(x, w, batch_group_count=2),
        (_normal(4, 3, 5, 5), _normal(6, 3, 3, 3)),
    ),
    "conv transposed": (lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"), (IMAGE, _normal(3, 3, 3, 4))),
    "conv gradients": (
        lambda x, w: jax.grad(lambda x, w: (_conv(x, w, window_strides=(2, 2)) ** 2).sum(), (0, 1))(x, w),
        (_normal(4, 3, 5, 5), _normal(6, 3, 3, 3)),
    ),
    "reduce of rank 8": (lambda c: c.reshape(1, 3, 1, 5, 1, 7, 1, 1).max((1, 5)), (CUBE,)),
    "statistics": (lambda x: (jnp.median(x), jnp.percentile(x, 30), jnp.histogram(x)[0]), (X,)),
    "windows in vmap": (jax.vmap(lambda x: lax.reduce_window(x, 1.0, lax.mul, (2, 2), (1, 2), "SAME")), (CUBE,)),
    "pooling gradient": (
        jax.grad(lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()),
        (IMAGE,),
    ),
    "sort of several": (lambda x, i: lax.sort((x, i, x), dimension=0, num_keys=2), (X, INTEGERS)),
    "unique": (lambda i: (jnp.unique(i, size=8), jnp.nonzero(i > 0, size=5), jnp.isin(i, i[:2])), (INTEGERS,)),
    "cumulative in reverse": (
        lambda c: [f(c, 1, reverse=True) for f in (lax.cumsum, lax.cummax, lax.cumprod)],
        (CUBE,),
    ),
    "associative scan": (lambda x: lax.associative_scan(jnp.multiply, x), (X,)),
    "gather of windows": (
        lambda x, i: jax.vmap(lambda j: lax.dynamic_slice(x, (j, j), (2, 3)))(i[:, 0] % 11),
        (X, INTEGERS),
    ),
    "gather batched": (lambda x, i: jax.vmap(lambda r, j: r[j])(x, i[:, :4] % 29), (X, INTEGERS)),
    "scatter of points": (
        lambda x, i: [getattr(x.at[i[:, 0] % 13, i[:, 1] % 29], how)(2.0) for how in ("add", "multiply", "min")],
        (X, INTEGERS),
    ),
    "scatter of windows": (
        jax.vmap(lambda r, j, v: lax.dynamic_update_slice(r, v, (j,))),
        (X, INTEGERS[:, 0] % 25, X[:, :3]),
    ),
    "segment sum": (lambda x, i: jax.ops.segment_sum(x, i[:, 0] % 5, 5), (X, INTEGERS)),
    "resize": (lambda x: jax.image.resize(x, (2, 9, 9, 3), "bilinear"), (IMAGE,)),
    "pack bits": (lambda x, i: (jnp.packbits(x > 0), jnp.unpackbits(i.astype(np.uint8))), (X, INTEGERS)),
    "distributions": (
        lambda k: (
            jax.random.permutation(k, 7),
            jax.random.categorical(k, X),
            jax.random.choice(k, X[0], (5,)),
            jax.random.poisson(k, 3.0, (5,)),
            jax.random.beta(k, 2.0, 3.0, (5,)),
            jax.random.truncated_normal(k, -1.0, 1.0, (5,)),
        ),
        (KEY,),
    ),
    "other generators": (
        lambda: [jax.random.normal(jax.random.key(3, impl=name), (7, 11)) for name in ("rbg", "unsafe_rbg")],
        (),
    ),
    "loops": (lambda x: lax.map(lambda r: lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, r), x), (X,)),
    "cg": (lambda x: jax.scipy.sparse.linalg.cg(lambda v: 2 * v, x[0])[0], (X,)),
    "keys": (
        lambda k: (
            keys := jax.random.split(k, 5),
            keys.at[2].set(k),
            jnp.where(jnp.arange(5) > 2, keys, k),
            keys[jnp.arange(3)],
            jnp.concatenate([keys, keys[:2]]),
            lax.scan(lambda c, k: (k, c), k, keys),
            lax.cond(jnp.arange(3).sum() > 2, lambda: keys[0], lambda: k),
        )[1:],
        (KEY,),
    ),
    "keys padded": (lambda k: lax.pad(jax.random.split(k, 5), k, ((1, 0, 0),)), (KEY,)),
    "keys seen by Python": (
        lambda k: (
            jax.debug.callback(lambda words: None, k),
            jax.debug.print("{}", k),
            jax.pure_callback(lambda words: words, jax.ShapeDtypeStruct((2,), np.uint32), k),
        )[2:],
        (KEY,),
    ),
    "hessian": (jax.hessian(lambda x: jnp.tanh(x).prod()), (X[0, :5],)),
}


def fallbacks(form: Form) -> Any:
    """Fallbacks in the profile of a function on 64 tiles."""
    fun, arguments = form
    return ipu.jit(fun, device=DEVICE).lower(*arguments).compile().profile.fallbacks


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_the_op_table(family: str) -> None:
    functions = [(case.fun, case.arguments()) for case in FAMILIES[family]]
    arguments = tuple(arguments for _, arguments in functions)

    def fun(*rows: Any) -> Any:
        return [row(*args) for (row, _), args in zip(functions, rows, strict=True)]

    assert not fallbacks((fun, arguments))


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    assert not fallbacks(FORMS[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str) -> None:
    values = RNG.integers(0, 2 if dtype in ("bool", "int4") else 6, (13, 29))
    assert not fallbacks((of_every_kind, (jnp.asarray(values, dtype),)))


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_wide_dtypes(dtype: str) -> None:
    with jax.enable_x64(True):
        assert not fallbacks((of_every_kind, (jnp.asarray(RNG.integers(0, 6, (13, 29)), dtype),)))
