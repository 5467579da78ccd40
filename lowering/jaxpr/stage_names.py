"""Stages in name stacks: `ipu.stage(2)` adds a scope to all equations traced inside, which JAX's transformations keep.

Input: the name stack of an equation after inlining, `transpose(jvp(ipu_stage_2))/dense`. Output: the innermost stage,
and whether the equation is in the stage's backward part, since gradients of a stage have its name too; the same for
phases, `ipu.phase(2)`; and whether `jax.checkpoint` recomputes the equation for a gradient: such an equation is never
merged with its original.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn
from ipujax.lowering.jaxpr.nested import equations, equations_inside
from ipujax.lowering.source_info import name_stack
from ipujax.runtime.cache import remembered_small
from ipujax.runtime.tensor import REMATERIALISED, TRANSPOSED

_TOKEN = re.compile(r"ipu_stage_(\d+)")
_PHASE = "ipu_phase_"
_NUMBERED = re.compile(r"ipu_(stage|phase)_(\d+)")
_NUMBER_OF_PHASE = re.compile(rf"{_PHASE}(\d+)")
_RECOMPUTE = "ipu_recompute_"
_MODE = re.compile(rf"{_RECOMPUTE}([a-z]+)")
_WITHOUT_JVP = re.compile(r"(?<!transpose\()transpose\((?:vmap\()*[^()]*\)")  # the transpose of a transpose is forward
PIPELINE = "ipu_staged_pipeline"  # primitive of pipelines with stages
MICRO_BATCHES = "ipu_micro_batches"  # scope of the loop of a pipeline


@dataclass(frozen=True, slots=True)
class StageName:
    """Stage and part of an equation by its name stack.

    Args:
        stage: number of the innermost stage, None outside of all.
        is_backward: True for an equation of a gradient.
        is_recomputed: True for a recomputation of a value that a `jax.checkpoint` did not store.
    """

    stage: int | None
    is_backward: bool
    is_recomputed: bool


def stage_scope(number: int) -> str:
    """Name of a stage's scope."""
    return f"ipu_stage_{number}"


@remembered_small
def read_name(stack: str) -> StageName:
    """Parse a name stack: the stage that its equation is in, whether in its backward part, and if it is recomputed."""
    tokens = list(_TOKEN.finditer(stack))
    # A `transpose(` after the token belongs to an inner function, not to the stage.
    end = tokens[-1].start() if tokens else len(stack)
    stage = int(tokens[-1][1]) if tokens else None
    return StageName(stage, TRANSPOSED in stack[:end], REMATERIALISED in stack)


def stage_name(eqn: JaxprEqn) -> StageName:
    """Return the stage of an equation."""
    return read_name(name_stack(eqn))


def is_transposed(stack: str) -> bool:
    """Return True for the name stack of a transposed equation, False for a checkpoint's recomputation for it."""
    return TRANSPOSED in stack.rpartition(REMATERIALISED)[2]


def is_transposed_only(stack: str) -> bool:
    """Return True for a name stack of `jax.linear_transpose`, whose transposed function has no `jvp`."""
    return _WITHOUT_JVP.search(stack.rpartition(REMATERIALISED)[2]) is not None


def recompute_scope(mode: str) -> str:
    """Name of a scope with a mode of recomputation."""
    return f"{_RECOMPUTE}{mode}"


@remembered_small
def recompute_mode(stack: str) -> str | None:
    """Return the innermost mode of recomputation of a name stack."""
    modes = _MODE.findall(stack)
    return modes[-1] if modes else None


def phase_scope(number: int) -> str:
    """Name of a phase's scope."""
    return f"{_PHASE}{number}"


@remembered_small
def _phase_in(stack: str) -> int | None:
    numbers = _NUMBER_OF_PHASE.findall(stack)
    return int(numbers[-1]) if numbers else None


def phase_of(eqn: JaxprEqn) -> int | None:
    """Return the innermost phase of an equation, None outside of all."""
    return _phase_in(name_stack(eqn))


def numbered_scopes(eqn: JaxprEqn) -> tuple[tuple[str, int], ...]:
    """Return word and number of the stages and phases in the name stack of an equation, outermost first."""
    return _numbered_scopes_in(name_stack(eqn))


@remembered_small
def _numbered_scopes_in(stack: str) -> tuple[tuple[str, int], ...]:
    return tuple((word, int(number)) for word, number in _NUMBERED.findall(stack))


def has_phases(jaxpr: Jaxpr) -> bool:
    """Return True if an equation at any depth is in a phase."""
    return any(phase_of(eqn) is not None for eqn in equations(jaxpr))


def stages_inside(eqn: JaxprEqn) -> dict[int, JaxprEqn]:
    """Return the stages named inside the jaxprs of an equation, each with its first equation."""
    first_equations: dict[int, JaxprEqn] = {}
    for inner in equations_inside(eqn):
        stage = stage_name(inner).stage
        if stage is not None:
            first_equations.setdefault(stage, inner)
    return first_equations


def has_stages(jaxpr: Jaxpr) -> bool:
    """Return True if an equation at any depth is in a stage, or is a pipeline with stages."""
    return any(stage_name(eqn).stage is not None or eqn.primitive.name == PIPELINE for eqn in equations(jaxpr))


def holds_pipeline(eqn: JaxprEqn) -> bool:
    """Return True if an equation has a pipeline with stages inside."""
    return any(inner.primitive.name == PIPELINE for inner in equations_inside(eqn))


def is_pipeline(eqn: JaxprEqn) -> bool:
    """Return True for a pipeline with stages, and for the loop of a pipeline without."""
    return eqn.primitive.name == PIPELINE or (eqn.primitive.name == "scan" and MICRO_BATCHES in name_stack(eqn))


def named_stages(jaxpr: Jaxpr) -> set[int]:
    """Return the stages of the equations at any depth."""
    return {stage for eqn in equations(jaxpr) if (stage := stage_name(eqn).stage) is not None}
