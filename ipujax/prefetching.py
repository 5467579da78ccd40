"""`ipu.prefetch`: an iterator that prepares batches while the device computes, and measures the host's time.

Input: an iterable. Output: an iterator over the same batches, and `HostData`, by which profiles show whether the host
is slower than the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import numpy as np

from ipujax.arguments import whole_number
from ipujax.runtime.errors import ArgumentTypeError, shortened
from ipujax.runtime.host import HostData
from ipujax.runtime.not_copied import NotCopied
from ipujax.runtime.signatures import checking_calls

T = TypeVar("T")
_END = object()
_Prepared: TypeAlias = tuple[T | object, float]  # a batch, and the seconds it took


@checking_calls("ipu.prefetch")
class prefetch(NotCopied, Generic[T]):  # a function to its users, as `zip` is
    """Iterate over batches, some of which a thread prepares ahead.

    Args:
        batches: any iterable: a generator, a `grain` or `tf.data` pipeline as numpy arrays. It may fill the same
            arrays again for each batch: of pytrees prepared ahead, numpy arrays are copied.
        depth: upper bound of batches that are ready; 0 for none ahead, and no thread.

    Raises:
        ArgumentError: `batches` is no iterable, or `depth` is not an integer from 0. Errors of `batches` are raised at
            the batch they belong to.
    """

    COPY_HINT = "ipu.prefetch of the batches in each process"

    def __init__(self, batches: Iterable[T], depth: int = 2) -> None:
        self._depth = whole_number("depth of ipu.prefetch", depth, 0)
        # Not by `iter`: a `TypeError` may be of the user's own `__iter__`.
        if not (isinstance(batches, Iterable) or hasattr(batches, "__getitem__")):
            raise ArgumentTypeError("batches of ipu.prefetch", expected="an iterable", got=shortened(batches))
        self._source = iter(batches)
        self._thread = ThreadPoolExecutor(1, "ipu.prefetch") if self._depth else None
        self._ahead: deque[Future[_Prepared[T]]] = deque()
        self._is_open = True
        self._host = HostData(0, 0.0, 0.0, self._depth > 0)

    @property
    def host(self) -> HostData:
        """Seconds of preparing the batches so far and of waiting for them, for `profile.with_host`."""
        return self._host

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._is_open:
            raise StopIteration
        start = time.perf_counter()
        try:
            batch, seconds = self._next()
        except BaseException:
            self.close()
            raise
        if batch is _END:
            self.close()
            raise StopIteration
        self._host += HostData(1, seconds, time.perf_counter() - start)
        return batch  # type: ignore[return-value]

    def _next(self) -> _Prepared[T]:
        if self._thread is None:
            return self._prepare()
        while len(self._ahead) <= self._depth:  # the next batch, and `depth` batches after it
            self._ahead.append(self._thread.submit(self._prepare))
        return self._ahead.popleft().result()

    def _prepare(self) -> _Prepared[T]:
        start = time.perf_counter()
        batch = next(self._source, _END)
        if self._thread is not None:  # the thread goes on to the next batch while this one is used
            batch = jax.tree.map(_copied, batch)
        return batch, time.perf_counter() - start

    def close(self) -> None:
        """Stop preparing batches, and drop those that are ready."""
        self._is_open = False
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
            self._ahead.clear()


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
