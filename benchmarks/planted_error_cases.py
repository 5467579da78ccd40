"""Errors in rules, codelets and passes, each with a small program that shows it.

A `Plant` puts one wrong function in the place of a right one while its program is lowered;
`benchmarks/planted_errors.py` runs them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering import passes
from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Literal
from ipujax.lowering.popops.indexing import windows
from ipujax.lowering.popops.maps import pad, rows
from ipujax.lowering.popops.vertices import reducers
from ipujax.lowering.popops.vertices.kernel import Kernel
from ipujax.lowering.rules.base import fallback
from ipujax.lowering.rules.table import RULES

Plants = AbstractContextManager[Any]

RNG = np.random.default_rng(0)
SQUARE = RNG.standard_normal((6, 6)).astype(np.float32)
OTHER = RNG.standard_normal((6, 6)).astype(np.float32)
POSITIVE = np.abs(SQUARE) + 1
CUBE = RNG.standard_normal((6, 6, 6)).astype(np.float32)
ROWS = RNG.standard_normal((16, 8)).astype(np.float32)
IMAGES = RNG.standard_normal((2, 8, 8, 4)).astype(np.float32)
KERNEL = RNG.standard_normal((3, 3, 4, 4)).astype(np.float32)
LINES = RNG.standard_normal((2, 16, 4)).astype(np.float32)
TAPS = RNG.standard_normal((3, 4, 4)).astype(np.float32)
MATRICES = np.stack([m @ m.T + 6 * np.eye(6, dtype=np.float32) for m in RNG.standard_normal((16, 6, 6)).astype("f4")])
ONE = np.int32(1)
TWO = np.int32(2)


@dataclass(frozen=True, slots=True)
class Plant:
    """One error.

    Args:
        name: what is wrong.
        primitives: names of the equation of which one must be named.
        program: the program, on one line.
        arguments: its arguments.
        plant: context in which the error is there.
        is_on_tiles: whether only tiles show it, because XLA computes the operation whole.
    """

    name: str
    primitives: tuple[str, ...]
    program: Callable[..., Any]
    arguments: tuple[Any, ...]
    plant: Callable[[], Plants]
    is_on_tiles: bool = False


# --- wrong rules ---


def rule(name: str, wrong: Callable[..., Any]) -> Callable[[], Plants]:
    """Put a rule in the place of that of a primitive; it gets the right one, the context, operands and parameters."""
    right = RULES[name]
    return lambda: mock.patch.dict(RULES, {name: lambda ctx, *xs, **params: wrong(right, ctx, *xs, **params)})


def params(name: str, **changes: Callable[[Any], Any]) -> Callable[[], Plants]:
    """Change parameters of a primitive before its rule reads them."""

    def wrong(right: Any, ctx: Any, *xs: Any, **settings: Any) -> Any:
        return right(ctx, *xs, **{**settings, **{key: change(settings[key]) for key, change in changes.items()}})

    return rule(name, wrong)


def operands(name: str, change: Callable[..., Sequence[Any]]) -> Callable[[], Plants]:
    """Change the operands of a primitive."""
    return rule(name, lambda right, ctx, *xs, **settings: right(ctx, *change(*xs), **settings))


def other_rule(name: str, other: str) -> Callable[[], Plants]:
    """Put the rule of another primitive in the place of a primitive's."""
    return lambda: mock.patch.dict(RULES, {name: RULES[other]})


def _initial_carry(right: Any, ctx: Any, *xs: Any, num_consts: int, num_carry: int, **settings: Any) -> Any:
    results = right(ctx, *xs, num_consts=num_consts, num_carry=num_carry, **settings)
    return [*xs[num_consts : num_consts + num_carry], *results[num_carry:]]


def _constant_one(ctx: Any) -> Any:
    return ctx.graph.add_constant(np.ones((), np.float32), "one")


def _swapped(pair: Any) -> Any:
    return type(pair)(reversed(pair))


def _contracted_on_the_other_side(numbers: Any) -> Any:
    (left, right), batch = numbers
    return (tuple(1 - d for d in left), right), batch


# --- wrong codelets ---


def codelet(module: Any, maker: str, wrong: Callable[..., Any]) -> Callable[[], Plants]:
    """Change what a codelet computes; `wrong` gets the right function, its arrays and keywords."""
    make = getattr(module, maker)

    def with_error(*args: Any, **keywords: Any) -> Any:
        right = make(*args, **keywords)
        return replace(right, compute=lambda *blocks, **extras: wrong(right.compute, *blocks, **extras))

    # Codelets are equal only to themselves; makers with a cache have one for each combination of arguments.
    return lambda: mock.patch.object(module, maker, cache(with_error) if hasattr(make, "__wrapped__") else with_error)


def in_blocks(rows_of_all: int, wrong: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a wrong function for blocks with fewer rows than all, which XLA never gets."""

    def compute(right: Any, *blocks: Any, **extras: Any) -> Any:
        results = right(*blocks, **extras)
        if blocks[0].shape[0] == rows_of_all:
            return results
        return tuple(map(wrong, results)) if isinstance(results, tuple) else wrong(results)

    return compute


def _one_more(right: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
    return lambda *blocks: [value + 1 for value in right(*blocks)]


def _shifted_pads(right: Any, *blocks: Any, pads: Any, **extras: Any) -> Any:
    """Move the padding of the first field by one element along the last dimension that has any."""
    first_pads = pads[0]
    shifted = [(low - 1, high + 1) if low else (low, high) for low, high in first_pads]
    return right(*blocks, pads=[tuple(shifted), *pads[1:]], **extras)


# --- wrong passes ---


def after_pass(name: str, primitive: str, change: Callable[[JaxprEqn], JaxprEqn]) -> Callable[[], Plants]:
    """Change the first equation of a primitive behind a pass."""

    def changed(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        eqns = list(jaxpr.eqns)
        number = next((n for n, eqn in enumerate(eqns) if eqn.primitive.name == primitive), None)
        if number is None:
            return jaxpr
        eqns[number] = change(eqns[number])
        return ClosedJaxpr(jaxpr.jaxpr.replace(eqns=eqns), jaxpr.consts)

    @contextmanager
    def plant() -> Iterator[None]:
        right = passes._with_settings

        def with_error(*args: Any) -> Any:
            return [
                (each, (lambda jaxpr, run=run: changed(run(jaxpr))) if each == name else run)
                for each, run in right(*args)
            ]

        with mock.patch.object(passes, "_with_settings", with_error):
            yield

    return plant


def _first_literal(value: float) -> Callable[[JaxprEqn], JaxprEqn]:
    def change(eqn: JaxprEqn) -> JaxprEqn:
        number = next(n for n, atom in enumerate(eqn.invars) if isinstance(atom, Literal))
        atom = eqn.invars[number]
        literal = Literal(np.asarray(value, atom.aval.dtype), atom.aval)
        return eqn.replace(invars=[*eqn.invars[:number], literal, *eqn.invars[number + 1 :]])

    return change


def _changed(**changes: Any) -> Callable[[JaxprEqn], JaxprEqn]:
    return lambda eqn: eqn.replace(params={**eqn.params, **changes})


# --- programs: each on one line, which the check has to name ---


def counted(x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: jnp.cos(c) @ OTHER, x)


def until(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c @ OTHER + 4, x)


def scanned(x: Any) -> Any:
    return lax.scan(lambda c, row: (0.5 * c + row, c.sum()), x[0], x)


def branched(x: Any, n: Any) -> Any:
    return lax.cond(n > 1, lambda y: y @ OTHER, lambda y: y.T @ y, x)


def convolved(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def strided(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (2,), ((1, 1),), dimension_numbers=("NHC", "HIO", "NHC"))


def convolved_back(x: Any, w: Any) -> Any:
    return lax.conv_transpose(x, w, (2,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))


def pooled(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")


def summed_windows(x: Any) -> Any:
    return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def padded(x: Any) -> Any:
    return lax.pad(x, jnp.float32(0), ((1, 1, 0), (0, 2, 0)))


PLANTS = (
    Plant(
        "an axis of a sum",
        ("reduce_sum",),
        lambda x: jnp.sum(x, 1),
        (SQUARE,),
        params("reduce_sum", axes=lambda _: (0,)),
    ),
    Plant(
        "minimum in place of maximum",
        ("reduce_max",),
        lambda x: jnp.max(x, 1),
        (SQUARE,),
        other_rule("reduce_max", "reduce_min"),
    ),
    Plant(
        "an axis of a transposition",
        ("transpose",),
        lambda x: lax.transpose(x, (0, 2, 1)),
        (CUBE,),
        params("transpose", permutation=lambda _: (1, 0, 2)),
    ),
    Plant("swapped operands", ("sub",), lambda x, y: x - y, (SQUARE, OTHER), operands("sub", lambda x, y: (y, x))),
    Plant("a missing negation", ("neg",), lambda x: -x, (SQUARE,), rule("neg", lambda right, ctx, x, **_: x)),
    Plant("a missing function", ("sin",), lambda x: jnp.sin(x), (SQUARE,), rule("sin", lambda right, ctx, x, **_: x)),
    Plant(
        "swapped cases",
        ("select_n",),
        lambda which, x, y: lax.select(which, x, y),
        (SQUARE > 0, SQUARE, OTHER),
        operands("select_n", lambda which, x, y: (which, y, x)),
    ),
    Plant(
        "a contracted dimension",
        ("dot_general",),
        lambda x, y: x @ y,
        (SQUARE, OTHER),
        params("dot_general", dimension_numbers=_contracted_on_the_other_side),
    ),
    Plant(
        "swapped factors",
        ("dot_general",),
        lambda x, y: x @ y,
        (SQUARE, OTHER),
        operands("dot_general", lambda x, y: (y, x)),
    ),
    Plant(
        "padding of a convolution",
        ("conv_general_dilated",),
        convolved,
        (IMAGES, KERNEL),
        params("conv_general_dilated", padding=lambda _: ((2, 0), (1, 1))),
    ),
    Plant(
        "a stride of a convolution",
        ("conv_general_dilated",),
        strided,
        (LINES, TAPS),
        params(
            "conv_general_dilated",
            window_strides=lambda _: (1,),
            rhs_dilation=lambda _: (5,),
            padding=lambda _: ((1, 1),),
        ),
    ),
    Plant(
        "a kernel that is not reversed",
        ("conv_general_dilated",),
        convolved_back,
        (LINES, TAPS),
        operands("conv_general_dilated", lambda x, w: (x, w[::-1])),
    ),
    Plant(
        "the halo of windows",
        ("reduce_window_max",),
        pooled,
        (IMAGES,),
        codelet(windows, "_window_codelet", _shifted_pads),
    ),
    Plant(
        "a stride of windows",
        ("reduce_window_sum",),
        summed_windows,
        (IMAGES,),
        params("reduce_window_sum", window_dimensions=lambda _: (1, 5, 5, 1), window_strides=lambda _: (1, 1, 1, 1)),
    ),
    Plant(
        "the fill of padding",
        ("pad",),
        padded,
        (SQUARE,),
        rule("pad", lambda right, ctx, x, value, **settings: right(ctx, x, _constant_one(ctx), **settings)),
    ),
    Plant(
        "the sides of padding",
        ("pad",),
        padded,
        (SQUARE,),
        params("pad", padding_config=lambda rows: [(high, low, gap) for low, high, gap in rows]),
    ),
    Plant(
        "the start of a slice",
        ("slice",),
        lambda x: x[1:4],
        (SQUARE,),
        params("slice", start_indices=lambda _: (2, 0), limit_indices=lambda _: (5, 6)),
    ),
    Plant(
        "swapped starts",
        ("dynamic_slice",),
        lambda x, i, j: lax.dynamic_slice(x, (i, j), (3, 3)),
        (SQUARE, ONE, TWO),
        operands("dynamic_slice", lambda x, i, j: (x, j, i)),
    ),
    Plant(
        "swapped starts of an update",
        ("dynamic_update_slice",),
        lambda x, y, i, j: lax.dynamic_update_slice(x, y, (i, j)),
        (SQUARE, OTHER[:2, :2], ONE, TWO),
        operands("dynamic_update_slice", lambda x, y, i, j: (x, y, j, i)),
    ),
    Plant(
        "a reversed dimension",
        ("rev",),
        lambda x: lax.rev(x, (0,)),
        (SQUARE,),
        params("rev", dimensions=lambda _: (1,)),
    ),
    Plant(
        "the order of a concatenation",
        ("concatenate",),
        lambda x, y: jnp.concatenate([x, y]),
        (SQUARE, OTHER),
        operands("concatenate", lambda x, y: (y, x)),
    ),
    Plant(
        "a broadcast dimension",
        ("broadcast_in_dim",),
        lambda x: lax.broadcast_in_dim(x, (6, 6), (0,)),
        (SQUARE[0],),
        params("broadcast_in_dim", broadcast_dimensions=lambda _: (1,)),
    ),
    Plant(
        "the direction of a running sum",
        ("cumsum",),
        lambda x: jnp.cumsum(x, 1),
        (SQUARE,),
        params("cumsum", reverse=lambda flag: not flag),
    ),
    Plant(
        "another running extreme",
        ("cummax",),
        lambda x: lax.cummax(x),
        (SQUARE,),
        rule("cummax", lambda right, ctx, x, axis, reverse: rows.cumulative(ctx.builder, x, axis, "cummin", reverse)),
    ),
    Plant("a sorted dimension", ("sort",), lambda x: jnp.sort(x, 1), (SQUARE,), params("sort", dimension=lambda _: 0)),
    Plant(
        "updates that replace",
        ("scatter-add", "scatter"),
        lambda x, y: x.at[np.array([1, 4, 1])].add(y),
        (SQUARE, OTHER[:3]),
        rule("scatter-add", lambda right, ctx, x, at, y, **settings: right(ctx, x, at, x[:3], **settings)),
    ),
    Plant(
        "rows of a table",
        ("gather", "take_rows"),
        lambda x, y: x[y],
        (ROWS, np.array([3, 1, 9])),
        operands("gather", lambda x, at: (x[::-1], at)),
    ),
    Plant("a dropped carry", ("scan",), scanned, (SQUARE,), rule("scan", _initial_carry)),
    Plant("the direction of a loop", ("scan",), scanned, (SQUARE,), params("scan", reverse=lambda flag: not flag)),
    Plant(
        "a loop that never runs",
        ("while",),
        until,
        (SQUARE,),
        rule(
            "while", lambda right, ctx, *xs, cond_nconsts, body_nconsts, **settings: xs[cond_nconsts + body_nconsts :]
        ),
    ),
    Plant("an equation of a loop", ("cos",), counted, (SQUARE,), rule("cos", lambda right, ctx, x, **_: x)),
    Plant("swapped branches", ("cond",), branched, (SQUARE, TWO), params("cond", branches=_swapped)),
    Plant(
        "a step of a kernel",
        ("fused", "tanh", "mul"),
        lambda x, y: jnp.tanh(x) * y - x,
        (SQUARE, OTHER),
        rule("fused", lambda right, ctx, x, y, **settings: right(ctx, y, x, **settings)),
    ),
    Plant(
        "the codelet of kernels",
        ("exp",),
        lambda x: jnp.exp(x),
        (SQUARE,),
        lambda: mock.patch.object(Kernel, "evaluate", _one_more(Kernel.evaluate)),
    ),
    Plant(
        "the codelet of reductions",
        ("reduce_sum",),
        lambda x: jnp.sum(x, 1),
        (SQUARE,),
        lambda: mock.patch.dict(reducers.REDUCERS, add=lax.reduce_max),
    ),
    Plant("the pads of a codelet", ("pad",), padded, (SQUARE,), codelet(pad, "_pad_codelet", _shifted_pads)),
    Plant(
        "an exponent behind a pass",
        ("integer_pow", "fused"),
        lambda x: lax.integer_pow(x, 3),
        (SQUARE,),
        after_pass("dce", "integer_pow", _changed(y=2)),
    ),
    Plant(
        "swapped operands behind a pass",
        ("div",),
        lambda x, y: lax.div(x, y),
        (SQUARE, POSITIVE),
        after_pass("narrow", "div", lambda eqn: eqn.replace(invars=eqn.invars[::-1])),
    ),
    Plant(
        "a constant behind a pass",
        ("add",),
        lambda x: x + 2.5,
        (SQUARE,),
        after_pass("inline", "add", _first_literal(2.0)),
    ),
    Plant(
        "an axis behind a pass",
        ("reduce_sum",),
        lambda x: jnp.sum(x, 0),
        (SQUARE,),
        after_pass("fuse", "reduce_sum", _changed(axes=(1,))),
    ),
    Plant(
        "a sort of blocks",
        ("sort",),
        lambda x: jnp.sort(x, 1),
        (ROWS,),
        codelet(rows, "_sort_codelet", in_blocks(16, lambda y: y[:, ::-1])),
        True,
    ),
    Plant(
        "a transform of blocks",
        ("fft",),
        lambda x: jnp.fft.fft(x),
        (ROWS.astype(np.complex64),),
        codelet(fallback, "_fallback_codelet", in_blocks(16, jnp.conj)),
        True,
    ),
    Plant(
        "factors of blocks",
        ("cholesky",),
        lambda x: jnp.linalg.cholesky(x),
        (MATRICES,),
        codelet(fallback, "_fallback_codelet", in_blocks(16, lambda y: -y)),
        True,
    ),
)
