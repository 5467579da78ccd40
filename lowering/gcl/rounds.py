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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax import lax

from ipujax.lowering.gcl.collective_schedules import Groups, Level, Pairs, Schedule
from ipujax.lowering.layout import add_like, linear_mapping
from ipujax.lowering.popops import Op, advance_around, new_counter, push, slot_of
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Copy, CrossReplicaCopy, Graph, Repeat, Sequence as Program, WriteUndef
from ipujax.runtime.tensor import Tensor, blocked_mapping, concat, even_cuts, on_one_tile

_COMBINE = {"add": lax.add, "max": lax.max, "min": lax.min}


def add_value(graph: Graph, chunks: tuple[int, ...], elements: int, dtype: np.dtype, name: str) -> Tensor:
    """A new variable for a value, [*chunks, elements]."""
    flat = linear_mapping(graph, elements, dtype)
    cuts = (*(even_cuts(n, 1) for n in chunks), np.append(flat.starts, elements))
    tile = flat.tiles.reshape((1,) * len(chunks) + (-1,))
    return graph.add_variable((*chunks, elements), dtype, name, blocked_mapping(cuts, tile))


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The part of a value on one IPU of a replica; all parts go through the same rounds.

    Args:
        graph: the IPU's view of the graph.
        tensor: the part, of variables on that IPU.
    """

    graph: Graph
    tensor: Tensor

    def with_shape(self, shape: Sequence[int]) -> Part:
        """The same elements in another shape."""
        return Part(self.graph, self.tensor.reshape(shape))


def reduce(parts: Sequence[Part], schedule: Schedule, monoid: str, prog: Program, name: str) -> list[Part]:
    """Adds the reducing rounds of all levels.

    Args:
        parts: a value, what `add_value` made for the schedule's chunks, written; changed by doubling.
        schedule: the collective.
        monoid: "add", "max" or "min".
        prog: program to add to.
        name: debug name.

    Returns:
        The chunk each replica ends with, [1, …, 1, elements]; the value itself after doubling.
    """
    held = list(parts)
    for depth, level in enumerate(schedule.levels):
        rest = [part.with_shape(part.tensor.shape[depth:]) for part in held]
        rounds = _reduce_on_ring if level.kind == "ring" else _reduce_by_doubling
        chunks = rounds(rest, level, monoid, prog, f"{name}/reduce")
        held = [chunk.with_shape((1,) * depth + chunk.tensor.shape) for chunk in chunks]
    return held


def gather(held: Sequence[Part], values: Sequence[Part], schedule: Schedule, prog: Program, name: str) -> list[Part]:
    """Adds the gathering rounds of all levels.

    Args:
        held: the chunk each replica has, as `reduce` returns it; changed.
        values: where all chunks go, [*chunks, elements]; what they hold is lost.
        schedule: the collective.
        prog: program to add to.
        name: debug name.

    Returns:
        The whole value.
    """
    held = list(held)
    for depth in reversed(range(len(schedule.levels))):
        level = schedule.levels[depth]
        if level.kind == "doubling":
            continue
        shapes = [(level.size, *part.tensor.shape[depth + 1 :]) for part in held]
        wholes = [
            value.with_shape(shape) if depth == 0 else _add_part(part, shape, f"{name}/level{depth}")
            for value, part, shape in zip(values, held, shapes, strict=True)
        ]
        own = [part.with_shape((1, *shape[1:])) for part, shape in zip(held, shapes, strict=True)]
        _gather_on_ring(own, wholes, level, prog, f"{name}/gather")
        held = [whole.with_shape((1,) * depth + shape) for whole, shape in zip(wholes, shapes, strict=True)]
    return held


def _add_part(like: Part, shape: tuple[int, ...], name: str) -> Part:
    return Part(like.graph, add_value(like.graph, shape[:-1], shape[-1], like.tensor.dtype, name))


def _reduce_on_ring(values: Sequence[Part], level: Level, monoid: str, prog: Program, name: str) -> list[Part]:
    numbers = [_number(value.graph, level, -1, prog, name) for value in values]
    held = [_chunk(value, number, prog, name) for value, number in zip(values, numbers, strict=True)]
    received = [_like(part, name) for part in held]
    body = Program()
    _send(held, received, level.pairs, body, f"{name}/send")
    for value, number, part, came in zip(values, numbers, held, received, strict=True):
        advance_around(value.graph, number, level.size, body, name, level.size - 1)
        own = _chunk(value, number, body, name)
        operands = [came.tensor, own.tensor]
        elementwise(value.graph, combine(monoid, own.tensor.dtype), operands, body, f"{name}/combine", part.tensor)
    prog.add(Repeat(level.size - 1, body, values[0].graph.origin))
    return held


def _gather_on_ring(held: Sequence[Part], values: Sequence[Part], level: Level, prog: Program, name: str) -> None:
    numbers = [_number(value.graph, level, 0, prog, name) for value in values]
    for part, value, number in zip(held, values, numbers, strict=True):
        prog.add(WriteUndef(value.tensor))
        push(value.graph, value.tensor, part.tensor, number, prog, name)
    received = [_like(part, name) for part in held]
    body = Program()
    _send(held, received, level.pairs, body, f"{name}/send")
    for part, value, came, number in zip(held, values, received, numbers, strict=True):
        advance_around(value.graph, number, level.size, body, name, level.size - 1)
        push(value.graph, value.tensor, came.tensor, number, body, name)
        body.add(Copy(came.tensor, part.tensor, f"{name}/hold", value.graph.origin))
    prog.add(Repeat(level.size - 1, body, values[0].graph.origin))


def _reduce_by_doubling(values: Sequence[Part], level: Level, monoid: str, prog: Program, name: str) -> list[Part]:
    received = [_like(value, name) for value in values]
    for swaps in level.swaps():
        _send(values, received, swaps, prog, f"{name}/swap")
        for value, came in zip(values, received, strict=True):
            operands = [value.tensor, came.tensor]
            op = combine(monoid, value.tensor.dtype)
            elementwise(value.graph, op, operands, prog, f"{name}/combine", value.tensor)
    return list(values)


def _send(sources: Sequence[Part], destinations: Sequence[Part], pairs: Pairs, prog: Program, name: str) -> None:
    """All IPUs of a replica send at the same time."""
    source, destination = (_together(parts) for parts in (sources, destinations))
    prog.add(CrossReplicaCopy(source, destination, pairs, name, sources[0].graph.origin))


def _together(parts: Sequence[Part]) -> Tensor:
    return parts[0].tensor if len(parts) == 1 else concat([part.tensor.flatten() for part in parts])


def exchange(graph: Graph, value: Tensor, groups: Groups, prog: Program, name: str) -> Tensor:
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
    whole = Part(graph, value)
    push(graph, out, _chunk(whole, to, prog, name).tensor, source, prog, name)
    for distance in range(1, ranks):
        pairs = tuple((group[p], group[(p + distance) % ranks]) for group in groups for p in range(ranks))
        advance_around(graph, source, ranks, prog, name, ranks - 1)
        advance_around(graph, to, ranks, prog, name)
        sent = _chunk(whole, to, prog, name)
        received = _like(sent, name)
        _send([sent], [received], pairs, prog, f"{name}/send")
        push(graph, out, received.tensor, source, prog, name)
    return out


def permute(graph: Graph, x: Tensor, received: Tensor, pairs: Pairs, prog: Program, name: str) -> None:
    """Adds one round that sends a tensor to other replicas, and zeros where none comes."""
    if len(pairs) < graph.replication_factor:
        zero = graph.add_constant(np.zeros((), x.dtype), "zero", on_one_tile(1, 0))
        prog.add(Copy(zero.broadcast_in_dim(x.shape, ()), received, f"{name}/zero", graph.origin))
    prog.add(CrossReplicaCopy(x, received, pairs, f"{name}/send", graph.origin))


@remembered
def combine(monoid: str, dtype: np.dtype) -> Op:
    """The elementwise operation of a monoid."""
    return Op(monoid, _COMBINE[monoid], dtype)


def _like(x: Part, name: str) -> Part:
    """A new variable that lies as `x` does."""
    return Part(x.graph, add_like(x.graph, x.tensor, f"{name}/received"))


def _chunk(value: Part, number: Tensor, prog: Program, name: str) -> Part:
    """A chunk of a value, [1, …]."""
    chunk = slot_of(value.graph, value.tensor, number, prog, name)
    return Part(value.graph, chunk.reshape((1, *chunk.shape)))


def _number(graph: Graph, level: Level, offset: int, prog: Program, name: str) -> Tensor:
    """A counter that starts as each replica's position on its ring, and so many further."""
    return new_counter(graph, (level.positions(graph.replication_factor) + offset) % level.size, prog, name)
