"""Semantics of JAX's collective primitives: a table from a primitive's name to its `Form`.

Input: an equation over the axis of replicas. Output: its groups of replicas, and the rearrangements of operands and
results for `stacked` and `collectives`, in which a leading dimension of ranks numbers the parts of a value.

    all_reduce      psum, pmax, pmin      all elements of every operand; axes that `vmap` made dimensions first
    all_gather                            ranks become a dimension, or are joined along one (`tiled`)
    reduce_scatter                        a dimension is ranks, or is cut into them
    all_to_all                            one dimension is cut into ranks, they are joined along another
    permute         ppermute, pbroadcast  (source, destination) pairs
    index           axis_index, axis_rank the number of the replica, or its rank along axes of a mesh

The rank of a replica along axes of a mesh is a constant of each replica, bound by `axis_rank`: unlike arithmetic on
`axis_index` its values are known, and so which replicas have equal ones.

Source: `jax.lax` parallel operations, jax 0.10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.gcl import stacked
from ipujax.lowering.gcl.stacked import Groups, Pairs
from ipujax.lowering.jax_compat import JaxprEqn, make_primitive, shape_of
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import GraphError
from ipujax.runtime.tensor import Tensor

# `all_reduce` names its monoid in its parameters.
MONOIDS = {"psum": "add", "pmax": "max", "pmin": "min"}
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "index"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Rearrangement of a value: a reshape, a permutation of dimensions and a reshape.

    Args:
        cut: shape before the permutation.
        order: the permutation.
        shape: shape of the result.
    """

    cut: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, x: Tensor) -> Tensor:
        """Rearranged view of a tensor."""
        return x.reshape(self.cut).transpose(self.order).reshape(self.shape)

    def of_all(self, x: jax.Array) -> jax.Array:
        """Rearranged arrays of all replicas, [replicas, …]."""
        replicas = x.shape[:1]
        # Dimension 0 counts replicas and stays first.
        permuted = x.reshape(replicas + self.cut).transpose((0, *(n + 1 for n in self.order)))
        return permuted.reshape(replicas + self.shape)


@dataclass(frozen=True, slots=True)
class Form:
    """Semantics of a collective equation.

    Args:
        kind: see the table above.
        groups: replicas by rank.
        monoid: operation that combines values in a reduction.
        pairs: (source, destination) replicas of a permutation.
        dims: dimensions of the operand that are reduced first.
        ranks: number of each replica, of an index.
        before: rearranges the operand to [ranks, …].
        after: rearranges the result [ranks, …] to the equation's.
    """

    kind: Kind
    groups: Groups
    monoid: str = "add"
    pairs: Pairs = ()
    dims: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    before: Arrangement | None = None
    after: Arrangement | None = None

    @property
    def is_same(self) -> bool:
        """True if the results are equal on all replicas for any operands."""
        # One group of all replicas, or one replica that sends to each.
        has_one_source = self.kind == "permute" and len({source for source, _ in self.pairs}) == 1
        reaches_all = len(self.pairs) == sum(map(len, self.groups))
        return (self.kind in ("all_reduce", "all_gather") and len(self.groups) == 1) or (has_one_source and reaches_all)

    @property
    def is_sum(self) -> bool:
        """True if each result is the sum of its operand over all replicas, and over nothing else."""
        return self.kind == "all_reduce" and self.monoid == "add" and len(self.groups) == 1 and not self.dims

    @property
    def is_uneven(self) -> bool:
        """True if the groups differ in size."""
        return len({len(group) for group in self.groups}) > 1

    def compute(self, operands: Sequence[jax.Array], replicas: int) -> list[jax.Array]:
        """Computes the collective in JAX, from arrays of all replicas, [replicas, …], to such arrays."""
        if self.kind == "index":
            return [jnp.asarray(self.ranks, np.int32)]
        if self.kind == "all_reduce":
            reduced = [stacked.reduced(x, self.monoid, tuple(d + 1 for d in self.dims)) for x in operands]
            return [stacked.all_reduce(x, self.monoid, self.groups) for x in reduced]
        (x,) = operands
        x = self.before.of_all(x) if self.before else x
        result = _STACKED[self.kind](self, x)
        return [self.after.of_all(result) if self.after else result]


_STACKED: dict[str, Callable[[Form, jax.Array], jax.Array]] = {
    "all_gather": lambda form, x: stacked.all_gather(x, form.groups),
    "reduce_scatter": lambda form, x: stacked.reduce_scatter(x, form.monoid, form.groups),
    "all_to_all": lambda form, x: stacked.all_to_all(x, form.groups),
    "permute": lambda form, x: stacked.permute(x, form.pairs),
}


def _checked_groups(eqn: JaxprEqn, replicas: int, *, of_one_size: bool = True) -> Groups:
    """Groups of an equation; refuses those that leave replicas out, or, for parts by rank, differ in size."""
    groups = stacked.whole(eqn.params.get("axis_index_groups"), replicas)
    sizes = sorted({len(group) for group in groups})
    if sorted(replica for group in groups for replica in group) != list(range(replicas)):
        expected = f"each of the replicas 0 to {replicas - 1} in one group"
    elif of_one_size and len(sizes) > 1:
        expected = "groups of one size"
    else:
        return groups
    raise GraphError(
        f"{eqn.primitive.name} over invalid groups",
        where=source_line(eqn) or None,
        expected=expected,
        got=f"axis_index_groups={[list(group) for group in groups]}",
    )


def _all_reduce_form(eqn: JaxprEqn, replicas: int) -> Form:
    """Semantics (`Form`) of a reduction such as `psum`: over replicas, dimensions that `vmap` made of axes, or both."""
    axes = eqn.params["axes"]
    monoid = eqn.params.get("monoid") or MONOIDS[eqn.primitive.name]
    # Over axes that `vmap` made dimensions only, each replica reduces by itself.
    single_groups = tuple((replica,) for replica in range(replicas))
    groups = _checked_groups(eqn, replicas, of_one_size=False) if is_collective(eqn) else single_groups
    return Form("all_reduce", groups, monoid, dims=tuple(axis for axis in axes if not isinstance(axis, str)))


def _all_gather_form(eqn: JaxprEqn, replicas: int) -> Form:
    """Form of `all_gather`: the leading dimension of ranks becomes the gathered one, or is joined with it."""
    groups = _checked_groups(eqn, replicas)
    gathered_shape = (len(groups[0]), *shape_of(eqn.invars[0]))
    order = _order_from_front(eqn.params["all_gather_dimension"], len(gathered_shape))
    # The last reshape joins ranks with the dimension behind them if the equation is `tiled`.
    return Form("all_gather", groups, after=Arrangement(gathered_shape, order, shape_of(eqn.outvars[0])))


def _reduce_scatter_form(eqn: JaxprEqn, replicas: int) -> Form:
    """Semantics (`Form`) of `reduce_scatter`: one dimension is cut into a part for each rank; ranks come first."""
    groups = _checked_groups(eqn, replicas)
    dim = eqn.params["scatter_dimension"]
    ranks = len(groups[0])
    cut = _cut_into_ranks(shape_of(eqn.invars[0]), dim, ranks)
    parts_shape = (ranks, *shape_of(eqn.outvars[0]))
    return Form("reduce_scatter", groups, before=Arrangement(cut, _order_to_front(dim, len(cut)), parts_shape))


def _all_to_all_form(eqn: JaxprEqn, replicas: int) -> Form:
    """Semantics (`Form`) of `all_to_all`: part r of one dimension goes to rank r; arrivals are joined along another."""
    groups = _checked_groups(eqn, replicas)
    split_dim = eqn.params["split_axis"]
    concat_dim = eqn.params["concat_axis"]
    ranks = len(groups[0])
    cut = _cut_into_ranks(shape_of(eqn.invars[0]), split_dim, ranks)
    order = _order_to_front(split_dim, len(cut))
    parts_shape = tuple(cut[n] for n in order)
    # The last reshape joins ranks with the dimension behind them.
    concatenated = Arrangement(parts_shape, _order_from_front(concat_dim, len(parts_shape)), shape_of(eqn.outvars[0]))
    return Form("all_to_all", groups, before=Arrangement(cut, order, parts_shape), after=concatenated)


def _permute_form(eqn: JaxprEqn, replicas: int) -> Form:
    """Semantics (`Form`) of `ppermute`; refuses pairs in which a replica would send, or receive, twice."""
    pairs = tuple((int(source), int(destination)) for source, destination in eqn.params["perm"])
    sources = {source for source, _ in pairs}
    destinations = {destination for _, destination in pairs}
    is_twice = len(sources) < len(pairs) or len(destinations) < len(pairs)
    if is_twice or not sources | destinations <= {*range(replicas)}:
        raise GraphError(
            "ppermute by an invalid permutation",
            where=source_line(eqn) or None,
            expected=f"pairs of the replicas 0 to {replicas - 1}, each at most once as a source and as a destination",
            got=f"perm={list(pairs)}",
            hint="leave out a pair: replicas that receive nothing get zeros",
        )
    return Form("permute", stacked.whole(None, replicas), pairs=pairs)


def _broadcast_form(eqn: JaxprEqn, replicas: int) -> Form:
    source = eqn.params["source"]
    groups = _checked_groups(eqn, replicas)
    return Form("permute", groups, pairs=tuple((group[source], r) for group in groups for r in group))


def _index_form(eqn: JaxprEqn, replicas: int) -> Form:
    return Form("index", stacked.whole(None, replicas), ranks=eqn.params.get("ranks", tuple(range(replicas))))


def _cut_into_ranks(shape: tuple[int, ...], dim: int, ranks: int) -> tuple[int, ...]:
    """Shape with one dimension cut into [ranks, dimension // ranks]."""
    return (*shape[:dim], ranks, shape[dim] // ranks, *shape[dim + 1 :])


def _order_to_front(dim: int, rank: int) -> tuple[int, ...]:
    """Permutation of dimensions that moves one to the front."""
    return (dim, *(n for n in range(rank) if n != dim))


def _order_from_front(dim: int, rank: int) -> tuple[int, ...]:
    """Permutation of dimensions that moves the first to position `dim`."""
    return (*range(1, dim + 1), 0, *range(dim + 1, rank))


COLLECTIVES: dict[str, Callable[[JaxprEqn, int], Form]] = {
    **dict.fromkeys(("psum", "pmax", "pmin", "all_reduce"), _all_reduce_form),
    "all_gather": _all_gather_form,
    "reduce_scatter": _reduce_scatter_form,
    "all_to_all": _all_to_all_form,
    "ppermute": _permute_form,
    "pbroadcast": _broadcast_form,
    "axis_index": _index_form,
    "axis_rank": _index_form,
}


def axes_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """Names of the axes of a collective equation."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return tuple(axis for axis in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(axis, str))


def axis_of(eqn: JaxprEqn) -> str:
    """Name of the first axis of a collective equation."""
    return axes_of(eqn)[0]


def is_collective(eqn: JaxprEqn) -> bool:
    """True for a collective over the axis of replicas, false for one over an axis that `vmap` made a dimension."""
    axes = eqn.params.get("axes", (AXIS,))
    return eqn.primitive.name in COLLECTIVES and any(isinstance(axis, str) for axis in axes)


def is_reduction(eqn: JaxprEqn) -> bool:
    """True for an equation that reduces its operands over replicas and over nothing else."""
    return is_collective(eqn) and all(isinstance(axis, str) for axis in eqn.params.get("axes", (0,)))


AXIS = "replica"  # default name


def axis_rank(ranks: Sequence[int]) -> jax.Array:
    """Returns the rank of this replica, int32[]; `ranks` has that of each replica."""
    (rank,) = axis_rank_p.bind(ranks=tuple(map(int, ranks)), axis_name=AXIS)
    return rank


def _compute(*, ranks: tuple[int, ...], axis_name: str) -> list[jax.Array]:
    return [jnp.asarray(ranks, jnp.int32)[lax.axis_index(axis_name)]]


def _shapes(**params: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((), np.int32)]


axis_rank_p = make_primitive("axis_rank", _compute, _shapes)
