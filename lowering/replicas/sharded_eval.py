"""Evaluates a jaxpr of whole arrays where each replica holds a shard of some of them.

Input: a jaxpr traced with whole shapes, and how this replica holds each operand. Output: the same of its results.
The numbers are those of the jaxpr on whole arrays, but for the order of sums:

    elementwise, and views that keep elements in order    done on the shard
    reductions of all elements, inner products            done on the shard, then over all replicas
    what touches no shard                                 done whole, on every replica
    anything else on a shard                              refused

An array that is held whole is cut where it meets a shard; of one that is computed element by element, its operands are
cut, and the whole is only computed where something else needs it. Decisions that depend on shapes, as the mask of a
weight decay, are those of the whole arrays, since the jaxpr was traced with them.

Limits: loops and collectives on shards are refused; a shard's numbers behind its array's last element mean nothing.
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
from ipujax.lowering.popops import OP_COSTS, neutral
from ipujax.lowering.replicas.stacked_eval import EVALUATED

Kind = Literal["uniform", "whole", "shard"]
Path = tuple[JaxprEqn, ...]  # an equation after those that hold it, outermost first
Refuse = Callable[[Path], NoReturn]

_VIEWS = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose")


@dataclass(frozen=True, slots=True)
class Held:
    """How a replica holds an array.

    Args:
        value: "whole": the array. "uniform": its one number, [], which all elements are. "shard": of the shard's shape.
        shape: of the whole array.
        kind: which of these.
    """

    value: jax.Array
    shape: tuple[int, ...]
    kind: Kind

    @property
    def size(self) -> int:
        """Elements of the whole array."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Shards:
    """How arrays are cut: their elements in order, in as many equal parts as there are replicas, the last one padded.

    Where the first dimension can be divided, a part has the others as they are: so it lies in memory as the whole does.
    Else it has one dimension.

    Args:
        axis: name of the axis of replicas.
        replicas: how many.
    """

    axis: str
    replicas: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """That of the shard of an array."""
        if whole and whole[0] % self.replicas == 0:
            return whole[0] // self.replicas, *whole[1:]
        return (-(-prod(whole) // self.replicas),)

    def rows(self, x: jax.Array) -> jax.Array:
        """All shards of an array, [replicas, *shape], zeros behind its last element."""
        shape = self.shape(x.shape)
        if x.ndim and x.shape[0] % self.replicas == 0:
            return x.reshape(self.replicas, *shape)
        return jnp.pad(x.reshape(-1), (0, shape[0] * self.replicas - x.size)).reshape(self.replicas, *shape)

    def whole(self, rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The array of all shards, whether [replicas, *shape] or one after the other."""
        if rows.size == prod(shape):
            return rows.reshape(shape)
        return rows.reshape(-1)[: prod(shape)].reshape(shape)

    def as_whole(self, held: Held) -> jax.Array:
        """The whole array; its shards are gathered."""
        if held.kind == "shard":
            return self.whole(lax.all_gather(held.value, self.axis), held.shape)
        return jnp.broadcast_to(held.value, held.shape)

    def as_shard(self, held: Held) -> jax.Array:
        """This replica's shard."""
        if held.kind == "whole":
            index = lax.axis_index(self.axis)
            return lax.dynamic_index_in_dim(self.rows(held.value), index, keepdims=False, allow_negative_indices=False)
        return jnp.broadcast_to(held.value, self.shape(held.shape))

    def as_kind(self, held: Held, kind: Kind) -> Held:
        """The array held in another way, which may not be "uniform" if it is not so already."""
        if kind == held.kind:
            return held
        return Held(self.as_shard(held) if kind == "shard" else self.as_whole(held), held.shape, kind)

    def within(self, held: Held, fill: Any) -> jax.Array:
        """The shard, with a number instead of what lies behind the array's last element."""
        shard = self.as_shard(held)
        if held.size == shard.size * self.replicas:
            return shard
        at = lax.axis_index(self.axis) * len(shard) + jnp.arange(len(shard))
        return jnp.where(at < held.size, shard, jnp.asarray(fill, shard.dtype))


def sharded_eval(jaxpr: ClosedJaxpr, operands: Sequence[Held], shards: Shards, refuse: Refuse) -> list[Held]:
    """The results of a jaxpr, as a replica holds them.

    Args:
        jaxpr: traced with whole shapes.
        operands: one for each input.
        shards: how arrays are cut; the axis must be bound.
        refuse: called with an equation that cannot be done on a shard; raises.
    """
    return _Evaluation(shards, refuse).jaxpr(jaxpr, operands)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """One evaluation; `within` are the equations that hold what is being evaluated."""

    shards: Shards
    refuse: Refuse
    within: Path = ()
    # By an array's id and the shape it is repeated to: the array, and its shard, which is cut once.
    cut: dict[tuple[int, tuple[int, ...]], tuple[Held, jax.Array]] = field(default_factory=dict)
    # By an array's id: the array, and what computes it element by element.
    made: dict[int, tuple[Held, JaxprEqn, list[Held]]] = field(default_factory=dict)

    def jaxpr(self, jaxpr: ClosedJaxpr, operands: Sequence[Held]) -> list[Held]:
        return eval_jaxpr(jaxpr, operands, self._equation, lambda x: _whole(jnp.asarray(x)))

    def _equation(self, eqn: JaxprEqn, operands: list[Held]) -> list[Held]:
        name = eqn.primitive.name
        if name in EVALUATED:
            inside = replace(self, within=(*self.within, eqn))  # and so with what is known of the same arrays
            return inside.jaxpr(closed(eqn.params[EVALUATED[name]]), operands)
        if name == "optimization_barrier":
            values = eval_equation(eqn, *(held.value for held in operands))
            return [Held(x, held.shape, held.kind) for x, held in zip(values, operands, strict=True)]
        if any(held.kind == "shard" for held in operands):
            return self._on_shards(eqn, operands)
        shape = shape_of(eqn.outvars[0])
        if name == "broadcast_in_dim" and operands[0].shape == () and shape:
            return [Held(operands[0].value, shape, "uniform")]
        are_uniform = any(held.kind == "uniform" for held in operands)
        if _is_elementwise(name) and are_uniform and all(held.value.ndim == 0 for held in operands):
            (number,) = eval_equation(eqn, *(held.value for held in operands))
            return [Held(number, shape, "uniform")]
        results = [_whole(x) for x in eval_equation(eqn, *map(self.shards.as_whole, operands))]
        if _is_elementwise(name) and all(held.shape in ((), shape) for held in operands):
            self.made.update((id(held), (held, eqn, operands)) for held in results)
        return results

    def _on_shards(self, eqn: JaxprEqn, operands: list[Held]) -> list[Held]:
        name = eqn.primitive.name
        if _is_elementwise(name) or (name == "bitcast_convert_type" and shape_of(eqn.outvars[0]) == operands[0].shape):
            return self._elementwise(eqn, operands)
        if name in _VIEWS and _keeps_order(eqn, operands[0]):
            shape = shape_of(eqn.outvars[0])
            return [Held(operands[0].value.reshape(self.shards.shape(shape)), shape, "shard")]
        if name in _REDUCTIONS and _is_of_all(eqn.params["axes"], operands[0].shape):
            return [_whole(self._reduced(name, operands[0]).reshape(shape_of(eqn.outvars[0])))]
        if name == "dot_general" and _is_inner_product(eqn, operands):
            return [_whole(self._inner_product(eqn, operands))]
        if name == "cond":
            return self._cond(eqn, operands)
        return self.refuse((*self.within, eqn))

    def _elementwise(self, eqn: JaxprEqn, operands: list[Held]) -> list[Held]:
        """Operands may be scalars, or have dimensions of one, which JAX repeats: it does so before an array is cut."""
        shape = shape_of(eqn.outvars[0])
        if any(held.kind == "shard" and held.shape != shape for held in operands):
            return self.refuse((*self.within, eqn))
        results = eval_equation(eqn, *(self._shard_of(held, shape) for held in operands))
        return [Held(x, shape, "shard") for x in results]

    def _shard_of(self, held: Held, shape: tuple[int, ...]) -> jax.Array:
        """This replica's shard of an array, repeated to a shape."""
        if held.kind == "shard":
            return held.value
        if held.kind == "uniform":
            return self.shards.as_shard(Held(held.value, shape, "uniform"))
        if held.value.ndim == 0:
            return held.value
        key = id(held), shape
        if key not in self.cut:
            if id(held) in self.made and held.shape == shape:
                _, eqn, operands = self.made[id(held)]
                (shard,) = eval_equation(eqn, *(self._shard_of(each, shape) for each in operands))
            else:
                shard = self.shards.as_shard(_whole(jnp.broadcast_to(held.value, shape)))
            self.cut[key] = held, shard
        return self.cut[key][1]

    def _reduced(self, name: str, held: Held) -> jax.Array:
        monoid, reduce, over_replicas = _REDUCTIONS[name]
        own = reduce(self.shards.within(held, neutral(monoid, held.value.dtype)))
        if own.dtype != bool:
            return over_replicas(own, self.shards.axis)
        return over_replicas(own.astype(jnp.int32), self.shards.axis).astype(bool)

    def _inner_product(self, eqn: JaxprEqn, operands: list[Held]) -> jax.Array:
        left, right = (self.shards.within(held, 0).reshape(-1) for held in operands)
        keep = {key: eqn.params[key] for key in ("precision", "preferred_element_type")}
        return lax.psum(lax.dot_general(left, right, (((0,), (0,)), ((), ())), **keep), self.shards.axis)

    def _cond(self, eqn: JaxprEqn, operands: list[Held]) -> list[Held]:
        """Results are shards where those of any branch are."""
        index, *given = operands
        inside, kinds = self._inside(eqn), [(held.shape, held.kind) for held in given]
        found: list[list[tuple[tuple[int, ...], Kind]]] = []

        def results(branch: ClosedJaxpr, values: Sequence[jax.Array]) -> list[Held]:
            own = [Held(x, shape, kind) for x, (shape, kind) in zip(values, kinds, strict=True)]
            return inside.jaxpr(branch, own)

        def look(branch: ClosedJaxpr, *values: jax.Array) -> list[jax.Array]:
            outs = results(branch, values)
            found.append([(held.shape, held.kind) for held in outs])
            return [held.value for held in outs]

        values = [held.value for held in given]
        branches: Sequence[ClosedJaxpr] = eqn.params["branches"]
        for branch in branches:
            jax.eval_shape(lambda *values, branch=branch: look(branch, *values), *values)
        joined = [(ends[0][0], _joined([kind for _, kind in ends])) for ends in zip(*found, strict=True)]

        def run(branch: ClosedJaxpr, *values: jax.Array) -> list[jax.Array]:
            outs = results(branch, values)
            return [self.shards.as_kind(x, kind).value for x, (_, kind) in zip(outs, joined, strict=True)]

        ends = lax.switch(
            index.value, [lambda *values, branch=branch: run(branch, *values) for branch in branches], *values
        )
        return [Held(x, shape, kind) for x, (shape, kind) in zip(ends, joined, strict=True)]

    def _inside(self, eqn: JaxprEqn) -> _Evaluation:
        return _Evaluation(self.shards, self.refuse, (*self.within, eqn))


def _is_elementwise(name: str) -> bool:
    return name in OP_COSTS and name != "bitcast_convert_type"


def _whole(x: jax.Array) -> Held:
    return Held(x, jnp.shape(x), "whole")


def _joined(kinds: Sequence[Kind]) -> Kind:
    return "shard" if "shard" in kinds else "uniform" if set(kinds) == {"uniform"} else "whole"


def _keeps_order(eqn: JaxprEqn, operand: Held) -> bool:
    """Whether a view has the elements of its operand in the same order, each once."""
    if eqn.primitive.name == "transpose":
        moved = [d for d in eqn.params["permutation"] if operand.shape[d] != 1]
        return moved == sorted(moved)
    return prod(shape_of(eqn.outvars[0])) == operand.size


def _is_of_all(axes: Sequence[Any], shape: tuple[int, ...]) -> bool:
    return all(n == 1 or d in axes for d, n in enumerate(shape))


def _is_inner_product(eqn: JaxprEqn, operands: Sequence[Held]) -> bool:
    """Whether both operands are multiplied element by element and all products summed."""
    contracted, batched = eqn.params["dimension_numbers"]
    if any(map(len, batched)) or shape_of(eqn.outvars[0]) != ():
        return False
    pairs = sorted(zip(*contracted, strict=True))
    return [right for _, right in pairs] == list(range(len(operands[1].shape)))


# The monoid of a reduction, on the shard and over replicas.
_REDUCTIONS: dict[str, tuple[str, Callable[[jax.Array], jax.Array], Callable[..., jax.Array]]] = {
    "reduce_sum": ("add", lambda x: jnp.sum(x, dtype=x.dtype), lax.psum),
    "reduce_max": ("max", jnp.max, lax.pmax),
    "reduce_min": ("min", jnp.min, lax.pmin),
    "reduce_and": ("and", jnp.all, lax.pmin),
    "reduce_or": ("or", jnp.any, lax.pmax),
}
