"""Matrices that a loop multiplies by in every turn are weights if a later loop sums an array of their shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.jax_compat import Jaxpr, trace
from ipujax.lowering.passes import PASSES
from ipujax.lowering.poplin.joint import Later
from ipujax.lowering.role import Role
from ipujax.lowering.roles import roles
from tests.lowering.helpers import check
from tests.marks import slow_but

Params = Mapping[str, Any]


def parameters(inputs: int, hidden: int, classes: int, gates: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = {
        "in": (inputs, gates * hidden),
        "again": (hidden, gates * hidden),
        "bias": (gates * hidden,),
        "out": (hidden, classes),
    }
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}


def rnn(params: Params, x: Any) -> Any:
    """The scores of sequences [batch, time, inputs], by the last state of tanh units."""

    def turn(h: Any, now: Any) -> Any:
        return jnp.tanh(now @ params["in"] + h @ params["again"] + params["bias"]), None

    start = jnp.zeros((x.shape[0], params["again"].shape[0]), x.dtype)
    return lax.scan(turn, start, x.swapaxes(0, 1))[0] @ params["out"]


def lstm(params: Params, x: Any) -> Any:
    """The scores of sequences [batch, time, inputs], by the last state of LSTM cells."""

    def turn(carry: Any, now: Any) -> Any:
        h, cell = carry
        i, f, g, o = jnp.split(now @ params["in"] + h @ params["again"] + params["bias"], 4, -1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(cell), cell), None

    start = jnp.zeros((x.shape[0], params["again"].shape[0]), x.dtype)
    return lax.scan(turn, (start, start), x.swapaxes(0, 1))[0][0] @ params["out"]


def sgd(params: Params, x: Any) -> Any:
    grads = jax.grad(lambda params: jnp.sum(rnn(params, x) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.125 * g, params, grads)


def roles_in_loops(fun: Any, *args: Any) -> list[list[Role]]:
    """The roles of the products in each loop, in order."""
    closed = trace(fun, args, {}, ()).jaxpr
    for _, run in PASSES:
        closed = run(closed)
    known, found = roles(closed.jaxpr), []
    for loop in closed.jaxpr.eqns:
        if loop.primitive.name == "scan":
            body: Jaxpr = loop.params["jaxpr"].jaxpr
            inside = roles(body, known[id(loop)].inside if id(loop) in known else {})
            found.append([inside[id(eqn)] for eqn in body.eqns if eqn.primitive.name == "dot_general"])
    return found


def test_the_loops_of_a_recurrent_layer() -> None:
    forward, backward = roles_in_loops(sgd, parameters(6, 5, 3), jax.ShapeDtypeStruct((2, 4, 6), np.float32))
    summed = (("add_any", 2, 0),)
    assert [role.later for role in forward] == [Later(1, False, summed), Later(1, True, summed)]
    assert all(role.on_result for role in forward)  # known from the loop itself
    updates = [role for role in backward if role.later is not None and role.later.is_update]
    assert [role.later.elementwise for role in updates if role.later is not None] == [summed, summed]
    assert sorted(role.laid_as is None for role in updates) == [False, True]  # the loop does not read those of inputs


def test_what_is_not_trained_has_no_weights() -> None:
    (forward,) = roles_in_loops(rnn, parameters(6, 5, 3), jax.ShapeDtypeStruct((2, 4, 6), np.float32))
    assert [role.later for role in forward] == [None, None]


def test_states_are_no_gradients_of_weights_of_their_shape() -> None:
    """Of a second layer, with as many examples as inputs, the states have the shape of the first layer's weights."""

    def layers(params: Params, x: Any) -> Any:
        def turn(h: Any, now: Any) -> Any:
            h = jnp.tanh(now @ params["in"] + h @ params["again"])
            return h, h

        start = jnp.zeros((x.shape[1], params["again"].shape[0]), x.dtype)
        return lax.scan(turn, start, lax.scan(turn, start, x)[1])[0]

    found = roles_in_loops(layers, parameters(5, 5, 3), jax.ShapeDtypeStruct((4, 5, 5), np.float32))
    assert [[role.later for role in loop] for loop in found] == [[None, None], [None, None]]


def test_weights_inside_loops_in_loops() -> None:
    def twice(params: Params, xs: Any) -> Any:
        return lax.scan(lambda params, x: (sgd(params, x), None), params, xs)[0]

    params = {name: jnp.ones(p.shape) * 0.1 for name, p in parameters(3, 5, 2).items()}
    xs = np.linspace(-1, 1, 3 * 2 * 4 * 3, dtype=np.float32).reshape(3, 2, 4, 3)
    check(twice, params, xs, tiles=(7,), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("batch", "tiles"), slow_but([(2, 16)], [(1, 7), (2, 16), (9, 4)]))
def test_numbers(batch: int, tiles: int) -> None:
    rng = np.random.default_rng(0)
    params = {name: rng.normal(0, 0.3, p.shape).astype(np.float32) for name, p in parameters(6, 16, 3).items()}
    x = rng.normal(size=(batch, 4, 6)).astype(np.float32)
    check(sgd, params, x, tiles=(tiles,), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("sizes", "time"), slow_but([((8, 16, 3), 5)], [((8, 16, 3), 5), ((16, 32, 5), 6)]))
def test_twice_a_small_batch_is_more_work_and_no_faster(sizes: Sequence[int], time: int) -> None:
    """Work had fallen by a quarter from one example to two: gradients lay on four times fewer tiles."""
    inputs, hidden, classes = sizes
    optimizer = optax.adam(1e-3)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(lstm(params, x), y).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = parameters(inputs, hidden, classes, gates=4)
    state, jitted = jax.eval_shape(optimizer.init, params), ipu.jit(step, device=ipu.IPUModel(), donate_argnums=(0, 1))
    found = []
    for batch in (1, 2, 4, 8):
        x, y = jax.ShapeDtypeStruct((batch, time, inputs), np.float32), jax.ShapeDtypeStruct((batch,), np.int32)
        profile = jitted.lower(params, state, x, y).compile().profile
        found.append((profile.total_worker_cycles, profile.cycles))
    work, cycles = zip(*found, strict=True)
    assert list(work) == sorted(set(work)), work
    assert list(cycles) == sorted(cycles), cycles
