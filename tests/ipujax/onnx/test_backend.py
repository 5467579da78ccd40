"""ONNX's own suite: every node case that is not excluded, all cases made by PyTorch, and which of them fail and why."""

from __future__ import annotations

import functools
import unittest

import pytest

from tests.ipujax.onnx.backend import FAILING, Outcome, case_name, run_cases, suite_cases

NODE_CASES = 1862  # of onnx 1.23.2, without 22 excluded ones
PYTORCH_CASES = {"OnnxBackendPyTorchConvertedModelTest": 82, "OnnxBackendPyTorchOperatorModelTest": 35}
MAX_FAILING = 18
SHARDS = 12
SAMPLE_STEP = 150  # every 150th case in the fast sample

cases = functools.cache(suite_cases)


def names_of(category: str) -> list[str]:
    """Return the names of all cases of a category for the CPU, without those that are excluded."""
    names = unittest.defaultTestLoader.getTestCaseNames(cases()[category])
    skipped = {name for name in names if getattr(getattr(cases()[category], name), "__unittest_skip__", False)}
    return [name for name in names if name.endswith("_cpu") and name not in skipped]


def check(outcome: Outcome) -> None:
    """Compare failures with the table."""
    assert not set(outcome.failed) - set(FAILING), outcome.failed
    assert not set(outcome.passed) & set(FAILING)


def test_all_cases_are_counted():
    names = names_of("OnnxBackendNodeModelTest")
    assert len(names) == NODE_CASES
    assert {category: len(names_of(category)) for category in PYTORCH_CASES} == PYTORCH_CASES
    assert set(FAILING) <= set(map(case_name, names)) and len(FAILING) <= MAX_FAILING
    assert all(FAILING.values())


@pytest.mark.parametrize("category", ["OnnxBackendNodeModelTest", *PYTORCH_CASES])
def test_sample_of_cases(category):
    check(run_cases(cases()[category], names_of(category)[::SAMPLE_STEP]))


@pytest.mark.parametrize("shard", range(SHARDS))
def test_node_cases(shard):
    check(run_cases(cases()["OnnxBackendNodeModelTest"], names_of("OnnxBackendNodeModelTest")[shard::SHARDS]))


@pytest.mark.parametrize("category", PYTORCH_CASES)
def test_pytorch_cases(category):
    outcome = run_cases(cases()[category], names_of(category))
    assert not outcome.failed and len(outcome.passed) == PYTORCH_CASES[category]


def test_simple_cases():
    check(run_cases(cases()["OnnxBackendSimpleModelTest"], names_of("OnnxBackendSimpleModelTest")))
