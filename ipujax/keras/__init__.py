"""Keras on simulated IPUs: real Keras 3 on its JAX backend, under the names of Graphcore's TensorFlow.

::

    import ipujax.keras as ipu

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Model(...)
        model.compile("sgd", "categorical_crossentropy")
        model.fit(x, y)
    print(model.ipu_profile.summary())
"""

from __future__ import annotations

import sys as _sys

import ipujax as _ipujax
from ipujax.front_end import public_names as _public_names


def _check_backend() -> None:
    """Refuse a missing Keras, and one whose backend is not JAX."""
    hint = 'KERAS_BACKEND=jax in the environment, or os.environ["KERAS_BACKEND"] = "jax" before keras is imported'
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name == "keras":  # else a backend: Keras' default is TensorFlow, and it imports it
            raise ImportError("ipujax.keras needs Keras 3: pip install 'ipujax[keras]'", name="keras") from error
        raise ImportError(f"Keras cannot import its backend {error.name}: {hint}", name=error.name) from error
    if keras.backend.backend() != "jax":
        problem = "Keras runs on another backend than JAX"
        raise _ipujax.ArgumentError(problem, expected="jax", got=keras.backend.backend(), hint=hint)


# Before the files that import Keras: its own message names no remedy, and another backend fails late.
_check_backend()

from ipujax.keras import (  # noqa: E402
    config as config,
    ipu_strategy as ipu_strategy,
    keras as keras,
    ops as ops,
    utils as utils,
)
from ipujax.keras.callbacks import ProfileLogger as ProfileLogger  # noqa: E402
from ipujax.keras.config import IPUConfig as IPUConfig  # noqa: E402
from ipujax.keras.ipu_strategy import IPUStrategy as IPUStrategy  # noqa: E402
from ipujax.keras.layer_stages import PipelineStage as PipelineStage  # noqa: E402
from ipujax.keras.stage_assignment import PipelineStageAssignment as PipelineStageAssignment  # noqa: E402

keras.ipu = _sys.modules[__name__]
__dir__ = _public_names(globals(), "config", "ipu_strategy", "keras", "ops", "utils")
