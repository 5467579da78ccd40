"""Models as sessions evaluate them: annotated graphs, their placement, and their values."""

from ipujax.popart.model_graph.annotated_graph import (
    AnnotatedGraph as AnnotatedGraph,
    annotated_graph as annotated_graph,
    tensor_names as tensor_names,
)
from ipujax.popart.model_graph.evaluation import Evaluation as Evaluation, evaluate_graph as evaluate_graph
from ipujax.popart.model_graph.gradient_paths import (
    missing_pattern as missing_pattern,
    names_with_gradients as names_with_gradients,
)
from ipujax.popart.model_graph.graph_texts import dot_text as dot_text, ir_text as ir_text
from ipujax.popart.model_graph.overridden_operators import RANDOM_OPERATORS as RANDOM_OPERATORS
from ipujax.popart.model_graph.product_settings import (
    common_settings as common_settings,
    partials_of as partials_of,
)
from ipujax.popart.model_graph.stage_placement import (
    Placement as Placement,
    pipeline_settings as pipeline_settings,
    placement_of as placement_of,
)
