"""Evaluation of a lowered program in JAX operations, in this process or on all instances together.

Input: a lowered program, its jaxprs, and arrays of their inputs. Output: an array for each result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ipujax.calls import locates_nans, run_equations
from ipujax.lowering_plan.planned_program import PlannedProgram
from ipujax.runtime.compile import cycle_counter
from ipujax.runtime.engine import DecisionLog, engine_function
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.host import ALONE, HostCalls


def evaluate_program(
    planned: PlannedProgram,
    operands: Sequence[Any],
    calls: HostCalls | None,
    log: DecisionLog | None,
) -> Sequence[Any]:
    """Return an array for each result of a program; see `nan_location` for `jax.debug_nans`.

    Args:
        planned: the program.
        operands: arrays of the inputs of its jaxprs.
        calls: caller of its Python functions.
        log: takes the decisions of data-dependent control, see `engine_function`.

    Raises:
        ArgumentError: the program calls Python functions, and its replicas are on several instances.
    """
    settings = planned.plan.settings
    spread = settings.spread
    program = planned.lowered
    if locates_nans() and spread is None:
        return run_equations(planned.jaxprs["shard_map"], operands)  # the last one with the equations that a user wrote
    instances = ALONE if spread is None else spread.instances
    run = engine_function(
        program.graph,
        program.program,
        exact_splits=settings.options.exact_splits,
        log=log,
        calls=calls,
        instances=instances,
        clock=cycle_counter(program.graph, program.program),
    )
    if spread is None:
        return program.evaluate(operands, run)
    if calls is not None:
        problem = f"{settings.name} calls Python functions while it runs, and its replicas are on several instances"
        raise ArgumentError(problem, hint="return the arguments of these functions as results")
    from ipujax.distributed.instance.process_arrays import over_instances  # for functions of several replicas alone
    from ipujax.distributed.instance.spread import check_same_program

    # Different programs would exchange bytes of different arrays, or wait for each other for ever.
    check_same_program(settings.name, planned.jaxpr)
    together = over_instances(
        lambda *shares: program.evaluate(shares, run, instances), *program.dims_of_instances(instances)
    )
    results: Sequence[Any] = together(*operands)
    return results
