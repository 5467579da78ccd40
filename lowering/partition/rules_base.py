"""A partition rule: the factors of an equation, and its computation on blocks. Helpers that rules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.partition.factors import Factors, Labels
from ipujax.lowering.partition.specs import Axes, MeshAxes

# Parameters with shardings in the types of an equation; a block has none.
_SHARDING_PARAMS = ("out_sharding", "sharding")


@dataclass(frozen=True, slots=True)
class Blocks:
    """One equation on the blocks of a device.

    Args:
        eqn: the equation.
        operands: block of each operand.
        result_shapes: shape of the block of each result.
        axes: axes of each factor that is split.
        mesh: the mesh.
    """

    eqn: JaxprEqn
    operands: Sequence[jax.Array]
    result_shapes: Sequence[tuple[int, ...]]
    axes: Mapping[int, Axes]
    mesh: MeshAxes

    def bind(self, *operands: jax.Array, **changes: Any) -> list[jax.Array]:
        """The primitive on blocks, those of the equation without `operands`, with changed parameters."""
        params = {key: None if key in _SHARDING_PARAMS else value for key, value in self.eqn.params.items()}
        primitive = self.eqn.primitive
        results = primitive.bind(*(operands or self.operands), **primitive.get_bind_params({**params, **changes}))
        return list(results) if primitive.multiple_results else [results]


Compute = Callable[[Blocks], list[Any]]


@dataclass(frozen=True, slots=True)
class Rule:
    """Partition rule of a family of primitives.

    Args:
        factors: index space of an equation.
        compute: results on blocks.
    """

    factors: Callable[[JaxprEqn], Factors]
    compute: Compute


def bound(blocks: Blocks) -> list[Any]:
    """The primitive with its parameters, which do not depend on shapes."""
    return blocks.bind()


def with_shape(param: str) -> Compute:
    """The primitive with the shape of its result's block in a parameter."""
    return lambda blocks: blocks.bind(**{param: blocks.result_shapes[0]})


def shapes(atoms: Sequence[Any]) -> list[tuple[int, ...]]:
    """Shapes of operands or results."""
    return [tuple(atom.aval.shape) for atom in atoms]


def aligned(
    eqn: JaxprEqn, operands: Sequence[Sequence[int | None]], results: Sequence[Sequence[int | None]]
) -> Factors:
    """Factors of an equation whose dimensions have at most one factor each, given by its number, or None."""
    sizes: dict[int, int] = {}
    labels_of: list[tuple[Labels, ...]] = []
    for atoms, numbers in ((eqn.invars, operands), (eqn.outvars, results)):
        labels: list[Labels] = []
        for shape, dims in zip(shapes(atoms), numbers, strict=True):
            labels.append(tuple(() if f is None else (f,) for f in dims))
            sizes.update((f, n) for f, n in zip(dims, shape, strict=True) if f is not None)
        labels_of.append(tuple(labels))
    return Factors(labels_of[0], labels_of[1], sizes)


def except_dims(eqn: JaxprEqn, whole: Sequence[int]) -> Factors:
    """One factor a dimension, but for those that are computed whole; scalars, and dimensions of size 1 that are
    broadcast, have none.
    """
    operands = shapes(eqn.invars)
    results = shapes(eqn.outvars)
    longest = [max(sizes) for sizes in zip(*(s for s in (*operands, *results) if s), strict=False)]

    def labels(shape: Sequence[int]) -> list[int | None]:
        return [None if d in whole or n != longest[d] else d for d, n in enumerate(shape)]

    return aligned(eqn, list(map(labels, operands)), list(map(labels, results)))


def elementwise(eqn: JaxprEqn) -> Factors:
    """One factor a dimension."""
    return except_dims(eqn, ())
