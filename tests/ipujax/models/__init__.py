"""Training steps of small models in all the ways users write them; see `base.TrainingStep`.

Libraries are imported only when one of their models is built: Keras alone takes seconds.
"""

from __future__ import annotations

import importlib
from functools import cache

from tests.ipujax.models.base import TrainingStep

PLAIN = ("mlp_sgd", "cnn_batch_norm_adam", "cnn_layer_norm_momentum", "lstm_rmsprop", "transformer_adamw")
LIBRARIES = {
    "keras_models": ("cnn_adam", "transformer_adamw", "lstm_rmsprop", "gru_momentum"),
    "nnx_models": ("mlp_adamw", "cnn_adamw", "transformer_adamw"),
    "equinox_models": ("cnn_adamw", "lstm_adamw"),
}
# Model name, as a test shows it → module and function that builds it.
MODELS: dict[str, tuple[str, str]] = {f"plain-{name}": ("plain", name) for name in PLAIN} | {
    f"{module.removesuffix('_models')}-{name}": (module, name) for module, names in LIBRARIES.items() for name in names
}


@cache
def training_step(name: str) -> TrainingStep:
    """The training step of the model called `name` in `MODELS`, built once."""
    module, function = MODELS[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), function)()
