"""Search over the specs of a program's arguments, by the estimated cost of the program of one IPU.

Input: a program. Output: `ShardingPlans`, a table of the shardings that were compiled.

Arguments are decided one after the other, largest first, while those that follow are left to propagation; a beam of
the programs of least estimated cycles goes on to the next one. Beside them are the programs with one argument split
alone, such as the batch. The best of all are improved by other specs of one argument at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.partition import Estimate, Notes, Shardings, estimate, partition
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target import Target


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


_BEAM = 4
_STARTS = 2  # programs that are improved, one argument at a time
_SMALL_SHARE = 1 / 256  # of all arguments' bytes: one that is smaller is not worth a decision

Specs = tuple[PartitionSpec | None, ...]  # of each leaf; None where it is left to propagation


@dataclass(frozen=True, slots=True)
class Candidate:
    """A program that was partitioned: the specs of its arguments, those of propagation too, and its estimate."""

    specs: tuple[PartitionSpec, ...]
    cost: Estimate
    collectives: tuple[tuple[str, int], ...]

    @property
    def like(self) -> tuple[int, int, tuple[tuple[str, int], ...]]:
        """Equal for programs that the search cannot tell apart."""
        return int(self.cost.cycles), self.cost.num_bytes, self.collectives


def _with(specs: Specs, number: int, spec: PartitionSpec) -> Specs:
    return (*specs[:number], spec, *specs[number + 1 :])


@dataclass(frozen=True, slots=True)
class Search:
    """Search over the specs of the arguments of one jaxpr.

    Args:
        jaxpr: the program, inlined.
        mesh: mesh of automatic axes.
        target: the machine.
        evaluated: programs so far, by the specs that were given.
    """

    jaxpr: ClosedJaxpr
    mesh: AbstractMesh
    target: Target
    evaluated: dict[Specs, Candidate]

    def ranked(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[Candidate]:
        """Distinct programs, those that may fit first, by estimated cycles; then the others, by bytes."""
        num_bytes = [prod(x.shape) * x.dtype.itemsize for x in shapes]
        min_bytes = _SMALL_SHARE * sum(num_bytes)
        order = sorted((n for n, size in enumerate(num_bytes) if size >= min_bytes), key=lambda n: -num_bytes[n])
        options = {number: self._options(shapes[number].shape) for number in order}
        beam: list[Specs] = [(None,) * len(shapes)]
        for number in order:
            beam = self._best(_with(specs, number, spec) for specs in beam for spec in options[number])[:_BEAM]
        unsplit = tuple(PartitionSpec() if n in options else None for n in range(len(shapes)))
        alone = [_with(unsplit, number, spec) for number in order for spec in options[number]]
        for start in self._best([*beam, *alone])[:_STARTS]:
            self._improved(self._decided(start, order), options)
        distinct = {candidate.specs: candidate for candidate in self.evaluated.values()}
        return sorted(distinct.values(), key=self._rank)

    def all_split(
        self, start: Sequence[PartitionSpec], shapes: Mapping[int, Sequence[int]]
    ) -> tuple[PartitionSpec, ...]:
        """Specs of least rank that split all of `shapes`: decided one after the other, then improved one at a time.

        Args:
            start: specs of all arguments, which those not in `shapes` keep.
            shapes: shapes of the arguments that are split, by their number, in the order in which they are decided.
        """
        options = {n: [spec for spec in self._options(shape) if any(spec)] for n, shape in shapes.items()}
        options = {n: specs or [PartitionSpec()] for n, specs in options.items()}
        specs: Specs = tuple(None if number in shapes else spec for number, spec in enumerate(start))
        for number in shapes:
            (specs, *_) = self._best(_with(specs, number, spec) for spec in options[number])
        return self._candidate(self._improved(self._decided(specs, list(shapes)), options)).specs

    def _improved(self, specs: Specs, options: Mapping[int, Sequence[PartitionSpec]]) -> Specs:
        """Specs with others for one argument at a time, the best of all each time, until none is better."""
        while True:
            neighbours = [_with(specs, number, spec) for number in options for spec in options[number]]
            best = self._best([specs, *neighbours])[0]
            if best == specs:
                return specs
            specs = best

    def _best(self, programs: Iterable[Specs]) -> list[Specs]:
        """Programs by rank; of equal ones the first."""
        return sorted(programs, key=lambda specs: self._rank(self._candidate(specs)))

    def _decided(self, specs: Specs, numbers: Sequence[int]) -> Specs:
        """Specs with those that propagation has chosen for some arguments."""
        chosen = self._candidate(specs).specs
        return tuple(chosen[n] if n in numbers else spec for n, spec in enumerate(specs))

    def _rank(self, candidate: Candidate) -> tuple[bool, float]:
        cost = candidate.cost
        exceeds = cost.num_bytes > self.target.tiles_per_ipu * self.target.bytes_per_tile
        return exceeds, cost.num_bytes if exceeds else cost.cycles

    def _options(self, shape: Sequence[int]) -> list[PartitionSpec]:
        """Specs of an argument: each axis along one dimension that it divides, or none."""
        names = [name for name, size in self.mesh.shape.items() if size > 1]
        options = []
        for dims in product([None, *range(len(shape))], repeat=len(names)):
            axes = [tuple(n for n, dim in zip(names, dims, strict=True) if dim == d) for d in range(len(shape))]
            blocks = [prod(self.mesh.shape[name] for name in group) for group in axes]
            if all(n % count == 0 for n, count in zip(shape, blocks, strict=True)):
                options.append(short(PartitionSpec(*axes)))
        return options

    def _candidate(self, specs: Specs) -> Candidate:
        if specs not in self.evaluated:
            self.evaluated[specs] = self._partitioned(specs)
        return self.evaluated[specs]

    def _partitioned(self, specs: Specs) -> Candidate:
        """Partition the program by specs of its arguments; return these as chosen, with its cost and collectives."""
        notes = Notes()
        shardings = tuple(None if spec is None else NamedSharding(self.mesh, spec) for spec in specs)
        after = partition(self.jaxpr, Shardings(shardings, (), self.target), notes)
        chosen = [PartitionSpec()] * len(specs)
        if after is not self.jaxpr:
            (eqn,) = after.eqns
            spec_of_var = dict(zip(eqn.invars, eqn.params["in_specs"], strict=True))
            chosen = [short(spec_of_var.get(var, PartitionSpec())) for var in after.jaxpr.invars]
        kinds = Counter(move.step.kind for move in notes.moves)
        return Candidate(tuple(chosen), estimate(after, self.target), tuple(sorted(kinds.items())))
