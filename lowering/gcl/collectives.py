"""Collectives over replicas, as operations on tensors.

Input: a graph of several replicas, tensors, groups of replicas by rank. Output: tensors of the results. A `Collective`
is added to the program: its body has the rounds of the machine, and the engine runs an array function in their place.
Several tensors of one dtype are reduced as one value, for fewer rounds.

Source: GCL's `allReduceCrossReplica` and its variants.
Limits: groups have one size and cover all replicas; for sums over others see `rules.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.gcl import rounds, stacked
from ipujax.lowering.gcl.collective_schedules import Schedule, choose
from ipujax.lowering.gcl.rounds import Part
from ipujax.lowering.gcl.stacked import Groups, Pairs
from ipujax.lowering.layout import MemoryOrder, add_like, map_linearly, memory_order
from ipujax.runtime.graph import Builder, Collective, Copy, Graph, Sequence as Program
from ipujax.runtime.tensor import VECTOR_BYTES, Tensor, concat, element_bytes, on_one_tile, substitute


def all_reduce(
    builder: Builder, tensors: Sequence[Tensor], monoid: str, groups: Groups, homes: Sequence[Graph] = ()
) -> list[Tensor]:
    """Reduces tensors over all replicas of a group.

    Args:
        builder: where the collective is added.
        tensors: of one dtype; one that is listed twice is reduced once.
        monoid: "add", "max" or "min".
        groups: replicas by rank.
        homes: for each tensor the view of its IPU, if replicas have several: each IPU reduces its own, in equal rounds.

    Returns:
        For each tensor its reduction, with its layout; a tensor itself if it is empty, or its replica alone in a group.
    """
    graph = builder.graph
    with_homes = zip(tensors, homes or [graph] * len(tensors), strict=True)
    distinct_tensors = list(dict.fromkeys((x, home) for x, home in with_homes if x.size))
    if len(groups[0]) == 1 or not distinct_tensors:
        return list(tensors)
    by_home: dict[Graph, list[Tensor]] = {}
    for x, home in distinct_tensors:
        map_linearly(home, x)
        by_home.setdefault(home, []).append(x)
    dtype = distinct_tensors[0][0].dtype
    largest = max(sum(x.size for x in home_tensors) for home_tensors in by_home.values())
    # All IPUs of a replica take part in the same rounds: the largest value decides.
    schedule = choose(graph, groups, largest * element_bytes(dtype), reduces_all=True)
    body = Program()  # the rounds, in place of which the engine runs `compute`
    values = [
        part
        for home, home_tensors in by_home.items()
        for part in _packed_values(home, home_tensors, schedule, body, builder.name)
    ]
    chunks = rounds.reduce(values, schedule, monoid, body, builder.name)
    reduced = rounds.gather(chunks, values, schedule, body, builder.name)
    results = {x: _add_same_layout(home, x, builder.name) for x, home in distinct_tensors}
    for number, home_tensors in enumerate(by_home.values()):
        parts = reduced[number * schedule.ways :][: schedule.ways]
        _unpack(parts, [_flat_in_memory_order(results[x]) for x in home_tensors], body, builder.name)

    def compute(values: list[jax.Array]) -> list[jax.Array]:
        """The reductions of arrays of all replicas, [replicas, …]."""
        return [stacked.all_reduce(x, monoid, groups) for x in values]

    inputs = tuple(x for x, _ in distinct_tensors)
    outputs = tuple(results[x] for x, _ in distinct_tensors)
    builder.prog.add(
        Collective(
            body,
            inputs,
            outputs,
            compute,
            senders=_groups_by_replica(groups),
            is_sum=monoid == "add" and len(groups) == 1,
            name=builder.name,
            origin=graph.origin,
        )
    )
    return [results.get(x, x) for x in tensors]


def reduce_scatter(builder: Builder, x: Tensor, monoid: str, groups: Groups) -> Tensor:
    """Reduces a tensor [ranks, …] over a group; each replica gets the part [*x.shape[1:]] of its rank."""
    graph = builder.graph
    if len(groups[0]) == 1:  # alone in its group, a replica has the one part
        return x.reshape(x.shape[1:])
    if not x.size:
        return _empty(graph, x.shape[1:], x.dtype, builder.name)
    map_linearly(graph, x)
    schedule = choose(graph, groups, x.size * element_bytes(x.dtype), reduces_all=False)
    # A part's elements go through the rounds in memory order, so that copies are of large pieces.
    order = _order_of_parts(x)
    parts = order.behind(x.shape[0]).of_variable(x).reshape((x.shape[0], prod(x.shape[1:])))
    body = Program()  # the rounds, in place of which the engine runs `compute`
    value = rounds.add_value(graph, schedule.chunks, parts.shape[1], x.dtype, f"{builder.name}/value")
    # The schedule decides at which rank a chunk ends; part n must end at rank n.
    rank_of_chunk = schedule.places(groups).ravel()
    ordered = concat([parts[int(rank) : int(rank) + 1] for rank in rank_of_chunk])
    body.add(Copy(ordered.reshape(value.shape), value, f"{builder.name}/pack", graph.origin))
    (reduced,) = rounds.reduce([Part(graph, value)], schedule, monoid, body, builder.name)
    chunk = reduced.tensor

    def compute(v: jax.Array) -> jax.Array:
        own_part = stacked.reduce_scatter(v, monoid, groups)  # [replicas, …]
        return _in_memory_order(own_part, order, chunk.shape, num_leading=1)

    _add_collective(builder, body, x, chunk, compute, _groups_by_replica(groups), has_ranks=True)
    return order.of_view(chunk.reshape(order.variable_shape))


def all_gather(builder: Builder, x: Tensor, groups: Groups) -> Tensor:
    """Gathers the tensors of all replicas of a group, [ranks, *x.shape], in the order of ranks."""
    graph = builder.graph
    ranks = len(groups[0])
    if ranks == 1:
        return x.reshape((1, *x.shape))
    if not x.size:
        return _empty(graph, (ranks, *x.shape), x.dtype, builder.name)
    map_linearly(graph, x)
    schedule = choose(graph, groups, ranks * x.size * element_bytes(x.dtype), reduces_all=False)
    body = Program()  # the rounds, in place of which the engine runs `compute`
    order = memory_order(x) or MemoryOrder.own(x.shape)
    # As `reduce` leaves it: one chunk at each level.
    chunk = rounds.add_value(graph, (1,) * len(schedule.levels), x.size, x.dtype, f"{builder.name}/own")
    body.add(Copy(order.of_variable(x).reshape(chunk.shape), chunk, f"{builder.name}/pack", graph.origin))
    value = rounds.add_value(graph, schedule.chunks, x.size, x.dtype, f"{builder.name}/value")
    (value_part,) = rounds.gather([Part(graph, chunk)], [Part(graph, value)], schedule, body, builder.name)
    gathered = value_part.tensor.reshape((ranks, x.size))
    # The schedule decides of which rank a chunk is; the result is a view of the chunks in the order of ranks.
    places = schedule.places(groups).ravel()
    chunk_of_rank = np.argsort(places)

    def compute(v: jax.Array) -> jax.Array:
        by_chunk = stacked.all_gather(v, groups)[:, places]  # [replicas, chunks, …]
        return _in_memory_order(by_chunk, order, value.shape, num_leading=2)

    _add_collective(builder, body, x, value, compute, _groups_by_replica(groups))
    if (chunk_of_rank != np.arange(ranks)).any():
        gathered = concat([gathered[int(n) : int(n) + 1] for n in chunk_of_rank])
    gathered_order = order.behind(ranks)
    return gathered_order.of_view(gathered.reshape(gathered_order.variable_shape))


def all_to_all(builder: Builder, x: Tensor, groups: Groups) -> Tensor:
    """Sends part n of a tensor [ranks, …] to rank n; returns the received parts, [ranks, …] by rank of the sender."""
    graph = builder.graph
    if len(groups[0]) == 1 or not x.size:
        return x
    map_linearly(graph, x)
    body = Program()  # the rounds, in place of which the engine runs `compute`
    ranks, elements = x.shape[0], prod(x.shape[1:])
    value = rounds.add_value(graph, (ranks,), elements, x.dtype, f"{builder.name}/value")
    body.add(Copy(x.reshape(value.shape), value, f"{builder.name}/pack", graph.origin))
    out = rounds.exchange(builder.into(body), value, groups)

    def compute(v: jax.Array) -> jax.Array:
        return stacked.all_to_all(v, groups).reshape((-1, ranks, elements))

    _add_collective(builder, body, x, out, compute, _groups_by_replica(groups), has_ranks=True)
    return out.reshape(x.shape)


def permute(builder: Builder, x: Tensor, pairs: Pairs) -> Tensor:
    """Sends a tensor along (source, destination) pairs of replicas, none twice on a side; zeros without a source."""
    if not x.size:
        return x
    map_linearly(builder.graph, x)
    body = Program()  # the rounds, in place of which the engine runs `compute`
    out = _add_same_layout(builder.graph, x, builder.name)
    rounds.permute(builder.into(body), x, out, pairs)
    sender_of = {destination: (source,) for source, destination in pairs}
    senders = tuple(sender_of.get(replica, ()) for replica in range(builder.graph.replication_factor))
    _add_collective(builder, body, x, out, lambda v: stacked.permute(v, pairs), senders)
    return out


def _add_collective(
    builder: Builder,
    body: Program,
    x: Tensor,
    out: Tensor,
    compute: Callable[[jax.Array], jax.Array],
    senders: Groups,
    *,
    has_ranks: bool = False,
) -> None:
    """Adds a collective of one tensor.

    Args:
        builder: where it is added.
        body: its rounds, from `x` to `out`.
        x: the tensor.
        out: the result.
        compute: what the engine computes in place of `body`, from arrays of all replicas, [replicas, …].
        senders: for each replica those whose `x` its `out` is computed from, by rank.
        has_ranks: whether `out` also depends on the rank of its replica, as a part that it gets for its rank does.
    """
    node = Collective(
        body,
        (x,),
        (out,),
        lambda v: [compute(v[0])],
        senders=senders,
        has_ranks=has_ranks,
        name=builder.name,
        origin=builder.graph.origin,
    )
    builder.prog.add(node)


def _groups_by_replica(groups: Groups) -> Groups:
    """For each replica its group: those that it receives from."""
    group_of = {replica: group for group in groups for replica in group}
    return tuple(group_of[replica] for replica in range(len(group_of)))


def _order_of_parts(x: Tensor) -> MemoryOrder:
    """Memory order of each part of a tensor [ranks, …] if each is contiguous in memory; row-major if not."""
    row_major = MemoryOrder.own(x.shape[1:])
    order = memory_order(x)
    if order is None or order.sizes[0] != (x.shape[0],):
        return row_major
    return order.without((0,))


def _in_memory_order(x: jax.Array, order: MemoryOrder, shape: tuple[int, ...], *, num_leading: int) -> jax.Array:
    """Reorders the dimensions after `num_leading` of an array to a memory order, then gives all but the first `shape`.

    So the engine's array has its elements in the order of the variable that the rounds write.
    """
    if not order.is_own:
        leading = x.shape[:num_leading]
        # A dimension of the tensor may be several of the variable, `sizes` of it.
        x = x.reshape((*leading, *(n for sizes in order.sizes for n in sizes)))
        x = x.transpose((*range(num_leading), *(num_leading + d for d in order.order)))
    return x.reshape((len(x), *shape))


def _flat_in_memory_order(x: Tensor) -> Tensor:
    """Elements of a tensor, those of an entire variable in memory order, which copies in the largest pieces."""
    return Tensor.of(x.variables()[0]).flatten() if _is_permuted_variable(x) else x.flatten()


def _is_permuted_variable(x: Tensor) -> bool:
    """True for a tensor of each element of one variable, in any order."""
    return len(x.variables()) == 1 and x.is_writable and x.size == x.variables()[0].size


def _add_same_layout(graph: Graph, x: Tensor, name: str) -> Tensor:
    """Adds a tensor with the layout of `x`, also its memory order if `x` is an entire variable."""
    if not _is_permuted_variable(x):
        return add_like(graph, x, name)
    (variable,) = x.variables()
    (out,) = add_like(graph, Tensor.of(variable), name).variables()
    return substitute(x, {variable: out})


def _packed_values(graph: Graph, tensors: Sequence[Tensor], schedule: Schedule, body: Program, name: str) -> list[Part]:
    """Adds a value for each way of a schedule, and to `body` the copies of the elements of tensors into them.

    Values are padded with zeros to equal chunks.
    """
    flat = _concatenated([_flat_in_memory_order(x) for x in tensors])
    chunk_elements = -(-flat.size // (schedule.ways * prod(schedule.chunks)))
    if schedule.ways > 1:  # of large values: rows of whole vectors are copied fast
        vector = max(1, VECTOR_BYTES // element_bytes(flat.dtype))
        chunk_elements = -(-chunk_elements // vector) * vector
    values = [
        rounds.add_value(graph, schedule.chunks, chunk_elements, flat.dtype, f"{name}/value")
        for _ in range(schedule.ways)
    ]
    flat_value = _concatenated(values)
    body.add(Copy(flat, flat_value[: flat.size], f"{name}/pack", graph.origin))
    if flat.size < flat_value.size:
        # No result has the sums of padding, but the verifier refuses to sum undefined elements.
        padding = flat_value[flat.size :]
        zero = graph.add_constant(np.zeros((), flat.dtype), "zero", on_one_tile(1, 0))
        body.add(Copy(zero.broadcast_in_dim(padding.shape, ()), padding, f"{name}/padding", graph.origin))
    return [Part(graph, value, is_back=way > 0) for way, value in enumerate(values)]


def _unpack(values: Sequence[Part], tensors: Sequence[Tensor], body: Program, name: str) -> None:
    """Copies the elements of values to several tensors in one copy."""
    source = _concatenated([value.tensor for value in values])
    destination = _concatenated(tensors)
    body.add(Copy(source[: destination.size], destination, f"{name}/unpack", values[0].graph.origin))


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of tensors, one after the other."""
    return concat([tensor.flatten() for tensor in tensors])


def _empty(graph: Graph, shape: tuple[int, ...], dtype: np.dtype, name: str) -> Tensor:
    return graph.add_constant(jnp.zeros(shape, dtype), name)
