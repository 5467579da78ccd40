"""Arrays of variables while a program is traced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.runtime.engine.orders import reordered
from ipujax.runtime.tensor import Orders, Tensor, Variable, read, write

State = list[jax.Array]


class Values(dict[Variable, jax.Array]):
    """Arrays of variables. Until it is written, a variable has its constant, or zeros.

    Args:
        orders: orders of the arrays that are not row-major; their keys here are `ElementOrder.array`.
        arrays: the arrays.
    """

    def __init__(self, orders: Orders, arrays: Mapping[Variable, jax.Array] | Iterable[Any] = ()) -> None:
        super().__init__(arrays)
        self.orders = orders

    def __contains__(self, variable: object) -> bool:
        return isinstance(variable, Variable)

    def __missing__(self, variable: Variable) -> jax.Array:
        if variable.value is not None:
            return jnp.asarray(variable.value)
        return jnp.zeros(variable.shape, variable.dtype)

    def copied(self) -> Values:
        """Return a copy; the arrays themselves are shared, since JAX never changes them."""
        return Values(self.orders, self)

    def as_carry(self, variables: list[Variable], outer: Values) -> State:
        """Return the arrays of variables at the end of a loop body or branch, in the shapes they have in `outer`."""
        del outer
        return [self[v] for v in variables]

    def load(self, tensor: Tensor) -> jax.Array:
        """Return the elements of a tensor."""
        return read(reordered(tensor, self.orders), self)

    def store(self, tensor: Tensor, new: jax.Array) -> None:
        """Write `new` to the elements of a tensor."""
        self.update(write(reordered(tensor, self.orders), self, new))

    def scalar(self, tensor: Tensor) -> jax.Array:
        """Return the value of a tensor of one element, which control flow depends on."""
        return self.load(tensor).reshape(())

    def broadcast(self, value: jax.Array) -> jax.Array:
        """Return a value that is the same in all replicas, with the axis of replicas if there is one."""
        return value

    def with_state(self, variables: list[Variable], state: State) -> Values:
        """Return a copy with the arrays of `state` for `variables`."""
        values = self.copied()
        values.update(zip(variables, state, strict=True))
        return values
