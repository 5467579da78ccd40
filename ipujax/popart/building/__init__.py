"""Models of PopART's `Builder`: operations, annotations, names."""

from ipujax.popart.building.builder import Builder as Builder
from ipujax.popart.building.builder_operations import (
    DEFAULT_OPSET as DEFAULT_OPSET,
    DOMAIN as DOMAIN,
    GRAPHCORE_OPERATIONS as GRAPHCORE_OPERATIONS,
    NEWEST_OPSET as NEWEST_OPSET,
    OLDEST_OPSET as OLDEST_OPSET,
    onnx_operations as onnx_operations,
)
from ipujax.popart.building.models import (
    read_model as read_model,
    save_externally as save_externally,
    tensor_proto as tensor_proto,
    variable_settings_of as variable_settings_of,
    weights_of as weights_of,
)
from ipujax.popart.building.operation_calls import DebugContext as DebugContext
from ipujax.popart.building.opsets import AiGraphcore as AiGraphcore
from ipujax.popart.building.plain_models import (
    Annotations as Annotations,
    detach_annotations as detach_annotations,
    use_strided_groups as use_strided_groups,
)
