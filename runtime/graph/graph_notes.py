"""Notes of operations in a graph, for its profile.

Planners record plans that exceed the memory proportion as `UnmetBound`, and the profile lists them: PopLibs plans with
ever larger bounds if no plan fits (reference machine.md §2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ipujax.runtime.graph.forms import ComputeSet
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin, Variable


@dataclass(frozen=True, slots=True)
class UnmetBound:
    """An operation without a plan within the available memory proportion.

    Args:
        name: debug name of the operation.
        bound_bytes: bytes of a tile that its operands and results may take.
        needed_bytes: bytes that they take on the fullest tile.
        origin: source line, layer and part.
    """

    name: str
    bound_bytes: int
    needed_bytes: int
    origin: Origin

    def __str__(self) -> str:
        return f"{self.name} needs {self.needed_bytes:,} bytes of a tile, of {self.bound_bytes:,} that planners may use"


ReasonToRepeat = Literal["recomputation", "memory", "stage", "phase"]


@dataclass(frozen=True, slots=True)
class ComputedAgain:
    """Equal operations of one line that a program computes several times on purpose.

    Args:
        operation: the primitive.
        reason: recomputation for a gradient, as `jax.checkpoint` or an option asks; memory that the result would take
            until its last reader; or a stage or phase that computes it for itself.
        count: how many more than one there are.
        origin: source line, layer and part of the later ones.
    """

    operation: str
    reason: ReasonToRepeat
    count: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows of one length that are padded to whole vectors in memory, see `Options.pad_rows`.

    Args:
        length: elements of a row.
        padded_length: elements that it takes.
        saved_cycles: cycles of a run that padding saves, loops whose trip count is data run once.
        added_bytes: bytes that it adds on the fullest tile at most.
    """

    length: int
    padded_length: int
    saved_cycles: int
    added_bytes: int


@dataclass(frozen=True, slots=True)
class LeastWork:
    """Work of the function of one replica that no plan avoids, and its longest dependence path.

    Args:
        tile_cycles: cycles of its operations at peak rates, of all tiles together.
        exchange_cycles: cycles of a shortest exchange.
        tile_share: weight of the path's own vertices; the rest of 1 is that of the mean tile's work, see
            `causes.bound`. The bound is largest by it.
        path_supersteps: compute sets of the path, one behind the other.
        path_exchanges: exchanges between them.
        path_cycles: cycles of the path as weighted, each compute set with a sync and a smallest vertex.
    """

    tile_cycles: float
    exchange_cycles: float
    tile_share: float
    path_supersteps: int
    path_exchanges: int
    path_cycles: float

    def cycles(self, tiles: int) -> float:
        """Return the cycles of one IPU by these weights: the path's, and those of the mean of its tiles."""
        return self.path_cycles + (1 - self.tile_share) * self.tile_cycles / tiles


@dataclass(frozen=True, slots=True, eq=False)
class Notes:
    """Notes that operations make while they are added, for profiles.

    Args:
        fallbacks: primitive of each compute set that runs an equation as one vertex.
        gathered: primitive and line of each equation that every IPU of a mesh computes whole, for want of a rule.
        unmet_bounds: operations whose plans exceed the available memory proportion.
        computed_again: equal operations that are computed several times on purpose.
        padded_rows: rows that are padded to whole vectors.
        libraries: op libraries that the user's program has added.
        roles: roles of variables, see `runtime.tensor.roles`; others have no known role.
        least_work: the least work of the program's function on a target; None for programs that are built by hand.
    """

    fallbacks: dict[ComputeSet, str] = field(default_factory=dict)
    gathered: list[tuple[str, str]] = field(default_factory=list)
    unmet_bounds: list[UnmetBound] = field(default_factory=list)
    computed_again: list[ComputedAgain] = field(default_factory=list)
    padded_rows: list[PaddedRows] = field(default_factory=list)
    libraries: set[str] = field(default_factory=set)
    roles: dict[Variable, str] = field(default_factory=dict)
    least_work: Callable[[Target], LeastWork] | None = None

    def copied(self) -> Notes:
        """Return a copy, to which others may be added."""
        return Notes(
            dict(self.fallbacks),
            list(self.gathered),
            list(self.unmet_bounds),
            list(self.computed_again),
            list(self.padded_rows),
            set(self.libraries),
            dict(self.roles),
            self.least_work,
        )
