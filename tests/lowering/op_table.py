"""The op table: for each primitive with a lowering rule, functions that trace to it and arrays to call them with.

`CASES` lists all rows; `tests/lowering/test_op_table.py` runs them. Shapes are odd on purpose: they divide no number of
tiles, and there are scalars, dimensions of size 1 and arrays without elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Spec = Callable[[np.random.Generator], Any]


def normal(*shape: int, dtype: Any = np.float32, scale: float = 1.0) -> Spec:
    """Normal numbers."""
    return lambda rng: np.asarray(scale * rng.normal(size=shape), dtype)


def uniform(*shape: int, low: float, high: float, dtype: Any = np.float32) -> Spec:
    """Numbers in an interval."""
    return lambda rng: np.asarray(rng.uniform(low, high, shape), dtype)


def integers(*shape: int, low: int = -9, high: int = 10, dtype: Any = np.int32) -> Spec:
    """Integers from `low` up to `high`, exclusive."""
    return lambda rng: np.asarray(rng.integers(low, high, shape), dtype)


def booleans(*shape: int) -> Spec:
    """Truth values, three in four of them true."""
    return lambda rng: np.asarray(rng.random(shape) < 0.75)


def distinct(*shape: int) -> Spec:
    """Numbers of which no two are equal."""
    return lambda rng: rng.permutation(int(np.prod(shape))).reshape(shape).astype(np.float32)


@dataclass(frozen=True, slots=True)
class OpCase:
    """One row.

    Args:
        primitive: the primitive that `fun` must trace to.
        name: what tells the rows of a primitive apart.
        fun: function of arrays.
        specs: makers of its arguments.
        rtol, atol: tolerance of the engine against plain JAX; 0 is equality to the bit.
        split_rtol, split_atol: tolerance of executions that reassociate sums; as the engine's when None.
        grad: whether the gradient is tested too.
        grad_rtol: relative tolerance of the gradient.
    """

    primitive: str
    name: str
    fun: Callable[..., Any]
    specs: tuple[Spec, ...]
    rtol: float = 0.0
    atol: float = 0.0
    split_rtol: float | None = None
    split_atol: float | None = None
    grad: bool = False
    grad_rtol: float = 1e-5

    @property
    def id(self) -> str:
        """Name of the row in a test report."""
        return f"{self.primitive}-{self.name}"

    def arguments(self) -> tuple[Any, ...]:
        """The row's arrays, the same each time."""
        rng = np.random.default_rng(list(self.id.encode()))
        return tuple(spec(rng) for spec in self.specs)


MAIN = (13, 29)  # 377 elements: 1 to 11 tiles hold some
ULP = 3e-7  # a vector and a scalar version of one function differ in the last bit
HALF_ULP = {np.float32: ULP, np.float16: 2e-3, jnp.bfloat16: 1.6e-2}


def _unary() -> list[OpCase]:
    """Functions of one operand; the interval keeps arguments where the function is defined and tame."""
    rows: list[tuple[str, Callable[..., Any], float, float, bool]] = [
        ("abs", lax.abs, -3, 3, True),
        ("acos", lax.acos, -0.9, 0.9, True),
        ("acosh", lax.acosh, 1.1, 4, True),
        ("asin", lax.asin, -0.9, 0.9, True),
        ("asinh", lax.asinh, -3, 3, True),
        ("atan", lax.atan, -3, 3, True),
        ("atanh", lax.atanh, -0.9, 0.9, True),
        ("cbrt", lax.cbrt, 0.2, 3, True),
        ("ceil", lax.ceil, -3, 3, False),
        ("cos", lax.cos, -3, 3, True),
        ("cosh", lax.cosh, -3, 3, True),
        ("digamma", lax.digamma, 0.5, 4, False),
        ("erf", lax.erf, -2, 2, True),
        ("erf_inv", lax.erf_inv, -0.9, 0.9, True),
        ("erfc", lax.erfc, -2, 2, True),
        ("exp", lax.exp, -3, 3, True),
        ("exp2", lax.exp2, -3, 3, True),
        ("expm1", lax.expm1, -3, 3, True),
        ("floor", lax.floor, -3, 3, False),
        ("lgamma", lax.lgamma, 0.5, 4, True),
        ("log", lax.log, 0.1, 4, True),
        ("log1p", lax.log1p, -0.5, 4, True),
        ("logistic", lax.logistic, -4, 4, True),
        ("neg", lax.neg, -3, 3, True),
        ("round", partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN), -3, 3, False),
        ("rsqrt", lax.rsqrt, 0.1, 4, True),
        ("sign", lax.sign, -3, 3, False),
        ("sin", lax.sin, -3, 3, True),
        ("sinh", lax.sinh, -3, 3, True),
        ("sqrt", lax.sqrt, 0.1, 4, True),
        ("square", lax.square, -3, 3, True),
        ("tan", lax.tan, -1.2, 1.2, True),
        ("tanh", lax.tanh, -3, 3, True),
    ]
    cases = []
    for number, (name, fun, low, high, grad) in enumerate(rows):
        dtype = (np.float16, jnp.bfloat16)[number % 2]
        small = ((), (1, 3, 1), (0, 3), (1,))[number % 4]
        cases += [
            OpCase(name, "f32", fun, (uniform(*MAIN, low=low, high=high),), 4 * ULP, ULP, grad=grad, grad_rtol=3e-5),
            OpCase(name, "narrow", fun, (uniform(5, 7, low=low, high=high, dtype=dtype),), HALF_ULP[dtype], 2e-3),
            OpCase(name, "small", fun, (uniform(*small, low=low, high=high),), 4 * ULP, ULP, grad=grad, grad_rtol=3e-5),
        ]
    return cases


def _binary() -> list[OpCase]:
    positive = uniform(*MAIN, low=0.2, high=2)
    floats, whole, shifts = normal(*MAIN), integers(*MAIN), integers(*MAIN, low=0, high=31)
    nonzero = integers(*MAIN, low=1)
    cases = [
        OpCase("add", "f32", lax.add, (floats, floats), grad=True),
        OpCase("add", "int", lax.add, (whole, whole)),
        OpCase("add", "scalars", lax.add, (normal(), normal()), grad=True),
        OpCase("add", "half", lax.add, (normal(5, 7, dtype=np.float16), normal(5, 7, dtype=np.float16)), 1e-3),
        OpCase("add", "bfloat16", lax.add, (normal(5, 7, dtype=jnp.bfloat16), normal(5, 7, dtype=jnp.bfloat16)), 8e-3),
        OpCase("add", "rows", lambda x, b: x + b, (floats, normal(29)), ULP, split_rtol=ULP, grad=True),
        OpCase("add", "outer", lambda x, y: x[:, None] + y, (normal(13), normal(1, 29)), grad=True),
        OpCase("sub", "f32", lax.sub, (floats, floats), grad=True),
        OpCase("sub", "from-one", lambda x: 1 - x, (floats,), grad=True),
        OpCase("mul", "f32", lax.mul, (floats, floats), grad=True),
        OpCase("mul", "transposed", lambda x, y: x * y.T, (floats, normal(29, 13)), grad=True),
        OpCase("mul", "empty", lax.mul, (normal(0, 3), normal(0, 3)), grad=True),
        OpCase("add_any", "f32", jax.grad(lambda x, y: jnp.sum(x * x * y)), (floats, floats), ULP, ULP),
        OpCase("max", "f32", lax.max, (floats, floats), grad=True),
        OpCase("max", "relu", lambda x: jnp.maximum(x, 0), (floats,)),
        OpCase("min", "f32", lax.min, (floats, floats), grad=True),
        OpCase("min", "bool", lax.min, (booleans(*MAIN), booleans(*MAIN))),
        OpCase("clamp", "scalars", lambda x: lax.clamp(-0.5, x, 0.5), (floats,), grad=True),
        OpCase("clamp", "arrays", lax.clamp, (uniform(*MAIN, low=-1, high=0), floats, positive), grad=True),
        OpCase("clamp", "runtime-scalars", lax.clamp, (uniform(low=-1, high=0), floats, uniform(low=0, high=1))),
        OpCase("div", "f32", lax.div, (floats, positive), ULP, grad=True),
        OpCase("div", "int", lax.div, (whole, nonzero)),
        OpCase("rem", "f32", lax.rem, (floats, positive), ULP, 1e-6),
        OpCase("rem", "int", lax.rem, (whole, nonzero)),
        OpCase("pow", "f32", lax.pow, (positive, floats), 2e-6, grad=True),
        OpCase("pow", "int-exponent", lax.pow, (positive, whole), 4e-6),
        OpCase("integer_pow", "cube", lambda x: x**3, (floats,), ULP, grad=True),
        OpCase("integer_pow", "inverse", lambda x: lax.integer_pow(x, -2), (positive,), 2e-6, grad=True),
        OpCase("atan2", "f32", lax.atan2, (floats, positive), 2e-6, grad=True),
        OpCase("nextafter", "f32", lax.nextafter, (floats, floats)),
        OpCase("and", "int", lax.bitwise_and, (whole, whole)),
        OpCase("or", "bool", lax.bitwise_or, (booleans(5, 7), booleans(5, 7))),
        OpCase("xor", "uint", lax.bitwise_xor, (integers(*MAIN, low=0, dtype=np.uint32),) * 2),
        OpCase("not", "bool", lax.bitwise_not, (booleans(*MAIN),)),
        OpCase("not", "int", lax.bitwise_not, (whole,)),
        OpCase("shift_left", "int", lax.shift_left, (whole, shifts)),
        OpCase("shift_right_logical", "int", lax.shift_right_logical, (whole, shifts)),
        OpCase("shift_right_arithmetic", "int", lax.shift_right_arithmetic, (whole, shifts)),
        OpCase("population_count", "int", lax.population_count, (whole,)),
        OpCase("clz", "int", lax.clz, (whole,)),
        OpCase("is_finite", "f32", lax.is_finite, (lambda rng: np.log(np.asarray(rng.integers(0, 3, MAIN), np.float32) + 0),)),
        OpCase("select_n", "where", jnp.where, (booleans(*MAIN), floats, floats), grad=True),
        OpCase("select_n", "scalar", lambda p, x, y: lax.select_n(p, x, y), (booleans(), floats, floats), grad=True),
        OpCase("select_n", "three", lax.select_n, (integers(*MAIN, low=0, high=3), floats, floats, floats), grad=True),
        OpCase("convert_element_type", "half", lambda x: x.astype(np.float16), (floats,), grad=True, grad_rtol=2e-3),
        OpCase("convert_element_type", "bfloat16", lambda x: x.astype(jnp.bfloat16), (floats,)),
        OpCase("convert_element_type", "int", lambda x: (3 * x).astype(np.int32), (floats,)),
        OpCase("convert_element_type", "bool", lambda x: x.astype(np.bool_), (whole,)),
        OpCase("reduce_precision", "f32", lambda x: lax.reduce_precision(x, 5, 7), (floats,), grad=True),
        OpCase("bitcast_convert_type", "same", lambda x: lax.bitcast_convert_type(x, np.int32), (floats,)),
        OpCase("bitcast_convert_type", "narrower", lambda x: lax.bitcast_convert_type(x, np.uint8), (normal(5, 7),)),
        OpCase("bitcast_convert_type", "wider", lambda x: lax.bitcast_convert_type(x, np.int32), (integers(5, 4, low=0, dtype=np.uint8),)),
    ]  # fmt: skip
    for name in ("eq", "ne", "ge", "gt", "le", "lt"):
        fun = getattr(lax, name)
        cases.append(OpCase(name, "int", fun, (integers(*MAIN, low=0, high=3), integers(*MAIN, low=0, high=3))))
        cases.append(OpCase(name, "f32", fun, (floats, floats)))
        cases.append(OpCase(name, "constant", lambda x, fun=fun: fun(x, np.float32(0)), (normal(5, 1),)))
    return cases


def _shape() -> list[OpCase]:
    """Views; multiplied by a ramp of the result's shape, so that someone reads them tile by tile."""

    def used(view: Callable[..., Any]) -> Callable[..., Any]:
        def fun(*arrays: Any) -> Any:
            return [y * np.arange(1, y.size + 1, dtype=np.float32).reshape(y.shape) for y in jax.tree.leaves(view(*arrays))]

        return fun

    x, cube = normal(*MAIN), normal(3, 5, 7)
    rows: list[tuple[str, str, Callable[..., Any], tuple[Spec, ...]]] = [
        ("reshape", "flat", lambda x: x.reshape(-1), (x,)),
        ("reshape", "mixed", lambda x: x.transpose(2, 0, 1).reshape(21, 5), (cube,)),
        ("reshape", "scalar", lambda x: x.reshape(()), (normal(1, 1),)),
        ("broadcast_in_dim", "middle", lambda x: lax.broadcast_in_dim(x, (3, 4, 7), (0, 2)), (normal(3, 1),)),
        ("broadcast_in_dim", "scalar", lambda x: jnp.broadcast_to(x, (13, 29)), (normal(),)),
        ("transpose", "cube", lambda x: x.transpose(2, 0, 1), (cube,)),
        ("transpose", "matrix", lambda x: x.T, (x,)),
        ("squeeze", "some", lambda x: lax.squeeze(x, (0, 2)), (normal(1, 5, 1, 7),)),
        ("expand_dims", "two", lambda x: lax.expand_dims(x, (0, 2)), (normal(5, 7),)),
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
        ("name", "all", lambda x: jax.ad_checkpoint.checkpoint_name(x, "kept"), (x,)),
    ]
    undifferentiable = ("stop_gradient", "optimization_barrier")
    return [OpCase(p, n, used(f), specs, grad=p not in undifferentiable) for p, n, f, specs in rows]


def _reductions() -> list[OpCase]:
    x, cube, flags, whole = normal(*MAIN), normal(7, 5, 11), booleans(*MAIN), integers(*MAIN)
    positive = uniform(7, 5, 11, low=0.8, high=1.2)
    narrow = normal(5, 70, dtype=jnp.bfloat16)
    sums = {"rtol": 1e-5, "atol": 1e-5}
    return [
        OpCase("reduce_sum", "all", jnp.sum, (x,), **sums, grad=True),
        OpCase("reduce_sum", "rows", lambda x: x.sum(1), (x,), **sums, grad=True),
        OpCase("reduce_sum", "columns", lambda x: x.sum(0), (x,), **sums, grad=True),
        OpCase("reduce_sum", "middle", lambda x: x.sum(1), (cube,), **sums, grad=True),
        OpCase("reduce_sum", "outside", lambda x: x.sum((0, 2)), (cube,), **sums, grad=True),
        OpCase("reduce_sum", "none", lambda x: lax.reduce_sum_p.bind(x, axes=(), out_sharding=None), (normal(5, 7),)),
        OpCase("reduce_sum", "nothing", lambda x: x.sum(0), (normal(0, 3),)),
        OpCase("reduce_sum", "into-nothing", lambda x: x.sum(1), (normal(0, 3),)),
        OpCase("reduce_sum", "transposed", lambda x: x.T[3:].sum(0), (x,), **sums, grad=True),
        OpCase("reduce_sum", "broadcast", lambda x: jnp.broadcast_to(x, (31, 29)).sum(0), (normal(29),), **sums),
        OpCase("reduce_sum", "int", jnp.sum, (whole,)),
        OpCase("reduce_sum", "long", jnp.sum, (normal(4099),), **sums, grad=True),
        OpCase("reduce_sum", "bfloat16", lambda x: lax.reduce_sum(x, (0, 1)), (narrow,), 5e-2, 5e-1),
        OpCase("reduce_prod", "middle", lambda x: x.prod(1), (positive,), **sums, grad=True, grad_rtol=1e-4),
        OpCase("reduce_prod", "nothing", lambda x: x.prod(0), (normal(0, 3),)),
        OpCase("reduce_max", "all", jnp.max, (distinct(*MAIN),), grad=True),
        OpCase("reduce_max", "rows", lambda x: x.max(1), (distinct(*MAIN),), grad=True),
        OpCase("reduce_max", "int", lambda x: x.max(0), (whole,)),
        OpCase("reduce_min", "columns", lambda x: x.min(0), (distinct(*MAIN),), grad=True),
        OpCase("reduce_min", "half", jnp.min, (normal(13, 29, dtype=np.float16),)),
        OpCase("reduce_and", "rows", lambda x: x.all(1), (flags,)),
        OpCase("reduce_and", "int", lambda x: lax.reduce_and(x, (0,)), (whole,)),
        OpCase("reduce_or", "all", jnp.any, (flags,)),
        OpCase("reduce_xor", "columns", lambda x: lax.reduce_xor(x, (0,)), (whole,)),
        OpCase("reduce_xor", "bool", lambda x: lax.reduce_xor(x, (0, 1)), (flags,)),
        OpCase("argmax", "rows", lambda x: jnp.argmax(x, 1), (x,)),
        OpCase("argmax", "ties", lambda x: jnp.argmax(x, 0), (whole,)),
        OpCase("argmin", "columns", lambda x: jnp.argmin(x, 0), (x,)),
        OpCase("argmin", "long", jnp.argmin, (normal(1031),)),
    ]


def _linear() -> list[OpCase]:
    close = {"rtol": 1e-5, "atol": 1e-5, "grad": True, "grad_rtol": 1e-4}
    narrow = {"rtol": 1e-2, "atol": 1e-2}
    image, kernel = normal(2, 7, 6, 3), normal(3, 3, 3, 5)
    conv = partial(lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return [
        OpCase("dot_general", "matrix", jnp.dot, (normal(13, 29), normal(29, 11)), **close),
        OpCase("dot_general", "vector", jnp.dot, (normal(13, 29), normal(29)), **close),
        OpCase("dot_general", "scalar", jnp.dot, (normal(29), normal(29)), **close),
        OpCase("dot_general", "outer", lambda a, b: lax.dot_general(a, b, (((), ()), ((), ()))), (normal(5), normal(7)), **close),
        OpCase("dot_general", "batch", lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (normal(3, 5, 7), normal(3, 2, 7)), **close),
        OpCase("dot_general", "mixed", lambda a, b: jnp.einsum("ibjc,cbi->bj", a, b), (normal(2, 3, 5, 7), normal(7, 3, 2)), **close),
        OpCase("dot_general", "nothing", jnp.dot, (normal(5, 0), normal(0, 7))),
        OpCase("dot_general", "int", jnp.dot, (integers(5, 7), integers(7, 3))),
        OpCase("dot_general", "half", jnp.dot, (normal(5, 7, dtype=np.float16), normal(7, 3, dtype=np.float16)), **narrow),
        OpCase("dot_general", "bfloat16", partial(jnp.dot, preferred_element_type=np.float32), (normal(5, 7, dtype=jnp.bfloat16), normal(7, 3, dtype=jnp.bfloat16)), **narrow),
        OpCase("conv_general_dilated", "same", partial(conv, window_strides=(1, 1), padding="SAME"), (image, kernel), **close),
        OpCase("conv_general_dilated", "strided", partial(conv, window_strides=(2, 3), padding="VALID"), (image, kernel), **close),
        OpCase("conv_general_dilated", "dilated", partial(conv, window_strides=(1, 2), padding=((2, 1), (-1, 3)), lhs_dilation=(2, 1), rhs_dilation=(1, 2)), (image, kernel), **close),
        OpCase("conv_general_dilated", "groups", partial(conv, window_strides=(1, 1), padding="SAME", feature_group_count=3), (image, normal(2, 2, 1, 6)), **close),
    ]  # fmt: skip


def _windows() -> list[OpCase]:
    def pool(x: Any, reducer: Any, start: float, stride: int = 2) -> Any:
        return lax.reduce_window(x, np.float32(start), reducer, (1, 3, 2, 1), (1, stride, stride, 1), "SAME")

    biggest = partial(pool, reducer=lax.max, start=-np.inf)
    image = distinct(2, 7, 6, 3)

    def pooled_gradient(x: Any) -> Any:
        return jax.grad(lambda x: (biggest(x) ** 2).sum())(x)

    def pooled_tangent(x: Any, t: Any) -> Any:
        return jax.jvp(biggest, (x,), (t,))[1]

    return [
        OpCase("reduce_window_max", "overlapping", biggest, (image,), grad=True),
        OpCase("reduce_window_min", "overlapping", partial(pool, reducer=lax.min, start=np.inf), (image,), grad=True),
        OpCase("reduce_window_sum", "dense", partial(pool, reducer=lax.add, start=0, stride=1), (image,), ULP, grad=True),
        OpCase("select_and_scatter_add", "gradient", pooled_gradient, (image,), ULP),
        OpCase("select_and_gather_add", "tangent", pooled_tangent, (image, normal(2, 7, 6, 3)), ULP),
    ]


def _dynamic() -> list[OpCase]:
    x, i = normal(*MAIN), integers(low=0, high=9)
    return [
        OpCase("dynamic_slice", "both", lambda x, i: lax.dynamic_slice(x, (i, i + 1), (3, 20)), (x, i), grad=True),
        OpCase("dynamic_slice", "row", lambda x, i: lax.dynamic_index_in_dim(x, i, 0), (x, i), grad=True),
        OpCase("dynamic_slice", "clamped", lambda x: lax.dynamic_slice(x, (np.int32(99), 2), (3, 29)), (x,)),
        OpCase("dynamic_slice", "nothing", lambda x, i: lax.dynamic_slice(x, (i, i), (0, 3)), (x, i)),
        OpCase("dynamic_update_slice", "box", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), (x, normal(4, 5), i), grad=True),
        OpCase("dynamic_update_slice", "all", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), (x, x, i)),
        OpCase("dynamic_update_slice", "row", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), (x, normal(1, 29), i), grad=True),
    ]  # fmt: skip


def _control() -> list[OpCase]:
    x = normal(5, 29)

    def cumulated(x: Any) -> Any:
        return lax.scan(lambda c, row: (c * 0.9 + row, c.sum()), jnp.zeros(29), x)

    def backwards(x: Any) -> Any:
        return lax.scan(lambda c, row: (jnp.tanh(c + row), c), x[0], x, reverse=True)

    def squared(x: Any, n: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.5 + x), (0, x))

    def chosen(i: Any, x: Any) -> Any:
        return lax.switch(i, [lambda x: x * 2, lambda x: x[::-1], jnp.tanh], x)

    return [
        OpCase("scan", "forward", cumulated, (x,), 1e-5, 1e-5, grad=True),
        OpCase("scan", "reverse", backwards, (x,), 1e-6, 1e-6, grad=True, grad_rtol=1e-4),
        OpCase("while", "counted", squared, (x, integers(low=2, high=6)), 1e-6, 1e-6),
        OpCase("cond", "switch", chosen, (integers(low=0, high=3), x), ULP, grad=True),
        OpCase("cond", "if", lambda p, x: lax.cond(p, lambda x: x + 1, lambda x: x, x), (booleans(), x), grad=True),
    ]


def _indexing() -> list[OpCase]:
    table, rows = normal(17, 5), integers(7, low=0, high=17)
    labels = integers(13, low=0, high=29)

    def scattered(kind: str, **params: Any) -> Callable[..., Any]:
        return lambda t, i, u: getattr(t.at[i], kind)(u, **params)

    updates = normal(7, 5)
    return [
        OpCase("gather", "rows", lambda t, i: t[i], (table, rows), grad=True),
        OpCase("gather", "labels", lambda x, i: jnp.take_along_axis(x, i[:, None], 1), (normal(*MAIN), labels), grad=True),
        OpCase("gather", "outside", lambda t, i: jnp.take(t, i, 0), (table, integers(7, low=-40, high=40))),
        OpCase("gather", "columns", lambda t, i: t[:, i], (normal(3, 17), rows), grad=True),
        OpCase("gather", "int", lambda t, i: t[i], (integers(17), rows)),
        OpCase("scatter", "set", scattered("set"), (table, lambda rng: rng.permutation(17)[:7], updates)),
        OpCase("scatter-add", "duplicates", scattered("add"), (table, rows, updates), 1e-6, 1e-6, grad=True),
        OpCase("scatter-sub", "duplicates", scattered("subtract"), (table, rows, updates), 1e-6, 1e-6),
        OpCase("scatter-mul", "duplicates", scattered("multiply"), (table, rows, updates), 1e-6, 1e-6),
        OpCase("scatter-min", "duplicates", scattered("min"), (table, rows, updates)),
        OpCase("scatter-max", "duplicates", scattered("max"), (table, rows, updates)),
    ]  # fmt: skip


def cases_of(*families: Callable[[], Sequence[OpCase]]) -> tuple[OpCase, ...]:
    """The rows of some families, in order."""
    return tuple(case for family in families for case in family())


FAMILIES: dict[str, tuple[OpCase, ...]] = {
    "unary": cases_of(_unary),
    "binary": cases_of(_binary),
    "shape": cases_of(_shape),
    "reductions": cases_of(_reductions),
    "linear": cases_of(_linear),
    "windows": cases_of(_windows, _dynamic),
    "control": cases_of(_control),
}
CASES: tuple[OpCase, ...] = tuple(case for cases in FAMILIES.values() for case in cases)
