"""The host's side of a running program: the values of streams, transfer by transfer, and calls of its functions.

A `Host` answers transfers one by one, in program order; without one, a program takes and returns one value of each
stream a run. A call of a function of the host is a `StreamOut` for each operand and a `StreamIn` for each result, one
after the other in one sequence, on streams of kind `CallStream`: so it is costed, listed and verified as any host
exchange. The function is called when the last operand has arrived.

XLA must never see a host that raises: a `Guard` stores the exception and sets a flag in the program, whose later
transfers then do nothing and whose loops with data-dependent trip counts end, so that the state comes back and the
exception can be raised after the run.

Limits: `HostCalls` serves one run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import io_callback

from ipujax.runtime.errors import ArgumentRuntimeError
from ipujax.runtime.graph import HostStream
from ipujax.runtime.tensor import Origin, dtype_name

FLAG = jax.ShapeDtypeStruct((), np.dtype(bool))  # whether the host has failed, as callbacks return it


class Host(Protocol):
    """Answers the transfers of a program; may raise anything."""

    def pull(self, stream: HostStream) -> np.ndarray:
        """Return the next value of a stream to the device, of its shape and dtype; see `HostStream` for replicas."""

    def push(self, stream: HostStream, value: np.ndarray) -> None:
        """Receive the next value of a stream from the device."""


class Guard:
    """Stores the first exception that the host raises in a run; its functions are then not called again in that run."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def raise_error(self) -> None:
        """Raise the stored exception, with the traceback of the host's function, and forget it."""
        error = self.error
        # Cleared first: the next run starts without it.
        self.error = None
        if error is not None:
            raise error

    def call_guarded(self, fun: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the host and return its result; None if it raises, or one before it has raised."""
        if self.error is not None:
            return None
        try:
            return fun(*arguments)
        except BaseException as error:  # stored for `raise_error`: no exception may pass through XLA
            self.error = error
            return None

    def has_failed(self) -> np.ndarray:
        """Return whether a function of the host has raised, bool[]."""
        return np.asarray(self.error is not None)


class GuardedHost(Guard):
    """A host as XLA may call it, for one run at a time.

    Args:
        host: answers the transfers.
    """

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def pull(self, stream: HostStream, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Trace the next transfer of a stream to the device; return its value, and whether the host failed, bool[]."""
        expected = jax.ShapeDtypeStruct(shape, stream.dtype)

        def call() -> tuple[np.ndarray, np.ndarray]:
            value = self.call_guarded(self._host.pull, stream)
            value = np.zeros(shape, stream.dtype) if value is None else np.asarray(value)
            return value, self.has_failed()

        # Ordered: transfers reach the host in program order, whatever XLA knows of their data.
        value, failed = io_callback(call, (expected, FLAG), ordered=True)
        return value, failed

    def push(self, stream: HostStream, value: jax.Array) -> jax.Array:
        """Trace the transfer of a value to the host; return whether the host has failed, bool[]."""

        def call(value: Any) -> np.ndarray:
            self.call_guarded(self._host.push, stream, np.asarray(value))
            return self.has_failed()

        return io_callback(call, FLAG, value, ordered=True)


@dataclass(frozen=True, eq=False, slots=True)
class HostCall:
    """A function of the host, as a program calls it.

    Args:
        name: debug name.
        fun: function from arrays to arrays; may raise anything.
        num_operands: number of its arguments, at least one.
        results: shape and dtype of each array it returns.
        origin: source line, layer and part.
        sharing: number of replicas, one after the other, that call it once and all get the results.
        is_pure: whether equal operands give equal results.
    """

    name: str
    fun: Callable[..., Sequence[Any]]
    num_operands: int
    results: tuple[tuple[tuple[int, ...], Any], ...]
    origin: Origin = Origin()
    sharing: int = 1
    is_pure: bool = False

    def __call__(self, operands: Sequence[Any]) -> list[np.ndarray]:
        """Call the function, and refuse results of other number, shapes or dtypes than `results`."""
        arrays = [np.asarray(value) for value in self.fun(*operands)]
        got = [f"{dtype_name(value.dtype)}{list(value.shape)}" for value in arrays]
        expected = [f"{dtype_name(dtype)}{list(shape)}" for shape, dtype in self.results]
        if got != expected:
            raise ArgumentRuntimeError(
                f"{self.name} returned results of other shapes or dtypes than declared",
                where=self.origin,
                expected=", ".join(expected),
                got=", ".join(got) or "nothing",
            )
        return arrays


@dataclass(frozen=True, eq=False, slots=True)
class CallStream(HostStream):
    """The stream of one operand or result of a call.

    Args:
        call: the call.
        number: index among the operands, or among the results.
    """

    call: HostCall | None = None
    number: int = 0


class HostCalls(Guard):
    """Calls the host's functions for a running program.

    Args:
        guarded: store the first exception for `raise_error`; later calls of the run then do nothing and return zeros.
            Otherwise exceptions pass through XLA, which raises an error of its own.
    """

    def __init__(self, *, guarded: bool) -> None:
        super().__init__()
        self._is_guarded = guarded

    def trace_call(self, call: HostCall, operands: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], jax.Array]:
        """Trace a call; return its results, and whether any call of the run has failed, bool[]."""
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in call.results]

        def fun(*arrays: Any) -> tuple[list[np.ndarray], np.ndarray]:
            results = self.call_guarded(call, arrays) if self._is_guarded else call(arrays)
            # XLA needs arrays of these shapes even from a call that failed.
            return results or [np.zeros(shape, dtype) for shape, dtype in call.results], self.has_failed()

        return io_callback(fun, (shapes, FLAG), *operands, ordered=True)


def wait_for_calls(outs: Any, calls: Iterable[HostCalls]) -> Any:
    """Wait until a run and its calls of Python functions are over; return its results, or raise a call's exception."""
    outs = jax.block_until_ready(outs)
    # A call may have no result that any of `outs` depends on.
    jax.effects_barrier()
    for each in calls:
        each.raise_error()
    return outs
