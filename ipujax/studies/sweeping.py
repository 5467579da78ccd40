"""`ipu.sweep`: a function costed on many machines, in this process or by an executor.

Input: a function, shapes of its arguments, a grid of constants. Output: `Sweep`, a table. Nothing is run.

    plan="held"     the program for the function's device, costed on each machine: seconds for thousands of them
    plan="again"    a program for each machine
    plan="best"     of the programs of all machines the fastest that fits, for each: a better machine is never slower
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from queue import SimpleQueue
from typing import Any

from ipujax.caching import options_data
from ipujax.jit import IpuFunction
from ipujax.lowering.digests import NoDigestError, digest_of, jaxpr_digest
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.logs import progress_line
from ipujax.runtime.signatures import checking_calls
from ipujax.stages import Traced
from ipujax.storage.versions import compiler_state
from ipujax.studies.point_costs import (
    Changes,
    Job,
    Plan,
    PlanCosts,
    Point,
    PointCost,
    Work,
    costs_in_process,
    jobs_of,
    points_of,
)
from ipujax.studies.sweep_file import SweepFile
from ipujax.studies.sweep_table import Sweep


@checking_calls("ipu.sweep")
def sweep(
    fun: Any,
    *args: Any,
    grid: Mapping[str, Sequence[Any]] | Sequence[Changes],
    plan: Plan = "held",
    executor: Any = None,
    path: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Sweep:
    """Cost a function on many machines, and return a table; nothing is run::

        sweep = ipu.sweep(step, weights, batch, grid={"exchange_bytes_per_cycle": [4, 8], "clock_hz": [1.3e9, 1.8e9]})
        for row in sweep.pareto("seconds", "exchange_bytes_per_cycle"):
            print(row)

    Args:
        fun: a function of `ipu.jit`, whose device the points change; one of plain JAX, for the default device; or the
            path of one, "module:name".
        args: its arguments, arrays or their shapes.
        grid: values of constants of `ipu.Target`, by name, of "num_ipus" and of "arch": all combinations are points;
            or a list of changes, one a point.
        plan: "held": the program for the device, costed on each point, and one more program for each combination of
            constants that programs depend on, such as tiles; "again": a program for each point; "best": for each
            point the program of fewest cycles that fits, of those of all points with equal such constants.
        executor: has `submit` as one of `concurrent.futures`, for processes that start with an empty interpreter
            ("spawn"); this process alone when None.
        path: file to which costs are written as they come. With a file of the same sweep, what is there is not done
            again.
        progress: show a line of progress on a terminal, with an estimate of the end.

    Returns:
        A row for each point, in order.

    Raises:
        TargetError: an unknown constant, or a value that it cannot have.
        ArgumentError: no points; a function that cannot be pickled, with an executor; a job at which workers die
            twice; a file of another sweep, or one that another sweep writes to.
        TypeError: arguments that the function does not take, as `ipu.jit` raises it.
        ProfileError: the trip count of a loop is data, and not in `Options.trip_counts`.
    """
    work = Work.of(fun, args)
    points = points_of(work.device("ipu.sweep"), grid)
    jobs = jobs_of(points, plan)
    traced = work.function().trace(*work.args)  # first: a function that cannot be traced is no matter of machines
    file = None if path is None else SweepFile[int](path, _digest(work.function(), traced, points, plan))
    try:
        costs_by_job = {} if file is None else _costs_in_file(file, jobs)
        remaining = {number: job for number, job in enumerate(jobs) if number not in costs_by_job}
        run = _Run(work, points, remaining)
        line = progress_line(_Progress(len(points), jobs, costs_by_job).text) if progress else nullcontext()
        with line:
            for number, costs in run.in_process() if executor is None else run.by(executor):
                costs_by_job[number] = costs
                if file is not None:
                    file.add(number, costs)
    finally:
        if file is not None:
            file.close()
    return Sweep.of(points, jobs, costs_by_job)


def _costs_in_file(file: SweepFile[int], jobs: Sequence[Job]) -> dict[int, list[PointCost]]:
    """Return the costs of jobs in a file, each with one for each of its points."""
    for number, costs in file.done.items():
        if number not in range(len(jobs)) or len(costs) != len(jobs[number].points):
            raise file.foreign("costs of other jobs")
    return dict(file.done)


def _digest(fun: IpuFunction[Any, Any], traced: Traced, points: Sequence[Point], plan: Plan) -> str:
    """Return a digest of all that the costs of a sweep depend on."""
    try:
        return digest_of(
            compiler_state(),
            jaxpr_digest(traced.jaxpr),
            options_data(fun.options),
            (traced.signature.donated, traced.signature.offloaded, plan),
            (traced.shardings.inputs, traced.result_shardings),
            [(point.target.to_data(), point.base.to_data()) for point in points],
        )
    except NoDigestError as error:
        hint = "leave path out"
        raise ArgumentError("a sweep of this function has no file", got=str(error), hint=hint) from error


@dataclass(frozen=True, slots=True)
class _Run:
    """Jobs that remain of a sweep."""

    work: Work
    points: Sequence[Point]
    jobs: Mapping[int, Job]

    def in_process(self) -> Iterator[tuple[int, list[PointCost]]]:
        """Yield number and costs of each job, done in this process."""
        costs: PlanCosts | None = None
        for number, job in self.jobs.items():
            if costs is None or costs.plan != job.plan:
                costs = PlanCosts(self.work, job.plan)
            yield number, costs.on(self._targets(job))

    def by(self, executor: Any) -> Iterator[tuple[int, list[PointCost]]]:
        """Yield number and costs of each job as an executor ends it; a job that fails is done once more."""
        if not hasattr(executor, "submit") or isinstance(executor, type):
            expected = "an executor, as those of concurrent.futures"
            raise ArgumentError("executor of ipu.sweep has no method submit", expected=expected, got=repr(executor))
        pickled = self.work.pickled()
        ended: SimpleQueue[tuple[int, Any]] = SimpleQueue()

        def submit(number: int) -> None:
            job = self.jobs[number]
            future = executor.submit(costs_in_process, pickled, job.plan, self._targets(job))
            future.add_done_callback(lambda future: ended.put((number, future)))

        failed = list[int]()
        submitted = 0
        for number in self.jobs:
            try:
                submit(number)
                submitted += 1
            except BrokenExecutor:
                failed.append(number)
            except RuntimeError as error:
                expected = "an executor that is not shut down"
                raise ArgumentError("executor of ipu.sweep takes no job", expected=expected, got=str(error)) from error
        for _ in range(submitted):
            number, future = ended.get()
            try:
                costs = future.result()
            except Exception:  # its worker died, or the executor broke for another job: it is done again, by itself
                failed.append(number)
            else:
                yield number, costs
        if failed:
            # One after the other in one process: if that dies, the job that it had is to blame.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                for number in sorted(failed):
                    yield number, self._alone(number, pickled, pool)

    def _alone(self, number: int, pickled: bytes, pool: ProcessPoolExecutor) -> list[PointCost]:
        """Do a job in a process that has no other one."""
        job = self.jobs[number]
        try:
            return pool.submit(costs_in_process, pickled, job.plan, self._targets(job)).result()
        except BrokenExecutor as error:
            changes = dict(self.points[job.points[0]].changes)
            raise ArgumentError(
                f"the worker of a point of ipu.sweep died twice: {changes}",
                expected="a process that ends its job",
                got=f"{error}; {len(job.points)} points, with the program for the first",
                hint='a script calls it below if __name__ == "__main__"; or more memory for each worker; '
                "with path= the other points are kept",
            ) from error

    def _targets(self, job: Job) -> list[Any]:
        return [self.points[number].target for number in job.points]


class _Progress:
    """Text of the line of progress of a sweep; `costs` grow meanwhile."""

    def __init__(self, num_points: int, jobs: Sequence[Job], costs: Mapping[int, Sequence[PointCost]]) -> None:
        self._num_points = num_points
        self._jobs = jobs
        self._costs = costs
        self._first_share = self._share
        self._start = time.monotonic()

    @property
    def _share(self) -> float:
        return sum(len(self._jobs[number].points) for number in list(self._costs)) / sum(
            len(job.points) for job in self._jobs
        )

    def text(self) -> str:
        """Return the number of points that are done, and an estimate of the time until the end."""
        seconds = time.monotonic() - self._start
        share = self._share
        text = f"ipujax: sweep: {share * self._num_points:,.0f} of {self._num_points:,} points, {seconds:,.0f} s"
        if share == self._first_share:
            return text
        return f"{text}, ends in about {seconds * (1 - share) / (share - self._first_share):,.0f} s"
