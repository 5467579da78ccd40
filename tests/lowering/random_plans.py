"""Planners that choose at random among their candidates, those that they reject included.

A program that is lowered inside `random_planners` has the numbers of any other, and is mostly slower. What is cached
of plans is dropped before and after.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from ipujax.lowering.layout import choose, trial
from ipujax.lowering.layout.grids import even_grids
from ipujax.lowering.poplin.candidates import Candidates, CostedCandidate
from ipujax.lowering.popops.indexing import scatter
from ipujax.runtime.cache import clear_caches


@contextmanager
def random_planners(draw: random.Random) -> Iterator[None]:
    """Let planners of layouts, products and scatters take any of their candidates."""

    def any_candidate(candidates: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return candidates[draw.randrange(len(candidates))]

    def any_grid(shape: Any, order: Any, work: Any, target: Any, *args: Any) -> Any:
        # At no cost, or at more than a placement by which an operand does not move.
        count = even_grids(shape, order, target.tiles_per_ipu).blocks.shape[1]
        return draw.randrange(count), draw.choice((0.0, math.inf))

    def any_product(candidates: Candidates, *args: Any) -> Any:
        number = draw.randrange(len(candidates.temp_bytes))
        return CostedCandidate(number, candidates.cost_parts(np.array([number]))[:, 0])

    patches: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        *((module, "choose_cheapest", any_candidate) for module in (trial, scatter)),
        (choose, "_best_grid", any_grid),
        (Candidates, "fastest", any_product),
    )
    clear_caches()
    with ExitStack() as stack:
        stack.callback(clear_caches)
        for place, name, replacement in patches:
            stack.enter_context(mock.patch.object(place, name, replacement))
        yield
