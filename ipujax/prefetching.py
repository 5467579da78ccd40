"""`ipu.prefetch`: batches that are prepared while the device works on those before them, and how long that takes.

Input: an iterable. Output: an iterator over the same batches, and `HostData`, which profiles show: whether the host is
slower than the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeAlias, TypeVar

from ipujax.calls import whole_number
from ipujax.runtime.host import HostData
from ipujax.runtime.signatures import checking_calls

T = TypeVar("T")
_END = object()
_Prepared: TypeAlias = tuple[T | object, float]  # a batch, and the seconds it took


@checking_calls("ipu.prefetch")
class prefetch(Generic[T]):  # a function to its users, as `zip` is
    """An iterator over the same batches, some of which are prepared ahead in a thread of its own.

    Args:
        batches: any iterable: a generator, a `grain` or `tf.data` pipeline as numpy arrays.
        depth: batches that are ready at most; 0 for none ahead, and no thread.

    Raises:
        ArgumentError: for a depth that is no whole number from 0. What `batches` raises is raised in its place.
    """

    def __init__(self, batches: Iterable[T], depth: int = 2) -> None:
        self._depth = whole_number("depth of ipu.prefetch", depth, 0)
        self._source = iter(batches)
        self._thread = ThreadPoolExecutor(1, "ipu.prefetch") if self._depth else None
        self._ahead: deque[Future[_Prepared[T]]] = deque()
        self._is_open = True
        self._host = HostData(0, 0.0, 0.0, self._depth > 0)

    @property
    def host(self) -> HostData:
        """How long the batches so far took, and how long they were waited for; `profile.with_host` takes it."""
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
        """The next batch, with others prepared behind it."""
        if self._thread is None:
            return self._prepared()
        while len(self._ahead) <= self._depth:  # the one that is asked for, and those ahead
            self._ahead.append(self._thread.submit(self._prepared))
        return self._ahead.popleft().result()

    def _prepared(self) -> _Prepared[T]:
        """A batch of the source, and the seconds it took."""
        start = time.perf_counter()
        batch = next(self._source, _END)
        return batch, time.perf_counter() - start

    def close(self) -> None:
        """Prepares no more batches; those that are ready are dropped."""
        self._is_open = False
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
            self._ahead.clear()
