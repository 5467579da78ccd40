"""Check of a compiled program on the arguments of one call.

Input: a compiled program, and arrays of its arguments, which stay as they are. Output: a `CheckReport`. Computed are
the jaxpr after each pass by plain JAX, the program as calls run it, and the program with probes by the engine and, on
small machines, by the tile interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.checking.check_report import CheckReport, Mismatch, ResultDifference
from ipujax.checking.comparisons import PassValues, compare_equations, compare_passes, type_text
from ipujax.checking.differences import Difference, difference, is_equal
from ipujax.checking.jaxpr_values import results_one_by_one
from ipujax.lowering.jax_compat import ClosedJaxpr, is_float0, to_device
from ipujax.lowering.layer_notes import layer_of
from ipujax.lowering.lower import LoweredProgram
from ipujax.lowering.refs import is_ref
from ipujax.lowering.replicas import unwrapped
from ipujax.lowering.rules import Probes
from ipujax.lowering.source_info import source_line
from ipujax.lowering_plan.planned_program import planned_program
from ipujax.runtime.engine import engine_function
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import HostStream
from ipujax.runtime.interpreter.interpreter import MAX_TILES, interpret
from ipujax.runtime.quick_jit import quick_jit
from ipujax.stages import Compiled, Lowered

_PROGRAM = "the lowered program"
_TILES = "the tile interpreter"
_MAX_VERTICES = 50_000  # assumed: a vertex takes the interpreter about 0.1 ms


@dataclass(frozen=True, eq=False, slots=True)
class _Run:
    """Results of a probed program, and the values of its probes, [replicas, …]."""

    results: Sequence[Any]
    probes: Mapping[HostStream, Any]


def check_compiled(compiled: Compiled, leaves: Sequence[Any]) -> CheckReport:
    """Compare a program with plain JAX.

    Args:
        compiled: the program.
        leaves: its arguments, in order.

    Raises:
        ArgumentError: the program calls Python functions, reads the cycle counter, or runs on several instances.
    """
    lowered = compiled.lowered
    _refuse_incomparable(lowered)
    pairs = zip(leaves, lowered.signature.in_avals, strict=True)
    operands = lowered.call_program.operands([_on_one_device(*pair) for pair in pairs])
    operands = list(map(to_device, operands))
    by_passes = compare_passes(lowered.jaxprs, operands)
    results = jax.jit(lambda xs: list(lowered.run_program(*xs)))(operands)
    probes = Probes()
    program = planned_program(lowered.planned.plan, lowered.choice, probes).lowered
    streams = [s for each in probes.equations for s in (each.was_run, *each.operands, *each.results) if s is not None]
    run = _by_engine(program, operands, list(dict.fromkeys(streams)), compiled.executable.options.exact_splits)
    replicas = program.graph.replication_factor
    comparison = compare_equations(probes.equations, run.probes, replicas, _PROGRAM)
    notes: list[str] = []
    if by_passes.first != "trace":
        notes.append(f"passes up to {by_passes.first} are not compared: plain JAX runs them on no single device")
    problem = _too_large(program)
    on_tiles = comparison
    all_results = {_PROGRAM: results}
    if problem:
        notes.append(f"the tile interpreter did not run: {problem}")
    else:
        tile_run = _by_interpreter(program, operands)
        all_results[_TILES] = tile_run.results
        on_tiles = compare_equations(probes.equations, tile_run.probes, replicas, _TILES)
    rows = _result_rows(lowered, by_passes, all_results)
    mismatch = by_passes.mismatch or comparison.mismatch or on_tiles.mismatch
    if mismatch is None and any(row.is_error for row in rows):
        mismatch, note = _of_results(lowered, operands, by_passes, all_results)
        notes += [note] if note else []
    if mismatch is None:
        rows = tuple(replace(row, is_error=False) for row in rows)
    return CheckReport(
        str(lowered.name),
        rows,
        mismatch,
        comparison.equations,
        comparison.not_run,
        comparison.without_operands,
        not problem,
        tuple(notes),
    )


def _refuse_incomparable(lowered: Lowered) -> None:
    reasons = (
        (lowered.calls is not None, "calls Python functions", "leave callbacks out: a check would call them again"),
        ("cycle_count" in lowered.primitives, "reads the cycle counter, which plain JAX lacks", "leave it out"),
        (lowered.spread is not None, "runs on several instances together", "one instance"),
    )
    for is_so, reason, hint in reasons:
        if is_so:
            raise ArgumentError(f"{lowered.name} cannot be checked: it {reason}", hint=hint)


def _on_one_device(x: Any, aval: Any) -> Any:
    """Return an argument as an array of one device; Refs as they are."""
    if is_ref(aval) or is_float0(aval):
        return x
    if not isinstance(x, jax.Array):
        return jnp.asarray(x, aval.dtype)
    return jax.device_put(x, jax.devices()[0]) if len(x.devices()) > 1 else x


def _by_engine(
    program: LoweredProgram, operands: Sequence[Any], streams: Sequence[HostStream], exact_splits: bool
) -> _Run:
    """Run a probed program by XLA."""
    engine = engine_function(program.graph, program.program, exact_splits=exact_splits, observed=frozenset(streams))
    written: list[HostStream] = []

    def run(arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outs: dict[HostStream, Any] = {}
        results = program.evaluate(arrays, lambda inputs: outs.update(engine(inputs)) or outs)
        written[:] = [stream for stream in streams if stream in outs]
        return results, [outs[stream] for stream in written]

    results, values = quick_jit(run)(operands)
    return _Run(results, dict(zip(written, _stacked(program, values), strict=True)))


def _by_interpreter(program: LoweredProgram, operands: Sequence[Any]) -> _Run:
    """Run a probed program tile by tile."""
    outs: dict[HostStream, Any] = {}

    def run(inputs: Mapping[HostStream, Any]) -> Mapping[HostStream, Any]:
        outs.update(interpret(program.graph, program.program, inputs))
        return outs

    results = program.evaluate(operands, run)
    return _Run(results, dict(zip(outs, _stacked(program, outs.values()), strict=True)))


def _stacked(program: LoweredProgram, values: Any) -> Iterator[Any]:
    """Yield values with a leading axis of replicas."""
    return (x[None] if program.graph.replication_factor == 1 else x for x in values)


def _too_large(program: LoweredProgram) -> str:
    """Return why the tile interpreter cannot run a program, "" if it can."""
    graph = program.graph
    tiles = graph.target.num_tiles
    if tiles > MAX_TILES:
        return f"the machine has {tiles:,} tiles, at most {MAX_TILES} are interpreted"
    vertices = sum(group.num_vertices for groups in graph.groups.values() for group in groups)
    return f"{vertices:,} vertices are more than {_MAX_VERTICES:,}" if vertices > _MAX_VERTICES else ""


def _result_rows(
    lowered: Lowered, by_passes: PassValues, results: Mapping[str, Sequence[Any]]
) -> tuple[ResultDifference, ...]:
    """Return the row of each result, from the results by the program and by the tile interpreter."""
    names = _result_names(lowered, len(by_passes.results))
    columns = {name: _differences(values, by_passes) for name, values in results.items()}
    rows = []
    for number, (name, x) in enumerate(zip(names, by_passes.results, strict=True)):
        by_executor = {by: differences[number] for by, differences in columns.items()}
        largest = {by: each.largest for by, each in by_executor.items()}
        is_error = any(each.is_error for each in by_executor.values())
        rows.append(ResultDifference(name, type_text(x), largest[_PROGRAM], largest.get(_TILES), is_error))
    return tuple(rows)


def _differences(results: Sequence[Any], by_passes: PassValues) -> list[Difference]:
    """Return the differences of results from plain JAX."""
    pairs = list(zip(results, by_passes.results, strict=True))
    return [
        difference(*pair, None if is_equal(*pair) else by_passes.sizes()[number], is_sampled=True)
        for number, pair in enumerate(pairs)
    ]


def _result_names(lowered: Lowered, count: int) -> list[str]:
    """Return the name of each result of the jaxpr: results of the function, then Refs."""
    signature = lowered.signature
    numbered = jax.tree.unflatten(signature.out_tree, range(len(signature.out_avals)))
    paths = jax.tree_util.tree_flatten_with_path(numbered)[0]
    names = [
        "result" + jax.tree_util.keystr(path)
        for (path, _), aval in zip(paths, signature.out_avals, strict=True)
        if not is_float0(aval)
    ]
    return [*names, *(f"Ref {number}" for number in range(count - len(names)))]


def _of_results(
    lowered: Lowered, operands: Sequence[Any], by_passes: PassValues, results: Mapping[str, Sequence[Any]]
) -> tuple[Mismatch | None, str]:
    """Return the first result that is wrong though all equations agree, or a note if plain JAX is wrong."""
    # Equations that XLA compiles together may be wrong, and right one by one.
    plain = results_one_by_one(lowered.jaxpr, operands)
    for found_in, values in results.items():
        for number, deviation in enumerate(_differences(values, replace(by_passes, results=plain))):
            if deviation.is_error:
                return _result_mismatch(lowered.jaxpr, number, deviation, found_in), ""
    return None, "XLA computes the function wrongly as a whole: the program agrees with its equations one by one"


def _result_mismatch(jaxpr: ClosedJaxpr, number: int, deviation: Difference, found_in: str) -> Mismatch:
    body = unwrapped(jaxpr).jaxpr.jaxpr
    var = body.outvars[number]
    eqn = next((eqn for eqn in body.eqns if any(var is out for out in eqn.outvars)), None)
    nowhere = ("", "", "")
    source: tuple[str, str, str] = nowhere if eqn is None else (eqn.primitive.name, source_line(eqn), layer_of(eqn))
    type_of_result = type_text(jaxpr.out_avals[number])
    return Mismatch(found_in, *source, type_of_result, deviation.index, deviation.expected, deviation.got)
