"""`ipu.search`: the best plan of a step on a machine, by estimates of all and figures of those compiled.

Input: a step, shapes of its arguments, a machine. Output: `Search`, a table; nothing is run.

All combinations of axes are estimated (`estimates`), and the best are compiled (`search_run`). Plans that need less
memory (state over `data` or in streaming memory, recomputation) are tried where the plain one may not fit.

Limits: arguments are split over the mesh axis "model" in one way, that of least estimated cycles on two IPUs, for all
numbers of shards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ipujax.caching import options_data
from ipujax.device import IPUModel, check_device, current_device
from ipujax.jit import IpuFunction
from ipujax.lowering.digests import NoDigestError, digest_of, jaxpr_digest
from ipujax.plan_search.candidate_plans import candidates, donated_arguments
from ipujax.plan_search.estimates import StepCosts
from ipujax.plan_search.search_plan import traced_step
from ipujax.plan_search.search_run import SearchRun
from ipujax.plan_search.search_settings import check_search, checked_axes, checked_positions, checked_seconds
from ipujax.plan_search.search_table import ENDINGS, Ended, Search
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.logs import OutOfTime, ending_at, watch_compilation
from ipujax.runtime.options import Options
from ipujax.runtime.signatures import checking_calls
from ipujax.storage.versions import compiler_state
from ipujax.studies.sweep_file import SweepFile

_COMPILED = 12  # plans at most, unless `compiled` says otherwise


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
        step: function of pytrees of arrays, as `step(params, state, batch)`; or one that `ipu.jit` returned, without
            settings that plans have, such as shardings.
        args: its arguments, or their shapes.
        device: the machine; that of `step`, or the default device, when None.
        batch_argnums: positional arguments whose first axis is the batch.
        axes: values of fields of `ipu.Plan` to try, by name, all combinations; others have their default: powers of two
            of IPUs and micro-batches.
        seconds: time after which the search ends, in the middle of a plan too.
        donate_argnums: as of `ipu.jit`; when None those of `step`, or, where it names none, arguments whose arrays all
            come back, but for the batch.
        compiled: most plans that are compiled.
        options: options of plans; those of `step` when None. Its recomputation is that of all plans, unless it is
            "none", or an axis.
        executor: has `submit` as one of `concurrent.futures`; plans are compiled in this process when None.
        path: file to which figures of compiled plans are written as they come; with a file of the same search, what is
            there is not compiled again.

    Returns:
        A row for each plan, best first. An interrupted search returns what it has.

    Raises:
        ArgumentError: an unknown axis, one without values, a batch that no plan divides, arguments that exceed the
            memory of the machine, a step with a setting that no plan keeps.
    """
    deadline = time.monotonic() + checked_seconds(seconds)
    check_search(step, compiled, options, executor)
    machine = _device(step, device)
    plain, donate, options = _with_settings_of_step(step, args, donate_argnums, options)
    batch = checked_positions("batch_argnums", batch_argnums, args)
    user_axes = checked_axes({} if axes is None else axes, args, batch)
    if options.recompute != "none":
        user_axes.setdefault("recompute", (options.recompute,))
    settings = {"batch_argnums": batch, "device": machine, "donate_argnums": donate, "options": options}
    run: SearchRun | None = None
    file: SweepFile[str] | None = None
    ended: Ended = "all"
    try:
        with (
            ending_at(deadline),
            # Of no named steps, hence `tuple`: plans are compiled inside.
            watch_compilation(f"search of {getattr(plain, '__name__', 'step')}", tuple, options.progress),
        ):
            run = _run_of_step(plain, args, user_axes, settings, deadline)
            if path is not None:
                file = SweepFile[str](path, _digest(run), "search")
            run.run(compiled, executor, file)
    except OutOfTime:
        ended = "seconds"
    except KeyboardInterrupt:
        ended = "interrupt"
    finally:
        if file is not None:
            file.close()
    if run is None:
        return Search((), plain, settings, machine.target.bytes_per_tile, (f"no plan: {ENDINGS[ended]}",), ended)
    return run.result(run.space.reasons, ended)


def _with_settings_of_step(
    step: Any, args: Sequence[Any], donate_argnums: int | Sequence[int] | None, options: Options | None
) -> tuple[Callable[..., Any], tuple[int, ...] | None, Options]:
    """Return a step as a plain function, and donated positions and options, those of `ipu.jit` where None is given."""
    plain = step
    if isinstance(step, IpuFunction):
        step.check_kept("ipu.search", ("donate_argnums", "donate_argnames"))
        plain = step.fun
        options = step.options if options is None else options
        if donate_argnums is None and step.names_donated:
            donate_argnums = step.donated_positions(args)
    donate = None if donate_argnums is None else checked_positions("donate_argnums", donate_argnums, args)
    return plain, donate, options or Options()


def _run_of_step(
    plain: Callable[..., Any], args: Sequence[Any], axes: Mapping[str, Any], settings: dict[str, Any], deadline: float
) -> SearchRun:
    """Return the run of a search, with its plans; the step is traced once, as plans are made of its jaxpr."""
    traced = traced_step(plain, args)
    target = settings["device"].target
    is_batch = traced.is_of(settings["batch_argnums"])
    if settings["donate_argnums"] is None:
        settings["donate_argnums"] = donated_arguments(traced, is_batch)
    space = candidates(traced, is_batch, target, axes, settings["donate_argnums"])
    parts = space.is_split, space.least_rows, space.large
    costs = StepCosts(traced, is_batch, target, *parts, settings["options"], space.stored_row_bytes)
    return SearchRun(plain, tuple(args), space, costs, settings, deadline)


def _digest(run: SearchRun) -> str:
    """Digest of all that the figures of a search depend on."""
    settings = run.settings
    try:
        return digest_of(
            compiler_state(),
            jaxpr_digest(run.costs.traced.jaxpr),
            options_data(settings["options"]),
            (settings["batch_argnums"], settings["donate_argnums"], settings["device"].target.to_data()),
            [repr(plan) for plan in run.space.plans],
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
