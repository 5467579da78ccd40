"""Sources of the constants on which the cycles of a run rest, as shares of its cycles.

Input: an executable, the runs of each step, and the work of its steps with each constant a little smaller and larger.
Output: for each kind of source the share of the busy cycles of the limiting IPU that rest on constants of that kind.
The cycles of a phase of a step are divided among constants in proportion to the size of their elasticity to each, a
central difference of ±0.1 %; those that no constant changes, as cycles that a codelet of a user declares, rest on
`NO_CONSTANT`.
Limits: constants that programs are made for, such as tiles and workers, count for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ipujax.runtime.causes.variants import is_beside, whole_work
from ipujax.runtime.compile import Executable
from ipujax.runtime.graph import Program

NO_CONSTANT = "no constant"
_STEP = 1e-3  # relative change of a constant, each way
FACTORS = (1 - _STEP, 1 + _STEP)


class Coverage:
    """The kinds of sources of a run's cycles, while constants are added.

    Args:
        executable: the compiled program.
        runs: number of runs of each step.
        limiting_ipu: the IPU whose busy cycles are divided.
    """

    def __init__(self, executable: Executable, runs: Mapping[Program, int], limiting_ipu: int) -> None:
        self._sources = executable.target.sources
        self._limiting_ipu = limiting_ipu
        runs_of_steps = np.array([runs.get(node, 0) for node in executable.steps]) * ~is_beside(executable)
        self._cycles = executable.once(whole_work)[:, limiting_ipu] * runs_of_steps[:, None]  # [steps, phases]
        self._sizes: dict[str, np.ndarray] = {}

    def add(self, constant: str, smaller: np.ndarray, larger: np.ndarray) -> None:
        """Add a constant, of which these are the work of all steps at `FACTORS`, float[steps, num_ipus, 5]."""
        self._sizes[constant] = np.abs(larger[:, self._limiting_ipu] - smaller[:, self._limiting_ipu])

    def shares(self) -> dict[str, float]:
        """Return the share of cycles by kind of source, largest first; the shares add up to 1, and are none without."""
        if not self._cycles.any():
            return {}
        size = np.stack(list(self._sizes.values()), -1)
        total = size.sum(-1)
        of_constants = (self._cycles[..., None] * size / np.where(total > 0, total, 1)[..., None]).sum((0, 1))
        by_kind: dict[str, float] = {NO_CONSTANT: float(self._cycles[total == 0].sum())}
        for name, share in zip(self._sizes, of_constants.tolist(), strict=True):
            kind = self._sources[name].kind
            by_kind[kind] = by_kind.get(kind, 0.0) + share
        all_cycles = float(self._cycles.sum())
        shares = {kind: share / all_cycles for kind, share in by_kind.items() if share > 0}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))
