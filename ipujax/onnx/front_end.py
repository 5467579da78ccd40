"""Names of this package for a front end that stands on it, `ipujax.popart`, beside the public ones of `ipujax.onnx`.

graphs_of, replace_nodes   rewriting of models before they are read
onnx_step             calls of ONNX itself, with errors of this form
read_graph, Graph, Node   a model as nodes in order, at the newest opset
check_operators, shape_sources   refusal of unknown operators, and the values that decide shapes
Settings, run_node, is_static   evaluation node by node, where each may have a scope of its own
OPERATORS, STANDARD_DOMAIN   the table of operators
in_iteration, key_in_iteration   keys of operators that draw numbers in loops
narrowed, sides_of, sides_beyond, Saturated, REMEDY   numbers that 32 bits do not hold
"""

from ipujax.onnx.element_types import (
    REMEDY as REMEDY,
    Saturated as Saturated,
    narrowed as narrowed,
    sides_beyond as sides_beyond,
    sides_of as sides_of,
)
from ipujax.onnx.evaluation import (
    Settings as Settings,
    check_operators as check_operators,
    shape_sources as shape_sources,
)
from ipujax.onnx.evaluation.evaluate import run_node as run_node
from ipujax.onnx.graphs import Graph as Graph, Node as Node
from ipujax.onnx.iterations import in_iteration as in_iteration, key_in_iteration as key_in_iteration
from ipujax.onnx.reading import (
    graphs_of as graphs_of,
    onnx_step as onnx_step,
    read_graph as read_graph,
    replace_nodes as replace_nodes,
)
from ipujax.onnx.registry import OPERATORS as OPERATORS, STANDARD_DOMAIN as STANDARD_DOMAIN, is_static as is_static
