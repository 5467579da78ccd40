"""Remedies for a Keras model that does not fit, in the names of Keras' options.

Input: a `TileMemoryError` with the remedies of `ipu.jit`. Output: that error with the remedies that a model and its
configuration have; those without an option in Keras are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ipujax as ipu
from ipujax.front_end import CHIP_NAMES
from ipujax.keras.model_state.settings import ModelSettings

# Text by remedy of `ipu.jit`: {} is the text of `ipu.jit`, "" leaves the remedy out. Remedies that are not listed keep
# their text.
_IN_KERAS = {
    "batch": "{}; model.set_gradient_accumulation_options(…) lets an update have as many examples as before",
    "code": "fewer different steps on each IPU: fewer layers, or layers in stages",
    "float16": "{}: dtype of layers, or keras.config.set_dtype_policy",
    "checkpoint": "",  # "recompute" below is of all gradients
    "recompute": "config.allow_recompute = True, which keeps less of what gradients need",
    "pipelines": 'model.set_pipelining_options(recompute="auto"), which keeps less of what gradients need',
    "io_tiles": "a smaller config.io_tiles.num_io_tiles: I/O tiles take memory from what computes",
    "mapping": "",
    "offload": "",
    "advise": "",
    "machine": "",
    "allow": "IPUStrategy(config, ipujax.Options(allow_out_of_memory=True)) for a profile even so",
}


def with_keras_remedies(
    error: ipu.TileMemoryError, model: Any, settings: ModelSettings, device: ipu.IPUModel, batches: int
) -> ipu.TileMemoryError:
    """Return the error of a compiled Keras model with remedies in the words of Keras and its strategy."""
    translated = {name: _IN_KERAS.get(name, "{}").format(way) for name, way in error.ways.items()}
    allow = translated.pop("allow", "")  # the last resort comes last
    ways = {**translated, **dict(_model_remedies(model, settings, device, batches)), "allow": allow}
    return error.with_ways({name: way for name, way in ways.items() if way})


def _model_remedies(
    model: Any, settings: ModelSettings, device: ipu.IPUModel, batches: int
) -> Iterator[tuple[str, str]]:
    """Yield name and text of remedies that only Keras models have."""
    updates = batches // settings.batches_of_update
    if updates > 1:
        fewer = f"steps_per_execution={settings.batches_of_update}"
        yield "steps", f"model.compile(..., {fewer}): all {batches} batches of an execution are on the chip at once"
    if settings.stages < 2:
        yield (
            "stages",
            "layers on several IPUs: PipelineStage, or model.set_pipeline_stage_assignment, "
            "config.auto_select_ipus, and model.set_pipelining_options(…) for how the pipeline runs",
        )
    target = device.target
    chip_tiles = ipu.IPUModel(arch=CHIP_NAMES[target.name]).target.tiles_per_ipu
    if target.tiles_per_ipu < chip_tiles:
        yield "tiles", f"config.ipu_model.tiles_per_ipu = 0, for all {chip_tiles:,} tiles of the chip"
