"""Whether Keras is there, and runs on JAX: asked before any other file of this room is imported."""

from __future__ import annotations

from ipujax.runtime.errors import ArgumentError


def check_backend() -> None:
    """Refuses to go on without Keras on JAX.

    Raises:
        ImportError: if Keras is not installed, or its backend is not.
        ArgumentError: for another backend.
    """
    hint = 'KERAS_BACKEND=jax in the environment, or os.environ["KERAS_BACKEND"] = "jax" before keras is imported'
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name == "keras":
            raise ImportError("ipujax.keras needs Keras 3: pip install 'ipujax[keras]'", name="keras") from error
        raise ImportError(f"Keras cannot import its backend {error.name}: {hint}", name=error.name) from error
    if keras.backend.backend() != "jax":
        what = "Keras runs on another backend than JAX"
        raise ArgumentError(what, expected="jax", got=keras.backend.backend(), hint=hint)
