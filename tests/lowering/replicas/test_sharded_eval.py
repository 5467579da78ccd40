"""Jaxprs of entire arrays evaluated on shards, on all replicas at once, against the jaxprs on the arrays themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.replicas.sharded_eval import Kind, Path, ReplicaArray, Shards, sharded_eval

RNG = np.random.default_rng(2)
REPLICAS = 4
SHARDS = Shards("replica", REPLICAS)
X = jnp.asarray(RNG.normal(size=(3, 7)), jnp.float32)  # 21 elements, of which the last shard lacks three
Y = jnp.asarray(RNG.normal(size=(3, 7)), jnp.float32)


class Refused(Exception):
    """Error of the tests' refusals."""


def refuse(path: Path) -> NoReturn:
    raise Refused(" in ".join(eqn.primitive.name for eqn in reversed(path)))


def evaluated(fun: Callable[..., Any], x: Any, *entire: Any, padding: float = np.nan) -> tuple[list[Any], list[Kind]]:
    """Results and kinds for a function of a sharded array and of entire arrays; `padding` fills the last shard."""
    jaxpr = jax.make_jaxpr(fun, axis_env=[("replica", REPLICAS)])(x, *entire)
    kinds: list[Kind] = []
    shards = SHARDS.rows(x)
    position = np.arange(shards.size).reshape(shards.shape) < x.size
    shards = jnp.where(position, shards, jnp.asarray(padding).astype(shards.dtype))

    def replica(part: Any) -> Any:
        operands = [
            ReplicaArray(part, x.shape, "shard"),
            *(ReplicaArray(jnp.asarray(y), jnp.shape(y), "whole") for y in entire),
        ]
        results = sharded_eval(jaxpr, operands, SHARDS, refuse)
        kinds.extend(array.kind for array in results)
        return [SHARDS.as_whole(array) for array in results]

    results = jax.vmap(replica, axis_name="replica")(shards)
    for result in results:
        assert all(np.array_equal(result[0], copy, equal_nan=True) for copy in result[1:]), "replicas disagree"
    return [result[0] for result in results], kinds


def branch(x: Any, y: Any, which: Any) -> Any:
    """Returns an entire array and a number, a number of each element, or a shard, by branch."""
    return lax.switch(
        which, [lambda: (x * 2, jnp.float32(1)), lambda: (y, y[0, 0]), lambda: (jnp.ones_like(x), x.sum())]
    )


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[Kind]]] = {
    "elementwise": (lambda x: jnp.where(x > 0, jnp.sqrt(jnp.abs(x)), x / 3), (), ["shard"]),
    "with a whole array": (lambda x, y: x * y + y, (Y,), ["shard"]),
    "with a row of it": (lambda x, y: x - y, (Y[:1],), ["shard"]),
    "with a vector": (lambda x, y: x - y[None], (Y[0],), ["shard"]),
    "with a number": (lambda x, y: (x * y, jnp.clip(x, -y, y)), (jnp.float32(0.5),), ["shard", "shard"]),
    "with numbers made here": (lambda x: jnp.maximum(x, jnp.full_like(x, 0.25) * 2), (), ["shard"]),
    "with a row of numbers": (lambda x: lax.max(x, jnp.full((1, 7), 0.25)), (), ["shard"]),
    "numbers alone": (lambda x: (jnp.zeros_like(x) + 1, jnp.sqrt(jnp.full((2,), 4.0))), (), ["uniform", "uniform"]),
    "numbers and whole arrays": (lambda x, y: jnp.zeros_like(x) + y, (Y,), ["whole"]),
    "no shard at all": (lambda x, y: (y @ y.T, jnp.cumsum(y)), (Y,), ["whole", "whole"]),
    "another dtype": (lambda x: (x.astype(jnp.int32), lax.bitcast_convert_type(x, jnp.int32)), (), ["shard"] * 2),
    "views": (lambda x: x.reshape(7, 3)[None].reshape(1, 21).T.squeeze(1) * 2, (), ["shard"]),
    "back and forth": (lambda x: (x.reshape(-1) + 1).reshape(x.shape) * x, (), ["shard"]),
    "sum": (lambda x: (x.sum(), (x**2).mean(keepdims=True)), (), ["whole", "uniform"]),
    "extremes": (lambda x: (x.max(), x.min(), jnp.abs(x).max() < 9), (), ["whole"] * 3),
    "extremes of whole numbers": (lambda x: ((x * 9).astype(int).max(), (x * 9).astype(int).min()), (), ["whole"] * 2),
    "all and any": (lambda x: (jnp.all(x > -9), jnp.any(x > 9), jnp.all(x > 0)), (), ["whole"] * 3),
    "norm": (lambda x: x / jnp.sqrt(jnp.sum(x * x)), (), ["shard"]),
    "inner products": (lambda x, y: (jnp.vdot(x, y), jnp.vdot(x, x)), (Y,), ["whole", "whole"]),
    "tensor product to a number": (lambda x, y: jnp.tensordot(x, y, 2), (Y,), ["whole"]),
    "jitted": (jax.jit(lambda x, y: jnp.where(y > 0, x, y)), (Y,), ["shard"]),
    "custom derivative": (jax.nn.relu, (), ["shard"]),
    "random numbers": (lambda x, key: x + jax.random.normal(key, x.shape), (jax.random.key(3),), ["shard"]),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y, jnp.ones_like(x))), (Y,), ["shard", "whole", "uniform"]),
    "branch of a shard": (branch, (Y, jnp.int32(0)), ["shard", "whole"]),
    "branch of a whole array": (branch, (Y, jnp.int32(1)), ["shard", "whole"]),
    "branch of numbers": (branch, (Y, jnp.int32(2)), ["shard", "whole"]),
}


@pytest.mark.parametrize("name", CASES)
def test_results_equal_those_of_entire_arrays(name: str) -> None:
    fun, entire, kinds = CASES[name]
    got, result_kinds = evaluated(fun, X, *entire)
    expected = jax.tree.leaves(fun(X, *entire))
    assert result_kinds == kinds
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-6)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "rows": (lambda x: x.sum(1), "reduce_sum"),
    "transpose": (lambda x: x.T, "transpose"),
    "repeated": (lambda x: x[:, None] * jnp.ones((3, 2, 7)), "mul"),
    "slice": (lambda x: x[1:], "slice"),
    "product": (lambda x: x @ x.T, "transpose"),
    "transposed inner product": (lambda x: jnp.vdot(x.reshape(7, 3).T, x), "transpose"),
    "bits": (lambda x: jnp.bitwise_or.reduce(lax.bitcast_convert_type(x, jnp.int32), None), "reduce_or"),
    "sorted": (jnp.sort, "sort in jit"),
    "wider": (lambda x: lax.bitcast_convert_type(x, jnp.uint16), "bitcast_convert_type"),
    "loop": (lambda x: lax.fori_loop(0, 2, lambda _, v: v * 2, x), "scan"),
    "collective": (lambda x: lax.psum(x, "replica"), "psum"),
    "in a branch": (lambda x: lax.cond(x.sum() > 0, lambda: x[::-1], lambda: x), "rev in cond"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_equations_that_need_other_elements(name: str) -> None:
    fun, primitive = REFUSED[name]
    with pytest.raises(Refused, match=f"^{primitive}"):
        evaluated(fun, X)


def test_an_array_is_cut_once() -> None:
    jaxpr = jax.make_jaxpr(lambda x, y: (x * y + y) * y)(X, Y)

    def replica(part: Any) -> Any:
        operands = [ReplicaArray(part, X.shape, "shard"), ReplicaArray(Y, Y.shape, "whole")]
        return sharded_eval(jaxpr, operands, SHARDS, refuse)[0].value

    text = str(jax.make_jaxpr(replica, axis_env=[("replica", REPLICAS)])(SHARDS.rows(X)[0]))
    assert text.count("dynamic_slice") == 1


@pytest.mark.parametrize("size", [1, 3, 4, 21, 24])
def test_rows_and_whole_are_inverse(size: int) -> None:
    x = jnp.arange(size)
    rows = SHARDS.rows(x)
    assert rows.shape == (REPLICAS, -(-size // REPLICAS))
    np.testing.assert_array_equal(SHARDS.whole(rows, (size,)), x)
    np.testing.assert_array_equal(rows.reshape(-1)[size:], 0)


def test_cuts_the_operands_of_an_elementwise_result() -> None:
    """No entire array in the type that only its shard needs."""
    entire = Y.astype(jnp.float16)
    jaxpr = jax.make_jaxpr(jax.jit(lambda x, y: x + 2 * y.astype(x.dtype)))(X, entire)

    def replica(part: Any) -> Any:
        operands = [ReplicaArray(part, X.shape, "shard"), ReplicaArray(entire, entire.shape, "whole")]
        return sharded_eval(jaxpr, operands, SHARDS, refuse)[0].value

    text = str(jax.make_jaxpr(replica, axis_env=[("replica", REPLICAS)])(SHARDS.rows(X)[0]))
    assert re.findall(r":(\w+)\[[\d,]*\] = dynamic_slice", text) == ["f16"]


def test_shards_keep_the_other_dimensions_of_divisible_rows() -> None:
    x = jnp.arange(2 * REPLICAS * 3).reshape(2 * REPLICAS, 3)
    rows = SHARDS.rows(x)
    assert rows.shape == (REPLICAS, 2, 3) and SHARDS.shape(x.shape) == (2, 3) and SHARDS.shape((3, 7)) == (6,)
    np.testing.assert_array_equal(SHARDS.whole(rows, x.shape), x)
