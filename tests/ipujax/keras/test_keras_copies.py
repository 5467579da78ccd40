"""Configurations and strategies can be copied and pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import keras
import pytest

import ipujax
import ipujax.keras as ipu
from tests.ipujax.copy_checks import WAYS, check_copy, classes_not_in


def config() -> ipu.IPUConfig:
    changed = ipu.IPUConfig()
    changed.auto_select_ipus = 2
    changed.ipu_model.tiles_per_ipu = 4
    return changed


COPIED: dict[str, Callable[[], Any]] = {
    "keras.IPUConfig": config,
    "keras.IPUStrategy": lambda: ipu.IPUStrategy(config(), ipujax.Options(recompute="all")),
    "keras.PipelineStageAssignment": lambda: ipu.PipelineStageAssignment(keras.layers.Dense(3)),
    "keras.ProfileLogger": ipu.ProfileLogger,
}


def test_table_has_all_public_classes() -> None:
    assert not classes_not_in([".keras"], COPIED)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COPIED)
def test_copies_are_equal(name: str, way: str) -> None:
    check_copy(COPIED[name](), way)


def test_copies_of_configurations_are_independent() -> None:
    original = config()
    other = copy.deepcopy(original)
    other.ipu_model.tiles_per_ipu = 8
    assert original.ipu_model.tiles_per_ipu == 4
    with pytest.raises(ipujax.ArgumentError, match="has no option"):
        other.nothing = 1
    strategy = ipu.IPUStrategy(config(), ipujax.Options(recompute="all"))
    duplicate = pickle.loads(pickle.dumps(strategy))
    assert duplicate.device == strategy.device and duplicate.options == strategy.options
