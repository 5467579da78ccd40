"""Errors in a scope leave models, methods and data as they were."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import ipujax.keras as ipu
from ipujax import ArgumentError, IPUModel, Options, TileMemoryError
from ipujax.keras.model_state import ModelSettings, _model_remedies
from tests.ipujax.keras.test_strategy import strategy

X = np.ones((24, 6), np.float32)
Y = np.arange(24) % 3


def mlp(**compiled: Any) -> Any:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
    model.compile(**{"optimizer": "adam", "loss": "sparse_categorical_crossentropy", **compiled})
    return model


def test_a_model_that_does_not_fit_keeps_its_weights() -> None:
    config = ipu.IPUConfig()
    config.ipu_model.tiles_per_ipu = 1
    with ipu.IPUStrategy(config).scope():
        model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(600), keras.layers.Dense(3)])
        model.compile("adam", "mse")
        before = [np.asarray(variable) for variable in model.variables]
        with pytest.raises(TileMemoryError):
            model.fit(np.zeros((8, 300), np.float32), np.zeros((8, 3)), verbose=0)
    for one, other in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(one, np.asarray(other))


def test_an_incomplete_update_changes_no_weights() -> None:
    """The last of an execution is smaller, behind others that could run."""

    def batches() -> Iterator[Any]:
        for size in (4, 4, 4, 4, 4, 4, 4, 3):
            yield X[:size], Y[:size]

    with strategy().scope():
        model = mlp(steps_per_execution=4)
        model.set_gradient_accumulation_options(2)
        with pytest.raises(ArgumentError, match="are not a whole update"):
            model.fit(batches(), shuffle=False, verbose=0)
        assert int(model.optimizer.iterations) == 2  # of the first execution
        assert all(np.isfinite(np.asarray(variable)).all() for variable in model.variables)


def test_a_metric_of_users_that_may_be_no_sum_is_refused_in_replicas() -> None:
    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.most = self.add_variable((), "zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

        def result(self) -> Any:
            return self.most + 0

    with strategy(2).scope():
        model = mlp(metrics=[Largest()], steps_per_execution=2)
        model.set_replication_options(2)
        with pytest.raises(ArgumentError, match="largest may not add up over replicas"):
            model.fit(X, Y, batch_size=4, verbose=0)


def test_metrics_that_a_model_computes_itself_are_refused_in_accumulation() -> None:
    class Own(keras.Sequential):
        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return {**super().compute_metrics(x, y, y_pred, sample_weight), "extra": 1.0}

    with strategy().scope():
        model = Own([keras.Input((6,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=2)
        model.set_gradient_accumulation_options(2)
        with pytest.raises(ArgumentError, match="has a compute_metrics of its own"):
            model.fit(X, Y, batch_size=4, verbose=0)


def test_a_scope_while_another_thread_has_one() -> None:
    entered = threading.Event()
    may_leave = threading.Event()
    refused = list[Exception]()
    before = keras.Model.compile

    def other() -> None:
        with strategy().scope():
            entered.set()
            may_leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10)
    try:
        with strategy().scope():
            pass
    except ArgumentError as error:
        refused.append(error)
    may_leave.set()
    thread.join()
    assert refused and "another thread" in str(refused[0]) and keras.Model.compile is before


def test_the_configuration_is_that_of_the_time_the_strategy_was_made() -> None:
    config = ipu.IPUConfig()
    config.auto_select_ipus = 2
    made = ipu.IPUStrategy()
    actual = list[int]()
    thread = threading.Thread(target=lambda: actual.append(made.device.target.num_ipus))
    thread.start()
    thread.join()
    assert actual == [2]


def test_the_configuration_of_strategies_that_are_given_none() -> None:
    first = ipu.IPUConfig()
    second = ipu.IPUConfig()
    first.auto_select_ipus, second.auto_select_ipus = 2, 4
    assert ipu.IPUStrategy().device.target.num_ipus == 4
    first.configure_ipu_system()
    assert ipu.config.get_ipu_config() is first and ipu.IPUStrategy().device.target.num_ipus == 2
    ipu.config.reset_ipu_configuration()
    assert ipu.config.get_ipu_config() is None and ipu.IPUStrategy().device.target.num_ipus == 1


def test_a_configuration_that_changes_makes_programs_anew() -> None:
    config = ipu.IPUConfig()
    config.ipu_model.tiles_per_ipu = 8
    with ipu.IPUStrategy(config).scope():
        model = mlp()
        model.fit(X, Y, batch_size=8, verbose=0)
        before = len(model.ipu_profile.memory.tile_bytes)
        config.ipu_model.tiles_per_ipu = 4
        model.fit(X, Y, batch_size=8, verbose=0)
    assert (before, len(model.ipu_profile.memory.tile_bytes)) == (8, 4)


def test_stages_of_a_model_inside_count_and_can_be_taken_back() -> None:
    with strategy(2).scope():
        inputs = keras.Input((6,))
        with ipu.PipelineStage(0):
            x = keras.layers.Dense(5)(inputs)
        with ipu.PipelineStage(1):
            inner = keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(x))
        outer_inputs = keras.Input((6,))
        model = keras.Model(outer_inputs, inner(outer_inputs))
        model.set_gradient_accumulation_options(2)
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=2)
        model.fit(X[:16], Y[:16], batch_size=8, verbose=0)
        both = model.ipu_profile.memory.tile_bytes
        inner.reset_pipeline_stage_assignment()
        model.set_gradient_accumulation_options(2)
        model.fit(X[:16], Y[:16], batch_size=8, verbose=0)
        one = model.ipu_profile.memory.tile_bytes
    assert np.split(both, 2)[1].min() > np.split(one, 2)[1].max()  # where a stack is left alone


def test_prefetching_takes_no_more_batches_than_epochs_have() -> None:
    taken = []

    def batches() -> Iterator[Any]:
        while True:
            taken.append(len(taken))
            yield X[:4], Y[:4]

    with strategy().scope():
        model = mlp()
        model.set_infeed_queue_options(prefetch_depth=3)
        model.fit(batches(), steps_per_epoch=2, epochs=2, shuffle=False, verbose=0)
    assert len(taken) in (4, 5)  # Keras itself looks at one to build a model


@pytest.mark.parametrize(
    ("use", "output"),
    [
        (lambda config: setattr(config, "io_tiles", 32), "IPUConfig.io_tiles.num_io_tiles"),
        (lambda config: setattr(config.ipu_model, "version", []), "one of 'ipu1'"),
        (lambda config: ipu.IPUStrategy(options="x"), "ipu.Options"),  # type: ignore[arg-type]
        (lambda config: ipu.IPUStrategy("x"), "IPUConfig()"),  # type: ignore[arg-type]
    ],
)
def test_refuses_a_non_option(use: Any, output: str) -> None:
    with pytest.raises(ArgumentError) as error:
        use(ipu.IPUConfig())
    assert output in str(error.value)


@pytest.mark.parametrize(
    ("use", "output"),
    [
        (lambda model: model.set_pipeline_stage_assignment(3), "the stage of each layer"),
        (lambda model: keras.Sequential().set_pipeline_stage_assignment([]), "has no layers"),
        (lambda model: model.set_pipelining_options(device_mapping="ab"), "device_mapping"),
        (lambda model: model.set_pipelining_options(gradient_accumulation_reduction_method="foo"), "'mean'"),
    ],
)
def test_refuses_a_non_setting(use: Any, output: str) -> None:
    with strategy().scope():
        model = mlp()
        with pytest.raises(ArgumentError) as error:
            use(model)
    assert output in str(error.value)


def test_settings_that_are_not_named_stay() -> None:
    with strategy().scope():
        model = mlp()
        model.set_pipelining_options(4, schedule="1f1b", recompute="auto")
        model.set_pipelining_options(device_mapping=[1, 0])
        settings = model.ipu_settings
    assert (settings.accumulation, settings.recompute, settings.device_mapping) == (4, "auto", (1, 0))
    assert settings.schedule is not None


def test_a_model_that_is_run_eagerly_in_replicas() -> None:
    with strategy(2).scope():
        model = mlp(run_eagerly=True, steps_per_execution=2)
        model.set_replication_options(2)
        with pytest.raises(ArgumentError, match="is run eagerly"):
            model.fit(X, Y, batch_size=4, verbose=0)


def refusal(set_up: Any = lambda config, model: None, tiles: int = 1, **compiled: Any) -> TileMemoryError:
    """The error of a model that does not fit one tile."""
    config = ipu.IPUConfig()
    config.ipu_model.tiles_per_ipu = tiles
    with ipu.IPUStrategy(config).scope():
        layers = keras.layers
        model = keras.Sequential([keras.Input((300,)), layers.Dense(600, activation="tanh"), layers.Dense(3)])
        model.compile("adam", "mse", **compiled)
        set_up(config, model)
        with pytest.raises(TileMemoryError) as refused:
            model.fit(np.zeros((32, 300), np.float32), np.zeros((32, 3)), batch_size=8, verbose=0)
    return refused.value


OWN_WORDS = ("Options(recompute", "offload_argnums", "ipu.advise", "jax.checkpoint", "bytes_per_tile=", "ipu.pipeline")


def test_remedies_of_a_model_that_does_not_fit_are_those_of_keras() -> None:
    def recomputing(config: Any, model: Any) -> None:
        config.allow_recompute = True

    error = refusal()
    assert "config.allow_recompute = True" in error.hint and "PipelineStage" in error.hint
    assert "config.ipu_model.tiles_per_ipu = 0, for all 1,472 tiles" in error.hint
    assert not [word for word in OWN_WORDS if word in str(error)]
    assert "argument model['trainable']['sequential" in str(error) and "/dense" in str(error)
    assert "allow_recompute" not in refusal(recomputing).hint
    assert "steps_per_execution=1): all 4 batches" in refusal(steps_per_execution=4).hint


def test_errors_name_lines_of_the_project() -> None:
    """The line of the user that calls Keras, or that of a layer of theirs; none in Keras."""

    class Large(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.w = self.add_weight(shape=(shape[-1], 600))

        def call(self, x: Any) -> Any:
            return x @ self.w

    assert str(refusal().where).startswith("test_strategy_misuse.py") and "(refusal)" in str(refusal().where)
    with strategy().scope():
        model = mlp(steps_per_execution=4)
        model.set_gradient_accumulation_options(4)
        with pytest.raises(ArgumentError, match="not a whole number of updates") as refused:
            model.fit(X, Y, batch_size=4, verbose=0)
        assert "(test_errors_name_lines_of_the_project)" in str(refused.value.where)
    config = ipu.IPUConfig()
    config.ipu_model.tiles_per_ipu = 1
    with ipu.IPUStrategy(config).scope():
        model = keras.Sequential([keras.Input((300,)), Large(), keras.layers.Dense(3)])
        model.compile("adam", "mse")
        with pytest.raises(TileMemoryError) as too_large:
            model.fit(np.zeros((8, 300), np.float32), np.zeros((8, 3)), verbose=0)
    assert "(Large.call)" in str(too_large.value.where)


def test_eager_models_run_without_an_ipu_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with strategy().scope():
        model = mlp(run_eagerly=True)
        model.fit(X, Y, verbose=0)
    assert not hasattr(model, "ipu_profile") and "without an IPU: it was compiled with run_eagerly" in caplog.text


def test_two_numbers_of_batches_that_are_accumulated() -> None:
    with strategy().scope():
        for first, second in (("pipelining", "gradient_accumulation"), ("gradient_accumulation", "pipelining")):
            model = mlp(steps_per_execution=4)
            getattr(model, f"set_{first}_options")(2)
            getattr(model, f"set_{first}_options")(4)  # a change of mind
            getattr(model, f"set_{second}_options")(4)
            with pytest.raises(
                ArgumentError, match=rf"expected: 4, as set_{second}_options(.|\n)*got: 2 of set_{first}"
            ):
                getattr(model, f"set_{first}_options")(2)


def test_idle_ipus_are_named_in_words_of_keras_and_once(caplog: pytest.LogCaptureFixture) -> None:
    for replicas, output in ((1, 1), (2, 0)):
        with strategy(2).scope():
            model = mlp(steps_per_execution=2)
            model.set_replication_options(replicas)
            model.fit(X, Y, batch_size=4, verbose=0)
            model.evaluate(X, Y, batch_size=4, verbose=0)
            model.predict(X, batch_size=4, verbose=0)
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == output and all("auto_select_ipus = 1 is enough" in text for text in warnings), warnings
        caplog.clear()


def test_options_of_a_strategy_name_those_of_the_configuration_that_they_replace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = ipu.IPUConfig()
    config.allow_recompute = True
    with ipu.IPUStrategy(config, Options(io_tiles=32)).scope():
        pass
    assert "recompute='none', not 'auto'" in caplog.text and "io_tiles" not in caplog.text


@pytest.mark.parametrize(
    "read",
    [
        lambda config: config.matmuls.poplar_options,
        lambda config: setattr(config.convolutions, "poplar_options", {}),
        lambda config: config.ipu_model.versions,
    ],
)
def test_reading_an_unknown_option_is_the_same_error_as_setting_it(read: Any) -> None:
    with pytest.raises(AttributeError, match=r"IPUConfig(.|\n)* has no option(.|\n)*expected: ") as error:
        read(ipu.IPUConfig())
    assert isinstance(error.value, ArgumentError)
    config = ipu.IPUConfig()
    config.auto_select_ipus = 4
    assert not hasattr(config, "matmuls") and copy.deepcopy(config).auto_select_ipus == 4


def test_attributes_before_a_fit_name_the_remedy() -> None:
    with strategy().scope():
        model = mlp()
        with pytest.raises(AttributeError, match=r"has no ipu_profile(.|\n)*fit, evaluate or predict in"):
            model.ipu_profile  # noqa: B018
        model.set_replication_options(1)
    for name in ("ipu_profile", "ipu_profiles", "ipu_outfeed"):
        assert not hasattr(model, name)
        with pytest.raises(ArgumentError, match=f"has no {name}"):
            getattr(model, name)


@pytest.mark.parametrize(("batches", "has_fewer"), [(4, False), (8, True)])
def test_fewer_steps_are_a_remedy_where_an_execution_has_several_updates(batches: int, has_fewer: bool) -> None:
    settings = ModelSettings(stages=2, accumulation=4)
    remedies = dict(_model_remedies(None, settings, IPUModel(1), batches))
    assert ("steps" in remedies) == has_fewer
