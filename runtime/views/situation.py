"""Figures for the conditions of hints: of a program, and of the part of it that an answer is about.

Input: `Figures`, and the operations of the part. Output: a `Situation`.
Limits: gradients, recomputation, pipelines and loops are recognised by the names that lowering gives to operations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ipujax.runtime.memory import BUFFERS, LIVE, LiveItem, MemoryReport
from ipujax.runtime.profile import Figures
from ipujax.runtime.tensor.roles import STORED
from ipujax.runtime.views.operation_view import OperationRow, exchange_bandwidth, peaks

_PRODUCTS = frozenset(("dot_general", "conv_general_dilated", "ragged_dot_general"))
_MAJORITY = 0.5  # of the cycles of a part, or of the bytes of a tile
_STORED_SHARE = 0.1  # of the bytes of a tile
_CROWDED_SHARES = 2  # a tile has this many times its even share of a variable, or more
_MIN_UPDATED_BYTES = 64  # of an argument and a result that could share memory: scalars often have equal sizes
_BACKWARD = re.compile(r"transpose\(|stage \d+ backward")
_RECOMPUTED = re.compile(r"rematted_computation|checkpoint|recompute")
_STAGE = re.compile(r"ipu_stage_\d+")
_PIPELINE = re.compile(r"stage \d+ (forward|backward)")
_LOOP = re.compile(r"(^|/)(scan|while)/")


@dataclass(frozen=True, slots=True)
class Situation:
    """Figures of a program, and of the part of it that is to change.

    Args:
        num_ipus: of one replica.
        replicas: of the program.
        has_backward: it computes gradients.
        recomputes: its gradients compute values of the forward pass again.
        has_stages: parts of it are mapped to IPUs by `ipu.stage`.
        has_pipeline: it runs micro-batches through stages.
        has_loop: it has a loop of the user's.
        fits: every tile has the memory that it needs.
        fullness: bytes of the fullest tile over those that it has.
        main_use: role, or memory category, of most bytes of the fullest tile.
        stores_activations: at least a tenth of the fullest tile is activations stored for gradients.
        crowding: a variable that takes most of the fullest tile, more than twice its even share; empty without one.
        crowding_share: the share of its bytes that is mapped to that tile.
        always_live_share: always-live bytes over peak live bytes.
        cycles_per_byte: the cost per byte at which it was planned.
        overlaps_io: tiles move data while others compute.
        updates_arguments: an argument and a result that go over the host link have equal sizes.
        phase: with most cycles of the part; empty without a part.
        precision: "float16" or "float32", of most floating-point operations of the part; empty without any.
        multiplies: most cycles of the part are of products.
        splits_batches: most cycles of the part cut micro-batches for stages, and store them.
        fallback: the costliest operation of the part, if it runs on one tile for want of a parallel rule.
        emulated: dtype of the part's arithmetic that the target lacks.
        tile_balance: mean share of compute phases of the part in which a tile computes; 1 without such phases.
        peak_share: rate of the part's costliest operation over the peak of an IPU; 0 if unknown.
        is_exchange_bound: exchange bounds that rate below the peak.
        wait: longest part of an IPU's idle time: "filling", "steady" or "draining"; empty without idle time.
        waits_alike: all IPUs have about as many idle cycles.
        busiest_ipu: the IPU with fewest idle cycles.
    """

    num_ipus: int = 1
    replicas: int = 1
    has_backward: bool = False
    recomputes: bool = False
    has_stages: bool = False
    has_pipeline: bool = False
    has_loop: bool = False
    fits: bool = True
    fullness: float = 0.0
    main_use: str = ""
    stores_activations: bool = False
    crowding: str = ""
    crowding_share: float = 0.0
    always_live_share: float = 0.0
    cycles_per_byte: float = 0.0
    overlaps_io: bool = False
    updates_arguments: bool = False
    phase: str = ""
    precision: str = ""
    multiplies: bool = False
    splits_batches: bool = False
    fallback: str = ""
    emulated: str = ""
    tile_balance: float = 1.0
    peak_share: float = 0.0
    is_exchange_bound: bool = False
    wait: str = ""
    waits_alike: bool = False
    busiest_ipu: int = 0


def program_situation(profile: Figures) -> Situation:
    """Return the situation of a program whose trip counts are known."""
    return profile.once(_program_situation)


def _program_situation(profile: Figures) -> Situation:
    """Return what hints depend on, read from the names and parts of the operations of a run."""
    steps = profile.step_costs
    # Functions that no derivative is taken of inside of the program have no parts: there the names tell.
    names = [f"{step.origin.path}/{step.name}" for step in steps]
    parts = {step.origin.part for step in steps}
    return replace(
        memory_situation(profile),
        has_backward=bool(parts & {"backward", "recomputed"}) or _any(_BACKWARD, names),
        recomputes="recomputed" in parts or _any(_RECOMPUTED, names),
        has_stages=_any(_STAGE, names),
        has_pipeline=_any(_PIPELINE, names),
        has_loop=_any(_LOOP, names),
        overlaps_io=profile.overlapped_cycles > 0,
        updates_arguments=_updates_arguments(profile),
    )


def memory_situation(profile: Figures) -> Situation:
    """Return the figures of memory alone, which need no trip counts."""
    memory = profile.memory
    crowding, crowding_share = _crowding(memory)
    stored_bytes = sum(num_bytes for num_bytes, name in parts_of_tile(memory) if name == STORED)
    return Situation(
        num_ipus=profile.target.num_ipus,
        replicas=profile.replicas,
        fits=memory.max_tile_bytes <= profile.target.bytes_per_tile,
        fullness=memory.max_tile_bytes / profile.target.bytes_per_tile,
        main_use=_main_use(memory),
        stores_activations=stored_bytes >= _STORED_SHARE * memory.max_tile_bytes > 0,
        crowding=crowding,
        crowding_share=crowding_share,
        always_live_share=profile.always_live_share,
        cycles_per_byte=profile.byte_cost,
    )


def part_situation(profile: Figures, rows: Sequence[OperationRow], phase: str) -> Situation:
    """Return the figures by which a hint for a part of a program is chosen.

    Args:
        profile: of the program.
        rows: operations of the part, most cycles first.
        phase: that with most cycles of the part.
    """
    flops = {name: sum(row.flops for row in rows if row.precision == name) for name in peaks(profile.target)}
    precision = max(flops, key=lambda name: flops[name])
    lines = {row.line for row in rows}
    computing = [row for row in rows if row.balance is not None]
    fallbacks = {item.name: item.operation for item in profile.fallbacks}
    emulated = [item.dtype for item in profile.emulated if str(item.origin) in lines]
    top = computing[0] if computing else None
    return replace(
        program_situation(profile),
        phase=phase,
        precision=precision if flops[precision] else "",
        multiplies=_is_most(rows, lambda row: _multiplies(row.name)),
        splits_batches=_is_most(rows, lambda row: _PIPELINE.search(row.name) is not None),
        fallback=fallbacks.get(rows[0].name, "") if rows else "",
        emulated=emulated[0] if emulated else "",
        tile_balance=1.0 if top is None or top.balance is None else top.balance,
        peak_share=top.peak_share if top else 0.0,
        is_exchange_bound=top is not None and allowed_by_exchange(top, profile) is not None,
    )


def parts_of_tile(memory: MemoryReport) -> list[tuple[int, str]]:
    """List (bytes, role) of the fullest tile, most first."""
    tile = memory.worst_tile
    return sorted(((int(values[tile]), name) for name, values in memory.by_role.items() if values[tile]), reverse=True)


def largest_variable(memory: MemoryReport) -> LiveItem | None:
    """Return the largest variable or constant on the fullest tile, None if it has none with a name."""
    return next((item for item in memory.largest if item.category in ("variable", "constant")), None)


def _main_use(memory: MemoryReport) -> str:
    parts = parts_of_tile(memory)
    name = parts[0][1] if parts else ""
    if name != BUFFERS:
        return name
    # Buffers are one role of several categories, which have different hints.
    buffers = {name: int(memory.by_category[name][memory.worst_tile]) for name in LIVE if name != "variable"}
    return max(buffers, key=lambda name: buffers[name])


def _crowding(memory: MemoryReport) -> tuple[str, float]:
    """Return the variable that crowds the fullest tile, and the share of it that is mapped to that tile."""
    largest = largest_variable(memory)
    if largest is None or not largest.whole_bytes or largest.num_bytes <= _MAJORITY * memory.max_tile_bytes:
        return "", 0.0
    share = largest.num_bytes / largest.whole_bytes
    return (largest.readable, share) if share * memory.target.num_tiles > _CROWDED_SHARES else ("", 0.0)


def allowed_by_exchange(row: OperationRow, profile: Figures) -> float | None:
    """Return the roofline's bound by exchange, in operations a second of one IPU; None if the peak is lower."""
    if row.intensity is None:
        return None
    bound = exchange_bandwidth(profile.target) * row.intensity
    return bound if bound < peaks(profile.target)[row.precision] else None


def _is_most(rows: Sequence[OperationRow], condition: Callable[[OperationRow], bool]) -> bool:
    total = sum(row.cycles for row in rows)
    return total > 0 and sum(row.cycles for row in rows if condition(row)) > _MAJORITY * total


def _multiplies(name: str) -> bool:
    # Compute sets that were merged have the names of all their operations.
    return any(part.rsplit("/", 1)[-1] in _PRODUCTS for part in name.split(", "))


def _any(pattern: re.Pattern[str], names: Sequence[str]) -> bool:
    return any(pattern.search(name) for name in names)


def _updates_arguments(profile: Figures) -> bool:
    """Return whether an argument and a result, each copied over the host link, have equal sizes."""
    rows = [step for step in profile.step_costs if str(step.origin).startswith("host stream")]
    results = {step.moved_bytes for step in rows if re.fullmatch(r"out\d+", step.name)}
    arguments = {step.moved_bytes for step in rows if not re.fullmatch(r"out\d+", step.name)}
    return any(num_bytes >= _MIN_UPDATED_BYTES for num_bytes in results & arguments)
