"""Figures of one run of a program: time, memory, and their division among operations, lines, layers and stages.

Input: as of `PrimaryFigures`, from which the figures here follow. Output: `Figures`, frozen.
Limits: memory is that of one replica. A static profile takes the costlier branch of each decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from numbers import Integral
from typing import Annotated, Any, Literal, TypeVar, get_args

import numpy as np

from ipujax.runtime.errors import ArgumentValueError, ProfileError
from ipujax.runtime.files.figure_kinds import Real
from ipujax.runtime.files.kinds import Map, Text
from ipujax.runtime.graph import of_replicas
from ipujax.runtime.profile.breakdown import LayerCost, Metric, Operation, layer_costs, line_costs, metrics_of_run
from ipujax.runtime.profile.primary_figures import PrimaryFigures, run_figure
from ipujax.runtime.profile.program_costs import PassChange, pass_changes
from ipujax.runtime.profile.text import duration, size
from ipujax.runtime.sections.graph_report import region_bytes
from ipujax.runtime.sections.live_variables import liveness_tree
from ipujax.runtime.uncertainty import COMPILED, SPREADS, Certainty, Energy, Interval, certainty_of_run, energy_of_run

T = TypeVar("T")
Lines = Literal["user", "library"]
LINES: tuple[Lines, ...] = get_args(Lines)  # owners of the lines of source that `Figures.operations` lists
SPLITTING = "splitting of operations"  # starts of vertices, and less work at once than peak rates take


class Figures(PrimaryFigures):
    """The figures of one run of an executable, computed from it or read from a file."""

    def once(self, view: Callable[[Figures], T]) -> T:
        """Return a view of these figures, whose label and host it does not read: computed when first asked for."""
        if view not in self._views:
            self._views[view] = view(self)
        value: T = self._views[view]
        return value

    @cached_property
    def _views(self) -> dict[Callable[[Figures], Any], Any]:
        return {}

    @property
    def title(self) -> str:
        """Name of the program, number of IPUs and date of the compilation, in a line."""
        identity = self.identity
        subject = f"{identity.name} on " if identity.name else "Profile: "
        return f"{subject}{self.device}" + (f", {identity.day}" if identity.day else "")

    @property
    def device(self) -> str:
        """The IPUs of all replicas, as `16 × mk2`."""
        machine = of_replicas(self.target, self.replicas)
        return f"{machine.num_ipus:,} × {machine.name}"

    @property
    def num_ipus(self) -> int:
        """Number of IPUs of all replicas."""
        return self.replicas * self.target.num_ipus

    @property
    def copies(self) -> tuple[str, str]:
        """Word for copies of the program, "Mesh" or "Replicas", and how many; what other figures are of."""
        if not self.mesh:
            return "Replicas", f"{self.replicas:,}; figures are per replica" if self.replicas > 1 else "1"
        axes = " × ".join(f"{name} {size:,}" for name, size in self.mesh.items())
        device = "IPU" if self.target.num_ipus == 1 else f"device of {self.target.num_ipus:,} IPUs"
        return "Mesh", f"{axes}; figures are of one {device}"

    @property
    def seconds(self) -> float:
        """Estimated time of one run, in seconds."""
        return float(self.target.seconds(self.cycles))

    @property
    def is_host_bound(self) -> bool:
        """True if the host takes longer for the batches of a call than IPUs for its program; see `host`.

        Raises:
            ProfileError: if the host was not measured, or a trip count is not known.
        """
        if self.host is None:
            hint = "profile.with_host(batches.host), see ipu.prefetch"
            raise ProfileError("this profile has no figures of the host", hint=hint)
        return self.host.is_slower_than(self.seconds)

    @property
    def byte_cost(self) -> float:
        """Cost per byte at which the program is planned, in cycles: the last of `byte_costs`."""
        return self.byte_costs[-1]

    @property
    def byte_cost_added_cycles(self) -> int:
        """Cycles of a run beyond those at the first of `byte_costs`.

        Raises:
            ProfileError: a loop whose trip count is data and is in no option.
        """
        cost = self._byte_cost_added_cycles
        if cost is None:
            what = "the cycles that the cost per byte adds depend on trip counts that are data"
            raise ProfileError(what, hint="ipu.Options(trip_counts={name: iterations}), see profile.cycles")
        return cost

    @run_figure
    def interval(self) -> Interval:
        """90 % interval of `cycles`, from the intervals of constants and the spreads of mechanisms; the plan is held.

        Raises:
            ProfileError: as `timeline`.
        """
        return self._certainty.interval

    @run_figure
    def coverage(self) -> Annotated[dict[str, float], Map(Real(0, 1), Text())]:
        """Share of the busy cycles of the limiting IPU by the kind of source of the constants they rest on.

        Raises:
            ProfileError: as `timeline`.
        """
        return self._certainty.coverage

    @cached_property
    def _certainty(self) -> Certainty:
        executable = self._program("interval")
        run = (self._ran_program, self.recording, self.timeline.executions, self.limiting_ipu)
        return certainty_of_run(executable, *run, is_open=bool(self.unpriced))

    @run_figure
    def metrics(self) -> dict[str, Metric]:
        """Sums of the metrics of `Options.metrics`, by name.

        Raises:
            ArgumentError: a metric raises, or returns no finite number.
            ProfileError: as `timeline`.
        """
        return metrics_of_run(self._program("metrics").options.metrics, self.step_costs)

    @property
    def energy(self) -> Energy:
        """Energy of one run on the IPUs of all replicas, at the published power of the machine, and its interval.

        Raises:
            ProfileError: as `timeline`.
        """
        return energy_of_run(self.interval, self.target, self.num_ipus)

    @property
    def phase_cycles(self) -> dict[str, int]:
        """Cycles of each phase of the limiting IPU; they add up to `cycles`."""
        return dict(self.ipu_phase_cycles[self.limiting_ipu])

    @property
    def busy_cycles(self) -> int:
        """Cycles of all phases but idle, of all IPUs of one replica together."""
        return sum(self.cycles - phases["idle"] for phases in self.ipu_phase_cycles)

    @property
    def brief(self) -> str:
        """The cycles, the fullest tile and the machine, in a line."""
        memory = self.memory
        target = of_replicas(self.target, self.replicas)
        try:
            note = f" {self.cycles_note}" if self.cycles_note else ""
            time = f"{self.cycles:,} cycles{note}, {duration(self.seconds).strip()}"
        except ProfileError:  # a loop runs as often as its data says
            time = "cycles depend on trip counts"
        bytes_of_tile = f"{size(memory.max_tile_bytes)} of {size(target.bytes_per_tile)}"
        return f"{time}, fullest tile {memory.worst_tile} with {bytes_of_tile}, {target.num_ipus} × {target.name}"

    @property
    def cycles_note(self) -> str:
        """Words beside the cycles of a run that say what they leave out; "" if nothing."""
        count = len(self.unpriced)
        return f"without {count} unpriced operation{'s' if count > 1 else ''}" if count else ""

    def operations(self, n: int | None = None, *, lines: Lines = "user") -> tuple[Operation, ...]:
        """Return the costliest lines of source, costliest first; lines without cycles are left out.

        Args:
            n: number of lines; all of them when None.
            lines: "user" for lines of the user's own source; "library" for the innermost line outside JAX and ipujax,
                so that one line that calls a library becomes several lines of that library. Inside a library's own
                `jax.jit` no line is known: that work belongs to the line that calls it.

        Raises:
            ArgumentValueError: other lines, or a number of lines below 0.
        """
        if n is not None and (not isinstance(n, Integral) or isinstance(n, bool) or n < 0):
            expected = "a whole number from 0, or None"
            raise ArgumentValueError("n must be the number of operations to list", expected=expected, got=repr(n))
        if lines not in LINES:
            expected = " or ".join(map(repr, LINES))
            raise ArgumentValueError("unknown kind of lines of a profile", expected=expected, got=repr(lines))
        return self._operations(lines)[:n]

    def _operations(self, lines: str) -> tuple[Operation, ...]:
        return line_costs(self.step_costs, of_libraries=lines == "library")

    @property
    def region_bytes(self) -> dict[str, np.ndarray]:
        """Bytes of each tile in each memory region, gaps included, int64[num_tiles], under the names of `graph()`."""
        return region_bytes(self.memory, including_gaps=True)

    @property
    def language_cycles(self) -> dict[str, int]:
        """Active cycles of vertices by the language of their code, on all tiles together, most cycles first."""
        languages = self.vertex_type_languages
        cycles = Counter[str]()
        for name, (_, active) in self.vertex_type_cycles.items():
            if name in languages:
                cycles[languages[name]] += active
        return dict(cycles.most_common())

    @property
    def language_ranges(self) -> dict[str, tuple[int, int]]:
        """Least and most of `language_cycles` that a compiler may give; assembly has no spread."""
        spread = SPREADS[COMPILED]
        return {
            name: (round(spread.low * cycles), round(spread.high * cycles)) if name == "C++" else (cycles, cycles)
            for name, cycles in self.language_cycles.items()
        }

    @property
    def gap(self) -> dict[str, int]:
        """Cycles beyond `bound` by cause, the last of computing; they add up to `cycles - bound.cycles`.

        Raises:
            ProfileError: as `timeline`.
        """
        *causes, computing = self.causes
        gaps = {each.name: each.cycles - each.least_cycles for each in causes}
        return gaps | {SPLITTING: computing.cycles - computing.least_cycles}

    @property
    def always_live_share(self) -> float:
        """Bytes that are live at every step over those at the step with most."""
        graph = self._saved_graph
        if graph is None:
            tree = self.executable.once(liveness_tree)
            return tree.always_bytes / max(1, tree.max_bytes)
        live = graph["memory"]["liveness"]
        return float(live["alwaysLiveBytes"] / max(1, live["maxLiveBytes"]))

    @property
    def device_cycles(self) -> int:
        """Cycles of a run without the host exchange of the IPU that `phase_cycles` are of."""
        return self.cycles - self.phase_cycles["host_exchange"]

    @cached_property
    def pass_changes(self) -> tuple[PassChange, ...]:
        """What each pass of the compilation changed; empty for Poplar programs, and of a saved profile."""
        return () if self.list_equations is None else pass_changes(self.list_equations())

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """Costs of each layer in each part of the training step, in program order.

        Raises:
            ProfileError: as `timeline`.
        """
        return layer_costs(self.step_costs)
