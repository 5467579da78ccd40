"""ipujax as a backend of ONNX's own suite, `onnx.backend.test`.

A model runs under `jax.jit` with x64. Inputs that decide shapes, branches or sizes are static, all others traced.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import onnx.backend.base
import onnx.backend.test

import ipujax.onnx
from ipujax.onnx.evaluation import shape_sources
from ipujax.onnx.reading import read_graph

# Cases outside of what ipujax does: text, another domain, images, and random draws that no seed determines.
EXCLUDED = (
    r"test_(equal_string|regex|string_|strnormalizer)",
    r"ai_onnx_ml",
    r"image_decoder",
    r"test_bernoulli",
    r"training_dropout(?!.*zero_ratio)",
)

# Case → reason why it fails.
FAILING: dict[str, str] = {}

# Operators whose results have sizes that depend on the values of these operands, or that choose a branch by them.
_DECIDING = {
    "Compress": (1,),
    "If": (0,),
    "NonMaxSuppression": None,
    "NonZero": None,
    "SequenceAt": (1,),
    "SequenceErase": (1,),
    "SequenceInsert": (2,),
    "Unique": None,
}


def deciding_inputs(graph: Any) -> set[str]:
    """Return the names of graph inputs that decide shapes, sizes or branches."""
    names = set(shape_sources(graph))
    for node in graph.all_nodes():
        if node.op_type in _DECIDING:
            positions = _DECIDING[node.op_type]
            names |= {name for n, name in enumerate(node.inputs) if positions is None or n in positions}
    return names & {info.name for info in graph.inputs}


class Prepared(onnx.backend.base.BackendRep):
    """A model ready to run."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph = read_graph(model)

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the outputs for inputs in the order of the graph's."""
        with jax.enable_x64(True):
            values = dict(zip([value.name for value in self.model.graph.input], inputs, strict=False))
            static = {name: values[name] for name in deciding_inputs(self.graph)}
            model = ipujax.onnx.load(self.model, static=static)
            results = jax.jit(model)(model.params, *(values[info.name] for info in model.inputs))
            results = results if len(model.outputs) > 1 else (results,)
            return tuple(jax.tree.map(np.asarray, list(x) if isinstance(x, tuple) else x) for x in results)


class IpuBackend(onnx.backend.base.Backend):
    """The backend."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Prepared:
        """Return a model ready to run."""
        return Prepared(model)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return whether cases are run for a device."""
        return device == "CPU"


def backend_test(parent_module: str) -> onnx.backend.test.BackendTest:
    """Return ONNX's suite for this backend, without the excluded cases."""
    suite = onnx.backend.test.BackendTest(IpuBackend, parent_module)
    for pattern in EXCLUDED:
        suite.exclude(pattern)
    return suite
