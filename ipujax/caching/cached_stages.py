"""Stages of a function whose program is in the cache: it is lowered again only if its graph is read.

Input: the figures of an entry, and a function that lowers. Output: `CachedLowered`, and `CachedCompiled` with profile
and callable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from ipujax.caching.program_entry import CallFigures, ProgramEntry, entry_of
from ipujax.calls import locates_nans
from ipujax.compiled_programs import announce
from ipujax.lowering_plan import LoweringPlan
from ipujax.runtime.cache import set_basis
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.logs import Log, step
from ipujax.runtime.names_at_import import replaced_values
from ipujax.runtime.read_only import ReadOnlyMapping
from ipujax.stages import Compiled, Lowered, Record
from ipujax.storage import Computation, requested_directory

if TYPE_CHECKING:
    from ipujax.runtime.compile import Executable
    from ipujax.runtime.report import Profile

_LOG = Log("cache")
# Attributes of a `Lowered` that are read from the program after lowering it again.
_OF_GRAPH = frozenset(
    {"jaxpr", "graph", "program", "pipelines", "choice", "trades", "_jaxprs", "_lowered", "_plan", "_may_offload"}
)


class CachedLowered(Lowered):
    """A function whose program is in the cache."""

    def __init__(
        self,
        plan: LoweringPlan,
        entry: ProgramEntry,
        figures: CallFigures,
        timings: Mapping[str, float],
        lower: Callable[[], Lowered],
    ) -> None:
        # Not that of `Lowered`, which takes the graph.
        self.name = plan.name
        self.signature = plan.signature
        self.timings = ReadOnlyMapping(timings)
        self.store = None
        self.spread = None
        self.partitioning = None
        self._source = plan, entry, figures
        self._options = plan.options
        self._refs = ()
        self._constants = ()
        self._function = plan.jaxpr
        self._are_weak = tuple(aval.weak_type for aval in plan.jaxpr.out_avals)
        self._lower = lower
        self.__dict__["calls"] = None  # in place of the cached property of `Lowered`

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered_again, name) if name in _OF_GRAPH else super().__getattr__(name)

    @property
    def num_used_ipus(self) -> int:
        """IPUs of the device that the program uses."""
        return self._source[2].used_ipus

    @cached_property
    def lowered_again(self) -> Lowered:
        """The function, lowered now."""
        return self._lower()

    @cached_property
    def stored_computation(self) -> Computation | None:
        return self._source[1].computation()

    def run_program(self, *operands: Any, record: Record | None = None) -> Sequence[Any]:
        """`Lowered.run_program`, by the stored computation if there is one."""
        computation = None if record is not None or locates_nans() else self.stored_computation
        return super().run_program(*operands, record=record) if computation is None else computation(*operands)

    @cached_property
    def _compiled(self) -> Compiled:
        plan, entry, figures = self._source
        fitting = CachedLowered(plan, entry, figures, self.timings, lambda: self.lowered_again.compile().lowered)
        compiled = CachedCompiled(fitting, entry, lambda: self.lowered_again.compile().executable)
        announce(self.name, figures.warnings, lambda: compiled.profile)
        return compiled

    def __repr__(self) -> str:
        return f"Lowered({self.name}: in the cache)"


class CachedCompiled(Compiled):
    """A compiled function whose program is in the cache."""

    def __init__(self, lowered: CachedLowered, entry: ProgramEntry, compile_again: Callable[[], Executable]) -> None:
        # Not that of `Compiled`, which takes the executable.
        self.signature = lowered.signature
        self.partitioning = None
        self._store = entry
        self._entry = entry
        self._lowered = lowered
        self._compile_again = compile_again
        self._decisions = {}
        self._profiling = Lock()

    @cached_property
    def executable(self) -> Executable:  # type: ignore[override]
        """The checked program, compiled now."""
        return self._compile_again()

    @cached_property
    def pipelines(self) -> Any:  # type: ignore[override]
        """See `Lowered`."""
        return self._lowered.pipelines

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds of tracing, and of the search in the cache."""
        return self._lowered.timings

    @cached_property
    def profile(self) -> Profile:
        """Static profile: cycles, phases and memory of one call."""
        with collecting_rarely():
            from ipujax.runtime.report import Profile

            data = self._entry.profile()
            if data is not None:
                return Profile.from_data(data, lambda: self.executable)
            profile = Profile(self.executable)
            self._entry.put_profile(profile)
        return profile


def find_or_lower(plan: LoweringPlan, lower: Callable[[], Lowered]) -> Lowered:
    """Return the program of a plan from the cache of its options; without one, or if it is not there, lower it."""
    # Plans in memory were made by the passes, rules and planners of that time.
    set_basis(replaced_values())
    directory = requested_directory(plan.options.cache_dir)
    if directory is None:
        return lower()
    timings = dict(plan.timings)
    with step(_LOG, "cache", timings):
        entry = entry_of(plan, directory)
        figures = None if entry is None else entry.figures()

    def lower_with_plans() -> Lowered:
        from ipujax.storage.stored_values import with_stored_values  # a program of the cache is called without

        return with_stored_values(plan.options.cache_dir, lower)

    if entry is not None and figures is not None:
        return CachedLowered(plan, entry, figures, timings, lower_with_plans)
    lowered = lower_with_plans()
    lowered.store = entry
    return lowered
