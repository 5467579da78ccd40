"""Replicated tensor sharding: each replica stores and updates its part of an optimiser's state.

    optimizer = ipu.optim.shard(optax.adam(1e-3), replicas=4)
    opt_state = optimizer.init(params)
    specs = ipu.optim.shard_specs(opt_state)

    @ipu.jit(replicas=4, in_specs=(P(), specs, P("replica")), out_specs=(P(), specs, P()), donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)       # of this replica's part of the batch
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "replica")

Gradients are reduce-scattered, each replica updates its shard, and the updates are gathered: the bytes sent are those
of an all-reduce of the gradients, and the state takes 1/N of the memory. The optimiser is traced with whole arrays and
evaluated on shards (`lowering.replicas.sharded_eval`), so the structure of its state is unchanged, with a `Shard` in
place of each large array, and so are its decisions by shapes and names (masks, labels).

Source: PopART's replicated tensor sharding; Rajbhandari et al., "ZeRO" (2020), stage 1.
Limits: updates must be elementwise, or use reductions over all elements. A replica's other arrays are whole.
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

from ipujax.arguments import check_optimizer, whole_number
from ipujax.lowering.passes import MOST_BYTES
from ipujax.lowering.replicas import Path, ReplicaArray, Shards
from ipujax.lowering.replicas.sharded_eval import sharded_eval
from ipujax.lowering.source_info import library_function, source_line
from ipujax.runtime.errors import ArgumentError, ArgumentValueError, calling_line

MIN_ELEMENTS = 8192  # published: PopART's TensorLocationSettings.minElementsForReplicatedTensorSharding
Reduce = Literal["mean", "sum", "none"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shard:
    """An array in equal parts, one on each replica: its elements in order, padded to a multiple of the replicas.

    Args:
        value: on a replica its part, see `lowering.replicas.Shards`; outside of `ipu.jit` the parts of all replicas,
            concatenated.
        shape: shape of the array.
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
    """Return an optimiser whose state and update are sharded over replicas.

    Args:
        optimizer: an `optax.GradientTransformation`, or another named tuple of `init` and `update`, whose update is
            elementwise; it may also use reductions over all elements, such as a global norm.
        axis: name of the axis of replicas.
        replicas: number of replicas; needed only to call `init` outside of that axis.
        reduce: reduction of gradients over replicas: "mean", "sum", or "none" for gradients that are equal on all
            replicas already.
        min_elements: parameters of fewer elements are updated whole by every replica, their gradients all-reduced.
        merge_bytes: largest collective that gradients, or updates, of one dtype share, as each costs a sync a round; 0
            for a collective each.

    Returns:
        An optimiser of the same type. Its `update` needs the axis, and returns whole updates, equal on all replicas;
        its state has a `Shard` for each array shaped as a parameter of `min_elements` or more, see `shard_specs`.

    Raises:
        ArgumentError: invalid settings; of `init`: outside of the axis without `replicas`; of `update`: outside of the
            axis, a state of another number of replicas, or an optimiser that is not elementwise.

    Source: PopART, see above.
    """
    check_optimizer(optimizer, "shard")
    numbers = ("replicas", 1 if replicas is None else replicas, 1), ("min_elements", min_elements, 0)
    for name, value, minimum in (*numbers, ("merge_bytes", merge_bytes, 0)):
        whole_number(f"{name} of ipu.optim.shard", value, minimum)
    if reduce not in ("mean", "sum", "none"):
        raise ArgumentValueError("reduce of ipu.optim.shard", expected='"mean", "sum" or "none"', got=repr(reduce))
    sharding = _Sharding(optimizer, axis, replicas, reduce, min_elements, merge_bytes)
    return optimizer._replace(init=sharding.init, update=sharding.update)


def shard_specs(state: Any) -> Any:
    """Return specs of a sharded optimiser's state, for `in_specs` and `out_specs` of `ipu.jit`.

    Args:
        state: result of `init`, or its shapes (`jax.eval_shape(optimizer.init, params)`), or a tree that contains it.

    Returns:
        The same tree of `PartitionSpec`: split for each `Shard`, `PartitionSpec()` for other leaves.
    """
    return jax.tree.map(lambda x: PartitionSpec(x.axis) if _is_shard(x) else PartitionSpec(), state, is_leaf=_is_shard)


def unshard(state: Any) -> Any:
    """Return the inner optimiser's state with whole arrays, to save it or to change the number of replicas.

    Args:
        state: result of a function of `ipu.jit`, or of `init`, outside of the axis.

    Returns:
        The same tree with a whole array in place of each `Shard`.

    Raises:
        ArgumentValueError: inside of the axis, where a replica has only its part.
    """

    def unshard_leaf(x: Any) -> Any:
        if not _is_shard(x):
            return x
        if x.value.size < prod(x.shape):
            problem = "ipu.optim.unshard was given one replica's part"
            got = f"{x.value.size} of {prod(x.shape)} elements"
            raise ArgumentValueError(problem, expected="all parts", got=got, hint="call it outside of ipu.jit")
        return x.value[: prod(x.shape)].reshape(x.shape)

    return jax.tree.map(unshard_leaf, state, is_leaf=_is_shard)


@dataclass(frozen=True, slots=True)
class _Sharding:
    """`init` and `update` of a sharded optimiser, with the settings of `shard`."""

    optimizer: Any
    axis: str
    replicas: int | None
    reduce: Reduce
    min_elements: int
    merge_bytes: int

    def init(self, params: Any) -> Any:
        """Return the state, with a `Shard` for each large array."""
        # Shapes tell which arrays of a state belong to a parameter: its tree need not be that of the parameters.
        size = _axis_size(self.axis)
        large = {np.shape(x) for x in jax.tree.leaves(params) if self._is_large(x)}
        if size is not None:
            parts = self._parts(size)
            operands = [_whole_operand(x) for x in jax.tree.leaves(params)]
            results, tree = _evaluate_sharded(self.optimizer.init, (params,), operands, parts)
            state = [_to_state(parts, x, _is_like(x.value.dtype, x.shape, large)) for x in results]
            return jax.tree.unflatten(tree, state)
        if self.replicas is None:
            raise ArgumentValueError(
                f"init of ipu.optim.shard must be called inside of the axis {self.axis!r}, or with replicas=",
                where=calling_line() or None,
                expected="the number of replicas, or a call inside of ipu.jit(..., replicas=N)",
                hint="ipu.optim.shard(optimizer, replicas=N)",
            )
        # Outside of the axis the optimiser makes whole arrays, which are cut afterwards.
        rows = Shards(self.axis, self.replicas).rows
        state = self.optimizer.init(params)

        def split(x: Any) -> Any:
            is_like = _is_like(jnp.result_type(x), np.shape(x), large)
            return Shard(_concatenate_parts(rows(jnp.asarray(x))), np.shape(x), self.axis) if is_like else x

        return jax.tree.map(split, state)

    def update(self, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        """Return the whole updates, and the next state."""
        size = _axis_size(self.axis)
        if size is None:
            raise ArgumentValueError(
                f"update of ipu.optim.shard must be called inside of the axis {self.axis!r}",
                where=calling_line() or None,
                expected="a call inside of the function of one replica",
                hint="ipu.jit(train_step, replicas=N, in_specs=..., out_specs=...)",
            )
        parts = self._parts(size)
        gradients = jax.tree.leaves(grads)
        before, state_tree = jax.tree.flatten(state, is_leaf=_is_shard)
        update_args, update_args_tree = jax.tree.flatten((params, extra))
        # Other leaves, such as Python numbers and flags, stay constants of the trace: an optimiser may branch on them.
        positions = [n for n, x in enumerate(update_args) if isinstance(x, jax.Array | np.ndarray)]
        arrays = [update_args[n] for n in positions]

        def whole_update(grads: Any, state: Any, arrays: Sequence[Any]) -> Any:
            values = dict(zip(positions, arrays, strict=True))
            params, extra = jax.tree.unflatten(update_args_tree, [values.get(n, x) for n, x in enumerate(update_args)])
            return self.optimizer.update(grads, state, params, **extra)

        operands = [
            *self._reduce(parts, gradients),
            *(_from_state(parts, x) for x in before),
            *map(_whole_operand, arrays),
        ]
        results, tree = _evaluate_sharded(whole_update, (grads, state, arrays), operands, parts)
        updates_tree, after_tree = tree.children()
        num_updates = updates_tree.num_leaves
        state_results = results[num_updates:]
        # A state of the same structure is sharded as before, of another one as the evaluation left each array.
        are_shards = map(_is_shard, before) if after_tree == state_tree else (x.kind == "shard" for x in state_results)
        after = [_to_state(parts, x, is_shard) for x, is_shard in zip(state_results, are_shards, strict=True)]
        updates = jax.tree.unflatten(updates_tree, self._gather(parts, results[:num_updates]))
        return updates, jax.tree.unflatten(after_tree, after)

    def _is_large(self, x: Any) -> bool:
        """Return whether a parameter, or its gradient, is sharded."""
        is_number = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        return is_number and np.size(x) >= max(self.min_elements, 2)  # one element cannot be split

    def _parts(self, size: int) -> Shards:
        if self.replicas is not None and self.replicas != size:
            raise ArgumentValueError(
                "replicas of ipu.optim.shard must be those of the function",
                where=calling_line() or None,
                expected=f"replicas={size}, as many as the function has",
                got=f"replicas={self.replicas}",
            )
        return Shards(self.axis, size)

    def _reduce(self, parts: Shards, gradients: Sequence[Any]) -> list[ReplicaArray]:
        """Reduce gradients over replicas; of large ones each replica gets its shard."""
        reduced = [_whole_operand(x) for x in gradients]
        if self.reduce == "none":
            return reduced
        is_mean = self.reduce == "mean"
        for n, x in enumerate(gradients):
            if not self._is_large(x):
                reduced[n] = _whole_operand((lax.pmean if is_mean else lax.psum)(x, self.axis))
        for numbers in self._buckets({n: x for n, x in enumerate(gradients) if self._is_large(x)}):
            # Divided before the sum, which then stays small in half precision; the division also brings a gradient that
            # was computed transposed into row-major order before it is cut.
            local = [jnp.asarray(gradients[n]) for n in numbers]
            rows = [parts.rows(x / parts.replicas if is_mean else x) for x in local]
            merged = lax.psum_scatter(_merge(rows, 1), self.axis)
            for n, x in zip(numbers, _unmerge(merged, [row.shape[1:] for row in rows], 0), strict=True):
                reduced[n] = ReplicaArray(x, np.shape(gradients[n]), "shard")
        return reduced

    def _gather(self, parts: Shards, updates: Sequence[ReplicaArray]) -> list[jax.Array]:
        """Gather the shards of updates to whole arrays."""
        shards = {n: x.value for n, x in enumerate(updates) if x.kind == "shard"}
        arrays = {n: parts.as_whole(x) for n, x in enumerate(updates) if n not in shards}
        for numbers in self._buckets(shards):
            local = [shards[n] for n in numbers]
            merged = lax.all_gather(_merge(local, 0), self.axis)
            for n, x in zip(numbers, _unmerge(merged, [x.shape for x in local], 1), strict=True):
                arrays[n] = parts.whole(x, updates[n].shape)
        return [arrays[n] for n in range(len(updates))]

    def _buckets(self, arrays: Mapping[int, Any]) -> Iterator[list[int]]:
        """Yield the numbers of arrays that share a collective: of one dtype, in order, up to `merge_bytes`."""
        dtypes = {n: jnp.result_type(x) for n, x in arrays.items()}
        for dtype in dict.fromkeys(dtypes.values()):
            bucket: list[int] = []
            bucket_bytes = 0
            for n in (n for n in arrays if dtypes[n] == dtype):
                num_bytes = np.size(arrays[n]) * dtype.itemsize
                # An array above the limit has a bucket alone.
                if bucket and bucket_bytes + num_bytes > self.merge_bytes:
                    yield bucket
                    bucket = []
                    bucket_bytes = 0
                bucket.append(n)
                bucket_bytes += num_bytes
            if bucket:
                yield bucket


def _evaluate_sharded(
    fun: Any, trees: Sequence[Any], operands: Sequence[ReplicaArray], parts: Shards
) -> tuple[list[ReplicaArray], Any]:
    """Return the results of a function of whole arrays, whole or as this replica's shard, and their tree."""

    def whole_shape(x: Any) -> jax.ShapeDtypeStruct:
        if _is_shard(x):
            return jax.ShapeDtypeStruct(x.shape, x.value.dtype)
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))

    shapes = jax.tree.map(whole_shape, tuple(trees), is_leaf=_is_shard)
    jaxpr, results = jax.make_jaxpr(fun, return_shape=True)(*shapes)
    return sharded_eval(jaxpr, operands, parts, partial(_refuse_whole_arrays, parts.axis)), jax.tree.structure(results)


def _from_state(parts: Shards, x: Any) -> ReplicaArray:
    """Return a leaf of the state as operand, after a check of its number of replicas."""
    if not _is_shard(x):
        return _whole_operand(x)
    expected = prod(parts.shape(x.shape))
    if x.value.shape != parts.shape(x.shape):
        raise ArgumentValueError(
            f"the state of ipu.optim.shard must be that of {parts.replicas} replicas",
            where=calling_line() or None,
            expected=f"{expected} elements of an array of shape {x.shape}",
            got=f"{x.value.size} elements",
            hint="in_specs=ipu.optim.shard_specs(state) for it, of as many replicas as it was made for",
        )
    return ReplicaArray(x.value, x.shape, "shard")


def _to_state(parts: Shards, result: ReplicaArray, is_shard: bool) -> Any:
    return Shard(parts.as_shard(result), result.shape, parts.axis) if is_shard else parts.as_whole(result)


def _whole_operand(x: Any) -> ReplicaArray:
    return ReplicaArray(jnp.asarray(x), np.shape(x), "whole")


def _is_shard(x: Any) -> bool:
    return isinstance(x, Shard)


def _is_like(dtype: Any, shape: tuple[int, ...], large: Collection[tuple[int, ...]]) -> bool:
    """Return whether an array of a state has an entry for each element of a sharded parameter."""
    # Unsigned integers may be keys, and are not sharded.
    return shape in large and not jnp.issubdtype(dtype, jnp.unsignedinteger) and jnp.issubdtype(dtype, np.generic)


def _concatenate_parts(rows: jax.Array) -> jax.Array:
    """Concatenate parts [replicas, n, *shape] to [replicas · n, *shape]."""
    return rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])


def _merge(arrays: Sequence[jax.Array], outer: int) -> jax.Array:
    """Concatenate arrays, flat behind `outer` dimensions; a single array is unchanged."""
    if len(arrays) == 1:
        return arrays[0]
    return jnp.concatenate([x.reshape(*x.shape[:outer], -1) for x in arrays], axis=-1)


def _unmerge(merged: jax.Array, shapes: Sequence[tuple[int, ...]], outer: int) -> list[jax.Array]:
    """Split the result of `_merge` into arrays of these shapes behind `outer` dimensions."""
    if len(shapes) == 1:
        return [merged]
    cuts = np.cumsum([prod(shape) for shape in shapes])[:-1]
    parts = jnp.split(merged, [int(cut) for cut in cuts], axis=-1)
    return [x.reshape(*x.shape[:outer], *shape) for x, shape in zip(parts, shapes, strict=True)]


def _axis_size(axis: str) -> int | None:
    """Return the number of replicas over an axis, None where it does not exist."""
    try:
        return int(lax.axis_size(axis))
    except NameError:  # of JAX, for an axis that no transformation binds
        return None


def _refuse_whole_arrays(axis: str, path: Path) -> NoReturn:
    """Raise the error of an equation that needs whole arrays."""
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
