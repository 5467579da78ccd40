"""Keras with the names that Graphcore's Keras has beside it: `keras.ipu`, and `PipelineStage` of its earlier form.

`from ipujax.keras import keras` in place of `import keras`. All other names are those of stock Keras.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import keras as _keras

from ipujax.keras.layer_stages import PipelineStage as PipelineStage

ipu: ModuleType  # `ipujax.keras`, which sets it


def __getattr__(name: str) -> Any:
    return getattr(_keras, name)


def __dir__() -> list[str]:
    return sorted({*dir(_keras), "PipelineStage", "ipu"})
