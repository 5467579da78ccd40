"""Loops over a mesh that accumulate: devices add up their partial sums once, behind the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu
from ipujax.lowering.jax_compat import ClosedJaxpr, jaxpr_as_fun, shape_of
from ipujax.lowering.jaxpr import equations, equations_inside
from ipujax.lowering.partition import Notes, Shardings, partition
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.passes.shard_map import shard_map

AUTO = AbstractMesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
RNG = np.random.default_rng(3)


def values(*shape: int) -> np.ndarray:
    return RNG.normal(0, 0.5, shape).astype(np.float32)


def mlp(w: Any, rows: Any) -> Any:
    return jnp.mean((jax.nn.relu(rows @ w) @ w) ** 2)


def layered(w: Any, rows: Any) -> Any:
    return jnp.mean(lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), rows, w)[0] ** 2)


def looked_up(w: Any, rows: Any) -> Any:
    return jnp.sum(w[(8 * rows).astype(jnp.int32) % 16] ** 2)


def accumulated(loss: Callable[..., Any], w: Any, batches: Any) -> Any:
    """Loss and gradients, summed over micro-batches."""

    def body(sums: Any, rows: Any) -> Any:
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(w, rows)), None

    return lax.scan(body, (jnp.float32(0), jnp.zeros_like(w)), batches)[0]


def recurrent(w: Any, rows: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.mean(lax.scan(lambda h, x: (jnp.tanh((x + h) @ w), None), jnp.zeros(rows.shape[1:]), rows)[0] ** 2)

    return jax.grad(loss)(w)


def scan_of_sums(step: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A loop that reads its carry, and the sum of the rows of an iteration."""
    return lambda w, rows: lax.scan(lambda c, x: (step(c, x.sum(0)), None), jnp.zeros_like(w), rows)[0]


W = (values(16, 16), P())
BATCHES = (values(3, 8, 16), P(None, "data"))
# Programs with the collectives over the batch's axis that they need in each iteration.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[np.ndarray, P], ...], set[str]]] = {
    "gradients": (lambda w, x: accumulated(mlp, w, x), (W, BATCHES), set()),
    "gradients of layers": (lambda w, x: accumulated(layered, w, x), ((values(2, 16, 16), P()), BATCHES), set()),
    "gradients of a recurrent network": (recurrent, (W, BATCHES), set()),
    "gradients of a table": (lambda w, x: accumulated(looked_up, w, x), (W, BATCHES), set()),
    "gradients of split parameters": (
        lambda w, x: accumulated(mlp, w, x),
        ((W[0], P(None, "model")), BATCHES),
        set(),
    ),
    "a mean that decays": (scan_of_sums(lambda c, x: 0.5 * c + x), ((values(16), P()), BATCHES), set()),
    "largest sums": (scan_of_sums(jnp.maximum), ((values(16), P()), BATCHES), {"psum"}),
    "a carry that is read": (scan_of_sums(lambda c, x: c + x * c.sum()), ((values(16), P()), BATCHES), {"psum"}),
    "a carry with a factor": (scan_of_sums(lambda c, x: c * x[0] + x), ((values(16), P()), BATCHES), {"psum"}),
}


def partitioned(fun: Callable[..., Any], args: tuple[tuple[np.ndarray, P], ...], notes: Notes) -> ClosedJaxpr:
    arrays, specs = zip(*args, strict=True)
    shardings = Shardings(tuple(NamedSharding(AUTO, spec) for spec in specs))
    return partition(inline(jax.make_jaxpr(fun)(*arrays)), shardings, notes)


@pytest.mark.parametrize("name", PROGRAMS)
def test_partial_sums_are_added_up_behind_the_loop(name: str) -> None:
    fun, args, expected = PROGRAMS[name]
    notes = Notes()
    jaxpr = partitioned(fun, args, notes)
    loops = [eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "scan"]
    inside = [eqn for loop in loops for eqn in equations_inside(loop)]
    over_data = {
        eqn.primitive.name for eqn in inside if "data" in eqn.params.get("axes", eqn.params.get("axis_name", ()))
    }
    assert over_data == expected
    assert "all_reduce" in {move.step.kind for move in notes.moves}
    arrays = [array for array, _ in args]
    for actual, want in zip(jaxpr_as_fun(shard_map(jaxpr))(*arrays), jax.tree.leaves(fun(*arrays)), strict=True):
        np.testing.assert_allclose(actual, want, rtol=1e-5, atol=1e-6)


def test_a_sharding_is_told_once() -> None:
    """The body of a loop is traced twice: at first to find over which axes its terms are partial sums."""
    told: list[Any] = []

    def sums(rows: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            jax.debug.inspect_array_sharding(x, callback=told.append)
            return total + x.sum(0), None

        return lax.scan(body, jnp.zeros(16), rows)[0]

    partitioned(sums, (BATCHES,), Notes())
    assert [sharding.spec for sharding in told] == [P("data")]


@pytest.mark.parametrize(("iterations", "kind"), [(2, "all_gather"), (64, "all_reduce")])
def test_a_sum_of_many_terms_costs_each_its_share(iterations: int, kind: str) -> None:
    """Gathered operands of few products are fewer bytes than the sum of the products; those of many are not."""

    def products(rows: Any) -> Any:
        return lax.scan(lambda c, x: (c + x.T @ x, None), jnp.zeros((256, 256)), rows)[0]

    notes = Notes()
    partitioned(products, ((values(iterations, 8, 256), P(None, "data")),), notes)
    assert {move.step.kind for move in notes.moves} == {kind}


@pytest.mark.parametrize("loss", [layered, looked_up])
def test_zeros_that_a_sum_begins_with_are_zeros_of_every_device(loss: Callable[..., Any]) -> None:
    """No device chooses between them and zeros: a choice would be stored beside the sum."""
    w = values(2, 16, 16) if loss is layered else W[0]
    jaxpr = partitioned(lambda w, x: accumulated(loss, w, x), ((w, P()), BATCHES), Notes())
    chosen = {
        shape_of(var)
        for eqn in equations(jaxpr.jaxpr)
        if eqn.primitive.name in ("select_n", "dynamic_update_slice")
        for var in eqn.outvars
    }
    assert w.shape not in chosen


def constrained(value: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(value, NamedSharding(AUTO, P(*spec)))


def products_beside(term: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A loop that adds, to products that are partial sums over the axis `data`, a value that this axis splits."""
    return lambda w, rows: lax.scan(lambda c, x: (term(c, x) + constrained(x.T @ x), None), w, rows)[0]


SPLIT_TERMS: dict[str, Callable[[Any, Any], Any]] = {
    "a carry": lambda c, x: 0.5 * constrained(c, "data"),
    "a carry, over two dimensions": lambda c, x: 0.5 * constrained(c, "model", "data"),
    "a carry of another form": lambda c, x: constrained(c.reshape(256), "data").reshape(16, 16),
    "a term": lambda c, x: c + constrained(constrained(x[:1] + jnp.ones((16, 1)), "data") + constrained(x.T @ x)),
}


@pytest.mark.parametrize("name", SPLIT_TERMS)
def test_no_axis_splits_a_partial_sum_over_it(name: str) -> None:
    """A block of a partial sum would be the device's own, and terms of others lost."""
    args = (W, BATCHES)
    fun = products_beside(SPLIT_TERMS[name])
    arrays = [array for array, _ in args]
    (actual,) = jaxpr_as_fun(shard_map(partitioned(fun, args, Notes())))(*arrays)
    np.testing.assert_allclose(actual, jax.jit(fun)(*arrays), rtol=1e-5, atol=1e-5)


def sums_of_a_loop(batches: Any) -> Any:
    return lax.scan(lambda c, x: (c + lax.reduce_sum(x, (0,)), None), jnp.zeros(4, batches.dtype), batches)[0]


def sums_of_a_pipeline(rows: Any) -> Any:
    def sum_of(x: Any) -> Any:
        with ipu.stage(0):
            y = constrained(-x, "data")
        with ipu.stage(1):
            return lax.reduce_sum(y, (0,))

    return ipu.pipeline(sum_of, micro_batches=3, reduce="sum")(rows)


@pytest.mark.parametrize(
    ("fun", "shape", "spec"), [(sums_of_a_loop, (3, 8, 4), P(None, "data")), (sums_of_a_pipeline, (24, 4), P())]
)
def test_sums_of_halves_are_taken_in_each_iteration(fun: Any, shape: tuple[int, ...], spec: P) -> None:
    """Partial sums of one device may overflow where those of all devices together do not."""
    signs = np.tile(np.repeat([1, -1], 4), 3)[:, None]
    rows = np.broadcast_to(10_000 * signs, (24, 4)).astype(np.float16).reshape(shape)
    (actual,) = jaxpr_as_fun(shard_map(partitioned(fun, ((rows, spec),), Notes())))(rows)
    np.testing.assert_array_equal(actual, np.zeros(4, np.float16))
