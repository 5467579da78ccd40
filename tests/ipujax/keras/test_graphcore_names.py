"""Names that programs for Graphcore's Keras use: each has its effect, or is refused or warned of by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras as stock_keras
import numpy as np
import pytest

import ipujax
import ipujax.keras as ipu
from ipujax import ArgumentError
from ipujax.keras import keras
from ipujax.keras.model_state import settings_of
from ipujax.keras.ops.pipelining_ops import PipelineSchedule
from ipujax.keras.stage_assignment import get_pipeline_stage_assignment, set_pipeline_stage_assignment
from tests.ipujax.keras.staged_models import Subclassed
from tests.ipujax.keras.test_strategy import strategy


def small(batch: int | None = None) -> Any:
    inputs = keras.Input((4,), batch_size=batch)
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(keras.layers.Dense(4, name="hidden")(inputs)))


def test_keras_has_graphcores_names_beside_its_own() -> None:
    assert keras.layers is stock_keras.layers and keras.ipu is ipu
    assert keras.ipu.PipelineStage is ipu.keras.PipelineStage is ipu.PipelineStage
    assert {"ops", "utils", "keras"} <= set(dir(ipu)) and {"ipu", "Model"} <= set(dir(keras))


def test_schedules_are_those_of_pipelines(caplog: pytest.LogCaptureFixture) -> None:
    with strategy(2).scope():
        model = small()
        for schedule in ipu.ops.pipelining_ops.PipelineSchedule:
            model.set_pipelining_options(4, pipeline_schedule=schedule)
            assert settings_of(model).schedule.name == schedule.name.lower()
        with pytest.raises(ArgumentError, match=r"two schedules(.|\n)*schedule= or pipeline_schedule="):
            model.set_pipelining_options(pipeline_schedule=PipelineSchedule.Grouped, schedule="1f1b")
        model.set_outfeed_queue_options(buffer_depth=2)
    assert "buffer_depth=2 of set_outfeed_queue_options has no effect" in caplog.text


def test_assignments_are_those_of_calls() -> None:
    model = Subclassed(False)
    model(np.ones((28, 10), np.float32))
    assignments = get_pipeline_stage_assignment(model)
    calls = [(x.layer.name, x.node_index) for x in assignments[:6]]
    assert calls == [
        ("a", 0),
        *(("b", n) for n in range(4)),
        ("c", 0),
    ]
    for assignment, stage in zip(assignments, (0, 1, 1, 2, 2, 2, 3), strict=True):
        assignment.pipeline_stage = stage
    set_pipeline_stage_assignment(model, assignments)
    assert [x.pipeline_stage for x in get_pipeline_stage_assignment(model)] == [0, 1, 1, 2, 2, 2, 3]
    for wrong, output in (
        (assignments[:3], "an entry for each call of a layer"),
        (assignments[::-1], "in the order of get_pipeline_stage_assignment"),
        ([0, *assignments[1:]], "numbers and assignments"),
    ):
        with pytest.raises(ArgumentError, match=output):
            set_pipeline_stage_assignment(model, wrong)


def test_earlier_programs_configure_ipus_by_functions() -> None:
    config = ipu.utils.create_ipu_config()
    config = ipu.utils.auto_select_ipus(config, 4)
    ipu.utils.configure_ipu_system(ipu.utils.set_recomputation_options(config))
    assert ipu.IPUStrategy().device.target.num_ipus == ipu.utils.get_num_of_ipus_in_device() == 4
    assert config.options.recompute == "auto" and ipu.utils.running_on_ipu_model()
    config.device_connection.type = ipu.config.DeviceConnectionType.ON_DEMAND
    config.device_connection.enable_remote_buffers = True
    ipu.utils.reset_ipu_configuration()


@pytest.mark.parametrize(
    ("use", "output"),
    [
        (
            lambda c: setattr(c.device_connection, "type", ipu.config.DeviceConnectionType.NEVER),
            "device_connection.type",
        ),
        (lambda c: setattr(c.device_connection, "enable_remote_buffers", False), "enable_remote_buffers must be True"),
        (lambda c: setattr(c.device_connection, "version", "ipu2"), "has no option 'version'"),
        (lambda c: ipu.utils.create_ipu_config(profiling=True), r"'profiling'(.|\n)*model.ipu_profile"),
        (lambda c: ipu.utils.auto_select_ipus("config", 2), "needs a configuration"),
        (lambda c: small().export_for_ipu_serving("x"), "batch size of"),
        (lambda c: small(1).export_for_ipu_serving("x", preprocessing_step=abs), "preprocessing_step"),
    ],
)
def test_options_without_effect_are_refused(use: Callable[[Any], Any], output: str) -> None:
    with pytest.raises(ipujax.IpuError, match=output):
        use(ipu.IPUConfig())


def test_exported_models_predict(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((2, 4), np.float32)
    config = strategy(2)._config
    assert config is not None
    config.configure_ipu_system()
    with ipu.IPUStrategy().scope():
        model = small(2)
        model.set_pipeline_stage_assignment([0, 1])
    program = model.export_for_ipu_serving(tmp_path / "exported")
    for exported in (program, ipujax.load(tmp_path / "exported" / "model.ipujax")):
        np.testing.assert_allclose(exported(x), model(x), rtol=1e-5)
    assert len(program.profile.memory.tile_bytes) == 16
    ipu.config.reset_ipu_configuration()
