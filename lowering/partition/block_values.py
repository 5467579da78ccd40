"""Values of a program as blocks of one device of a mesh: their specs, and the collectives that bring them to others.

Input: the specs that `propagation` has found. Output: blocks under the specs that readers need, and a record of the
collectives for the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ipujax.lowering.jax_compat import JaxprEqn, Var, shape_of, with_weak_type
from ipujax.lowering.partition.resharding import Step, itemsize, received_blocks, reshard, transitions
from ipujax.lowering.partition.specs import Axes, MeshAxes, Spec, in_words, local_shape, typed_spec, whole
from ipujax.lowering.source_info import source_line
from ipujax.runtime.target import Target


@dataclass(frozen=True, slots=True)
class Block:
    """The block of a value that one device has.

    Args:
        array: the block, or the device's partial sum of it.
        spec: split of the value.
        aval: type of the whole value.
        is_zero: whether the value is known to be zeros alone, which every device has under any spec.
    """

    array: Any
    spec: Spec
    aval: Any
    is_zero: bool = False


def zeros(aval: Any, spec: Spec, mesh: MeshAxes) -> Block:
    """The block of zeros that each device has of a value of zeros, under any spec: partial sums are zeros too."""
    block = with_weak_type(jnp.zeros(local_shape(aval.shape, spec, mesh), aval.dtype), aval.weak_type)
    return Block(block, spec, aval, is_zero=True)


@dataclass(frozen=True, slots=True)
class Move:
    """A collective that partitioning has added.

    Args:
        primitive: equation that it is for.
        line: line of source of that equation.
        step: the collective.
        num_bytes: bytes of a device's block before it.
        received_bytes: bytes that a device receives.
        why: spec of the block, and the spec that it is moved to.
    """

    primitive: str
    line: str
    step: Step
    num_bytes: int
    received_bytes: int = 0
    why: str = ""


class GatheredEquation(NamedTuple):
    """An equation that is computed whole for want of factors, by its primitive and its line of source."""

    primitive: str
    line: str


@dataclass(frozen=True, slots=True)
class Notes:
    """Record of a partitioning.

    Args:
        moves: collectives, in order.
        gathered: equations that are computed whole, on gathered operands.
        unreduced: for each result the axes over which it is a stack of the devices' partial sums; () for others.
        conflicts: conflicts of annotations that cycles have decided, in words.
        stored_rows: spec of the rows of each stack that is stored in parts.
    """

    moves: list[Move] = field(default_factory=list)
    gathered: list[GatheredEquation] = field(default_factory=list)
    unreduced: list[Axes] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    stored_rows: list[Spec] = field(default_factory=list)


class _Resharded(NamedTuple):
    """An array under another spec, and the original, which is kept so that no other array gets its id."""

    original: Any
    array: Any


@dataclass(frozen=True, slots=True)
class Scope:
    """Specs of the values of one jaxpr, and the blocks that have been brought to other specs.

    Args:
        mesh: the mesh.
        target: machine whose cycles decide.
        specs: spec of each value that has one; others have that of their type, or any.
        notes: receives collectives and equations without factors.
        user_mesh: mesh of the user's shardings.
        is_manual: True inside of a user's `shard_map`, where every value is a device's own.
        is_trial: True where a body is traced only to find the specs of its results.
        may_stay_unreduced: values of which devices may keep partial sums, because their only reader adds these up, with
            the number of partial sums that share one sum over devices: the iterations of a loop that accumulates them.
        stored_rows: spec of the rows of stacks that are stored in parts; a loop brings each to the spec of its value.
        resharded: arrays under other specs, by id of the original, its spec and the other one: a value that several
            equations gather is gathered once. One array may be the block of two values, as of an operand and a result
            of a `shard_map` that returns it. Each jaxpr has its own, because values of one trace must not be read in
            another.
    """

    mesh: MeshAxes
    target: Target
    specs: Mapping[Var, Spec]
    notes: Notes
    user_mesh: Mesh | AbstractMesh
    is_manual: bool = False
    is_trial: bool = False
    may_stay_unreduced: Mapping[Var, int] = field(default_factory=dict)
    stored_rows: Mapping[Var, Spec] = field(default_factory=dict)
    resharded: dict[tuple[int, Spec, Spec], _Resharded] = field(default_factory=dict)

    def required_spec(self, var: Any) -> Spec | None:
        """Spec that a value must have; None for any."""
        if self.is_manual:
            return whole(len(shape_of(var)))
        spec = self.specs.get(var) if isinstance(var, Var) else None
        return typed_spec(var.aval, self.mesh) if spec is None else spec

    def spec_or_whole(self, var: Any) -> Spec:
        """Spec that a value must have; whole for any."""
        spec = self.required_spec(var)
        return whole(len(shape_of(var))) if spec is None else spec

    def to_spec(self, block: Block, spec: Spec, eqn: JaxprEqn | None = None) -> Block:
        """Block of the same value under another spec; `eqn` needs it, None for a result of the program."""
        if block.spec == spec:
            return block
        if block.is_zero:
            return zeros(block.aval, spec, self.mesh)
        key = id(block.array), block.spec, spec
        if key not in self.resharded:
            self._note_resharding(block, spec, eqn)
            self.resharded[key] = _Resharded(block.array, reshard(block.array, block.spec, spec, self.mesh))
        return Block(self.resharded[key].array, spec, block.aval)

    def arrays_under(self, specs: Sequence[Spec], blocks: Sequence[Block], eqn: JaxprEqn) -> list[Any]:
        """Arrays of the operands of an equation under the specs that it needs."""
        return [self.to_spec(block, spec, eqn).array for block, spec in zip(blocks, specs, strict=True)]

    def _note_resharding(self, block: Block, spec: Spec, eqn: JaxprEqn | None) -> None:
        name, line = ("result", "") if eqn is None else (eqn.primitive.name, source_line(eqn))
        why = f"{in_words(block.spec)} to {in_words(spec)}"
        for step, before, _ in transitions(block.spec, spec, self.mesh):
            if step.communicates:
                self.note_collective(name, line, step, block.aval, before, why)

    def note_collective(self, primitive: str, line: str, step: Step, aval: Any, before: Spec, why: str) -> None:
        """Notes a collective on a value of type `aval` that is split by `before`; see `Move`."""
        num_bytes = prod(local_shape(aval.shape, before, self.mesh)) * itemsize(aval.dtype)
        received_bytes = int(received_blocks(step, self.mesh) * num_bytes)
        self.notes.moves.append(Move(primitive, line, step, num_bytes, received_bytes, why))
