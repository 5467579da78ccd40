"""The values of variables of a loaded device between runs.

Input: initial values, and writes of programs and of the host. Output: arrays by variable. Memory that was never written
holds zeros. With several replicas each array has a leading replica axis, as have the arrays of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.tensor import Tensor, Variable, dtype_name, read, write

Held = dict[Variable, jax.Array]


class DeviceMemory:
    """The memory of a device.

    Args:
        initial: initial values of variables, in every replica.
        replicas: how many there are.
    """

    def __init__(self, initial: Mapping[Variable, np.ndarray], replicas: int) -> None:
        self._replicas = replicas
        self._held: dict[Variable, Any] = {v: np.broadcast_to(x, self._shape(v.shape)) for v, x in initial.items()}

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self._replicas == 1 else (self._replicas, *shape)

    def __getitem__(self, variable: Variable) -> jax.Array:
        """The value of a variable, as a JAX array that may be donated."""
        value = self._held.get(variable)
        if not isinstance(value, jax.Array):
            shape = self._shape(variable.shape)
            value = jax.numpy.zeros(shape, variable.dtype) if value is None else jax.numpy.array(value)
            self._held[variable] = value
        return value

    def update(self, values: Iterable[tuple[Variable, jax.Array]]) -> None:
        """Replaces the values of variables."""
        self._held.update(values)

    def write(self, name: str, tensor: Tensor, value: Any) -> None:
        """Writes a tensor.

        Args:
            name: its name in error messages.
            tensor: where to.
            value: as many elements as the tensor has, in all replicas, of a type that converts without loss of kind.

        Raises:
            ArgumentError: another size or type.
        """
        shape = self._shape(tensor.shape)
        try:
            array = np.asarray(value)
        except ValueError as error:  # rows of different lengths
            raise ArgumentError(f"handle {name} cannot be written with this", expected=list(shape)) from error
        if array.size != np.prod(shape, dtype=int) or not np.can_cast(array.dtype, tensor.dtype, "same_kind"):
            expected, got = f"{dtype_name(tensor.dtype)}{list(shape)}", f"{array.dtype}{list(array.shape)}"
            raise ArgumentError(f"handle {name} cannot be written with this", expected=expected, got=got)
        new = jax.numpy.asarray(array.reshape(shape), tensor.dtype)
        before = {v: self[v] for v in tensor.variables()}
        self._held.update(self._in_each(lambda held, new: write(tensor, held, new), before, new))

    def read(self, tensor: Tensor) -> np.ndarray:
        """Reads a tensor."""
        return np.array(self._in_each(lambda held: read(tensor, held), {v: self._value(v) for v in tensor.variables()}))

    def _value(self, variable: Variable) -> jax.Array:
        if not variable.is_constant:
            return self[variable]
        constant = jax.numpy.asarray(variable.value)
        return constant if variable.by_replica else jax.numpy.broadcast_to(constant, self._shape(variable.shape))

    def _in_each(self, fun: Callable[..., Any], held: Held, *more: jax.Array) -> Any:
        """Applies a function of the variables' values in each replica."""
        if self._replicas == 1:
            return fun(held, *more)
        variables = list(held)  # which cannot be sorted, as the keys of JAX's dicts are

        def alone(arrays: list[jax.Array], *more: jax.Array) -> Any:
            found = fun(dict(zip(variables, arrays, strict=True)), *more)
            return list(found.values()) if isinstance(found, dict) else found

        result = jax.vmap(alone)([held[v] for v in variables], *more)
        return dict(zip(variables, result, strict=True)) if isinstance(result, list) else result
