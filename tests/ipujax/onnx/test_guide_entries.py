"""Every operator of PopART's user guide, at the version that the guide lists, against other implementations."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx.reference
import onnxruntime
import pytest

import ipujax.onnx
from tests.ipujax.onnx.guide_cases import CASES, ENTRIES, Case


def test_all_entries_have_a_case():
    assert len(ENTRIES) == 152 and sorted(ENTRIES) == sorted(CASES)


def oracle(case: Case, model: Any) -> tuple[str, list[np.ndarray]]:
    """Return the results of onnxruntime, of NumPy where the case has its formula, else of `onnx.reference`."""
    feeds = {f"x{n}": case.inputs[n] for n in case.traced}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return "onnxruntime", session.run(None, feeds)
    except Exception as error:  # onnxruntime's errors have no common base
        assert type(error).__module__.startswith("onnxruntime"), error
    if case.expected is not None:
        results = case.expected(*case.inputs)
        return "numpy", list(results) if isinstance(results, tuple) else [results]
    return "onnx.reference", onnx.reference.ReferenceEvaluator(model).run(None, feeds)


@pytest.mark.parametrize("entry", ENTRIES)
def test_entry_equals_the_oracle(entry):
    case = CASES[entry]
    model = case.model(entry)
    _, expected = oracle(case, model)
    with jax.enable_x64(True):
        loaded = ipujax.onnx.load(model)
        traced = {f"x{n}": case.inputs[n] for n in case.traced}
        results = jax.jit(loaded)(loaded.params, *(traced[value.name] for value in loaded.inputs))
    for got, want in zip(jax.tree.leaves(results), expected, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
