"""Random examples of the shapes of known datasets, and pipelines over them that need no TensorFlow, PyTorch or network.

Input: the name of a dataset. Output: arrays, or a `Pipeline` with methods of `tf.data`, grain and PyTorch's loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import jax
import numpy as np

NUM_EXAMPLES = 1024
_SHAPES = {"cifar10": (32, 32, 3)}  # every other image has the shape of a digit
TEXT = "".join(chr(97 + (n * n) % 26) + (" " if n % 5 == 4 else "") for n in range(40_000))


def images(name: str, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 [examples, height, width, channels], and labels, int32 [examples], which they show."""
    draw = np.random.default_rng(len(name) + len(split))
    shape = _SHAPES.get(name.partition(":")[0], (28, 28, 1))
    labels = draw.integers(0, 10, NUM_EXAMPLES)
    noise = draw.integers(0, 128, (NUM_EXAMPLES, *shape))
    noise[np.arange(NUM_EXAMPLES), labels] += 127  # a row of pixels is bright
    return noise.astype(np.uint8), labels.astype(np.int32)


def examples(name: str, split: str = "train") -> Pipeline:
    """Return a pipeline of dictionaries with an image and a label, or with the text of all examples."""
    if "shakespeare" in name:
        return Pipeline(lambda: iter([{"text": np.bytes_(TEXT.encode())}]), 1)
    x, y = images(name, split)
    if "binarized" in name:
        x = (x > 127).astype(np.uint8)
    return Pipeline(lambda: ({"image": a, "label": b} for a, b in zip(x, y, strict=True)), len(x))


def stacked(rows: list[Any]) -> Any:
    """Return rows of a batch as arrays."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *rows)


class Pipeline:
    """Examples in an order, with the methods that loops over datasets use; it starts again with each iteration."""

    def __init__(self, rows: Callable[[], Iterator[Any]], length: int) -> None:
        self._rows = rows
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        return self._rows()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return next(islice(self, index, None))

    def _with(self, rows: Callable[[], Iterator[Any]], length: int | None = None) -> Pipeline:
        return Pipeline(rows, self._length if length is None else length)

    def shuffle(self, *_: Any, seed: int | None = 0, **__: Any) -> Pipeline:
        """Return the examples in another order."""
        del seed

        def rows() -> Iterator[Any]:
            every = list(self._rows())
            yield from (every[n] for n in np.random.default_rng(0).permutation(len(every)))

        return self._with(rows)

    def map(self, map_func: Callable[[Any], Any], *_: Any, **__: Any) -> Pipeline:
        """Return the results of a function of each example."""
        return self._with(lambda: map(map_func, self._rows()))

    def filter(self, keeps: Callable[[Any], bool]) -> Pipeline:
        """Return the examples that a function keeps."""
        return self._with(lambda: filter(keeps, self._rows()))

    def repeat(self, count: int | None = None) -> Pipeline:
        """Return the examples several times, for ever without a count."""

        def rows() -> Iterator[Any]:
            repetition = 0
            while count is None or count < 0 or repetition < count:
                yield from self._rows()
                repetition += 1

        return self._with(rows, self._length * (count or 1))

    def batch(self, batch_size: int, drop_remainder: bool = False, **_: Any) -> Pipeline:
        """Return arrays of several examples each."""

        def rows() -> Iterator[Any]:
            source = self._rows()
            while rows := list(islice(source, batch_size)):
                if len(rows) == batch_size or not drop_remainder:
                    yield stacked(rows)

        return self._with(rows, max(self._length // batch_size, 1))

    def unbatch(self) -> Pipeline:
        """Return the rows of the arrays."""

        def rows() -> Iterator[Any]:
            for batch in self._rows():
                for n in range(len(jax.tree.leaves(batch)[0])):
                    yield jax.tree.map(lambda x, n=n: x[n], batch)

        return self._with(rows)

    def take(self, count: int) -> Pipeline:
        """Return the first examples."""
        return self._with(lambda: islice(self._rows(), count), min(count, self._length))

    def concatenate(self, dataset: Pipeline) -> Pipeline:
        """Return the examples, then those of another pipeline."""
        return self._with(lambda: chain(self._rows(), dataset), self._length + len(dataset))

    def cardinality(self) -> Any:
        """Return the number of examples."""
        return Scalar(self._length)

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Return the examples."""
        return iter(self)

    def _same(self, *_: Any, **__: Any) -> Pipeline:
        return self

    cache = prefetch = to_iter_dataset = seed = mix = with_options = _same


class Scalar(int):
    """A number with the method of TensorFlow's."""

    def numpy(self) -> int:
        """Return the number."""
        return int(self)
