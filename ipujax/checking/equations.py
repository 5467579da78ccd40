"""Comparison of a program equation by equation: each is computed again by plain JAX from the program's own operands.

Input: probed equations, and the values of their streams in a run. Output: the first equation whose results differ beyond
rounding, and how many were compared. An error does not reach the equations after it, since their operands have it, so
that neither the length of a program nor its chaos matters.

Of loops the last iteration is compared; the loop itself from its operands to its results. Values of all replicas are
compared, [replicas, …].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.checking.differences import Difference, difference
from ipujax.checking.passes import type_text
from ipujax.checking.report import Mismatch
from ipujax.checking.rounding import rounding_sizes
from ipujax.checking.values import spread_of
from ipujax.lowering.gcl import is_collective
from ipujax.lowering.jax_compat import JaxprEqn, Literal
from ipujax.lowering.replicas.stacked_eval import Replicas, Rounded, holds_equations, stacked_equation
from ipujax.lowering.rules import ProbedEquation
from ipujax.runtime.graph import HostStream

_AT_ONCE = 32  # equations that XLA compiles together

Values = Mapping[HostStream, Any]  # by stream, [replicas, …]


@dataclass(frozen=True, slots=True)
class ProgramComparison:
    """Outcome of a comparison.

    Args:
        mismatch: the first equation that differs; None if there is none.
        equations: number of equations that were compared.
        not_run: number of those that did not run.
        without_operands: number of those whose operands or results have no stream.
    """

    mismatch: Mismatch | None
    equations: int
    not_run: int
    without_operands: int


@dataclass(frozen=True, eq=False, slots=True)
class _Run:
    """An equation that ran, its operands, its results, and the replicas on which it ran."""

    probed: ProbedEquation
    operands: list[Any]
    results: list[Any]
    ran: np.ndarray


def compare_equations(
    probed: Sequence[ProbedEquation], values: Values, replicas: int, found_in: str
) -> ProgramComparison:
    """Compare the equations of a program.

    Args:
        probed: its equations, and others of which no stream has a value.
        values: value of each stream.
        replicas: number of replicas.
        found_in: what computed the values, for the report.
    """
    of_program = [each for each in probed if each.was_run in values]
    ran = [each for each in of_program if np.any(values[each.was_run])]
    runs = [run for each in ran if (run := _run(each, values, replicas)) is not None]
    parts = (runs[start : start + _AT_ONCE] for start in range(0, len(runs), _AT_ONCE))
    found = (_mismatch(run, *row, found_in) for part in parts for run, row in _errors(part, replicas))
    return ProgramComparison(
        next(found, None), len(runs), len(of_program) - len(ran), len(ran) - len(runs)
    )


def _run(probed: ProbedEquation, values: Values, replicas: int) -> _Run | None:
    """Return the values of an equation; None if a stream is missing."""
    eqn = probed.equation
    operands = [_value(*pair, values, replicas) for pair in zip(eqn.invars, probed.operands, strict=True)]
    results = [_value(*pair, values, replicas) for pair in zip(eqn.outvars, probed.results, strict=True)]
    if any(x is None for x in (*operands, *results)) or not results:
        return None
    return _Run(probed, operands, results, np.asarray(values[probed.was_run]))


def _value(atom: Any, stream: HostStream | None, values: Values, replicas: int) -> Any:
    if stream is not None:
        return values.get(stream)
    aval = atom.aval
    if isinstance(atom, Literal):
        return np.broadcast_to(np.asarray(atom.val, aval.dtype), (replicas, *aval.shape))
    return None if aval.size else jnp.zeros((replicas, *aval.shape), aval.dtype)


def _errors(runs: Sequence[_Run], replicas: int) -> Iterator[tuple[_Run, tuple[int, Difference]]]:
    """Yield the equations that differ, with the number of the result that does."""
    eqns = [run.probed.equation for run in runs]

    def compute(all_operands: list[list[Any]]) -> list[tuple[list[Any], list[Any]]]:
        return [_computed(eqn, xs, replicas) for eqn, xs in zip(eqns, all_operands, strict=True)]

    computed = jax.jit(compute)([run.operands for run in runs])
    for run, (expected, sizes) in zip(runs, computed, strict=True):
        is_sampled = holds_equations(run.probed.equation)
        for number, rows in enumerate(zip(run.results, expected, sizes, strict=True)):
            on_ran = [x[np.flatnonzero(run.ran)] for x in rows]
            found = difference(*on_ran, is_sampled=is_sampled)
            if found.is_error:
                yield run, (number, found)
                break


def _computed(eqn: JaxprEqn, operands: list[Any], replicas: int) -> tuple[list[Any], list[Any]]:
    """Return the results of an equation by plain JAX, and the sizes of their rounding errors."""

    def evaluate(rounded: Rounded | None = None) -> list[Any]:
        return stacked_equation(eqn, operands, Replicas(replicas, rounded=rounded))

    results = evaluate()
    if holds_equations(eqn):
        return results, spread_of(evaluate)
    if is_collective(eqn):
        return results, rounding_sizes(eqn, operands, results)
    return results, jax.vmap(partial(rounding_sizes, eqn), axis_size=replicas)(operands, results)


def _mismatch(run: _Run, number: int, found: Difference, found_in: str) -> Mismatch:
    probed = run.probed
    eqn = probed.equation
    aval: Any = eqn.outvars[number].aval
    origin = probed.origin
    index = found.index if run.ran.size > 1 else found.index[1:]
    return Mismatch(
        found_in,
        _of_user(probed).primitive.name,
        origin.line,
        origin.layer,
        type_text(aval),
        index,
        found.expected,
        found.got,
    )


def _of_user(probed: ProbedEquation) -> JaxprEqn:
    """Return the equation itself, or the one whose rule composes it of others."""
    chain = [*probed.holders, probed.equation]
    while len(chain) > 1 and not holds_equations(chain[-2]):
        chain.pop()
    return chain[-1]
