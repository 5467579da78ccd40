"""The state of a loaded device between runs: values of its variables, and the record of its runs.

Input: initial values, and writes of programs and of the host. Output: arrays by variable. Memory that was never written
is zero. With several replicas each array has a leading replica axis, as have the arrays of the host.

The record has the programs in order, and their data-dependent control flow. Input: runs, one by one. Output: their
profile, as a sequence of programs. Consecutive runs of one program are only counted, so that many of them take no
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence as Items
from typing import Any

import jax
import numpy as np

from ipujax.poplar.types import cast_values
from ipujax.runtime.compile import Executable
from ipujax.runtime.engine import DecisionLog
from ipujax.runtime.errors import ArgumentError, ProfileError
from ipujax.runtime.graph import Program, Repeat, Sequence, data_loops
from ipujax.runtime.report import Profile
from ipujax.runtime.tensor import Tensor, Variable, dtype_name, read, write


class Runs:
    """Runs of an engine since the last reset."""

    def __init__(self) -> None:
        self._order: list[list[int]] = []  # pairs: index of a program, number of consecutive runs
        self.log = DecisionLog()

    def start(self, index: int) -> None:
        """Record the start of a program."""
        if self._order and self._order[-1][0] == index:
            self._order[-1][1] += 1
        else:
            self._order.append([index, 1])

    def reset(self) -> None:
        """Discard all records."""
        self._order.clear()
        self.log.clear()

    def profile(self, executable: Executable, programs: Items[Program], *, is_recorded: bool) -> Profile:
        """Return the profile of all runs; raises ProfileError for an unrecorded loop of data-dependent trip count."""
        executed = {programs[index] for index, _ in self._order}
        if not is_recorded:
            for loop in (loop for program in executed for loop in data_loops(program)):
                message = "the trip count of a loop that ran was not recorded"
                raise ProfileError(message, where=loop.origin, hint='Engine(…, {"debug.instrument": "true"})')
        steps = [programs[i] if count == 1 else Repeat(count, programs[i]) for i, count in self._order]
        return Profile(executable, dict(self.log.decisions) if is_recorded else None, Sequence(*steps))


Values = dict[Variable, jax.Array]


class DeviceMemory:
    """Memory of a device, in every replica; starts with the initial values of variables."""

    def __init__(self, initial: Mapping[Variable, np.ndarray], replicas: int) -> None:
        self._replicas = replicas
        self._values: dict[Variable, Any] = {v: np.broadcast_to(x, self._shape(v.shape)) for v, x in initial.items()}

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self._replicas == 1 else (self._replicas, *shape)

    def __getitem__(self, variable: Variable) -> jax.Array:
        """Return the value of a variable, as a JAX array that may be donated."""
        value = self._values.get(variable)
        if not isinstance(value, jax.Array):
            shape = self._shape(variable.shape)
            value = jax.numpy.zeros(shape, variable.dtype) if value is None else jax.numpy.array(value)
            self._values[variable] = value
        return value

    def update(self, values: Iterable[tuple[Variable, jax.Array]]) -> None:
        """Replace the values of variables."""
        self._values.update(values)

    def write(self, name: str, tensor: Tensor, value: Any) -> None:
        """Write a value of as many elements as the tensor has in all replicas, of its kind and in its range."""
        shape = self._shape(tensor.shape)
        try:
            array = np.asarray(value)
        except ValueError as error:  # rows of different lengths
            raise ArgumentError(f"handle {name} cannot be written with this", expected=list(shape)) from error
        if array.size != np.prod(shape, dtype=int) or not np.can_cast(array.dtype, tensor.dtype, "same_kind"):
            expected = f"{dtype_name(tensor.dtype)}{list(shape)}"
            got = f"{array.dtype}{list(array.shape)}"
            raise ArgumentError(f"handle {name} cannot be written with this", expected=expected, got=got)
        # Checked, because a cast would wrap.
        elements = jax.numpy.asarray(cast_values(array.reshape(shape), tensor.dtype, f"values of handle {name}"))
        current_values = {v: self[v] for v in tensor.variables()}
        self._values.update(
            self._in_each_replica(lambda values, elements: write(tensor, values, elements), current_values, elements)
        )

    def read(self, tensor: Tensor) -> np.ndarray:
        """Read a tensor."""
        return np.array(
            self._in_each_replica(lambda values: read(tensor, values), {v: self._value(v) for v in tensor.variables()})
        )

    def _value(self, variable: Variable) -> jax.Array:
        if not variable.is_constant:
            return self[variable]
        constant = jax.numpy.asarray(variable.value)
        return constant if variable.by_replica else jax.numpy.broadcast_to(constant, self._shape(variable.shape))

    def _in_each_replica(self, fun: Callable[..., Any], values: Values, *operands: jax.Array) -> Any:
        """Apply a function of the variables' values in each replica."""
        if self._replicas == 1:
            return fun(values, *operands)
        variables = list(values)  # a list: JAX sorts the keys of dicts, and variables have no order

        def in_one_replica(replica_arrays: list[jax.Array], *operands: jax.Array) -> Any:
            results = fun(dict(zip(variables, replica_arrays, strict=True)), *operands)
            return list(results.values()) if isinstance(results, dict) else results

        result = jax.vmap(in_one_replica)([values[v] for v in variables], *operands)
        return dict(zip(variables, result, strict=True)) if isinstance(result, list) else result
