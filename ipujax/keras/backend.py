"""Check that Keras is installed and runs on JAX, before any other file of this room is imported."""

from __future__ import annotations

import ipujax as ipu


def check_backend() -> None:
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
        raise ipu.ArgumentError(problem, expected="jax", got=keras.backend.backend(), hint=hint)
