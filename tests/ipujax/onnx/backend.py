"""ipujax as a backend of ONNX's own suite, `onnx.backend.test`.

A model runs under `jax.jit` with x64. Inputs that decide shapes, branches or sizes are static, all others traced.
"""

from __future__ import annotations

import unittest
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import onnx
import onnx.backend.base
import onnx.backend.test

import ipujax.onnx
from ipujax.onnx.evaluation import shape_sources
from ipujax.onnx.reading import read_graph

# Cases outside of what ipujax does: patterns of text in the syntax of RE2, encoded images, and random draws without a
# seed that determines them.
EXCLUDED = (
    r"test_regex",
    r"image_decoder",
    r"test_bernoulli",
    r"training_dropout(?!.*zero_ratio)",
)

# Case → reason why it fails.
FAILING: dict[str, str] = {
    "test_dft_inverse": "expects rounding errors of single precision above the tolerance; x64 computes in double",
    "test_dft_inverse_opset19": "as test_dft_inverse",
    "test_loop16_seq_none": "the suite itself compares elements of a sequence by index, and one has no dimension",
}

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
    """Return the names of graph inputs that decide shapes, sizes or branches, or are text."""
    names = set(shape_sources(graph))
    for node in graph.all_nodes():
        if node.op_type in _DECIDING:
            positions = _DECIDING[node.op_type]
            names |= {name for n, name in enumerate(node.inputs) if positions is None or n in positions}
    texts = {info.name for info in graph.inputs if info.dtype is not None and info.dtype.kind == "O"}
    return names & {info.name for info in graph.inputs} | texts


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
            function = jax.jit(model) if model.inputs else model  # text is no result of a traced function
            results = function(model.params, *(values[info.name] for info in model.inputs))
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


def suite_cases() -> dict[str, type[unittest.TestCase]]:
    """Return the classes of ONNX's suite for this backend, by category, without the excluded cases."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the suite computes its expected overflows
        suite = onnx.backend.test.BackendTest(IpuBackend, __name__)
    for pattern in EXCLUDED:
        suite.exclude(pattern)
    return suite.test_cases


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcomes of some cases.

    Args:
        passed: names of cases, without the device.
        failed: name of a case → the last line of its traceback.
    """

    passed: tuple[str, ...]
    failed: dict[str, str]


def run_cases(cases: type[unittest.TestCase], names: Sequence[str]) -> Outcome:
    """Run cases of a class, skipped ones left out."""
    passed = []
    failed = {}
    for name in names:
        result = unittest.TestResult()
        cases(name).run(result)
        faults = [text for _, text in (*result.failures, *result.errors)]
        if faults:
            failed[case_name(name)] = faults[0].strip().splitlines()[-1]
        elif not result.skipped:
            passed.append(case_name(name))
    return Outcome(tuple(passed), failed)


def case_name(name: str) -> str:
    """Return the name of a case without the device."""
    return name.removesuffix("_cpu").removesuffix("_cuda")
