"""The host's side of a running program: what streams give and take while it runs.

A `Host` answers transfers one by one, in program order; a program without one has the values of its streams given and
handed back as a whole. XLA must never see a host that raises: `GuardedHost` keeps the exception and says so to the
program, whose later transfers then do nothing and whose loops with data-dependent counts end, so that the state comes
back and the exception can be raised when the run is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import io_callback

from ipujax.runtime.graph import HostStream

FLAG = jax.ShapeDtypeStruct((), np.dtype(bool))


class Host(Protocol):
    """Answers the transfers of a program; may raise anything."""

    def pull(self, stream: HostStream) -> np.ndarray:
        """The next value of a stream to the device, of its shape and dtype; see `HostStream` for several replicas."""

    def push(self, stream: HostStream, value: np.ndarray) -> None:
        """Takes the next value of a stream from the device."""


class Guard:
    """Keeps what the host raises during a run, after which its functions are not called any more."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def raise_error(self) -> None:
        """Raises what the host raised in the run that is over, with its own traceback, and forgets it."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def guarded(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of the host returns; None once one has raised."""
        if self.error is not None:
            return None
        try:
            return act(*arguments)
        except BaseException as error:  # kept for `raise_error`: nothing may pass through XLA
            self.error = error
            return None

    def has_failed(self) -> np.ndarray:
        """Whether one has raised, bool[]."""
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
        """Asks for the next value of a stream, in a trace; returns it and whether the host has failed.

        Args:
            stream: which.
            shape: of one transfer.
        """
        expected = jax.ShapeDtypeStruct(shape, stream.dtype)

        def call() -> tuple[np.ndarray, np.ndarray]:
            value = self.guarded(self._host.pull, stream)
            value = np.zeros(shape, stream.dtype) if value is None else np.asarray(value)
            return value, self.has_failed()

        value, failed = io_callback(call, (expected, FLAG), ordered=True)
        return value, failed

    def push(self, stream: HostStream, value: jax.Array) -> jax.Array:
        """Hands a value of a stream to the host, in a trace; returns whether the host has failed."""

        def call(value: Any) -> np.ndarray:
            self.guarded(self._host.push, stream, np.asarray(value))
            return self.has_failed()

        return io_callback(call, FLAG, value, ordered=True)
