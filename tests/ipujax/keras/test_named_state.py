"""A model's state by the names of its variables, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from ipujax.keras.model_steps import StateNames


def variables(*paths: str) -> list[Any]:
    return [SimpleNamespace(path=path) for path in paths]


MODEL = SimpleNamespace(
    trainable_variables=variables("z/kernel", "a/bias", "z/kernel"),  # two of one name, and not in order
    non_trainable_variables=variables("norm/mean"),
    optimizer=SimpleNamespace(variables=variables("adam/iteration")),
    metrics_variables=[],
)


@pytest.mark.parametrize(
    ("kind", "state"),
    [("train", ([1, 2, 3], [4], [5], [])), ("test", ([1, 2, 3], [4], [])), ("predict", ([1, 2, 3], [4]))],
)
def test_named_state_converts_back_to_lists_in_order(kind: str, state: tuple[list[int], ...]) -> None:
    names = StateNames(MODEL, kind)
    named = names.named(state)
    assert names.sizes == [len(values) for values in state] and names.listed(named) == state
    assert named["trainable"] == {"z/kernel": 1, "a/bias": 2, "z/kernel 2": 3} and named["other"] == {"norm/mean": 4}
    assert jax.tree.leaves(named) == jax.tree.leaves(state)
