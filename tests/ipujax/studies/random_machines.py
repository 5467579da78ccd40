"""Machines that differ in every rate."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ipujax.runtime.target import Target, constants_of

RATES = [
    item
    for item in dataclasses.fields(Target)
    if item.name in constants_of("rates") and item.type in ("int", "float") and not item.name.startswith("bytes_per")
]


def random_machines(target: Target, count: int, seed: int = 0) -> list[Target]:
    """Machines that differ in every rate, by factors from ¼ to 4."""
    rng = np.random.default_rng(seed)

    def other(item: dataclasses.Field[Any]) -> Any:
        value = getattr(target, item.name) * 4 ** rng.uniform(-1, 1)
        if item.type == "int":
            return int(value) + (not item.metadata["zero_ok"] and value < 1)
        return min(float(value), item.metadata["maximum"] or np.inf)

    return [target.replace(**{item.name: other(item) for item in RATES}) for _ in range(count)]
