"""Work of a program's steps with constants of its machine at other values, all machines together.

Input: an `Executable`, and factors of its constants. Output: work that is not rounded. Counts are made once for an
executable, see `ProgramCounts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ipujax.runtime.causes.variants import whole_work
from ipujax.runtime.compile import Executable
from ipujax.runtime.many_machines import ProgramCounts
from ipujax.runtime.target import Machines, Target, perturbed_constants
from ipujax.runtime.timeline.clocks import HOST_EXCHANGE

_MOST_AT_ONCE_BYTES = 1 << 26  # work of the machines of which a program is costed together


def interval_ends(target: Target) -> dict[str, tuple[float, float]]:
    """Return both ends of the interval of each rate that is not exact, over its value."""
    intervals = {name: (target.sources[name].low, target.sources[name].high) for name in perturbed_constants(target)}
    return {name: (low, high) for name, (low, high) in intervals.items() if low < high}


def works_of_constants(
    executable: Executable, factors: Mapping[str, Sequence[float]]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield constant, work as it is and work with it at each of its values, not rounded.

    Args:
        executable: the compiled program.
        factors: values of each constant, over that of the executable's machine.

    Yields:
        name, float[steps, num_ipus, 5], float[len(factors[name]), steps, num_ipus, 5].
    """
    names = list(factors)
    most_values = max(map(len, factors.values()), default=1)
    at_once = max(1, _MOST_AT_ONCE_BYTES // (most_values * executable.once(whole_work).nbytes))
    for start in range(0, len(names), at_once):
        chosen = {name: factors[name] for name in names[start : start + at_once]}
        work = _work_on_machines(executable, chosen)
        first = 1
        for name, values in chosen.items():
            yield name, work[0], work[first : first + len(values)]
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
