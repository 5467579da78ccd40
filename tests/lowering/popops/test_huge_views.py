"""Huge rearranged views are copied to variables: numbers stay, and no list of elements is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.popops.maps import huge_views
from ipujax.runtime.errors import TensorError
from ipujax.runtime.graph import Copy
from ipujax.runtime.graph.steps import leaves
from ipujax.runtime.tensor import Indexed, Reshaped, Tensor, view
from ipujax.runtime.tensor.variable import Variable
from tests.lowering.helpers import check, lowered, small_target

CUBE = np.random.default_rng(0).normal(size=(6, 10, 7)).astype(np.float32)


def turned(x: Any) -> Any:
    """A reshape of a transpose that is no slice of a variable, seen by columns."""
    return x.transpose(2, 1, 0).reshape(28, 15).T[::-1, 3:] + 1


def mixed(x: Any) -> Any:
    pair = jnp.stack([x, 2 * x], -1).reshape(30, 28)
    return lax.rev(pair.T.reshape(12, 70), (0,))[:, ::3] * 2


@pytest.mark.parametrize("fun", [turned, mixed])
def test_views_of_huge_rearrangements_are_views_of_copies(
    fun: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_views, "_MOST_LISTED", 64)
    program = lowered(fun, (CUBE,), small_target(7))
    names = [leaf.name for leaf in leaves(program.program) if isinstance(leaf, Copy)]
    assert any("rearrange" in name for name in names)
    read = [access.tensor.node for groups in program.graph.groups.values() for g in groups for access in g.accesses]
    assert not any(isinstance(node, Indexed) for node in read)
    check(fun, CUBE, tiles=(7,))


def test_small_views_are_not_copied() -> None:
    names = [leaf.name for leaf in leaves(lowered(turned, (CUBE,), small_target(7)).program) if isinstance(leaf, Copy)]
    assert not any("rearrange" in name for name in names)


def test_a_list_of_very_many_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Tensor.of(Variable((6, 10, 7), np.dtype(np.float32), "x")).transpose((2, 1, 0)).reshape((28, 15))
    assert isinstance(x.node, Reshaped)
    assert isinstance(x.transpose().node, Indexed)
    monkeypatch.setattr(view, "_MOST_LISTED", 419)
    for look in (Tensor.transpose, lambda t: t.reverse(0), lambda t: t[1:, 1:]):
        with pytest.raises(TensorError, match="too many"):
            look(x)
