"""The rounds of a collective as programs.

Every replica runs the same program on memory of its own, and chunks are numbered by where a replica is on its ring: so
a chunk is a dynamic slice, at a number that starts at the replica's position and goes down by one a round. All rounds
of a ring are one `Repeat`: the program does not grow with the number of replicas.

    reduce   held ← value[k]; n - 1 times: send held to the next; k ← k - 1; held ← received + value[k]
    gather   value[k] ← held; n - 1 times: send held to the next; k ← k - 1; value[k] ← held ← received

A value lies with its last dimension, the elements of a chunk, spread linearly over the tiles and all others whole, so
that no slice moves between tiles, and every tile sends as much as any other (GCL's "balanced" order).
"""

from __future__ import annotations

from functools import lru_cache, partial

import jax
import numpy as np
from jax import lax

from ipujax.lowering.gcl.schedule import Level, Pairs, Schedule
from ipujax.lowering.popops.dynamic import dynamic_slice, dynamic_update_slice_in_place
from ipujax.lowering.popops.elementwise import Op, elementwise
from ipujax.lowering.poputil.mapping import linear_mapping
from ipujax.runtime.graph import Graph
from ipujax.runtime.mapping import blocked_mapping, even_cuts, on_one_tile
from ipujax.runtime.program import Copy, CrossReplicaCopy, Repeat, Sequence, WriteUndef
from ipujax.runtime.tensor import Tensor

_NUMBER = np.dtype(np.int32)
_COMBINE = {"add": lax.add, "max": lax.max, "min": lax.min}


def add_value(graph: Graph, chunks: tuple[int, ...], elements: int, dtype: np.dtype, name: str) -> Tensor:
    """A new variable for a value, [*chunks, elements]."""
    flat = linear_mapping(graph, elements, dtype)
    cuts = (*(even_cuts(n, 1) for n in chunks), np.append(flat.starts, elements))
    tile = flat.tiles.reshape((1,) * len(chunks) + (-1,))
    return graph.add_variable((*chunks, elements), dtype, name, blocked_mapping(cuts, tile))


def reduce(graph: Graph, value: Tensor, schedule: Schedule, monoid: str, prog: Sequence, name: str) -> Tensor:
    """Adds the reducing rounds of all levels.

    Args:
        graph: graph to add to.
        value: what `add_value` made for the schedule's chunks, written; changed by doubling.
        schedule: the collective.
        monoid: "add", "max" or "min".
        prog: program to add to.
        name: debug name.

    Returns:
        The chunk each replica ends with, [1, …, 1, elements]; the value itself after doubling.
    """
    held = value
    for depth, level in enumerate(schedule.levels):
        rest = held.reshape(held.shape[depth:])
        rounds = _reduce_on_ring if level.kind == "ring" else _reduce_by_doubling
        chunk = rounds(graph, rest, level, monoid, prog, f"{name}/reduce")
        held = chunk.reshape((1,) * depth + chunk.shape)
    return held


def gather(graph: Graph, held: Tensor, value: Tensor, schedule: Schedule, prog: Sequence, name: str) -> Tensor:
    """Adds the gathering rounds of all levels.

    Args:
        graph: graph to add to.
        held: the chunk each replica has, as `reduce` returns it; changed.
        value: where all chunks go, [*chunks, elements]; what it holds is lost.
        schedule: the collective.
        prog: program to add to.
        name: debug name.

    Returns:
        The whole value.
    """
    for depth in reversed(range(len(schedule.levels))):
        level = schedule.levels[depth]
        if level.kind == "doubling":
            continue
        shape = (level.size, *held.shape[depth + 1 :])
        whole = value if depth == 0 else add_value(graph, shape[:-1], shape[-1], held.dtype, f"{name}/level{depth}")
        _gather_on_ring(graph, held.reshape((1, *shape[1:])), whole.reshape(shape), level, prog, f"{name}/gather")
        held = whole.reshape((1,) * depth + shape)
    return held


def _reduce_on_ring(graph: Graph, value: Tensor, level: Level, monoid: str, prog: Sequence, name: str) -> Tensor:
    number = _number(graph, level, -1, prog, name)
    held = _slice(graph, value, number, prog, name)
    received = _like(graph, held, name)
    body = Sequence()
    body.add(CrossReplicaCopy(held, received, level.pairs, f"{name}/send", graph.origin))
    _step_back(graph, number, level.size, body, name)
    own = _slice(graph, value, number, body, name)
    elementwise(graph, combine(monoid, held.dtype), [received, own], body, f"{name}/combine", held)
    prog.add(Repeat(level.size - 1, body, graph.origin))
    return held


def _gather_on_ring(graph: Graph, held: Tensor, value: Tensor, level: Level, prog: Sequence, name: str) -> None:
    number = _number(graph, level, 0, prog, name)
    prog.add(WriteUndef(value))
    dynamic_update_slice_in_place(graph, value, held, [number], prog, f"{name}/store", dims=(0,))
    received = _like(graph, held, name)
    body = Sequence()
    body.add(CrossReplicaCopy(held, received, level.pairs, f"{name}/send", graph.origin))
    _step_back(graph, number, level.size, body, name)
    dynamic_update_slice_in_place(graph, value, received, [number], body, f"{name}/store", dims=(0,))
    body.add(Copy(received, held, f"{name}/hold", graph.origin))
    prog.add(Repeat(level.size - 1, body, graph.origin))


def _reduce_by_doubling(graph: Graph, value: Tensor, level: Level, monoid: str, prog: Sequence, name: str) -> Tensor:
    received = _like(graph, value, name)
    for swaps in level.swaps():
        prog.add(CrossReplicaCopy(value, received, swaps, f"{name}/swap", graph.origin))
        elementwise(graph, combine(monoid, value.dtype), [value, received], prog, f"{name}/combine", value)
    return value


def exchange(graph: Graph, value: Tensor, groups: tuple[tuple[int, ...], ...], prog: Sequence, name: str) -> Tensor:
    """Adds an all-to-all: chunk n of a value goes to rank n, straight, all ranks at the same distance in one round.

    Args:
        graph: graph to add to.
        value: [ranks, elements], as `add_value` makes it.
        groups: replicas by rank.
        prog: program to add to.
        name: debug name.

    Returns:
        What came, [ranks, elements], by the rank it came from.
    """
    level = Level(groups)
    ranks, elements = value.shape
    out = add_value(graph, (ranks,), elements, value.dtype, name)
    to, source = (_number(graph, level, 0, prog, name) for _ in range(2))
    prog.add(WriteUndef(out))
    own = _slice(graph, value, to, prog, name)
    dynamic_update_slice_in_place(graph, out, own, [source], prog, f"{name}/store", dims=(0,))
    for distance in range(1, ranks):
        pairs = tuple((group[p], group[(p + distance) % ranks]) for group in groups for p in range(ranks))
        _step_back(graph, source, ranks, prog, name)
        _step_back(graph, to, ranks, prog, name, by=ranks - 1)
        sent = _slice(graph, value, to, prog, name)
        received = _like(graph, sent, name)
        prog.add(CrossReplicaCopy(sent, received, pairs, f"{name}/send", graph.origin))
        dynamic_update_slice_in_place(graph, out, received, [source], prog, f"{name}/store", dims=(0,))
    return out


def permute(graph: Graph, x: Tensor, received: Tensor, pairs: Pairs, prog: Sequence, name: str) -> None:
    """Adds one round that sends a tensor to other replicas, and zeros where none comes."""
    if len(pairs) < graph.replication_factor:
        zero = graph.add_constant(np.zeros((), x.dtype), "zero", on_one_tile(1, 0))
        prog.add(Copy(zero.broadcast_in_dim(x.shape, ()), received, f"{name}/zero", graph.origin))
    prog.add(CrossReplicaCopy(x, received, pairs, f"{name}/send", graph.origin))


@lru_cache(maxsize=256)
def combine(monoid: str, dtype: np.dtype) -> Op:
    """The elementwise operation of a monoid."""
    return Op(monoid, _COMBINE[monoid], dtype)


def _like(graph: Graph, x: Tensor, name: str) -> Tensor:
    """A new variable that lies as the whole variable `x` does."""
    (variable,) = x.variables()
    return graph.add_variable(variable.shape, x.dtype, f"{name}/received", graph.mappings[variable]).reshape(x.shape)


def _slice(graph: Graph, value: Tensor, number: Tensor, prog: Sequence, name: str) -> Tensor:
    return dynamic_slice(graph, value, [number], (1, *value.shape[1:]), prog, f"{name}/chunk", dims=(0,))


def _number(graph: Graph, level: Level, offset: int, prog: Sequence, name: str) -> Tensor:
    """A variable that starts as each replica's position on its ring, and so many further."""
    positions = (level.positions(graph.replication_factor) + offset) % level.size
    start = graph.add_replica_constant(positions.astype(_NUMBER), "position", on_one_tile(1, 0))
    number = graph.add_variable((), _NUMBER, f"{name}/chunk number", on_one_tile(1, 0))
    prog.add(Copy(start, number, f"{name}/chunk number", graph.origin))
    return number


def _step_back(graph: Graph, number: Tensor, size: int, prog: Sequence, name: str, by: int = 1) -> None:
    elementwise(graph, _backwards(size, by), [number], prog, f"{name}/chunk number", number)


@lru_cache(maxsize=1024)
def _backwards(size: int, by: int) -> Op:
    """Some steps back around a ring."""
    return Op("rem", partial(_moved, size=size, by=size - by), _NUMBER, ("around a ring", size, by))


def _moved(number: jax.Array, size: int, by: int) -> jax.Array:
    return lax.rem(number + np.int32(by), np.int32(size))
