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
    OF_LOOKUPS,
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
from ipujax.runtime.profile.operation_warnings import Unpriced
from ipujax.runtime.profile.text import energy, share
from ipujax.runtime.tensor import Origin
from ipujax.runtime.views.hints import EVEN_SHARE, SEVERAL_BATCHES
from ipujax.runtime.views.operation_view import operation_rows
from ipujax.runtime.views.situation import program_situation

_NUM_CAUSES = 3
_MAJORITY = 0.5  # of the waits of IPUs
_SMALL_SHARE = 0.03  # of a run: what a smaller cause takes is no reason to change a program

_HALF = "; float16"
_REMEDIES: dict[str, str] = {
    RETURNED: "donate the arguments that come back changed, donate_argnums= of ipu.jit: they stay on the tiles",
    STREAMING: "fewer offload_argnums, or Options(io_tiles=…), so that loads overlap computing",
    FALLBACKS: "another formulation of the operation, or several at once with jax.vmap, each on its own tile",
    SINGLE_TILES: "scalars and short chains of steps on the host, or once for many steps; jax.vmap over small "
    "problems; more work beside them, as of a larger batch",
    EMULATION: "float32, float16 or int32, which the machine computes in",
    SLOW_PATHS: "sizes that are multiples of eight, or Options(pad_rows=True), which pads where that is cheaper",
    COLLECTIVES: "fewer replicas or shards, or a larger batch for each; one sum of gradients for several batches; one "
    "sum of many small arrays put together",
    UNEQUAL_IPUS: "stages of equal work: stages='auto' of ipu.pipeline, or another cut",
    WAITS: "a larger batch in more micro-batches, or another schedule= of ipu.pipeline; stages without a pipeline wait "
    "for one another",
    BETWEEN_IPUS: "stages that begin where less is handed on; global_exchange='buffered' shows what a lockstep costs",
    BETWEEN_TILES: "operations that read what they have on their tile, without transposes between them" + _HALF,
    OF_PRODUCTS: "larger products, as of a larger batch, which share more of their operands" + _HALF,
    REARRANGEMENT: "dimensions in one order from operation to operation" + _HALF,
    SYNCS: "fewer, larger operations: a larger batch, or layers that are computed at once",
}
# Of programs that are built by hand, whose variables and vertices have the tiles that their author gives them.
_OF_MAPPING = "variables and vertices on all tiles alike (Graph.set_tile_mapping, poputil.map_tensor_linearly)"
_OF_STREAMS = "data that stay in variables from run to run, or fewer bytes, as of HALF"

_OF_LATENCY = f"a larger batch; {SEVERAL_BATCHES}"
_OF_BYTES = "float16 or bytes for float32"
_OF_ROWS = f"Options(io_tiles=…), which loads the next rows while others are computed; {_OF_BYTES}"
_OF_RESULTS = (
    "results that the next call takes, in the place of donated arguments (donate_argnums=); fewer or smaller ones, as "
    "sums in place of all terms, or float16"
)
_OF_ARGUMENTS = (
    "if the next call takes the result, donate_argnums=; if no call changes it, a constant that the function closes "
    "over (an initializer of an ONNX model), or offload_argnums=, which loads no more than the rows that are read; if "
    "each call has another, fewer bytes, as of float16, and for rows of a loop Options(io_tiles=…), which loads the "
    "next while others are computed"
)

# Of a cause that no change removes, so that no gain is promised: why, and what halves it beside float16.
_REDUCTIONS: dict[str, tuple[str, str]] = {
    OF_PRODUCTS: ("Plans trade it for computing", "products of twice the rows and columns"),
    BETWEEN_TILES: ("Transposes can be left out; sums and neighbours need theirs", ""),
    OF_LOOKUPS: ("Rows have to reach what looks them up", ""),
    BETWEEN_IPUS: ("What is handed on has to move", ""),
    REARRANGEMENT: ("Changes of the order of dimensions can be left out; windows need theirs", ""),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on the time of a program.

    Args:
        sentence: the cause whose removal saves most, with cycles, share and line; or that no cause is worth a change.
        limit: that cause; None if none takes 3 % of the run. What is moved on the device, which plans trade for
            computing, counts by half unless it takes longer than that, see `removable_cycles`.
        causes: those that a change removes, at most three, most first; without those that count by half, and without
            waits that are not of a schedule.
        gains: cycles that a remedy against each of them saves at most, no more than those that vanish without it.
        remedies: changes to try against each of them; not tried.
        bound: the least cycles of any plan, and how much of the run is beyond.
    """

    sentence: str
    limit: Cause | None
    causes: tuple[Cause, ...]
    gains: tuple[int, ...]
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
    # A gain is promised of causes that a change can remove as a whole, see `removable_cycles`.
    promising = [each for each, cycles in zip(others, saved, strict=True) if each.alone_cycles == cycles >= threshold]
    causes = tuple([each for each in promising if each.name != WAITS or _is_of_schedule(each, profile)][:_NUM_CAUSES])
    gains = tuple(_gain(each, profile) for each in causes)
    remedies = tuple(remedy(each, profile) for each in causes)
    limit = worth[0] if worth else None
    return Verdict(_sentence(limit, limit in causes, profile), limit, causes, gains, remedies, _bound(profile))


def _gain(cause: Cause, profile: Figures) -> int:
    """Return the cycles that a remedy against a cause saves at most, of those that vanish without it."""
    if cause.name == WAITS and profile.pipelines:
        return min(cause.alone_cycles, int(_bubble_cycles(profile)))
    if _may_overlap(cause, profile):  # of two things at once the longer is what a run takes
        return min(cause.alone_cycles, profile.cycles - cause.alone_cycles)
    return cause.alone_cycles


def _bubble_cycles(profile: Figures) -> float:
    """Return the cycles in which IPUs wait by the schedules of their pipelines alone."""
    return sum(pipeline.ideal_share * pipeline.cycles for pipeline in profile.pipelines)


def _is_of_schedule(waits: Cause, profile: Figures) -> bool:
    """Return whether most waits are of a schedule, or of stages without one; all others are for exchanges."""
    return not profile.pipelines or _bubble_cycles(profile) > _MAJORITY * waits.alone_cycles


def remedy(cause: Cause, profile: Figures) -> str:
    """Return the remedies against a cause, by the operation or transfer that has most of its cycles."""
    text = _remedy_of_host(cause, profile) if cause.name == HOST else _REMEDIES.get(cause.name, "")
    if cause.name == SLOW_PATHS and profile.slow_paths:
        text += f" ({'; '.join(dict.fromkeys(str(each.reason) for each in profile.slow_paths))})"
    if cause.name == UNEQUAL_TILES:
        text = _remedy_of_tiles(_tile_balance(cause.origin, profile), profile.target.tiles_per_ipu)
    if cause.name in (SINGLE_TILES, UNEQUAL_TILES) and _is_by_hand(profile):
        text = _OF_MAPPING
    if _is_in_half(cause, profile):
        text = text.removesuffix(_HALF)
    # Many remedies, as a larger batch, need memory.
    return text if program_situation(profile).fits else f"once the program fits: {text}"


def _remedy_of_host(cause: Cause, profile: Figures) -> str:
    """Return what to try against waiting for the host: by functions that it runs, latency, or the data that move."""
    if called := _functions_of_host(cause, profile):
        listed = ", ".join(dict.fromkeys(f"{row.operation} at {row.origin}" for row in called))
        return f"in JAX what Python computes, or once for many iterations: {listed}"
    if cause.origin == HOST_LATENCY:
        return "a larger batch" if program_situation(profile).has_loop else _OF_LATENCY
    if _may_overlap(cause, profile):
        return _OF_ROWS
    if _is_by_hand(profile):
        return _OF_STREAMS
    if cause.origin.line:
        return _OF_BYTES
    return _OF_RESULTS if re.fullmatch(r"host stream out\d+", cause.origin.path) else _OF_ARGUMENTS


def _functions_of_host(cause: Cause, profile: Figures) -> list[Unpriced]:
    """Return the functions of the host that most transfers are for: all, of latency, or those at the line."""
    called = [row for row in profile.unpriced if row.place == "host"]
    if cause.origin == HOST_LATENCY:
        return called
    return [row for row in called if row.origin.line and row.origin.line == cause.origin.line]


def _may_overlap(cause: Cause, profile: Figures) -> bool:
    """Return whether most transfers of the host are of rows of a loop or a pipeline, which no I/O tiles load ahead.

    These have a line, as those for functions of the host have, and those of a program by hand.
    """
    has_line = cause.name == HOST and bool(cause.origin.line)
    are_rows = has_line and not _is_by_hand(profile) and not _functions_of_host(cause, profile)
    return are_rows and not program_situation(profile).overlaps_io


def _is_by_hand(profile: Figures) -> bool:
    """Return whether a program is one of Poplar."""
    return not profile.identity.function


def _remedy_of_tiles(balance: float, tiles: int) -> str:
    if balance >= EVEN_SHARE:
        return f"sizes that divide evenly over {tiles:,} tiles{_divisor(tiles)}, or many more elements at once"
    return (
        "more elements, or several such operations at once (jax.vmap, a larger batch): its work fills "
        f"{100 * balance:.2g} % of the tiles, and the others wait"
    )


def _divisor(tiles: int) -> str:
    """Name the odd factor of a number of tiles, which sizes seldom have; "" for a power of two."""
    odd = tiles // (tiles & -tiles)
    return "" if odd == 1 else f", as those with a dimension that is a multiple of {odd}"


def _tile_balance(origin: Origin, profile: Figures) -> float:
    """Return the mean share of the compute phases at an origin in which a tile computes; of all, if none is known."""
    computing = [row for row in profile.step_costs if row.tile_balance is not None and row.phases.get("compute")]
    rows = [row for row in computing if row.origin == origin] or computing
    cycles = [row.phases["compute"] for row in rows]
    busy = sum(each * (row.tile_balance or 0.0) for each, row in zip(cycles, rows, strict=True))
    return busy / sum(cycles) if rows else 1.0


def tried_changes(profile: Figures) -> list[tuple[str, str]]:
    """Return the changes that `ipu.advise` has compiled, each with its saving or the reason why it fails."""
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


def _sentence(cause: Cause | None, is_promising: bool, profile: Figures) -> str:
    total = profile.cycles
    if cause is None:
        return "No cause takes 3 % of the run: it computes, on all tiles alike."
    of_most = f", most in the {cause.origin}" if cause.origin == HOST_LATENCY else f", most at {cause.origin}"
    where = "" if cause.origin == Origin() else of_most
    name = cause.name[0].upper() + cause.name[1:]
    named = f"{name}: {share(cause.alone_cycles, total).strip()} of the run{where}"
    return f"{named}. {_effect(cause, profile) if is_promising else _reduction(cause, profile)}"


def _effect(cause: Cause, profile: Figures) -> str:
    """Return the sentence on the cycles of a run without a cause, and on their condition."""
    total = profile.cycles
    remaining = f"{total - _gain(cause, profile):,} of {total:,} cycles"
    if _may_overlap(cause, profile):
        return f"Loaded while the rows before are computed, the run takes at least {remaining}."
    if cause.name == HOST and cause.origin != HOST_LATENCY and not cause.origin.line:
        return f"If calls need not move it, the run takes {remaining}."
    if cause.name == WAITS and profile.pipelines:
        return f"Without the bubble of its schedule, it takes {remaining}."
    return f"Without, it takes {remaining}."


def _reduction(cause: Cause, profile: Figures) -> str:
    """Return the sentence on changes that make a cause smaller where none removes it."""
    if cause.name != WAITS:
        why, way = _REDUCTIONS[cause.name]
        ways = [*([] if _is_in_half(cause, profile) else ["float16"]), *filter(None, [way])]
        return f"{why}: {' or '.join(ways)} would halve it." if ways else f"{why}."
    bubble = share(_bubble_cycles(profile), profile.cycles).strip()
    changes = " and ".join(_fewer_waits(profile))
    return (
        f"The bubble of the schedule is {bubble}; else IPUs wait for exchanges and loads{changes and f': {changes}'}."
    )


def _is_in_half(cause: Cause, profile: Figures) -> bool:
    """Return whether the costliest operation at the line of a cause computes in half precision already."""
    computing = [row for row in operation_rows(profile) if row.line == str(cause.origin) and row.flops]
    return bool(computing) and computing[0].precision == "float16"


def _fewer_waits(profile: Figures) -> list[str]:
    """Return the settings with which IPUs wait less for exchanges and loads, of those that a pipeline has not."""
    is_lockstep = profile.target.global_exchange == "lockstep"
    # In these all IPUs run one kind of task between two exchanges, at which they meet.
    is_grouped = all(pipeline.schedule in ("grouped", "gpipe") for pipeline in profile.pipelines)
    loads = ["Options(io_tiles=…)"] if any(_may_overlap(cause, profile) for cause in profile.causes) else []
    return [*(["schedule='grouped'"] if is_lockstep and not is_grouped else []), *loads]


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
