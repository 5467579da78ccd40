"""Op table: for each primitive with a lowering rule, functions that trace to it, and arguments for them.

`CASES` lists all rows; `tests/lowering/rules/test_ops.py` runs them. Shapes are odd on purpose: they divide no number
of tiles, and there are scalars, dimensions of size 1 and arrays without elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry_2x32  # noqa: TID251 the primitive has no other public door

from tests.lowering.rules.op_case import MAIN, ULP, OpCase, Spec, booleans, distinct, integers, normal, uniform
from tests.lowering.rules.op_rows_codelet import codelet
from tests.lowering.rules.op_rows_devices import devices
from tests.lowering.rules.op_rows_effects import effects
from tests.lowering.rules.op_rows_elementwise import binary, special, unary
from tests.lowering.rules.op_rows_indexing import indexing
from tests.lowering.rules.op_rows_tiles import tiles


def _shape() -> list[OpCase]:
    """Views, multiplied by a ramp of the result's shape, so that they are read tile by tile."""

    def used(view: Callable[..., Any]) -> Callable[..., Any]:
        def fun(*arrays: Any) -> Any:
            return [
                y * np.arange(1, y.size + 1, dtype=np.float32).reshape(y.shape) for y in jax.tree.leaves(view(*arrays))
            ]

        return fun

    x = normal(*MAIN)
    cube = normal(3, 5, 7)
    rows: list[tuple[str, str, Callable[..., Any], tuple[Spec, ...]]] = [
        ("reshape", "flat", lambda x: x.reshape(-1), (x,)),
        ("reshape", "mixed", lambda x: x.transpose(2, 0, 1).reshape(21, 5), (cube,)),
        ("reshape", "scalar", lambda x: x.reshape(()), (normal(1, 1),)),
        ("broadcast_in_dim", "middle", lambda x: lax.broadcast_in_dim(x, (3, 4, 7), (0, 2)), (normal(3, 1),)),
        ("broadcast_in_dim", "scalar", lambda x: jnp.broadcast_to(x, (13, 29)), (normal(),)),
        ("transpose", "cube", lambda x: x.transpose(2, 0, 1), (cube,)),
        ("transpose", "matrix", lambda x: x.T, (x,)),
        ("squeeze", "some", lambda x: lax.squeeze(x, (0, 2)), (normal(1, 5, 1, 7),)),
        ("rev", "both", lambda x: lax.rev(x, (0, 1)), (x,)),
        ("rev", "one", lambda x: lax.rev(x, (1,)), (cube,)),
        ("slice", "inner", lambda x: x[2:11, 3:20], (x,)),
        ("slice", "strided", lambda x: lax.slice(x, (1, 2), (12, 29), (3, 4)), (x,)),
        ("slice", "empty", lambda x: x[4:4], (x,)),
        ("concatenate", "rows", lambda x, y: lax.concatenate([x, y, x], 0), (x, normal(1, 29))),
        ("concatenate", "columns", lambda x, y: lax.concatenate([x, y], 1), (x, normal(13, 2))),
        ("stack", "last", lambda x, y: jnp.stack([x, y], -1), (x, x)),
        ("unstack", "first", lambda x: jnp.unstack(x), (normal(3, 29),)),
        ("split", "uneven", lambda x: lax.split(x, (1, 20, 8), 1), (x,)),
        ("tile", "matrix", lambda x: jnp.tile(x, (2, 3)), (normal(5, 7),)),
        ("tile", "more-dims", lambda x: jnp.tile(x, (2, 1, 2)), (normal(5, 7),)),
        ("copy", "all", jnp.copy, (x,)),
        ("stop_gradient", "all", lax.stop_gradient, (x,)),
        ("optimization_barrier", "two", lambda x, y: lax.optimization_barrier((x, y)), (x, cube)),
        ("name", "all", lambda x: checkpoint_name(x, "kept"), (x,)),
    ]
    undifferentiable = ("stop_gradient", "optimization_barrier")
    return [OpCase(p, n, used(f), specs, grad=p not in undifferentiable) for p, n, f, specs in rows]


def _reductions() -> list[OpCase]:
    x = normal(*MAIN)
    cube = normal(7, 5, 11)
    flags = booleans(*MAIN)
    ints = integers(*MAIN)
    positive = uniform(7, 5, 11, low=0.8, high=1.2)
    narrow = normal(5, 70, dtype=jnp.bfloat16)
    sums = {"rtol": 1e-5, "atol": 1e-5}

    def decayed(a: Any, b: Any) -> Any:
        return a * 0.5 + b

    def hypotenuse(a: Any, b: Any) -> Any:
        return jnp.sqrt(a * a + b * b)

    def largest_and_place(x: Any, i: Any) -> Any:
        def larger(a: Any, b: Any) -> Any:
            return lax.max(a[0], b[0]), jnp.where(a[0] >= b[0], a[1], b[1])

        return lax.reduce((x, i), (np.float32(-np.inf), np.int32(0)), larger, (0,))

    return [
        OpCase("reduce_sum", "all", jnp.sum, (x,), **sums, grad=True),
        OpCase("reduce_sum", "rows", lambda x: x.sum(1), (x,), **sums, grad=True),
        OpCase("reduce_sum", "columns", lambda x: x.sum(0), (x,), **sums, grad=True),
        OpCase("reduce_sum", "middle", lambda x: x.sum(1), (cube,), **sums, grad=True),
        OpCase("reduce_sum", "outside", lambda x: x.sum((0, 2)), (cube,), **sums, grad=True),
        OpCase("reduce_sum", "none", lambda x: lax.reduce_sum_p.bind(x, axes=(), out_sharding=None), (normal(5, 7),)),
        OpCase("reduce_sum", "empty", lambda x: x.sum(0), (normal(0, 3),)),
        OpCase("reduce_sum", "empty result", lambda x: x.sum(1), (normal(0, 3),)),
        OpCase("reduce_sum", "transposed", lambda x: x.T[3:].sum(0), (x,), **sums, grad=True),
        OpCase("reduce_sum", "broadcast", lambda x: jnp.broadcast_to(x, (31, 29)).sum(0), (normal(29),), **sums),
        OpCase("reduce_sum", "int", jnp.sum, (ints,)),
        OpCase("reduce_sum", "long", jnp.sum, (normal(4099),), **sums, grad=True),
        OpCase("reduce_sum", "bfloat16", lambda x: lax.reduce_sum(x, (0, 1)), (narrow,), 5e-2, 5e-1),
        OpCase("reduce_prod", "middle", lambda x: x.prod(1), (positive,), **sums, grad=True, grad_rtol=1e-4),
        OpCase("reduce_prod", "empty", lambda x: x.prod(0), (normal(0, 3),)),
        OpCase("reduce_max", "all", jnp.max, (distinct(*MAIN),), grad=True),
        OpCase("reduce_max", "rows", lambda x: x.max(1), (distinct(*MAIN),), grad=True),
        OpCase("reduce_max", "int", lambda x: x.max(0), (ints,)),
        OpCase("reduce_min", "columns", lambda x: x.min(0), (distinct(*MAIN),), grad=True),
        OpCase("reduce_min", "half", jnp.min, (normal(13, 29, dtype=np.float16),)),
        OpCase("reduce_and", "rows", lambda x: x.all(1), (flags,)),
        OpCase("reduce_and", "int", lambda x: lax.reduce_and(x, (0,)), (ints,)),
        OpCase("reduce_or", "all", jnp.any, (flags,)),
        OpCase("reduce_xor", "columns", lambda x: lax.reduce_xor(x, (0,)), (ints,)),
        OpCase("reduce_xor", "bool", lambda x: lax.reduce_xor(x, (0, 1)), (flags,)),
        OpCase("reduce", "decaying", lambda x: lax.reduce(x, np.float32(1), decayed, (1,)), (x,), ULP, 1e-6),
        OpCase("reduce", "outside", lambda x: lax.reduce(x, np.float32(0), hypotenuse, (0, 2)), (cube,), 1e-5),
        OpCase("reduce", "all", lambda x: lax.reduce(x, np.float32(0), hypotenuse, (0, 1)), (x,), 1e-5),
        OpCase("reduce", "none", lambda x: lax.reduce(x, np.float32(1), decayed, ()), (normal(5, 7),)),
        OpCase("reduce", "empty", lambda x: lax.reduce(x, np.float32(3), decayed, (0,)), (normal(0, 3),)),
        OpCase("reduce", "pairs", largest_and_place, (x, ints)),
        OpCase("argmax", "rows", lambda x: jnp.argmax(x, 1), (x,)),
        OpCase("argmax", "ties", lambda x: jnp.argmax(x, 0), (ints,)),
        OpCase("argmin", "columns", lambda x: jnp.argmin(x, 0), (x,)),
        OpCase("argmin", "long", jnp.argmin, (normal(1031),)),
    ]


def _linear() -> list[OpCase]:
    close = {"rtol": 1e-5, "atol": 1e-5, "grad": True, "grad_rtol": 1e-4}
    narrow = {"rtol": 1e-2, "atol": 1e-2}
    image = normal(2, 7, 6, 3)
    kernel = normal(3, 3, 3, 5)
    rows = normal(13, 5)
    experts = normal(3, 5, 4)
    near = {"rtol": 1e-5, "atol": 1e-5}

    def sizes(_: np.random.Generator) -> Any:
        return np.int32([4, 0, 6])

    def ragged(contract: Any, batch: Any, lhs: list[int], rhs: list[int]) -> Callable[..., Any]:
        numbers = lax.RaggedDotDimensionNumbers((contract, batch), lhs, rhs)
        return lambda a, b, sizes: lax.ragged_dot_general(a, b, sizes, numbers)

    conv = partial(lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return [
        OpCase("dot_general", "matrix", jnp.dot, (normal(13, 29), normal(29, 11)), **close),
        OpCase("dot_general", "vector", jnp.dot, (normal(13, 29), normal(29)), **close),
        OpCase("dot_general", "scalar", jnp.dot, (normal(29), normal(29)), **close),
        OpCase(
            "dot_general",
            "outer",
            lambda a, b: lax.dot_general(a, b, (((), ()), ((), ()))),
            (normal(5), normal(7)),
            **close,
        ),
        OpCase(
            "dot_general",
            "batch",
            lambda a, b: jnp.einsum("bij,bkj->bik", a, b),
            (normal(3, 5, 7), normal(3, 2, 7)),
            **close,
        ),
        OpCase(
            "dot_general",
            "mixed",
            lambda a, b: jnp.einsum("ibjc,cbi->bj", a, b),
            (normal(2, 3, 5, 7), normal(7, 3, 2)),
            **close,
        ),
        OpCase("dot_general", "empty", jnp.dot, (normal(5, 0), normal(0, 7))),
        OpCase("dot_general", "int", jnp.dot, (integers(5, 7), integers(7, 3))),
        OpCase(
            "dot_general", "half", jnp.dot, (normal(5, 7, dtype=np.float16), normal(7, 3, dtype=np.float16)), **narrow
        ),
        OpCase(
            "dot_general",
            "bfloat16",
            partial(jnp.dot, preferred_element_type=np.float32),
            (normal(5, 7, dtype=jnp.bfloat16), normal(7, 3, dtype=jnp.bfloat16)),
            **narrow,
        ),
        OpCase("ragged_dot_general", "rows", ragged(((1,), (1,)), ((), ()), [0], [0]), (rows, experts, sizes), **close),
        OpCase(
            "ragged_dot_general", "depth", ragged(((0,), (0,)), ((), ()), [0], []), (rows, normal(13, 3), sizes), **near
        ),
        OpCase(
            "ragged_dot_general",
            "batch",
            ragged(((2,), (1,)), ((0,), (0,)), [0], []),
            (normal(5, 2, 3), normal(5, 3, 4), sizes),
            **near,
        ),
        OpCase(
            "ragged_dot_general",
            "rows of a batch",
            ragged(((2,), (2,)), ((0,), (1,)), [1], [0]),
            (normal(2, 13, 5), normal(3, 2, 5, 4), lambda rng: np.int32([[4, 0, 6], [1, 12, 0]])),
            **near,
        ),
        OpCase(
            "conv_general_dilated",
            "same",
            partial(conv, window_strides=(1, 1), padding="SAME"),
            (image, kernel),
            **close,
        ),
        OpCase(
            "conv_general_dilated",
            "strided",
            partial(conv, window_strides=(2, 3), padding="VALID"),
            (image, kernel),
            **close,
        ),
        OpCase(
            "conv_general_dilated",
            "dilated",
            partial(conv, window_strides=(1, 2), padding=((2, 1), (-1, 3)), lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
            (image, kernel),
            **close,
        ),
        OpCase(
            "conv_general_dilated",
            "groups",
            partial(conv, window_strides=(1, 1), padding="SAME", feature_group_count=3),
            (image, normal(2, 2, 1, 6)),
            **close,
        ),
    ]


def _windows() -> list[OpCase]:
    def pool(x: Any, reducer: Any, start: float, stride: int = 2) -> Any:
        return lax.reduce_window(x, np.float32(start), reducer, (1, 3, 2, 1), (1, stride, stride, 1), "SAME")

    biggest = partial(pool, reducer=lax.max, start=-np.inf)
    image = distinct(2, 7, 6, 3)

    def dilated(x: Any) -> Any:
        steps = {"base_dilation": (1, 2, 1, 1), "window_dilation": (1, 1, 2, 1)}
        return lax.reduce_window(x, np.float32(1), lax.mul, (1, 3, 2, 1), (1, 2, 1, 1), "VALID", **steps)

    def flags_of_windows(x: Any) -> Any:
        return lax.reduce_window(x, np.bool_(True), lax.bitwise_and, (3, 2), (2, 2), "SAME")

    def pairs(x: Any, y: Any) -> Any:
        def both(a: Any, b: Any) -> Any:
            return a[0] + b[0], lax.max(a[1], b[1])

        return lax.reduce_window((x, y), (np.float32(0), np.float32(0)), both, (1, 3, 2, 1), (1, 2, 2, 1), "VALID")

    def pooled_gradient(x: Any) -> Any:
        return jax.grad(lambda x: (biggest(x) ** 2).sum())(x)

    def scattered_to_nearest(x: Any, source: Any) -> Any:
        """Binds the primitive, which no public function of JAX does."""

        def jaxpr(fun: Any) -> Any:
            return jax.make_jaxpr(fun)(np.float32(0), np.float32(0)).jaxpr

        return lax.select_and_scatter_p.bind(
            x,
            source,
            np.float32(1.5),
            select_jaxpr=jaxpr(lambda a, b: lax.abs(a - 20) <= lax.abs(b - 20)),
            scatter_jaxpr=jaxpr(lambda a, b: a * np.float32(0.5) + b),
            select_consts=(),
            scatter_consts=(),
            window_dimensions=(1, 3, 2, 1),
            window_strides=(1, 2, 2, 1),
            padding=((0, 0), (1, 1), (0, 0), (0, 0)),
        )

    def pooled_tangent(x: Any, t: Any) -> Any:
        return jax.jvp(biggest, (x,), (t,))[1]

    return [
        OpCase("reduce_window_max", "overlapping", biggest, (image,), grad=True),
        OpCase("reduce_window_min", "overlapping", partial(pool, reducer=lax.min, start=np.inf), (image,), grad=True),
        OpCase(
            "reduce_window_sum", "dense", partial(pool, reducer=lax.add, start=0, stride=1), (image,), ULP, grad=True
        ),
        OpCase("reduce_window", "product", partial(pool, reducer=lax.mul, start=1), (image,), ULP),
        OpCase("reduce_window", "from-two", partial(pool, reducer=lax.add, start=2), (image,), ULP),
        OpCase("reduce_window", "dilated", dilated, (image,), ULP),
        OpCase("reduce_window", "flags", flags_of_windows, (booleans(*MAIN),)),
        OpCase("reduce_window", "pairs", pairs, (image, normal(2, 7, 6, 3)), ULP),
        OpCase("reduce_window", "empty", lambda x: pool(x[:, :0], lax.mul, 3), (image,)),
        OpCase("select_and_scatter_add", "gradient", pooled_gradient, (image,), ULP),
        OpCase("select_and_scatter", "nearest", scattered_to_nearest, (image, normal(2, 4, 3, 3)), ULP),
        OpCase("select_and_gather_add", "tangent", pooled_tangent, (image, normal(2, 7, 6, 3)), ULP),
    ]


def _dynamic() -> list[OpCase]:
    x = normal(*MAIN)
    i = integers(low=0, high=9)
    return [
        OpCase("dynamic_slice", "both", lambda x, i: lax.dynamic_slice(x, (i, i + 1), (3, 20)), (x, i), grad=True),
        OpCase("dynamic_slice", "row", lambda x, i: lax.dynamic_index_in_dim(x, i, 0), (x, i), grad=True),
        OpCase("dynamic_slice", "clamped", lambda x: lax.dynamic_slice(x, (np.int32(99), 2), (3, 29)), (x,)),
        OpCase("dynamic_slice", "empty", lambda x, i: lax.dynamic_slice(x, (i, i), (0, 3)), (x, i)),
        OpCase(
            "dynamic_update_slice",
            "block",
            lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)),
            (x, normal(4, 5), i),
            grad=True,
        ),
        OpCase("dynamic_update_slice", "all", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), (x, x, i)),
        OpCase(
            "dynamic_update_slice",
            "row",
            lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
            (x, normal(1, 29), i),
            grad=True,
        ),
    ]


def _control() -> list[OpCase]:
    x = normal(5, 29)
    square = normal(29, 29, scale=0.2)

    def cumulated(x: Any) -> Any:
        return lax.scan(lambda c, row: (c * 0.9 + row, c.sum()), jnp.zeros(29), x)

    def backwards(x: Any) -> Any:
        return lax.scan(lambda c, row: (jnp.tanh(c + row), c), x[0], x, reverse=True)

    def squared(x: Any, n: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.5 + x), (0, x))

    def block(w: Any, x: Any) -> Any:
        """Work enough, compared with its operands, for a function if it is called twice."""
        for _ in range(3):
            h = jnp.tanh(x @ w)
            x = x + jnp.tanh(h @ w) * h
        return x

    def chosen(i: Any, x: Any) -> Any:
        return lax.switch(i, [lambda x: x * 2, lambda x: x[::-1], jnp.tanh], x)

    def normalised(x: Any, scale: Any) -> Any:
        centred = x - x.mean(1, keepdims=True)
        return centred * lax.rsqrt((centred**2).mean(1, keepdims=True) + 1e-5) * scale

    def mixed(x: Any, mask: Any) -> Any:
        half = jnp.where(mask, x, 0).astype(jnp.float16) * 3
        return half, jnp.maximum(half.astype(jnp.float32), x), half > 1

    return [
        OpCase("fused", "several results", lambda x: (jnp.tanh(x) * 2, jnp.tanh(x) + x), (x,), 1e-5, 1e-5, grad=True),
        OpCase("fused", "rows and columns", normalised, (square, normal(29)), 1e-5, 1e-5, grad=True),
        OpCase("fused", "selected and cast", mixed, (x, booleans(5, 29)), 1e-3, 1e-3),
        OpCase("scan", "forward", cumulated, (x,), 1e-5, 1e-5, grad=True),
        OpCase("scan", "reverse", backwards, (x,), 1e-6, 1e-6, grad=True, grad_rtol=1e-4),
        OpCase("while", "counted", squared, (x, integers(low=2, high=6)), 1e-6, 1e-6),
        OpCase("cond", "switch", chosen, (integers(low=0, high=3), x), ULP, grad=True),
        OpCase(
            "empty2",
            "residual",
            jax.grad(lambda x, p: lax.cond(p, jnp.tanh, lambda x: 2 * x, x).sum()),
            (x, booleans()),
            1e-6,
            1e-6,
        ),
        OpCase(
            "function_call", "blocks", lambda v, w, x: block(v, block(w, x)), (square, square, x), 1e-5, 1e-5, grad=True
        ),
        OpCase("function_call", "one weight", lambda w, x: block(w, block(w, block(w, x))), (square, x), 1e-5, 1e-5),
        OpCase("cond", "if", lambda p, x: lax.cond(p, lambda x: x + 1, lambda x: x, x), (booleans(), x), grad=True),
    ]


def _rows_and_padding() -> list[OpCase]:
    x = normal(*MAIN)
    cube = normal(3, 5, 7)
    ints = integers(*MAIN)
    flags = booleans(*MAIN)
    sums = {"rtol": 1e-5, "atol": 1e-5, "grad": True}
    factors = uniform(5, 3, low=0.5, high=1.5)
    pad = [(1, 2, 0), (-3, 4, 2)]
    return [
        OpCase("cumsum", "rows", lambda x: jnp.cumsum(x, 1), (x,), **sums),
        OpCase("cumsum", "reverse", lambda x: lax.cumsum(x, 0, reverse=True), (x,), **sums),
        OpCase("cumsum", "vector", jnp.cumsum, (normal(71),), **sums),
        OpCase("cumsum", "int", lambda x: jnp.cumsum(x, 0), (ints,)),
        OpCase("cumprod", "columns", lambda x: lax.cumprod(x, 0), (factors,), **sums),
        OpCase("cummax", "middle", lambda x: lax.cummax(x, 1), (cube,), grad=True),
        OpCase("cummin", "reverse", lambda x: lax.cummin(x, 2, reverse=True), (cube,), grad=True),
        OpCase("cumlogsumexp", "rows", lambda x: lax.cumlogsumexp(x, 1), (normal(5, 7),), **sums),
        OpCase("sort", "rows", lambda x: lax.sort(x, dimension=1), (x,), grad=True),
        OpCase("sort", "pairs", lambda k, v: lax.sort((k, v), dimension=0, num_keys=1), (ints, x)),
        OpCase("sort", "two-keys", lambda k, v: lax.sort((k, v), dimension=1, num_keys=2, is_stable=False), (flags, x)),
        OpCase("sort", "scalar-rows", lambda x: lax.sort(x, dimension=1), (normal(5, 1),)),
        OpCase("top_k", "three", lambda x: lax.top_k(x, 3), (x,), grad=True),
        OpCase("top_k", "ties", lambda x: lax.top_k(x, 4), (ints,)),
        OpCase("approx_top_k", "largest", lambda x: lax.approx_max_k(x, 3), (x,)),
        OpCase("approx_top_k", "smallest", lambda x: lax.approx_min_k(x, 2, reduction_dimension=0), (x,)),
        OpCase("iota", "columns", lambda x: x * lax.broadcasted_iota(np.float32, MAIN, 1), (x,)),
        OpCase("iota", "int", lambda i: i + jnp.arange(377, dtype=np.int32), (integers(),)),
        OpCase("pad", "all-kinds", lambda x, v: lax.pad(x, v, pad), (x, normal()), grad=True),
        OpCase("pad", "constant", lambda x: jnp.pad(x, ((0, 0), (2, 1), (0, 3))), (cube,), grad=True),
        OpCase("pad", "from empty", lambda x: lax.pad(x, np.float32(3), [(2, 1, 0), (0, 0, 0)]), (normal(0, 3),)),
        OpCase("pad", "bool", lambda x: jnp.pad(x, 1), (flags,)),
    ]


def _random() -> list[OpCase]:
    def keys(*shape: int) -> Spec:
        return lambda rng: jax.random.split(jax.random.key(7), int(np.prod(shape))).reshape(shape)

    def bits_of_state(state: Any) -> Any:
        return lax.rng_bit_generator(state, (13, 29))

    def is_between(low: Any, high: Any) -> Any:
        drawn = lax.rng_uniform(low, high, MAIN)  # other numbers each time
        return (low <= drawn) & (drawn < high)

    key = keys()
    words = integers(2, low=0, high=2**31, dtype=np.uint32)
    return [
        OpCase("random_bits", "one-key", lambda k: jax.random.bits(k, (7, 11)), (key,)),
        OpCase("random_bits", "keys", jax.vmap(lambda k: jax.random.bits(k, (7,), np.uint16)), (keys(5),)),
        OpCase("random_bits", "normal", lambda k: jax.random.normal(k, (71,)), (key,), 1e-6, 1e-6),
        OpCase(
            "random_bits",
            "dropout",
            lambda k, x: jnp.where(jax.random.bernoulli(k, 0.8, x.shape), x / 0.8, 0),
            (key, normal(3, 29)),
            ULP,
            grad=True,
        ),
        OpCase("random_gamma", "one-key", lambda k: jax.random.gamma(k, 2.0, (13,)), (key,), 1e-6),
        OpCase("random_gamma", "keys", jax.vmap(lambda k: jax.random.gamma(k, jnp.arange(1.0, 4.0))), (keys(5),), 1e-6),
        OpCase("rng_bit_generator", "state", bits_of_state, (integers(4, low=0, dtype=np.uint32),)),
        OpCase("rng_uniform", "within bounds", is_between, (normal(), uniform(low=3, high=4))),
        OpCase("random_split", "three", lambda k: jax.random.split(k, 3), (key,)),
        OpCase("random_fold_in", "step", jax.random.fold_in, (key, integers(low=0))),
        OpCase("random_seed", "one", lambda s: jax.random.key_data(jax.random.key(s)), (integers(low=0),)),
        OpCase("random_wrap", "old", lambda w: jax.random.uniform(jax.random.wrap_key_data(w), (5, 7)), (words,)),
        OpCase("random_unwrap", "keys", jax.random.key_data, (keys(5, 3),)),
        OpCase("random_clone", "key", lambda k: jax.random.bits(jax.random.clone(k), (3,)), (key,)),
        OpCase("threefry2x32", "words", threefry_2x32, (words, integers(7, low=0, dtype=np.uint32))),
    ]


def cases_of(*families: Callable[[], Sequence[OpCase]]) -> tuple[OpCase, ...]:
    """Rows of some families, in order."""
    return tuple(case for family in families for case in family())


FAMILIES: dict[str, tuple[OpCase, ...]] = {
    "unary": cases_of(unary),
    "binary": cases_of(binary),
    "special": cases_of(special),
    "shape": cases_of(_shape),
    "reductions": cases_of(_reductions),
    "linear": cases_of(_linear),
    "windows": cases_of(_windows, _dynamic),
    "control": cases_of(_control),
    "indexing": cases_of(indexing),
    "rows": cases_of(_rows_and_padding),
    "random": cases_of(_random),
    "codelet": cases_of(codelet),
    "tiles": cases_of(tiles),
    "devices": cases_of(devices),
    "effects": cases_of(effects),
}
CASES: tuple[OpCase, ...] = tuple(case for cases in FAMILIES.values() for case in cases)
