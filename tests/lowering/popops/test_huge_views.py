"""Copies of huge rearranged views: numbers are unchanged, and no list of elements is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.layout import mapping
from ipujax.runtime.errors import TensorError
from ipujax.runtime.graph import Copy
from ipujax.runtime.graph.walks import leaves
from ipujax.runtime.tensor import Indexed, Reshaped, Tensor, view
from ipujax.runtime.tensor.variable import Variable
from tests.lowering.helpers import check, lowered, small_target

CUBE = np.random.default_rng(0).normal(size=(6, 10, 7)).astype(np.float32)


def rearranged(x: Any) -> Any:
    """Reshape of a transpose that is no slice of a variable, seen by columns."""
    return x.transpose(2, 1, 0).reshape(28, 15).T[::-1, 3:] + 1


def stacked(x: Any) -> Any:
    pair = jnp.stack([x, 2 * x], -1).reshape(30, 28)
    return lax.rev(pair.T.reshape(12, 70), (0,))[:, ::3] * 2


@pytest.mark.parametrize("fun", [rearranged, stacked])
def test_copies_huge_rearranged_views(fun: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_MAX_LISTED_ELEMENTS", 64)
    program = lowered(fun, (CUBE,), small_target(7))
    names = [leaf.name for leaf in leaves(program.program) if isinstance(leaf, Copy)]
    assert any("rearrange" in name for name in names)
    read = [access.tensor.node for groups in program.graph.groups.values() for g in groups for access in g.accesses]
    assert not any(isinstance(node, Indexed) for node in read)
    check(fun, CUBE, tiles=(7,))


def test_does_not_copy_small_views() -> None:
    names = [
        leaf.name for leaf in leaves(lowered(rearranged, (CUBE,), small_target(7)).program) if isinstance(leaf, Copy)
    ]
    assert not any("rearrange" in name for name in names)


def test_refuses_to_list_very_many_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    x = Tensor.of(Variable((6, 10, 7), np.dtype(np.float32), "x")).transpose((2, 1, 0)).reshape((28, 15))
    assert isinstance(x.node, Reshaped)
    assert isinstance(x.transpose().node, Indexed)
    monkeypatch.setattr(view, "_MAX_LISTED", 419)
    for view_of in (Tensor.transpose, lambda t: t.reverse(0), lambda t: t[1:, 1:]):
        with pytest.raises(TensorError, match="too many"):
            view_of(x)
