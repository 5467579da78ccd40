"""Replicated tensor sharding: each replica keeps and updates its part of an optimiser's state.

    optimizer = ipu.optim.shard(optax.adam(1e-3), replicas=4)
    opt_state = optimizer.init(params)
    specs = ipu.optim.shard_specs(opt_state)

    @ipu.jit(replicas=4, in_specs=(P(), specs, P("replica")), out_specs=(P(), specs, P()), donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)       # of this replica's part of the batch
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "replica")

Gradients are reduce-scattered, each replica updates its shard, and the updates are gathered: what is sent is what an
all-reduce of the gradients would send, and the state takes 1/N of the memory. The optimiser is traced with whole arrays
and evaluated on shards (`lowering.replicas.sharded_eval`), so its state has the structure it always has, with a `Shard`
in the place of each large array, and what it decides by shapes and names (masks, labels) stays what it is.

Source: PopART's replicated tensor sharding; Rajbhandari et al., "ZeRO" (2020), stage 1.
Limits: what is not elementwise, nor a sum or the like of all elements, is refused. A replica's other arrays are whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ipujax.calls import check_optimizer, whole_number
from ipujax.lowering.passes import MOST_BYTES
from ipujax.lowering.replicas import Held, Path, Shards
from ipujax.lowering.replicas.sharded_eval import sharded_eval
from ipujax.lowering.source_info import library_function, source_line
from ipujax.runtime.errors import ArgumentError, ArgumentValueError, calling_line

MIN_ELEMENTS = 8192  # published: PopART's TensorLocationSettings.minElementsForReplicatedTensorSharding
Reduce = Literal["mean", "sum", "none"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shard:
    """An array of which each replica has a part: its elements in order, padded to a multiple of the replicas.

    Args:
        value: on a replica its part, see `lowering.replicas.Shards`; outside of `ipu.jit` those of all replicas, one
            after the other.
        shape: of the array.
        axis: name of the axis of replicas.
    """

    value: Any
    shape: tuple[int, ...] = field(metadata={"static": True})
    axis: str = field(metadata={"static": True})


def shard(
    optimizer: Any,
    axis: str = "replica",
    *,
    replicas: int | None = None,
    reduce: Reduce = "mean",
    min_elements: int = MIN_ELEMENTS,
    merge_bytes: int = MOST_BYTES,
) -> Any:
    """An optimiser of each replica's own gradients, of which each replica does its share.

    Args:
        optimizer: an `optax.GradientTransformation`, or another named tuple of `init` and `update`, whose update is
            elementwise; it may also use numbers such as a global norm, which are those of the whole gradient.
        axis: name of the axis of replicas.
        replicas: how many there are; only needed where `init` is called outside of that axis.
        reduce: what becomes of the gradients of all replicas: their "mean", their "sum", or "none" where the gradients
            given are the same on all replicas already.
        min_elements: parameters of fewer elements are updated whole by every replica, their gradients all-reduced.
        merge_bytes: gradients, and updates, of one dtype travel together in as many collectives as this takes, since
            each costs a sync a round; 0 for a collective each.

    Returns:
        An optimiser of the same type. Its `update` needs the axis, and returns whole updates, the same on all replicas;
        its state has a `Shard` for each array shaped as a parameter of `min_elements` or more, see `shard_specs`.

    Raises:
        ArgumentError: for settings that make no sense; of `init`, outside of the axis without `replicas`; of `update`,
            outside of the axis, for a state of another number of replicas, or an optimiser that is not elementwise.

    Source: PopART, see above.
    """
    check_optimizer(optimizer, "shard")
    numbers = ("replicas", 1 if replicas is None else replicas, 1), ("min_elements", min_elements, 0)
    for name, value, least in (*numbers, ("merge_bytes", merge_bytes, 0)):
        whole_number(f"{name} of ipu.optim.shard", value, least)
    if reduce not in ("mean", "sum", "none"):
        raise ArgumentValueError("reduce of ipu.optim.shard", expected='"mean", "sum" or "none"', got=repr(reduce))
    sharding = _Sharding(optimizer, axis, replicas, reduce, min_elements, merge_bytes)
    return optimizer._replace(init=sharding.init, update=sharding.update)


def shard_specs(state: Any) -> Any:
    """How the state of a sharded optimiser is split, for `in_specs` and `out_specs` of `ipu.jit`.

    Args:
        state: what `init` returned, or its shapes (`jax.eval_shape(optimizer.init, params)`); also a larger tree.

    Returns:
        The same tree of `PartitionSpec`: split for each `Shard`, `PartitionSpec()` for all else.
    """
    return jax.tree.map(lambda x: PartitionSpec(x.axis) if _is_shard(x) else PartitionSpec(), state, is_leaf=_is_shard)


def unshard(state: Any) -> Any:
    """The state of the optimiser inside, whole: to save it, or to go on with another number of replicas.

    Args:
        state: what a function of `ipu.jit` returned, or `init`, outside of the axis.

    Returns:
        The same tree with a whole array in place of each `Shard`.

    Raises:
        ArgumentValueError: inside of the axis, where a replica has only its part.
    """

    def whole(x: Any) -> Any:
        if not _is_shard(x):
            return x
        if x.value.size < prod(x.shape):
            what = "ipu.optim.unshard was given one replica's part"
            got = f"{x.value.size} of {prod(x.shape)} elements"
            raise ArgumentValueError(what, expected="all parts", got=got, hint="call it outside of ipu.jit")
        return x.value[: prod(x.shape)].reshape(x.shape)

    return jax.tree.map(whole, state, is_leaf=_is_shard)


@dataclass(frozen=True, slots=True)
class _Sharding:
    """The two functions of a sharded optimiser; for its settings see `shard`."""

    optimizer: Any
    axis: str
    replicas: int | None
    reduce: Reduce
    min_elements: int
    merge_bytes: int

    def init(self, params: Any) -> Any:
        """The state, with a `Shard` for each large array."""
        size = _axis_size(self.axis)
        large = {np.shape(x) for x in jax.tree.leaves(params) if self._is_large(x)}
        if size is not None:
            parts = self._parts(size)
            operands = [_whole(x) for x in jax.tree.leaves(params)]
            held, tree = _evaluated(self.optimizer.init, (params,), operands, parts)
            kept = [_kept(parts, x, _is_like(x.value.dtype, x.shape, large)) for x in held]
            return jax.tree.unflatten(tree, kept)
        if self.replicas is None:
            raise ArgumentValueError(
                f"init of ipu.optim.shard is called where no axis is called {self.axis!r}, and replicas= is not given",
                where=calling_line() or None,
                expected="the number of replicas, or a call inside of ipu.jit(..., replicas=N)",
                hint="ipu.optim.shard(optimizer, replicas=N)",
            )
        rows = Shards(self.axis, self.replicas).rows
        state = self.optimizer.init(params)

        def split(x: Any) -> Any:
            is_like = _is_like(jnp.result_type(x), np.shape(x), large)
            return Shard(_one_after_the_other(rows(jnp.asarray(x))), np.shape(x), self.axis) if is_like else x

        return jax.tree.map(split, state)

    def update(self, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        """The whole updates, and the next state."""
        size = _axis_size(self.axis)
        if size is None:
            raise ArgumentValueError(
                f"update of ipu.optim.shard is called where no axis is called {self.axis!r}",
                where=calling_line() or None,
                expected="a call in what one replica computes",
                hint="ipu.jit(train_step, replicas=N, in_specs=..., out_specs=...)",
            )
        parts = self._parts(size)
        gradients = jax.tree.leaves(grads)
        before, state_tree = jax.tree.flatten(state, is_leaf=_is_shard)
        more, more_tree = jax.tree.flatten((params, extra))
        arrays = [n for n, x in enumerate(more) if isinstance(x, jax.Array | np.ndarray)]
        given = [more[n] for n in arrays]

        def whole_update(grads: Any, state: Any, given: Sequence[Any]) -> Any:
            values = dict(zip(arrays, given, strict=True))
            params, extra = jax.tree.unflatten(more_tree, [values.get(n, x) for n, x in enumerate(more)])
            return self.optimizer.update(grads, state, params, **extra)

        operands = [*self._reduced(parts, gradients), *(_held(parts, x) for x in before), *map(_whole, given)]
        held, tree = _evaluated(whole_update, (grads, state, given), operands, parts)
        updates_tree, after_tree = tree.children()
        count = updates_tree.num_leaves
        were_shards = map(_is_shard, before) if after_tree == state_tree else (x.kind == "shard" for x in held[count:])
        after = [_kept(parts, x, is_shard) for x, is_shard in zip(held[count:], were_shards, strict=True)]
        updates = jax.tree.unflatten(updates_tree, self._gathered(parts, held[:count]))
        return updates, jax.tree.unflatten(after_tree, after)

    def _is_large(self, x: Any) -> bool:
        """Whether a parameter, or its gradient, is sharded."""
        is_number = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        return is_number and np.size(x) >= max(self.min_elements, 2)

    def _parts(self, size: int) -> Shards:
        if self.replicas is not None and self.replicas != size:
            raise ArgumentValueError(
                "ipu.optim.shard was made for another number of replicas",
                where=calling_line() or None,
                expected=f"replicas={size}, as many as the function has",
                got=f"replicas={self.replicas}",
            )
        return Shards(self.axis, size)

    def _reduced(self, parts: Shards, gradients: Sequence[Any]) -> list[Held]:
        """The gradients of all replicas together."""
        reduced = [_whole(x) for x in gradients]
        if self.reduce == "none":
            return reduced
        is_mean = self.reduce == "mean"
        for n, x in enumerate(gradients):
            if not self._is_large(x):
                reduced[n] = _whole((lax.pmean if is_mean else lax.psum)(x, self.axis))
        for numbers in self._buckets({n: x for n, x in enumerate(gradients) if self._is_large(x)}):
            # Divided before: sums of half precision stay small, and what was made transposed lies in order when cut.
            own = [jnp.asarray(gradients[n]) for n in numbers]
            rows = [parts.rows(x / parts.replicas if is_mean else x) for x in own]
            mine = lax.psum_scatter(_side_by_side(rows, 1), self.axis)
            for n, x in zip(numbers, _apart(mine, [row.shape[1:] for row in rows], 0), strict=True):
                reduced[n] = Held(x, np.shape(gradients[n]), "shard")
        return reduced

    def _gathered(self, parts: Shards, updates: Sequence[Held]) -> list[jax.Array]:
        """The whole updates."""
        shards = {n: x.value for n, x in enumerate(updates) if x.kind == "shard"}
        whole = {n: parts.as_whole(x) for n, x in enumerate(updates) if n not in shards}
        for numbers in self._buckets(shards):
            own = [shards[n] for n in numbers]
            everyone = lax.all_gather(_side_by_side(own, 0), self.axis)
            for n, x in zip(numbers, _apart(everyone, [x.shape for x in own], 1), strict=True):
                whole[n] = parts.whole(x, updates[n].shape)
        return [whole[n] for n in range(len(updates))]

    def _buckets(self, arrays: Mapping[int, Any]) -> Iterator[list[int]]:
        """Which arrays travel together: those of one dtype, in order, up to `merge_bytes`."""
        dtypes = {n: jnp.result_type(x) for n, x in arrays.items()}
        for dtype in dict.fromkeys(dtypes.values()):
            bucket: list[int] = []
            held = 0
            for n in (n for n in arrays if dtypes[n] == dtype):
                num_bytes = np.size(arrays[n]) * dtype.itemsize
                if bucket and held + num_bytes > self.merge_bytes:
                    yield bucket
                    bucket, held = [], 0
                bucket.append(n)
                held += num_bytes
            if bucket:
                yield bucket


def _evaluated(fun: Any, trees: Sequence[Any], operands: Sequence[Held], parts: Shards) -> tuple[list[Held], Any]:
    """What a function of whole arrays returns, as a replica holds it, and its tree."""

    def described(x: Any) -> jax.ShapeDtypeStruct:
        if _is_shard(x):
            return jax.ShapeDtypeStruct(x.shape, x.value.dtype)
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))

    shapes = jax.tree.map(described, tuple(trees), is_leaf=_is_shard)
    jaxpr, results = jax.make_jaxpr(fun, return_shape=True)(*shapes)
    return sharded_eval(jaxpr, operands, parts, partial(_refuse, parts.axis)), jax.tree.structure(results)


def _held(parts: Shards, x: Any) -> Held:
    """A part of the state."""
    if not _is_shard(x):
        return _whole(x)
    expected = prod(parts.shape(x.shape))
    if x.value.shape != parts.shape(x.shape):
        raise ArgumentValueError(
            f"the state given to ipu.optim.shard is no replica's of {parts.replicas}",
            where=calling_line() or None,
            expected=f"{expected} elements of an array of shape {x.shape}",
            got=f"{x.value.size} elements",
            hint="in_specs=ipu.optim.shard_specs(state) for it, of as many replicas as it was made for",
        )
    return Held(x.value, x.shape, "shard")


def _kept(parts: Shards, held: Held, is_shard: bool) -> Any:
    """A part of the next state."""
    return Shard(parts.as_shard(held), held.shape, parts.axis) if is_shard else parts.as_whole(held)


def _whole(x: Any) -> Held:
    return Held(jnp.asarray(x), np.shape(x), "whole")


def _is_shard(x: Any) -> bool:
    return isinstance(x, Shard)


def _is_like(dtype: Any, shape: tuple[int, ...], large: Collection[tuple[int, ...]]) -> bool:
    """Whether an array of a state is one for each element of a sharded parameter; unsigned integers may be keys."""
    return shape in large and not jnp.issubdtype(dtype, jnp.unsignedinteger) and jnp.issubdtype(dtype, np.generic)


def _one_after_the_other(rows: jax.Array) -> jax.Array:
    """Parts, [replicas, *shape], without their first dimension."""
    return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])


def _side_by_side(arrays: Sequence[jax.Array], outer: int) -> jax.Array:
    """Arrays as one: one array as it is, of several those behind the outer dimensions flat, one after the other."""
    if len(arrays) == 1:
        return arrays[0]
    return jnp.concatenate([x.reshape(*x.shape[:outer], -1) for x in arrays], axis=-1)


def _apart(together: jax.Array, shapes: Sequence[tuple[int, ...]], outer: int) -> list[jax.Array]:
    """The arrays, of some shapes behind the outer dimensions, that are side by side in one."""
    if len(shapes) == 1:
        return [together]
    ends = np.cumsum([prod(shape) for shape in shapes])[:-1]
    parts = jnp.split(together, [int(end) for end in ends], axis=-1)
    return [x.reshape(*x.shape[:outer], *shape) for x, shape in zip(parts, shapes, strict=True)]


def _axis_size(axis: str) -> int | None:
    """Replicas over an axis, None where there is no such axis."""
    try:
        return int(lax.axis_size(axis))
    except NameError:
        return None


def _refuse(axis: str, path: Path) -> NoReturn:
    """Refuses an equation that a shard is not enough for."""
    eqn = path[-1]
    function = next((name for name in map(library_function, path) if name), "the optimiser")
    shapes = ", ".join(str(atom.aval) for atom in eqn.invars)
    raise ArgumentError(
        f"{function} cannot update a shard of a parameter: it is not elementwise",
        where=source_line(eqn) or calling_line() or None,
        expected="an update of each element by itself, or by numbers such as a sum over all elements",
        got=f"{eqn.primitive.name} of {shapes}",
        hint=f"apply {function} to the whole gradient first: optax.chain({function}(...), ipu.optim.shard(the rest, "
        f'reduce="none")), given jax.lax.pmean(grads, "{axis}")',
    )
