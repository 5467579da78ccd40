"""What is live at each step of a program, as a report shows it.

Input: the liveness section of a profile. Output: `LivenessView`: bytes by step, and the largest variables at each.
Limits: of neighbouring steps of long programs the one with most live bytes is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.runtime.profile import Figures

MOST_STEPS = 3_000
MOST_VARIABLES = 6  # of one step

Named = tuple[str, int, str]  # name, bytes, line


@dataclass(frozen=True, slots=True, eq=False)
class LivenessView:
    """Bytes of all tiles together, step by step in program order.

    Args:
        always: what is always live, largest first.
        always_bytes: all of it.
        variables: what is live for some of the time and is among the largest of some step.
        names: of the steps.
        live_bytes: at each step, what is always live included, int64[steps].
        largest: numbers in `variables` of the largest at each step.
        shown_of: how many steps the program has.
    """

    always: tuple[Named, ...]
    always_bytes: int
    variables: tuple[Named, ...]
    names: tuple[str, ...]
    live_bytes: np.ndarray
    largest: tuple[tuple[int, ...], ...]
    shown_of: int


def liveness_view(profile: Figures) -> LivenessView:
    """The liveness of a program.

    Args:
        profile: of it.
    """
    live = profile.liveness
    steps = list(_steps(live["programs"]))
    size = max(1, -(-len(steps) // MOST_STEPS))
    groups = (steps[n : n + size] for n in range(0, len(steps), size))
    shown = [max(group, key=lambda step: int(step["liveBytes"])) for group in groups]
    numbers: dict[int, int] = {}
    largest = tuple(
        tuple(numbers.setdefault(n, len(numbers)) for n in step["liveVariables"][:MOST_VARIABLES]) for step in shown
    )
    return LivenessView(
        tuple(map(_named, live["alwaysLiveVariables"])),
        live["alwaysLiveBytes"],
        tuple(_named(live["notAlwaysLiveVariables"][n]) for n in numbers),
        tuple(step.get("name") or step["type"] for step in shown),
        np.array([live["alwaysLiveBytes"] + step["liveBytes"] for step in shown], np.int64),
        largest,
        len(steps),
    )


def _steps(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "liveBytes" in node:
        yield node
    for child in node.get("children", ()):
        yield from _steps(child)


def _named(item: dict[str, Any]) -> Named:
    return item["name"], item["bytes"], item["origin"]
