"""`ipu.search`: the best plan of a step on a machine, by estimates of all and figures of those compiled.

Input: a step, shapes of its arguments, a machine. Output: `Search`, a table; nothing is run.

All combinations of axes are estimated (`estimates`). The plan of fewest estimated cycles that may fit is compiled, and
corrects the estimates of plans like it; then the next, until no estimate is near the best compiled plan. Plans that
need less memory (state over `data` or in streaming memory, recomputation) are tried where the plain one may not fit.

Limits: automatic stages of compiled plans are searched again by `ipu.pipeline`. Arguments are split over the mesh axis
"model" in one way, that of least estimated cycles on two IPUs, for all numbers of shards.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import jax

from ipujax.arguments import as_numbers
from ipujax.caching import options_data
from ipujax.device import IPUModel, check_device, current_device, device_of
from ipujax.jit import IpuFunction
from ipujax.lowering.digests import NoDigestError, digest_of, jaxpr_digest
from ipujax.plan_search.candidate_plans import Candidates, candidates, checked_axes, donated_arguments
from ipujax.plan_search.estimates import Calibration, Estimate, StepCosts
from ipujax.plan_search.search_plan import Plan, TracedStep, traced_step
from ipujax.plan_search.search_table import Ended, Search, SearchRow
from ipujax.runtime.errors import ArgumentError, IpuError, TileMemoryError
from ipujax.runtime.options import Options
from ipujax.runtime.signatures import checking_calls
from ipujax.storage.versions import compiler_state
from ipujax.studies.point_costs import PointCost
from ipujax.studies.sweep_file import SweepFile

_NEAR = 1.15  # estimates up to so many times the cycles of the best compiled plan are compiled
_SLOWER = 1.1  # times the cycles of fewer shards, above which no more shards are tried
_FAR = 2.0  # times the cycles of the best estimate, above which the least cycles of a plan rule it out
_MANY_STAGES = 8  # from which `ipu.pipeline` does not search the stages: it would lower dozens of pipelines
_MIN_COMPILED = 4  # plans that are compiled, as estimates are corrected by them
_COMPILED = 12  # plans at most, unless `compiled` says otherwise
_ROUND = 4  # plans that an executor has at once
_FULL_SHARE = 0.6  # of a tile's memory, from which plans of less memory are tried too
_HOPELESS = 2.0  # times a tile's memory, above which a plan is not planned again


@checking_calls("ipu.search")
def search(
    step: Callable[..., Any],
    *args: Any,
    device: IPUModel | None = None,
    batch_argnums: int | Sequence[int] = -1,
    axes: Mapping[str, Sequence[Any]] | None = None,
    seconds: float | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    compiled: int = _COMPILED,
    options: Options | None = None,
    executor: Any = None,
    path: str | os.PathLike[str] | None = None,
) -> Search:
    """Search the best plan of a training step or an inference function on a machine; nothing is run::

        found = ipu.search(step, params, state, batch, device=ipu.IPUModel(num_ipus=16), batch_argnums=2)
        print(found)
        step = found.function()  # or found.best.plan.jit(step, batch_argnums=2, device=…), or paste its text

    Args:
        step: function of pytrees of arrays, as `step(params, state, batch)`; or one that `ipu.jit` returned.
        args: its arguments, or their shapes.
        device: the machine; that of `step`, or the default device, when None.
        batch_argnums: positional arguments whose first axis is the batch.
        axes: values of fields of `ipu.Plan` to try, by name, all combinations; others have their default: powers of two
            of IPUs and micro-batches.
        seconds: time after which no other plan is estimated or compiled.
        donate_argnums: as of `ipu.jit`; arguments whose arrays all come back, but for the batch, when None.
        compiled: most plans that are compiled.
        options: options of compiled plans.
        executor: has `submit` as one of `concurrent.futures`; plans are compiled in this process when None.
        path: file to which figures of compiled plans are written as they come; with a file of the same search, what is
            there is not compiled again.

    Returns:
        A row for each plan, best first. An interrupted search returns what it has.

    Raises:
        ArgumentError: an unknown axis, one without values, a batch that no plan divides, arguments that exceed the
            memory of the machine.
    """
    machine = _device(step, device)
    plain = inspect.unwrap(step) if isinstance(step, IpuFunction) else step
    batch = as_numbers("batch_argnums", batch_argnums, "ipu.search")
    user_axes = checked_axes(axes or {})
    deadline = None if seconds is None else time.monotonic() + seconds
    # Traced once: plans are made of its jaxpr.
    traced = traced_step(plain, args)
    is_batch = traced.is_of(batch)
    if donate_argnums is None:
        donate_argnums = step.donate_argnums if isinstance(step, IpuFunction) else donated_arguments(traced, is_batch)
    donate = as_numbers("donate_argnums", donate_argnums, "ipu.search")
    space = candidates(traced, is_batch, machine.target, user_axes, donate)
    settings = {"batch_argnums": batch, "device": machine, "donate_argnums": donate, "options": options}
    run = _Run(
        plain,
        tuple(args),
        StepCosts(traced, is_batch, machine.target, space.is_split, space.least_rows, space.large),
        settings,
        deadline,
    )
    run.refused.update(space.impossible)
    file = None if path is None else SweepFile[str](path, _digest(traced, space, settings), "search")
    ended: Ended = "all"
    try:
        run.estimate(space)
        run.compile_best(compiled, executor, file)
        ended = "seconds" if run.is_over else "all"
    except KeyboardInterrupt:
        ended = "interrupt"
    finally:
        if file is not None:
            file.close()
    return run.result(space.reasons, ended)


def _digest(traced: TracedStep, space: Candidates, settings: Mapping[str, Any]) -> str:
    """Digest of all that the figures of a search depend on."""
    try:
        return digest_of(
            compiler_state(),
            jaxpr_digest(traced.jaxpr),
            options_data(settings["options"] or Options()),
            (settings["batch_argnums"], settings["donate_argnums"], settings["device"].target.to_data()),
            [repr(plan) for plan in space.plans],
        )
    except NoDigestError as error:
        raise ArgumentError("a search of this step has no file", got=str(error), hint="leave path out") from error


def _device(step: Any, device: IPUModel | None) -> IPUModel:
    of_step = step.device if isinstance(step, IpuFunction) else None
    machine = device or of_step or current_device()
    check_device(machine, "ipu.search")
    if not isinstance(machine, IPUModel):
        raise ArgumentError("ipu.search compares cycles", expected="device=ipu.IPUModel(...)", got=machine)
    return machine


@dataclass(frozen=True, slots=True)
class _Run:
    """A search while it runs: its dictionaries grow."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    costs: StepCosts
    settings: dict[str, Any]
    deadline: float | None  # of `time.monotonic`
    estimates: dict[Plan, Estimate] = field(default_factory=dict)
    refused: dict[Plan, str] = field(default_factory=dict)
    compiled: dict[Plan, PointCost] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def is_over(self) -> bool:
        """True once the seconds have passed."""
        return self.deadline is not None and time.monotonic() > self.deadline

    @property
    def bytes_per_tile(self) -> int:
        """Memory of a tile."""
        return self.costs.target.bytes_per_tile

    def estimate(self, space: Candidates) -> None:
        """Estimate plans, and those of less memory where one may not fit."""
        best = dict[int, float]()  # estimated cycles of the best plan that may fit, by number of shards
        # Plans of all IPUs first, as the seconds may end before all are estimated.
        for plan in sorted(space.plans, key=lambda plan: (plan.shards, -plan.num_ipus)):
            if self.is_over and self.estimates:  # a table has one plan at least
                return
            if _is_past_the_best(best, plan.shards):
                self.refused[plan] = "fewer shards are faster"
                continue
            # The cut of a plan into stages takes up to seconds: it is left out where it cannot matter.
            if self.costs.least_cycles(plan) > _FAR * min(best.values(), default=inf):
                self.refused[plan] = "slower, whatever its stages"
                continue
            self._estimate(plan)
            if plan in self.refused or self._is_full(plan):
                # What needs less memory costs cycles: it is only tried where memory may be lacking.
                for smaller in space.smaller_plans(plan):
                    self._estimate(smaller)
            fitting = [each for each in (plan, *space.smaller_plans(plan)) if each in self.estimates]
            cycles = [self.estimates[each].cycles for each in fitting if self.may_fit(each)]
            best[plan.shards] = min([*cycles, best.get(plan.shards, inf)])

    def _is_full(self, plan: Plan) -> bool:
        """Return True for a plan that may need more memory than there is."""
        return plan in self.estimates and self.estimates[plan].tile_bytes > _FULL_SHARE * self.bytes_per_tile

    def _estimate(self, plan: Plan) -> None:
        if plan in self.estimates or plan in self.refused:
            return
        try:
            estimate = self.costs.estimate(plan)
        except IpuError as error:
            self.refused[plan] = error.what
            return
        # The schedule that suits the machine has a name too.
        if plan.schedule is None or self.estimates.get(replace(plan, schedule=None)) != estimate:
            self.estimates[plan] = estimate

    def corrected(self, plan: Plan) -> Estimate:
        """Return the estimate of a plan, corrected by those that are compiled."""
        return self.calibration.corrected(plan, self.estimates[plan])

    def may_fit(self, plan: Plan) -> bool:
        """Return True for a plan whose estimate fits."""
        return self.corrected(plan).tile_bytes <= self.bytes_per_tile

    def next_plan(self) -> Plan | None:
        """Return the plan to compile next: of those that may fit the fastest, else the smallest; None for none."""
        remaining = [plan for plan in self.estimates if plan not in self.compiled]
        # Nothing is slower than a plan that is not known yet.
        best = min((cost.cycles or 0 for cost in self.compiled.values() if cost.fits), default=None)
        fitting = [plan for plan in remaining if self.may_fit(plan)]
        if fitting:
            plan = min(fitting, key=lambda plan: self.corrected(plan).cycles)
            is_near = best is None or len(self.compiled) < _MIN_COMPILED or self.corrected(plan).cycles <= _NEAR * best
            return plan if is_near else None
        if best is not None or not remaining:
            return None
        return min(remaining, key=lambda plan: self.corrected(plan).tile_bytes)

    def compiled_plan(self, plan: Plan) -> Plan:
        """Return a plan as it is compiled: with the cut of its estimate where a search of stages would take long."""
        return plan if plan.stages < _MANY_STAGES else replace(plan, cuts=self.estimates[plan].cuts)

    def note(self, plan: Plan, cost: PointCost) -> None:
        """Add the figures of a compiled plan."""
        self.compiled[plan] = cost
        if cost.max_tile_bytes is not None:
            self.calibration.learn(plan, self.estimates[plan], cost.cycles, cost.max_tile_bytes)

    def compile_best(self, max_plans: int, executor: Any, file: SweepFile[str] | None) -> None:
        """Compile the best plans, until the next is no better, or the seconds have passed."""
        file_costs = {} if file is None else file.done
        while not self.is_over and len(self.compiled) < max_plans:
            plans = list(self._round(1 if executor is None else min(_ROUND, max_plans - len(self.compiled))))
            if not plans:
                return
            plans_in_file = [plan for plan in plans if repr(plan) in file_costs]
            for plan in plans_in_file:
                self.note(plan, file_costs[repr(plan)][0])
            for plan, cost in self._figures([plan for plan in plans if plan not in plans_in_file], executor):
                self.note(plan, cost)
                if file is not None:
                    file.add(repr(plan), [cost])

    def _round(self, count: int) -> Iterator[Plan]:
        """Yield the plans to compile next; those of one round do not know of each other."""
        chosen: dict[Plan, PointCost] = {}
        for _ in range(count):
            plan = replace(self, compiled={**self.compiled, **chosen}).next_plan()
            if plan is None:
                return
            chosen[plan] = PointCost(None, None, False)
            yield plan

    def _figures(self, plans: Sequence[Plan], executor: Any) -> Iterator[tuple[Plan, PointCost]]:
        best = min((cost.cycles or 0 for cost in self.compiled.values() if cost.fits), default=None)
        jobs = [(self.step, self.args, self.compiled_plan(plan), self.settings, best) for plan in plans]
        if executor is None:
            yield from ((plan, compiled_cost(*job)) for plan, job in zip(plans, jobs, strict=True))
            return
        # All jobs of a round are submitted before the first is waited for.
        futures = [executor.submit(compiled_cost, *job) for job in jobs]
        for plan, future in zip(plans, futures, strict=True):
            try:
                yield plan, future.result()
            except BrokenExecutor as error:
                yield plan, PointCost(None, None, False, f"its worker died: {error}")

    def result(self, reasons: Sequence[str], ended: Any) -> Search:
        """Return the table."""
        rows = [*self._compiled_rows(), *self._estimated_rows()]
        rows += [SearchRow(plan, None, None, False, "none", reason) for plan, reason in self.refused.items()]
        settings = self.settings
        return Search(tuple(sorted(rows, key=_rank)), self.step, settings, self.bytes_per_tile, tuple(reasons), ended)

    def _compiled_rows(self) -> Iterator[SearchRow]:
        for plan, cost in self.compiled.items():
            reason = cost.error or ("" if cost.fits else self._lacking(cost.max_tile_bytes or 0))
            code = self.compiled_plan(plan)
            yield SearchRow(code, cost.cycles, cost.max_tile_bytes, cost.fits, "compiled", reason)

    def _estimated_rows(self) -> Iterator[SearchRow]:
        best = min((cost.cycles or 0 for cost in self.compiled.values() if cost.fits), default=None)
        for plan in self.estimates:
            if plan not in self.compiled:
                estimate = self.corrected(plan)
                fits = self.may_fit(plan)
                slower = best is not None and estimate.cycles > _NEAR * best
                reason = self._lacking(int(estimate.tile_bytes)) if not fits else "slower" if slower else "not compiled"
                yield SearchRow(plan, int(estimate.cycles), int(estimate.tile_bytes), fits, "estimated", reason)

    def _lacking(self, tile_bytes: int) -> str:
        return f"needs {max(0, tile_bytes - self.bytes_per_tile) / 1024:,.1f} KiB more"


def _is_past_the_best(best: Mapping[int, float], shards: int) -> bool:
    """Return True if plans grew slower with the last numbers of shards, so that those with more would too."""
    smaller = [cycles for number, cycles in sorted(best.items()) if number < shards]
    return len(smaller) > 1 and _SLOWER * min(smaller[:-1]) < smaller[-1]


def _rank(row: SearchRow) -> tuple[Any, ...]:
    is_known = row.max_tile_bytes is not None
    return (
        row.figures == "none",
        not row.fits,
        row.figures != "compiled",
        (row.cycles or 0) if row.fits else (row.max_tile_bytes or 0),
        not is_known,
    )


def compiled_cost(
    step: Callable[..., Any], args: Sequence[Any], plan: Plan, settings: Mapping[str, Any], best_cycles: int | None
) -> PointCost:
    """Return the figures of a compiled plan.

    A plan that does not fit as it is planned first is planned again, along the attempts of `ipu.jit`, unless the first
    attempt is hopeless, or slower than the best plan so far.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(args))
    options = settings["options"] or Options()
    target = settings["device"].target
    # Of as many IPUs as the plan uses: others have no work.
    num_ipus = 1 << (plan.num_ipus - 1).bit_length()
    settings = {**settings, "device": device_of(target.replace(num_ipus=num_ipus))}
    try:
        first = plan.jit(step, **{**settings, "options": replace(options, allow_out_of_memory=True)})
        profile = first.lower(*shapes).compile().profile
        needed_bytes = int(profile.memory.max_tile_bytes)
        cycles = int(profile.cycles)
        # The first attempt fits: `ipu.jit` would take it too.
        if not profile.memory.lacking():
            return PointCost(cycles, needed_bytes, True)
        if needed_bytes > _HOPELESS * target.bytes_per_tile or (best_cycles is not None and cycles > best_cycles):
            return PointCost(cycles, needed_bytes, False)
        profile = plan.jit(step, **settings).lower(*shapes).compile().profile
        return PointCost(int(profile.cycles), int(profile.memory.max_tile_bytes), True)
    except TileMemoryError as error:
        return PointCost(None, int(error.needed_bytes), False)
    except IpuError as error:
        return PointCost(None, None, False, error.what)
