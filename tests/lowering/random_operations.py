"""The operations of random programs: total functions of arrays and picks, for every operand there may be.

An operation bends what it is given to what it needs: shapes are fitted, indices wrap, arrays without elements become
ones. Numbers stay small, so that sums and products do not run away over a whole program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.lowering.random_memory import host_and_back, offloaded_residuals, ref_in_loop, ref_moved

Picks = tuple[int, ...]
SHAPES = ((), (7,), (1,), (3, 5), (5, 3), (2, 3, 4), (4, 1, 5), (13, 3), (6, 6), (2, 1, 3, 2), (29,), (0, 3))


@dataclass(frozen=True)
class Operation:
    """A row of the grammar.

    Args:
        kinds: kind of each operand.
        fun: from operands and picks to results.
        demand: "smooth" of any values, "continuous" of exact ones where differentiated, "exact" of exact ones always.
        moves: whether exact operands give exact results.
    """

    kinds: tuple[str, ...]
    fun: Callable[..., Any]
    demand: str = "smooth"
    moves: bool = False


def fitted(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`x` in another shape: broadcast where that works, else its elements repeated or cut."""
    shape = tuple(shape)
    if x.shape == shape:
        return x
    if x.ndim <= len(shape) and all(a in (1, b) for a, b in zip(x.shape[::-1], shape[::-1], strict=False)):
        return jnp.broadcast_to(x, shape)
    size = int(np.prod(shape))
    if not x.size or not size:
        return jnp.zeros(shape, x.dtype)
    return jnp.tile(x.ravel(), -(-size // x.size))[:size].reshape(shape)


def _axis(x: jax.Array, pick: int) -> int:
    return pick % x.ndim


def _some(x: jax.Array) -> jax.Array:
    """At least one dimension and one element."""
    return x.reshape(-1) if x.size and not x.ndim else x if x.size else jnp.ones((2, 3), x.dtype)


def _matrix(x: jax.Array) -> jax.Array:
    x = _some(x)
    return x.reshape(-1, x.shape[-1])


def _binary(fun: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
    def apply(x: jax.Array, y: jax.Array, picks: Picks) -> jax.Array:
        del picks
        try:
            np.broadcast_shapes(x.shape, y.shape)
        except ValueError:
            y = fitted(y, x.shape)
        return fun(x, y)

    return apply


def _unary(fun: Callable[[jax.Array], Any]) -> Callable[..., Any]:
    return lambda x, picks: fun(x)


def _along(fun: Callable[[jax.Array, int], Any]) -> Callable[..., Any]:
    """A function of an array of at least one element and an axis."""
    return lambda x, picks: fun(y := _some(x), _axis(y, picks[-1]))


def _padded(x: jax.Array, picks: Picks) -> jax.Array:
    config = [((a + d) % 4 - 1, (b + d) % 4 - 1, (a + b) % 2) for d, (a, b) in enumerate([picks[1:3]] * x.ndim)]
    if any(n + low + high + max(n - 1, 0) * inner < 0 for n, (low, high, inner) in zip(x.shape, config, strict=True)):
        return x
    return lax.pad(x, jnp.asarray(1, x.dtype), config)


def _sliced(x: jax.Array, picks: Picks) -> jax.Array:
    starts = [picks[1] % n if n else 0 for n in x.shape]
    strides = [1 + (picks[2] + d) % 3 for d in range(x.ndim)]
    return lax.slice(x, starts, x.shape, strides)


def _transposed(x: jax.Array, picks: Picks) -> jax.Array:
    return x.transpose(np.random.default_rng(picks[1]).permutation(x.ndim))


def _reshaped(x: jax.Array, picks: Picks) -> jax.Array:
    factors = [k for k in range(1, x.size + 1) if x.size % k == 0] or [1]
    return x.reshape(-1) if not x.size else x.reshape((factors[picks[1] % len(factors)], -1))


def _joined(x: jax.Array, y: jax.Array, picks: Picks) -> jax.Array:
    x = x.reshape(-1) if not x.ndim else x
    axis = _axis(x, picks[2])
    return lax.concatenate([x, fitted(y, x.shape), x], axis)


def _dot(x: jax.Array, y: jax.Array, picks: Picks) -> jax.Array:
    a = _matrix(x)
    if picks[2] % 3 == 0:
        return jnp.tanh(a @ fitted(y, (a.shape[1], 1 + picks[3] % 6)) / a.shape[1])
    if picks[2] % 3 == 1:
        return jnp.tanh(lax.dot_general(a, fitted(y, a.shape), (((0,), (0,)), ((), ()))) / a.shape[0])
    b = fitted(y, (a.shape[1], a.shape[0], 2))
    return jnp.tanh(jnp.einsum("ij,jik->kj", a, b) / a.shape[0])


def _mixed_dot(x: jax.Array, w: jax.Array, picks: Picks) -> list[jax.Array]:
    """A product of two widths and its gradients, of -1, 0 and 1: any sum of up to 240 of them is exact in each."""
    x = jnp.sign(_matrix(x))
    w = w if w.ndim == 2 and w.size else jnp.ones((3, 2), w.dtype)
    x = fitted(x, (x.shape[0], w.shape[0])).astype((np.float32, np.float16)[picks[2] % 2])
    recorded = jnp.where(jnp.arange(w.shape[1]) % 2, 1, -1)

    def summed(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = x @ w if picks[3] % 2 else (w.T @ x.T).T
        return (product.astype(np.float32) * recorded).sum(), product

    (of_w, of_x), product = jax.grad(summed, (0, 1), has_aux=True)(w, x)
    # Gradients of these would be rounded to half, at any last bit.
    return [lax.stop_gradient(out) for out in (of_w, of_x.astype(np.float32) / 256, product.astype(np.float32) / 256)]


def _without_tangents(x: jax.Array, i: jax.Array, picks: Picks) -> jax.Array:
    """Gradients of integers, which have no bytes, beside those of floats, through a call."""
    fun = lambda x, i: (x * fitted(i % 5, x.shape)).sum()  # noqa: E731
    call = (lambda f: f, jax.jit, jax.checkpoint)[picks[2] % 3]
    of_x, of_i = jax.grad(call(fun), (0, 1), allow_int=True)(x, i)
    assert of_i.dtype == jax.dtypes.float0
    return of_x / 8


def _convolved(x: jax.Array, y: jax.Array, picks: Picks) -> jax.Array:
    images = fitted(x, (2, 6, 4, 2))
    kernel = fitted(y, (1 + picks[2] % 3, 2, 2, 3))
    padding = ("SAME", "VALID", ((1, 2), (-1, 3)))[picks[3] % 3]
    out = lax.conv_general_dilated(
        images,
        kernel,
        (1 + picks[2] % 2, 1),
        padding,
        rhs_dilation=(1, 1 + picks[4] % 2),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return jnp.tanh(out / 4)


def _windowed(fun: Callable[..., Any], start: float) -> Callable[..., Any]:
    def apply(x: jax.Array, picks: Picks) -> jax.Array:
        x = _some(x)
        sizes = [1 + (picks[1] + d) % 3 for d in range(x.ndim)]
        strides = [1 + (picks[2] + d) % 2 for d in range(x.ndim)]
        return lax.reduce_window(x, np.float32(start), fun, sizes, strides, ("SAME", "VALID")[picks[3] % 2])

    return apply


def _taken(x: jax.Array, i: jax.Array, picks: Picks) -> jax.Array:
    x = _some(x)
    mode = ("clip", "fill", "wrap")[picks[3] % 3]
    return jnp.take(x, i.ravel()[:9], _axis(x, picks[2]), mode=mode, fill_value=0)


def _taken_along(x: jax.Array, i: jax.Array, picks: Picks) -> jax.Array:
    x = _some(x)
    axis = _axis(x, picks[2])
    return jnp.take_along_axis(x, fitted(i, x.shape) % x.shape[axis], axis)


def _scattered(kind: str) -> Callable[..., Any]:
    def apply(x: jax.Array, i: jax.Array, u: jax.Array, picks: Picks) -> jax.Array:
        x = _some(x)
        i = i.ravel()[:5]
        if kind == "set":  # several at one place would be any of them
            i = jnp.arange(i.size) * 2 % 7
        return getattr(x.at[i], kind)(fitted(u, (i.size, *x.shape[1:])), mode=("clip", "drop")[picks[3] % 2])

    if kind != "set":
        return apply
    return lambda x, i, u, picks: apply(x, i, u, (*picks[:3], 1, picks[4]))


def _sliced_at(x: jax.Array, i: jax.Array, picks: Picks) -> jax.Array:
    x = _some(x)
    at = fitted(i, (1,))[0]
    return lax.dynamic_slice(x, [at + d for d in range(x.ndim)], [1 + picks[2] % n for n in x.shape])


def _updated_at(x: jax.Array, i: jax.Array, u: jax.Array, picks: Picks) -> jax.Array:
    # The update is sorted, which is never fused: XLA CPU of JAX 0.10.2 computes wrong numbers of one that it fuses with
    # reads of `x`, by `jax.jit` too: `lambda x, i: lax.dynamic_update_slice(x[0], jnp.sin(x[0, :, :4]), (0, i))` of
    # float32[1, 3, 5] and 1.
    x = _some(x)
    at = fitted(i, (1,))[0]
    shape = [1 + picks[3] % n for n in x.shape]
    return lax.dynamic_update_slice(x, jnp.sort(fitted(u, shape).ravel()).reshape(shape), [at] * x.ndim)


def _chosen(x: jax.Array, y: jax.Array, p: jax.Array, picks: Picks) -> jax.Array:
    return jnp.where(fitted(p, x.shape), x, fitted(y, x.shape))


def _drawn(i: jax.Array, picks: Picks) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(picks[1]), fitted(i, (1,))[0])
    return jax.random.uniform(key, SHAPES[picks[2] % len(SHAPES)])


def _split(x: jax.Array, picks: Picks) -> list[jax.Array]:
    x = _some(x)
    axis = _axis(x, picks[1])
    cut = picks[2] % (x.shape[axis] + 1)
    return lax.split(x, (cut, x.shape[axis] - cut), axis)


def _divisor(i: jax.Array) -> jax.Array:
    """1 … 8: plain `jax.jit` on CPU dies of some divisions of integers by zero."""
    return (i & 7) + 1


def _largest(x: jax.Array, picks: Picks) -> Any:
    x = _some(x)
    return lax.top_k(x, 1 + picks[1] % x.shape[-1])


def _mapped(x: jax.Array, y: jax.Array, picks: Picks) -> jax.Array:
    x = _some(x)
    return jax.vmap(lambda row, other: jnp.tanh(row * other).sum() / row.size, (0, None))(x, fitted(y, x.shape[1:]))


@jax.custom_jvp
def _bent(x: jax.Array) -> jax.Array:
    return jnp.sin(x) + x


@_bent.defjvp
def _bent_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _bent(primals[0]), tangents[0] * (jnp.cos(primals[0]) + 1)


def _rows_and_steps(x: jax.Array) -> tuple[jax.Array, int]:
    """A buffer of at least two rows, and how many iterations go over it."""
    rows = _some(x)
    rows = jnp.concatenate([rows, rows]) if len(rows) < 2 else rows
    return rows, min(len(rows), 6)


def _recurrence(x: jax.Array, y: jax.Array, picks: Picks) -> jax.Array:
    """A loop that writes rows of a buffer computed from other rows of it."""
    buffer, steps = _rows_and_steps(x)
    distance = 1 + picks[2] % 3
    settings = fitted(y, buffer.shape)

    def iteration(i: Any, b: jax.Array) -> jax.Array:
        return b.at[i].set(jnp.tanh(b[i - distance] * 0.5 + settings[i]))

    if picks[3] % 2:
        return lax.scan(lambda b, i: (iteration(i, b), None), buffer, jnp.arange(steps))[0]
    return lax.fori_loop(0, steps, iteration, buffer)


def _on_rows(fun: Callable[[jax.Array, jax.Array, Picks], Any]) -> Callable[..., Any]:
    """A function of a buffer of rows, of more rows of its shape, and of picks."""

    def apply(x: jax.Array, y: jax.Array, picks: Picks) -> Any:
        buffer, _ = _rows_and_steps(x)
        return fun(buffer, fitted(y, buffer.shape), picks)

    return apply


def _shuffled(x: jax.Array, i: jax.Array, picks: Picks) -> jax.Array:
    """Rows that a loop exchanges with rows at places that are data."""
    buffer, steps = _rows_and_steps(x)
    places = fitted(i, (steps,)) % len(buffer)

    def iteration(n: Any, b: jax.Array) -> jax.Array:
        here = b[n]
        there = b[places[n]]
        return b.at[n].set(there).at[places[n]].set(here)

    return lax.fori_loop(0, steps, iteration, buffer)


def _counted(i: jax.Array, picks: Picks) -> jax.Array:
    """A table of counts at places that the table says."""
    table = (_some(i).ravel() % 5)[:9]
    return lax.fori_loop(0, 6, lambda n, t: t.at[t[(n + picks[1]) % len(t)] % len(t)].add(1), table)


# Sums of multiples of an eighth and of an eighth of this are equal or far from each other: rounding never decides which
# of two is larger.
_GOLDEN = np.float32(0.618034)


def _extreme_of_fused(x: jax.Array, y: jax.Array, picks: Picks) -> jax.Array:
    """Elements chosen by comparing sums of products, which XLA rounds once in a fused multiply-add, or twice."""
    x = _some(x)
    axis = _axis(x, picks[1])
    computed = x + fitted(y, x.shape) * (-_GOLDEN * (1 + picks[3] % 3))
    match picks[2] % 5:
        case 0:
            return jnp.max(computed, axis) / 4
        case 1:
            return jnp.min(computed) / 4
        case 2:
            return jnp.where(computed == jnp.max(computed, axis, keepdims=True), x, 0)
        case 3:
            return jnp.take_along_axis(computed, jnp.argmin(computed, axis, keepdims=True), axis) / 4
    return jnp.maximum(computed, jnp.flip(computed, axis)) / 4


def _sorted_values(x: jax.Array, y: jax.Array, picks: Picks) -> list[jax.Array]:
    """Computed keys sorted with what belongs to them."""
    x = _some(x)
    axis = _axis(x, picks[1])
    keys = x + fitted(y, x.shape) * _GOLDEN
    return [part / 4 for part in lax.sort((keys, x), dimension=axis, num_keys=1)]


def _times_transposed(x: jax.Array, y: jax.Array, picks: Picks) -> jax.Array:
    x = _matrix(x)
    w = fitted(y, (1 + picks[2] % 5, x.shape[1]))
    if picks[3] % 2:
        return jnp.tanh(jnp.einsum("tbi,gi->tbg", x[None], w) / x.shape[1])
    return jnp.tanh(x @ w.T / x.shape[1])


def _solved(x: jax.Array, y: jax.Array, picks: Picks) -> jax.Array:
    """Roots and linear solves, whose gradients are further solves."""
    size = 2 + picks[1] % 3
    matrix = jnp.eye(size) * 4 + jnp.tanh(fitted(x, (size, size)))
    right = jnp.tanh(fitted(y, (size,)))
    if picks[2] % 2:
        symmetric = matrix + matrix.T
        solve = lambda matvec, b: jax.scipy.sparse.linalg.cg(matvec, b, maxiter=8)[0]  # noqa: E731
        return lax.custom_linear_solve(lambda v: symmetric @ v, right, solve, symmetric=True)

    def newton(f: Callable[[jax.Array], jax.Array], start: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 6, lambda _, v: v - f(v) / (2 + v**2), start)

    root = lax.custom_root(
        lambda v: v + v**3 / 3 - right.sum(), jnp.float32(0), newton, lambda g, b: b / g(jnp.ones_like(b))
    )
    return jnp.tanh(right * root)


# N for whole numbers
F = "float"
N = "int"
B = "bool"
H = "half"

OPERATIONS: dict[str, Operation] = {
    **{name: Operation((F,), _unary(getattr(lax, name))) for name in ("tanh", "sin", "cos", "logistic", "erf", "atan")},
    "exp": Operation((F,), _unary(lambda x: jnp.exp(-x * x))),
    "log1p": Operation((F,), _unary(lambda x: jnp.log1p(x * x))),
    "sqrt": Operation((F,), _unary(lambda x: jnp.sqrt(1 + x * x))),
    "rsqrt": Operation((F,), _unary(lambda x: lax.rsqrt(1 + x**4))),
    "bent": Operation((F,), _unary(lambda x: jnp.tanh(_bent(x)))),
    "complex": Operation((F, F), _binary(lambda x, y: jnp.tanh(((x + 1j * y) * (2 - 1j)).imag))),
    "softmax": Operation((F,), _along(lambda x, axis: jax.nn.softmax(x, axis))),
    "normal": Operation((F,), _along(lambda x, axis: (x - x.mean(axis, keepdims=True)) / (1 + x.var()))),
    "neg": Operation((F,), _unary(jnp.negative), moves=True),
    "abs": Operation((F,), _unary(jnp.abs), "continuous", moves=True),
    "relu": Operation((F,), _unary(jax.nn.relu), "continuous", moves=True),
    "floor": Operation((F,), _unary(jnp.floor), "exact", moves=True),
    "round": Operation((F,), _unary(jnp.round), "exact", moves=True),
    "sign": Operation((F,), _unary(jnp.sign), "exact", moves=True),
    "to_int": Operation((F,), _unary(lambda x: (x * 4).astype(np.int32)), "exact", moves=True),
    "narrow": Operation((F,), _unary(lambda x: x.astype(jnp.bfloat16).astype(np.float32)), "exact", moves=True),
    "bits": Operation((F,), _unary(lambda x: lax.bitcast_convert_type(x, np.int32)), "exact", moves=True),
    "precision": Operation((F,), _unary(lambda x: lax.reduce_precision(x, 5, 3)), "exact", moves=True),
    "to_float": Operation((N,), _unary(lambda i: (i % 17).astype(np.float32) / 8), moves=True),
    "flag_to_float": Operation((B,), _unary(lambda b: b.astype(np.float32)), moves=True),
    "add": Operation((F, F), _binary(lambda x, y: (x + y) / 2)),
    "sub": Operation((F, F), _binary(lambda x, y: (x - y) / 2)),
    "mul": Operation((F, F), _binary(lambda x, y: jnp.tanh(x * y))),
    "div": Operation((F, F), _binary(lambda x, y: x / (1 + y * y))),
    "pow": Operation((F, F), _binary(lambda x, y: jnp.tanh((1 + x * x) ** (y / 2)))),
    "atan2": Operation((F, F), _binary(lambda x, y: jnp.atan2(x, 1 + y * y))),
    "max": Operation((F, F), _binary(jnp.maximum), "continuous", moves=True),
    "min": Operation((F, F), _binary(jnp.minimum), "continuous", moves=True),
    "clamp": Operation((F,), _unary(lambda x: jnp.clip(x, -0.5, 0.75)), "continuous", moves=True),
    "where": Operation((F, F, B), _chosen, moves=True),
    "less": Operation((F, F), _binary(jnp.less), "exact", moves=True),
    "equal": Operation((N, N), _binary(jnp.equal), moves=True),
    "int_add": Operation((N, N), _binary(jnp.add), moves=True),
    "int_mul": Operation((N, N), _binary(jnp.multiply), moves=True),
    "int_div": Operation((N, N), _binary(lambda i, j: lax.div(*jnp.broadcast_arrays(i, _divisor(j)))), moves=True),
    "int_mod": Operation((N, N), _binary(lambda i, j: jnp.remainder(i, _divisor(j))), moves=True),
    "int_xor": Operation((N, N), _binary(jnp.bitwise_xor), moves=True),
    "shift": Operation((N, N), _binary(lambda i, j: jnp.left_shift(i, j % 40)), moves=True),
    "count": Operation((N,), _unary(lax.population_count), moves=True),
    "flag_and": Operation((B, B), _binary(jnp.logical_and), moves=True),
    "not": Operation((B,), _unary(jnp.logical_not), moves=True),
    "sum": Operation((F,), _along(lambda x, axis: jnp.tanh(x.sum(axis) / 2))),
    "sum_all": Operation((F,), _unary(lambda x: jnp.tanh(x.sum() / 4))),
    "prod": Operation((F,), _along(lambda x, axis: jnp.tanh((1 + 0.2 * jnp.tanh(x)).prod(axis)))),
    "reduce_max": Operation((F,), _along(lambda x, axis: x.max(axis)), "continuous", moves=True),
    "reduce_min": Operation((F,), _along(lambda x, axis: x.min(axis)), "continuous", moves=True),
    "logsumexp": Operation((F,), _along(lambda x, axis: jnp.tanh(jax.nn.logsumexp(x, axis)))),
    "argmax": Operation((F,), _along(jnp.argmax), "exact", moves=True),
    "argmin": Operation((N,), _along(jnp.argmin), moves=True),
    "int_sum": Operation((N,), _along(lambda i, axis: i.sum(axis)), moves=True),
    "any": Operation((B,), _along(lambda b, axis: b.any(axis)), moves=True),
    "all": Operation((B,), _along(lambda b, axis: b.all(axis)), moves=True),
    "reshape": Operation(("any",), _reshaped, moves=True),
    "transpose": Operation(("any",), _transposed, moves=True),
    "flip": Operation(("any",), _along(lambda x, axis: jnp.flip(x, axis)), moves=True),
    "slice": Operation(("any",), _sliced, moves=True),
    "new_axis": Operation(("any",), lambda x, picks: jnp.expand_dims(x, picks[1] % (x.ndim + 1)), moves=True),
    "repeat": Operation(("any",), lambda x, picks: jnp.broadcast_to(x, (1 + picks[1] % 3, *x.shape)), moves=True),
    "tile": Operation(("any",), lambda x, picks: jnp.tile(x, 1 + picks[1] % 3), moves=True),
    "roll": Operation(("any",), lambda x, picks: jnp.roll(_some(x), picks[1] % 4, 0), moves=True),
    "split": Operation(("any",), _split, moves=True),
    "concat": Operation((F, F), _joined, moves=True),
    "stack": Operation((F, F), lambda x, y, picks: jnp.stack([x, fitted(y, x.shape)], -1), moves=True),
    "pad": Operation((F,), _padded, moves=True),
    "dot": Operation((F, F), _dot),
    "mixed_dot": Operation((F, H), _mixed_dot, "exact", moves=True),
    "float0": Operation((F, N), _without_tangents, moves=True),
    "convolution": Operation((F, F), _convolved),
    "window_sum": Operation((F,), lambda x, picks: jnp.tanh(_windowed(lax.add, 0)(x, picks) / 2)),
    "window_max": Operation((F,), _windowed(lax.max, -np.inf), "continuous", moves=True),
    "cumsum": Operation((F,), _along(lambda x, axis: jnp.tanh(lax.cumsum(x, axis) / 2))),
    "cummax": Operation((F,), _along(lambda x, axis: lax.cummax(x, axis, reverse=True)), "continuous", moves=True),
    "cumlogsumexp": Operation((F,), _along(lambda x, axis: jnp.tanh(lax.cumlogsumexp(x, axis)))),
    "sort": Operation((F,), _along(lambda x, axis: lax.sort(x, dimension=axis)), "continuous", moves=True),
    "argsort": Operation((F,), _along(jnp.argsort), "exact", moves=True),
    "top_k": Operation(
        (F,), lambda x, picks: lax.top_k(y := _some(x), 1 + picks[1] % y.shape[-1]), "exact", moves=True
    ),
    "take": Operation((F, N), _taken, moves=True),
    "take_along": Operation((F, N), _taken_along, moves=True),
    "scatter_set": Operation((F, N, F), _scattered("set"), moves=True),
    "scatter_add": Operation((F, N, F), lambda x, i, u, picks: jnp.tanh(_scattered("add")(x, i, u, picks))),
    "scatter_max": Operation((F, N, F), _scattered("max"), "continuous", moves=True),
    "slice_at": Operation((F, N), _sliced_at, moves=True),
    "update_at": Operation((F, N, F), _updated_at, moves=True),
    "iota": Operation((F,), _along(lambda x, axis: x / 2 + lax.broadcasted_iota(np.float32, x.shape, axis) / 64)),
    "uniform": Operation((N,), _drawn, moves=True),
    "vmap": Operation((F, F), _mapped),
    "recurrence": Operation((F, F), _recurrence),
    "shuffle": Operation((F, N), _shuffled, moves=True),
    "counts": Operation((N,), _counted, moves=True),
    "extreme": Operation((F, F), _extreme_of_fused, "exact"),
    "sorted_values": Operation((F, F), _sorted_values, "exact"),
    "transposed_dot": Operation((F, F), _times_transposed),
    "solve": Operation((F, F), _solved),
    "ref_in_loop": Operation((F, F), _on_rows(ref_in_loop)),
    "ref_moved": Operation((F, F), _on_rows(ref_moved), "exact", moves=True),
    "on_host": Operation((F, F), _on_rows(host_and_back), "exact", moves=True),
    "offloaded_residuals": Operation((F, F), _on_rows(offloaded_residuals)),
}
