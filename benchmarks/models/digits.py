"""The two networks of `examples/digits.py` on batches of 64 images of 8 × 8, by Adam."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax

from ipujax.models.network_layers import cross_entropy

from .model import Init, Model, Struct, trained

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.py"


@cache
def load_example() -> ModuleType:
    """The module `examples/digits.py`."""
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def digits_network(name: str) -> tuple[Callable[..., jax.Array], Init, tuple[int, ...]]:
    """The loss of a network of the example on images and labels, its `init`, and the shape of an image.

    Args:
        name: "mlp" or "cnn".
    """
    example = load_example()
    classify, shapes = example.MODELS[name]

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(classify(params, images), labels)

    return loss, lambda key: example.init(shapes), (example.SIDE, example.SIDE, 1)


def digits(name: str, batch: int = 64) -> Model:
    """The training step of one network of the example.

    Args:
        name: "mlp" or "cnn".
        batch: images a step.
    """
    loss, init, image = digits_network(name)
    images = Struct((batch, *image), np.float32)
    labels = Struct((batch,), np.int32)
    return trained(f"digits {name}", loss, init, optax.adam(1e-3), images, labels)
