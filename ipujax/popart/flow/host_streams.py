"""Streams of gradients to the host and back, for `hostAllReduce`, and the functions that a program connects to them.

Each batch sends the gradient of each weight to the host, after micro-batches and replicas are added up, and receives
what the optimiser reads in its place.

Source: PopART's `GradCopyToHost` and `GradCopyFromHost`. Here a function takes the buffer as an array, not its address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from ipujax.popart.exceptions import popart_exception, unknown_name
from ipujax.popart.reserved_names import GRADIENT

Callback = Callable[[np.ndarray[Any, Any]], object]
_STORE = "gr_store_"
_LOAD = "gr_load_"


class HostStreams:
    """Two streams for each weight, in the order in which a batch uses them: to the host, then back.

    Args:
        weights: names of the weights that are trained; none without `hostAllReduce`.
    """

    def __init__(self, weights: Sequence[str]) -> None:
        self._weights = tuple(weights)
        self._callbacks: dict[str, Callback] = {}

    @property
    def handles(self) -> list[str]:
        """Names of the streams: all to the host, then all back."""
        return [prefix + GRADIENT + name for prefix in (_STORE, _LOAD) for name in self._weights]

    def connect(self, handle: str, callback: Callback) -> None:
        """Set the function of a stream.

        Args:
            handle: one of `handles`.
            callback: takes the buffer; reads it where the stream goes to the host, else writes it.

        Raises:
            popart_exception: an unknown stream, with the nearest, or no function.
        """
        if handle not in self.handles:
            raise unknown_name("a callback is connected to a stream", handle, self.handles)
        if not callable(callback):
            raise popart_exception(f"the callback of stream {handle!r} is no function", got=repr(callback))
        self._callbacks[handle] = callback

    def check(self) -> None:
        """Refuse a step whose gradients nobody on the host would take.

        Raises:
            popart_exception: streams without a function.
        """
        missing = [handle for handle in self.handles if handle not in self._callbacks]
        if missing:
            hint = "DistributedOptimizer(…).insert_host_allreduce(), or session.connectStreamToCallback"
            raise popart_exception("hostAllReduce has streams without a callback", got=", ".join(missing), hint=hint)

    def exchanged(self, gradients: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Return the gradients that come back from the host; for traces.

        Args:
            gradients: of the weights, by name.
        """
        if not self._weights:
            return gradients
        values = [gradients[name] for name in self._weights]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
        return dict(zip(self._weights, io_callback(self._exchange, shapes, *values, ordered=True), strict=True))

    def _exchange(self, *values: Any) -> list[np.ndarray[Any, Any]]:
        for name, value in zip(self._weights, values, strict=True):
            self._callbacks[_STORE + GRADIENT + name](np.asarray(value))
        buffers = [np.zeros(value.shape, value.dtype) for value in values]
        for name, buffer in zip(self._weights, buffers, strict=True):
            self._callbacks[_LOAD + GRADIENT + name](buffer)
        return buffers
