"""Comparison of a program equation by equation: each is computed again by plain JAX from the program's own operands.

Input: probed equations, and the values of their streams in a run. Output: the first equation whose results differ
beyond rounding, and how many were compared. An error does not reach the equations after it, since their operands have
it, so that neither the length of a program nor its chaos matters.

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

from ipujax.checking.check_report import Mismatch
from ipujax.checking.compared_passes import type_text
from ipujax.checking.differences import Difference, difference, is_equal
from ipujax.checking.jaxpr_values import quick_jit, spread_of
from ipujax.checking.rounding import rounding_sizes
from ipujax.lowering.gcl import is_collective
from ipujax.lowering.jax_compat import JaxprEqn, Literal
from ipujax.lowering.replicas.stacked_eval import Replicas, holds_equations, stacked_equation
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
    return ProgramComparison(next(found, None), len(runs), len(of_program) - len(ran), len(ran) - len(runs))


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

    def compute(all_operands: list[list[Any]]) -> list[list[Any]]:
        pairs = zip(runs, all_operands, strict=True)
        return [stacked_equation(run.probed.equation, operands, Replicas(replicas)) for run, operands in pairs]

    def compute_sizes(values: list[tuple[list[Any], list[Any]]]) -> list[list[Any]]:
        rows = zip(differ, values, strict=True)
        return [_sizes(run.probed.equation, *arrays, replicas) for (run, _), arrays in rows]

    # Sizes of rounding errors take longer to compile than the equations: few need them.
    all_expected = quick_jit(compute)([run.operands for run in runs])
    differ = [
        (run, expected)
        for run, expected in zip(runs, all_expected, strict=True)
        if not all(is_equal(_of_run(run, x), _of_run(run, y)) for x, y in zip(run.results, expected, strict=True))
    ]
    all_sizes = quick_jit(compute_sizes)([(run.operands, expected) for run, expected in differ])
    for (run, expected), sizes in zip(differ, all_sizes, strict=True):
        is_sampled = holds_equations(run.probed.equation)
        for number, rows in enumerate(zip(run.results, expected, sizes, strict=True)):
            found = difference(*(_of_run(run, x) for x in rows), is_sampled=is_sampled)
            if found.is_error:
                yield run, (number, found)
                break


def _of_run(run: _Run, rows: Any) -> Any:
    """Return the rows of the replicas on which an equation ran."""
    return rows if run.ran.all() else rows[np.flatnonzero(run.ran)]


def _sizes(eqn: JaxprEqn, operands: list[Any], results: list[Any], replicas: int) -> list[Any]:
    """Return the sizes of rounding errors of the results of an equation."""
    if holds_equations(eqn):
        changed: list[Any] = spread_of(
            lambda rounded: stacked_equation(eqn, operands, Replicas(replicas, rounded=rounded))
        )
        return changed
    if is_collective(eqn):
        return rounding_sizes(eqn, operands, results)
    return list(jax.vmap(partial(rounding_sizes, eqn), axis_size=replicas)(operands, results))


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
