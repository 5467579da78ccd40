"""The semantics of JAX's collective primitives: a table from a primitive's name to its `Form`.

Input: an equation over the axis of replicas. Output: its groups of replicas, and how operands and results are arranged
for `stacked` and `collectives`, which number parts by a leading dimension of ranks.

    reduce    psum, pmax, pmin, all_reduce   all of every operand; axes that `vmap` made dimensions first
    gather    all_gather                     ranks become a dimension, or are joined along one (`tiled`)
    scatter   reduce_scatter                 a dimension is ranks, or is cut into them
    exchange  all_to_all                     one dimension is cut into ranks, they are joined along another
    permute   ppermute, pbroadcast           (source, destination) pairs
    index     axis_index                     the number of the replica

Source: `jax.lax` parallel operations, jax 0.10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.gcl import stacked
from ipujax.lowering.gcl.collective_schedules import Groups, Pairs
from ipujax.lowering.jax_compat import JaxprEqn, shape_of
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import GraphError
from ipujax.runtime.tensor import Tensor

AXIS = "replica"  # the name of the axis of replicas, unless the user gives it another
MONOIDS = {"psum": "add", "pmax": "max", "pmin": "min"}
Kind = Literal["reduce", "gather", "scatter", "exchange", "permute", "index"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A reshape, a permutation of dimensions and a reshape.

    Args:
        cut: shape before the permutation.
        order: the permutation.
        joined: shape after it.
    """

    cut: tuple[int, ...]
    order: tuple[int, ...]
    joined: tuple[int, ...]

    def of(self, x: Tensor) -> Tensor:
        """The arrangement of a tensor, a view."""
        return x.reshape(self.cut).transpose(self.order).reshape(self.joined)

    def of_all(self, x: jax.Array) -> jax.Array:
        """The arrangement of the arrays of all replicas, a leading dimension."""
        replicas = x.shape[:1]
        moved = x.reshape(replicas + self.cut).transpose((0, *(n + 1 for n in self.order)))
        return moved.reshape(replicas + self.joined)


@dataclass(frozen=True, slots=True)
class Form:
    """The semantics of a collective equation.

    Args:
        kind: see the table above.
        groups: replicas by rank.
        monoid: how values combine, where they do.
        pairs: of a permutation.
        dims: dimensions of the operand that are reduced first.
        before: arranges the operand as [ranks, …].
        after: arranges the result [ranks, …] as the equation's.
    """

    kind: Kind
    groups: Groups
    monoid: str = "add"
    pairs: Pairs = ()
    dims: tuple[int, ...] = ()
    before: Arrangement | None = None
    after: Arrangement | None = None

    @property
    def is_same(self) -> bool:
        """Whether all replicas get equal results, whatever they give."""
        one_source = self.kind == "permute" and len({source for source, _ in self.pairs}) == 1
        everyone = len(self.pairs) == sum(map(len, self.groups))
        return (self.kind in ("reduce", "gather") and len(self.groups) == 1) or (one_source and everyone)

    @property
    def is_uneven(self) -> bool:
        """Whether groups differ in size."""
        return len({len(group) for group in self.groups}) > 1

    def compute(self, operands: Sequence[jax.Array], replicas: int) -> list[jax.Array]:
        """The results on arrays of all replicas, [replicas, …]."""
        if self.kind == "index":
            return [jnp.arange(replicas, dtype=np.int32)]
        if self.kind == "reduce":
            reduced = [stacked.reduced(x, self.monoid, tuple(d + 1 for d in self.dims)) for x in operands]
            return [stacked.all_reduce(x, self.monoid, self.groups) for x in reduced]
        (x,) = operands
        x = self.before.of_all(x) if self.before else x
        result = _STACKED[self.kind](self, x)
        return [self.after.of_all(result) if self.after else result]


_STACKED: dict[str, Callable[[Form, jax.Array], jax.Array]] = {
    "gather": lambda form, x: stacked.all_gather(x, form.groups),
    "scatter": lambda form, x: stacked.reduce_scatter(x, form.monoid, form.groups),
    "exchange": lambda form, x: stacked.all_to_all(x, form.groups),
    "permute": lambda form, x: stacked.permute(x, form.pairs),
}


def _groups(eqn: JaxprEqn, replicas: int, *, of_one_size: bool = True) -> Groups:
    """The groups of an equation; refuses those that leave replicas out, or differ in size where parts go by rank."""
    groups = stacked.whole(eqn.params.get("axis_index_groups"), replicas)
    sizes = sorted({len(group) for group in groups})
    if sorted(replica for group in groups for replica in group) != list(range(replicas)):
        expected = f"each of the replicas 0 to {replicas - 1} in one group"
    elif of_one_size and len(sizes) > 1:
        expected = "groups of one size"
    else:
        return groups
    raise GraphError(
        f"{eqn.primitive.name} over groups that cannot be",
        where=source_line(eqn) or None,
        expected=expected,
        got=f"axis_index_groups={[list(group) for group in groups]}",
    )


def _reduce(eqn: JaxprEqn, replicas: int) -> Form:
    axes, monoid = eqn.params["axes"], eqn.params.get("monoid") or MONOIDS[eqn.primitive.name]
    alone = tuple((replica,) for replica in range(replicas))
    groups = _groups(eqn, replicas, of_one_size=False) if is_collective(eqn) else alone
    return Form("reduce", groups, monoid, dims=tuple(axis for axis in axes if not isinstance(axis, str)))


def _gather(eqn: JaxprEqn, replicas: int) -> Form:
    groups, dim = _groups(eqn, replicas), eqn.params["all_gather_dimension"]
    shape, out = (len(groups[0]), *shape_of(eqn.invars[0])), shape_of(eqn.outvars[0])
    order = (*range(1, dim + 1), 0, *range(dim + 1, len(shape)))
    return Form("gather", groups, after=Arrangement(shape, order, out))


def _scatter(eqn: JaxprEqn, replicas: int) -> Form:
    groups, dim = _groups(eqn, replicas), eqn.params["scatter_dimension"]
    shape, ranks = shape_of(eqn.invars[0]), len(groups[0])
    cut = _cut(shape, dim, ranks)
    joined = (ranks, *shape_of(eqn.outvars[0]))
    return Form("scatter", groups, before=Arrangement(cut, _to_front(dim, len(cut)), joined))


def _exchange(eqn: JaxprEqn, replicas: int) -> Form:
    groups = _groups(eqn, replicas)
    split, concat, ranks = eqn.params["split_axis"], eqn.params["concat_axis"], len(groups[0])
    cut = _cut(shape_of(eqn.invars[0]), split, ranks)
    order = _to_front(split, len(cut))
    parts = tuple(cut[n] for n in order)
    back = (*range(1, concat + 1), 0, *range(concat + 1, len(parts)))
    after = Arrangement(parts, back, shape_of(eqn.outvars[0]))
    return Form("exchange", groups, before=Arrangement(cut, order, parts), after=after)


def _permute(eqn: JaxprEqn, replicas: int) -> Form:
    pairs = tuple((int(source), int(destination)) for source, destination in eqn.params["perm"])
    sources, destinations = ([pair[end] for pair in pairs] for end in (0, 1))
    there = range(replicas)
    if len({*sources}) < len(pairs) or len({*destinations}) < len(pairs) or not {*sources, *destinations} <= {*there}:
        raise GraphError(
            "ppermute by a permutation that is none",
            where=source_line(eqn) or None,
            expected=f"pairs of the replicas 0 to {replicas - 1}, each at most once as a source and as a destination",
            got=f"perm={list(pairs)}",
            hint="leave out a pair: replicas that nothing is sent to get zeros",
        )
    return Form("permute", stacked.whole(None, replicas), pairs=pairs)


def _broadcast(eqn: JaxprEqn, replicas: int) -> Form:
    source, groups = eqn.params["source"], _groups(eqn, replicas)
    return Form("permute", groups, pairs=tuple((group[source], r) for group in groups for r in group))


def _index(eqn: JaxprEqn, replicas: int) -> Form:
    return Form("index", stacked.whole(None, replicas))


def _cut(shape: tuple[int, ...], dim: int, ranks: int) -> tuple[int, ...]:
    """A shape with one dimension cut into [ranks, rest]."""
    return (*shape[:dim], ranks, shape[dim] // ranks, *shape[dim + 1 :])


def _to_front(dim: int, rank: int) -> tuple[int, ...]:
    return (dim, *(n for n in range(rank) if n != dim))


COLLECTIVES: dict[str, Callable[[JaxprEqn, int], Form]] = {
    **dict.fromkeys(("psum", "pmax", "pmin", "all_reduce"), _reduce),
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
    "ppermute": _permute,
    "pbroadcast": _broadcast,
    "axis_index": _index,
}


def axis_of(eqn: JaxprEqn) -> str:
    """The name of the axis that a collective equation is over."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return next(axis for axis in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(axis, str))


def is_collective(eqn: JaxprEqn) -> bool:
    """Whether an equation is one over the axis of replicas, not over one that `vmap` made a dimension."""
    axes = eqn.params.get("axes", (AXIS,))
    return eqn.primitive.name in COLLECTIVES and any(isinstance(axis, str) for axis in axes)


def is_reduction(eqn: JaxprEqn) -> bool:
    """Whether an equation reduces its operands over replicas, and over nothing else."""
    return is_collective(eqn) and all(isinstance(axis, str) for axis in eqn.params.get("axes", (0,)))
