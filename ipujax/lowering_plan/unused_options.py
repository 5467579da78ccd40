"""Options of a function, of pipelines or of a plan that are set and have no effect on a program, with the reasons.

Input: a program that was planned. Output: a line for each such option.
Limits: options that ask for nothing, such as "auto", and those that only change how numbers round or are checked, are
not named; of rows that are padded only compilation knows, see `compile_warnings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.jaxpr import PIPELINE, equations, recompute_mode
from ipujax.lowering.passes.dce import dce
from ipujax.lowering.primitives import record_of
from ipujax.lowering.recomputation import Recomputation, modes
from ipujax.lowering.source_info import name_stack
from ipujax.runtime.graph import RemoteIn, RemoteOut, distinct
from ipujax.runtime.options import Options

if TYPE_CHECKING:
    from ipujax.lowering_plan.planned_program import PlannedProgram

_NO_GRADIENT = "no gradient of the function is recomputed by it"
_NOTHING_WHOLE = "no loop stores for another what all shards have, in a shape that they divide"


@dataclass(frozen=True, slots=True)
class OptionUse:
    """Use of an option by programs.

    Args:
        is_set: whether options ask for an effect.
        is_used: whether a program with these options has it.
        reason: why a program has not.
    """

    is_set: Callable[[Options], bool]
    is_used: Callable[[PlannedProgram], bool]
    reason: str


def unused_options(planned: PlannedProgram) -> tuple[str, ...]:
    """Return a line for each option that is set and has no effect on a program."""
    options = planned.plan.settings.options
    unused = [
        (f"Options({name}={getattr(options, name)!r})", use.reason)
        for name, use in _USES.items()
        if use.is_set(options) and not use.is_used(planned)
    ]
    eqns = _equations(planned)
    unused += [(f'recompute="{mode}" of ipu.pipeline', _NO_GRADIENT) for mode in _unused_modes(eqns)]
    if any(eqn.primitive.name == PIPELINE and eqn.params["spec"].shards_stored_rows for eqn in eqns):
        is_used = planned.partitioning is not None and planned.partitioning.notes.stored_rows
        unused += [] if is_used else [("shard_stored of ipu.Plan", _NOTHING_WHOLE)]
    return tuple(f"{setting} has no effect: {reason}" for setting, reason in unused)


def _equations(planned: PlannedProgram) -> list[JaxprEqn]:
    return list(equations(planned.jaxprs["dce"].jaxpr))


def _unused_modes(eqns: Sequence[JaxprEqn]) -> list[str]:
    """Return the ways of recomputation that pipelines name, and no gradient in them has."""
    named = {mode for eqn in eqns if (mode := recompute_mode(name_stack(eqn)))} - {"none", "auto"}
    return sorted(named - modes(eqns, Recomputation("none"))) if named else []


def _recomputes(planned: PlannedProgram) -> bool:
    """Return whether a gradient computes anything again; those of pipelines are not looked at, but for their way."""
    eqns = _equations(planned)
    mode = planned.plan.settings.options.recompute
    if any(eqn.primitive.name == PIPELINE for eqn in eqns):
        return mode in modes(eqns, Recomputation(mode))
    return len(list(equations(dce(planned.jaxprs["recompute"]).jaxpr))) > len(eqns)


def _is_half_product(eqn: JaxprEqn) -> bool:
    halves = (getattr(atom.aval, "dtype", None) == np.float16 for atom in (*eqn.invars[:2], *eqn.outvars))
    return record_of(eqn).macs is not None and all(halves)


def _moves_by_io_tiles(planned: PlannedProgram) -> bool:
    return any(isinstance(node, RemoteIn | RemoteOut) and node.overlaps for node in distinct(planned.program))


# A pipeline with a `recompute` of its own has no use for the option.
_USES: Mapping[str, OptionUse] = {
    "recompute": OptionUse(
        lambda options: options.recompute in ("all", "standard"),
        _recomputes,
        _NO_GRADIENT,
    ),
    "stream_loops": OptionUse(
        lambda options: options.stream_loops is True,
        lambda planned: planned.has_rows_to_stream,
        "no loop reads rows of an argument once each, or stacks a result that leaves the program",
    ),
    "io_tiles": OptionUse(
        lambda options: options.io_tiles > 0,
        _moves_by_io_tiles,
        "no argument or result is moved by them: donated arguments, numbers and what they have no room for are not",
    ),
    "prefetch_depth": OptionUse(
        lambda options: options.prefetch_depth != 1,
        lambda planned: planned.plan.settings.options.io_tiles > 0,
        "without io_tiles nothing is loaded ahead",
    ),
    "partials": OptionUse(
        lambda options: options.partials is not None,
        lambda planned: any(map(_is_half_product, _equations(planned))),
        "the function has no product of half precision",
    ),
}
