"""`IPUStrategy`: in its scope Keras models train, evaluate and predict on simulated IPUs.

Input: a configuration. Output: a scope. In it `keras.Model` creates the functions of its loops for the device; the rest
of Keras does not change: callbacks, metrics, saving. Public methods of `keras.Model` are replaced in the scope:
`compile`, which registers a model with the strategy; `fit`, which checks that an epoch is a whole number of updates;
and `make_train_function`, `make_test_function` and `make_predict_function`. After the scope the same model runs without
IPUs. Attributes that a run sets on a model are explained before one has (`attributes`).

`model.export_for_ipu_serving` stores a model's prediction of one batch as a program in a file, `model.ipujax`, which
`ipu.load` reads in another process, with the weights of now and the profile; and the loaded program, a function of the
model's inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from operator import index
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, SupportsIndex
from weakref import WeakSet

import jax
import keras

import ipujax as ipu
from ipujax.front_end import Log, checking_calls, whole_number
from ipujax.keras import layer_stages, model_state, stage_assignment
from ipujax.keras.config import IPUConfig, get_ipu_config
from ipujax.keras.device_loop import Execution, execution_key
from ipujax.keras.layer_places import record_compiled, recorded_places
from ipujax.keras.model_steps import first_of, predict_step, test_step, train_step
from ipujax.keras.update_counts import CheckUpdates, check_last_batch

FILE = "model.ipujax"
_STEP = "a layer of the model, or code around the call of the program that is returned"
_HINTS = {"preprocessing_step": _STEP, "postprocessing_step": _STEP}


def exporter(strategy_of: Callable[[], Any]) -> Callable[..., ipu.LoadedProgram]:
    """Return the method `export_for_ipu_serving`.

    Args:
        strategy_of: returns the strategy whose device and options a program is compiled for.
    """

    @checking_calls("model.export_for_ipu_serving", first="model", hints=_HINTS)
    def export_for_ipu_serving(model: Any, export_dir: Any, batch_size: int | None = None) -> ipu.LoadedProgram:
        """Write the prediction of a batch as a program, `model.ipujax` in a folder, and return it.

        Args:
            model: a functional or sequential Keras model, on the IPUs of the current configuration.
            export_dir: the folder, created if it does not exist.
            batch_size: examples of a call; None for that of the model's inputs.

        Raises:
            ArgumentError: the shapes of inputs are not known, or stages do not fit the IPUs.
        """
        shapes = _input_shapes(model, batch_size)
        strategy = strategy_of()
        values = [[v.value for v in each] for each in (model.trainable_variables, model.non_trainable_variables)]
        settings = replace(model_state.settings_of(model), accumulation=1, replicas=1)
        settings = layer_stages.with_stages(
            model, "predict", settings, strategy.device, values, (_structured(model, shapes),)
        )
        step = predict_step(model, settings)

        def predict(*inputs: Any) -> Any:
            batches = jax.tree.map(lambda x: x[None], (_structured(model, inputs),))
            return first_of(step(values, batches)[0])

        predict.__name__ = f"{model.name}_serving"
        function = ipu.jit(predict, device=strategy.device, options=strategy.options)
        function.unused_settings.ignore_options()
        function.unused_settings.may_idle(strategy.device)
        folder = Path(export_dir)
        folder.mkdir(parents=True, exist_ok=True)
        function.lower(*shapes).compile().save(folder / FILE)
        return ipu.load(folder / FILE)

    return export_for_ipu_serving


def _input_shapes(model: Any, batch_size: int | None) -> list[jax.ShapeDtypeStruct]:
    """Return shape and dtype of each input of a model."""
    inputs = model.inputs if hasattr(model, "inputs") and model.built else None
    if not inputs:
        hint = "model.build(...) of a sequential model; a functional model in place of a subclass"
        raise ipu.ArgumentError(f"the inputs of {model.name} are not known", expected="a model with inputs", hint=hint)
    sizes = [x.shape[0] if batch_size is None else whole_number("batch_size", batch_size, 1) for x in inputs]
    if None in sizes:
        problem = f"the batch size of {model.name} is not known"
        raise ipu.ArgumentError(problem, expected="batch_size= of export_for_ipu_serving, or of keras.Input")
    return [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for size, x in zip(sizes, inputs, strict=True)]


def _structured(model: Any, inputs: Any) -> Any:
    """Return inputs in a list as the model takes them."""
    return keras.tree.pack_sequence_as(model.input, list(inputs))


_LOG = Log("keras")
_STEPS = {"train": train_step, "test": test_step, "predict": predict_step}
# Methods that models have in a scope.
_OPTIONS: Mapping[str, Callable[..., Any]] = {
    "set_gradient_accumulation_options": model_state.set_gradient_accumulation_options,
    "set_replication_options": model_state.set_replication_options,
    "set_pipelining_options": model_state.set_pipelining_options,
    "set_infeed_queue_options": model_state.set_infeed_queue_options,
    "set_outfeed_queue_options": model_state.set_outfeed_queue_options,
    "set_pipeline_stage_assignment": stage_assignment.set_pipeline_stage_assignment,
    "get_pipeline_stage_assignment": stage_assignment.get_pipeline_stage_assignment,
    "print_pipeline_stage_assignment_summary": stage_assignment.print_pipeline_stage_assignment_summary,
    "reset_pipeline_stage_assignment": stage_assignment.reset_pipeline_stage_assignment,
}
model_state.explain_missing(keras.Model)


class IPUStrategy:
    """Runs Keras models on simulated IPUs.

    Args:
        config: the IPUs and the compiler options; the current configuration when None, or one Mk2 without any.
        options: compiler options in place of those of the configuration.

    Raises:
        ArgumentError: `config` is not an `IPUConfig`, or `options` is not an `ipu.Options`.
    """

    def __init__(self, config: IPUConfig | None = None, options: ipu.Options | None = None) -> None:
        if config is not None and not isinstance(config, IPUConfig):
            raise ipu.ArgumentError("IPUStrategy needs a configuration", expected="IPUConfig()", got=repr(config))
        if options is not None and not isinstance(options, ipu.Options):
            raise ipu.ArgumentError("IPUStrategy needs options", expected="ipu.Options(...)", got=repr(options))
        self._config = config or get_ipu_config()
        self._options = options
        # Compiled in a scope of this strategy; weak references, so that a sweep frees its models.
        self._models: WeakSet[Any] = WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        return IPUStrategy, (self._config, self._options)  # its models stay with it

    @property
    def device(self) -> ipu.IPUModel:
        """The IPUs."""
        return ipu.IPUModel() if self._config is None else self._config.device

    @property
    def options(self) -> ipu.Options:
        """The compiler options."""
        return self._options or (ipu.Options() if self._config is None else self._config.options)

    @contextmanager
    def scope(self) -> Iterator[IPUStrategy]:
        """Compile and run models on the IPUs inside; other threads may train models in the scope of this one.

        Raises:
            ArgumentError: another thread is in a scope that it opened.
        """
        with ExitStack() as stack:
            stack.enter_context(_exclusive_thread())
            self._warn_of_options()
            stack.callback(self._release)  # runs last, when Keras' methods are restored
            stack.enter_context(recorded_places())
            for name, method in self._methods().items():
                stack.enter_context(model_state.replace_attribute(keras.Model, name, method))
            yield self

    def _warn_of_options(self) -> None:
        """Warn of options that are set in the configuration, and that the strategy's options replace."""
        if self._options is None or self._config is None:
            return
        configured = self._config.options
        effective = self._options
        default = ipu.Options()
        names = ("recompute", "io_tiles", "prefetch_depth")  # those that a configuration has
        ignored = [n for n in names if getattr(configured, n) not in (getattr(default, n), getattr(effective, n))]
        if ignored:
            text = "IPUStrategy(config, options) ignores values of config: %s; set them in options"
            values = ", ".join(f"{n}={getattr(effective, n)!r}, not {getattr(configured, n)!r}" for n in ignored)
            _LOG.warning(text, values)

    def _release(self) -> None:
        """Drop the functions of all models, which Keras then creates without IPUs."""
        for model in self._models:
            model_state.clear_functions(model)

    def _methods(self) -> dict[str, Callable[..., Any]]:
        """Return the methods of `keras.Model` in the scope."""
        keras_compile = keras.Model.compile
        keras_fit = keras.Model.fit

        def compile(model: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(steps := kwargs.get("steps_per_execution"), SupportsIndex):
                kwargs["steps_per_execution"] = index(steps)  # the cardinality of a `tf.data.Dataset` is a tensor
            keras_compile(model, *args, **kwargs)
            record_compiled(model)
            self._models.add(model)

        def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(keras_fit).bind(model, *args, **kwargs)
            check_last_batch(model, bound.arguments)
            bound.arguments["callbacks"] = _add_check(bound.arguments.get("callbacks"))
            return keras_fit(*bound.args, **bound.kwargs)

        makers = {f"make_{kind}_function": self._function_maker(kind) for kind in _STEPS}
        return {"compile": compile, "fit": fit, **makers, **_OPTIONS}

    def _function_maker(self, kind: str) -> Callable[..., Any]:
        """Return the method in place of Keras' `make_train_function` and its likes."""
        name = f"{kind}_function"
        keras_maker = getattr(keras.Model, f"make_{name}")

        def make(model: Any, force: bool = False) -> Any:
            """Set the model's `Execution` where Keras sets its jitted function; one of equal settings stays."""
            settings = model_state.settings_of(model)
            if model.run_eagerly:
                if settings.batches_of_update > 1 or layer_stages.has_stages(model):
                    problem = f"{model.name} is run eagerly, step by step in JAX"
                    raise ipu.ArgumentError(problem, expected="run_eagerly=False, for stages, accumulation or replicas")
                _LOG.warning("%s runs without an IPU: it was compiled with run_eagerly=True", model.name)
                return keras_maker(model, force)
            if model.compiled and model not in self._models:
                raise ipu.ArgumentError(
                    f"{model.name} was compiled outside of the scope",
                    expected="model.compile(...) in strategy.scope()",
                    hint="make and compile it in the scope",
                )
            self._models.add(model)  # one that only predicts is never compiled
            device = self.device
            options = self.options
            current = getattr(model, name)
            # Another device or other options since, in a nested scope say, need another execution.
            is_current = isinstance(current, Execution) and current.key == execution_key(model, device, options)
            if is_current and not force:
                current.end_fit()  # a fit that was interrupted did not
                return None
            execution = Execution(model, kind, _STEPS[kind], settings, device, options)
            model_state.set_untracked(model, **{name: execution})
            return None

        return make


keras.Model.export_for_ipu_serving = exporter(IPUStrategy)  # programs call it behind the scope


def _add_check(callbacks: Any) -> Any:
    """Return callbacks of any form that `fit` accepts, with `CheckUpdates` last."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.append(CheckUpdates())
        return callbacks
    several = [] if callbacks is None else list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    return [*several, CheckUpdates()]


# Thread of each open scope, outer ones first. Scopes replace methods of a class, which all threads share.
_THREADS: list[int] = []
_LOCK = Lock()


@contextmanager
def _exclusive_thread() -> Iterator[None]:
    """Refuse a scope while another thread has one open."""
    with _LOCK:
        if _THREADS and _THREADS[-1] != get_ident():
            problem = "another thread is in the scope of an IPUStrategy"
            raise ipu.ArgumentError(problem, expected="one thread with scopes; others may train the models in it")
        _THREADS.append(get_ident())
    try:
        yield
    finally:
        with _LOCK:
            _THREADS.pop()
