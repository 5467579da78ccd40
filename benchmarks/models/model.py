"""`Model`, the type of all models of this folder: a training step, the shapes of its arguments, and its machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ipujax as ipu

Struct = jax.ShapeDtypeStruct
Init = Callable[[jax.Array], Any]


@dataclass(frozen=True)
class Model:
    """A step to compile. Nothing is allocated until `init` is called.

    Args:
        name: of the model.
        step: the whole step, optimiser included: (*state, *batch) to (*next state, loss).
        init: from a key to the state, a tuple: most often parameters and the state of the optimiser.
        batch: the arguments of the step after the state, as `jax.ShapeDtypeStruct`s.
        donate: whether the step gives back each part of the state, so that it may take its memory.
        num_ipus: chips of all replicas together.
        arch: preset of the chip.
        jit: further arguments of `ipu.jit`.
        options: fields of `ipu.Options` that the model is meant to be compiled with.
    """

    name: str
    step: Callable[..., Any]
    init: Init
    batch: tuple[Any, ...]
    donate: bool = True
    num_ipus: int = 1
    arch: str = "mk2"
    jit: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def state(self) -> tuple[Any, ...]:
        """Shapes of the state."""
        return tuple(jax.eval_shape(self.init, jax.random.key(0)))

    @property
    def args(self) -> tuple[Any, ...]:
        """Shapes of all arguments of the step."""
        return (*self.state, *self.batch)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the donated arguments."""
        return tuple(range(len(self.state))) if self.donate else ()

    def device(self, **changes: Any) -> ipu.IPUModel:
        """The machine.

        Args:
            changes: fields of `Target` to set otherwise.
        """
        return ipu.IPUModel(self.num_ipus, self.arch, **changes)


def trained(
    name: str,
    loss: Callable[..., jax.Array],
    init: Init,
    optimizer: optax.GradientTransformation,
    *batch: Any,
) -> Model:
    """A model whose state is its parameters and that of its optimiser.

    Args:
        name: of the model.
        loss: of the parameters and the batch.
        init: from a key to the parameters.
        optimizer: makes updates of gradients.
        batch: shapes of the loss's other arguments.
    """

    def step(params: Any, opt_state: Any, *batch: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    def start(key: jax.Array) -> tuple[Any, Any]:
        params = init(key)
        return params, optimizer.init(params)

    return Model(name, step, start, batch)


def in_single(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimiser that keeps and computes all in single precision, of parameters in any; its updates are in theirs."""

    def wide(tree: Any) -> Any:
        return optax.tree.cast(tree, jnp.float32)

    def init(params: Any) -> Any:
        return optimizer.init(wide(params))

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(wide(grads), state, wide(params))
        return optax.tree.cast_like(updates, params), state

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]
