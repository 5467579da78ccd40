"""Evaluation of a lowered program in JAX operations, in this process or on all instances together.

Input: a lowered program, its jaxprs, and arrays of their inputs. Output: an array for each result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ipujax.calls import locates_nans, run_equations
from ipujax.distributed.instance import Spread, check_same_program, over_instances
from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.lower import LoweredProgram
from ipujax.runtime.compile import cycle_counter
from ipujax.runtime.engine import engine_function
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import Program, StreamOut, distinct
from ipujax.runtime.host import ALONE, CallStream, HostCalls


def evaluate_program(
    name: str,
    program: LoweredProgram,
    jaxprs: Mapping[str, ClosedJaxpr],
    operands: Sequence[Any],
    spread: Spread | None,
    calls: HostCalls | None,
    record: Callable[[Program, Any], None] | None,
    exact_splits: bool,
) -> Sequence[Any]:
    """Return an array for each result of a program; see `nan_location` for `jax.debug_nans`.

    Args:
        name: name of the function.
        program: the lowered program.
        jaxprs: the jaxpr after each pass.
        operands: arrays of the inputs of the jaxprs.
        spread: distribution of replicas over instances.
        calls: caller of the program's Python functions.
        record: receives decisions of data-dependent control, see `engine_function`.
        exact_splits: see `Options`.

    Raises:
        ArgumentError: the program calls Python functions, and its replicas are on several instances.
    """
    if locates_nans() and spread is None:
        return run_equations(jaxprs["shard_map"], operands)  # the last one with the equations that a user wrote
    instances = ALONE if spread is None else spread.instances
    run = engine_function(
        program.graph,
        program.program,
        exact_splits=exact_splits,
        record=record,
        calls=calls,
        instances=instances,
        clock=cycle_counter(program.graph, program.program),
    )
    if spread is None:
        return program.evaluate(operands, run)
    if calls is not None:
        problem = f"{name} calls Python functions while it runs, and its replicas are on several instances"
        raise ArgumentError(problem, hint="return the arguments of these functions as results")
    # Different programs would exchange bytes of different arrays, or wait for each other for ever.
    check_same_program(name, list(jaxprs.values())[-1])
    together = over_instances(
        lambda *shares: program.evaluate(shares, run, instances), program.in_dims, program.out_dims
    )
    results: Sequence[Any] = together(*operands)
    return results


def host_calls(program: Program) -> HostCalls | None:
    """Return a caller of the Python functions that a program calls; None if it has none."""
    has_calls = any(isinstance(n, StreamOut) and isinstance(n.stream, CallStream) for n in distinct(program))
    return HostCalls(guarded=True) if has_calls else None
