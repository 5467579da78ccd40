"""Evaluates a jaxpr of entire arrays on replicas that each have a shard of some of them.

Input: a jaxpr traced with global shapes, and this replica's form of each operand. Output: the same of its results.
The numbers are those of the jaxpr on entire arrays, but for the order of sums:

    elementwise, and views that keep elements in order    computed on the shard
    reductions of all elements, inner products            computed on the shard, then over all replicas
    equations without a shard                             computed on entire arrays, on every replica
    any other equation of a shard                         refused

An entire array is cut where an equation reads it with a shard; of an array computed element by element the operands are
cut, and the array itself is computed only for other readers. Decisions by shape, such as the mask of a weight decay,
are those of entire arrays, because the jaxpr was traced with them.

Limits: loops and collectives on shards are refused; elements of a shard after the array's last one are undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, closed, eval_equation, eval_jaxpr, shape_of
from ipujax.lowering.popops import neutral
from ipujax.lowering.primitives import record_of
from ipujax.lowering.replicas.stacked_eval import EVALUATED

Kind = Literal["uniform", "whole", "shard"]
Path = tuple[JaxprEqn, ...]  # an equation after those that hold it, outermost first
Refuse = Callable[[Path], NoReturn]


@dataclass(frozen=True, slots=True)
class ReplicaArray:
    """An array as a replica has it.

    Args:
        value: for "whole" the array; for "uniform" its one number, [], equal for all elements; for "shard" the shard.
        shape: shape of the entire array.
        kind: "uniform", "whole" or "shard".
    """

    value: jax.Array
    shape: tuple[int, ...]
    kind: Kind

    @property
    def size(self) -> int:
        """Elements of the entire array."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Shards:
    """Division of arrays: their elements in order, in as many equal parts as replicas, the last one padded.

    If replicas divide the first dimension, a shard keeps the others, and so the array's memory order; else it has one
    dimension.

    Args:
        axis: name of the axis of replicas.
        replicas: number of replicas.
    """

    axis: str
    replicas: int

    def shape(self, array_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the shard of an array."""
        if array_shape and array_shape[0] % self.replicas == 0:
            return array_shape[0] // self.replicas, *array_shape[1:]
        return (-(-prod(array_shape) // self.replicas),)

    def rows(self, x: jax.Array) -> jax.Array:
        """All shards of an array, [replicas, *shape], padded with zeros after its last element."""
        shape = self.shape(x.shape)
        if x.ndim and x.shape[0] % self.replicas == 0:
            return x.reshape(self.replicas, *shape)
        return jnp.pad(x.reshape(-1), (0, shape[0] * self.replicas - x.size)).reshape(self.replicas, *shape)

    def whole(self, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Array of all shards, which are [replicas, *shape] or concatenated."""
        if rows.size == prod(shape):
            return rows.reshape(shape)
        return rows.reshape(-1)[: prod(shape)].reshape(shape)

    def as_whole(self, array: ReplicaArray) -> jax.Array:
        """Entire array; shards are gathered."""
        if array.kind == "shard":
            return self.whole(lax.all_gather(array.value, self.axis), array.shape)
        return jnp.broadcast_to(array.value, array.shape)

    def as_shard(self, array: ReplicaArray) -> jax.Array:
        """This replica's shard."""
        if array.kind == "whole":
            index = lax.axis_index(self.axis)
            return lax.dynamic_index_in_dim(self.rows(array.value), index, keepdims=False, allow_negative_indices=False)
        return jnp.broadcast_to(array.value, self.shape(array.shape))

    def as_kind(self, array: ReplicaArray, kind: Kind) -> ReplicaArray:
        """Array in another form; only an array that is uniform already can be "uniform"."""
        if kind == array.kind:
            return array
        return ReplicaArray(self.as_shard(array) if kind == "shard" else self.as_whole(array), array.shape, kind)

    def filled_shard(self, array: ReplicaArray, fill: Any) -> jax.Array:
        """This replica's shard, with a number in place of the elements after the array's last one."""
        shard = self.as_shard(array)
        if array.size == shard.size * self.replicas:
            return shard
        position = lax.axis_index(self.axis) * len(shard) + jnp.arange(len(shard))
        return jnp.where(position < array.size, shard, jnp.asarray(fill, shard.dtype))


def sharded_eval(
    jaxpr: ClosedJaxpr, operands: Sequence[ReplicaArray], shards: Shards, refuse: Refuse
) -> list[ReplicaArray]:
    """Evaluates a jaxpr on one replica of many that each have a shard of some arrays, as of an optimiser's state.

    Args:
        jaxpr: the function, traced with the shapes of entire arrays.
        operands: for each input the array as this replica has it, as a shard or entirely.
        shards: division of arrays into shards; its axis of replicas must be bound.
        refuse: called with an equation, and the calls around it, that cannot be computed on shards; raises.

    Returns:
        The results, as this replica has them.
    """
    return _Evaluation(shards, refuse).jaxpr(jaxpr, operands)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """One evaluation; `path` has the outer equations of the jaxpr that is evaluated."""

    shards: Shards
    refuse: Refuse
    path: Path = ()
    # By an array's id and the shape it is broadcast to: the array, and its shard, which is computed once.
    shard_cache: dict[tuple[int, tuple[int, ...]], tuple[ReplicaArray, jax.Array]] = field(default_factory=dict)
    # By an array's id: the array, which keeps the id alive, and the elementwise equation and operands that computed it.
    producers: dict[int, tuple[ReplicaArray, JaxprEqn, list[ReplicaArray]]] = field(default_factory=dict)

    def jaxpr(self, jaxpr: ClosedJaxpr, operands: Sequence[ReplicaArray]) -> list[ReplicaArray]:
        return eval_jaxpr(jaxpr, operands, self._equation, lambda x: _entire(jnp.asarray(x)))

    def _equation(self, eqn: JaxprEqn, operands: list[ReplicaArray]) -> list[ReplicaArray]:
        """Evaluates an equation: on shards if it reads one; on one number if all elements are equal; else entirely.

        Entire arrays that an elementwise equation computes are noted in `producers`: if a shard of one is needed later,
        it is computed from shards of the operands, so that the entire one may be dead code.
        """
        name = eqn.primitive.name
        if name in EVALUATED:
            inner = replace(self, path=(*self.path, eqn))  # with these tables of shards and producers
            return inner.jaxpr(closed(eqn.params[EVALUATED[name]]), operands)
        if name == "optimization_barrier":
            values = eval_equation(eqn, *(array.value for array in operands))
            return [ReplicaArray(x, array.shape, array.kind) for x, array in zip(values, operands, strict=True)]
        if any(array.kind == "shard" for array in operands):
            return self._on_shards(eqn, operands)
        shape = shape_of(eqn.outvars[0])
        if name == "broadcast_in_dim" and operands[0].shape == () and shape:
            return [ReplicaArray(operands[0].value, shape, "uniform")]
        are_uniform = any(array.kind == "uniform" for array in operands)
        # A uniform operand and scalars: the result is uniform too, and one number is computed.
        if _is_elementwise(eqn) and are_uniform and all(array.value.ndim == 0 for array in operands):
            (number,) = eval_equation(eqn, *(array.value for array in operands))
            return [ReplicaArray(number, shape, "uniform")]
        results = [_entire(x) for x in eval_equation(eqn, *map(self.shards.as_whole, operands))]
        if _is_elementwise(eqn) and all(array.shape in ((), shape) for array in operands):
            self.producers.update((id(array), (array, eqn, operands)) for array in results)
        return results

    def _on_shards(self, eqn: JaxprEqn, operands: list[ReplicaArray]) -> list[ReplicaArray]:
        """Evaluates an equation that reads a shard; `refuse`s one that would need the entire array.

        Possible are elementwise equations, reshapes in order, reductions of all elements, inner products and branches.
        """
        if _is_elementwise(eqn):
            return self._elementwise(eqn, operands)
        record = record_of(eqn)
        if _keeps_order(eqn, operands[0]):
            shape = shape_of(eqn.outvars[0])
            return [ReplicaArray(operands[0].value.reshape(self.shards.shape(shape)), shape, "shard")]
        monoid = record.monoid if record.is_reduction else None
        if (
            monoid is not None
            and monoid in _reductions_of(operands[0])
            and _is_of_all(eqn.params["axes"], operands[0].shape)
        ):
            return [_entire(self._reduced(monoid, operands[0]).reshape(shape_of(eqn.outvars[0])))]
        if _is_inner_product(eqn):
            return [_entire(self._inner_product(eqn, operands))]
        if eqn.primitive.name == "cond":
            return self._cond(eqn, operands)
        return self.refuse((*self.path, eqn))

    def _elementwise(self, eqn: JaxprEqn, operands: list[ReplicaArray]) -> list[ReplicaArray]:
        """Applies an equation to shards; operands of fewer elements are broadcast before they are cut."""
        shape = shape_of(eqn.outvars[0])
        if any(array.kind == "shard" and array.shape != shape for array in operands):
            return self.refuse((*self.path, eqn))
        results = eval_equation(eqn, *(self._shard_of(array, shape) for array in operands))
        return [ReplicaArray(x, shape, "shard") for x in results]

    def _shard_of(self, array: ReplicaArray, shape: tuple[int, ...]) -> jax.Array:
        """This replica's shard of an array that is broadcast to `shape`; a scalar stays one.

        It is computed from shards of the operands if an elementwise equation has computed the array, else cut from it.
        Each is made once.
        """
        if array.kind == "shard":
            return array.value
        if array.kind == "uniform":
            return self.shards.as_shard(ReplicaArray(array.value, shape, "uniform"))
        if array.value.ndim == 0:
            return array.value
        key = id(array), shape
        if key not in self.shard_cache:
            if id(array) in self.producers and array.shape == shape:
                _, eqn, operands = self.producers[id(array)]
                (shard,) = eval_equation(eqn, *(self._shard_of(operand, shape) for operand in operands))
            else:
                shard = self.shards.as_shard(_entire(jnp.broadcast_to(array.value, shape)))
            self.shard_cache[key] = array, shard
        return self.shard_cache[key][1]

    def _reduced(self, monoid: str, array: ReplicaArray) -> jax.Array:
        """The reduction of all elements of an array, []."""
        reduce, over_replicas = _reductions_of(array)[monoid]
        shard_result = reduce(self.shards.filled_shard(array, neutral(monoid, array.value.dtype)))
        if shard_result.dtype != bool:
            return over_replicas(shard_result, self.shards.axis)
        # Collectives combine numbers: "and" is a minimum, "or" a maximum.
        return over_replicas(shard_result.astype(jnp.int32), self.shards.axis).astype(bool)

    def _inner_product(self, eqn: JaxprEqn, operands: list[ReplicaArray]) -> jax.Array:
        """The sum of the products of corresponding elements of two arrays, []."""
        flat_left, flat_right = (self.shards.filled_shard(array, 0).reshape(-1) for array in operands)
        params = {key: eqn.params[key] for key in ("precision", "preferred_element_type")}
        return lax.psum(lax.dot_general(flat_left, flat_right, (((0,), (0,)), ((), ())), **params), self.shards.axis)

    def _cond(self, eqn: JaxprEqn, operands: list[ReplicaArray]) -> list[ReplicaArray]:
        """Evaluates a `cond`, whose branches read shards; a result is a shard if it is one in any branch.

        Branches are traced twice: first to find in which kind (shard, entire, uniform) each returns its results; then
        to run, with the results of all converted to common kinds.
        """
        index, *arrays = operands
        # Tables of its own: arrays of a branch are traced, and mean nothing outside.
        inner = _Evaluation(self.shards, self.refuse, (*self.path, eqn))
        kinds = [(array.shape, array.kind) for array in arrays]
        branch_results: list[list[tuple[tuple[int, ...], Kind]]] = []

        def evaluate_branch(branch: ClosedJaxpr, values: Sequence[jax.Array]) -> list[ReplicaArray]:
            branch_operands = [ReplicaArray(x, shape, kind) for x, (shape, kind) in zip(values, kinds, strict=True)]
            return inner.jaxpr(branch, branch_operands)

        def record_kinds(branch: ClosedJaxpr, *values: jax.Array) -> list[jax.Array]:
            outputs = evaluate_branch(branch, values)
            branch_results.append([(array.shape, array.kind) for array in outputs])
            return [array.value for array in outputs]

        values = [array.value for array in arrays]
        branches: Sequence[ClosedJaxpr] = eqn.params["branches"]
        for branch in branches:
            # Traced once for `branch_results` alone: branches of a `switch` must return equal shapes.
            jax.eval_shape(lambda *values, branch=branch: record_kinds(branch, *values), *values)
        result_kinds = [
            (kinds_by_branch[0][0], _common_kind([kind for _, kind in kinds_by_branch]))
            for kinds_by_branch in zip(*branch_results, strict=True)
        ]

        def run(branch: ClosedJaxpr, *values: jax.Array) -> list[jax.Array]:
            outputs = evaluate_branch(branch, values)
            return [self.shards.as_kind(x, kind).value for x, (_, kind) in zip(outputs, result_kinds, strict=True)]

        values = lax.switch(
            index.value, [lambda *values, branch=branch: run(branch, *values) for branch in branches], *values
        )
        return [ReplicaArray(x, shape, kind) for x, (shape, kind) in zip(values, result_kinds, strict=True)]


def _is_elementwise(eqn: JaxprEqn) -> bool:
    # A cast of bits to another width adds or drops a dimension.
    rank = max((len(shape_of(atom)) for atom in eqn.invars), default=0)
    return record_of(eqn).is_elementwise and len(shape_of(eqn.outvars[0])) == rank


def _entire(x: jax.Array) -> ReplicaArray:
    return ReplicaArray(x, jnp.shape(x), "whole")


def _common_kind(kinds: Sequence[Kind]) -> Kind:
    return "shard" if "shard" in kinds else "uniform" if set(kinds) == {"uniform"} else "whole"


def _keeps_order(eqn: JaxprEqn, operand: ReplicaArray) -> bool:
    """True for a view with the elements of its operand in the same order, each once."""
    if record_of(eqn).view == "permuted":  # only dimensions of size 1 change places
        long_dims = [d for d in eqn.params["permutation"] if operand.shape[d] != 1]
        return long_dims == sorted(long_dims)
    return record_of(eqn).is_in_order and prod(shape_of(eqn.outvars[0])) == operand.size


def _is_of_all(axes: Sequence[Any], shape: tuple[int, ...]) -> bool:
    return all(n == 1 or d in axes for d, n in enumerate(shape))


def _is_inner_product(eqn: JaxprEqn) -> bool:
    """True for a sum of all products of corresponding elements."""
    record = record_of(eqn)
    if record.cost != "product" or record.factors is None:
        return False
    factors = record.factors(eqn)
    return factors.results == ((),) and factors.operands[0] == factors.operands[1]


# By monoid: the reduction of the shard, and that over replicas. No collective combines bits of integers.
_Reductions = dict[str, tuple[Callable[[jax.Array], jax.Array], Callable[..., jax.Array]]]
_REDUCTIONS: _Reductions = {
    "add": (lambda x: jnp.sum(x, dtype=x.dtype), lax.psum),
    "max": (jnp.max, lax.pmax),
    "min": (jnp.min, lax.pmin),
}
_REDUCTIONS_OF_TRUTHS: _Reductions = {**_REDUCTIONS, "and": (jnp.all, lax.pmin), "or": (jnp.any, lax.pmax)}


def _reductions_of(array: ReplicaArray) -> _Reductions:
    return _REDUCTIONS_OF_TRUTHS if array.value.dtype == bool else _REDUCTIONS
