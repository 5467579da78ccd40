"""A search while it runs: which plan is estimated next, and which is compiled.

Input: the plans of a search, costs of its step. Output: `Search`, at any time: what is known of all plans.

    estimate          all plans, those first that may be fastest; of those that may not fit those with less memory too;
                      none that is far slower than the best, whatever its cut into stages
                      of few shards first, after which one plan is compiled: a search that ends early has it
    compile           of the plans that may fit that of fewest estimated cycles, which corrects the estimates of others;
                      as it is planned first, until no estimate is near the best
    compile to fit    those that did not fit and would be faster than the best: planned again, along all attempts;
                      without a best the smallest, before others of too much memory

A plan is compiled with the cut into stages of its estimate: `ipu.pipeline` would lower dozens of cuts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from ipujax.plan_search.candidate_plans import Candidates
from ipujax.plan_search.estimates import Calibration, Estimate, StepCosts
from ipujax.plan_search.plan_costs import PlanJob, compiled_cost
from ipujax.plan_search.search_plan import Plan
from ipujax.plan_search.search_table import ENDINGS, Ended, Search, SearchRow
from ipujax.runtime.errors import IpuError
from ipujax.runtime.logs import Log, OutOfTime, ending_at, step
from ipujax.studies.point_costs import PointCost
from ipujax.studies.sweep_file import SweepFile

_LOG = Log("search")
# All are assumed: what leaving out plans by them costs was not measured.
_NEAR = 1.15  # estimates up to so many times the cycles of the best compiled plan are compiled
_SLOWER = 1.1  # times the cycles of fewer shards, above which no more shards are tried
_FAR = 2.0  # times the cycles of the best estimate, above which the least cycles of a plan rule it out
_MIN_COMPILED = 4  # plans that are compiled, as estimates are corrected by them
_ROUND = 4  # plans that an executor has at once
_FULL_SHARE = 0.6  # of a tile's memory, from which plans of less memory are tried too
_HOPELESS = 2.0  # times a tile's memory, above which a plan is not compiled, or planned again
_ESTIMATE_SHARE = 0.5  # of the seconds, after which plans are compiled that are estimated by then
_UNKNOWN = PointCost(None, None, fits=False)


@dataclass(frozen=True, slots=True)
class SearchRun:
    """A search while it runs: its collections grow.

    Args:
        step: the step.
        args: its arguments, or their shapes.
        space: the plans.
        costs: costs of its micro-batches.
        settings: arguments of `Plan.jit` beside the step.
        deadline: of `time.monotonic`.
        estimates: of plans.
        refused: plans without figures, and why.
        compiled: figures of plans.
        fitted: plans that were planned again.
        pending: plans that are to be estimated.
        best: estimated cycles of the best plan that may fit when it is planned again, by number of shards.
        calibration: corrections of estimates.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    space: Candidates
    costs: StepCosts
    settings: dict[str, Any]
    deadline: float = inf
    estimates: dict[Plan, Estimate] = field(default_factory=dict)
    refused: dict[Plan, str] = field(default_factory=dict)
    compiled: dict[Plan, PointCost] = field(default_factory=dict)
    fitted: set[Plan] = field(default_factory=set)
    pending: deque[Plan] = field(default_factory=deque)
    best: dict[int, float] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def bytes_per_tile(self) -> int:
        """Memory of a tile."""
        return self.costs.target.bytes_per_tile

    def run(self, max_plans: int, executor: Any, file: SweepFile[str] | None) -> None:
        """Estimate all plans and compile the best; raises `OutOfTime` at the deadline."""
        self.refused.update(self.space.impossible)
        self.pending.extend(sorted(self.space.plans, key=lambda plan: plan.shards))
        while True:
            enough = _ESTIMATE_SHARE * self.deadline + (1 - _ESTIMATE_SHARE) * time.monotonic()
            while self._estimate_shards(enough):
                # So that a search which ends within the estimates of more shards has a best plan.
                if self.best_cycles is None and any(map(self.may_fit, self.estimates)):
                    self._compile(list(self._round(1, max_plans)), executor, file, is_fitted=False)
            self._compile_best(max_plans, executor, file)
            if not self.pending:
                return

    def _estimate_shards(self, enough: float) -> bool:
        """Estimate the pending plans of one number of shards; return True if time is left for those of more."""
        shards = self.pending[0].shards if self.pending else 0
        count = len(self.space.plans)
        while self.pending and self.pending[0].shards == shards:
            try:
                detail = f"estimating plan {count - len(self.pending) + 1} of {count}"
                # The first estimate may take all of the time: without one nothing can be compiled.
                with ending_at(enough if self.estimates else self.deadline), step(_LOG, "estimate", detail=detail):
                    if shards not in self.best:
                        self._begin_shards(shards)
                    if self.pending[0] not in self.refused:
                        self._estimate_with_smaller(self.pending[0])
            except OutOfTime:
                if not self.estimates or time.monotonic() > self.deadline:
                    raise
                return False
            self.pending.popleft()
        return bool(self.pending)

    def _begin_shards(self, shards: int) -> None:
        """Order the plans of a number of shards, those first that may be fastest; refuse those that cannot be."""
        plans = [plan for plan in self.pending if plan.shards == shards]
        least_cycles = dict.fromkeys(plans, inf)
        # Plans of fewer shards that need too much memory are no reason to leave out slower ones, which need less.
        if not any(map(self.may_fit, self.estimates)):
            self.best.clear()
        is_past = _is_past_the_best(self.best, shards)
        for plan in plans:
            if is_past:
                self.refused[plan] = "fewer shards are faster"
                continue
            try:
                least_cycles[plan] = self.costs.least_cycles(plan)
            except IpuError as error:
                self.refused[plan] = error.what
        # Plans of other shards come later.
        later_plans = [plan for plan in self.pending if plan.shards != shards]
        self.pending.clear()
        self.pending.extend([*sorted(plans, key=lambda plan: least_cycles[plan]), *later_plans])
        self.best[shards] = inf

    def _estimate_with_smaller(self, plan: Plan) -> None:
        """Estimate a plan, and those of less memory if it may not fit."""
        # The cut of a plan into stages takes up to seconds: it is left out where it cannot matter.
        if self.costs.least_cycles(plan) > _FAR * min(self.best.values(), default=inf):
            self.refused[plan] = "slower, whatever its stages"
            return
        self._estimate(plan)
        is_full = plan in self.estimates and self.estimates[plan].tile_bytes > _FULL_SHARE * self.bytes_per_tile
        if plan in self.refused or is_full:
            # What needs less memory costs cycles: it is only tried where memory may be lacking, and may suffice then.
            smallest = self.space.smallest(plan)
            self._estimate(smallest)
            if smallest in self.estimates and self.may_fit(smallest, _HOPELESS):
                for smaller in self.space.smaller_plans(plan):
                    self._estimate(smaller)
        fitting = [each for each in (plan, *self.space.smaller_plans(plan)) if each in self.estimates]
        # A program that does not fit is planned again: one that needs less than this may fit then.
        cycles = [self.estimates[each].cycles for each in fitting if self.may_fit(each, _HOPELESS)]
        self.best[plan.shards] = min([*cycles, self.best[plan.shards]])

    def _estimate(self, plan: Plan) -> None:
        """Estimate a plan once; note the estimate, or the reason for which the plan is refused."""
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

    def may_fit(self, plan: Plan, memories: float = 1.0) -> bool:
        """Return True for a plan whose estimate fits a tile of so many times the memory."""
        return self.corrected(plan).tile_bytes <= memories * self.bytes_per_tile

    @property
    def best_cycles(self) -> int | None:
        """Cycles of the best compiled plan that fits; None if none does."""
        # Nothing is slower than a plan that is not known yet.
        return min((cost.cycles or 0 for cost in self.compiled.values() if cost.fits), default=None)

    def next_plan(self) -> Plan | None:
        """Return the plan to compile next: of those that may fit the fastest, else the smallest; None for none.

        Once a few are compiled, and none fits, these are planned again before others of too much memory are compiled.
        One that needs several times a tile's memory is not compiled.
        """
        remaining = [plan for plan in self.estimates if plan not in self.compiled]
        best = self.best_cycles
        fitting = [plan for plan in remaining if self.may_fit(plan)]
        if fitting:
            plan = min(fitting, key=lambda plan: self.corrected(plan).cycles)
            is_near = best is None or len(self.compiled) < _MIN_COMPILED or self.corrected(plan).cycles <= _NEAR * best
            return plan if is_near else None
        if best is not None or (len(self.compiled) >= _MIN_COMPILED and self.next_plan_to_fit() is not None):
            return None
        # The first is compiled whatever it needs: without any, nothing says how much memory is lacking. One with an
        # error says nothing of it.
        has_figures = any(cost.error is None for cost in self.compiled.values())
        possible = [plan for plan in remaining if not has_figures or self.may_fit(plan, _HOPELESS)]
        return min(possible, key=lambda plan: self.corrected(plan).tile_bytes, default=None)

    def next_plan_to_fit(self) -> Plan | None:
        """Return the plan to plan again: of those faster than the best the fastest; without a best the smallest."""
        best = self.best_cycles
        plans = {
            plan: cost
            for plan, cost in self.compiled.items()
            if plan not in self.fitted and not cost.fits and cost.max_tile_bytes is not None and cost.error is None
        }
        if best is None:
            possible = {p: c for p, c in plans.items() if (c.max_tile_bytes or 0) <= _HOPELESS * self.bytes_per_tile}
            return min(possible, key=lambda plan: possible[plan].max_tile_bytes or 0, default=None)
        faster = {plan: cost for plan, cost in plans.items() if (cost.cycles or 0) < best}
        return min(faster, key=lambda plan: faster[plan].cycles or 0, default=None)

    def compiled_plan(self, plan: Plan) -> Plan:
        """Return a plan as it is compiled: with the cut of its estimate."""
        return replace(plan, cuts=self.costs.cuts_of_program(plan, self.estimates[plan]))

    def note(self, plan: Plan, cost: PointCost, is_fitted: bool) -> None:
        """Add the figures of a compiled plan."""
        if is_fitted:
            self.fitted.add(plan)
            if not cost.fits:
                return  # the figures of the first attempt say more
        self.compiled[plan] = cost
        if cost.max_tile_bytes is not None:
            self.calibration.learn(plan, self.estimates[plan], cost.cycles, cost.max_tile_bytes)

    def _compile_best(self, max_plans: int, executor: Any, file: SweepFile[str] | None) -> None:
        """Compile the best plans, until the next is no better; those that do not fit again, to fit."""
        while True:
            if plans := list(self._round(1 if executor is None else _ROUND, max_plans)):
                self._compile(plans, executor, file, is_fitted=False)
            elif (plan := self.next_plan_to_fit()) is not None:
                self._compile([plan], executor, file, is_fitted=True)
            else:
                return

    def _compile(self, plans: Sequence[Plan], executor: Any, file: SweepFile[str] | None, *, is_fitted: bool) -> None:
        """Compile plans, but for those of which the file has figures."""
        keys = {plan: f"{plan!r}{', fitted' if is_fitted else ''}" for plan in plans}
        file_costs = {} if file is None else file.done
        for plan in plans:
            if keys[plan] in file_costs:
                self.note(plan, file_costs[keys[plan]][0], is_fitted)
        for plan, cost in self._figures([p for p in plans if keys[p] not in file_costs], is_fitted, executor):
            if cost is None:
                raise OutOfTime
            self.note(plan, cost, is_fitted)
            if file is not None:
                file.add(keys[plan], [cost])

    def _round(self, count: int, max_plans: int) -> Iterator[Plan]:
        """Yield the plans to compile next; those of one round do not know of each other."""
        chosen: dict[Plan, PointCost] = {}
        while len(chosen) < count and len(self.compiled) + len(chosen) < max_plans:
            plan = replace(self, compiled={**self.compiled, **chosen}).next_plan()
            if plan is None:
                return
            chosen[plan] = _UNKNOWN
            yield plan

    def _figures(
        self, plans: Sequence[Plan], is_fitted: bool, executor: Any
    ) -> Iterator[tuple[Plan, PointCost | None]]:
        """Yield the figures of plans; None for those that are not compiled by the deadline."""
        deadline = time.time() + self.deadline - time.monotonic()
        codes = [self.compiled_plan(plan) for plan in plans]
        jobs = [PlanJob(self.step, self.args, code, self.settings, is_fitted, deadline) for code in codes]
        number = f"{len(self.fitted) + 1} to fit" if is_fitted else f"{len(self.compiled) + 1}"
        if executor is None:
            for plan, job in zip(plans, jobs, strict=True):
                with step(_LOG, "compile", detail=f"compiling plan {number}, {plan!r}"):
                    cost = compiled_cost(job)
                yield plan, cost
            return
        # All jobs of a round are submitted before the first is waited for.
        futures = [executor.submit(compiled_cost, job) for job in jobs]
        for plan, future in zip(plans, futures, strict=True):
            try:
                with step(_LOG, "compile", detail=f"compiling plan {number} and others"):
                    cost = future.result()
            except BrokenExecutor as error:
                cost = PointCost(None, None, fits=False, error=f"its worker died: {error}")
            yield plan, cost

    def result(self, reasons: Sequence[str], ended: Ended) -> Search:
        """Return the table."""
        rows = [*self._compiled_rows(), *self._estimated_rows()]
        not_tried = dict.fromkeys(self.pending, f"not tried: {ENDINGS[ended]}")
        refused = {**self.refused, **{plan: text for plan, text in not_tried.items() if plan not in self.estimates}}
        rows += [SearchRow(plan, None, None, False, "none", reason) for plan, reason in refused.items()]
        rows.sort(key=_rank)
        return Search(tuple(rows), self.step, self.settings, self.bytes_per_tile, tuple(reasons), ended)

    def _compiled_rows(self) -> Iterator[SearchRow]:
        for plan, cost in self.compiled.items():
            reason = cost.error or ("" if cost.fits else self._lacking(cost.max_tile_bytes or 0))
            yield SearchRow(self.compiled_plan(plan), cost.cycles, cost.max_tile_bytes, cost.fits, "compiled", reason)

    def _estimated_rows(self) -> Iterator[SearchRow]:
        best = self.best_cycles
        for plan in self.estimates:
            if plan not in self.compiled:
                estimate = self.corrected(plan)
                fits = self.may_fit(plan)
                slower = best is not None and estimate.cycles > _NEAR * best
                reason = self._lacking(int(estimate.tile_bytes)) if not fits else "slower" if slower else "not compiled"
                code = replace(plan, cuts=estimate.cuts)
                yield SearchRow(code, int(estimate.cycles), int(estimate.tile_bytes), fits, "estimated", reason)

    def _lacking(self, tile_bytes: int) -> str:
        return f"needs {max(0, tile_bytes - self.bytes_per_tile) / 1024:,.1f} KiB more"


def _is_past_the_best(best: Mapping[int, float], shards: int) -> bool:
    """Return True if plans grew slower with the last numbers of shards, so that those with more would too."""
    smaller = [cycles for number, cycles in sorted(best.items()) if number < shards]
    return len(smaller) > 1 and _SLOWER * min(smaller[:-1]) < smaller[-1]


def _rank(row: SearchRow) -> tuple[Any, ...]:
    return (
        row.max_tile_bytes is None,  # those that were to be compiled, and could not be, are no better than others
        row.figures == "none",
        not row.fits,
        row.figures != "compiled",
        (row.cycles or 0) if row.fits else (row.max_tile_bytes or 0),
    )
