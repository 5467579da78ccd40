"""Verdict on the time of a program: the cause whose removal saves most, the next ones, and what to try.

Input: `Figures`. Output: a `Verdict`. Its numbers are those of `profile.causes`: each cause is timed without it.
Limits: remedies are texts, none is compiled here (`ipu.advise` compiles some); the plan is held, so a remedy may save
more or less.
"""

from __future__ import annotations

from dataclasses import dataclass

from ipujax.runtime.causes import COMPUTATION, Cause
from ipujax.runtime.causes.removals import (
    BETWEEN_IPUS,
    BETWEEN_TILES,
    COLLECTIVES,
    EMULATION,
    FALLBACKS,
    HOST,
    REARRANGEMENT,
    RETURNED,
    SINGLE_TILES,
    SLOW_PATHS,
    STREAMING,
    SYNCS,
    UNEQUAL_IPUS,
    UNEQUAL_TILES,
    WAITS,
)
from ipujax.runtime.profile import Figures
from ipujax.runtime.profile.text import share
from ipujax.runtime.tensor import Origin

_NUM_CAUSES = 3
_SMALL_SHARE = 0.03  # of a run: what a smaller cause takes is no reason to change a program

REMEDIES: dict[str, str] = {
    RETURNED: "donate the arguments that come back changed, donate_argnums= of ipu.jit: they stay on the tiles",
    HOST: "several steps a call, in a lax.scan; Options(io_tiles=…), so that transfers overlap computing",
    STREAMING: "fewer offload_argnums, or Options(io_tiles=…), so that loads overlap computing",
    FALLBACKS: "another formulation of the operation, or several at once with jax.vmap, each on its own tile",
    SINGLE_TILES: "scalars and short chains of steps on the host, or once for many steps; jax.vmap over small problems",
    EMULATION: "float32, float16 or int32, which the machine computes in",
    SLOW_PATHS: "sizes that are multiples of eight, or Options(pad_rows=True), which pads where that is cheaper",
    COLLECTIVES: "fewer replicas or shards, or a larger batch for each; one sum of gradients for several batches",
    UNEQUAL_IPUS: "stages of equal work: stages='auto' of ipu.pipeline, or another cut",
    WAITS: "more micro-batches, or another schedule= of ipu.pipeline; stages without a pipeline wait for one another",
    BETWEEN_IPUS: "stages that begin where less is handed on; global_exchange='buffered' shows what a lockstep costs",
    BETWEEN_TILES: "fewer, larger operations, products that share operands, float16",
    REARRANGEMENT: "sizes that are multiples of eight, dimensions in one order from operation to operation",
    SYNCS: "fewer, larger operations: a larger batch, or layers that are computed at once",
    UNEQUAL_TILES: "sizes that divide evenly over tiles, or more elements at once",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on the time of a program.

    Args:
        sentence: the cause whose removal saves most, with cycles, share and line; or that no cause is worth a change.
        causes: those whose removal saves most, at most three, most first; none below 3 % of the run.
        remedies: what to try against each of them; not tried.
        bound: the least cycles of any plan, and how much of the run is beyond.
    """

    sentence: str
    causes: tuple[Cause, ...]
    remedies: tuple[str, ...]
    bound: str


def verdict(profile: Figures) -> Verdict:
    """Return the verdict on a program.

    Raises:
        ProfileError: a trip count is data.
    """
    total = profile.cycles
    ranked = sorted((each for each in profile.causes if each.name != COMPUTATION), key=lambda each: -each.alone_cycles)
    worth = tuple(each for each in ranked if each.alone_cycles >= _SMALL_SHARE * total and each.alone_cycles > 0)
    causes = worth[:_NUM_CAUSES]
    remedies = tuple(REMEDIES[each.name] for each in causes)
    if not causes:
        return Verdict("No cause takes 3 % of the run: it computes, on all tiles alike.", (), (), _bound(profile))
    return Verdict(_sentence(causes[0], total), causes, remedies, _bound(profile))


def _bound(profile: Figures) -> str:
    """Say how far a program is from the least cycles of any plan, and of its own supersteps."""
    bound = profile.bound
    part = share(bound.cycles, max(1, profile.cycles)).strip()
    own = f"its own supersteps, each at its least, take {bound.own_steps_cycles:,}"
    return f"Bound: no plan on this machine takes less than {bound.cycles:,} cycles, {part} of this run; {own}."


def _sentence(cause: Cause, total: int) -> str:
    where = f", most at {cause.origin}" if cause.origin != Origin() else ""
    rest = f"{total - cause.alone_cycles:,} of {total:,} cycles"
    name = cause.name[0].upper() + cause.name[1:]
    return f"{name}: {share(cause.alone_cycles, total).strip()} of the run{where}. Without, it takes {rest}."
