"""Networks as pure functions, and workloads: a training step or inference of a network, with shapes of its arguments.

Input: a `Network`, a batch size, an optimiser. Output: a `Workload`, which `jax.jit`, `ipu.jit` or a search takes:

    train(params, opt_state, [statistics], batch) → (params, opt_state, [statistics], loss)
    infer(params, [statistics], inputs)           → outputs

Only networks with batch normalisation have running statistics. With micro-batches or stages a step contains
`ipu.pipeline`, which under `jax.jit` is a loop with the same numbers; else it is plain JAX of the whole batch.

Limits: no dropout, weight decay or schedule of learning rates; no master copy of weights in half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.models.network_layers import cross_entropy
from ipujax.pipeline import pipeline
from ipujax.runtime.errors import ArgumentError

Struct = jax.ShapeDtypeStruct
Tree = Any  # pytree of arrays, or of their shapes
HALF_LOSS_SCALE = 128.0  # assumed: small gradients then do not vanish in half precision


@dataclass(frozen=True, slots=True)
class Network:
    """A network. Nothing is allocated until `init` is called.

    Args:
        name: of the network.
        init: from a key to parameters and running statistics; those are empty without batch normalisation.
        apply: from parameters, statistics, inputs of a batch and whether it trains to outputs and new statistics.
        inputs: shapes of the inputs of one example.
        labels: shapes of the labels of one example.
        loss: mean over a batch, of outputs and labels.
    """

    name: str
    init: Callable[[jax.Array], tuple[Tree, Tree]]
    apply: Callable[[Tree, Tree, Tree, bool], tuple[Tree, Tree]]
    inputs: Tree
    labels: Tree
    loss: Callable[[Tree, Tree], jax.Array] = cross_entropy

    def shapes(self) -> tuple[Tree, Tree]:
        """Return shapes of parameters and running statistics."""
        params, statistics = jax.eval_shape(self.init, jax.random.key(0))
        return params, statistics

    def num_parameters(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(prod(leaf.shape) for leaf in jax.tree.leaves(self.shapes()[0]))

    def batch(self, examples: int) -> Tree:
        """Return shapes of the inputs and labels of a batch."""
        example = {"inputs": self.inputs, "labels": self.labels}
        return jax.tree.map(lambda leaf: Struct((examples, *leaf.shape), leaf.dtype), example)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimiser, whose state and arithmetic are in single precision.

    Args:
        init: from parameters to the state.
        update: from gradients, state and parameters to new parameters and state.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


def sgd(rate: float = 0.1, momentum: float = 0.9) -> Optimizer:
    """Gradient descent with momentum; without it, at 0, there is no state."""

    def init(params: Tree) -> Tree:
        return _zeros(params) if momentum else {}

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        velocity = jax.tree.map(lambda v, g: momentum * v + g.astype(v.dtype), state, grads) if momentum else grads
        return jax.tree.map(lambda p, v: _moved(p, -rate * v.astype(jnp.float32)), params, velocity), (
            velocity if momentum else {}
        )

    return Optimizer(init, update)


def adam(rate: float = 1e-3, decay: float = 0.9, square_decay: float = 0.999, epsilon: float = 1e-8) -> Optimizer:
    """Adam. Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015), algorithm 1."""

    def init(params: Tree) -> Tree:
        return {"mean": _zeros(params), "square": _zeros(params), "count": jnp.zeros((), jnp.int32)}

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        count = state["count"] + 1
        # In half precision the square of a gradient of 1e-4 is 0.
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        mean = jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, state["mean"], wide)
        square = jax.tree.map(lambda s, g: square_decay * s + (1 - square_decay) * g * g, state["square"], wide)
        # Both means begin at zero: what they lack in the first steps is divided out.
        mean_scale = rate / (1 - decay**count)
        square_scale = 1 / (1 - square_decay**count)

        def new(p: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
            return _moved(p, -mean_scale * m / (jnp.sqrt(square_scale * s) + epsilon))

        return jax.tree.map(new, params, mean, square), {"mean": mean, "square": square, "count": count}

    return Optimizer(init, update)


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {"adam": adam, "sgd": sgd}


def _zeros(params: Tree) -> Tree:
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def _moved(p: jax.Array, change: jax.Array) -> jax.Array:
    """Add a change in single precision to a parameter of any."""
    return (p.astype(jnp.float32) + change).astype(p.dtype)


@dataclass(frozen=True, slots=True)
class Workload:
    """A function to compile or plan, and shapes of its arguments.

    Args:
        name: of the network, and whether it trains or infers.
        fun: the function.
        args: shapes of its arguments.
        batch_argnums: position of the argument whose leading axes are examples.
        donate_argnums: positions of arguments that it gives back.
    """

    name: str
    fun: Callable[..., Any]
    args: tuple[Tree, ...]
    batch_argnums: int
    donate_argnums: tuple[int, ...]


def training(
    network: Network, batch: int, optimizer: Optimizer | None = None, micro_batches: int = 1, **pipelined: Any
) -> Workload:
    """Return the training step of a network.

    Args:
        network: the network.
        batch: examples of a step, a multiple of `micro_batches`.
        optimizer: of its parameters; Adam when None.
        micro_batches: of a step, whose gradients are averaged.
        pipelined: further arguments of `ipu.pipeline`, as `stages` and `schedule`; without any and
            with one micro-batch there is no pipeline.

    Raises:
        ArgumentError: a batch that has no examples, or that micro-batches do not divide.
    """
    _check_batch(batch, micro_batches)
    chosen = optimizer or adam()
    params, statistics = network.shapes()
    # Small gradients of half precision are zero: the loss is scaled, and gradients are divided in single precision.
    is_half = any(leaf.dtype == jnp.float16 for leaf in jax.tree.leaves(params))
    scale = HALF_LOSS_SCALE if is_half else 1.0

    def loss(params: Tree, statistics: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        outputs, new_statistics = network.apply(params, statistics, batch["inputs"], True)
        return scale * network.loss(outputs, batch["labels"]), new_statistics

    def accumulated(grad_fn: Callable[..., Any], **carry: Any) -> Callable[..., Any]:
        has_pipeline = micro_batches > 1 or pipelined
        return pipeline(grad_fn, micro_batches=micro_batches, **carry, **pipelined) if has_pipeline else grad_fn

    def moved(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        unscaled = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads) if is_half else grads
        return chosen.update(unscaled, opt_state, params)

    def step(params: Tree, opt_state: Tree, batch: Tree) -> Any:
        grad_fn = jax.value_and_grad(lambda params, batch: loss(params, statistics, batch)[0])
        value, grads = accumulated(grad_fn)(params, batch)
        return *moved(grads, opt_state, params), value / scale

    def step_of_statistics(params: Tree, opt_state: Tree, statistics: Tree, batch: Tree) -> Any:
        # A micro-batch begins with the statistics that the one before it has left.
        grad_fn = accumulated(jax.value_and_grad(loss, has_aux=True), carry={1: (0, 1)})
        (value, statistics), grads = grad_fn(params, statistics, batch)
        return *moved(grads, opt_state, params), statistics, value / scale

    # Shapes alone: parameters of a large network exceed the memory of a host.
    opt_state = jax.eval_shape(chosen.init, params)
    has_statistics = bool(jax.tree.leaves(statistics))
    state = (params, opt_state, statistics) if has_statistics else (params, opt_state)
    fun = step_of_statistics if has_statistics else step
    args = (*state, network.batch(batch))
    return Workload(f"{network.name} training", fun, args, len(state), tuple(range(len(state))))


def inference(network: Network, batch: int) -> Workload:
    """Return the function of a network that computes outputs of a batch.

    Args:
        network: the network.
        batch: examples.

    Raises:
        ArgumentError: a batch without examples.
    """
    _check_batch(batch, 1)
    params, statistics = network.shapes()

    def infer(params: Tree, inputs: Tree) -> Tree:
        return network.apply(params, statistics, inputs, False)[0]

    def infer_by_statistics(params: Tree, statistics: Tree, inputs: Tree) -> Tree:
        return network.apply(params, statistics, inputs, False)[0]

    has_statistics = bool(jax.tree.leaves(statistics))
    state = (params, statistics) if has_statistics else (params,)
    fun = infer_by_statistics if has_statistics else infer
    return Workload(f"{network.name} inference", fun, (*state, network.batch(batch)["inputs"]), len(state), ())


def _check_batch(batch: int, micro_batches: int) -> None:
    """Refuse a batch without examples, or one that micro-batches do not divide."""
    if batch < 1 or micro_batches < 1 or batch % micro_batches:
        nearest = max(1, round(batch / max(1, micro_batches))) * max(1, micro_batches)
        raise ArgumentError(
            "the batch of a workload does not divide into micro-batches",
            expected=f"a multiple of micro_batches={micro_batches}, both at least 1",
            got=f"batch={batch}",
            hint=f"batch={nearest}" + ("" if micro_batches > 0 else ", micro_batches=1"),
        )
