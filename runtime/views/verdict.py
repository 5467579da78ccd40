"""Verdict on the time of a program: the cause whose removal saves most, the next ones, and what to try.

Input: `Figures`. Output: a `Verdict`, and rows that say how sure the cycles are. Numbers of a verdict are those of
`profile.causes`: each cause is timed without it.
Limits: remedies are texts, none is compiled here (`ipu.advise` compiles some); the plan is held, so a remedy may save
more or less.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ipujax.runtime.causes import COMPUTATION, Cause, removable_cycles
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
from ipujax.runtime.graph import HOST_LATENCY
from ipujax.runtime.profile import Figures
from ipujax.runtime.profile.text import energy, share
from ipujax.runtime.tensor import Origin
from ipujax.runtime.views.hints import EVEN_SHARE, SEVERAL_BATCHES
from ipujax.runtime.views.situation import program_situation

_NUM_CAUSES = 3
_SMALL_SHARE = 0.03  # of a run: what a smaller cause takes is no reason to change a program

_REMEDIES: dict[str, str] = {
    RETURNED: "donate the arguments that come back changed, donate_argnums= of ipu.jit: they stay on the tiles",
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
}

_OF_LATENCY = f"{SEVERAL_BATCHES}, which have it once; a larger batch"
_OF_RESULTS = (
    "results that the next call takes, in the place of donated arguments (donate_argnums=); fewer or smaller ones, as "
    "sums in place of all terms; Options(io_tiles=…), so that transfers overlap computing"
)
_OF_ARGUMENTS = (
    "donate_argnums=, if the next call takes the result; if no call changes it, a constant that the function closes "
    "over, or offload_argnums=, which loads no more than the rows that are read; a larger batch, or several a call"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on the time of a program.

    Args:
        sentence: the cause whose removal saves most, with cycles, share and line; or that no cause is worth a change.
        limit: that cause; None if none takes 3 % of the run. The exchange of products, which plans trade for computing,
            counts by half unless it takes longer than that, see `removable_cycles`.
        causes: those that promise most, at most three, most first; without the exchange of products where it counts by
            half.
        remedies: what to try against each of them; not tried.
        bound: the least cycles of any plan, and how much of the run is beyond.
    """

    sentence: str
    limit: Cause | None
    causes: tuple[Cause, ...]
    remedies: tuple[str, ...]
    bound: str


def verdict(profile: Figures) -> Verdict:
    """Return the verdict on a program.

    Raises:
        ProfileError: a trip count is data.
    """
    total = profile.cycles
    computing_cycles = next(each.cycles for each in profile.causes if each.name == COMPUTATION)
    threshold = max(1.0, _SMALL_SHARE * total)
    others = [each for each in profile.causes if each.name != COMPUTATION]  # that a change saves most of first
    saved = [removable_cycles(each.name, each.alone_cycles, computing_cycles) for each in others]
    worth = [each for each, cycles in zip(others, saved, strict=True) if cycles >= threshold]
    promising = [each for each, cycles in zip(others, saved, strict=True) if each.alone_cycles == cycles >= threshold]
    causes = tuple(promising[:_NUM_CAUSES])
    remedies = tuple(remedy(each, profile) for each in causes)
    limit = worth[0] if worth else None
    return Verdict(_sentence(limit, limit in causes, total), limit, causes, remedies, _bound(profile))


def remedy(cause: Cause, profile: Figures) -> str:
    """Return what to try against a cause, by what has most of its cycles."""
    text = _remedy_of_host(cause, profile) if cause.name == HOST else _REMEDIES.get(cause.name, "")
    if cause.name == SLOW_PATHS and profile.slow_paths:
        text += f" ({'; '.join(dict.fromkeys(str(each.reason) for each in profile.slow_paths))})"
    if cause.name == UNEQUAL_TILES:
        text = _remedy_of_tiles(_tile_balance(cause.origin, profile), profile.target.tiles_per_ipu)
    # Many remedies, as a larger batch, need memory.
    return text if program_situation(profile).fits else f"once the program fits: {text}"


def _remedy_of_host(cause: Cause, profile: Figures) -> str:
    if cause.origin == HOST_LATENCY:
        return "a larger batch" if program_situation(profile).has_loop else _OF_LATENCY
    return _OF_RESULTS if re.fullmatch(r"host stream out\d+", cause.origin.path) else _OF_ARGUMENTS


def _remedy_of_tiles(balance: float, tiles: int) -> str:
    if balance >= EVEN_SHARE:
        return f"sizes that divide evenly over {tiles:,} tiles, or many more elements at once"
    return (
        "more elements, or several such operations at once (jax.vmap, a larger batch): its work fills "
        f"{100 * balance:.2g} % of the tiles, and the others wait"
    )


def _tile_balance(origin: Origin, profile: Figures) -> float:
    """Return the mean share of the compute phases at an origin in which a tile computes; of all, if none is known."""
    computing = [row for row in profile.step_costs if row.tile_balance is not None and row.phases.get("compute")]
    rows = [row for row in computing if row.origin == origin] or computing
    cycles = [row.phases["compute"] for row in rows]
    busy = sum(each * (row.tile_balance or 0.0) for each, row in zip(cycles, rows, strict=True))
    return busy / sum(cycles) if rows else 1.0


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


def _bound(profile: Figures) -> str:
    """Say how far a program is from the least cycles of any plan, and of its own supersteps."""
    bound = profile.bound
    part = share(bound.cycles, max(1, profile.cycles)).strip()
    own_sentence = f"its own supersteps, each at its least, take {bound.own_steps_cycles:,}"
    sentence = f"no plan on this machine takes less than {bound.cycles:,} cycles, {part} of this run"
    return f"Bound: {sentence}; {own_sentence}."


def _sentence(cause: Cause | None, is_promising: bool, total: int) -> str:
    if cause is None:
        return "No cause takes 3 % of the run: it computes, on all tiles alike."
    of_most = f", most in the {cause.origin}" if cause.origin == HOST_LATENCY else f", most at {cause.origin}"
    where = "" if cause.origin == Origin() else of_most
    name = cause.name[0].upper() + cause.name[1:]
    named = f"{name}: {share(cause.alone_cycles, total).strip()} of the run{where}"
    if not is_promising:
        return f"{named}. Plans trade it for computing: float16, or products of twice the rows and columns, halve it."
    return f"{named}. Without, it takes {total - cause.alone_cycles:,} of {total:,} cycles."


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
