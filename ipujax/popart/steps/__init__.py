"""Steps of sessions as JAX functions, compiled for a device."""

from ipujax.popart.steps.anchor_names import (
    Anchors as Anchors,
    anchors_of as anchors_of,
    base_names as base_names,
    state_of as state_of,
)
from ipujax.popart.steps.runner import Runner as Runner, as_device_values as as_device_values
from ipujax.popart.steps.step_plan import KEY as KEY, StepPlan as StepPlan
from ipujax.popart.steps.training_step import DEFAULT_VALUES as DEFAULT_VALUES
