"""Training steps with every kind of gradient: functions of small arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

WIDTH = 4
ROWS = 16
DEPTH = 8
save_products = jax.checkpoint_policies.dots_saveable
save_named = jax.checkpoint_policies.save_only_these_names("kept")
offload_named = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["kept"],
    offload_src="device",
    offload_dst="pinned_host",
)


class Step(NamedTuple):
    """A training step.

    Args:
        fun: function of the arguments.
        args: arrays, or trees of them.
        replicas: size of the axis "replica", 0 without.
        modes_without_effect: modes that have nothing to recompute.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    replicas: int = 0
    modes_without_effect: tuple[str, ...] = ()


def array(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers that differ for each shape and seed."""
    return (np.random.default_rng([*shape, seed]).normal(size=shape) / 2).astype(np.float32)


def weights(count: int = DEPTH) -> list[np.ndarray]:
    """Square matrices."""
    return [array(WIDTH, WIDTH, seed=n) for n in range(count)]


X = array(ROWS, WIDTH)


def dense(w: jax.Array, h: jax.Array) -> jax.Array:
    """A dense layer."""
    return jnp.tanh(h @ w)


def gelu_block(w: jax.Array, h: jax.Array) -> jax.Array:
    """A residual block of two products."""
    return h + jax.nn.gelu(h @ w) @ w.T


def named_block(w: jax.Array, h: jax.Array) -> jax.Array:
    """The same, with a name for the value between the products."""
    return h + jnp.sin(checkpoint_name(jnp.tanh(h @ w), "kept") @ w.T)


def chain_of(block: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A loss of one block after the other."""

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = block(w, x)
        return jnp.mean(x**2)

    return loss


def trained(loss: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Stochastic gradient descent on the first argument."""

    def step(ws: Any, *args: Any) -> Any:
        value, grads = jax.value_and_grad(loss, **settings)(ws, *args)
        return jax.tree.map(lambda w, g: w - g / 8, ws, grads), value

    return step


def skips(ws: Any, x: jax.Array) -> jax.Array:
    """Values of the way down are read on the way up, as in a U-Net."""
    downs = []
    for w in ws:
        downs.append(x)
        x = jnp.tanh(x @ w)
    for w, down in zip(reversed(ws), reversed(downs), strict=True):
        x = jnp.sin(x @ w.T) * down
    return x.mean()


def dropout(ws: Any, key: jax.Array, x: jax.Array) -> jax.Array:
    """A different mask after each layer."""
    for number, w in enumerate(ws):
        x = dense(w, x) * jax.random.bernoulli(jax.random.fold_in(key, number), 0.7, x.shape)
    return (x**2).mean()


def metrics(ws: Any, x: jax.Array) -> Any:
    """A loss, and figures of values in the middle."""
    middle = x
    for number, w in enumerate(ws):
        x = dense(w, x)
        middle = x if number == 1 else middle
    return (x**2).mean(), {"norm": jnp.linalg.norm(middle), "middle": middle}


def normalised(ws: Any, state: Any, x: jax.Array) -> Any:
    """Batch normalisation, with moving averages that are returned."""
    new_state = []
    for w, (mean, var) in zip(ws, state, strict=True):
        h = x @ w
        new_state.append((0.9 * mean + 0.1 * h.mean(0), 0.9 * var + 0.1 * h.var(0)))
        x = jnp.tanh((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-3))
    return (x**2).mean(), new_state


def scanned(ws: jax.Array, x: jax.Array) -> jax.Array:
    """A loop over layers."""
    body = jax.checkpoint(lambda h, w: (gelu_block(w, h), None))
    return (lax.scan(body, x, ws)[0] ** 2).mean()


def accumulated(ws: Any, xs: jax.Array) -> Any:
    """Gradients in a loop over micro-batches."""

    def body(total: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(chain_of(dense))(ws, x)
        return jax.tree.map(jnp.add, total, grads), value

    return lax.scan(body, jax.tree.map(jnp.zeros_like, ws), xs)


def branching(ws: Any, x: jax.Array) -> jax.Array:
    """One of two layers, by the data."""
    for w in ws:
        x = lax.cond(x[0, 0] > 0.1, lambda w, x: jnp.tanh(x @ w), lambda w, x: jnp.sin(x @ w) * x, w, x)
    return (x**2).mean()


@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    """Sine with half of its gradient, which reads its operand and its result."""
    return jnp.sin(x)


halved.defvjp(lambda x: (jnp.sin(x), (x, jnp.cos(x))), lambda kept, g: (g * kept[1] * jnp.sign(kept[0]) / 2,))


def two_networks(generator: Any, critic: Any, noise: jax.Array, x: jax.Array) -> Any:
    """The first is trained against the second, which is trained on results of the updated first."""

    def run(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = dense(w, x)
        return x

    generator, first = trained(lambda g: run(critic, run(g, noise)).mean())(generator)
    critic, second = trained(lambda c: (run(c, run(generator, noise)) - run(c, x)).mean())(critic)
    return generator, critic, first + second


def second_order(ws: Any, x: jax.Array) -> Any:
    """The gradient of a penalty on a gradient."""

    def penalty(ws: Any) -> jax.Array:
        return (jax.grad(chain_of(dense), argnums=1)(ws, x) ** 2).sum()

    return jax.grad(penalty)(ws)


def printing(ws: Any, x: jax.Array) -> jax.Array:
    """Prints a figure of each layer."""
    for w in ws:
        x = dense(w, x)
        jax.debug.print("mean {}", x.mean())
    return (x**2).mean()


def over_replicas(ws: Any, x: jax.Array) -> Any:
    """Statistics, and gradients, over all replicas."""

    def loss(ws: Any) -> jax.Array:
        h = x
        for w in ws:
            h = dense(w, h)
            h = jnp.tanh(h - lax.pmean(h.mean(0), "replica"))
        return (h**2).mean()

    value, grads = jax.value_and_grad(loss)(ws)
    return lax.pmean((value, grads), "replica")


_STATE = [(array(WIDTH, seed=9), np.ones(WIDTH, np.float32))] * DEPTH
STEPS: dict[str, Step] = {
    "mlp": Step(trained(chain_of(dense)), (weights(), X), modes_without_effect=("standard",)),
    "residual": Step(trained(chain_of(gelu_block)), (weights(), X)),
    "skips": Step(trained(skips), (weights(), X), modes_without_effect=("auto",)),
    "dropout": Step(trained(dropout), (weights(), jax.random.key(3), X)),
    "metrics": Step(trained(metrics, has_aux=True), (weights(), X), modes_without_effect=("standard",)),
    "batch norm": Step(trained(normalised, has_aux=True), (weights(), _STATE, X)),
    "checkpoint": Step(
        trained(chain_of(jax.checkpoint(gelu_block))), (weights(), X), modes_without_effect=("standard",)
    ),
    "nested checkpoint": Step(
        trained(jax.checkpoint(chain_of(jax.checkpoint(gelu_block)))),
        (weights(), X),
        modes_without_effect=("all", "standard", "auto"),
    ),
    "products saved": Step(
        trained(chain_of(jax.checkpoint(gelu_block, policy=save_products))),
        (weights(), X),
        modes_without_effect=("standard",),
    ),
    "names saved": Step(trained(chain_of(jax.checkpoint(named_block, policy=save_named))), (weights(), X)),
    "names offloaded": Step(trained(chain_of(jax.checkpoint(named_block, policy=offload_named))), (weights(), X)),
    "scan": Step(trained(scanned), (np.stack(weights()), X), modes_without_effect=("standard", "auto")),
    "micro-batches": Step(accumulated, (weights(), array(3, ROWS, WIDTH)), modes_without_effect=("standard",)),
    "branches": Step(trained(branching), (weights(), X)),
    "custom gradient": Step(trained(chain_of(lambda w, h: halved(h @ w))), (weights(), X)),
    "two networks": Step(two_networks, (weights(6), weights(6), array(ROWS, WIDTH, seed=1), X)),
    "second order": Step(second_order, (weights(6), X), modes_without_effect=("standard", "auto")),
    "printing": Step(trained(printing), (weights(), X), modes_without_effect=("standard",)),
    "replicas": Step(over_replicas, (weights(6), array(2, ROWS, WIDTH)), 2, ("standard",)),
}
