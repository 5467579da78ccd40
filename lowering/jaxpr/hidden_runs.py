"""Runs of inner loops that the order of equations does not separate, inferred from the inputs that they read.

    for ws in ps:             dot_general   mlp@4   reads ps[0][0]
        x = mlp(ws, x)        dot_general   mlp@4   reads ps[0][1]
                              dot_general   mlp@4   reads ps[1][0]     here `mlp` is called again

Where all equations of a function are in one loop, their order does not show where its next run begins: all iterations
seem to be of one run. The names of the inputs do: each run reads another element, `ps[0]`, `ps[1]`.

Input: equations in the order of tracing. Output: moments as of `activations`.
Limits: runs stay together if all read the same inputs, as weights sliced out of one array, or as many as iterations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby

from ipujax.lowering.jaxpr.activations import (
    Activation,
    Moment,
    Moments,
    Restart,
    Traced,
    find_repeating_loop,
    loop_outside,
    moments_of_equations,
)
from ipujax.lowering.jaxpr.loops_of_code import Loop

_Name = tuple[Hashable, ...]


def moments_with_hidden_runs(items: Sequence[Traced]) -> list[Moments]:
    """Return for each equation the moments of the functions that it was traced in."""
    restarts = dict[int, Restart]()
    while True:
        moments = moments_of_equations(items, restarts)
        further = _find_restarts(items, moments)
        if further.keys() <= restarts.keys():
            return moments
        restarts = further | restarts


def _find_restarts(items: Sequence[Traced], moments: Sequence[Moments]) -> dict[int, Restart]:
    """Find the first equations of runs after the first, of all loops without equations around them."""
    numbers: dict[Activation, list[int]] = defaultdict(list)
    levels = dict[Activation, int]()
    for n, item in enumerate(moments):
        for level, moment in enumerate(item):
            if moment.activation.repeating:
                numbers[moment.activation].append(n)
                levels[moment.activation] = level
    restarts = dict[int, Restart]()
    for activation, members in numbers.items():
        level = levels[activation]
        for loop in activation.repeating:
            outer = _find_outer_loop(items[members[0]], [moments[n] for n in members], level, loop)
            if outer is not None:
                iterations: dict[int, list[int]] = defaultdict(list)
                for n in members:
                    if _is_in(moments[n][level], loop):
                        iterations[moments[n][level].iterations.get(loop, 0)].append(n)
                restarts.update((n, outer) for n in _first_of_runs(items, list(iterations.values())))
    return restarts


def _find_outer_loop(item: Traced, members: Sequence[Moments], level: int, loop: Loop) -> Restart | None:
    """Find the loop around a loop, if it has no equations of its own and seems to have one iteration."""
    code = item.frames.calls[level].place[0]
    around = loop_outside(code, loop)
    moments = [x[level] for x in members if around is None or _is_in(x[level], around)]
    if not all(_is_in(x, loop) for x in moments):
        return None
    outer = Restart(level, around) if around else find_repeating_loop(item.frames, level - 1)
    # A loop that repeats already has equations that tell.
    return None if outer is None or outer.loop in members[0][outer.level].activation.repeating else outer


def _is_in(moment: Moment, loop: Loop) -> bool:
    return loop[0] <= moment.place <= loop[1]


def _first_of_runs(items: Sequence[Traced], iterations: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield the first equation of each run after the first; nothing if inputs do not tell runs apart."""
    read = [{name for n in numbers for name in items[n].inputs} for numbers in iterations]
    common = set[_Name]().union(*read[:1]).intersection(*read)
    roots = [dict.fromkeys(name[0] for name in sorted(names - common, key=str)) for names in read]
    shared = [root for root in roots[0] if all(root in x for x in roots)] if roots else []
    for root in shared:
        names = [_common_start([x for x in names if x[0] == root]) for names in (x - common for x in read)]
        length = len(_common_start(names))
        keys = [name[length] if len(name) > length else None for name in names]
        runs = [key for key, _ in groupby(keys)]
        if 1 < len(runs) < len(keys) and len(set(runs)) == len(runs):
            yield from (iterations[n][0] for n in range(1, len(keys)) if keys[n] != keys[n - 1])
            return


def _common_start(names: Sequence[_Name]) -> _Name:
    shortest = min(names, key=len)
    return shortest[: next((n for n in range(len(shortest)) if len({x[n] for x in names}) > 1), len(shortest))]
