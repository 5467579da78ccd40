"""Stages that are named inside of calls, wherever: the numbers are those of stock Keras, and IPUs those asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest

import ipujax.keras as ipu
from ipujax import ArgumentError
from ipujax.keras.layer_stages import with_stages
from ipujax.keras.model_state import ModelSettings
from ipujax.keras.stage_assignment import get_pipeline_stage_assignment
from tests.ipujax.keras.staged_models import MODELS, Blocks, Subclassed, classifier, scope
from tests.ipujax.keras.test_strategy import strategy

RNG = np.random.default_rng(4)
X = RNG.random((28, 10), np.float32)
Y = RNG.integers(0, 3, 28)
# the last batch but one is evaluated and predicted alone
BATCH = 4
ACCUMULATED = 3
ROWS = 24


def stages_of(model: Any) -> list[int | None]:
    return [assignment.pipeline_stage for assignment in get_pipeline_stage_assignment(model)]


def used(model: Any, steps: int, batch: int) -> dict[str, Any]:
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=steps)
    history: dict[str, Any] = model.fit(X[:ROWS], Y[:ROWS], batch_size=batch, shuffle=False, verbose=0).history
    return {
        **history,
        "scores": model.evaluate(X[:26], Y[:26], batch_size=BATCH, verbose=0),
        "predicted": model.predict(X[:26], batch_size=BATCH, verbose=0),
    }


def check_runs(
    make: Callable[[bool], Any], num_ipus: int, steps: int = ACCUMULATED, replicas: int = 1, **settings: Any
) -> Any:
    """A model trains, is evaluated and predicts as in stock Keras; the model with stages."""
    results = []
    for is_staged in (False, True):
        with strategy(num_ipus).scope() if is_staged else nullcontext():
            keras.utils.set_random_seed(6)
            model = make(is_staged)
            if is_staged:
                model.set_pipelining_options(ACCUMULATED, **settings)
                model.set_replication_options(replicas)
            full = BATCH * ACCUMULATED * replicas
            results.append(used(model, steps, BATCH) if is_staged else used(model, 1, full))
    for key, values in results[0].items():
        np.testing.assert_allclose(results[1][key], values, rtol=2e-5, atol=2e-6, err_msg=key)
    return model


def bytes_of_ipus(model: Any, num_ipus: int, kind: str = "train") -> list[int]:
    return [int(part.sum()) for part in np.split(model.ipu_profiles[kind].memory.tile_bytes, num_ipus)]


@pytest.mark.parametrize("name", MODELS)
def test_stages_anywhere_are_a_pipeline_with_the_numbers_of_stock_keras(name: str) -> None:
    make, stages = MODELS[name]
    model = check_runs(make, 4)
    for kind in ("train", "test", "predict"):
        actual = bytes_of_ipus(model, 4, kind)
        assert min(actual[:stages]) > max([0, *actual[stages:]]), (kind, actual)


@pytest.mark.parametrize("name", MODELS)
def test_stages_are_found_anywhere(name: str) -> None:
    make, stages = MODELS[name]
    with strategy(4).scope():
        model = make(True)
        model.compile("sgd", "sparse_categorical_crossentropy")
        model(X)
        state = ([v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables])
        actual = with_stages(model, "predict", ModelSettings(), strategy(4).device, state, (X,))
    assert (actual.stages, actual.device_mapping) == (stages, tuple(range(stages)))


def test_several_updates_of_an_execution_stay_a_pipeline_on_the_ipus_that_are_mapped() -> None:
    """Six batches in a call of Keras are two pipelines, of four stages on two IPUs."""
    model = check_runs(Subclassed, 2, steps=2 * ACCUMULATED, device_mapping=[0, 1, 1, 0])
    assert len(model.ipu_profile.memory.tile_bytes) == 16 and min(bytes_of_ipus(model, 2)) > 0
    assert stages_of(model) == [0, 1, 1, 2, 2, 2, 3]


def test_replicas_of_stages_in_calls() -> None:
    model = check_runs(MODELS["a lambda"][0], 4, steps=2 * ACCUMULATED, replicas=2)
    assert model.ipu_profile.memory.tile_bytes.size == 16  # of one replica


def fitted(make: Callable[[], Any], num_ipus: int = 4, steps: int = ACCUMULATED, **settings: Any) -> Any:
    """A model that is fitted with settings of its pipeline."""
    with strategy(num_ipus).scope():
        model = make()
        if settings:
            model.set_pipelining_options(**settings)
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=steps)
        model.fit(X[:ROWS], Y[:ROWS], batch_size=BATCH, verbose=0)
    return model


def accumulating(**settings: Any) -> dict[str, Any]:
    return {"gradient_accumulation_steps_per_replica": ACCUMULATED, **settings}


def test_stages_share_a_layer_with_state_where_nothing_is_accumulated() -> None:
    """Numbers of a dropout are drawn in one stage, and go on in the next."""

    def use(is_staged: bool) -> list[float]:
        keras.utils.set_random_seed(3)
        dropout = keras.layers.Dropout(0.5, seed=1)
        inputs = keras.Input((10,))
        with scope(0, is_staged):
            x = dropout(inputs)
        with scope(1, is_staged):
            outputs = classifier()(dropout(x))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "sparse_categorical_crossentropy")
        losses: list[float] = model.fit(X[:8], Y[:8], batch_size=4, shuffle=False, verbose=0).history["loss"]
        return losses

    with strategy(2).scope():
        staged = use(True)
    np.testing.assert_allclose(staged, use(False), rtol=1e-5)


def test_layers_tell_their_stages() -> None:
    with strategy(4).scope():
        model = Subclassed(True)
        lines = list[str]()
        model(X)
        assert stages_of(model) == [0, 1, 1, 2, 2, 2, 3]
        model.print_pipeline_stage_assignment_summary(print_fn=lines.append)
        assert lines[2].split() == ["subclassed/b", "Dense", "1,", "2"]
        model.reset_pipeline_stage_assignment()
        assert stages_of(model) == [0, 1, 1, 2, 2, 2, 3]  # scopes inside its call remain
        plain = Subclassed(False)
        plain.set_pipeline_stage_assignment([0, 1, 1, 2])
        assert stages_of(plain) == [0, 1, 1, 2]


def test_warns_of_unknown_stages_of_a_model_that_was_not_called(caplog: pytest.LogCaptureFixture) -> None:
    with strategy(4).scope():
        assert stages_of(Subclassed(True)) == [None] * 4
    assert "no layer of subclassed is known to be in a stage" in caplog.text


# --- bad input --------------------------------------------------------------------------------------------------------


def inside_of_another() -> Any:
    inputs = keras.Input((10,))
    with ipu.PipelineStage(0):
        x = Blocks(True)(inputs)
    return keras.Model(inputs, classifier()(x))


def assigned_to_another() -> Any:
    model = keras.Sequential([keras.Input((10,)), Blocks(True), classifier()])
    model.set_pipeline_stage_assignment([0, 1])
    return model


@pytest.mark.parametrize(
    ("make", "settings", "output"),
    [
        (lambda: Subclassed(True, (0, 2, 2, 3)), accumulating(), r"in stage 1, but(.|\n)*got: stages 0, 2, 3"),
        (lambda: Subclassed(True, (1, 0, 2, 3)), accumulating(), "a value of stage 1 flows back to stage 0"),
        (lambda: Subclassed(True, (1, 1, 2, 3)), accumulating(), "has no operations in stage 0"),
        (lambda: Subclassed(True, (0, 1, 2, -1)), accumulating(), r"PipelineStage needs(.|\n)*got: -1"),
        (lambda: Subclassed(True), accumulating(device_mapping=[0, 1]), "an IPU, from 0, for each of 4 stages"),
        (
            lambda: Subclassed(True),
            accumulating(device_mapping=[0, 1, 2, 4]),
            "5: 1 replicas of 4 stages",
        ),
        (inside_of_another, accumulating(), r"is inside of another stage(.|\n)*stage 0, as PipelineStage\(0\)"),
        (assigned_to_another, accumulating(), r"stage 0, as the layer blocks(.|\n)*None for a layer with stages"),
        (lambda: Subclassed(False), accumulating(device_mapping=[0]), "is for stages, and subclassed has none"),
        (lambda: Subclassed(False), accumulating(schedule="grouped"), "schedule='grouped'"),
        (lambda: Subclassed(False), {"recompute": "auto"}, "config.allow_recompute"),
    ],
)
def test_stages_that_make_no_sense_are_refused(make: Callable[[], Any], settings: Any, output: str) -> None:
    with pytest.raises(ArgumentError, match=output):
        fitted(make, **settings)


def test_more_stages_than_ipus_are_refused_before_anything_runs() -> None:
    with strategy(2).scope():
        model = Subclassed(True)
        model.compile("sgd", "sparse_categorical_crossentropy")
        model(X)
        before = [np.asarray(v) for v in model.variables]
        output = r"replicas of 4 stages(.|\n)*auto_select_ipus = 4(.|\n)*device_mapping=\["
        for use in (lambda: model.fit(X, Y, verbose=0), lambda: model.predict(X, verbose=0)):
            with pytest.raises(ArgumentError, match=output):
                use()
    for one, other in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(one, np.asarray(other))


def test_options_without_stages_and_stages_without_accumulation_are_named(caplog: pytest.LogCaptureFixture) -> None:
    fitted(lambda: Subclassed(False), 1, **accumulating())
    assert "subclassed has no stages: set_pipelining_options makes it accumulate 3 batches on one IPU" in caplog.text
    caplog.clear()
    model = fitted(blocks_in_a_row, 2, schedule="1f1b", device_mapping=[1, 0])
    assert "the 2 stages of row work one after the other" in caplog.text and "'1f1b' has no effect" in caplog.text
    assert model.ipu_profile.memory.tile_bytes.shape == (16,)


def blocks_in_a_row() -> Any:
    return keras.Sequential([keras.Input((10,)), Blocks(True), classifier()], name="row")


def test_a_layer_of_its_own_stages_has_none_in_an_assignment() -> None:
    with strategy(2).scope():
        model = blocks_in_a_row()
        model.set_pipeline_stage_assignment([None, 1])
        assert stages_of(model) == [None, 1]
