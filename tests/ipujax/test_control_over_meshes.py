"""Loops and branches over meshes: IPUs agree along the axes of the collectives inside, and may part along others.

Oracle: `jax.vmap` over named axes, and for shardings the function of whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu

X = np.random.default_rng(0).uniform(0.1, 8, (8, 8)).astype(np.float32)
MESH = ipu.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
DEVICE = ipu.IPUModel(num_ipus=4, tiles_per_ipu=4)
Block = Callable[[jax.Array], jax.Array]


def while_along_y(v: jax.Array) -> jax.Array:
    def goes_on(c: jax.Array) -> jax.Array:
        return lax.pmax(jnp.max(c), "y") > 0.5

    return lax.while_loop(goes_on, lambda c: 0.4 * c + 0.1 * lax.pmean(c, "y"), v)


def cond_along_y(v: jax.Array) -> jax.Array:
    decision = lax.psum(v.sum(), "y") > 60
    return lax.cond(decision, lambda a: a + lax.psum(a, "y"), lambda a: a - lax.all_gather(a, "y").sum(0), v)


def switch_by_index(v: jax.Array) -> jax.Array:
    branches = [lambda a: a + lax.psum(a, "y"), lambda a: lax.ppermute(a, "y", [(0, 1), (1, 0)])]
    return lax.switch((lax.axis_index("x") + 1) % 2, branches, v)


def fori_to_index(v: jax.Array) -> jax.Array:
    return lax.fori_loop(0, lax.axis_index("x") + 1, lambda k, a: a * 0.5 + lax.pmax(a, "y"), v)


def nested(v: jax.Array) -> jax.Array:
    """A loop in a branch in a loop; rows of x run each of them another number of times."""

    def body(carry: Any) -> Any:
        c, count = carry
        level = lax.pmean(c.mean(), "y")

        def inner(a: jax.Array) -> jax.Array:
            return lax.while_loop(lambda z: lax.pmax(jnp.max(z), "y") > level, lambda z: z * 0.8, a)

        return lax.cond(level > 1, inner, lambda a: a * 0.5, c) * 0.99, count + 1

    c, count = lax.while_loop(lambda carry: lax.pmax(jnp.max(carry[0]), "y") > 0.5, body, (v, 0))
    return c + count


def scan_of_cond(v: jax.Array) -> jax.Array:
    def body(c: jax.Array, level: jax.Array) -> Any:
        decision = lax.pmin(jnp.max(c), "y") > level
        return lax.cond(decision, lambda a: 0.5 * lax.psum(a, "y"), lambda a: a * 1.5, c), None

    return lax.scan(body, v, jnp.arange(4.0))[0]


BLOCKS = [nested, while_along_y, cond_along_y, switch_by_index, fori_to_index, scan_of_cond]


def by_vmap(block: Block) -> np.ndarray:
    blocks = X.reshape(2, 4, 2, 4).swapaxes(1, 2)
    mapped = jax.vmap(jax.vmap(block, axis_name="y"), axis_name="x")
    return np.asarray(mapped(blocks)).swapaxes(1, 2).reshape(X.shape)


def over_mesh(block: Block) -> Block:
    return jax.shard_map(block, mesh=MESH, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False)


@pytest.mark.parametrize("block", [BLOCKS[0], *BLOCKS[1:]])
def test_rows_of_a_mesh_decide_by_themselves(block: Block) -> None:
    run = ipu.jit(over_mesh(block), device=DEVICE)
    np.testing.assert_allclose(run(X), by_vmap(block), rtol=2e-6)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_executor_has_the_same_numbers(block: Block) -> None:
    expected = by_vmap(block)
    run = ipu.jit(over_mesh(block), device=DEVICE)
    assert run.check(X).agrees  # the tile interpreter, too
    lowered = run.lower(X)
    np.testing.assert_allclose(jax.jit(lowered.evaluate)(X), expected, rtol=2e-6)
    np.testing.assert_allclose(lowered.compile().profile_call(X)[0], expected, rtol=2e-6)
    exact = ipu.jit(over_mesh(block), device=DEVICE, options=ipu.Options(exact_splits=True))
    np.testing.assert_allclose(exact(X), expected, rtol=2e-6)


def test_functions_of_the_host_are_called_by_the_ipus_inside() -> None:
    rows: list[int] = []

    def block(v: jax.Array) -> jax.Array:
        def body(c: jax.Array) -> jax.Array:
            jax.debug.callback(lambda row: rows.append(int(row)), lax.axis_index("x"))
            half = jax.pure_callback(lambda m: np.float32(0 * m + 0.5), jax.ShapeDtypeStruct((), np.float32), c.max())
            return half * c

        return lax.while_loop(lambda c: lax.pmax(jnp.max(c), "y") > 0.5, body, v)

    x = np.concatenate([5 * X[:4], X[4:]])
    result = ipu.jit(over_mesh(block), device=DEVICE)(x)
    halvings = [int(np.ceil(np.log2(part.max() / 0.5))) for part in (x[:4], x[4:])]
    np.testing.assert_allclose(result, np.concatenate([x[:4] / 2 ** halvings[0], x[4:] / 2 ** halvings[1]]), rtol=1e-6)
    assert [rows.count(row) for row in (0, 1)] == [2 * count for count in halvings]


def test_a_refusal_names_the_axis() -> None:
    def block(v: jax.Array) -> jax.Array:
        return lax.cond(lax.psum(v.sum(), "y") > 60, lambda a: a + lax.psum(a, "x"), lambda a: a, v)

    with pytest.raises(ipu.IpuError, match="IPUs along axis 'x' may disagree on this choice of a branch") as caught:
        ipu.jit(over_mesh(block), device=DEVICE).lower(X).compile()
    assert "replicas" not in str(caught.value) and "pmax(x, 'x')" in str(caught.value)
    assert "test_control_over_meshes.py" in str(caught.value)


def test_a_refusal_names_the_collective_whose_ipus_may_part() -> None:
    def goes_on(c: jax.Array) -> jax.Array:
        return lax.pmax(c.sum(), "y") > 1

    def body(c: jax.Array) -> jax.Array:
        return c * 0.5 - 0.1 * lax.pmean(c, "x")

    with pytest.raises(ipu.IpuError, match="IPUs along axis 'x' may disagree on the condition") as caught:
        ipu.jit(over_mesh(lambda v: lax.while_loop(goes_on, body, v)), device=DEVICE).lower(X).compile()
    message = str(caught.value)
    assert "meet for psum" in message and "move psum outside" in message and "pmax inside" not in message
    assert f"test_control_over_meshes.py:{body.__code__.co_firstlineno + 1} (body)" in message


def converged(x: jax.Array) -> jax.Array:
    def body(c: jax.Array) -> jax.Array:
        return lax.cond(c.mean() > 1, lambda a: a * 0.5, lambda a: a - 0.1 * a.mean(0), c) * 0.9

    return lax.while_loop(lambda c: jnp.max(c) > 0.5, body, x)


@pytest.mark.parametrize("spec", [P("x"), *(P(), P("y", "x"))])
def test_whole_arrays_decide_for_all(spec: P) -> None:
    run = ipu.jit(converged, device=DEVICE, in_shardings=NamedSharding(MESH, spec))
    np.testing.assert_allclose(run(X), converged(X), rtol=2e-6)


def rows_converged(x: jax.Array) -> jax.Array:
    def row(v: jax.Array, least: jax.Array) -> Any:
        def body(carry: Any) -> Any:
            c, count = carry
            return 0.4 * c + 0.1 * x[0].mean(), count + 1

        return lax.while_loop(lambda carry: jnp.sum(carry[0] ** 2) > least, body, (v, 0))

    values, counts = jax.vmap(row)(x, 4 + x[:, 0])
    return values + counts[:, None]


def elements_converged(x: jax.Array) -> jax.Array:
    """A predicate of two dimensions, in a branch of a loop."""
    halved = jax.vmap(jax.vmap(lambda v: lax.while_loop(lambda c: c > 1, lambda c: c * 0.5, v)))
    return lax.fori_loop(0, 2, lambda k, c: lax.cond(c.sum() > 3, halved, lambda a: a, c) + k, x)


def keys_converged(x: jax.Array) -> jax.Array:
    def row(v: jax.Array, key: jax.Array) -> Any:
        def body(carry: Any) -> Any:
            key, c = carry
            return jax.random.fold_in(key, 1), c - jax.random.uniform(key)

        return lax.while_loop(lambda carry: carry[1] > 0, body, (key, v.mean()))[1]

    return jax.vmap(row)(x, jax.random.split(jax.random.key(0), len(x)))


@pytest.mark.parametrize("spec", [P("x"), *(P(None, "x"), P("y"))])
@pytest.mark.parametrize("fun", [rows_converged, elements_converged, keys_converged])
def test_elements_of_a_batch_leave_a_loop_each(fun: Block, spec: P) -> None:
    run = ipu.jit(fun, device=DEVICE, in_shardings=NamedSharding(MESH, spec))
    np.testing.assert_allclose(run(X), fun(X), rtol=2e-6, atol=1e-6)


def test_a_batch_in_a_users_block_of_a_partitioned_program() -> None:
    def fun(x: jax.Array) -> jax.Array:
        return over_mesh(jax.vmap(lambda v: lax.while_loop(lambda c: c.sum() > 1, lambda c: c * 0.5, v)))(x * 2)

    run = ipu.jit(fun, device=DEVICE, in_shardings=NamedSharding(MESH, P("x")))
    blocks = (2 * X).reshape(2, 4, 2, 4).swapaxes(1, 2)
    while (goes_on := blocks.sum(-1, keepdims=True) > 1).any():
        blocks = np.where(goes_on, blocks * 0.5, blocks)
    np.testing.assert_allclose(run(X), blocks.swapaxes(1, 2).reshape(X.shape), rtol=2e-6)


def test_a_vertex_that_also_computes_what_parts_keeps_what_agrees() -> None:
    """One vertex has both results: that of u is equal along y, that of x is not."""

    def block(x: jax.Array, u: jax.Array) -> jax.Array:
        def body(carry: Any) -> Any:
            x, u = carry
            return 0.5 * x + 0.5 * lax.pmax(x, "y"), 0.8 * u

        u = jnp.cos(1.5 * u)
        return lax.while_loop(lambda carry: jnp.abs(carry[1]).max() > 0.01, body, (0.5 * x + u, u))[0]

    u = X[:4, :4]
    specs = (P("x", "y"), P())
    fun = jax.shard_map(block, mesh=MESH, in_specs=specs, out_specs=P("x", "y"), check_vma=False)
    np.testing.assert_allclose(ipu.jit(fun, device=DEVICE)(X, u), by_vmap(lambda v: block(v, u)), rtol=2e-6)


def test_groups_of_replicas_decide_by_themselves() -> None:
    pairs = [[0, 1], [2, 3]]

    def replica(x: jax.Array) -> jax.Array:
        def goes_on(c: jax.Array) -> jax.Array:
            return lax.pmax(jnp.max(c), "replica", axis_index_groups=pairs) > 0.5

        return lax.while_loop(goes_on, lambda c: 0.4 * c + 0.1 * lax.psum(c, "replica", axis_index_groups=pairs), x)

    def pair(x: np.ndarray) -> np.ndarray:
        while x.max() > 0.5:
            x = 0.4 * x + 0.1 * x.reshape(2, 2, 8).sum(0)[None].repeat(2, 0).reshape(4, 8)
        return x

    x = np.concatenate([X[:4], 9 * X[4:]])
    run = ipu.jit(replica, device=DEVICE, replicas=4, in_specs=P("replica"), out_specs=P("replica"))
    np.testing.assert_allclose(run(x), np.concatenate([pair(x[:4]), pair(x[4:])]), rtol=2e-6)


@pytest.mark.parametrize("stages", [2, "auto"])
def test_automatic_stages_know_the_collectives_of_the_mesh(stages: Any) -> None:
    rng = np.random.default_rng(1)
    weights = [tuple(rng.normal(size=(16, 16)).astype(np.float32) / 4 for _ in range(2)) for _ in range(4)]
    x = rng.normal(size=(32, 16)).astype(np.float32)
    mesh = ipu.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))

    def loss(weights: Any, x: Any, *, is_split: bool) -> Any:
        for a, b in weights:
            if is_split:
                a = lax.with_sharding_constraint(a, NamedSharding(mesh, P(None, "model")))
                b = lax.with_sharding_constraint(b, NamedSharding(mesh, P("model")))
            x = jnp.tanh(x @ a) @ b
        return (x**2).mean()

    def step(weights: Any, x: Any) -> Any:
        grads = jax.value_and_grad(lambda w, x: loss(w, x, is_split=True))
        return ipu.pipeline(grads, micro_batches=4, stages=stages)(weights, x)

    program = ipu.jit(step, device=ipu.IPUModel(num_ipus=4, tiles_per_ipu=16)).lower(weights, x).compile()
    assert program.profile.replicas == 2
    expected = jax.value_and_grad(lambda w, x: loss(w, x, is_split=False))(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), program(weights, x), expected)
