"""Functions of the host's that a program calls while it runs: operands go out by streams, results come in by others.

A call is `StreamOut` for each operand and `StreamIn` for each result, one after the other in one sequence, on streams
of kind `CallStream`: so it is costed, listed and verified as any host exchange. It happens when the last operand is
there.

Limits: one replica. `HostCalls` serves one run at a time.
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
    """What is called.

    Args:
        name: debug name.
        fun: from arrays to arrays; may raise anything.
        num_operands: arrays it takes, at least one.
        results: shape and dtype of each array it gives.
        origin: where it comes from.
    """

    name: str
    fun: Callable[..., Sequence[Any]]
    num_operands: int
    results: tuple[tuple[tuple[int, ...], Any], ...]
    origin: Origin = Origin()

    def __call__(self, operands: Sequence[Any]) -> list[np.ndarray]:
        """Calls the function and checks what it gives.

        Raises:
            ArgumentRuntimeError: a result of another shape or dtype than was said, or another number of them.
        """
        given = [np.asarray(value) for value in self.fun(*operands)]
        got = [f"{dtype_name(value.dtype)}{list(value.shape)}" for value in given]
        expected = [f"{dtype_name(dtype)}{list(shape)}" for shape, dtype in self.results]
        if got != expected:
            what = f"{self.name} gave other results than it promised"
            raise ArgumentRuntimeError(
                what, where=self.origin, expected=", ".join(expected), got=", ".join(got) or "nothing"
            )
        return given


@dataclass(frozen=True, eq=False, slots=True)
class CallStream(HostStream):
    """The stream of one operand or result of a call.

    Args:
        call: the call.
        number: which operand, or which result.
    """

    call: HostCall | None = None
    number: int = 0


class HostCalls(Guard):
    """Makes the calls of a running program.

    Args:
        guarded: what a function raises is kept for `raise_error`, later calls of the run do nothing and give zeros.
            Otherwise it goes through XLA, which makes an error of its own of it.
    """

    def __init__(self, *, guarded: bool) -> None:
        super().__init__()
        self._is_guarded = guarded

    def traced(self, call: HostCall, operands: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], jax.Array]:
        """Makes a call, in a trace; returns its results and whether any call of the run has failed."""
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in call.results]

        def act(*arrays: Any) -> tuple[list[np.ndarray], np.ndarray]:
            results = self.guarded(call, arrays) if self._is_guarded else call(arrays)
            return results or [np.zeros(shape, dtype) for shape, dtype in call.results], self.has_failed()

        return io_callback(act, (shapes, FLAG), *operands, ordered=True)


def settled(outs: Any, calls: Iterable[HostCalls]) -> Any:
    """The results of a run, once the run and its calls of Python functions are over.

    Args:
        outs: tree of results.
        calls: the calls of its programs.

    Raises:
        BaseException: an exception that one of these functions raised.
    """
    outs = jax.block_until_ready(outs)
    jax.effects_barrier()
    for each in calls:
        each.raise_error()
    return outs
