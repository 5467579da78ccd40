"""Kinds of equal layers, and the layer among them that takes longer."""

from __future__ import annotations

import pytest

from ipujax.runtime.profile import LayerCost
from ipujax.runtime.views.part_views import layer_kinds, layer_tree


def row(layer: str, part: str, cycles: int) -> LayerCost:
    return LayerCost(layer, part, cycles, 0.0, cycles, {}, 0, 0, 0, 0, ())


def test_layers_that_differ_little_are_named_unless_others_differ_as_much() -> None:
    def outlier(*cycles: int) -> str | None:
        rows = [row(f"block[{n}]", "forward", count) for n, count in enumerate(cycles)]
        (kind,) = layer_kinds(layer_tree(rows))
        return kind.outlier and kind.outlier.path

    assert outlier(100, 100, 100, 120, 100) == "block[3]"
    assert outlier(109, 100, 100, 100, 100) is None
    assert outlier(100, 110, 90, 120, 80) is None


def test_the_part_of_training_in_which_a_layer_is_slow_is_named() -> None:
    rows = [row(f"block[{n}]", part, 100) for n in range(4) for part in ("forward", "backward")]
    rows[3] = row("block[1]", "backward", 300)
    (kind,) = layer_kinds(layer_tree(rows))
    assert kind.outlier is not None and kind.outlier.path == "block[1]" and kind.excess_part == "backward"


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (("conv2d", "conv2d_1"), "conv2d_*"),
        (("net/conv2d_0/mm", "net/conv2d_1/mm"), "net/conv2d_*/mm"),
        (("block1a/conv2d", "block2a/conv2d"), "block*a/conv2d"),
        (("h0/mlp", "h11/mlp"), "h*/mlp"),
    ],
)
def test_numbers_of_words_stay_where_all_layers_have_them(paths: tuple[str, ...], shown: str) -> None:
    kinds = layer_kinds(layer_tree([row(path, "forward", 10) for path in paths]))
    assert shown in [kind.path for kind in kinds]
