"""Collectives over replicas, as operations on tensors.

Input: a graph of several replicas, tensors, groups of replicas by rank. Output: tensors of the results; a `Collective`
is added to the program. Several tensors of one dtype are reduced as one value, for fewer rounds.

Source: GCL's `allReduceCrossReplica` and its like.
Limits: groups have one size and cover all replicas; for sums over others see `rules.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.gcl import rounds, stacked
from ipujax.lowering.gcl.cheapest import choose
from ipujax.lowering.gcl.collective_schedules import Groups, Pairs, Schedule
from ipujax.lowering.gcl.rounds import Part
from ipujax.lowering.layout import MemoryOrder, add_like, map_linearly, memory_order
from ipujax.runtime.graph import Collective, Copy, Graph, Sequence as Program, substituted
from ipujax.runtime.tensor import Tensor, concat, element_bytes, on_one_tile


def all_reduce(
    graph: Graph,
    tensors: Sequence[Tensor],
    monoid: str,
    groups: Groups,
    prog: Program,
    name: str,
    homes: Sequence[Graph] = (),
) -> list[Tensor]:
    """The sum, or the like, of tensors over all replicas of a group.

    Args:
        graph: graph to add to.
        tensors: of one dtype.
        monoid: "add", "max" or "min".
        groups: replicas by rank.
        prog: program to add to.
        name: debug name.
        homes: for each tensor the view of the IPU it lies on, where replicas have several: each IPU sums what it has,
            all in the same rounds. One graph, of one IPU, when empty.

    Returns:
        A tensor for each, which lies where it lies.
    """
    given = list(zip(tensors, homes or [graph] * len(tensors), strict=True))
    moving = list(dict.fromkeys((x, home) for x, home in given if x.size))
    if len(groups[0]) == 1 or not moving:
        return list(tensors)
    by_home: dict[Graph, list[Tensor]] = {}
    for x, home in moving:
        map_linearly(home, x)
        by_home.setdefault(home, []).append(x)
    dtype, largest = moving[0][0].dtype, max(sum(x.size for x in own) for own in by_home.values())
    schedule = choose(graph, groups, largest * element_bytes(dtype), reduces_all=True)
    body = Program()
    values = [Part(home, _filled(home, own, schedule, body, name)) for home, own in by_home.items()]
    held = rounds.reduce(values, schedule, monoid, body, name)
    summed = rounds.gather(held, values, schedule, body, name)
    results = {x: _like(home, x, name) for x, home in moving}
    for part, own in zip(summed, by_home.values(), strict=True):
        _unpack(part, [_in_order_of_memory(results[x]) for x in own], body, name)

    def compute(values: list[jax.Array]) -> list[jax.Array]:
        return [stacked.all_reduce(x, monoid, groups) for x in values]

    inputs, outputs = tuple(x for x, _ in moving), tuple(results[x] for x, _ in moving)
    is_same = len(groups) == 1
    prog.add(Collective(body, inputs, outputs, compute, is_same=is_same, name=name, origin=graph.origin))
    return [results.get(x, x) for x in tensors]


def reduce_scatter(graph: Graph, x: Tensor, monoid: str, groups: Groups, prog: Program, name: str) -> Tensor:
    """Of the parts of a tensor, summed over a group, each replica gets that of its rank.

    Args:
        graph: graph to add to.
        x: [ranks, …].
        monoid: "add", "max" or "min".
        groups: replicas by rank.
        prog: program to add to.
        name: debug name.

    Returns:
        A tensor of one part's shape.
    """
    if len(groups[0]) == 1 or not x.size:
        return x.reshape(x.shape[1:]) if len(groups[0]) == 1 else _nothing(graph, x.shape[1:], x.dtype, name)
    map_linearly(graph, x)
    schedule = choose(graph, groups, x.size * element_bytes(x.dtype), reduces_all=False)
    order = _order_of_parts(x)
    parts, body = order.behind(x.shape[0]).of_variable(x).reshape((x.shape[0], prod(x.shape[1:]))), Program()
    value = rounds.add_value(graph, schedule.chunks, parts.shape[1], x.dtype, f"{name}/value")
    places = schedule.places(groups).ravel()
    ordered = concat([parts[int(rank) : int(rank) + 1] for rank in places])
    body.add(Copy(ordered.reshape(value.shape), value, f"{name}/pack", graph.origin))
    (reduced,) = rounds.reduce([Part(graph, value)], schedule, monoid, body, name)
    held = reduced.tensor

    def compute(v: jax.Array) -> jax.Array:
        return _as_held(stacked.reduce_scatter(v, monoid, groups), 1, order, held.shape)

    _add(graph, prog, body, x, held, compute, name)
    return order.of_view(held.reshape(order.variable_shape))


def all_gather(graph: Graph, x: Tensor, groups: Groups, prog: Program, name: str) -> Tensor:
    """The tensors of all replicas of a group.

    Args:
        graph: graph to add to.
        x: any shape.
        groups: replicas by rank.
        prog: program to add to.
        name: debug name.

    Returns:
        [ranks, *x.shape].
    """
    ranks = len(groups[0])
    if ranks == 1:
        return x.reshape((1, *x.shape))
    if not x.size:
        return _nothing(graph, (ranks, *x.shape), x.dtype, name)
    map_linearly(graph, x)
    schedule = choose(graph, groups, ranks * x.size * element_bytes(x.dtype), reduces_all=False)
    body, order = Program(), memory_order(x) or MemoryOrder.own(x.shape)
    held = rounds.add_value(graph, (1,) * len(schedule.levels), x.size, x.dtype, f"{name}/own")
    body.add(Copy(order.of_variable(x).reshape(held.shape), held, f"{name}/pack", graph.origin))
    value = rounds.add_value(graph, schedule.chunks, x.size, x.dtype, f"{name}/value")
    (whole,) = rounds.gather([Part(graph, held)], [Part(graph, value)], schedule, body, name)
    gathered = whole.tensor.reshape((ranks, x.size))
    places = schedule.places(groups).ravel()
    at = np.argsort(places)

    def compute(v: jax.Array) -> jax.Array:
        return _as_held(stacked.all_gather(v, groups)[:, places], 2, order, value.shape)

    _add(graph, prog, body, x, value, compute, name, is_same=len(groups) == 1)
    if (at != np.arange(ranks)).any():
        gathered = concat([gathered[int(n) : int(n) + 1] for n in at])
    everyone = order.behind(ranks)
    return everyone.of_view(gathered.reshape(everyone.variable_shape))


def all_to_all(graph: Graph, x: Tensor, groups: Groups, prog: Program, name: str) -> Tensor:
    """Part n of a tensor goes to rank n.

    Args:
        graph: graph to add to.
        x: [ranks, …].
        groups: replicas by rank.
        prog: program to add to.
        name: debug name.

    Returns:
        [ranks, …], by the rank that parts came from.
    """
    if len(groups[0]) == 1 or not x.size:
        return x
    map_linearly(graph, x)
    body, shape = Program(), (x.shape[0], prod(x.shape[1:]))
    value = rounds.add_value(graph, shape[:1], shape[1], x.dtype, f"{name}/value")
    body.add(Copy(x.reshape(shape), value, f"{name}/pack", graph.origin))
    out = rounds.exchange(graph, value, groups, body, name)
    _add(graph, prog, body, x, out, lambda v: stacked.all_to_all(v, groups).reshape((-1, *shape)), name)
    return out.reshape(x.shape)


def permute(graph: Graph, x: Tensor, pairs: Pairs, prog: Program, name: str) -> Tensor:
    """A tensor goes to other replicas.

    Args:
        graph: graph to add to.
        x: any shape.
        pairs: (source, destination); no replica twice on either side, who receives nothing gets zeros.
        prog: program to add to.
        name: debug name.

    Returns:
        A tensor that lies where `x` lies.
    """
    if not x.size:
        return x
    map_linearly(graph, x)
    body, out = Program(), _like(graph, x, name)
    rounds.permute(graph, x, out, pairs, body, name)
    _add(graph, prog, body, x, out, lambda v: stacked.permute(v, pairs), name)
    return out


def _add(
    graph: Graph,
    prog: Program,
    body: Program,
    x: Tensor,
    out: Tensor,
    compute: Callable[[jax.Array], jax.Array],
    name: str,
    is_same: bool = False,
) -> None:
    """Adds a collective of one tensor."""
    node = Collective(body, (x,), (out,), lambda v: [compute(v[0])], is_same=is_same, name=name, origin=graph.origin)
    prog.add(node)


def _order_of_parts(x: Tensor) -> MemoryOrder:
    """The order in which memory has the elements of each part of a tensor, [ranks, …], if it has part after part."""
    own, found = MemoryOrder.own(x.shape[1:]), memory_order(x)
    if found is None or found.sizes[0] != (x.shape[0],):
        return own
    return found.without((0,))


def _as_held(x: jax.Array, first: int, order: MemoryOrder, shape: tuple[int, ...]) -> jax.Array:
    """Values behind the first dimensions of an array in an order of memory, all but the replicas' in another shape."""
    if not order.is_own:
        ahead = x.shape[:first]
        x = x.reshape((*ahead, *(n for row in order.sizes for n in row)))
        x = x.transpose((*range(first), *(first + d for d in order.order)))
    return x.reshape((len(x), *shape))


def _in_order_of_memory(x: Tensor) -> Tensor:
    """The elements of a tensor, those of a whole variable in its own order, which moves them in the largest pieces."""
    return Tensor.of(x.variables()[0]).flatten() if _is_whole(x) else x.flatten()


def _is_whole(x: Tensor) -> bool:
    """Whether a tensor is each element of one variable, in some order."""
    return len(x.variables()) == 1 and x.is_writable and x.size == x.variables()[0].size


def _like(graph: Graph, x: Tensor, name: str) -> Tensor:
    """A new tensor that lies where `x` lies, also in memory if `x` is all of a variable."""
    if not _is_whole(x):
        return add_like(graph, x, name)
    (variable,) = x.variables()
    (out,) = add_like(graph, Tensor.of(variable), name).variables()
    return substituted(x, {variable: out})


def _filled(graph: Graph, tensors: Sequence[Tensor], schedule: Schedule, body: Program, name: str) -> Tensor:
    """A value that holds the elements of tensors, and zeros up to a whole number of chunks."""
    flat = _joined([_in_order_of_memory(x) for x in tensors])
    each = -(-flat.size // prod(schedule.chunks))
    value = rounds.add_value(graph, schedule.chunks, each, flat.dtype, f"{name}/value")
    whole = value.flatten()
    body.add(Copy(flat, whole[: flat.size], f"{name}/pack", graph.origin))
    if flat.size < whole.size:
        rest = whole[flat.size :]
        zero = graph.add_constant(np.zeros((), flat.dtype), "zero", on_one_tile(1, 0))
        body.add(Copy(zero.broadcast_in_dim(rest.shape, ()), rest, f"{name}/padding", graph.origin))
    return value


def _unpack(value: Part, tensors: Sequence[Tensor], body: Program, name: str) -> None:
    """Copies the elements of a value to several tensors, at once."""
    together = _joined(tensors)
    body.add(Copy(value.tensor.flatten()[: together.size], together, f"{name}/unpack", value.graph.origin))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else concat(list(tensors))


def _nothing(graph: Graph, shape: tuple[int, ...], dtype: np.dtype, name: str) -> Tensor:
    return graph.add_constant(jnp.zeros(shape, dtype), name)
