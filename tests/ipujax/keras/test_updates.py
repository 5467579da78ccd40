"""Updates from several batches: accumulation, replicas and stages of Keras models, against stock Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import ipujax.keras as ipu
from ipujax import ArgumentError
from ipujax.keras.device_loop import _read
from ipujax.keras.model_state import settings_of
from ipujax.runtime.errors import ArgumentTypeError
from tests.ipujax.keras.test_strategy import cnn, strategy

RNG = np.random.default_rng(1)
X = RNG.random((48, 10), np.float32)
Y = RNG.integers(0, 4, 48)
BATCH = 4


def mlp() -> keras.Model:
    layers = keras.layers
    inputs = keras.Input((10,))
    x = layers.Dense(12, activation="relu", name="first")(inputs)
    y = layers.Dense(12, activation="tanh", name="second")(x)
    return keras.Model(inputs, layers.Dense(4, activation="softmax", name="third")(x + y))


def staged() -> keras.Model:
    layers = keras.layers
    inputs = keras.Input((10,))
    with ipu.PipelineStage(0):
        x = layers.Dense(12, activation="relu", name="first")(inputs)
    with ipu.PipelineStage(1):
        y = layers.Dense(12, activation="tanh", name="second")(x)
        outputs = layers.Dense(4, activation="softmax", name="third")(x + y)
    return keras.Model(inputs, outputs)


def trained(
    make: Callable[[], keras.Model], set_up: Callable[[Any], None], num_ipus: int, steps: int, epochs: int = 2
) -> tuple[Any, dict[str, list[float]]]:
    with strategy(num_ipus).scope():
        keras.utils.set_random_seed(3)
        model = make()
        set_up(model)
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=steps)
        history = model.fit(X, Y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0).history
        history["predicted"] = model.predict(X, batch_size=BATCH, verbose=0)
        history["scores"] = model.evaluate(X, Y, batch_size=BATCH, verbose=0)
    return model, history


def expected(batches: int) -> dict[str, Any]:
    """As stock Keras has it with one batch in place of several, which is the mean of theirs."""
    keras.utils.set_random_seed(3)
    model = mlp()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(X, Y, batch_size=BATCH * batches, epochs=2, shuffle=False, verbose=0).history
    history["predicted"] = model.predict(X, verbose=0)
    history["scores"] = model.evaluate(X, Y, verbose=0)
    return history


def accumulating(batches: int) -> Callable[[Any], None]:
    return lambda model: model.set_gradient_accumulation_options(batches)


def replicated(replicas: int, batches: int = 1) -> Callable[[Any], None]:
    def set_up(model: Any) -> None:
        model.set_replication_options(replicas)
        model.set_gradient_accumulation_options(batches)

    return set_up


CASES: dict[str, Any] = {
    "accumulation": (mlp, accumulating(3), 1, 3, 3),
    "accumulation in a loop": (mlp, accumulating(2), 1, 6, 2),
    "replicas": (mlp, replicated(2), 2, 2, 2),
    "replicas in a loop": (mlp, replicated(2), 2, 4, 2),
    "replicas that accumulate": (mlp, replicated(2, 3), 2, 6, 6),
    "stages": (staged, accumulating(4), 2, 4, 4),
    "replicas of stages": (staged, replicated(2, 3), 4, 6, 6),
}


@pytest.mark.parametrize("name", CASES)
def test_an_update_from_several_batches_is_that_of_one_large(name: str) -> None:
    make, set_up, num_ipus, steps, batches = CASES[name]
    model, history = trained(make, set_up, num_ipus, steps)
    for key, values in expected(batches).items():
        np.testing.assert_allclose(history[key], values, rtol=2e-5, atol=2e-6, err_msg=key)
    tiles = model.ipu_profile.memory.tile_bytes
    if "stages" in name:  # each on an IPU of its own
        assert all((part > 0).any() for part in np.split(tiles, 2))


def test_an_assignment_is_as_the_scopes() -> None:
    def assigned() -> Any:
        model = mlp()
        stages = {"first": 0, "second": 1, "third": 1}
        names = [layer.name for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
        model.set_pipeline_stage_assignment([stages.get(name, 1) for name in names])
        assert model.get_pipeline_stage_assignment()[0].pipeline_stage == 0
        return model

    with strategy(2).scope():
        one = assigned()
        other = staged()
        stages = [{x.pipeline_stage for x in model.get_pipeline_stage_assignment()} for model in (one, other)]
        assert stages[0] == stages[1]
        one.reset_pipeline_stage_assignment()
        assert {x.pipeline_stage for x in one.get_pipeline_stage_assignment()} == {None}


def test_a_pipeline_runs_as_it_is_set() -> None:
    """Schedules differ in cycles, IPUs can change places, and recomputation takes cycles."""

    def profile(**settings: Any) -> Any:
        model, _ = trained(staged, lambda model: model.set_pipelining_options(4, **settings), 2, 4, epochs=1)
        return model.ipu_profile

    plain = profile(schedule="1f1b")
    one_by_one = profile(schedule="sequential")
    swapped = profile(schedule="1f1b", device_mapping=[1, 0])
    repeated = profile(schedule="1f1b", recompute="all")
    assert one_by_one.cycles > plain.cycles and repeated.cycles > plain.cycles
    halves = np.split(plain.memory.tile_bytes, 2)
    other = np.split(swapped.memory.tile_bytes, 2)
    assert halves[0].sum() < halves[1].sum() and other[0].sum() > other[1].sum()


def test_replicas_draw_their_own_masks_and_share_statistics() -> None:
    """Moving statistics are the mean of those of all replicas, and a seed goes on as that of the first."""
    with strategy(2).scope():
        keras.utils.set_random_seed(5)
        model = cnn()
        model.set_replication_options(2)
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=2)
        x = np.repeat(np.random.default_rng(2).random((8, 12, 12, 1), np.float32)[None], 2, 0).reshape(16, 12, 12, 1)
        before = {v.path: np.asarray(v) for v in model.non_trainable_variables}
        model.fit(x, np.zeros(16, int), batch_size=8, shuffle=False, epochs=1, verbose=0)
        after = {v.path: np.asarray(v) for v in model.non_trainable_variables}
    keras.utils.set_random_seed(5)
    stock = cnn()
    stock.compile("sgd", "sparse_categorical_crossentropy")
    stock.fit(x[:8], np.zeros(8, int), batch_size=8, shuffle=False, epochs=1, verbose=0)
    for variable in stock.non_trainable_variables:
        path = variable.path.split("/", 1)[1] if variable.path not in after else variable.path
        name = next(each for each in after if each.endswith(path.split("/")[-1]))
        np.testing.assert_allclose(after[name], np.asarray(variable), rtol=1e-5)
    assert before.keys() == after.keys()


def test_all_that_steps_log() -> None:
    with strategy().scope():
        model = mlp()
        model.set_outfeed_queue_options("all")
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=3)
        losses = model.fit(X, Y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0).history["loss"]
    assert model.ipu_outfeed["loss"].shape == (3,)
    np.testing.assert_allclose(model.ipu_outfeed["loss"][-1], losses[-1], rtol=1e-6)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_accumulation_that_does_not_divide_the_steps_of_an_execution() -> None:
    with strategy().scope():
        model = mlp()
        model.set_gradient_accumulation_options(4)
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=6)
        with pytest.raises(ArgumentError, match=r"steps_per_execution of (.|\n)*a multiple of 4: 4 accumulated"):
            model.fit(X, Y, batch_size=BATCH, verbose=0)


def test_refuses_an_epoch_with_an_incomplete_update() -> None:
    with strategy().scope():
        model = mlp()
        model.set_gradient_accumulation_options(5)
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=5)
        before = [np.asarray(v) for v in model.variables]
        with pytest.raises(ArgumentError, match=r"the batches of an epoch(.|\n)*try: steps_per_epoch=10"):
            model.fit(X, Y, batch_size=BATCH, verbose=0)
        for one, other in zip(before, model.variables, strict=True):
            np.testing.assert_array_equal(one, np.asarray(other))


def test_too_few_ipus() -> None:
    with strategy(2).scope():
        model = staged()
        model.set_replication_options(2)
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=2)
        with pytest.raises(ArgumentError, match=r"4: 2 replicas of 2 stages(.|\n)*auto_select_ipus = 4"):
            model.fit(X, Y, batch_size=BATCH, verbose=0)


def test_a_train_step_of_its_own_in_replicas() -> None:
    class Custom(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            return super().train_step(state, data)

    with strategy(2).scope():
        model = Custom([keras.Input((10,)), keras.layers.Dense(4, activation="softmax")])
        model.set_replication_options(2)
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=2)
        with pytest.raises(ArgumentError, match="Custom has a train_step of its own"):
            model.fit(X, Y, batch_size=BATCH, verbose=0)


def test_layers_in_a_row_go_to_no_earlier_stage() -> None:
    with strategy(2).scope():
        model = keras.Sequential([keras.Input((6,)), *(keras.layers.Dense(3, name=f"d{n}") for n in range(3))])
        with pytest.raises(ArgumentError, match=r"d2 in stage 1 or a later one, as d1 before it(.|\n)*got: 0"):
            model.set_pipeline_stage_assignment([0, 1, 0])
        assert [x.pipeline_stage for x in model.get_pipeline_stage_assignment()] == [None] * 3


@pytest.mark.parametrize(
    ("use", "output"),
    [
        (lambda m: m.set_pipeline_stage_assignment([0, 1]), "got: 2"),
        (lambda m: m.set_pipeline_stage_assignment([0, 2, 2]), "a layer in stage 1"),
        (lambda m: m.set_gradient_accumulation_options(0), "a whole number from 1"),
        (lambda m: m.set_pipelining_options(4, shedule="gpipe"), "try: 'schedule'"),
        (lambda m: m.set_infeed_queue_options(depth=2), "model.set_infeed_queue_options(prefetch_depth=…)"),
        (lambda m: m.set_gradient_accumulation_options(2, "men"), "'mean'"),
        (lambda m: m.set_replication_options(1.5), "whole number"),
        (lambda m: m.set_pipelining_options(recompute="al"), "'all'"),
        (lambda m: m.set_outfeed_queue_options("first"), "'last'"),
    ],
)
def test_refuses_unknown_settings(use: Callable[[Any], None], output: str) -> None:
    with strategy().scope():
        model = mlp()
        before = settings_of(model)
        with pytest.raises((ArgumentError, ArgumentTypeError)) as error:
            use(model)
        assert output in str(error.value) and settings_of(model) == before


@pytest.mark.parametrize("steps", [1, 2])
def test_batches_are_not_the_arrays_of_a_generator(steps: int) -> None:
    data = np.zeros((2, 3), np.float32)  # filled again for each batch, which the device may read still
    for (batch,) in _read(iter([(data,)] * 2), steps):
        assert not np.shares_memory(batch, data)
