"""Codelets: code for one tile, as a JAX function of blocks with a cycle estimate.

A codelet has no tiles or tensors; a `VertexGroup` connects it to them. Library codelets are supervisor codelets: one
vertex a tile, whose cycle formula divides its work among the six workers, as PopLibs' MultiVertex does.

A codelet names its slow paths, slower forms of code that vertices take for some shapes, from the shapes of its blocks
and from the `Repetition` of each field. A vector instruction handles whole vectors from an aligned address: rows whose
length is no multiple of a vector begin at other addresses, so that code for them is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ipujax.runtime.target import Target

Direction = Literal["in", "out", "inout"]
Extras = Literal["pads", "origins", "shapes"]
Language = Literal["assembly", "C++"]
Comparison = Literal["nothing", "order", "equality"]

# Per field, per dimension of its block: the block's length, an int64 array broadcastable to the grid of vertices.
BlockShapes = Sequence[tuple[np.ndarray, ...]]


@dataclass(frozen=True, slots=True)
class SlowReason:
    """The slow part of a vertex, and its reason; as text "C++ because the row length 197 is no multiple of 4".

    Args:
        what: form of code, or of copies.
        row: elements of a row.
        vector: elements of a vector.
    """

    what: str
    row: int
    vector: int

    def __str__(self) -> str:
        return f"{self.what} because the row length {self.row} is no multiple of {self.vector}"


@dataclass(frozen=True, slots=True, eq=False)
class SlowPath:
    """A slower form of code.

    Args:
        reason: what is slow, and why.
        cycles: tile cycles of a vertex beyond `Codelet.cycles`, int64, broadcastable to the grid of vertices.
    """

    reason: SlowReason
    cycles: np.ndarray


@dataclass(frozen=True, slots=True)
class Repetition:
    """How an operand is repeated along the innermost axes of a vertex group.

    Args:
        repeats: "elements" where each element stands for a row, as one mean a row; "rows" where a row is repeated, as
            one bias a column.
        row: elements of a row.
        axes: axes of the group that a row of repeated elements spans; empty where the view repeats them.
    """

    repeats: Literal["elements", "rows"]
    row: int
    axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Field:
    """One connection of a codelet.

    Args:
        name: for messages and profiles.
        direction: whether the codelet reads it, writes it, or both.
        dtype: dtype of its tensor.
        interleaved: whether it is accessed 128 bits at a time; its variables are then in interleaved tile memory.
        in_pieces: whether its connection is a list of vectors, so that nothing is copied to make it contiguous.
    """

    name: str
    direction: Direction
    dtype: Any
    interleaved: bool = False
    in_pieces: bool = False

    @property
    def is_read(self) -> bool:
        return self.direction != "out"

    @property
    def is_written(self) -> bool:
        return self.direction != "in"


@dataclass(frozen=True, eq=False, slots=True)
class Codelet:
    """Code for one tile; equal only to itself, so functions that make codelets are memoised.

    Args:
        name: name in profiles, `popops::Add<float>`.
        fields: its connections, inputs and outputs in any order.
        compute: function from one array for each field that is read, in field order, to the array of the field that is
            written, or a tuple of them in field order. Dimensions indexed by a block number alone are squeezed away.
        cycles: `(shapes, target) -> int64 array`, tile cycles of one vertex (of one worker unless `supervisor`), from
            the lengths of the blocks of all fields, as arrays over the grid of vertices.
        state_bytes: bytes of the vertex state in tile memory.
        code_bytes: bytes of its code in tile memory, once a tile.
        supervisor: whether one vertex uses all workers of the tile.
        takes: keywords of `compute` besides the arrays:
            "pads": `pads=`, per field read, per dimension, the `(low, high)` fill elements that the block lacks, in
            units of the dilated index; the arrays are then unpadded. Without it they are padded with `fill`.
            "origins": `origins=`, first index of the block along each axis in `VertexGroup.origins`.
            "shapes": `shapes=`, shape of the block of each field that is written.
        moves: whether it only moves elements, so that it needs no arithmetic in their dtype.
        compares: of its inputs the "order", as for the largest element, or the "equality" of elements. In a program
            that tests equality the engine computes these inputs once: compiled again with another reader, a sum of
            products may round otherwise, and differ from itself.
        flops: operations at each point of the index space that the axes of its vertices span, 2 for a multiply-add; or
            `shapes -> int64 array`, operations of one vertex, where that space is not what is computed. Only reports
            use it.
        parts: `(shapes, target) -> int64 array`, equal parts of work that the supervisor of a vertex deals to workers.
            None: all workers are busy all the time, as in products on the AMP unit. Only reports use it.
        reads_clock: whether it reads no operand and writes the cycle counter of its tile, uint32[2], low word first.
            The counter stands still while it is read; `compute` stands for a machine without one.
        is_product: whether it multiplies and adds, so that its operations count in any dtype; elsewhere those on whole
            numbers are indices, and do not.
        is_lookup: whether indices that are data choose the rows that it reads or writes: each has to reach its reader.
        is_priced: whether `cycles` count its work; False for code of which nothing is known but its operands, and
            for code with a loop whose trip count is data, of which one iteration counts.
        with_axes: from new axes, each as the numbers of the axes that it has elements of, to the codelet of vertices
            with these axes, whose blocks have their dimensions in the order of the axes; or to None where that is not
            possible. The engine chooses the axes in which arrays are kept. None where axes are part of the code.
        ordered_axes: with `with_axes`, numbers of the axes along which the order of elements counts, as along sliced
            dimensions; along the others they may be in any order.
        language: of the code that the codelet stands for: what its cycles are estimated for. Only reports use it.
        costed_by: what `cycles` and `parts` can be computed for at once: for "arrays" of machines and blocks; by
            "machine", for one target after another, as code of a user; by "vertex", moreover for the grid of all
            vertices of a group, as vertices of equal blocks differ.
        slow_paths: `(shapes, repetitions, target) -> slow paths` that vertices take, from the lengths of the blocks and
            the repetition of each field. Their cycles come on top of `cycles`. None where all rows are equally fast.
        sources: for each field that is written the numbers, among the fields that are read, of those that it is
            computed from; None where each is computed from all.
        in_place: whether a result may be written over an operand whose block has the same elements: the vertex reads an
            element of the operand, and its other reads of the same index, before it writes that of the result.
    """

    name: str
    fields: tuple[Field, ...]
    compute: Callable[..., Any]
    cycles: Callable[[BlockShapes, Target], np.ndarray]
    # Derived: (65,768 B of vertex instances + 24,052 B of vertex fields) / 5,564 vertices of the user guide's example,
    # "Profile summary output"; pointers are compressed there, to 2.1 bytes an edge (38,876 B / 18,564 edges).
    state_bytes: int = 16
    code_bytes: int = 256  # assumed
    supervisor: bool = True
    takes: tuple[Extras, ...] = ()
    moves: bool = False
    compares: Comparison = "nothing"
    flops: int | Callable[[BlockShapes], np.ndarray] = 1
    parts: Callable[[BlockShapes, Target], np.ndarray] | None = None
    reads_clock: bool = False
    language: Language = "assembly"
    is_product: bool = False
    is_lookup: bool = False
    is_priced: bool = True
    with_axes: Callable[[Sequence[Sequence[int]]], Codelet | None] | None = None
    ordered_axes: tuple[int, ...] = ()
    sources: tuple[frozenset[int], ...] | None = None
    costed_by: Literal["arrays", "machine", "vertex"] = "arrays"
    slow_paths: Callable[[BlockShapes, Sequence[Repetition | None], Target], Sequence[SlowPath]] | None = None
    in_place: bool = False

    def __repr__(self) -> str:
        return f"Codelet({self.name})"
