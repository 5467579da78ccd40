"""A training step as a chain: the steps of its forward part, with the cycles and bytes of each.

Input: the `DataFlow` of a forward and a backward part, and cuts. Output: `ChainSteps`: the forward equations of each
step, the equations of the gradient that belong to each, and a `ChainStep` of each for the planner.

An equation of the gradient belongs to the last step in which all its operands are available: gradients, values of the
step, and values that cross into it. It never waits for an earlier step, except equations that read no gradient or whose
results are larger than their operands, which belong to their users; products do so only if entire layers are
recomputed: else the first product of a layer's gradient belongs to the following layer. A value that is read in a step
before its own is fixed.

Limits: bytes of entire values, evenly spread; cycles in elements that are moved, see `work_of_equation`. Temporary
bytes are estimated equation by equation, as if nothing were fused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ipujax.lowering.jax_compat import Atom, JaxprEqn, Var
from ipujax.lowering.jaxpr import (
    elements_of,
    phase_of,
    stage_name,
    value_bytes,
    variables,
    variables_read,
    work_of_equation,
)
from ipujax.lowering.primitives import record_of
from ipujax.lowering.recomputation.flow import DataFlow, bytes_of
from ipujax.lowering.recomputation.segment_table import ChainStep

_VECTOR_ELEMENTS = 2  # floats of a vector instruction, Target.vector_bytes


class ChainSteps:
    """The steps between cuts.

    Args:
        flow: values of the forward part and the gradient.
        cuts: first forward equation of each step but the first.
        is_summed: whether gradients are added to existing accumulators, so take no bytes.
        whole_layers: whether entire layers are recomputed, so that products of a gradient may wait for an earlier step.
    """

    def __init__(
        self, flow: DataFlow, cuts: Sequence[int], *, is_summed: bool = False, whole_layers: bool = False
    ) -> None:
        """Assigns the equations of forward part and gradient to steps, and sums the cycles and bytes of each step.

        Args:
            flow: equations of the forward part and its gradient, and the uses of forward values.
            cuts: number of the first forward equation of each step but the first.
            is_summed: whether gradients are added to existing accumulators, and so take no bytes.
            whole_layers: whether entire layers are recomputed, so that products of the gradient may run later.
        """
        self.flow = flow
        self._starts = [0, *cuts]  # first equation of each step
        self._delays_products = whole_layers
        self._defining_eqn = {var: n for n, eqn in enumerate(flow.gradient) for var in eqn.outvars}
        bounds = pairwise([*self._starts, len(flow.forward)])
        self.forward = [flow.forward[a:b] for a, b in bounds]
        self.fixed = set(flow.fixed)  # values that are always stored
        # A value that is read after its step has been run again must be stored. That moves other equations, so repeat.
        while late_values := self._assign_gradient():
            self.fixed |= late_values
        self.chain = [self._chain_step(n, is_summed) for n in range(len(self._starts))]

    def step_of(self, index: int) -> int:
        """The step of a forward equation."""
        return bisect_right(self._starts, index) - 1

    def _unfixed(self, atoms: Sequence[Atom]) -> list[Var]:
        """The values that are read, without fixed ones."""
        return [value for value in self.flow.forward_values(atoms) if value not in self.fixed]

    def _assign_gradient(self) -> set[Var]:
        """Sets `backward`: for each step the equations of the gradient that run after the step has been recomputed.

        Returns values that are read too late: by an equation of an earlier step than their own. The gradient runs steps
        from last to first, so the step that recomputes them has ended by then. They must be added to `fixed`, the
        values that are always stored, and the equations be assigned again.
        """
        flow = self.flow
        last = len(self._starts) - 1
        operand_eqns = list(map(self._operand_equations, flow.gradient))
        step: dict[int, int] = {}  # number of an equation of the gradient → step
        # Recomputed equations and constants: they depend on no gradient. Others are gradients even if their operands
        # are constants: the gradient of a loss begins with one.
        gradient_free: set[int] = set()
        users: dict[int, list[int]] = {}
        # First each in the highest step in which all operands exist; the gradient runs the steps from last to first.
        for n, (eqn, operands) in enumerate(zip(flow.gradient, operand_eqns, strict=True)):
            step[n] = min([last, *self._limits(eqn), *(step[m] for m in operands)])
            reads_no_gradient = not operands
            if reads_no_gradient or (stage_name(eqn).is_recomputed and gradient_free.issuperset(operands)):
                gradient_free.add(n)
            for m in operands:
                users.setdefault(m, []).append(n)
        # Those that need no gradient, or enlarge their operands, are moved to where their first user runs, to hold
        # memory for a shorter time: to the highest step of a user.
        for n in reversed(range(len(flow.gradient))):
            if n in users and (n in gradient_free or self._grows(flow.gradient[n])):
                step[n] = min(step[n], max(step[m] for m in users[n]))
        late_values = {
            value
            for n, eqn in enumerate(flow.gradient)
            for value in self._unfixed(eqn.invars)
            if self.step_of(flow.definition[value]) > step[n]
        }
        self.backward = [[eqn for n, eqn in enumerate(flow.gradient) if step[n] == k] for k in range(last + 1)]
        return late_values

    def _operand_equations(self, eqn: JaxprEqn) -> list[int]:
        """Numbers of the equations of the gradient that define operands of another."""
        return [self._defining_eqn[var] for var in self.operands(eqn.invars) if var in self._defining_eqn]

    def _limits(self, eqn: JaxprEqn) -> list[int]:
        """For each forward value that an equation of the gradient reads the last step in which it may run.

        The gradient runs steps from last to first. A recomputed value is in memory from its own step up to the step of
        its last forward use, into which it crosses. A stored one (`fixed`) is in memory always; what reads it belongs
        to the step of its last forward use too, unless it reads a value of a later step.
        """
        flow = self.flow
        unfixed = self._unfixed(eqn.invars)
        defined = max((self.step_of(flow.definition[value]) for value in unfixed), default=0)
        fixed = [value for value in flow.forward_values(eqn.invars) if value in self.fixed]
        last_uses = [self.step_of(flow.last_use[value]) for value in unfixed]
        return last_uses + [max(defined, self.step_of(flow.last_use[value])) for value in fixed]

    def _grows(self, eqn: JaxprEqn) -> bool:
        """True if results of an equation of the gradient are larger than its operands, so that it should run late."""
        is_undelayed = record_of(eqn).cost == "product" and not self._delays_products
        if is_undelayed or self.flow.is_view(eqn) or self._unfixed(eqn.invars):
            return False
        return bytes_of(eqn.outvars) > bytes_of(self._live_operands(eqn.invars))

    def _live_operands(self, atoms: Sequence[Atom]) -> list[Var]:
        """Values that an equation of the gradient needs in memory: its operands, or the values that these view."""
        live = dict[Var, None]()
        for atom in map(self._behind_views, atoms):
            forward_value = self.flow.forward_value(atom)
            if forward_value is not None:
                live[forward_value] = None
            elif isinstance(atom, Var) and atom in self._defining_eqn:
                live[atom] = None
        return list(live)

    def _behind_views(self, atom: Atom) -> Atom:
        """What a variable views through views of the gradient; the variable itself if none defines it."""
        while isinstance(atom, Var) and (n := self._defining_eqn.get(atom)) is not None:
            if not self.flow.is_view(self.flow.gradient[n]):
                break
            (atom,) = variables_read(self.flow.gradient[n])
        return atom

    def operands(self, atoms: Sequence[Atom]) -> list[Var]:
        """The variables that are read, with forward values in place of their views."""
        return [v if (value := self.flow.forward_value(v)) is None else value for v in variables(atoms)]

    def crossing(self, step: int) -> set[Var]:
        """The values that cross into a step and are not fixed."""
        flow = self.flow
        start = self._starts[step]
        return {v for v, index in flow.definition.items() if index < start <= flow.last_use[v] and v not in self.fixed}

    def _chain_step(self, n: int, is_summed: bool) -> ChainStep:
        """Sums up step `n` for the planner: cycles of its parts, bytes that it stores, and that it holds for a time.

        `is_summed`: whether gradients of parameters are added to accumulators that exist, and so take no bytes.
        """
        flow = self.flow
        eqns = self.forward[n]
        gradient = self.backward[n]
        # Values that the step computes, those of them that later steps read, and all that are stored for the gradient.
        defined = {v for eqn in eqns for v in eqn.outvars if v in flow.definition and v not in self.fixed}
        leaving = self.crossing(n + 1) & defined if n + 1 < len(self._starts) else set[Var]()
        saved = leaving | {value for eqn in gradient for value in flow.forward_values(eqn.invars) if value in defined}
        results = {var for eqn in gradient for var in eqn.outvars if var in flow.external}  # gradients of parameters
        # What gradients of the steps before read: results of this step's among it count as bytes of its input.
        earlier_operands = {
            var for eqns_of_step in self.backward[:n] for eqn in eqns_of_step for var in variables_read(eqn)
        }
        return ChainStep(
            forward_cycles=round(sum(map(_cycles, eqns))),
            backward_cycles=round(sum(map(_cycles, gradient))),
            input_bytes=bytes_of(self.crossing(n)) if n else 0,
            saved_bytes=bytes_of(saved),
            forward_temp_bytes=_peak_temp_bytes(eqns, saved | self.fixed, flow.forward_values),
            backward_temp_bytes=_peak_temp_bytes(gradient, results | earlier_operands, self._live_operands),
            left_bytes=0 if is_summed else bytes_of(results),
        )


def _cycles(eqn: JaxprEqn) -> float:
    """Estimated time of an equation, in units of moving an element; elementwise equations run in registers."""
    # Elementwise is what has operands and results of one size, or scalars, and is no product.
    work = work_of_equation(eqn).elements
    num_results = elements_of(eqn.outvars[0]) if eqn.outvars else 0
    is_elementwise = all(elements_of(atom) in (1, num_results) for atom in (*eqn.invars, *eqn.outvars))
    return min(work, num_results / _VECTOR_ELEMENTS) if is_elementwise and record_of(eqn).cost != "product" else work


def _peak_temp_bytes(
    eqns: Sequence[JaxprEqn], counted: Collection[Var], values_of: Callable[[Sequence[Atom]], Sequence[Var]]
) -> int:
    """Peak live bytes of intermediates: results of equations that only these equations read.

    Args:
        eqns: the equations, in order.
        counted: results that are not counted here, as they are stored and counted elsewhere.
        values_of: function from operands to the values that must be in memory for them: those that views view.
    """
    uses = Counter[Var](v for eqn in eqns for v in values_of(eqn.invars))
    live: set[Var] = set()
    peak = 0
    total = 0
    for eqn in eqns:
        defined = {v for v in eqn.outvars if v in uses and v not in counted}
        total += bytes_of(defined)
        live |= defined
        peak = max(peak, total)
        for v in values_of(eqn.invars):
            uses[v] -= 1
            if not uses[v] and v in live:
                live.discard(v)
                total -= value_bytes(v.aval)
    return peak


_MAX_CUTS = 31
_INTERVAL_FACTOR = 0.75  # PopART's, `willow/src/intervals.cpp`


def best_cuts(flow: DataFlow) -> list[int]:
    """Cuts the forward part into steps where the fewest bytes must be stored, at most `_MAX_CUTS` times.

    Only local minima of the bytes are taken, by rising bytes, and either all or none of those with equally many: so
    equal layers are cut at equal positions, and the recomputed code of all of them is the same. If even those with the
    fewest bytes are too many, it is one in so many of them.

    Returns:
        For each cut the number of the equation after it, rising.
    """
    positions, num_bytes = _cut_candidates(flow)
    if not len(positions):
        return []
    previous = np.append(num_bytes[0] + 1, num_bytes[:-1])
    following = np.append(num_bytes[1:], num_bytes[-1] + 1)
    is_minimum = (num_bytes < previous) & (num_bytes <= following)  # of a plateau, its first position
    positions = positions[is_minimum]
    num_bytes = num_bytes[is_minimum]
    cuts = np.zeros(0, np.int64)
    for level in np.unique(num_bytes):  # rising
        equal_cuts = positions[num_bytes == level]
        if len(cuts) + len(equal_cuts) > _MAX_CUTS:
            stride = -(-len(equal_cuts) // _MAX_CUTS)
            return sorted((cuts if len(cuts) else equal_cuts[::stride]).tolist())
        cuts = np.append(cuts, equal_cuts)
    return sorted(cuts.tolist())


def between_layers(flow: DataFlow, cuts: Sequence[int]) -> list[int]:
    """Leaves out the cuts inside layers, so that entire layers are recomputed, all of them with the same code.

    Layers are consecutive runs of equal equations, each from one cut to another. `cuts` are numbers of the equations
    after each cut, rising, as are those that are returned.
    """
    # Equations are equal by primitive and types of results.
    kinds = [(eqn.primitive, *(str(var.aval) for var in eqn.outvars)) for eqn in flow.forward]
    positions = [0, *cuts, len(kinds)]
    spans = [(start, end - start) for n, start in enumerate(positions) for end in positions[n + 1 :]]
    repetitions = [_repetitions_of(kinds, start, length, positions) for start, length in spans]
    runs: list[range] = []
    inner_cuts: set[int] = set()
    # Repetitions of most equations first, so that half a layer is none; of those the shortest, so that two are not one.
    for repetition in sorted(repetitions, key=lambda x: (-x.num_runs * x.length, x.length, x.start)):
        run = range(repetition.start, repetition.start + repetition.num_runs * repetition.length)
        if repetition.num_runs > 1 and all(run.stop <= other.start or other.stop <= run.start for other in runs):
            runs.append(run)
            inner_cuts.update(cut for cut in cuts if cut in run and (cut - repetition.start) % repetition.length)
    return [cut for cut in cuts if cut not in inner_cuts]


class _Repetitions(NamedTuple):
    """Equal runs of `length` equations, several in a row."""

    start: int
    length: int
    num_runs: int


def _repetitions_of(kinds: Sequence[object], start: int, length: int, positions: Collection[int]) -> _Repetitions:
    """The repetitions of the `length` equations from `start` on, each from position to position."""
    pattern = kinds[start : start + length]
    count = 1
    while start + (count + 1) * length in positions and kinds[start + count * length :][:length] == pattern:
        count += 1
    return _Repetitions(start, length, count)


def standard_cuts(flow: DataFlow) -> list[int]:
    """Cuts the forward part as PopART's standard recomputation: once in each of intervals of K, K − 1, … operations.

    In each interval the position is taken where the fewest bytes must be stored. Returns for each cut the number of the
    equation after it.
    """
    # Source: `willow/src/intervals.cpp` (reference machine.md §4), K = ⌊0.75 (⌊√(2N)⌋ − 1)⌋ of N operations.
    positions, num_bytes = _cut_candidates(flow)
    length = int(_INTERVAL_FACTOR * (int((2 * len(positions)) ** 0.5) - 1))
    cuts: list[int] = []
    start = 0
    while length > 0 and start < len(positions):
        interval = slice(start, start + length)
        cuts.append(int(positions[interval][np.argmin(num_bytes[interval])]))
        start += length
        length -= 1
    return cuts


def between_phases(flow: DataFlow) -> list[int]:
    """Positions where another phase begins, so that recomputation stays in the phase of its gradient."""
    phases = [(index, phase) for index, eqn in enumerate(flow.forward) if (phase := phase_of(eqn)) is not None]
    return [index for (_, previous), (index, phase) in pairwise(phases) if phase != previous]


def _cut_candidates(flow: DataFlow) -> tuple[np.ndarray, np.ndarray]:
    """Positions where the forward part may be cut into steps, and the bytes that a cut there must store.

    A position is the number of the equation after it, behind an equation that does work, and not inside a region that
    a user's `jax.checkpoint` repeats. The bytes are those of values that are defined before and read after it, without
    those that are stored anyhow. They are doubled, so that a value that the gradient reads, and that may be stored in
    any case, counts half.

    Returns:
        Positions, rising, and doubled bytes, int64[positions] both.
    """
    count = len(flow.forward)
    # By position, first as changes, which are then summed.
    crossing_bytes = np.zeros(count + 1, np.int64)
    num_repeated = np.zeros(count + 1, np.int64)
    for var, index in flow.definition.items():
        num_bytes = value_bytes(var.aval)
        last_use = flow.last_use[var]
        if var in flow.repeated:
            num_repeated[index + 1] += 1
            num_repeated[last_use + 1] -= 1
        elif var not in flow.fixed:
            weight = num_bytes if var in flow.needed else 2 * num_bytes
            crossing_bytes[index + 1] += weight
            crossing_bytes[last_use + 1] -= weight
    crossing_bytes = np.cumsum(crossing_bytes)
    num_repeated = np.cumsum(num_repeated)
    is_operation = np.array([work_of_equation(eqn).elements > 0 for eqn in flow.forward], bool)
    positions = np.flatnonzero(is_operation[:-1] & (num_repeated[1:count] == 0)) + 1
    return positions, crossing_bytes[positions]
