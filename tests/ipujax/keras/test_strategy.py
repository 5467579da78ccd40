"""Keras models in the scope of an `IPUStrategy`, against stock Keras."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import ipujax.keras as ipu
from ipujax import ArgumentError

TILES = 8  # so that planning is quick
RNG = np.random.default_rng(0)
X = RNG.random((40, 12, 12, 1), np.float32)
Y = RNG.integers(0, 4, 40)


def strategy(num_ipus: int = 1, **options: Any) -> ipu.IPUStrategy:
    config = ipu.IPUConfig()
    config.auto_select_ipus = num_ipus
    config.ipu_model.tiles_per_ipu = TILES
    for name, value in options.items():
        setattr(config, name, value)
    return ipu.IPUStrategy(config)


def cnn() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(4, activation="softmax"),
        ]
    )


# What `compile` is given that belongs to one model: the functions that make it.
_MADE = re.compile("optimizer|metrics")


def state_of(model: Any) -> list[np.ndarray]:
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables, *model.metrics_variables)]


def both(make: Callable[[], keras.Model], use: Callable[[Any], Any], **compiled: Any) -> list[tuple[Any, list]]:
    """Results of a use of a model in stock Keras and in a scope, and its state afterwards."""
    results = []
    for scope in (nullcontext(), strategy().scope()):
        with scope:
            keras.utils.set_random_seed(7)
            model = make()
            made = {name for name, value in compiled.items() if _MADE.search(name) and callable(value)}
            own = {name: value() if name in made else value for name, value in compiled.items()}
            model.compile(**{"optimizer": "adam", "loss": "sparse_categorical_crossentropy", **own})
            results.append((use(model), state_of(model)))
    return results


def assert_alike(results: list[tuple[Any, list]], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    (expected, before), (got, after) = results
    for one, other in zip(keras.tree.flatten(expected), keras.tree.flatten(got), strict=True):
        np.testing.assert_allclose(other, one, rtol=rtol, atol=atol)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(other, one, rtol=max(rtol, 1e-4), atol=max(atol, 1e-5))


def fitted(model: Any, **settings: Any) -> dict[str, list[float]]:
    history = model.fit(X, Y, epochs=2, batch_size=16, verbose=0, shuffle=True, **settings).history
    return {name: history[name] for name in sorted(history)}


def test_losses_metrics_and_state_are_those_of_stock_keras() -> None:
    """A convolution with batch normalisation and dropout, a partial last batch, class weights and validation."""

    def use(model: Any) -> Any:
        weights = {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0}
        logs = fitted(model, class_weight=weights, validation_data=(X[:16], Y[:16]))
        return logs, model.predict(X[:16], batch_size=16, verbose=0), model.train_on_batch(X[:16], Y[:16])

    assert_alike(both(cnn, use, metrics=["accuracy"]))


@pytest.mark.parametrize("steps", [2, 4])
def test_steps_of_an_execution_are_a_loop_on_the_device(steps: int) -> None:
    """One call runs them, and the last may be of fewer steps and fewer examples."""
    results = both(cnn, fitted, metrics=["accuracy"], steps_per_execution=steps)
    assert_alike(results)


def test_a_train_step_of_a_subclass() -> None:
    class Custom(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(4)
            self.seen = keras.metrics.Mean(name="seen")

        def call(self, x: Any) -> Any:
            return keras.ops.softmax(self.dense(keras.ops.reshape(x, (-1, 144))))

        def train_step(self, state: Any, data: Any) -> Any:
            logs, state = super().train_step(state, data)
            return {**logs, "double": 2 * logs["loss"]}, state

    assert_alike(both(Custom, fitted))


def test_schedules_and_clipping() -> None:
    def optimizer() -> Any:
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        return keras.optimizers.SGD(schedule, momentum=0.9, clipnorm=1.0)

    assert_alike(both(cnn, fitted, optimizer=optimizer))


def test_mixed_precision() -> None:
    def make() -> keras.Model:
        inputs = keras.Input((12, 12, 1))
        x = keras.layers.Flatten()(inputs)
        x = keras.layers.Dense(16, activation="relu", dtype="mixed_float16")(x)
        return keras.Model(inputs, keras.layers.Dense(4, activation="softmax", dtype="float32")(x))

    def optimizer() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))

    assert_alike(both(make, fitted, optimizer=optimizer), rtol=2e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")  # Keras' own
def test_callbacks_see_state_and_may_stop(tmp_path: Path) -> None:
    def use(model: Any) -> Any:
        path = tmp_path / f"{id(model)}.keras"
        logger = ipu.ProfileLogger()
        stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)
        save = keras.callbacks.ModelCheckpoint(path)
        history = model.fit(X, Y, epochs=5, batch_size=8, verbose=0, callbacks=[logger, stop, save]).history
        repeated = keras.models.load_model(path)
        return history["loss"], repeated.predict(X, verbose=0)

    assert_alike(both(cnn, use))


def test_a_model_goes_on_without_the_strategy() -> None:
    with strategy().scope():
        keras.utils.set_random_seed(7)
        model = cnn()
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(X, Y, batch_size=16, epochs=1, verbose=0)
        profile = model.ipu_profile
    inside = {name for name in dir(keras.Model) if name.startswith("set_pipeline")}
    losses = model.fit(X, Y, batch_size=16, epochs=1, verbose=0).history["loss"]
    keras.utils.set_random_seed(7)
    stock = cnn()
    stock.compile("adam", "sparse_categorical_crossentropy")
    expected = fitted(stock)["loss"][1:]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert not inside and model.ipu_profile is profile and profile.cycles > 0


def test_a_model_made_outside_of_the_scope_and_compiled_in_it() -> None:
    losses = []
    states = []
    for scope in (nullcontext(), strategy().scope()):
        keras.utils.set_random_seed(7)
        model = cnn()
        with scope:
            model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
            losses.append(model.fit(X[:32], Y[:32], batch_size=16, epochs=2, verbose=0).history)
        states.append(state_of(model))
    assert model.ipu_profile.cycles > 0
    assert_alike([(losses[0], states[0]), (losses[1], states[1])])


def test_methods_are_given_back_when_an_exception_leaves_the_scope() -> None:
    before = {name: getattr(keras.Model, name) for name in ("compile", "fit", "make_train_function")}
    names = set(dir(keras.Model))
    with pytest.raises(ZeroDivisionError), strategy().scope():
        assert keras.Model.compile is not before["compile"]
        1 / 0  # noqa: B018
    assert all(getattr(keras.Model, name) is method for name, method in before.items())
    assert set(dir(keras.Model)) == names


def test_the_profile_and_its_logger() -> None:
    with strategy().scope():
        model = cnn()
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
        history = model.fit(X[:32], Y[:32], batch_size=16, epochs=2, verbose=0, callbacks=ipu.ProfileLogger()).history
        model.evaluate(X[:32], Y[:32], batch_size=16, verbose=0)
    assert set(model.ipu_profiles) == {"train", "test"} and model.ipu_profile is model.ipu_profiles["train"]
    assert history["ipu_cycles"] == [model.ipu_profile.cycles] * 2
    assert history["ipu_tile_bytes"][0] == model.ipu_profile.memory.max_tile_bytes
    assert all(seconds > 0 for seconds in history["host_seconds"])


def test_each_shape_is_compiled_once_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ipujax.keras"), strategy().scope():
        model = cnn()
        model.compile("sgd", "sparse_categorical_crossentropy")
        model.fit(X, Y, batch_size=16, epochs=3, verbose=0)
    lines = [record.getMessage() for record in caplog.records if record.name == "ipujax.keras"]
    assert [line.split(" cycles")[0].split(": ")[0].split(" ", 1)[1] for line in lines] == [
        "trains 1 × 16 examples",
        "trains 1 × 8 examples",
    ]


def test_the_listing_of_the_programmers_guide() -> None:
    """Listing 4.1 of Graphcore's IPU Programmer's Guide, with small data."""
    input_shape = (28, 28, 1)
    num_classes = 10
    batch_size = 16
    x_train = RNG.random((32, *input_shape), np.float32)
    y_train = keras.utils.to_categorical(RNG.integers(0, num_classes, 32), num_classes)
    x_test = x_train
    y_test = y_train

    def model_fn() -> Any:
        input_layer = keras.Input(shape=input_shape)
        x = keras.layers.Conv2D(32, kernel_size=(3, 3), activation="relu")(input_layer)
        x = keras.layers.MaxPooling2D(pool_size=(2, 2))(x)
        x = keras.layers.Conv2D(64, kernel_size=(3, 3), activation="relu")(x)
        x = keras.layers.MaxPooling2D(pool_size=(2, 2))(x)
        x = keras.layers.Flatten()(x)
        x = keras.layers.Dropout(0.5)(x)
        x = keras.layers.Dense(num_classes, activation="softmax")(x)
        return input_layer, x

    ipu_config = ipu.config.IPUConfig()
    ipu_config.auto_select_ipus = 1
    strategy = ipu.ipu_strategy.IPUStrategy()
    assert strategy.device.target.num_ipus == 1

    with strategy.scope():
        model = keras.Model(*model_fn())
        model.compile("sgd", "categorical_crossentropy", metrics=["accuracy"])
        model.fit(x_train, y_train, epochs=1, batch_size=batch_size, verbose=0)
        model.compile("sgd", "categorical_crossentropy", metrics=["accuracy"])
        scores = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)
    np.testing.assert_allclose(scores, model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0), rtol=1e-5)


def test_batches_prepared_ahead_are_the_same() -> None:
    def use(model: Any) -> Any:
        if hasattr(model, "set_infeed_queue_options"):
            model.set_infeed_queue_options(prefetch_depth=3)
        batches = ((X[n : n + 8], Y[n : n + 8]) for n in (0, 8, 16, 24, 32, 0, 8, 16, 24, 32))
        return model.fit(batches, epochs=2, steps_per_epoch=5, shuffle=False, verbose=0).history["loss"]

    assert_alike(both(cnn, use))


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_model_that_was_compiled_outside() -> None:
    model = cnn()
    model.compile("sgd", "sparse_categorical_crossentropy")
    with strategy().scope(), pytest.raises(ArgumentError, match="was compiled outside of the scope"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize(
    ("name", "value", "output"),
    [
        ("auto_select_ipu", 1, "try: 'auto_select_ipus'"),
        ("auto_select_ipus", 3, "got: 3"),
        ("auto_select_ipus", True, "a power of two"),
        ("allow_recompute", "atuo", "'standard'"),
    ],
)
def test_refuses_unknown_options(name: str, value: Any, output: str) -> None:
    with pytest.raises(ArgumentError, match="IPUConfig") as error:
        setattr(ipu.IPUConfig(), name, value)
    assert output in str(error.value)


def test_options_in_categories() -> None:
    config = ipu.IPUConfig()
    config.ipu_model.version, config.ipu_model.tiles_per_ipu = "ipu21", 64
    config.io_tiles.num_io_tiles = 8
    config.io_tiles.prefetch_depth = 2
    config.allow_recompute = True
    assert config.device.target.name == "bow"
    assert config.device.target.tiles_per_ipu == 64
    options = config.options
    assert (options.io_tiles, options.prefetch_depth, options.recompute) == (8, 2, "auto")
    with pytest.raises(ArgumentError, match=r"IPUConfig\.ipu_model is a category"):
        config.ipu_model = "ipu2"  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match="version must be one of"):
        config.ipu_model.version = "gpu"


@pytest.mark.parametrize(("steps", "batches"), [(3, 4), (2, 5)])
def test_epochs_of_a_generator_are_whole_executions_as_in_stock_keras(steps: int, batches: int) -> None:
    """Keras goes on to the end of the execution in which an epoch ends."""

    def forever() -> Any:
        while True:
            yield np.ones((8, 6), np.float32), np.ones((8, 2), np.float32)

    actual = []
    for scope in (nullcontext(), strategy().scope()):
        keras.utils.set_random_seed(0)
        with scope:
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
            model.compile("sgd", "mse", steps_per_execution=steps)
            history = model.fit(forever(), steps_per_epoch=batches, epochs=3, shuffle=False, verbose=0).history
        actual.append((int(model.optimizer.iterations), history["loss"]))
    assert actual[0][0] == actual[1][0]
    np.testing.assert_allclose(actual[0][1], actual[1][1], rtol=1e-5)


def test_a_generator_may_fill_one_array_again() -> None:
    """An execution of several steps reads their batches before the first runs."""

    def batches() -> Iterator[Any]:
        x = np.zeros((4, 5), np.float32)
        y = np.zeros(4, np.int32)
        for number in range(6):
            x[:] = np.arange(5) == number % 5
            y[:] = number % 3
            yield x, y

    def use(model: Any) -> Any:
        history = model.fit(batches(), steps_per_epoch=6, shuffle=False, verbose=0).history
        return history, model.predict(batches(), steps=6, verbose=0)

    assert_alike(both(lambda: keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, "softmax")]), use,
                      optimizer="sgd", steps_per_execution=3))  # fmt: skip


def test_steps_per_execution_may_be_set_between_fits() -> None:
    def use(model: Any) -> Any:
        first = fitted(model)
        model.steps_per_execution = 3
        return first, fitted(model)

    assert_alike(both(cnn, use, steps_per_execution=2))
