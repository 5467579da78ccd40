"""Live bytes and variables of each step of a program, for reports.

Input: the liveness section of a profile. Output: `LivenessView`: bytes by step, and the largest variables at each.
Limits: in long programs, of a group of neighbouring steps the one with most live bytes is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.runtime.memory.live_item import readable_item
from ipujax.runtime.profile import Figures
from ipujax.runtime.tensor import readable_name

MAX_STEPS = 3_000
MAX_VARIABLES = 6  # of one step

Item = tuple[str, int, str]  # name, bytes, line


@dataclass(frozen=True, slots=True, eq=False)
class LivenessView:
    """Bytes of all tiles together, step by step in program order.

    Args:
        always: always-live items, largest first.
        always_bytes: of all of them.
        variables: the other items that are among the largest of some step.
        names: of the steps.
        live_bytes: at each step, always-live bytes included, int64[steps].
        largest: numbers in `variables` of the largest at each step.
        num_steps: of the program; those in the view are fewer in long programs.
    """

    always: tuple[Item, ...]
    always_bytes: int
    variables: tuple[Item, ...]
    names: tuple[str, ...]
    live_bytes: np.ndarray
    largest: tuple[tuple[int, ...], ...]
    num_steps: int


def liveness_view(profile: Figures) -> LivenessView:
    """Return the liveness of a program, at most `MAX_STEPS` steps of it."""
    live = profile.liveness
    steps = list(_steps(live["programs"]))
    size = max(1, -(-len(steps) // MAX_STEPS))
    groups = (steps[n : n + size] for n in range(0, len(steps), size))
    peaks = [max(group, key=lambda step: int(step["liveBytes"])) for group in groups]
    numbers: dict[int, int] = {}  # positions in `variables` by number in the section
    largest = tuple(
        tuple(numbers.setdefault(n, len(numbers)) for n in step["liveVariables"][:MAX_VARIABLES]) for step in peaks
    )
    return LivenessView(
        tuple(map(_item, live["alwaysLiveVariables"])),
        live["alwaysLiveBytes"],
        tuple(_item(live["notAlwaysLiveVariables"][n]) for n in numbers),
        tuple(readable_name(step.get("name") or step["type"]) for step in peaks),
        np.array([live["alwaysLiveBytes"] + step["liveBytes"] for step in peaks], np.int64),
        largest,
        len(steps),
    )


def _steps(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "liveBytes" in node:
        yield node
    for child in node.get("children", ()):
        yield from _steps(child)


def _item(item: dict[str, Any]) -> Item:
    return readable_item(item["name"]), item["bytes"], item["origin"]
