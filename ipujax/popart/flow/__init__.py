"""Data of steps: batches, anchors, arrays and callbacks, weights."""

from ipujax.popart.flow.data_flow import (
    AnchorReturnType as AnchorReturnType,
    AnchorReturnTypeId as AnchorReturnTypeId,
    DataFlow as DataFlow,
    StepShape as StepShape,
)
from ipujax.popart.flow.input_facts import (
    InputSettings as InputSettings,
    InputShapeInfo as InputShapeInfo,
)
from ipujax.popart.flow.step_io import (
    PyStepIO as PyStepIO,
    PyStepIOCallback as PyStepIOCallback,
    PyWeightsIO as PyWeightsIO,
    StepIO as StepIO,
    as_element_type as as_element_type,
)
