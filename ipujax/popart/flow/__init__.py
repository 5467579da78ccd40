"""Data of steps: batches, anchors, arrays and callbacks, weights."""

from ipujax.popart.flow.data_flow import (
    AnchorReturnType as AnchorReturnType,
    AnchorReturnTypeId as AnchorReturnTypeId,
    DataFlow as DataFlow,
    InputSettings as InputSettings,
    InputShapeInfo as InputShapeInfo,
    StepShape as StepShape,
)
from ipujax.popart.flow.step_io import (
    PyStepIO as PyStepIO,
    PyStepIOCallback as PyStepIOCallback,
    PyWeightsIO as PyWeightsIO,
    StepIO as StepIO,
    as_element_type as as_element_type,
)
