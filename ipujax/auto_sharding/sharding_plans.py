"""Plans of `ipu.auto_shard`: shardings of arguments that were compiled, and their table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ipujax.runtime.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """Shardings of the arguments of one function.

    Args:
        in_shardings: pytree of named shardings, for `in_shardings=` of `ipu.jit`.
        cycles: cycles of the compiled program; 0 if it does not fit.
        worst_tile_bytes: memory of the fullest tile.
        fits: whether the program fits all tiles.
        estimated_cycles: cycles that the search has ranked it by.
        collectives: number of collectives that partitioning has added, by kind.
    """

    in_shardings: Any
    cycles: int
    worst_tile_bytes: int
    fits: bool
    estimated_cycles: int
    collectives: tuple[tuple[str, int], ...] = ()

    @property
    def code(self) -> str:
        """Specs of the arguments, ready to paste, where `P` is `jax.sharding.PartitionSpec`."""
        return repr(jax.tree.map(lambda sharding: _Code(str(short(sharding.spec))), self.in_shardings))


@dataclass(frozen=True, slots=True)
class ShardingPlans:
    """Plans that were compiled, best first; its text is a table.

    Args:
        rows: those that fit by cycles, then the others by memory of the fullest tile.
        num_estimated: number of programs that were partitioned and estimated.
    """

    rows: tuple[ShardingPlan, ...]
    num_estimated: int

    def best(self) -> ShardingPlan:
        """Return the plan of fewest cycles that fits.

        Raises:
            ArgumentError: if none does.
        """
        first = self.rows[0]
        if not first.fits:
            got = f"{first.worst_tile_bytes:,} bytes on the fullest tile"
            raise ArgumentError("no sharding that was tried fits the machine", got=got, hint="a mesh of more IPUs")
        return first

    def __iter__(self) -> Iterator[ShardingPlan]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        width = max(len(row.code) for row in self.rows)
        lines = [f"{'in_shardings':<{width}}  {'cycles':>13}   worst tile  collectives"]
        for row in self.rows:
            cycles = f"{row.cycles:,}" if row.fits else "does not fit"
            collectives = ", ".join(f"{count} {kind}" for kind, count in row.collectives) or "none"
            memory = f"{row.worst_tile_bytes / 1024:,.1f} KiB"
            lines.append(f"{row.code:<{width}}  {cycles:>13}  {memory:>11}  {collectives}")
        return "\n".join(lines)


class _Code(str):
    """Text that stands for itself in the text of a pytree."""

    def __repr__(self) -> str:
        return str(self).replace("PartitionSpec(", "P(")


def short(spec: PartitionSpec) -> PartitionSpec:
    """Return an equal spec without trailing Nones, an axis alone by its name."""
    parts = [p if p is None or isinstance(p, str) else None if not p else p[0] if len(p) == 1 else p for p in spec]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)
