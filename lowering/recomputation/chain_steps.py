"""A training step as a chain: where its forward part is cut into steps, and what each step costs and holds.

Input: the `Flow` of a forward and a backward part, and places to cut at. Output: `Steps`: the forward equations of each
step, the equations of the gradient that go with each, and a `ChainStep` of each for the planner.

An equation of the gradient goes with the last step in which the gradients it reads are there, and all the values it
reads: those of the step, and those that cross into it. It never waits for an earlier step, except for what reads no
gradient or makes more than it reads, which goes where it is read; products only where whole layers are computed again:
the first of a layer's gradient otherwise goes with the layer behind. A value that is read with a step before its own is
fixed.

Limits: bytes of whole values, evenly spread; cycles in the elements that are moved, see `work_of_equation`. What a part
holds besides is estimated equation by equation, as if nothing were fused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from ipujax.lowering.jax_compat import Atom, JaxprEqn, Var
from ipujax.lowering.jaxpr import (
    PRODUCTS,
    elements_of,
    phase_of,
    stage_name,
    value_bytes,
    variables,
    variables_read,
    work_of_equation,
)
from ipujax.lowering.recomputation.flow import Flow, bytes_of
from ipujax.lowering.recomputation.segment_table import ChainStep

_VECTOR_ELEMENTS = 2  # floats of a vector instruction, Target.vector_bytes


class Steps:
    """The steps between some cuts.

    Args:
        flow: of the whole.
        cuts: places of the first equation of each step but the first, ascending.
        is_summed: whether what the gradient leaves for others is added at once to sums that are there already.
        whole_layers: whether steps are to be alike, as layers are.

    Attributes:
        forward: equations of each step.
        backward: equations of the gradient of each, in order.
        fixed: values that are always kept.
        chain: what each costs and holds.
    """

    def __init__(self, flow: Flow, cuts: Sequence[int], *, is_summed: bool = False, whole_layers: bool = False) -> None:
        self.flow, self._starts = flow, [0, *cuts]
        self._staying = frozenset[str]() if whole_layers else PRODUCTS  # what waits for no earlier step
        self._maker = {var: n for n, eqn in enumerate(flow.gradient) for var in eqn.outvars}
        ends = pairwise([*self._starts, len(flow.forward)])
        self.forward = [flow.forward[a:b] for a, b in ends]
        self.fixed = set(flow.fixed)
        while late := self._assigned():
            self.fixed |= late
        self.chain = [self._chain_step(n, is_summed) for n in range(len(self._starts))]

    def step_of(self, place: int) -> int:
        """The step of an equation."""
        return bisect_right(self._starts, place) - 1

    def _free(self, atoms: Sequence[Atom]) -> list[Var]:
        """The values that are read, but for fixed ones."""
        return [value for value in self.flow.values_of(atoms) if value not in self.fixed]

    def _assigned(self) -> set[Var]:
        """Assigns equations of the gradient to steps; returns values that have to be fixed before that can be done."""
        flow, maker, last = self.flow, self._maker, len(self._starts) - 1
        step: dict[int, int] = {}  # of each equation
        starts_anew = set[int]()  # reads no gradient
        for n, eqn in enumerate(flow.gradient):
            before = [maker[var] for var in self.read(eqn.invars) if var in maker]
            latest = [self.step_of(flow.last[value]) for value in self._free(eqn.invars)]
            there = max((self.step_of(flow.made[value]) for value in self._free(eqn.invars)), default=0)
            latest += [max(there, self.step_of(flow.last[v])) for v in flow.values_of(eqn.invars) if v in self.fixed]
            step[n] = min([last, *latest, *(step[m] for m in before)])
            if starts_anew.issuperset(before) and (not before or stage_name(eqn).is_recomputed):
                starts_anew.add(n)
        users: dict[int, list[int]] = {}
        for n, eqn in enumerate(flow.gradient):
            for var in self.read(eqn.invars):
                if var in maker:
                    users.setdefault(maker[var], []).append(n)
        for n in reversed(range(len(flow.gradient))):
            if n in users and (n in starts_anew or self._grows(flow.gradient[n])):
                step[n] = min(step[n], max(step[m] for m in users[n]))
        late = {
            value
            for n, eqn in enumerate(flow.gradient)
            for value in self._free(eqn.invars)
            if self.step_of(flow.made[value]) > step[n]
        }
        self.backward = [[eqn for n, eqn in enumerate(flow.gradient) if step[n] == k] for k in range(last + 1)]
        return late

    def _grows(self, eqn: JaxprEqn) -> bool:
        """Whether an equation of the gradient makes more than it reads, which is no value to be kept."""
        if eqn.primitive.name in self._staying or self.flow.is_view(eqn) or self._free(eqn.invars):
            return False
        return bytes_of(eqn.outvars) > bytes_of(self._held_by(eqn.invars))

    def _held_by(self, atoms: Sequence[Atom]) -> list[Var]:
        """What has to be held for an equation of the gradient that reads some variables: not views of it."""
        gradient, found = self.flow.gradient, dict[Var, None]()
        for atom in atoms:
            while isinstance(atom, Var) and atom in self._maker and self.flow.is_view(gradient[self._maker[atom]]):
                (atom,) = variables_read(gradient[self._maker[atom]])
            value = self.flow.value(atom)
            if value is not None or (isinstance(atom, Var) and atom in self._maker):
                found[atom if value is None else value] = None  # type: ignore[index]
        return list(found)

    def read(self, atoms: Sequence[Atom]) -> list[Var]:
        """The variables that are read, past views of the forward part's values."""
        return [v if (value := self.flow.value(v)) is None else value for v in variables(atoms)]

    # --- what a step costs and holds ---

    def crossing(self, step: int) -> set[Var]:
        """The values that cross into a step and are not fixed."""
        flow, start = self.flow, self._starts[step]
        return {v for v, place in flow.made.items() if place < start <= flow.last[v] and v not in self.fixed}

    def _chain_step(self, n: int, is_summed: bool) -> ChainStep:
        flow, eqns, gradient = self.flow, self.forward[n], self.backward[n]
        own = {v for eqn in eqns for v in eqn.outvars if v in flow.made and v not in self.fixed}
        leaving = self.crossing(n + 1) & own if n + 1 < len(self._starts) else set[Var]()
        saved = leaving | {value for eqn in gradient for value in flow.values_of(eqn.invars) if value in own}
        left = {var for eqn in gradient for var in eqn.outvars if var in flow.outside}
        passed = {var for earlier in self.backward[:n] for eqn in earlier for var in variables_read(eqn)}
        return ChainStep(
            forward_cycles=round(sum(map(_cycles, eqns))),
            backward_cycles=round(sum(map(_cycles, gradient))),
            input_bytes=bytes_of(self.crossing(n)) if n else 0,
            saved_bytes=bytes_of(saved),
            forward_temp_bytes=_most_held(eqns, saved | self.fixed, flow.values_of),
            backward_temp_bytes=_most_held(gradient, left | passed, self._held_by),
            left_bytes=0 if is_summed else bytes_of(left),
        )


def _cycles(eqn: JaxprEqn) -> float:
    """The time of an equation, in that of moving an element. What is done element by element is done in registers."""
    work, written = work_of_equation(eqn).elements, elements_of(eqn.outvars[0]) if eqn.outvars else 0
    is_elementwise = all(elements_of(atom) in (1, written) for atom in (*eqn.invars, *eqn.outvars))
    return min(work, written / _VECTOR_ELEMENTS) if is_elementwise and eqn.primitive.name not in PRODUCTS else work


def _most_held(eqns: Sequence[JaxprEqn], counted: Collection[Var], values_of) -> int:  # type: ignore[no-untyped-def]
    """The most bytes that equations hold at once of what they make, but for what is counted already."""
    uses = Counter[Var](v for eqn in eqns for v in values_of(eqn.invars))
    held, most = set[Var](), 0
    total = 0
    for eqn in eqns:
        new = {v for v in eqn.outvars if v in uses and v not in counted}
        total += bytes_of(new)
        held |= new
        most = max(most, total)
        for v in values_of(eqn.invars):
            uses[v] -= 1
            if not uses[v] and v in held:
                held.discard(v)
                total -= value_bytes(v.aval)
    return most


# --- where to cut -----------------------------------------------------------------------------------------------------

_MOST_CUTS = 31
_INTERVAL_FACTOR = 0.75  # PopART's, `willow/src/intervals.cpp`


def best_cuts(flow: Flow) -> list[int]:
    """Places with fewest bytes to keep, at most 31 of them; of places that are alike all, or every so many.

    So equal layers are cut at equal places, and what is computed again is the same code in all of them.
    """
    places, num_bytes = _places(flow)
    if not len(places):
        return []
    before, after = np.append(num_bytes[0] + 1, num_bytes[:-1]), np.append(num_bytes[1:], num_bytes[-1] + 1)
    low = (num_bytes < before) & (num_bytes <= after)
    places, num_bytes = places[low], num_bytes[low]
    cuts = np.zeros(0, np.int64)
    for level in np.unique(num_bytes):
        alike = places[num_bytes == level]
        if len(cuts) + len(alike) > _MOST_CUTS:
            return sorted((cuts if len(cuts) else alike[:: -(-len(alike) // _MOST_CUTS)]).tolist())
        cuts = np.append(cuts, alike)
    return sorted(cuts.tolist())


def between_layers(flow: Flow, cuts: Sequence[int]) -> list[int]:
    """The places but for those inside of layers: of equal runs of equations, one behind the other, from place to place.

    So what is computed again is whole layers, the same code in all of them, the first and the last too.
    """
    kinds = [(eqn.primitive, *(str(var.aval) for var in eqn.outvars)) for eqn in flow.forward]
    places = [0, *cuts, len(kinds)]
    found = [(start, end - start) for n, start in enumerate(places) for end in places[n + 1 :]]
    rows = [(_layers(kinds, start, length, places), length, start) for start, length in found]
    taken, inside = list[range](), set[int]()
    for count, length, start in sorted(rows, key=lambda row: (-row[0] * row[1], *row[1:])):
        run = range(start, start + count * length)
        if count > 1 and all(run.stop <= other.start or other.stop <= run.start for other in taken):
            taken.append(run)
            inside.update(cut for cut in cuts if cut in run and (cut - start) % length)
    return [cut for cut in cuts if cut not in inside]


def _layers(kinds: Sequence[object], start: int, length: int, places: Collection[int]) -> int:
    """How often equations like those of a given length are repeated from a start, each time from place to place."""
    first, count = kinds[start : start + length], 1
    while start + (count + 1) * length in places and kinds[start + count * length :][:length] == first:
        count += 1
    return count


def standard_cuts(flow: Flow) -> list[int]:
    """PopART's: of intervals of K, K − 1, … operations the place of each with the fewest bytes to keep.

    Source: `willow/src/intervals.cpp` (reference machine.md §4), K = ⌊0.75 (⌊√(2N)⌋ − 1)⌋ of N operations.
    """
    places, num_bytes = _places(flow)
    length = int(_INTERVAL_FACTOR * (int((2 * len(places)) ** 0.5) - 1))
    cuts, start = list[int](), 0
    while length > 0 and start < len(places):
        inside = slice(start, start + length)
        cuts.append(int(places[inside][np.argmin(num_bytes[inside])]))
        start, length = start + length, length - 1
    return cuts


def between_phases(flow: Flow) -> list[int]:
    """Places where another phase begins: what is computed again then stays in the phase that it is for."""
    named = [(place, phase) for place, eqn in enumerate(flow.forward) if (phase := phase_of(eqn)) is not None]
    return [place for (_, before), (place, phase) in pairwise(named) if phase != before]


def _places(flow: Flow) -> tuple[np.ndarray, np.ndarray]:
    """Places behind operations, and the bytes that cross each and have to be kept.

    Of a value that the gradient reads too half counts. No place is inside what a checkpoint of the user's repeats.
    """
    count = len(flow.forward)
    cross, forbidden = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for var, place in flow.made.items():
        num_bytes, last = value_bytes(var.aval), flow.last[var]
        if var in flow.repeated:
            forbidden[place + 1] += 1
            forbidden[last + 1] -= 1
        elif var not in flow.fixed:
            weight = num_bytes if var in flow.needed else 2 * num_bytes
            cross[place + 1] += weight
            cross[last + 1] -= weight
    cross, forbidden = np.cumsum(cross), np.cumsum(forbidden)
    works = np.array([work_of_equation(eqn).elements > 0 for eqn in flow.forward], bool)
    places = np.flatnonzero(works[:-1] & (forbidden[1:count] == 0)) + 1
    return places, cross[places]
