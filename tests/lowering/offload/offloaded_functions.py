"""Functions of arguments in streaming memory, with their expected loads and stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

ALL = 0, 1


@dataclass(frozen=True)
class Case:
    """A function, and the expected moves of its arguments, in order.

    Args:
        fun: the function.
        args: its arguments.
        moves: `l0` loads all of argument 0, `r0` some of its rows, `x0` each of them in an iteration of a loop; `s0`
            stores all of it, `u0` some of its rows.
        offloaded: indices of the arguments in streaming memory.
        donated: indices of those that are donated.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    moves: str
    offloaded: tuple[int, ...] = (0,)
    donated: tuple[int, ...] = ALL

    def __post_init__(self) -> None:
        object.__setattr__(self, "args", tuple(map(jax.device_put, self.args)))


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Quarters, so that sums of a few are exact in any order."""
    return (np.random.default_rng([*shape, seed]).integers(-8, 9, shape) / 4).astype(np.float32)


def array(*shape: int, seed: int = 0) -> jax.Array:
    return jax.device_put(numbers(*shape, seed=seed))


A, B, C, X = (numbers(7, 3, seed=n) for n in range(4))
V = numbers(3)
ROWS = np.array([0, 3, -1, 9, 3, -9], np.int32)  # a duplicate, from the end, beyond the end, before the start
GRID = ROWS.reshape(2, 3)
BYTES = (A * 4).astype(np.int8).view(np.uint8)
NEW = numbers(6, 3)
UNUSUAL = NEW.copy()
UNUSUAL[1, 1], UNUSUAL[2, 0] = np.nan, np.inf

OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "clipped adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)),
    "lamb": optax.lamb(0.1),
    "every third": optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation(),
    "if finite": optax.apply_if_finite(optax.adam(0.1), 3),
}


def training_step(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """A step of a chain of dense layers: parameters, state, inputs."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(weights: Any, state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state, value

    return step


def training(name: str, layers: int = 3) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step by the name of its optimizer, and arguments."""
    weights = [array(4, 4, seed=n) for n in range(layers)]
    return training_step(OPTIMIZERS[name]), (weights, OPTIMIZERS[name].init(weights), array(5, 4))


def twice(value: Any) -> Any:
    return value, value


def rows_added(a: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, r: (c + r, None), x, a, reverse=True)[0]


def printing(a: jax.Array, x: jax.Array) -> Any:
    """Prints figures of the old and of the new value."""
    jax.debug.print("a {}", a.sum())
    new = a + x
    jax.debug.print("new {}", new.sum())
    return new


def with_late_view(a: jax.Array, rows: jax.Array, u: jax.Array) -> Any:
    """Reads a view of the old table after it has computed the new one."""
    view = a[::-1]
    return a.at[rows].add(u), jnp.sin(view)


ENTIRE = {
    "not used": Case(lambda a, x: x + 1, (A, V), ""),
    "handed on": Case(lambda a, x: (a, x + 1), (A, V), ""),
    "handed on, not donated": Case(lambda a: a, (A,), "l0", donated=()),
    "read": Case(lambda a, x: (a * x).sum(), (A, X), "l0"),
    "replaced": Case(lambda a, x: a + x, (A, X), "l0 s0"),
    "replaced, not donated": Case(lambda a, x: a + x, (A, X), "l0", donated=()),
    "replaced by another's": Case(lambda a, x: x + 1, (A, X), "s0", donated=(0,)),
    "replaced by a constant": Case(lambda a, x: (jnp.zeros_like(a), x + a), (A, X), "l0 s0"),
    "replaced by an array": Case(lambda a, x: (X, a * x), (A, X), "l0 s0"),
    "replaced, and read behind": Case(lambda a, x: (lambda new: (new, (a * new).sum()))(a + x), (A, X), "l0 s0"),
    "new and old": Case(lambda a, x: (a + x, a), (A, X), "l0 s0"),
    "a view of it": Case(lambda a: a[::-1], (A,), "l0 s0"),
    "new and a view of old": Case(lambda a, x: (a + x, a.T), (A, X), "l0 s0"),
    "views swapped": Case(lambda a, b: (b[::-1], a[::-1]), (A, B), "l1 l0 s0 s1", offloaded=ALL),
    "beside no operand": Case(lambda a: (a * 2, lax.iota(np.int32, 5)), (A,), "l0 s0"),
    "swapped": Case(lambda a, b: (b, a), (A, B), "l1 l0 s0 s1", offloaded=ALL),
    "swapped with one on chip": Case(lambda a, b: (b, a), (A, B), "l0 s0"),
    "round in a ring": Case(
        lambda a, b, c: (b + 1, c, a), (A, B, C), "l1 l2 l0 s0 s1 s2", (0, 1, 2), donated=(0, 1, 2)
    ),
    "one result for two": Case(lambda a, b: twice(a + b), (A, B), "l0 l1 s0 s1", offloaded=ALL),
    "one result for one": Case(lambda a, b: twice(a + b), (A, B), "l0 s0", donated=(0,)),
    "one argument for three": Case(lambda a, b: (a, a, a), (A, B), "l0 s1", offloaded=ALL),
    "along a scan": Case(lambda a, x: lax.scan(lambda c, r: (c * r + 1, c), x, a), (A, V), "x0 s0"),
    "along a scan, and whole": Case(lambda a, x: (rows_added(a, x), a * 2), (A, V), "x0 l0 s0"),
    "along and around a scan": Case(lambda a, x: lax.scan(lambda c, r: (c + (a * r).sum(0), c), x, a), (A, V), "l0 s0"),
    "rows of a scan": Case(lambda a, x: lax.scan(lambda c, r: (c + r, c.sum()), x, a), (A, V), "x0"),
    "carried": Case(lambda a: lax.scan(lambda c, _: (c * 2 + 1, c.sum()), a, None, 3), (A,), "l0 s0"),
    "in a branch": Case(lambda a, x: lax.cond(x[0] > 0, lambda: a + 1, lambda: a * 2), (A, V), "l0 s0"),
    "deciding a branch": Case(lambda a, x: lax.cond(a[0, 0] > 0, jnp.sin, jnp.cos, x), (A, V), "l0"),
    "in a loop": Case(lambda a: lax.while_loop(lambda a: a.sum() < 99, lambda a: jnp.abs(a) * 2 + 1, a), (A,), "l0 s0"),
    "columns": Case(lambda a, i: a[:, i], (A, np.array([0, 2])), "l0"),
    "elements": Case(lambda a, i: a[i, i], (A, ROWS), "l0"),
    "parts of rows": Case(lambda a, i: a.at[i, :2].add(1), (A, ROWS), "l0 s0"),
    "printed": Case(printing, (A, X), "l0 s0"),
}


def rows_from(a: jax.Array, start: jax.Array, count: int = 3) -> jax.Array:
    """Consecutive rows."""
    return lax.dynamic_slice_in_dim(a, start, count)


def gathered_rows(a: jax.Array, i: jax.Array, axes: tuple[int, ...], size: int = 1, mode: str = "clip") -> jax.Array:
    """Rows from each index on, whose dimensions are `axes` of the result."""
    collapsed = (0,) if len(axes) < a.ndim else ()
    dims = lax.GatherDimensionNumbers(axes, collapsed, (0,))
    return lax.gather(a, i[:, None], dims, (size, *a.shape[1:]), mode=mode)


def printing_old(a: jax.Array, rows: jax.Array, u: jax.Array) -> jax.Array:
    """Prints the value it has replaced."""
    new = a.at[rows].set(u)
    jax.debug.print("old {}", a)
    return new


def with_reads_between(a: jax.Array, rows: jax.Array, u: jax.Array) -> Any:
    """Reads each table after the next is computed."""
    second = a.at[rows].add(u)
    third = second.at[rows[::-1]].subtract(2 * u)
    return third, third[rows], second[rows], a[rows]


def indexed_by_itself(a: jax.Array, rows: jax.Array, u: jax.Array) -> jax.Array:
    """Adds to rows whose indices are in rows that were set."""
    new = a.at[rows].set(u)
    return new.at[new[rows][:, 0].astype(int)].add(u)


def updated_by_each_other(a: jax.Array, b: jax.Array, rows: jax.Array) -> Any:
    """Two tables are updated alternately by rows of each other, the old ones too."""
    a1 = a.at[rows].add(b[rows])
    b1 = b.at[rows[:3]].add(a[rows[3:]])
    a2 = a1.at[rows].subtract(b1[rows])
    return a2, b1, b[rows] + a1[rows]


def old_rows_by_new(a: jax.Array, b: jax.Array, rows: jax.Array) -> Any:
    """Reads old rows of one table whose indices are in new rows of another, after reads of that one's old rows."""
    b1 = b.at[rows].add(1)
    old = a[rows]
    a1 = a.at[rows].set(2)
    return a1, b1, old, b[a1[rows][:, 0].astype(int)]


def scatter_rows(a: jax.Array, i: jax.Array, u: jax.Array, fun: Callable[..., Any], mode: str) -> jax.Array:
    """Updates consecutive rows from each index on."""
    window = tuple(range(i.ndim, u.ndim))
    return fun(a, i[..., None], u, lax.ScatterDimensionNumbers(window, (), (0,)), mode=mode)


def scatter_middle(a: jax.Array, i: jax.Array, u: jax.Array) -> jax.Array:
    """Adds rows that are the second dimension of the updates."""
    return lax.scatter_add(a, i[:, None], u, lax.ScatterDimensionNumbers((0, 2), (0,), (0,)), mode="clip")


def look_up(
    fun: Callable[..., Any], args: tuple[Any, ...], moves: str = "r0", offloaded: tuple[int, ...] = (0,)
) -> Case:
    """A case that reads rows of its first argument."""
    return Case(fun, args, moves, offloaded)


LOOK_UPS = {
    **{f"mode {mode}": look_up(lambda a, i, m=mode: a.at[i].get(mode=m), (A, ROWS)) for mode in (None, "clip", "fill")},
    **{f"take, {mode}": look_up(lambda a, i, m=mode: jnp.take(a, i, 0, mode=m), (A, ROWS)) for mode in (None, "wrap")},
    "in bounds": look_up(lambda a, i: a.at[i].get(mode="promise_in_bounds"), (A, ROWS % 7)),
    "filled with 3": look_up(lambda a, i: a.at[i].get(mode="fill", fill_value=3.0), (A, ROWS)),
    "integers": look_up(lambda a, i: a.at[i].get(mode="fill"), ((A * 4).astype(np.int8), ROWS)),
    "unsigned": look_up(lambda a, i: a.at[i].get(mode="fill"), (BYTES, ROWS)),
    "booleans": look_up(lambda a, i: a.at[i].get(mode="fill"), (A > 0, ROWS)),
    "half": look_up(lambda a, i: a.at[i].get(mode="fill"), (A.astype(jnp.bfloat16), ROWS)),
    "bytes for indices": look_up(lambda a, i: a.at[i].get(mode="fill"), (A, np.array([1, 255, 6, 7], np.uint8))),
    "grid": look_up(lambda a, i: a[i], (A, GRID)),
    "rows of matrices": look_up(lambda a, i: a[i], (array(5, 2, 3), GRID)),
    "one row": look_up(lambda a, i: a[i], (array(1, 3), ROWS)),
    "twice": look_up(lambda a, i: a[i] + a[i[::-1]], (A, ROWS), "r0 r0"),
    "indices that lie there too": look_up(lambda a, i: a.at[i].get(mode="clip"), (A, ROWS), "l1 r0", offloaded=ALL),
    "and whole": look_up(lambda a, i: (a[i], a.sum()), (A, ROWS), "r0 l0"),
    "no indices": look_up(lambda a, i: (a[i], a + 1), (A, ROWS[:0]), "l0 s0"),
    **{f"row {n}": look_up(lambda a, i, n=n: a[i[n]], (A, ROWS)) for n in range(len(ROWS))},
    **{
        f"of each, mode {mode}": look_up(
            lambda a, i, m=mode: jax.vmap(lambda k: a.at[k].get(mode=m, wrap_negative_indices=False))(i), (A, ROWS)
        )
        for mode in (None, "clip", "fill")
    },
    "of each": look_up(lambda a, i: jax.vmap(lambda k: a[k])(i), (A, ROWS)),
    "of each of a grid": look_up(lambda a, i: jax.vmap(jax.vmap(lambda k: a[k]))(i), (A, GRID)),
    "of each, half": look_up(lambda a, i: jax.vmap(lambda k: a[k])(i), (A.astype(np.float16), ROWS)),
    "of each, columns": look_up(lambda a, i: jax.vmap(lambda k: a[k], out_axes=1)(i), (A, ROWS)),
    "matrices of each": look_up(lambda a, i: jax.vmap(lambda k: a[k])(i), (array(5, 2, 3), GRID)),
    **{f"three rows at {n}": look_up(rows_from, (A, np.int32(n))) for n in (0, 2, 5, -1, -9)},
    "bytes for a start": look_up(rows_from, (A, np.uint8(200))),
    "one row of a slice": look_up(lambda a, i: lax.dynamic_slice_in_dim(a, i[0], 1), (A, ROWS)),
    "two rows of each": look_up(jax.vmap(partial(rows_from, count=2), (None, 0)), (array(30, 3), ROWS * 4)),
    "rows in the middle": look_up(partial(gathered_rows, axes=(0, 2)), (array(5, 2, 4), ROWS)),
    **{
        f"windows, mode {mode}": look_up(
            partial(gathered_rows, axes=(0, 2, 3), size=2, mode=mode), (array(30, 2, 4), ROWS)
        )
        for mode in ("clip", "fill")
    },
    # The entire table moves: most rows are accessed, or parts of rows.
    "most rows": look_up(partial(rows_from, count=4), (A, np.int32(2)), "l0"),
    "many rows of each": look_up(jax.vmap(partial(rows_from, count=2), (None, 0)), (A, ROWS), "l0"),
    "parts of rows": look_up(lambda a, i: lax.dynamic_slice(a, (i[0], i[1]), (1, 2)), (A, ROWS), "l0"),
    "a row that is known": look_up(lambda a: a[2], (A,), "l0"),
}

UPDATES = {
    **{
        f"{label}, mode {mode}": Case(
            lambda a, i, u, w=label, m=mode: getattr(a.at[i], w)(u, mode=m), (A, ROWS, NEW), moves
        )
        for label, moves in (("add", "r0 u0"), ("subtract", "r0 u0"), ("set", "u0"))
        for mode in (None, "clip", "drop")
    },
    "NaN and infinity": Case(lambda a, i, u: a.at[i].add(u), (A, ROWS, UNUSUAL), "r0 u0"),
    "minus zero": Case(lambda a, i, u: a.at[i].add(u), (-0.0 * A, ROWS, -0.0 * NEW), "r0 u0"),
    "integers": Case(
        lambda a, i, u: a.at[i].add(u), ((A * 4).astype(np.int8), ROWS, (NEW * 4).astype(np.int8)), "r0 u0"
    ),
    "half": Case(lambda a, i, u: a.at[i].add(u), (A.astype(jnp.bfloat16), ROWS, NEW.astype(jnp.bfloat16)), "r0 u0"),
    "grid": Case(lambda a, i, u: a.at[i].add(u), (A, GRID, NEW.reshape(2, 3, 3)), "r0 u0"),
    "one number": Case(lambda a, i: a.at[i].add(1), (A, ROWS), "r0 u0"),
    "one row": Case(lambda a, i, u: a.at[i].add(u), (A, np.int32(2), V), "r0 u0"),
    "bytes subtracted": Case(
        lambda a, i, u: a.at[i].subtract(u), (BYTES, ROWS, (NEW * 4).astype(np.int8).view(np.uint8)), "r0 u0"
    ),
    "minus zero subtracted": Case(lambda a, i, u: a.at[i].subtract(u), (-0.0 * A, ROWS, -0.0 * NEW), "r0 u0"),
    "half subtracted": Case(
        lambda a, i, u: a.at[i].subtract(u), (A.astype(np.float16), ROWS, NEW.astype(np.float16)), "r0 u0"
    ),
    **{
        f"three rows at {n}, {fun.__name__}, mode {mode}": Case(
            partial(scatter_rows, fun=fun, mode=mode), (A, np.int32(n), NEW[:3]), moves
        )
        for fun, moves in ((lax.scatter, "u0"), (lax.scatter_add, "r0 u0"), (lax.scatter_sub, "r0 u0"))
        for n in (2, 5, -1)
        for mode in ("clip", "drop")
    },
    **{
        f"slice at {n}": Case(
            lambda a, i, u: lax.dynamic_update_slice_in_dim(a, u, i, 0), (A, np.int32(n), NEW[:3]), "u0"
        )
        for n in (0, 2, 5, -1, -9)
    },
    "slice of one row, half": Case(
        lambda a, i, u: lax.dynamic_update_slice_in_dim(a, u, i[0], 0),
        (A.astype(np.float16), ROWS, NEW[:1].astype(np.float16)),
        "u0",
    ),
    "pairs of rows": Case(
        partial(scatter_rows, fun=lax.scatter, mode="drop"), (array(30, 3), ROWS * 4, array(6, 2, 3)), "u0"
    ),
    "in the middle": Case(scatter_middle, (array(5, 2, 4), ROWS, array(2, 6, 4)), "r0 u0"),
    "of what is there": Case(lambda a, i, u: a.at[i].add(u + a[i]), (A, ROWS, NEW), "r0 r0 u0"),
    "of its first rows": Case(lambda a, i: a.at[i].set(a[:6]), (A, ROWS), "l0 u0"),
    "added, of another": Case(lambda a, u, i: a.at[i].add(u), (A, NEW, ROWS), "l1 r0 u0", offloaded=ALL),
    "set, of another": Case(lambda a, u, i: a.at[i].set(u), (A, NEW, ROWS), "l1 u0", offloaded=ALL),
    # Reads of the old table come before the update.
    "and read": Case(lambda a, i, u: (a.at[i].add(u), a.sum()), (A, ROWS, NEW), "l0 r0 u0"),
    "and a view read behind": Case(with_late_view, (A, ROWS, NEW), "l0 r0 u0"),
    "and old rows": Case(lambda a, i, u: (a.at[i].add(u), jnp.sin(a[i[::-1]]).sum()), (A, ROWS, NEW), "r0 r0 u0"),
    "and old rows that a row names": Case(
        lambda a, i, u: (a.at[i].set(u), a[a[i[0]].astype(int)]), (A, ROWS, NEW), "r0 r0 u0"
    ),
    "and rows of another": Case(
        lambda a, b, i, u: (a.at[i].add(u), b.at[i].set(u), a[i] + b[i]), (A, B, ROWS, NEW), "r0 r0 u0 r1 u1", ALL
    ),
    "and along a scan": Case(lambda a, i, u: (a.at[i].add(u), rows_added(a, u[0])), (A, ROWS, NEW), "x0 r0 u0"),
    "and multiplied": Case(lambda a, i, u: (a.at[i].add(u), a.at[i].multiply(2).sum()), (A, ROWS, NEW), "l0 r0 u0"),
    # Updates come one after the other.
    "twice": Case(lambda a, i, u: a.at[i].add(u).at[i].set(u), (A, ROWS, NEW), "r0 u0 u0"),
    "set, then set": Case(lambda a, i, u: a.at[i].set(u).at[i[1:4]].set(-u[:3]), (A, ROWS, NEW), "u0 u0"),
    "slices, one after the other": Case(
        lambda a, i, u: lax.dynamic_update_slice(lax.dynamic_update_slice(a, u[:2], (i[0], 0)), u[2:4], (i[1], 0)),
        (A, ROWS, NEW),
        "u0 u0",
    ),
    "set, then added": Case(lambda a, i, u: a.at[i].set(u).at[i[::-1]].add(u), (A, ROWS, NEW), "u0 r0 u0"),
    "three times, half": Case(
        lambda a, i, u: a.at[i].add(u).at[i[::-1]].subtract(u).at[i[1]].add(1),
        (A.astype(np.float16), ROWS, NEW.astype(np.float16)),
        "r0 u0 r0 u0 r0 u0",
    ),
    "and looked up": Case(lambda a, i, u: (lambda new: (new, new[i]))(a.at[i].add(u)), (A, ROWS, NEW), "r0 u0 r0"),
    "and looked up between": Case(with_reads_between, (A, ROWS, NEW), "r0 r0 u0 r0 r0 u0 r0"),
    "by what it holds": Case(indexed_by_itself, (A, ROWS, NEW), "u0 r0 r0 u0"),
    "two, each by the other's rows": Case(updated_by_each_other, (A, B, ROWS), "r1 r0 r0 u0 r1 u1 r1 r0 r0 u0", ALL),
    # The entire table moves: it, or the new one, is read entirely or too late, or goes to another buffer.
    "and old": Case(lambda a, i, u: (a.at[i].add(u), a), (A, ROWS, NEW), "l0 s0"),
    "and a view of old": Case(lambda a, i, u: (a.at[i].add(u), a.T), (A, ROWS, NEW), "l0 s0"),
    "and a view of new": Case(lambda a, i, u: (lambda new: (new, new.T))(a.at[i].add(u)), (A, ROWS, NEW), "l0 s0"),
    "and new": Case(lambda a, i, u: (lambda new: (new, new.sum()))(a.at[i].add(u)), (A, ROWS, NEW), "l0 s0"),
    "and one between": Case(
        lambda a, i, u: (lambda new: (new.at[i].add(u), new))(a.at[i].add(u)), (A, ROWS, NEW), "l0 s0"
    ),
    "by itself": Case(lambda a, i, u: (lambda new: new.at[i].set(new[:6]))(a.at[i].add(u)), (A, ROWS, NEW), "l0 s0"),
    "and old rows that a new row names": Case(
        lambda a, i, u: (lambda new: (new, a[new[i[0]].astype(int)]))(a.at[i].set(u)), (A, ROWS, NEW), "l0 r0 s0"
    ),
    "old rows that new rows of another name": Case(old_rows_by_new, (A, B, ROWS), "l1 r0 u0 r0 r1 s1", ALL),
    "two ways": Case(
        lambda a, i, u: (lambda new: (new.at[i].add(u), new.at[i].set(u)[0]))(a.at[i].add(u)), (A, ROWS, NEW), "l0 s0"
    ),
    "and printed": Case(printing_old, (A, ROWS, NEW), "l0 s0"),
    "under two names": Case(lambda a, i, u: twice(a.at[i].add(u)), (A, ROWS, NEW), "l0 s0"),
    "for another": Case(lambda a, b, i, u: b.at[i].add(u), (A, B, ROWS, NEW), "l1 s0", offloaded=ALL),
    "not donated": Case(lambda a, i, u: a.at[i].add(u), (A, ROWS, NEW), "l0", donated=()),
    # Sums of several rows at several indices are not supported; most of the table is replaced.
    "pairs of rows added": Case(
        partial(scatter_rows, fun=lax.scatter_add, mode="drop"), (array(30, 3), ROWS * 4, array(6, 2, 3)), "l0 s0"
    ),
    "most rows of a slice": Case(
        lambda a, i, u: lax.dynamic_update_slice_in_dim(a, u, i[0], 0), (A, ROWS, NEW), "l0 s0"
    ),
    "parts of rows of a slice": Case(
        lambda a, i, u: lax.dynamic_update_slice(a, u, (i[0], 0)), (A, ROWS, NEW[:2, :2]), "l0 s0"
    ),
    "two, not donated": Case(
        lambda a, i, u: (lambda new: (new.at[i].set(u), new[i], a[i]))(a.at[i].add(u)),
        (A, ROWS, NEW),
        "l0 r0",
        donated=(),
    ),
    # Neither is a plain sum or a plain replacement.
    "multiplied": Case(lambda a, i, u: a.at[i].multiply(u), (A, ROWS, NEW), "l0 s0"),
    "a function of rows": Case(lambda a, i: a.at[i].apply(jnp.sin), (A, ROWS), "l0 s0"),
}


CASES: dict[str, Case] = {
    **ENTIRE,
    **{f"look up, {name}": case for name, case in LOOK_UPS.items()},
    **{f"update, {name}": case for name, case in UPDATES.items()},
}
