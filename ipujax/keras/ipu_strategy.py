"""`IPUStrategy`: in its scope Keras models train, evaluate and predict on simulated IPUs.

Input: a configuration. Output: a scope. In it `keras.Model` makes what its loops call for the device; all else of
Keras is as it is: callbacks, metrics, saving. Public methods of `keras.Model` are replaced for the time of the scope:
`compile`, which notes that a model belongs to the strategy; `fit`, which checks that an epoch is a whole number of
updates; and `make_train_function`, `make_test_function` and `make_predict_function`. Behind the scope the same model
goes on without IPUs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import keras

from ipujax.device import IPUModel
from ipujax.keras import layer_stages as stages, settings as model_settings
from ipujax.keras.config import IPUConfig, get_ipu_config
from ipujax.keras.device_loop import Execution
from ipujax.keras.model_steps import predict_step, test_step, train_step
from ipujax.keras.settings import settings_of
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.options import Options

_STEPS = {"train": train_step, "test": test_step, "predict": predict_step}
# Methods that models have in a scope.
_OPTIONS: Mapping[str, Callable[..., Any]] = {
    "set_gradient_accumulation_options": model_settings.set_gradient_accumulation_options,
    "set_replication_options": model_settings.set_replication_options,
    "set_pipelining_options": model_settings.set_pipelining_options,
    "set_infeed_queue_options": model_settings.set_infeed_queue_options,
    "set_outfeed_queue_options": model_settings.set_outfeed_queue_options,
    "set_pipeline_stage_assignment": stages.set_pipeline_stage_assignment,
    "get_pipeline_stage_assignment": stages.get_pipeline_stage_assignment,
    "reset_pipeline_stage_assignment": stages.reset_pipeline_stage_assignment,
}


class IPUStrategy:
    """Runs Keras models on simulated IPUs.

    Args:
        config: which IPUs, and how models are compiled; the one made last when None, or one Mk2.
        options: compiler options in place of those of the configuration.

    Raises:
        ArgumentError: for what is no configuration.
    """

    def __init__(self, config: IPUConfig | None = None, options: Options | None = None) -> None:
        if config is not None and not isinstance(config, IPUConfig):
            raise ArgumentError("IPUStrategy needs a configuration", expected="IPUConfig()", got=repr(config))
        self._config, self._options = config, options
        self._models: WeakSet[Any] = WeakSet()  # compiled in its scope

    @property
    def device(self) -> IPUModel:
        """The IPUs."""
        config = self._config or get_ipu_config()
        return IPUModel() if config is None else config.device

    @property
    def options(self) -> Options:
        """The compiler options."""
        config = self._config or get_ipu_config()
        return self._options or (Options() if config is None else config.options)

    @contextmanager
    def scope(self) -> Iterator[IPUStrategy]:
        """In it models are compiled for the IPUs, and run on them."""
        with ExitStack() as stack:
            stack.callback(self._release)
            for name, method in self._methods().items():
                stack.enter_context(_method(name, method))
            yield self

    def _release(self) -> None:
        """Models make anew what their loops call."""
        for model in self._models:
            for kind in _STEPS:
                object.__setattr__(model, f"{kind}_function", None)

    def _methods(self) -> dict[str, Callable[..., Any]]:
        """What `keras.Model` has in the scope."""
        compiling, fitting = keras.Model.compile, keras.Model.fit

        def compile(model: Any, *args: Any, **kwargs: Any) -> None:
            compiling(model, *args, **kwargs)
            self._models.add(model)

        def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(fitting).bind(model, *args, **kwargs)
            bound.arguments["callbacks"] = _with_check(bound.arguments.get("callbacks"))
            return fitting(*bound.args, **bound.kwargs)

        made = {f"make_{kind}_function": self._making(kind) for kind in _STEPS}
        return {"compile": compile, "fit": fit, **made, **_OPTIONS}

    def _making(self, kind: str) -> Callable[..., Any]:
        """The method that makes what a loop calls."""
        name = f"{kind}_function"
        making = getattr(keras.Model, f"make_{name}")

        def make(model: Any, force: bool = False) -> Any:
            if model.run_eagerly:
                return making(model, force)
            if not force and isinstance(getattr(model, name), Execution):
                return None
            if model.compiled and model not in self._models:
                raise ArgumentError(
                    f"{model.name} was compiled outside of the scope",
                    expected="model.compile(...) in strategy.scope()",
                    hint="make and compile it in the scope",
                )
            self._models.add(model)
            execution = Execution(model, kind, _STEPS[kind], settings_of(model), self.device, self.options)
            object.__setattr__(model, name, execution)  # past Keras' tracking of attributes
            return None

        return make


class _CheckUpdates(keras.callbacks.Callback):
    """Refuses an epoch that is no whole number of updates before it begins."""

    def on_train_begin(self, logs: Any = None) -> None:
        settings, steps = settings_of(self.model), self.params.get("steps")
        if steps is not None and steps % settings.batches_of_update:
            raise ArgumentError(
                f"the {steps} batches of an epoch are no whole number of updates of {self.model.name}",
                expected=f"a multiple of {settings.batches_of_update}: {settings.accumulation} batches accumulated"
                f" × {settings.replicas} replicas",
                got=steps,
                hint=f"steps_per_epoch={steps - steps % settings.batches_of_update}",
            )


def _with_check(callbacks: Any) -> Any:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.append(_CheckUpdates())
        return callbacks
    given = [] if callbacks is None else list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    return [*given, _CheckUpdates()]


@contextmanager
def _method(name: str, value: Any) -> Iterator[None]:
    """Gives Keras' models a method in place of theirs, or one more.

    It is replaced in the class that has it: Keras compares methods of models with those to find what users override.
    """
    owner = next((base for base in keras.Model.__mro__ if name in vars(base)), keras.Model)
    own = vars(owner).get(name, _method)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _method:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
