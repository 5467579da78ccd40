"""Plans of a program that were compiled until one fitted its tiles: changes, bytes of the fullest tile, cycles.

Input: the parameters and figures of each plan. Output: `Attempt`s, as profiles and errors list them.
Limits: bytes are without gaps, since plans that clearly do not fit are not packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from ipujax.runtime.files.figure_kinds import Bytes, Large, Real

_KIB = 1024
_LISTED = 6


@dataclass(frozen=True, slots=True)
class Attempt:
    """A plan of a program, compiled.

    Args:
        byte_cost: cost per byte on the fullest tile, in cycles.
        planned_bytes: memory of a tile as planners knew it.
        kept_share: smallest share, over gradients, of the bytes that are kept for them; the rest is recomputed.
        streams_loops: whether rows of loops stay in the host's memory.
        other_stages: whether pipelines are cut into other stages than at first.
        live_bytes: peak live bytes of the fullest tile, code included, without gaps.
        cycles: of one run; None where trip counts are data, and of plans that do not fit while another one does.
        fits: whether the program fits its tiles so.
        is_used: whether the profile, or the error, is of this plan.
    """

    byte_cost: float
    planned_bytes: Bytes
    kept_share: Annotated[float, Real(maximum=1)]
    streams_loops: bool
    other_stages: bool
    live_bytes: Bytes
    cycles: Large | None
    fits: bool
    is_used: bool

    @property
    def changes(self) -> str:
        """The parameters of the plan, as text."""
        parts = [
            f"{self.byte_cost:g} cycle{'s' * (self.byte_cost != 1)} per byte",
            f"planned for tiles of {self.planned_bytes // _KIB:,} KiB",
        ]
        if self.kept_share < 1:
            parts.append(f"{100 * self.kept_share:.0f} % of what gradients need kept, the rest recomputed")
        if self.streams_loops:
            parts.append("loops stream")
        if self.other_stages:
            parts.append("other stages")
        return ", ".join(parts)

    def __str__(self) -> str:
        cycles = "unknown" if self.cycles is None else f"{self.cycles:,}"
        notes = ("" if self.fits else "does not fit", "as shown" if self.is_used else "")
        note = ", ".join(filter(None, notes))
        return f"{cycles:>15}  {self.live_bytes:>12,} B  {self.changes}" + (f" ({note})" if note else "")


def attempt_lines(attempts: Sequence[Attempt]) -> Iterator[str]:
    """Yield a heading, and a line for each attempt worth a look, least bytes first; none where there is one only.

    These are the first, that in use, and some that take fewer cycles than all that need fewer bytes.
    """
    if len(attempts) < 2:
        return
    chosen = {id(each): each for each in (attempts[0], *(each for each in attempts if each.is_used))}
    cycles = float("inf")
    for each in sorted(attempts, key=_order):
        if each.cycles is not None and each.cycles < cycles and len(chosen) < _LISTED:
            cycles = each.cycles
            chosen[id(each)] = each
    yield f"{'cycles':>15}  {'fullest tile':>14}  plan"
    yield from map(str, sorted(chosen.values(), key=_order))
    if num_others := len(attempts) - len(chosen):
        yield f"{'':>15}  {'':>14}  and {num_others:,} other{'s' * (num_others > 1)}"


def _order(attempt: Attempt) -> tuple[int, int]:
    return attempt.live_bytes, attempt.cycles or 0
