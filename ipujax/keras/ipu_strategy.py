"""`IPUStrategy`: in its scope Keras models train, evaluate and predict on simulated IPUs.

Input: a configuration. Output: a scope. In it `keras.Model` makes what its loops call for the device; all else of
Keras is as it is: callbacks, metrics, saving. Public methods of `keras.Model` are replaced for the time of the scope:
`compile`, which notes that a model belongs to the strategy; `fit`, which checks that an epoch is a whole number of
updates; and `make_train_function`, `make_test_function` and `make_predict_function`. Behind the scope the same model
goes on without IPUs. What runs leave with a model is explained before any has (`scope_attributes`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import Lock, get_ident
from typing import Any
from weakref import WeakSet

import keras

from ipujax.device import IPUModel
from ipujax.keras import layer_stages as stages, settings as model_settings
from ipujax.keras.attributes import keep, replaced
from ipujax.keras.config import IPUConfig, get_ipu_config
from ipujax.keras.device_loop import Execution, made_for
from ipujax.keras.model_steps import predict_step, test_step, train_step
from ipujax.keras.scope_attributes import explain_missing
from ipujax.keras.settings import settings_of
from ipujax.keras.whole_updates import CheckUpdates, check_last_batch
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.logs import Log
from ipujax.runtime.options import Options

_LOG = Log("keras")
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
    "print_pipeline_stage_assignment_summary": stages.print_pipeline_stage_assignment_summary,
    "reset_pipeline_stage_assignment": stages.reset_pipeline_stage_assignment,
}
explain_missing(keras.Model)


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
        if options is not None and not isinstance(options, Options):
            raise ArgumentError("IPUStrategy needs options", expected="ipu.Options(...)", got=repr(options))
        self._config, self._options = config or get_ipu_config(), options
        self._models: WeakSet[Any] = WeakSet()  # compiled in its scope

    @property
    def device(self) -> IPUModel:
        """The IPUs."""
        return IPUModel() if self._config is None else self._config.device

    @property
    def options(self) -> Options:
        """The compiler options."""
        return self._options or (Options() if self._config is None else self._config.options)

    @contextmanager
    def scope(self) -> Iterator[IPUStrategy]:
        """In it models are compiled for the IPUs, and run on them; threads that train one model share its scope.

        Raises:
            ArgumentError: while another thread is in a scope of its own.
        """
        with ExitStack() as stack:
            stack.enter_context(_of_this_thread())
            self._warn_of_options()
            stack.callback(self._release)
            for name, method in self._methods().items():
                stack.enter_context(replaced(keras.Model, name, method))
            yield self

    def _warn_of_options(self) -> None:
        """Names options of the configuration that those of the strategy replace."""
        if self._options is None or self._config is None:
            return
        asked, given, plain = self._config.options, self._options, Options()
        names = ("recompute", "io_tiles", "prefetch_depth")
        lost = [n for n in names if getattr(asked, n) not in (getattr(plain, n), getattr(given, n))]
        if lost:
            what = "IPUStrategy(config, options) runs with options in place of the configuration's: %s; set it there"
            _LOG.warning(what, ", ".join(f"{n}={getattr(given, n)!r}, not {getattr(asked, n)!r}" for n in lost))

    def _release(self) -> None:
        """Models make anew what their loops call."""
        for model in self._models:
            model_settings.forget_functions(model)

    def _methods(self) -> dict[str, Callable[..., Any]]:
        """What `keras.Model` has in the scope."""
        compiling, fitting = keras.Model.compile, keras.Model.fit

        def compile(model: Any, *args: Any, **kwargs: Any) -> None:
            compiling(model, *args, **kwargs)
            self._models.add(model)

        def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(fitting).bind(model, *args, **kwargs)
            check_last_batch(model, bound.arguments)
            bound.arguments["callbacks"] = _with_check(bound.arguments.get("callbacks"))
            return fitting(*bound.args, **bound.kwargs)

        made = {f"make_{kind}_function": self._making(kind) for kind in _STEPS}
        return {"compile": compile, "fit": fit, **made, **_OPTIONS}

    def _making(self, kind: str) -> Callable[..., Any]:
        """The method that makes what a loop calls."""
        name = f"{kind}_function"
        making = getattr(keras.Model, f"make_{name}")

        def make(model: Any, force: bool = False) -> Any:
            settings = settings_of(model)
            if model.run_eagerly:
                if settings.batches_of_update > 1 or stages.has_stages(model):
                    what = f"{model.name} is run eagerly, step by step in JAX"
                    raise ArgumentError(what, expected="run_eagerly=False, for stages, accumulation or replicas")
                _LOG.warning("%s runs without an IPU: it was compiled with run_eagerly=True", model.name)
                return making(model, force)
            if model.compiled and model not in self._models:
                raise ArgumentError(
                    f"{model.name} was compiled outside of the scope",
                    expected="model.compile(...) in strategy.scope()",
                    hint="make and compile it in the scope",
                )
            self._models.add(model)
            device, options, there = self.device, self.options, getattr(model, name)
            is_there = isinstance(there, Execution) and there.made_for == made_for(model, device, options)
            if is_there and not force:
                there.end_fit()
                return None
            execution = Execution(model, kind, _STEPS[kind], settings, device, options)
            keep(model, **{name: execution})
            return None

        return make


def _with_check(callbacks: Any) -> Any:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.append(CheckUpdates())
        return callbacks
    given = [] if callbacks is None else list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    return [*given, CheckUpdates()]


_THREADS: list[int] = []  # of the scopes that are open, one inside the other: methods of a class are everybody's
_LOCK = Lock()


@contextmanager
def _of_this_thread() -> Iterator[None]:
    """Refuses a scope while another thread has one."""
    with _LOCK:
        if _THREADS and _THREADS[-1] != get_ident():
            what = "another thread is in the scope of an IPUStrategy"
            raise ArgumentError(what, expected="one thread with scopes; others may train the models in it")
        _THREADS.append(get_ident())
    try:
        yield
    finally:
        with _LOCK:
            _THREADS.pop()
