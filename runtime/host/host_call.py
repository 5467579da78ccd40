"""Functions of the host that a running program calls: streams carry the operands out and the results in.

A call is a `StreamOut` for each operand and a `StreamIn` for each result, one after the other in one sequence, on
streams of kind `CallStream`: so it is costed, listed and verified as any host exchange. The function is called when the
last operand has arrived.

Limits: `HostCalls` serves one run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from ipujax.runtime.errors import ArgumentRuntimeError
from ipujax.runtime.graph import HostStream
from ipujax.runtime.host.host import FLAG, Guard
from ipujax.runtime.tensor import Origin, dtype_name


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
