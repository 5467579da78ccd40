"""What to try when a Keras model does not fit, under the names that Keras' users set.

Input: a `TileMemoryError` with ways of `ipu.jit`. Output: the same error with those that a model and its configuration
have; what cannot be set in Keras is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ipujax.device import IPUModel
from ipujax.keras.settings import ModelSettings
from ipujax.runtime.errors import TileMemoryError
from ipujax.runtime.target import preset

# In place of each way of `ipu.jit`; {} is that way in its own words, "" leaves it out.
_IN_KERAS = {
    "batch": "{}; model.set_gradient_accumulation_options(…) lets an update have as many examples as before",
    "code": "fewer different steps on each IPU: fewer layers, or layers in stages",
    "float16": "{}: dtype of layers, or keras.config.set_dtype_policy",
    "checkpoint": "",  # all gradients are recomputed by the way below
    "recompute": "config.allow_recompute = True, which keeps less of what gradients need",
    "pipelines": 'model.set_pipelining_options(recompute="auto"), which keeps less of what gradients need',
    "io_tiles": "a smaller config.io_tiles.num_io_tiles: I/O tiles take memory from what computes",
    "mapping": "",
    "offload": "",
    "advise": "",
    "machine": "",
    "allow": "IPUStrategy(config, ipujax.Options(allow_out_of_memory=True)) for a profile even so",
}


def in_words_of_keras(
    error: TileMemoryError, model: Any, settings: ModelSettings, device: IPUModel, batches: int
) -> TileMemoryError:
    """The error of a model with what its user can set.

    Args:
        error: of its compiled function.
        model: the Keras model.
        settings: of the function.
        device: the IPUs.
        batches: that a call takes.
    """
    translated = {name: _IN_KERAS.get(name, "{}").format(way) for name, way in error.ways.items()}
    allow = translated.pop("allow", "")
    ways = {**translated, **dict(_of_model(model, settings, device, batches)), "allow": allow}
    return error.with_ways({name: way for name, way in ways.items() if way})


def _of_model(model: Any, settings: ModelSettings, device: IPUModel, batches: int) -> Iterator[tuple[str, str]]:
    """Ways that only Keras' users have."""
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
    whole = preset(target.name).tiles_per_ipu
    if target.tiles_per_ipu < whole:
        yield "tiles", f"config.ipu_model.tiles_per_ipu = 0, for all {whole:,} tiles of the chip"
