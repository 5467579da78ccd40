"""`ipu.prefetch`: batches that are prepared while the device works on those before them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from ipujax.calls import whole_number
from ipujax.runtime.signatures import checking_calls

T = TypeVar("T")
_END = object()


@checking_calls("ipu.prefetch")
class prefetch(Generic[T]):  # a function to its users, as `zip` is
    """An iterator over the same batches, some of which are prepared ahead in a thread of its own.

    Args:
        batches: any iterable: a generator, a `grain` or `tf.data` pipeline as numpy arrays.
        depth: batches that are ready at most.

    Raises:
        ArgumentError: for a depth that is no whole number of at least 1. What `batches` raises is raised in its place.
    """

    def __init__(self, batches: Iterable[T], depth: int = 2) -> None:
        self._depth = whole_number("depth of ipu.prefetch", depth, 1, "a whole number of at least 1")
        self._source = iter(batches)
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "ipu.prefetch")
        self._ahead: deque[Future[T | object]] = deque()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._thread is None:
            raise StopIteration
        while len(self._ahead) <= self._depth:  # the one that is asked for, and those ahead
            self._ahead.append(self._thread.submit(next, self._source, _END))
        try:
            batch = self._ahead.popleft().result()
        except BaseException:
            self.close()
            raise
        if batch is _END:
            self.close()
            raise StopIteration
        return batch  # type: ignore[return-value]

    def close(self) -> None:
        """Prepares no more batches; those that are ready are dropped."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
            self._ahead.clear()
