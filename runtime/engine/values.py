"""Arrays of variables as a program runs in a trace."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ipujax.runtime.tensor import Tensor, Variable, read, write

State = list[jax.Array]


class Values(dict[Variable, jax.Array]):
    """Arrays of variables. Every variable has one: its constant, or zeros, until it is written."""

    def __contains__(self, variable: object) -> bool:
        return isinstance(variable, Variable)

    def __missing__(self, variable: Variable) -> jax.Array:
        if variable.value is not None:
            return jnp.asarray(variable.value)
        return jnp.zeros(variable.shape, variable.dtype)

    def copied(self) -> Values:
        """The same values, to be changed apart from these."""
        return Values(self)

    def ending(self, variables: list[Variable], outer: Values) -> State:
        """The arrays of variables as control flow hands them on, in the form that `outer` has them in."""
        del outer
        return [self[v] for v in variables]

    def load(self, tensor: Tensor) -> jax.Array:
        """The elements of a tensor."""
        return read(tensor, self)

    def store(self, tensor: Tensor, new: jax.Array) -> None:
        """Writes a tensor."""
        self.update(write(tensor, self, new))

    def scalar(self, tensor: Tensor) -> jax.Array:
        """The value of one element that control depends on."""
        return self.load(tensor).reshape(())

    def of_all(self, value: jax.Array) -> jax.Array:
        """A value that all replicas have, in the form of one that each has."""
        return value

    def with_state(self, variables: list[Variable], state: State) -> Values:
        """A copy in which some variables have other values."""
        values = self.copied()
        values.update(zip(variables, state, strict=True))
        return values
