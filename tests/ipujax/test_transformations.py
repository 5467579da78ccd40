"""JAX's transformations of `ipu.jit` functions and inside them, one by one and composed, against plain JAX."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback
from jax.sharding import PartitionSpec as P

import ipujax as ipu

DEVICE = ipu.IPUModel(tiles_per_ipu=16)
RNG = np.random.default_rng(4)
X = RNG.normal(size=(4, 4)).astype(np.float32)
T = RNG.normal(size=(4, 4)).astype(np.float32)
policies = jax.checkpoint_policies


def model(x: jax.Array) -> jax.Array:
    """A loop, a branch, a product and a reduction."""

    def turn(c: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = jnp.tanh(c + row)
        return c, c * row

    last, rows = lax.scan(turn, x[0], x @ x.T / 4)
    return jnp.where(last > 0, last, 0.1 * last) + lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, rows.sum(0))


def loss(x: jax.Array) -> jax.Array:
    return (model(x) ** 2).sum()


@jax.custom_jvp
def tripled(x: jax.Array) -> jax.Array:
    return x * 3


tripled.defjvp(lambda primals, tangents: (tripled(primals[0]), 5 * tangents[0]))


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x * 2


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.clip(g, -0.1, 0.1) * x,))


def named_axis(x: jax.Array) -> jax.Array:
    return lax.cond(lax.axis_index("i") > 1, jnp.sin, jnp.cos, lax.psum(x, "i"))


def solved(x: jax.Array) -> jax.Array:
    """A solution found by an iteration whose gradient is another solution."""
    matrix = x @ x.T + 5 * jnp.eye(4)

    def solve(matvec: Callable[..., Any], b: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 40, lambda _, y: y + 0.1 * (b - matvec(y)), jnp.zeros_like(b))

    return lax.custom_linear_solve(lambda v: matrix @ v, x[0], solve, symmetric=True)


def remade(policy: Any) -> Callable[[jax.Array], Any]:
    return jax.grad(lambda x: jax.checkpoint(loss, policy=policy)(x))


def named(x: jax.Array) -> jax.Array:
    return jax.grad(
        jax.checkpoint(
            lambda x: (jnp.sin(checkpoint_name(jnp.tanh(x @ x), "kept")) ** 2).sum(),
            policy=policies.save_only_these_names("kept"),
        )
    )(x)


# Functions of one matrix; each is compiled as it stands.
INSIDE: dict[str, Callable[[jax.Array], Any]] = {
    "grad": jax.grad(loss),
    "value_and_grad": jax.value_and_grad(loss),
    "vjp": lambda x: jax.vjp(model, x)[1](x[0]),
    "jvp": lambda x: jax.jvp(model, (x,), (T,)),
    "linearize": lambda x: (lambda y, along: (y, along(T)))(*jax.linearize(model, x)),
    "linear_transpose": lambda x: jax.linear_transpose(lambda y: x @ y, x)(x),
    "vmap": jax.vmap(lambda r: jnp.tanh(r) / r.sum()),
    "vmap of a loop": jax.vmap(lambda r: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + jnp.abs(r) + 0.5, r)),
    "vmap of a branch": jax.vmap(lambda r: lax.cond(r[0] > 0, jnp.sin, lambda r: r * 2, r)),
    "vmap with a name": jax.vmap(lambda r: r / lax.psum(r, "rows"), axis_name="rows"),
    "vmap of vmap": lambda x: jax.vmap(jax.vmap(jnp.multiply, (None, 0)), (0, None))(x[0], x[1]),
    "jacfwd": jax.jacfwd(model),
    "jacrev": jax.jacrev(model),
    "hessian": jax.hessian(lambda x: loss(jnp.concatenate([x[:2], x[2:] ** 2]))),
    "forward over reverse": lambda x: jax.jvp(jax.grad(loss), (x,), (T,))[1],
    "reverse over reverse": jax.grad(lambda x: (jax.grad(loss)(x) * T).sum()),
    "grad of vmap": jax.grad(lambda x: jax.vmap(lambda r: jnp.tanh(r @ x))(x).sum()),
    "vmap of grad": lambda x: jax.vmap(jax.grad(lambda r: (jnp.sin(r) * r).sum()))(x),
    "third derivative": lambda x: jax.vmap(jax.grad(jax.grad(jax.grad(lambda s: jnp.sin(s) * s))))(x[0]),
    "custom_jvp": jax.grad(lambda x: (tripled(x) ** 2).sum()),
    "custom_vjp": jax.grad(lambda x: (clipped(x) ** 2).sum()),
    "custom_vjp in vmap": lambda x: jax.vmap(jax.grad(lambda r: clipped(r).sum()))(x),
    "custom_linear_solve": solved,
    "gradient of custom_linear_solve": jax.grad(lambda x: solved(x).sum()),
    "closure_convert": lambda x: (lambda fun, consts: fun(x, *consts))(*jax.closure_convert(lambda y: y * x, x)),
    "checkpoint": jax.grad(jax.checkpoint(loss)),
    "checkpoint, everything kept": remade(policies.everything_saveable),
    "checkpoint, nothing kept": remade(policies.nothing_saveable),
    "checkpoint, products kept": remade(policies.dots_saveable),
    "checkpoint, products without batch kept": remade(policies.dots_with_no_batch_dims_saveable),
    "checkpoint, names kept": named,
    "checkpoint in a loop": jax.grad(
        lambda x: lax.scan(jax.checkpoint(lambda c, r: (jnp.tanh(c @ x + r), c.sum())), x[0], x)[1].sum()
    ),
    "checkpoint of checkpoint": jax.grad(jax.checkpoint(lambda x: jax.checkpoint(loss)(jnp.sin(x)))),
    "stop_gradient": jax.grad(lambda x: (x * lax.stop_gradient(x)).sum()),
    "jit in jit": lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y) + 1)(x),
    "ipu.jit in it": lambda x: ipu.jit(jnp.sin)(x) + jax.grad(lambda y: ipu.jit(loss)(y))(x),
    "eval_shape in it": lambda x: x * jax.eval_shape(model, x).shape[0],
}  # fmt: skip


def assert_equal(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", INSIDE)
def test_inside(name: str) -> None:
    assert_equal(ipu.jit(INSIDE[name], device=DEVICE)(X), jax.jit(INSIDE[name])(X))


# From a jitted function to a number or a tree of them; given `ipu.jit` and `jax.jit`.
JITTED = Callable[[Callable[..., Any]], Callable[..., Any]]
OF: dict[str, Callable[[JITTED], Any]] = {
    "grad": lambda jit: jax.grad(jit(loss))(X),
    "value_and_grad": lambda jit: jax.value_and_grad(jit(loss))(X),
    "hessian": lambda jit: jax.hessian(jit(lambda r: (jnp.tanh(r) ** 3).sum()))(X[0]),
    "jvp": lambda jit: jax.jvp(jit(model), (X,), (T,)),
    "vjp": lambda jit: jax.vjp(jit(model), X)[1](X[0]),
    "linearize": lambda jit: jax.linearize(jit(model), X)[1](T),
    "linear_transpose": lambda jit: jax.linear_transpose(jit(lambda y: X @ y), X)(X),
    "jacfwd": lambda jit: jax.jacfwd(jit(model))(X),
    "jacrev": lambda jit: jax.jacrev(jit(model))(X),
    "vmap": lambda jit: jax.vmap(jit(lambda r: jnp.tanh(r) / r.sum()))(X),
    "vmap over the second axis": lambda jit: jax.vmap(jit(jnp.cumsum), in_axes=1, out_axes=1)(X),
    "vmap of several": lambda jit: jax.vmap(jit(lambda a, b: a @ b), (0, None))(X, T),
    "vmap of grad": lambda jit: jax.vmap(jax.grad(jit(lambda r: (jnp.sin(r) * r).sum())))(X),
    "grad of vmap": lambda jit: jax.grad(lambda x: jax.vmap(jit(jnp.tanh))(x).sum())(X),
    "checkpoint": lambda jit: jax.grad(jax.checkpoint(jit(loss)))(X),
    "jit": lambda jit: jax.jit(lambda x: jit(model)(x) * 2)(X),
    "jit of grad": lambda jit: jax.jit(jax.grad(jit(loss)))(X),
    "scan": lambda jit: lax.scan(lambda c, r: (jit(jnp.tanh)(c + r), c), X[0], X),
    "cond": lambda jit: lax.cond(True, jit(jnp.sin), jit(jnp.cos), X),
    "while": lambda jit: lax.while_loop(lambda c: c.sum() < 99, jit(lambda c: c + 1), X),
    "custom_jvp": lambda jit: jax.grad(jit(lambda x: tripled(x).sum()))(X),
    "custom_vjp": lambda jit: jax.grad(jit(lambda x: clipped(x).sum()))(X),
    "axis of vmap, known argument": lambda jit: jax.vmap(lambda _: jit(named_axis)(T), axis_name="i")(X),
    "closed over": lambda jit: jax.grad(lambda w: jit(lambda x: (x @ w).sum())(X))(T),
    "donated": lambda jit: jax.grad(lambda x: jit(loss)(x))(jnp.array(X)),
    "pytrees": lambda jit: jax.grad(jit(lambda p: (p["a"] * p["b"][0]).sum()))({"a": X, "b": [T]}),
    "has_aux": lambda jit: jax.grad(jit(lambda x: (loss(x), {"seen": x[0]})), has_aux=True)(X),
    "argnums": lambda jit: jax.grad(jit(lambda a, b: (a @ b).sum()), argnums=(0, 1))(X, T),
    "eval_shape": lambda jit: np.zeros(jax.eval_shape(jit(model), X).shape),
}


@pytest.mark.parametrize("name", OF)
def test_of(name: str) -> None:
    assert_equal(OF[name](lambda fun: ipu.jit(fun, device=DEVICE)), OF[name](jax.jit))


def test_a_function_of_no_arguments_that_closes_over_tracers_is_traced_once() -> None:
    traces = []

    def outer(x: Any) -> Any:
        return ipu.jit(lambda: (traces.append(1), jnp.sin(x).sum())[1], device=DEVICE)()

    np.testing.assert_allclose(jax.grad(outer)(X), jnp.cos(X), rtol=1e-6)
    assert len(traces) == 1


# Functions of arrays that are known, while JAX makes a jaxpr: the jaxpr calls the function, not its program.
WHILE_TRACING: dict[str, Callable[[JITTED], Any]] = {
    "jaxpr": lambda jit: str(jax.make_jaxpr(lambda: jit(model)(X))()),
    "jit": lambda jit: str(jax.make_jaxpr(jax.jit(lambda x: jit(model)(X) * x))(X)),
    "checkify": lambda jit: checkify.checkify(jit(checked))(X)[0].get(),
    "checkify of all": lambda jit: checkify.checkify(jit(model), checkify.all_checks)(X * np.nan)[0].get(),
    "scan": lambda jit: lax.scan(lambda c, r: (c + jit(jnp.sum)(X), r), 0.0, X),
    "grad": lambda jit: jax.grad(lambda x: x * jit(loss)(X))(2.0),
}


def checked(x: jax.Array) -> jax.Array:
    checkify.debug_check(jnp.all(x > 99), "too small: {x}", x=x[0, 0])
    return x


def without_places(value: Any) -> Any:
    return re.sub(r" \(.*?:\d+:?\d* ?\(?.*?\)|at 0x\w+", "", value) if isinstance(value, str) else value


@pytest.mark.parametrize("name", WHILE_TRACING)
def test_of_known_arrays_while_jax_traces(name: str) -> None:
    ours = WHILE_TRACING[name](lambda fun: ipu.jit(fun, device=DEVICE))
    theirs = WHILE_TRACING[name](jax.jit)
    if isinstance(theirs, str):
        assert without_places(ours) == without_places(theirs)
    else:
        assert_equal(ours, theirs)


# What JAX refuses, `ipu.jit` refuses in the same words.
REFUSED: dict[str, Callable[[JITTED], Any]] = {
    "ordered io_callback in vmap": lambda jit: jit(
        jax.vmap(lambda r: io_callback(lambda v: v, jax.ShapeDtypeStruct((4,), np.float32), r, ordered=True))
    )(X),
    "gradient of a pure_callback": lambda jit: jit(
        jax.grad(lambda x: jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((4, 4), np.float32), x).sum())
    )(X),
    "product of wrong shapes": lambda jit: jit(lambda x: x @ x[:3])(X),
    "sum of wrong shapes": lambda jit: jit(lambda x: x + jnp.ones(3))(X),
    "concatenate": lambda jit: jit(lambda x: jnp.concatenate([x, x[:, :2]]))(X),
    "reshape": lambda jit: jit(lambda x: x.reshape(3, 5))(X),
    "convolution": lambda jit: jit(lambda x: lax.conv(x[None, None], jnp.ones((1, 2, 2, 2)), (1, 1), "SAME"))(X),
    "dot_general": lambda jit: jit(lambda x: lax.dot_general(x, x, (((0,), (0,)), ((0,), (0,)))))(X),
    "index out of range, known": lambda jit: jit(lambda x: lax.slice(x, (0, 0), (5, 4)))(X),
    "carry of another shape": lambda jit: jit(lambda x: lax.scan(lambda c, r: (c[:2], r), x[0], x))(X),
    "carry of another dtype": lambda jit: jit(lambda x: lax.fori_loop(0, 3, lambda _, c: c.astype(np.int32), x))(X),
    "branches of two shapes": lambda jit: jit(lambda x: lax.cond(x[0, 0] > 0, lambda: x, lambda: x[0]))(X),
    "a condition of several": lambda jit: jit(lambda x: lax.cond(x > 0, lambda: x, lambda: x))(X),
    "a Python condition": lambda jit: jit(lambda x: x if x.sum() > 0 else -x)(X),
    "gradient of a matrix": lambda jit: jit(jax.grad(model))(X),
    "gradient of whole numbers": lambda jit: jit(jax.grad(lambda i: i.sum() * 1.0))(np.arange(3)),
    "reverse through while": lambda jit: jit(
        jax.grad(lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x).sum())
    )(X),
    "a boolean index": lambda jit: jit(lambda x: x[x > 0])(X),
    "gather of two lengths": lambda jit: jit(lambda x: x[jnp.arange(2), jnp.arange(3)])(X),
    "sort along no axis": lambda jit: jit(lambda x: lax.sort(x, dimension=2))(X),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_jax_refuses(name: str) -> None:
    with pytest.raises(Exception) as theirs:
        jax.block_until_ready(REFUSED[name](jax.jit))
    with pytest.raises(Exception) as ours:
        REFUSED[name](lambda fun: ipu.jit(fun, device=DEVICE))
    assert type(ours.value) is type(theirs.value)
    assert first_lines(ours.value) == first_lines(theirs.value)


def first_lines(error: BaseException) -> list[str]:
    """A message without the lines that name a function or a place in a file."""
    return [line for line in str(error).splitlines() if "/" not in line and "jit" not in line][:4]


def symbolic_product() -> Any:
    """A product whose derivative is told which tangents are zero."""

    @jax.custom_vjp
    def product(x: Any, y: Any) -> Any:
        return x * y, x + y

    def backward(operands: Any, gradients: Any) -> Any:
        g = gradients[0]
        g = jnp.zeros_like(operands[0]) if isinstance(g, jax.custom_derivatives.SymbolicZero) else g
        return g * operands[1], g * operands[0]

    forward = lambda x, y: ((x.value * y.value, x.value + y.value), (x.value, y.value))  # noqa: E731
    product.defvjp(forward, backward, symbolic_zeros=True)
    return product


def test_symbolic_zeros_while_jax_checks() -> None:
    """Types of values under `jax.shard_map` name its axes, which are gone later: JAX's own checks compare them."""
    product = symbolic_product()
    x = jnp.arange(1.0, 5.0)

    def fun(x: Any) -> Any:
        return jax.grad(lambda x: product(x, x)[0].sum())(x) + product(x, x)[1], jax.lax.map(lambda v: product(v, v), x)

    with jax.enable_checks(True):
        expected = jax.jit(fun)(x)
        mesh = jax.sharding.AbstractMesh((2,), ("x",))
        split = jax.shard_map(fun, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        for actual in (ipu.jit(fun)(x), ipu.jit(split, device=ipu.IPUModel(num_ipus=2))(x)):
            for got, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(got, reference)
