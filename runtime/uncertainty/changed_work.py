"""Work of a program's steps where constants of its machine, or mechanisms, differ from what they are taken to be.

Input: an `Executable`; of constants also factors. Output: for each constant and each mechanism the work of all steps at
the lower and the upper end of its interval, int64[steps, num_ipus, 5]; for each constant also the work at any factors,
not rounded. All machines that differ in constants are costed together, from counts that are made once for an
executable, see `ProgramCounts`.
Phases but compute are of one mechanism each. Compute cycles of an IPU are divided by its slowest tile into
rearrangement and vertices, and those by the cycles of vertex groups on all tiles.
Limits: as a spread makes some tiles slower, another may become the slowest, which is not tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ipujax.runtime.causes.removals import SLOW_PATHS as REMOVED_SLOW_PATHS, Removals
from ipujax.runtime.causes.variants import whole_work
from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost, CopyCost
from ipujax.runtime.graph import Codelet, Execute, Leaf
from ipujax.runtime.many_machines import ProgramCounts
from ipujax.runtime.target import Machines, Target, perturbed_constants
from ipujax.runtime.tensor import pad_tiles
from ipujax.runtime.timeline.clocks import COMPUTE, EXCHANGE, GLOBAL_EXCHANGE, HOST_EXCHANGE
from ipujax.runtime.uncertainty import spreads

Ends = tuple[str, np.ndarray, np.ndarray]  # what is uncertain, and the work of all steps at both ends of its interval

_MOST_AT_ONCE_BYTES = 1 << 26  # work of the machines of which a program is costed together
_OF_COMPUTE = (spreads.PRODUCT, spreads.VECTOR, spreads.COMPILED, spreads.REARRANGEMENT)
_PHASES = {
    spreads.EXCHANGE: EXCHANGE,
    spreads.BETWEEN_IPUS: GLOBAL_EXCHANGE,
    spreads.HOST: HOST_EXCHANGE,
}


def interval_ends(target: Target) -> dict[str, tuple[float, float]]:
    """Return both ends of the interval of each rate that is not exact, over its value."""
    intervals = {name: (target.sources[name].low, target.sources[name].high) for name in perturbed_constants(target)}
    return {name: (low, high) for name, (low, high) in intervals.items() if low < high}


class ChangedWork(NamedTuple):
    """Work of all steps with a constant at other values.

    Args:
        name: of the constant.
        work: with the constant as it is, float[steps, num_ipus, 5].
        changed: with each of its values, float[values, steps, num_ipus, 5].
    """

    name: str
    work: np.ndarray
    changed: np.ndarray


def works_of_constants(executable: Executable, factors: Mapping[str, Sequence[float]]) -> Iterator[ChangedWork]:
    """Yield the work of a program with each constant changed alone, not rounded.

    Args:
        executable: the compiled program.
        factors: values of each constant, over that of the executable's machine.
    """
    names = list(factors)
    most_values = max(map(len, factors.values()), default=1)
    at_once = max(1, _MOST_AT_ONCE_BYTES // (most_values * executable.once(whole_work).nbytes))
    for start in range(0, len(names), at_once):
        chosen = {name: factors[name] for name in names[start : start + at_once]}
        work = _work_on_machines(executable, chosen)
        first = 1
        for name, values in chosen.items():
            yield ChangedWork(name, work[0], work[first : first + len(values)])
            first += len(values)


def _work_on_machines(executable: Executable, factors: Mapping[str, Sequence[float]]) -> np.ndarray:
    """Return the work of all steps, float[machines, steps, num_ipus, 5]; the first machine is the executable's."""
    target = executable.target
    count = 1 + sum(map(len, factors.values()))
    numbers = {}
    first = 1
    for name, values in factors.items():
        numbers[name] = np.full(count, float(getattr(target, name)))
        numbers[name][first : first + len(values)] *= values
        first += len(values)
    steps, _ = executable.once(ProgramCounts).steps(Machines(target, numbers, count, is_exact=True))
    work = np.stack([np.asarray(step.work) for step in steps.values()])
    for row, step in zip(work, steps.values(), strict=True):
        for _, ipu, cycles in step.transfers:
            row[ipu, HOST_EXCHANGE] = cycles
    return np.ascontiguousarray(np.moveaxis(work, -1, 0))  # all steps of one machine are read together


def ends_of_constants(executable: Executable) -> Iterator[Ends]:
    """Yield constant, work of all steps at its lower end and at its upper end."""
    for name, work, changed in works_of_constants(executable, interval_ends(executable.target)):
        yield changed_ends(executable, name, work, changed)


def changed_ends(executable: Executable, name: str, work: np.ndarray, changed: np.ndarray) -> Ends:
    """Return a constant with the work of all steps at both ends, from work that is not rounded."""
    low, high = (np.rint(each - work).astype(np.int64) for each in changed)
    work_as_it_is = executable.once(whole_work)
    return name, work_as_it_is + low, work_as_it_is + high


@dataclass(frozen=True)
class MechanismWork:
    """The work of an executable's steps with spreads of mechanisms.

    Args:
        executable: the compiled program.
    """

    executable: Executable

    @cached_property
    def _removals(self) -> Removals:
        return self.executable.once(Removals)

    @property
    def whole(self) -> np.ndarray:
        """Work of all steps as it is, int64[steps, num_ipus, 5]."""
        return self._removals.whole

    def ends(self) -> Iterator[Ends]:
        """Yield mechanism, work at the lower end and work at the upper end, of mechanisms that the program has."""
        for name, spread in spreads.SPREADS.items():
            added = self._cycles_of(name)
            if added.any():
                low, high = (0.0, spread.piece_cycles) if spread.piece_cycles else (spread.low - 1, spread.high - 1)
                yield name, self._with(low * added), self._with(high * added)

    def _with(self, added: np.ndarray) -> np.ndarray:
        return self.whole + np.rint(added).astype(np.int64)

    def _cycles_of(self, name: str) -> np.ndarray:
        """Return the cycles of a mechanism in the work of all steps, or its pieces, float[steps, num_ipus, 5]."""
        cycles = np.zeros(self.whole.shape)
        if name == spreads.SLOW_PATHS:
            removals = self._removals
            if removals.is_of(REMOVED_SLOW_PATHS):
                cycles += self.whole - removals.without((REMOVED_SLOW_PATHS,))
        elif name == spreads.PIECES:
            cycles[..., GLOBAL_EXCHANGE] = self._pieces
        elif name in _PHASES:
            phase = _PHASES[name]
            cycles[..., phase] = self.whole[..., phase]
        else:
            cycles[..., COMPUTE] = self.whole[..., COMPUTE] * self._shares[..., _OF_COMPUTE.index(name)]
        return cycles

    @cached_property
    def _shares(self) -> np.ndarray:
        """Share of each of `_OF_COMPUTE` in the compute cycles of all steps, float[steps, num_ipus, 4]."""
        num_ipus = self.executable.target.num_ipus
        shares_by_cost: dict[int, np.ndarray] = {}  # by identity: equal compute sets share a cost
        rows = []
        for node in self._removals.nodes:
            cost = self.executable.costs[node] if isinstance(node, Leaf) else None
            row = np.zeros((num_ipus, len(_OF_COMPUTE)))
            if isinstance(cost, CopyCost):
                row[:, _OF_COMPUTE.index(spreads.REARRANGEMENT)] = 1
            elif isinstance(node, Execute) and isinstance(cost, ComputeSetCost):
                if id(cost) not in shares_by_cost:
                    shares_by_cost[id(cost)] = _shares_of(self.executable, node, cost)
                row = shares_by_cost[id(cost)]
            rows.append(row)
        return np.stack(rows)

    @cached_property
    def _pieces(self) -> np.ndarray:
        """Pieces that each IPU sends in copies between IPUs, int64[steps, num_ipus]."""
        target = self.executable.target
        rows = []
        for node in self._removals.nodes:
            cost = self.executable.costs[node] if isinstance(node, Leaf) else None
            row = np.zeros(target.num_ipus, np.int64)
            if isinstance(cost, CopyCost) and cost.is_global:
                sends = cost.exchange.sends.reshape(-1, target.tiles_per_ipu).sum(1)
                row = pad_tiles(sends, cost.first_ipu, target.num_ipus)
            rows.append(row)
        return np.stack(rows)


def mechanism_of(codelet: Codelet) -> str:
    """Return the mechanism of a codelet's vertices."""
    if codelet.language == "C++":
        return spreads.COMPILED
    return spreads.PRODUCT if codelet.is_product else spreads.VECTOR


def _shares_of(executable: Executable, node: Execute, cost: ComputeSetCost) -> np.ndarray:
    """Return the shares of mechanisms in the compute cycles of a compute set, float[num_ipus, 4]."""
    target = executable.target
    by_mechanism = np.zeros(len(_OF_COMPUTE))
    groups = executable.graph.groups[node.compute_set]
    for group, cycles in zip(groups, cost.limiting_by_group, strict=True):
        by_mechanism[_OF_COMPUTE.index(mechanism_of(group.codelet))] += cycles
    total, copied = (x.reshape(-1, target.tiles_per_ipu) for x in (cost.compute_cycles, cost.rearrangement_cycles))
    slowest = total.argmax(1)[:, None]
    of_copies = np.take_along_axis(copied, slowest, 1) / np.maximum(np.take_along_axis(total, slowest, 1), 1)
    shares = (1 - of_copies) * by_mechanism / max(1, by_mechanism.sum())
    shares[:, _OF_COMPUTE.index(spreads.REARRANGEMENT)] = of_copies[:, 0]
    row = np.zeros((target.num_ipus, len(_OF_COMPUTE)))
    row[cost.first_ipu : cost.first_ipu + len(shares)] = shares
    return row
