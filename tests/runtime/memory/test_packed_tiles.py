"""Packing of the tiles of an IPU: the fullest tile is searched for, and no sequence of the orders is better."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax.runtime.memory.chip import Chip, Item, KnownArenas, pack_fullest
from ipujax.runtime.memory.packing import ORDERS, live_together, pack, sort_items

TILES = 12
STEPS = 30


def random_items(seed: int) -> list[Item]:
    """Variables of one or two live ranges, similar on all tiles."""
    rng = np.random.default_rng(seed)
    items = []
    for _ in range(40):
        size = int(rng.integers(1, 60)) * 64
        first = sorted(int(step) for step in rng.choice(STEPS, 2 * int(rng.integers(1, 3)), replace=False))
        spans = tuple(zip(first[::2], first[1::2], strict=True))
        items.append(Item(0, size + 8 * rng.integers(0, 3, TILES), spans, wide=False))
    return items


@pytest.mark.parametrize("seed", range(6))
def test_the_fullest_tile_is_packed_at_least_as_well_as_in_each_order(seed: int) -> None:
    items = random_items(seed)
    sizes = np.stack([item.values for item in items])
    spans = [item.spans for item in items]
    live = np.zeros((STEPS, TILES), np.int64)
    for item in items:
        for low, high in item.spans:
            live[low : high + 1] += item.values
    peak = live.max(0)
    always = np.zeros(TILES, np.int64)
    packed = pack_fullest([Chip(range(TILES), items, 10**6)], peak, always, KnownArenas()).size
    in_orders = [
        pack(sizes, live_together(spans), np.zeros(len(items), bool), sort_items(sizes, spans, order))
        for order in ORDERS
    ]
    assert (packed >= peak).all()
    assert packed.max() <= min(packing.extent().max() for packing in in_orders) * 1.01
