"""Stages in name stacks: `ipu.stage(2)` puts a name on all that is traced inside, and JAX carries it along.

Input: the name stack of an equation after inlining, `transpose(jvp(ipu_stage_2))/dense`. Output: the innermost stage,
and whether it is the stage's backward part: the gradients of what is traced inside a stage are named after it too. So
are those of a phase, `ipu.phase(2)`, which runs after the phases before it. And whether `jax.checkpoint` has it
computed a second time, for a gradient: such an equation is never one with its original.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn
from ipujax.lowering.jaxpr.nested import equations, equations_inside
from ipujax.lowering.source_info import RECOMPUTED, TRANSPOSED, name_stack
from ipujax.runtime.cache import remembered_small

_TOKEN = re.compile(r"ipu_stage_(\d+)")
_PHASE = "ipu_phase_"
_NUMBER_OF_PHASE = re.compile(rf"{_PHASE}(\d+)")
_RECOMPUTE = "ipu_recompute_"
_MODE = re.compile(rf"{_RECOMPUTE}([a-z]+)")
_WITHOUT_JVP = re.compile(r"(?<!transpose\()transpose\((?:vmap\()*[^()]*\)")  # the transpose of a transpose is forward
PIPELINE = "ipu_staged_pipeline"  # the primitive of pipelines with stages
MICRO_BATCHES = "ipu_micro_batches"  # the scope of the loop of a pipeline


@dataclass(frozen=True, slots=True)
class StageName:
    """What a name stack says.

    Args:
        stage: number of the innermost stage, None outside of all.
        is_backward: whether it belongs to a gradient.
        is_recomputed: whether it computes again what a `jax.checkpoint` has not kept.
    """

    stage: int | None
    is_backward: bool
    is_recomputed: bool


def stage_scope(number: int) -> str:
    """The name of a stage's scope."""
    return f"ipu_stage_{number}"


@remembered_small
def read_name(stack: str) -> StageName:
    """What a name stack says of stages."""
    found = list(_TOKEN.finditer(stack))
    end = found[-1].start() if found else len(stack)
    stage = int(found[-1][1]) if found else None
    return StageName(stage, TRANSPOSED in stack[:end], RECOMPUTED in stack)


def stage_name(eqn: JaxprEqn) -> StageName:
    """What the name stack of an equation says."""
    return read_name(name_stack(eqn))


def is_transposed(stack: str) -> bool:
    """Whether a name stack is that of a transposed equation; one that a checkpoint computes again for it is not."""
    return TRANSPOSED in stack.rpartition(RECOMPUTED)[2]


def is_transposed_only(stack: str) -> bool:
    """Whether a name stack is that of an equation of `jax.linear_transpose`: no `jvp` made what is transposed."""
    return _WITHOUT_JVP.search(stack.rpartition(RECOMPUTED)[2]) is not None


def recompute_scope(mode: str) -> str:
    """The name of a scope whose gradients compute values again in a way of their own."""
    return f"{_RECOMPUTE}{mode}"


@remembered_small
def recompute_mode(stack: str) -> str | None:
    """The way that a name stack says, the innermost."""
    found = _MODE.findall(stack)
    return found[-1] if found else None


def phase_scope(number: int) -> str:
    """The name of a phase's scope."""
    return f"{_PHASE}{number}"


@remembered_small
def _phase_in(stack: str) -> int | None:
    found = _NUMBER_OF_PHASE.findall(stack)
    return int(found[-1]) if found else None


def phase_of(eqn: JaxprEqn) -> int | None:
    """The phase that an equation is named after, the innermost; None outside of all."""
    return _phase_in(name_stack(eqn))


def has_phases(jaxpr: Jaxpr) -> bool:
    """Whether any equation, however deep, is named after a phase."""
    return any(phase_of(eqn) is not None for eqn in equations(jaxpr))


def stages_inside(eqn: JaxprEqn) -> dict[int, JaxprEqn]:
    """The stages named inside the jaxprs that an equation holds, each with the first equation that names it."""
    found: dict[int, JaxprEqn] = {}
    for inner in equations_inside(eqn):
        stage = stage_name(inner).stage
        if stage is not None:
            found.setdefault(stage, inner)
    return found


def has_stages(jaxpr: Jaxpr) -> bool:
    """Whether any equation, however deep, is named after a stage, or is a pipeline that has some."""
    return any(stage_name(eqn).stage is not None or eqn.primitive.name == PIPELINE for eqn in equations(jaxpr))


def holds_pipeline(eqn: JaxprEqn) -> bool:
    """Whether the jaxprs that an equation holds have a pipeline with stages in them."""
    return any(inner.primitive.name == PIPELINE for inner in equations_inside(eqn))


def is_pipeline(eqn: JaxprEqn) -> bool:
    """Whether an equation is a pipeline with stages, or the loop of one without."""
    return eqn.primitive.name == PIPELINE or (eqn.primitive.name == "scan" and MICRO_BATCHES in name_stack(eqn))


def named_stages(jaxpr: Jaxpr) -> set[int]:
    """The stages that equations are named after, however deep."""
    return {stage for eqn in equations(jaxpr) if (stage := stage_name(eqn).stage) is not None}
