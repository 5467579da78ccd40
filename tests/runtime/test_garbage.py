"""Number of garbage collections during a compilation."""

from __future__ import annotations

import gc
import logging
from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax import poplar
from ipujax.runtime.garbage import collecting_rarely


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    usual = (700, 10, 10)
    gc.set_threshold(*usual)
    yield usual
    gc.set_threshold(*before)


def test_the_threshold_is_raised_and_restored(thresholds):
    with collecting_rarely():
        assert gc.get_threshold()[0] > thresholds[0] and gc.get_threshold()[1:] == thresholds[1:]
        raised = gc.get_threshold()
        with collecting_rarely():
            assert gc.get_threshold() == raised
        assert gc.get_threshold() == raised
    assert gc.get_threshold() == thresholds


def test_the_threshold_is_restored_after_an_error(thresholds):
    with pytest.raises(ValueError, match="of the user"), collecting_rarely():
        raise ValueError("of the user")
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("youngest", [0, 1_000_000])
def test_thresholds_of_a_disabled_or_rarer_collector_stay(thresholds, youngest):
    gc.set_threshold(youngest, 5, 7)
    with collecting_rarely():
        assert gc.get_threshold() == (youngest, 5, 7)
    assert gc.get_threshold() == (youngest, 5, 7)


class Thresholds(logging.Handler):
    """Notes the threshold whenever a step of a compilation ends, by module."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: defaultdict[str, set[int]] = defaultdict(set)

    def emit(self, record: logging.LogRecord) -> None:
        self.seen[record.name].add(gc.get_threshold()[0])


@pytest.fixture
def steps():
    handler = Thresholds()
    log = logging.getLogger("ipujax")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.seen
    log.removeHandler(handler)
    log.setLevel(level)


def test_functions_are_compiled_with_fewer_collections(thresholds, steps):
    ipu.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((4, 4), jnp.float32)).compile()
    for module in ("jit", "passes", "lowering", "compile"):
        seen = steps[f"ipujax.{module}"]
        assert seen and min(seen) > thresholds[0], module
    assert gc.get_threshold() == thresholds


def test_engines_are_compiled_with_fewer_collections(thresholds, steps):
    graph = poplar.Graph(poplar.IPUModel(tiles_per_ipu=2).create_device().get_target())
    poplar.Engine(graph, poplar.program.Sequence())
    assert min(steps["ipujax.compile"]) > thresholds[0] and gc.get_threshold() == thresholds
