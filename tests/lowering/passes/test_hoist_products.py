"""Pass `hoist_products`: products of rows and constants of a loop are computed before it, once for all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.jax_compat import ClosedJaxpr, check_jaxpr, jaxpr_as_fun
from ipujax.lowering.jaxpr import primitive_names, scan_body
from ipujax.lowering.layer_notes import origin_of
from ipujax.lowering.passes.count_loops import count_loops
from ipujax.lowering.passes.hoist_products import hoist_products
from ipujax.lowering.passes.inline import inline, inline_and_name
from ipujax.runtime.tensor import Origin
from tests.lowering.helpers import check

RNG = np.random.default_rng(3)
STEPS, BATCH, FEATURES, UNITS = 5, 2, 3, 4
X = RNG.normal(size=(STEPS, BATCH, FEATURES)).astype(np.float32)
W = RNG.normal(size=(FEATURES, UNITS)).astype(np.float32)
U = RNG.normal(size=(UNITS, UNITS)).astype(np.float32)
B = RNG.normal(size=UNITS).astype(np.float32)
START = np.zeros((BATCH, UNITS), np.float32)

Step = Callable[[Any, Any], Any]


def scanned(step: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """A loop over x whose step reads x[t], w, u and b."""

    def run(x: Any, w: Any, u: Any, b: Any) -> Any:
        return lax.scan(lambda h, row: (step(h, row, w, u, b),) * 2, START, x, **settings)

    return run


def elman(h: Any, row: Any, w: Any, u: Any, b: Any) -> Any:
    return jnp.tanh(row @ w + b + h @ u)


def batch_last(h: Any, row: Any, w: Any, u: Any, b: Any) -> Any:
    return jnp.tanh((w.T @ row.T).T + h @ u)


def deep(h: Any, row: Any, w: Any, u: Any, b: Any) -> Any:
    return jnp.tanh(jax.nn.relu(row @ w + b) @ u + h)


def of_constants(h: Any, row: Any, w: Any, u: Any, b: Any) -> Any:
    return jnp.tanh(row @ (w @ u) + h * (b @ u))


def concatenated(h: Any, row: Any, w: Any, u: Any, b: Any) -> Any:
    return jnp.tanh(jnp.concatenate([row, h], 1) @ jnp.concatenate([w, u]) + b)


def counted(x: Any, w: Any, u: Any, b: Any) -> Any:
    """The layer as a loop that counts, from the last row."""
    return (lax.fori_loop(0, STEPS, lambda n, h: elman(h, jnp.asarray(x)[STEPS - 1 - n], w, u, b), START),)


def counted_by_two(x: Any, w: Any, u: Any, b: Any) -> Any:
    """Rows 1 and 3 along the second dimension, as `lax.dynamic_slice` keeps it."""
    columns = jnp.swapaxes(x, 0, 1)

    def step(n: Any, h: Any) -> Any:
        return elman(h, lax.dynamic_slice_in_dim(columns, 2 * n + 1, 1, 1)[:, 0], w, u, b)

    return (lax.fori_loop(0, 2, step, START),)


def gradient(x: Any, w: Any, u: Any, b: Any) -> Any:
    return jax.grad(lambda w: (scanned(elman)(x, w, u, b)[0] ** 2).sum())(w)


def nested(x: Any, w: Any, u: Any, b: Any) -> Any:
    return lax.scan(lambda h, _: (scanned(elman)(x, w, u, b)[0] + h, None), START, None, length=3)


ARGS = X, W, U, B
# Products left in the loop, and moved before it.
HOISTED = {
    "a recurrent layer": (scanned(elman), 1, 1),
    "from the last row": (scanned(elman, reverse=True), 1, 1),
    "a row as the second operand": (scanned(batch_last), 1, 1),
    "a chain of products": (scanned(deep), 0, 2),
    "products of constants": (scanned(of_constants), 0, 3),
    "a product of a concatenation": (scanned(concatenated), 1, 1),
    "rows at a counter": (counted, 1, 1),
    "every second row at a counter": (counted_by_two, 1, 1),
}


def hoisted(fun: Callable[..., Any], *args: Any, **settings: Any) -> ClosedJaxpr:
    jaxpr = hoist_products(count_loops(inline(jax.make_jaxpr(fun)(*args))), **settings)
    check_jaxpr(jaxpr.jaxpr)
    return jaxpr


def products(jaxpr: ClosedJaxpr) -> tuple[int, int]:
    """Numbers of products inside loops, and outside."""
    inside = [scan_body(eqn.params).jaxpr.jaxpr for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    in_loops = sum(list(primitive_names(body)).count("dot_general") for body in inside)
    return in_loops, list(primitive_names(jaxpr.jaxpr)).count("dot_general") - in_loops


@pytest.mark.parametrize("name", HOISTED)
def test_moves_products_before_the_loop(name: str) -> None:
    fun, left, moved = HOISTED[name]
    jaxpr = hoisted(fun, *ARGS)
    assert products(jaxpr) == (left, moved)
    for got, expected in zip(jaxpr_as_fun(jaxpr)(*ARGS), fun(*ARGS), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    check(fun, *ARGS, tiles=(1, 7), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fun", [gradient, nested])
def test_keeps_numbers_of_gradients_and_of_loops_in_loops(fun: Callable[..., Any]) -> None:
    jaxpr = hoisted(fun, *ARGS)
    assert products(jaxpr)[1] >= 1
    expected = jax.tree.leaves(fun(*ARGS))
    for got, leaf in zip(jaxpr_as_fun(jaxpr)(*ARGS), expected, strict=True):
        np.testing.assert_allclose(got, leaf, rtol=1e-5, atol=1e-5)


def test_moved_equations_keep_the_layer_and_part_of_their_loop() -> None:
    def loss(w: Any, x: Any, u: Any, b: Any) -> Any:
        with jax.named_scope("encoder"):
            return scanned(elman)(x, w, u, b)[0].sum()

    jaxpr = hoist_products(count_loops(inline_and_name(jax.make_jaxpr(jax.grad(loss))(W, X, U, B))))
    origins = [origin_of(eqn, Origin()) for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert [(origin.layer, origin.part) for origin in origins] == [
        ("encoder/run/elman", "forward"),
        ("encoder/run/elman", "backward"),
    ]
    assert all("(elman)" in origin.line for origin in origins)


def test_moves_the_bias_with_its_product_and_drops_the_stack() -> None:
    """The loop reads rows of x w + b in place of rows of x."""
    jaxpr = hoisted(scanned(elman), *ARGS)
    (scan,) = (eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan")
    inside = scan_body(scan.params)
    assert [var.aval.shape for var in scan.invars[inside.operands.stacks]] == [(STEPS, BATCH, UNITS)]
    assert list(primitive_names(inside.jaxpr.jaxpr)).count("add") == 1


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (lambda n, x: n + 1, "clamped to the last row"),
        (lambda n, x: n * n, "no progression"),
        (lambda n, x: x[0, 0, 0].astype(jnp.int32), "data"),
    ],
)
def test_rows_stay_whose_places_are_no_progression_inside(index: Callable[..., Any], why: str) -> None:
    def run(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, STEPS, lambda n, h: jnp.tanh(h + x[index(n, x)] @ w), START)

    assert products(hoisted(run, X, W))[0] == 1, why
    check(run, X, W, tiles=(4,), rtol=1e-4, atol=1e-5)


def test_rows_stay_whose_counter_wraps() -> None:
    def run(x: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            row = lax.dynamic_index_in_dim(x, c[0], keepdims=False)
            return (c[0] + np.uint8(5), c[1] / 2 + row), None

        return lax.scan(body, (np.uint8(250), jnp.zeros(2)), None, length=4)[0]

    check(run, np.arange(600, dtype=np.float32).reshape(300, 2), tiles=(4,))


def test_rows_of_a_gather_that_drops_other_dimensions_too() -> None:
    numbers = lax.GatherDimensionNumbers(offset_dims=(0,), collapsed_slice_dims=(0, 1), start_index_map=(0,))

    def run(x: Any) -> Any:
        def body(n: Any, _: Any) -> Any:
            return n + 1, lax.gather(x, n[None], numbers, (1, 1, 3))

        return lax.scan(body, 0, None, length=4)[1]

    check(run, np.arange(18, dtype=np.float32).reshape(6, 1, 3), tiles=(4,))


def test_a_product_of_a_concatenation_of_halves_stays_one() -> None:
    """A sum of halves would be rounded once more."""
    halves = [array.astype(np.float16) for array in ARGS]

    def run(x: Any, w: Any, u: Any, b: Any) -> Any:
        return lax.scan(lambda h, row: (concatenated(h, row, w, u, b), None), START.astype(np.float16), x)[0]

    assert products(hoisted(run, *halves)) == (1, 0)


def test_keeps_products_that_a_checkpoint_computes_again() -> None:
    def loss(w: Any) -> Any:
        step = jax.checkpoint(lambda h, row: elman(h, row, w, U, B), prevent_cse=False)
        return (lax.scan(lambda h, row: (step(h, row), None), START, X)[0] ** 2).sum()

    in_loops, _ = products(hoisted(jax.grad(loss), W, num_tiles=0))
    # Those of the forward part and of the gradient have moved.
    assert products(hoisted(jax.grad(loss), W))[0] == in_loops - 2


@pytest.mark.parametrize("settings", [{"num_tiles": 1, "byte_cost": 1e3}, {"keeps_loops": True}])
def test_keeps_products_where_memory_is_short(settings: dict[str, Any]) -> None:
    assert products(hoisted(scanned(elman), *ARGS, **settings)) == (2, 0)


def test_a_loop_fits_that_would_not_with_its_products_before_it() -> None:
    """Products of all rows take 40 times the memory of the rows, more than the machine has at any cost per byte."""
    steps, units = 4096, 40
    device = ipu.IPUModel(tiles_per_ipu=8, bytes_per_tile=64 * 1024, interleaved_offset_bytes=16 * 1024)

    def run(x: Any, w: Any) -> Any:
        return lax.scan(lambda h, row: (jnp.maximum(h, row @ w), None), jnp.zeros(units), jnp.sin(x))[0]

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((steps, 1), (1, units))]
    compiled = ipu.jit(run, device=device, options=ipu.Options(stream_loops=False)).lower(*arrays).compile()
    assert not compiled.profile.memory.lacking()


def test_loop_costs_what_it_costs_with_the_product_before_it() -> None:
    """An LSTM's cell with its input product inside takes the cycles of one that gets the products as rows."""
    steps, batch, features, units = 16, 8, 32, 64
    shapes = [(steps, batch, features), (features, 4 * units), (units, 4 * units)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def cell(state: Any, gates: Any) -> Any:
        i, f, g, o = jnp.split(gates, 4, 1)
        c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def inside(x: Any, w: Any, u: Any) -> Any:
        start = (jnp.zeros((batch, units)),) * 2
        return lax.scan(lambda s, row: cell(s, row @ w + s[0] @ u), start, x)[1]

    def before(x: Any, w: Any, u: Any) -> Any:
        start = (jnp.zeros((batch, units)),) * 2
        return lax.scan(lambda s, row: cell(s, row + s[0] @ u), start, x @ w)[1]

    cycles = [ipu.jit(fun).profile(*arrays).device_cycles for fun in (inside, before)]
    assert cycles[0] == pytest.approx(cycles[1], rel=0.02)
