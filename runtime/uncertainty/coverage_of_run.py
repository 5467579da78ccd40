"""Sources of the constants on which the cycles of a run rest, as shares of its cycles.

Input: an executable, its counts, and the runs of each step. Output: for each kind of source the share of the busy
cycles of the limiting IPU that rest on constants of that kind. The cycles of a phase of a step are divided among
constants in proportion to the size of their elasticity to each, a central difference of ±0.1 %; those that no constant
changes, as cycles that a codelet of a user declares, rest on `NO_CONSTANT`.
Limits: constants that programs are made for, such as tiles and workers, count for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ipujax.runtime.causes.variants import is_beside, whole_work
from ipujax.runtime.compile import Executable
from ipujax.runtime.graph import Program
from ipujax.runtime.many_machines import ProgramCounts
from ipujax.runtime.target import perturbed_constants
from ipujax.runtime.uncertainty.interval_of_run import work_on_machines

NO_CONSTANT = "no constant"
_STEP = 1e-3  # relative change of a constant, each way
_MOST_AT_ONCE_BYTES = 1 << 26  # work of the machines of which a program is costed together


def coverage_of_run(
    executable: Executable, counts: ProgramCounts, runs: Mapping[Program, int], limiting_ipu: int
) -> dict[str, float]:
    """Return the share of cycles by kind of source, largest first; the shares add up to 1, and are none without cycles.

    Args:
        executable: the compiled program.
        counts: its counts.
        runs: number of runs of each step.
        limiting_ipu: the IPU whose busy cycles are divided.
    """
    if not executable.steps:
        return {}
    target = executable.target
    work_as_it_is = whole_work(executable)
    runs_of_steps = np.array([runs.get(node, 0) for node in executable.steps]) * ~is_beside(executable)
    cycles = work_as_it_is[:, limiting_ipu] * runs_of_steps[:, None]  # [steps, phases]
    if not cycles.any():
        return {}
    names = perturbed_constants(target)
    sizes = []
    at_once = max(1, _MOST_AT_ONCE_BYTES // (2 * work_as_it_is.nbytes))
    for start in range(0, len(names), at_once):
        chosen = list(names[start : start + at_once])
        work = work_on_machines(executable, counts, chosen, [(1 - _STEP, 1 + _STEP)] * len(chosen))[:, limiting_ipu]
        sizes.append(np.abs(work[..., 2::2] - work[..., 1::2]))
    size = np.concatenate(sizes, -1)
    total = size.sum(-1)
    of_constants = (cycles[..., None] * size / np.where(total > 0, total, 1)[..., None]).sum((0, 1))
    by_kind: dict[str, float] = {NO_CONSTANT: float(cycles[total == 0].sum())}
    for name, share in zip(names, of_constants.tolist(), strict=True):
        kind = target.sources[name].kind
        by_kind[kind] = by_kind.get(kind, 0.0) + share
    all_cycles = float(cycles.sum())
    shares = {kind: share / all_cycles for kind, share in by_kind.items() if share > 0}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
