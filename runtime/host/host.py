"""The host's side of a running program: the values of streams, transfer by transfer.

A `Host` answers transfers one by one, in program order; without one, a program takes and returns one value of each
stream a run. XLA must never see a host that raises: `GuardedHost` stores the exception and sets a flag in the program,
whose later transfers then do nothing and whose loops with data-dependent trip counts end, so that the state comes back
and the exception can be raised after the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import io_callback

from ipujax.runtime.graph import HostStream

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
