"""Verdict on the time of a program: the cause whose removal saves most, the next ones, and what to try.

Input: `Figures`. Output: a `Verdict`, and rows that say how sure the cycles are. Numbers of a verdict are those of
`profile.causes`: each cause is timed without it.
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
    OF_PRODUCTS,
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
from ipujax.runtime.profile.text import energy, share
from ipujax.runtime.tensor import Origin
from ipujax.runtime.views.hints import SEVERAL_BATCHES
from ipujax.runtime.views.situation import program_situation

_NUM_CAUSES = 3
_SMALL_SHARE = 0.03  # of a run: what a smaller cause takes is no reason to change a program

REMEDIES: dict[str, str] = {
    RETURNED: "donate the arguments that come back changed, donate_argnums= of ipu.jit: they stay on the tiles",
    HOST: "a larger batch; Options(io_tiles=…), so that transfers overlap computing; arrays that no call changes as "
    "constants that the function closes over; donate_argnums= for arguments of which the next call takes the results",
    STREAMING: "fewer offload_argnums, or Options(io_tiles=…), so that loads overlap computing",
    FALLBACKS: "another formulation of the operation, or several at once with jax.vmap, each on its own tile",
    SINGLE_TILES: "scalars and short chains of steps on the host, or once for many steps; jax.vmap over small problems",
    EMULATION: "float32, float16 or int32, which the machine computes in",
    SLOW_PATHS: "sizes that are multiples of eight, or Options(pad_rows=True), which pads where that is cheaper",
    COLLECTIVES: "fewer replicas or shards, or a larger batch for each; one sum of gradients for several batches",
    UNEQUAL_IPUS: "stages of equal work: stages='auto' of ipu.pipeline, or another cut",
    WAITS: "a larger batch in more micro-batches, or another schedule= of ipu.pipeline; stages without a pipeline wait "
    "for one another",
    BETWEEN_IPUS: "stages that begin where less is handed on; global_exchange='buffered' shows what a lockstep costs",
    BETWEEN_TILES: "operations that read what they have on their tile, without transposes between them; float16",
    OF_PRODUCTS: "larger products, as of a larger batch, which share more of their operands; float16",
    REARRANGEMENT: "sizes that are multiples of eight, dimensions in one order from operation to operation",
    SYNCS: "fewer, larger operations: a larger batch, or layers that are computed at once",
    UNEQUAL_TILES: "sizes that divide evenly over tiles, or more elements at once",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on the time of a program.

    Args:
        sentence: the cause whose removal saves most, with cycles, share and line; or that no cause is worth a change.
        causes: those whose removal saves most, at most three, most first; none below 3 % of the run, and the exchange
            of products, which plans trade for computing, only where it takes longer than that.
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
    rows = {each.name: each for each in profile.causes}
    computing_cycles = rows.pop(COMPUTATION).cycles
    threshold_cycles = {name: _SMALL_SHARE * total for name in rows} | {
        OF_PRODUCTS: max(_SMALL_SHARE * total, computing_cycles)
    }
    worth = [
        each for each in rows.values() if each.alone_cycles > 0 and each.alone_cycles >= threshold_cycles[each.name]
    ]
    causes = tuple(sorted(worth, key=lambda each: -each.alone_cycles)[:_NUM_CAUSES])
    if not causes:
        planned = rows[OF_PRODUCTS].alone_cycles if OF_PRODUCTS in rows else 0
        return Verdict(_no_cause(planned, total), (), (), _bound(profile))
    remedies = tuple(_remedy(each.name, profile) for each in causes)
    return Verdict(_sentence(causes[0], total), causes, remedies, _bound(profile))


def _remedy(cause: str, profile: Figures) -> str:
    """Return what to try against a cause: several batches a call first where no loop has them."""
    situation = program_situation(profile)
    is_of_calls = cause == HOST and not situation.has_loop
    remedy = f"{SEVERAL_BATCHES}; {REMEDIES[cause]}" if is_of_calls else REMEDIES[cause]
    # Many remedies, as a larger batch, need memory.
    return remedy if situation.fits else f"once the program fits: {remedy}"


def tried_changes(profile: Figures) -> list[tuple[str, str]]:
    """Return the changes that `ipu.advise` has compiled, each with what it saves or why it cannot be compiled."""
    total = profile.cycles
    rows = []
    for row in profile.advice:
        if not row.tried or not (row.saved_cycles or row.refused or not row.fits):
            continue
        if row.refused is not None:
            rows.append((row.change, f"cannot be compiled: {row.refused}"))
        elif not row.fits:
            rows.append((row.change, f"does not fit, {row.worst_tile_bytes:,} B on the fullest tile"))
        else:
            effect = "saves" if row.saved_cycles > 0 else "costs"
            part = share(abs(row.saved_cycles), total).strip()
            memory = f"{-row.saved_bytes:+,} B on the fullest tile"
            rows.append((row.change, f"{effect} {abs(row.saved_cycles):,} cycles, {part}; {memory}"))
    return rows


def _no_cause(product_cycles: int, total: int) -> str:
    """Say that a run computes, and which part of it exchanges the operands of products."""
    if product_cycles < _SMALL_SHARE * total:
        return "No cause takes 3 % of the run: it computes, on all tiles alike."
    planned = f"but the exchange of products, {share(product_cycles, total).strip()}, which their plans choose"
    return f"No cause takes 3 % of the run {planned}: it computes, on all tiles alike."


def _bound(profile: Figures) -> str:
    """Say how far a program is from the least cycles of any plan, and of its own supersteps."""
    bound = profile.bound
    part = share(bound.cycles, max(1, profile.cycles)).strip()
    own_sentence = f"its own supersteps, each at its least, take {bound.own_steps_cycles:,}"
    least = f"no plan on this machine takes less than {bound.cycles:,} cycles, {part} of this run"
    return f"Bound: {least}; {own_sentence}."


def _sentence(cause: Cause, total: int) -> str:
    where = f", most at {cause.origin}" if cause.origin != Origin() else ""
    rest = f"{total - cause.alone_cycles:,} of {total:,} cycles"
    name = cause.name[0].upper() + cause.name[1:]
    return f"{name}: {share(cause.alone_cycles, total).strip()} of the run{where}. Without, it takes {rest}."


_WIDEST = 2  # uncertainties that are named


def certainty(profile: Figures) -> list[tuple[str, str]]:
    """Return rows with the interval of the cycles, the sources that they rest on, and the energy of a run."""
    interval = profile.interval
    names = " and ".join(each.name for each in interval.uncertainties[:_WIDEST])
    high = "any number of" if interval.high is None else f"{interval.high:,}"
    widest = f", widest by {names}" if names else ""
    kinds = ", ".join(f"{share(part, 1).strip()} {kind}" for kind, part in profile.coverage.items())
    power = profile.energy
    limits = "at least " + energy(power.low) if power.high is None else f"{energy(power.low)} to {energy(power.high)}"
    watts = f"{profile.target.ipu_watts:g} W an IPU"
    return [
        ("90 % interval", f"{interval.low:,} to {high} cycles{widest}"),
        *([("Cycles rest on", f"constants: {kinds}")] if kinds else []),
        ("Energy", f"{energy(power.joules)}, {limits}, at {watts}"),
    ]
