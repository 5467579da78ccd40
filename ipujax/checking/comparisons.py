"""Comparison of a program with plain JAX: of the jaxpr after each pass, and equation by equation.

An equation is computed again by plain JAX from the program's own operands. Input: probed equations, and the values of
their streams in a run. Output: the first equation whose results differ beyond rounding, and how many were compared. An
error does not reach the equations after it, since their operands have it, so that neither the length of a program nor
its chaos matters.

Of loops the last iteration is compared; the loop itself from its operands to its results. Values of all replicas are
compared, [replicas, …].

Passes are compared by their jaxprs. Input: jaxprs by pass, and arrays of their inputs. Output: the first value that a
pass changes beyond rounding, and values of the results. The variables of two jaxprs are compared where both have them;
passes keep those that they do not fuse.

Limits: Refs and meshes exist before their passes only; a jaxpr with them is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.checking.check_report import Mismatch
from ipujax.checking.differences import Difference, difference, is_equal, rounding_sizes
from ipujax.checking.jaxpr_values import JaxprValues, plain_results, plain_values, spread_of, spreads
from ipujax.lowering.gcl import is_collective
from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Literal, Var
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.layer_notes import layer_of
from ipujax.lowering.refs import is_ref
from ipujax.lowering.replicas import unwrapped
from ipujax.lowering.replicas.stacked_eval import Replicas, holds_equations, stacked_equation
from ipujax.lowering.rules import ProbedEquation
from ipujax.lowering.source_info import source_line
from ipujax.runtime.graph import HostStream
from ipujax.runtime.quick_jit import quick_jit
from ipujax.runtime.tensor import dtype_name

# Primitives of meshes: on one device plain JAX cannot compute them.
_OF_MESHES = frozenset({"shard_map", "sharding_constraint", "reshard", "mesh_cast", "auto_axes", "explicit_axes"})
_WITH_CALLS = frozenset({"trace", "discharge"})


@dataclass(frozen=True, eq=False, slots=True)
class PassValues:
    """Values of results by plain JAX.

    Args:
        results: by the first jaxpr that plain JAX computes here.
        sizes: returns the sizes of rounding errors of the results.
        mismatch: the first equation that a pass changes; None if there is none.
        first: name of the pass after which the first jaxpr is, "trace" before all.
    """

    results: Sequence[Any]
    sizes: Callable[[], Sequence[Any]]
    mismatch: Mismatch | None
    first: str


def compare_passes(jaxprs: Mapping[str, ClosedJaxpr], operands: Sequence[Any]) -> PassValues:
    """Compute the jaxpr after each pass, and compare each with the one before it.

    Args:
        jaxprs: the jaxpr as traced and after each pass, by name.
        operands: arrays of the inputs.
    """
    first = first_plain(jaxprs)
    computed = list(jaxprs.items())[list(jaxprs).index(first) :]
    # The first without calls has most variables in common with those after it.
    inlined = next(jaxpr for name, jaxpr in computed if name not in _WITH_CALLS)
    sizes = cache(lambda: spreads(inlined, operands))
    changed = [computed[0]]
    changed += [after for before, after in pairwise(computed) if after[1] is not before[1]]
    results = plain_results(computed[0][1], operands)
    mismatch = _first_mismatch(changed, operands, sizes, one_by_one=False)
    # XLA may compile a whole function wrongly: an error of a pass is there without its fusions, too.
    if mismatch is not None:
        mismatch = _first_mismatch(changed, operands, sizes, one_by_one=True)
    return PassValues(results, lambda: sizes().results, mismatch, first)


def _first_mismatch(
    changed: Sequence[tuple[str, ClosedJaxpr]],
    operands: Sequence[Any],
    sizes: Callable[[], JaxprValues],
    *,
    one_by_one: bool,
) -> Mismatch | None:
    """Return the first equation whose value a pass changes, of the jaxprs of passes that change anything."""
    with_calls = [jaxpr for name, jaxpr in changed if name in _WITH_CALLS]
    without_calls = [jaxpr for name, jaxpr in changed if name not in _WITH_CALLS]
    values = plain_values(with_calls, without_calls, operands, one_by_one=one_by_one)
    steps = zip(changed[1:], values[1:], values[:-1], strict=True)
    mismatches = (x for (name, jaxpr), after, before in steps for x in _mismatches(name, jaxpr, after, before, sizes))
    return next(mismatches, None)


def first_plain(jaxprs: Mapping[str, ClosedJaxpr]) -> str:
    """Return the name of the first jaxpr that plain JAX computes on one device: without Refs as inputs, and meshes."""
    traced = next(iter(jaxprs.values()))
    eqns = list(equations(traced.jaxpr))
    avals = [*traced.in_avals, *(var.aval for eqn in eqns for var in eqn.outvars)]
    if any(eqn.primitive.name in _OF_MESHES for eqn in eqns) or any(map(_is_split, avals)):
        return "shard_map"
    return "discharge" if any(map(is_ref, traced.in_avals)) else next(iter(jaxprs))


def _is_split(aval: Any) -> bool:
    return any(axes is not None for axes in getattr(getattr(aval, "sharding", None), "spec", ()))


def _mismatches(
    name: str, jaxpr: ClosedJaxpr, values: JaxprValues, before: JaxprValues, sizes: Callable[[], JaxprValues]
) -> Iterator[Mismatch]:
    """Yield the equations of a jaxpr whose values differ from those before its pass, then its results."""
    body = unwrapped(jaxpr).jaxpr.jaxpr
    for eqn in body.eqns:
        for var in eqn.outvars:
            if var in values.variables and var in before.variables:
                pair = values.variables[var], before.variables[var]
                if is_equal(*pair) or var not in sizes().variables:
                    continue
                deviation = difference(*pair, sizes().variables[var], is_sampled=True)
                if deviation.is_error:
                    yield _mismatch_of_passes(name, eqn, var, deviation)
    definitions: dict[Any, JaxprEqn] = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    pairs = zip(values.results, before.results, strict=True)
    for number, (var, pair) in enumerate(zip(body.outvars, pairs, strict=True)):
        if is_equal(*pair):
            continue
        deviation = difference(*pair, sizes().results[number], is_sampled=True)
        if deviation.is_error:
            yield _mismatch_of_passes(name, definitions.get(var) if isinstance(var, Var) else None, var, deviation)


def _mismatch_of_passes(name: str, eqn: JaxprEqn | None, var: Any, deviation: Difference) -> Mismatch:
    """Return the report of a value that a pass changes: of an equation's result, or of an output without equation."""
    return Mismatch(
        f"pass {name}",
        "" if eqn is None else eqn.primitive.name,
        "" if eqn is None else source_line(eqn),
        "" if eqn is None else layer_of(eqn),
        type_text(var.aval),
        deviation.index,
        deviation.expected,
        deviation.got,
    )


def type_text(aval: Any) -> str:
    """Return dtype and shape as text, "float32[8, 16]"."""
    return f"{dtype_name(aval.dtype)}{list(aval.shape)}"


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
    mismatches = (_mismatch(run, *row, found_in) for part in parts for run, row in _errors(part, replicas))
    return ProgramComparison(next(mismatches, None), len(runs), len(of_program) - len(ran), len(ran) - len(runs))


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
    if not differ:
        return
    all_sizes = quick_jit(compute_sizes)([(run.operands, expected) for run, expected in differ])
    for (run, expected), sizes in zip(differ, all_sizes, strict=True):
        is_sampled = holds_equations(run.probed.equation)
        for number, rows in enumerate(zip(run.results, expected, sizes, strict=True)):
            deviation = difference(*(_of_run(run, x) for x in rows), is_sampled=is_sampled)
            if deviation.is_error:
                yield run, (number, deviation)
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
    # One replica after the other: JAX has no batches of some equations, such as windows around a start value.
    return list(jax.lax.map(lambda values: rounding_sizes(eqn, *values), (operands, results)))


def _mismatch(run: _Run, number: int, deviation: Difference, found_in: str) -> Mismatch:
    """Return the report of a result that differs between the lowered program and JAX; at the user's equation."""
    probed = run.probed
    eqn = probed.equation
    aval: Any = eqn.outvars[number].aval
    origin = probed.origin
    index = deviation.index if run.ran.size > 1 else deviation.index[1:]
    return Mismatch(
        found_in,
        _of_user(probed).primitive.name,
        origin.line,
        origin.layer,
        type_text(aval),
        index,
        deviation.expected,
        deviation.got,
    )


def _of_user(probed: ProbedEquation) -> JaxprEqn:
    """Return the equation itself, or the one whose rule composes it of others."""
    chain = [*probed.holders, probed.equation]
    while len(chain) > 1 and not holds_equations(chain[-2]):
        chain.pop()
    return chain[-1]
