"""Modules that stand in for libraries that load data: one function for each repository of examples.

Input: the name of a repository. Output: nothing; `import tensorflow_datasets` and the like find these modules. Plots
are drawn on the backend without a display.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.zero_edit_shims.arrays import TEXT, Pipeline, examples, images, stacked


def _module(name: str, **names: Any) -> None:
    module = ModuleType(name)
    vars(module).update(names)
    module.__path__ = []
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)


# --- TensorFlow datasets, TensorFlow as far as pipelines use it ------------------------------------------------------


def _tfds() -> None:
    info = SimpleNamespace(
        splits={split: SimpleNamespace(num_examples=1024) for split in ("train", "test", "validation")},
        features={"label": SimpleNamespace(num_classes=10), "image": SimpleNamespace(shape=(28, 28, 1))},
    )

    def load(name: str, split: Any = None, with_info: bool = False, as_supervised: bool = False, **kwargs: Any) -> Any:
        names = split if isinstance(split, list | tuple) else [split or "train"]
        loaded: list[Any] = [examples(name, str(part)) for part in names]
        if as_supervised:
            loaded = [part.map(lambda row: (row["image"], row["label"])) for part in loaded]
        if kwargs.get("batch_size") == -1:
            loaded = [stacked(list(part)) | {"id": np.arange(len(part))} for part in loaded]
        data: Any = loaded if isinstance(split, list | tuple) else loaded[0]
        if split is None:
            data = {"train": loaded[0], "test": loaded[0], "validation": loaded[0]}
        return (data, info) if with_info else data

    def data_source(name: str, split: Any) -> Any:
        sources = load(name, split)
        for source in sources:
            source.dataset_info = info
        return sources

    def builder(name: str) -> Any:
        return SimpleNamespace(
            download_and_prepare=lambda *_, **__: None,
            as_dataset=lambda split, **_: examples(name, str(split)),
            info=info,
        )

    split = SimpleNamespace(TRAIN="train", TEST="test", VALIDATION="validation")
    _module(
        "tensorflow_datasets",
        load=load,
        data_source=data_source,
        builder=builder,
        as_numpy=lambda x: x,
        Split=split,
        core=SimpleNamespace(DatasetBuilder=object),
    )


def _tensorflow() -> None:
    def from_arrays(tree: Mapping[str, np.ndarray]) -> Pipeline:
        length = len(next(iter(tree.values())))
        return Pipeline(lambda: ({k: v[n] for k, v in tree.items()} for n in range(length)), length)

    class Values(np.ndarray):
        """A numpy array: the class of tensors."""

    _module(
        "tensorflow",
        float32=np.float32,
        int32=np.int32,
        Tensor=Values,
        __version__="none",
        cast=lambda x, dtype: np.asarray(x).astype(dtype),
        reshape=np.reshape,
        transpose=np.transpose,
        random=SimpleNamespace(set_seed=lambda seed: None),
        image=SimpleNamespace(convert_image_dtype=lambda x, dtype: np.asarray(x).astype(dtype) / 255),
        strings=SimpleNamespace(
            unicode_decode=lambda text, encoding: np.frombuffer(bytes(text.item()), np.uint8).astype(np.int32)
        ),
        concat=lambda parts, axis: np.concatenate(parts, axis),
        nest=SimpleNamespace(map_structure=lambda fun, tree: __import__("jax").tree.map(fun, tree)),
        config=SimpleNamespace(experimental=SimpleNamespace(set_visible_devices=lambda *_: None)),
        io=SimpleNamespace(gfile=SimpleNamespace(makedirs=lambda path: None)),
        data=SimpleNamespace(
            Dataset=SimpleNamespace(from_tensor_slices=from_arrays),
            experimental=SimpleNamespace(AUTOTUNE=-1),
            AUTOTUNE=-1,
        ),
        enable_v2_behavior=lambda: None,
    )
    tensorflow = sys.modules["tensorflow"]
    _module("tensorflow.compat")
    _module("tensorflow.compat.v2", **vars(tensorflow))


def _grain() -> None:
    source = SimpleNamespace(source=lambda rows: rows)
    _module("grain", MapDataset=source)


def _huggingface() -> None:
    class Table(Pipeline):
        """Columns by name, rows by number."""

        def __getitem__(self, index: Any) -> Any:
            rows = stacked(list(self))
            return rows[index] if isinstance(index, str) else {k: v[index] for k, v in rows.items()}

        def shuffle(self, *_: Any, **__: Any) -> Table:
            return self

        def with_format(self, *_: Any) -> Table:
            return self

    def table(name: str, split: str) -> Table:
        x, y = images(name, split)
        x = x[..., 0]
        return Table(lambda: ({"image": a, "label": b} for a, b in zip(x, y, strict=True)), len(x))

    _module("datasets", load_dataset=lambda name, **_: {split: table(name, split) for split in ("train", "test")})


# --- PyTorch's loaders ------------------------------------------------------------------------------------------------


def _torch() -> None:
    class Values(np.ndarray):
        """A numpy array with methods of PyTorch's."""

        def numpy(self) -> np.ndarray:
            return np.asarray(self)

        def permute(self, *axes: int) -> np.ndarray:
            return np.transpose(self, axes)

    def dataset(name: str) -> Callable[..., Pipeline]:
        def make(*_: Any, train: bool = True, transform: Any = None, **__: Any) -> Pipeline:
            del transform
            x, y = images(name, "train" if train else "test")
            size = (64, 64) if _large_images() and name == "mnist" else x.shape[1:3]
            x = np.pad(x, ((0, 0), *((0, n - m) for n, m in zip(size, x.shape[1:3], strict=True)), (0, 0)))
            x = np.moveaxis(x, -1, 1).astype(np.float32) / 127.5 - 1
            return Pipeline(lambda: zip(x, y.astype(np.int64), strict=True), len(x))

        return make

    def loader(data: Pipeline, batch_size: int, drop_last: bool = False, **_: Any) -> Pipeline:
        batches = data.shuffle().batch(batch_size, drop_last)
        return batches.map(lambda batch: tuple(x.view(Values) for x in batch))

    class Transforms:
        """Transforms that are applied already."""

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    _module("torch", Tensor=Values)
    _module("torch.utils")
    _module("torch.utils.data", DataLoader=loader)
    sys.modules["torch"].utils = sys.modules["torch.utils"]  # type: ignore[attr-defined]
    transforms = Transforms()
    _module("torchvision", datasets=SimpleNamespace(MNIST=dataset("mnist"), CIFAR10=dataset("cifar10")))
    sys.modules["torchvision.transforms"] = transforms  # type: ignore[assignment]
    sys.modules["torchvision"].transforms = transforms  # type: ignore[attr-defined]


def _large_images() -> bool:
    return "deep_convolutional_gan" in " ".join(sys.argv)


def _digits_of_the_network() -> None:
    """Serve the files of digits that an example fetches."""
    import gzip
    import urllib.request

    def retrieve(url: str, target: str) -> None:
        x, _ = images("mnist")
        head = np.array([2051, len(x), 28, 28], ">u4").tobytes()
        with gzip.open(target, "wb") as file:
            file.write(head + x.tobytes())

    urllib.request.urlretrieve = retrieve  # type: ignore[assignment]


# --- one shim a repository --------------------------------------------------------------------------------------------


def _flax() -> None:
    _tfds()
    _tensorflow()
    _huggingface()


def _optax() -> None:
    _tfds()
    _grain()


def _equinox() -> None:
    _torch()
    _digits_of_the_network()


def _haiku() -> None:
    _tfds()
    _tensorflow()
    with open("shakespeare.txt", "w", encoding="ascii") as file:  # for the flag of a path
        file.write(TEXT)


def _keras() -> None:
    import keras

    def load_data(*_: Any, **__: Any) -> Any:
        parts = (images("mnist"), 60_000), (images("mnist", "test"), 10_000)  # as many as of the dataset
        return tuple((np.resize(x[..., 0], (n, 28, 28)), np.resize(y, n)) for (x, y), n in parts)

    keras.datasets.mnist.load_data = load_data


def _jax() -> None:
    from examples import datasets

    def mnist(permute_train: bool = False) -> Any:
        del permute_train
        hot = np.eye(10, dtype=np.float32)
        pairs = [images("mnist"), images("mnist", "test")]
        return tuple(a for x, y in pairs for a in (x.reshape(len(x), -1).astype(np.float32) / 255, hot[y]))

    datasets.mnist = mnist


def _numpyro() -> None:
    from numpyro.examples import datasets

    def load_dataset(dset: Any, batch_size: int | None = None, **_: Any) -> Any:
        x, y = images("mnist")
        size = batch_size or len(x)
        x = x[..., 0].astype(np.float32) / 255

        def fetch(i: int = 0, idxs: Any = None) -> tuple[np.ndarray, np.ndarray]:
            rows = np.arange(i * size, (i + 1) * size) % len(x) if idxs is None else np.asarray(idxs)[:size]
            return x[rows], y[rows]

        return lambda: (len(x) // size, np.arange(len(x))), fetch

    datasets.load_dataset = load_dataset


def _nothing() -> None:
    """Examples whose data is made by themselves, or by installed packages."""


SHIMS: Mapping[str, Callable[[], None]] = {
    "google/flax": _flax,
    "google-deepmind/optax": _optax,
    "patrick-kidger/equinox": _equinox,
    "google-deepmind/dm-haiku": _haiku,
    "keras-team/keras": _keras,
    "jax-ml/jax": _jax,
    "pyro-ppl/numpyro": _numpyro,
    "patrick-kidger/diffrax": _nothing,
    "google/jaxopt": _tfds,
}
