"""A graph as a function of JAX arrays.

Nodes are evaluated in order, each under a name scope of its name. A node whose operands are all static is folded: the
operator's own function runs at once, with 64-bit types, and its results become NumPy arrays. So shapes are computed
exactly whatever `jax_enable_x64` says. Large results stay traced, so that no program holds them as constants. Of text,
which JAX has not, positions in a list are moved. All other nodes are traced. Subgraphs are functions that see the
values of the graphs around them.
"""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

import ipujax as ipu
from ipujax.front_end import MadeAt
from ipujax.onnx.budget import MAX_STATIC_ELEMENTS, Budget, SubgraphNodes
from ipujax.onnx.element_types import is_text
from ipujax.onnx.evaluation.graph_facts import dependent_on
from ipujax.onnx.evaluation.saturation import run_narrowed
from ipujax.onnx.graphs import Graph, Node
from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.reading import expanded
from ipujax.onnx.registry import OPERATORS, Operator, as_texts, is_static

# Their results have at most as many elements as the product, or the sum, of those of their operands: what arithmetic on
# shapes is made of. Whatever else may grow is measured by its abstract result.
_BOUNDED_BY_OPERANDS = frozenset({
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Compress", "Concat", "Cos", "CumSum",
    "Div", "Equal", "Exp", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual",
    "Identity", "Less", "LessOrEqual", "Log", "MatMul", "Max", "Mean", "Min", "Mod", "Mul", "Neg", "NonZero", "Not",
    "Or", "Pow", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Round", "ScatterElements", "ScatterND", "SequenceAt",
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "Shape", "Sign", "Sin",
    "Size", "Slice", "Sqrt", "Squeeze", "StringConcat", "StringNormalizer", "StringSplit", "Sub", "Sum", "Transpose",
    "Unsqueeze", "Where", "Xor",
})  # fmt: skip
# They move elements, or compare them, and compute none: of text they have positions in a sorted list.
_MOVING = frozenset({
    "ArrayFeatureExtractor", "CenterCropPad", "Compress", "Concat", "DepthToSpace", "Equal", "Expand", "Flatten",
    "Gather", "GatherElements", "GatherND", "Pad", "Reshape", "ReverseSequence", "ScatterElements", "ScatterND",
    "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unique", "Unsqueeze", "Where",
})  # fmt: skip
_POSITION = np.dtype(np.uint32)  # no operator has other results of this type


def is_foldable(node: Node, operands: Sequence[Any], function: Callable[..., Any]) -> bool:
    """Return whether a node is evaluated at once; one with subgraphs is not: its nodes fold by themselves."""
    is_random = "seed" in (OPERATORS[node.domain, node.op_type].attributes or ())
    if is_random or not is_static(tuple(operands)) or next(node.subgraphs(), None) is not None:
        return False
    sizes = [_elements(operand) for operand in operands]
    if sum(sizes) > MAX_STATIC_ELEMENTS:
        return False
    if node.op_type in _BOUNDED_BY_OPERANDS and math.prod(map(_at_least_one, sizes)) <= MAX_STATIC_ELEMENTS:
        return True
    return _result_elements(function, operands) <= MAX_STATIC_ELEMENTS


def fold(function: Callable[..., Any], operands: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results of an operator as static values."""
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        results = function(*operands)
        return tuple(map(_as_static, results if isinstance(results, tuple) else (results,)))


def moves_text(node: Node, operands: Sequence[Any]) -> bool:
    """Return whether a node moves text, by what is known."""
    return node.op_type in _MOVING and any(map(is_text, operands)) and is_static(tuple(operands))


def numbered(operands: Sequence[Any]) -> tuple[list[Any], np.ndarray]:
    """Return operands with their texts as positions in a sorted list, and the list; 0 is ONNX's default, empty text."""
    texts = [as_texts(x, "text") for x in operands if is_text(x)]
    known = np.unique(np.concatenate([np.asarray([""], object), *map(np.ravel, texts)]))
    positions = iter(np.searchsorted(known, each).astype(_POSITION) for each in texts)
    return [next(positions) if is_text(x) else x for x in operands], known


def with_texts(results: Sequence[Any], known: np.ndarray) -> tuple[Any, ...]:
    """Return static results with positions in the list of `numbered` as texts."""
    # A scalar index picks an element, which is no array.
    return tuple(np.asarray(known[x], object) if x is not None and x.dtype == _POSITION else x for x in results)


def _as_static(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_as_static, value))
    return None if value is None else np.asarray(value)


def _elements(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(map(_elements, value))
    return 0 if value is None else np.size(value)


def _at_least_one(elements: int) -> int:
    return max(elements, 1)


def _result_elements(function: Callable[..., Any], operands: Sequence[Any]) -> int:
    with jax.enable_x64(True):
        shapes = jax.eval_shape(lambda: function(*operands))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


_NOT_IN_SCOPES = re.compile(r"[()\[\]{}\s]+")  # brackets are JAX's own: jvp(…), transpose(…)

# Errors that JAX and NumPy raise for operands of wrong shapes, dtypes and values. Others are faults of an operator.
_OPERAND_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    MemoryError,
    NotImplementedError,
    RecursionError,
)
_TRACES_OF_A_NODE = 8  # assumed: loops nested three deep, each traced twice


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an evaluation.

    Args:
        max_sizes: bounds on sizes that depend on data, by name of a value.
        logged: names of nodes whose saturated operands have been logged.
        budget: bounds on all sizes.
        subgraph_nodes: nodes of subgraphs that this evaluation may still trace; None: any number.
        file: name of the model's file, by which profiles show nodes as lines; empty for the lines of calls.
        override: returns the results of a node, also of subgraphs, that a front end evaluates itself; None of others.
    """

    max_sizes: Mapping[str, int] = field(default_factory=dict)
    logged: set[str] = field(default_factory=set)
    budget: Budget = field(default_factory=Budget)
    subgraph_nodes: SubgraphNodes | None = None
    file: str = ""
    override: Callable[[Node, Sequence[Any]], tuple[Any, ...] | None] | None = None

    def for_evaluation(self, graph: Graph) -> Settings:
        """Return the settings of one evaluation of a graph, which counts the nodes of subgraphs."""
        num_nodes = sum(1 for node in graph.nodes for inner in node.subgraphs() for _ in inner.all_nodes())
        # Loops are traced several times, also those that stay loops.
        limit = _TRACES_OF_A_NODE * num_nodes + self.budget.max_unrolled_nodes
        return replace(self, subgraph_nodes=SubgraphNodes(limit))


def evaluate(graph: Graph, values: Mapping[str, Any], settings: Settings) -> tuple[Any, ...]:
    """Return the outputs of a graph at the newest opset."""
    # `values` are those of inputs, of initialisers that replace its own, and of the graphs around it.
    results_by_name: dict[str, Any] = {name: array for name, array in graph.constants.items() if name not in values}
    scope = ChainMap(results_by_name, dict(values) if not isinstance(values, ChainMap) else values)
    for node in graph.nodes:
        operands = [scope[name] if name else None for name in node.inputs]
        results = run_node(node, operands, scope, settings)
        results_by_name.update(zip(node.outputs, results, strict=False))
    return tuple(scope[output.name] for output in graph.outputs)


def run_node(node: Node, operands: Sequence[Any], scope: Mapping[str, Any], settings: Settings) -> tuple[Any, ...]:
    """Return the results of a node.

    Args:
        node: the node.
        operands: values of its inputs, None for those that are left out.
        scope: values that its subgraphs see.
        settings: bounds.
    """
    entry = OPERATORS.get((node.domain, node.op_type))
    try:
        with ExitStack() as scopes:
            if settings.file:
                scopes.enter_context(MadeAt(f"{settings.file}:{node.name} ({node.op_type})").scope())
            scopes.enter_context(jax.named_scope(_scope_name(node.name)))
            results = _results(entry, node, operands, scope, settings)
            check_sizes(node, results, settings.budget)
            return results
    except OnnxError as error:
        if error.what.startswith("node "):
            raise
        message = f"{node.label}: {error.what}"
        raise type(error)(message, expected=error.expected, got=error.got, hint=error.hint) from error
    except ipu.IpuError:
        raise
    except _OPERAND_ERRORS as error:
        message = f"{node.label} cannot be evaluated on these operands"
        got = f"{', '.join(map(_described, operands))} ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        raise OnnxError(
            message, expected="shapes, dtypes and values that the operator is defined for", got=got
        ) from error


def _results(
    entry: Operator | None, node: Node, operands: Sequence[Any], scope: Mapping[str, Any], settings: Settings
) -> tuple[Any, ...]:
    overridden = None if settings.override is None else settings.override(node, operands)
    if overridden is not None:
        return overridden
    if entry is None:
        return _run_body(node, operands, settings)
    function = _bound(entry, node, operands, scope, settings)
    if moves_text(node, operands):
        positions, texts = numbered(operands)
        if not is_foldable(node, positions, function):
            raise OnnxError("there are too many texts to move", expected=f"at most {MAX_STATIC_ELEMENTS:,}")
        return with_texts(fold(function, positions), texts)
    if is_foldable(node, operands, function):
        return fold(function, operands)
    return as_results(run_narrowed(node, operands, function, settings.logged))


def check_sizes(node: Node, results: Sequence[Any], budget: Budget) -> None:
    """Refuse results that are larger than the budget; elements of sequences are results of other nodes."""
    for name, value in zip(node.outputs, results, strict=False):
        if hasattr(value, "shape"):
            budget.check(value.shape, value.dtype, f"{node.label}: result {name!r}")


def as_results(value: Any) -> tuple[Any, ...]:
    """Return the results of an operator as a tuple: those that are one value, too."""
    return value if isinstance(value, tuple) else (value,)


def _run_body(node: Node, operands: Sequence[Any], settings: Settings) -> tuple[Any, ...]:
    types = [None if x is None else (np.dtype(x.dtype), tuple(x.shape)) for x in operands]
    graph = expanded(node, types)
    present = [x for x in operands if x is not None]
    names = [info.name for info in graph.inputs]
    inner = replace(settings, file="")  # its nodes are not of the file
    results = iter(evaluate(graph, dict(zip(names, present, strict=True)), inner))
    return tuple(next(results) if name else None for name in node.outputs)


def _bound(
    entry: Operator, node: Node, operands: Sequence[Any], scope: Mapping[str, Any], settings: Settings
) -> Callable[..., Any]:
    """Return the operator as a function of its operands alone."""
    _check_signature(entry, node, operands)
    keywords = {name: _bound_attribute(value, scope, settings) for name, value in node.attributes.items()}
    facts_of_node: Mapping[str, Callable[[], Any]] = {
        "output_count": lambda: len(node.outputs),
        "output_dtypes": lambda: node.output_dtypes,
        "max_sizes": lambda: tuple((name, settings.max_sizes.get(name)) for name in node.outputs),
        "node_name": lambda: node.name,
        "budget": lambda: settings.budget,
    }
    keywords |= {name: facts_of_node[name]() for name in entry.node_facts}
    return lambda *operands: entry(*operands, **keywords)


def _bound_attribute(value: Any, scope: Mapping[str, Any], settings: Settings) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], Graph):
        return [Subgraph(graph, scope, settings) for graph in value]
    return Subgraph(value, scope, settings) if isinstance(value, Graph) else value


def _check_signature(entry: Operator, node: Node, operands: Sequence[Any]) -> None:
    unknown = sorted(
        set(node.attributes) - (entry.attributes if entry.attributes is not None else set(node.attributes))
    )
    if unknown:
        expected = f"one of {', '.join(sorted(entry.attributes or ()))}"
        raise OnnxError(f"{node.label} has an attribute {unknown[0]!r} that is not implemented", expected=expected)
    missing = sorted(entry.required_attributes - set(node.attributes))
    if missing:
        message = f"{node.label} has no attribute {missing[0]!r}"
        raise OnnxError(message, expected=f"{', '.join(missing)}", got=f"{', '.join(node.attributes) or 'none'}")
    if len(operands) < entry.required_inputs:
        message = f"{node.label} has too few inputs"
        raise OnnxError(message, expected=f"at least {entry.required_inputs}", got=len(operands))
    if entry.max_inputs is not None and len(operands) > entry.max_inputs:
        message = f"{node.label} has too many inputs"
        raise OnnxError(message, expected=f"at most {entry.max_inputs}", got=len(operands))


@dataclass(frozen=True, slots=True, eq=False)
class Subgraph:
    """A subgraph of a node as a function of its inputs, with the values around it.

    Args:
        graph: the subgraph.
        scope: values of the graphs around it.
        settings: bounds.
    """

    graph: Graph
    scope: Mapping[str, Any]
    settings: Settings

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Return the subgraph's outputs."""
        if self.settings.subgraph_nodes is not None:
            self.settings.subgraph_nodes.spend(1 + len(self.graph.nodes))
        scope = ChainMap(self._named(inputs), *_maps(self.scope))
        return evaluate(self.graph, scope, self.settings)

    def _named(self, inputs: Sequence[Any]) -> dict[str, Any]:
        return dict(zip((info.name for info in self.graph.inputs), inputs, strict=True))

    def are_decided(self, *inputs: Any) -> list[bool]:
        """Return of each output whether static values alone decide it, whatever they are."""
        scope = {**self.scope, **self._named(inputs)}
        dependent = dependent_on(self.graph.nodes, [name for name, value in scope.items() if not is_static(value)])
        return [output.name not in dependent for output in self.graph.outputs]

    def with_outputs(self, positions: Sequence[int]) -> Subgraph:
        """Return the subgraph with some of its outputs, and the nodes that compute these."""
        outputs = tuple(self.graph.outputs[n] for n in positions)
        needed = {output.name for output in outputs}
        nodes = []
        for node in reversed(self.graph.nodes):
            if not needed.isdisjoint(node.outputs):
                nodes.append(node)
                needed |= node.names_read()
        return replace(self, graph=replace(self.graph, nodes=tuple(reversed(nodes)), outputs=outputs))


def _maps(scope: Mapping[str, Any]) -> list[Any]:
    return list(scope.maps) if isinstance(scope, ChainMap) else [scope]


def _scope_name(name: str) -> str:
    parts = [_NOT_IN_SCOPES.sub("_", part) for part in name.split("/") if part.strip()]
    return "/".join(parts) or "node"


def _described(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else type(value).__name__
