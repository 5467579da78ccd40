"""Lines of a model: where its layers were made, and where it was compiled, in place of the line that runs it.

Input: layers made, and called, in the scope of a strategy. Output: operations at the line that made their layer,
as profiles show them; those of a layer of the user's own at the lines of its `call`; losses, metrics and updates at
the line of `model.compile`. Layers that a layer makes for itself are at the line of the outer one. A layer that was
made outside of the scope has its name in place of a line.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras

from ipujax.front_end import MadeAt
from ipujax.keras.model_state import replace_attribute, set_untracked

_MADE_AT = "ipu_made_at"  # attribute of a layer
_COMPILED_AT = "ipu_compiled_at"  # of a model
_IS_CALLED: ContextVar[bool] = ContextVar("ipujax_keras_is_called", default=False)  # some layer is


@contextmanager
def recorded_places() -> Iterator[None]:
    """Record the lines of layers that are made inside, and give them to what calls of layers trace."""
    keras_new = keras.layers.Layer.__new__
    keras_call = keras.layers.Layer.__call__

    @functools.wraps(keras_new)
    def recorded_new(cls: type, *args: Any, **kwargs: Any) -> Any:  # not `__init__`, whose signature Keras reads
        layer = keras_new(cls, *args, **kwargs)
        set_untracked(layer, **{_MADE_AT: None if _IS_CALLED.get() else MadeAt.here()})
        return layer

    @functools.wraps(keras_call)
    def placed_call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        place = _place_of(layer)
        token = _IS_CALLED.set(True)
        try:
            if place is None:
                return keras_call(layer, *args, **kwargs)
            with place.scope():
                return keras_call(layer, *args, **kwargs)
        finally:
            _IS_CALLED.reset(token)

    with (
        replace_attribute(keras.layers.Layer, "__new__", staticmethod(recorded_new)),
        replace_attribute(keras.layers.Layer, "__call__", placed_call),
    ):
        yield


def record_compiled(model: Any) -> None:
    """Record the running line as that of `model.compile`."""
    set_untracked(model, **{_COMPILED_AT: MadeAt.here()})


def placed_step(model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a model whose operations outside of layers are at the line that compiled the model."""

    @functools.wraps(step)
    def run(*args: Any) -> Any:
        place = model.__dict__.get(_COMPILED_AT) or MadeAt(f"{model.name} ({type(model).__name__})")
        with place.scope():
            return step(*args)

    return run


def _place_of(layer: Any) -> MadeAt | None:
    """Return the place of a layer; None for that of the layer around it."""
    module = sys.modules.get(type(layer).__module__)
    file = getattr(module, "__file__", None) or ""  # classes of a notebook have no file
    if "site-packages" not in file:
        return MadeAt()  # the lines of its own `call`
    return layer.__dict__.get(_MADE_AT, MadeAt(f"{layer.name} ({type(layer).__name__})"))
