"""Collectives over replicas, as operations on tensors.

Input: a graph of several replicas, tensors, groups of replicas by rank. Output: tensors of the results; a `Collective`
is added to the program. Several tensors of one dtype are reduced as one value, for fewer rounds.

Source: GCL's `allReduceCrossReplica` and its like. Limits: groups have one size and cover all replicas, as in JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.gcl import rounds, stacked
from ipujax.lowering.gcl.choice import choose
from ipujax.lowering.gcl.schedule import Groups, Pairs, Schedule
from ipujax.lowering.poputil.mapping import layout_like, linear_mapping, map_linearly
from ipujax.runtime.graph import Graph
from ipujax.runtime.mapping import on_one_tile
from ipujax.runtime.program import Collective, Copy
from ipujax.runtime.program import Sequence as Program
from ipujax.runtime.substitution import substituted
from ipujax.runtime.tensor import Tensor, concat
from ipujax.runtime.variable import element_bytes


def all_reduce(
    graph: Graph, tensors: Sequence[Tensor], monoid: str, groups: Groups, prog: Program, name: str
) -> list[Tensor]:
    """The sum, or the like, of tensors over all replicas of a group.

    Args:
        graph: graph to add to.
        tensors: of one dtype.
        monoid: "add", "max" or "min".
        groups: replicas by rank.
        prog: program to add to.
        name: debug name.

    Returns:
        A tensor for each, which lies where it lies.
    """
    moving = [x for x in tensors if x.size]
    if len(groups[0]) == 1 or not moving:
        return list(tensors)
    for x in moving:
        map_linearly(graph, x)
    elements, dtype = sum(x.size for x in moving), moving[0].dtype
    schedule = choose(graph, groups, elements * element_bytes(dtype), reduces_all=True)
    body = Program()
    flat = [_in_order_of_memory(x) for x in moving]
    value = _filled(graph, concat(flat) if len(flat) > 1 else flat[0], schedule, body, name)
    held = rounds.reduce(graph, value, schedule, monoid, body, name)
    summed = rounds.gather(graph, held, value, schedule, body, name)
    results = [_like(graph, x, name) for x in moving]
    _unpack(graph, summed.flatten(), [_in_order_of_memory(result) for result in results], body, name)

    def compute(values: list[jax.Array]) -> list[jax.Array]:
        return [stacked.all_reduce(x, monoid, groups) for x in values]

    is_same = len(groups) == 1
    prog.add(Collective(body, tuple(moving), tuple(results), compute, is_same=is_same, name=name, origin=graph.origin))
    reduced = iter(results)
    return [next(reduced) if x.size else x for x in tensors]


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
    parts, body = x.reshape((x.shape[0], prod(x.shape[1:]))), Program()
    value = rounds.add_value(graph, schedule.chunks, parts.shape[1], x.dtype, f"{name}/value")
    places = schedule.places(groups).ravel()
    ordered = concat([parts[int(rank) : int(rank) + 1] for rank in places])
    body.add(Copy(ordered.reshape(value.shape), value, f"{name}/pack", graph.origin))
    held = rounds.reduce(graph, value, schedule, monoid, body, name)

    def compute(values: list[jax.Array]) -> list[jax.Array]:
        replicas = values[0].shape[0]
        return [stacked.reduce_scatter(values[0], monoid, groups).reshape((replicas, *held.shape))]

    prog.add(Collective(body, (x,), (held,), compute, is_same=False, name=name, origin=graph.origin))
    return held.reshape(x.shape[1:])


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
    body = Program()
    held = rounds.add_value(graph, (1,) * len(schedule.levels), x.size, x.dtype, f"{name}/own")
    body.add(Copy(x.reshape(held.shape), held, f"{name}/pack", graph.origin))
    value = rounds.add_value(graph, schedule.chunks, x.size, x.dtype, f"{name}/value")
    gathered = rounds.gather(graph, held, value, schedule, body, name).reshape((ranks, x.size))
    places = schedule.places(groups).ravel()
    at = np.argsort(places)

    def compute(values: list[jax.Array]) -> list[jax.Array]:
        replicas = values[0].shape[0]
        return [stacked.all_gather(values[0], groups)[:, places].reshape((replicas, *value.shape))]

    is_same = len(groups) == 1
    prog.add(Collective(body, (x,), (value,), compute, is_same=is_same, name=name, origin=graph.origin))
    if (at == np.arange(ranks)).all():
        return gathered.reshape((ranks, *x.shape))
    return concat([gathered[int(n) : int(n) + 1] for n in at]).reshape((ranks, *x.shape))


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

    def compute(values: list[jax.Array]) -> list[jax.Array]:
        return [stacked.all_to_all(values[0], groups).reshape((-1, *shape))]

    prog.add(Collective(body, (x,), (out,), compute, is_same=False, name=name, origin=graph.origin))
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

    def compute(values: list[jax.Array]) -> list[jax.Array]:
        return [stacked.permute(values[0], pairs)]

    prog.add(Collective(body, (x,), (out,), compute, is_same=False, name=name, origin=graph.origin))
    return out


def _in_order_of_memory(x: Tensor) -> Tensor:
    """The elements of a tensor, those of a whole variable in its own order, which moves them in the largest pieces."""
    return Tensor.of(x.variables()[0]).flatten() if _is_whole(x) else x.flatten()


def _is_whole(x: Tensor) -> bool:
    """Whether a tensor is each element of one variable, in some order."""
    return len(x.variables()) == 1 and x.is_writable and x.size == x.variables()[0].size


def _like(graph: Graph, x: Tensor, name: str) -> Tensor:
    """A new tensor that lies where `x` lies, if that is simple, else linearly."""
    if _is_whole(x):
        (variable,) = x.variables()
        out = graph.add_variable(variable.shape, x.dtype, name, graph.mappings[variable])
        return substituted(x, {variable: out.variables()[0]})
    layout = layout_like(graph, x) or ((x.size,), linear_mapping(graph, x.size, x.dtype))
    return graph.add_variable(layout[0], x.dtype, name, layout[1]).reshape(x.shape)


def _filled(graph: Graph, flat: Tensor, schedule: Schedule, body: Program, name: str) -> Tensor:
    """A value that holds some elements, and zeros up to a whole number of chunks."""
    chunks = prod(schedule.chunks)
    each = -(-flat.size // chunks)
    value = rounds.add_value(graph, schedule.chunks, each, flat.dtype, f"{name}/value")
    whole = value.flatten()
    body.add(Copy(flat, whole[: flat.size], f"{name}/pack", graph.origin))
    if flat.size < whole.size:
        rest = whole[flat.size :]
        zero = graph.add_constant(np.zeros((), flat.dtype), "zero", on_one_tile(1, 0))
        body.add(Copy(zero.broadcast_in_dim(rest.shape, ()), rest, f"{name}/padding", graph.origin))
    return value


def _unpack(graph: Graph, flat: Tensor, parts: Sequence[Tensor], body: Program, name: str) -> None:
    """Copies the elements of a value to several tensors, at once."""
    total = sum(part.size for part in parts)
    together = concat(list(parts)) if len(parts) > 1 else parts[0]
    body.add(Copy(flat[:total], together, f"{name}/unpack", graph.origin))


def _nothing(graph: Graph, shape: tuple[int, ...], dtype: np.dtype, name: str) -> Tensor:
    return graph.add_constant(jnp.zeros(shape, dtype), name)
