"""The rounds of a collective as programs.

Every replica runs the same program on its own memory, and chunks are numbered by the position of a replica on its ring:
so a chunk is a dynamic slice, at a number that starts at the replica's position and goes down by one a round. All
rounds of a ring are one `Repeat`: the program does not grow with the number of replicas.

    reduce   chunk ← value[k]; n - 1 times: send chunk to the next; k ← k - 1; chunk ← received + value[k]
    gather   value[k] ← chunk; n - 1 times: send chunk to the next; k ← k - 1; value[k] ← chunk ← received

The last dimension of a value, the elements of a chunk, is mapped linearly to the tiles, and all others are not split:
no slice moves between tiles, and every tile sends as much as any other (GCL's "balanced" order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax import lax

from ipujax.lowering.gcl.collective_schedules import Level, Schedule
from ipujax.lowering.gcl.stacked import Groups, Pairs
from ipujax.lowering.layout import add_like, linear_mapping
from ipujax.lowering.popops import Op, advance_around, new_counter, push, slot_of
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Builder, Copy, CrossReplicaCopy, Graph, Repeat, Sequence as Program, WriteUndef
from ipujax.runtime.tensor import Tensor, blocked_mapping, concat, even_cuts, on_one_tile

_COMBINE = {"add": lax.add, "max": lax.max, "min": lax.min}


def add_value(graph: Graph, chunks: tuple[int, ...], elements: int, dtype: np.dtype, name: str) -> Tensor:
    """Adds a variable for a value, [*chunks, elements], each chunk mapped linearly to the tiles."""
    flat = linear_mapping(graph, elements, dtype)
    # One block along every dimension of chunks: all chunks of a tile's elements are on that tile.
    cuts = (*(even_cuts(n, 1) for n in chunks), np.append(flat.starts, elements))
    tile = flat.tiles.reshape((1,) * len(chunks) + (-1,))
    return graph.add_variable((*chunks, elements), dtype, name, blocked_mapping(cuts, tile))


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Part of a value on one IPU of a replica; all parts go through the same rounds.

    Args:
        graph: the IPU's view of the graph.
        tensor: the part, of variables on that IPU.
        is_back: whether it goes through the rounds in the other direction of the ring, at the same time.
    """

    graph: Graph
    tensor: Tensor
    is_back: bool = False

    def with_shape(self, shape: Sequence[int]) -> Part:
        """Part with its elements in another shape."""
        return replace(self, tensor=self.tensor.reshape(shape))

    def ring(self, level: Level) -> Level:
        """The level in the order in which this part goes around it."""
        return level.backwards if self.is_back else level


def reduce(parts: Sequence[Part], schedule: Schedule, monoid: str, prog: Program, name: str) -> list[Part]:
    """Adds the reducing rounds of all levels.

    Returns:
        For each part the chunk that a replica has reduced, [1, …, 1, elements], with a 1 for each level. A level of
        doubling has one chunk, the reduced value, which is written in place of the value that it reduces.
    """
    chunks = list(parts)  # before the first level the one chunk is the value
    for depth, level in enumerate(schedule.levels):
        # Without the dimensions of size 1 of the levels before.
        level_values = [chunk.with_shape(chunk.tensor.shape[depth:]) for chunk in chunks]
        reduce_level = _reduce_on_ring if level.kind == "ring" else _reduce_by_doubling
        level_chunks = reduce_level(level_values, level, monoid, prog, f"{name}/reduce")
        chunks = [chunk.with_shape((1,) * depth + chunk.tensor.shape) for chunk in level_chunks]
    return chunks


def gather(chunks: Sequence[Part], values: Sequence[Part], schedule: Schedule, prog: Program, name: str) -> list[Part]:
    """Adds the gathering rounds of all levels: from the chunks of `reduce` to `values`, which are returned.

    The levels run from the innermost to the first, each into a new value that is the chunk of the level around it, and
    the first into `values`. Chunks are overwritten, as they pass on what they receive.

    Only the innermost level may be of doubling, which leaves nothing to gather: if it is the only one, `values` stay
    unwritten, and the chunks, which are reduced values, are returned.
    """
    chunks = list(chunks)
    for depth in reversed(range(len(schedule.levels))):
        level = schedule.levels[depth]
        if level.kind == "doubling":
            continue
        # A chunk has a dimension of size 1 for each level up to this one, then the dimensions that inner levels filled.
        value_shapes = [(level.size, *chunk.tensor.shape[depth + 1 :]) for chunk in chunks]
        level_values = [
            value.with_shape(shape) if depth == 0 else _add_part(chunk, shape, f"{name}/level{depth}")
            for value, chunk, shape in zip(values, chunks, value_shapes, strict=True)
        ]
        level_chunks = [chunk.with_shape((1, *shape[1:])) for chunk, shape in zip(chunks, value_shapes, strict=True)]
        _gather_on_ring(level_chunks, level_values, level, prog, f"{name}/gather")
        chunks = [value.with_shape((1,) * depth + value.tensor.shape) for value in level_values]
    return chunks


def _add_part(like: Part, shape: tuple[int, ...], name: str) -> Part:
    return replace(like, tensor=add_value(like.graph, shape[:-1], shape[-1], like.tensor.dtype, name))


def _reduce_on_ring(values: Sequence[Part], level: Level, monoid: str, prog: Program, name: str) -> list[Part]:
    """Adds the reduce-scatter of a level: every replica gets the chunk of its own position, reduced over its ring."""
    # After n − 1 steps down from there, the chunk at the replica's own position is the one that is complete.
    counters = [_new_chunk_counter(Builder(value.graph, prog, name), value.ring(level), offset=-1) for value in values]
    chunks = [_chunk(value, counter, prog, name) for value, counter in zip(values, counters, strict=True)]
    received = [_add_received(chunk, name) for chunk in chunks]
    body = Program()
    _send(chunks, received, level.pairs, body, f"{name}/send")
    for value, counter, chunk, incoming in zip(values, counters, chunks, received, strict=True):
        # A step of size − 1 around a ring of `size` is a step down by one.
        advance_around(Builder(value.graph, body, name), counter, level.size, level.size - 1)
        own_chunk = _chunk(value, counter, body, name)
        into = Builder(value.graph, body, f"{name}/combine")
        elementwise(into, combine(monoid, own_chunk.tensor.dtype), [incoming.tensor, own_chunk.tensor], chunk.tensor)
    prog.add(Repeat(level.size - 1, body, values[0].graph.origin))
    return chunks


def _gather_on_ring(chunks: Sequence[Part], values: Sequence[Part], level: Level, prog: Program, name: str) -> None:
    """Adds the all-gather of a level: the chunks of all replicas of a ring, written into each one's `values`."""
    counters = [_new_chunk_counter(Builder(value.graph, prog, name), value.ring(level)) for value in values]
    for chunk, value, counter in zip(chunks, values, counters, strict=True):
        # All chunks are written one by one: without this the value would be live before its first write.
        prog.add(WriteUndef(value.tensor))
        push(Builder(value.graph, prog, name), value.tensor, chunk.tensor, counter)
    received = [_add_received(chunk, name) for chunk in chunks]
    body = Program()
    _send(chunks, received, level.pairs, body, f"{name}/send")
    for chunk, value, incoming, counter in zip(chunks, values, received, counters, strict=True):
        # Down by one around the ring: what arrives is the chunk one position before that of the last round.
        advance_around(Builder(value.graph, body, name), counter, level.size, level.size - 1)
        push(Builder(value.graph, body, name), value.tensor, incoming.tensor, counter)
        body.add(Copy(incoming.tensor, chunk.tensor, f"{name}/hold", value.graph.origin))
    prog.add(Repeat(level.size - 1, body, values[0].graph.origin))


def _reduce_by_doubling(values: Sequence[Part], level: Level, monoid: str, prog: Program, name: str) -> list[Part]:
    """Reduces over the replicas of a level, in rounds: all swap values in pairs, and combine both, in place.

    With each round twice as many replicas have one value.
    """
    received = [_add_received(value, name) for value in values]
    for swaps in level.swaps():
        _send(values, received, swaps, prog, f"{name}/swap")
        for value, incoming in zip(values, received, strict=True):
            operands = [value.tensor, incoming.tensor]
            op = combine(monoid, value.tensor.dtype)
            elementwise(Builder(value.graph, prog, f"{name}/combine"), op, operands, value.tensor)
    # Every replica has the result already: `gather` has no rounds for this level.
    return list(values)


def _send(sources: Sequence[Part], destinations: Sequence[Part], pairs: Pairs, prog: Program, name: str) -> None:
    """Adds one copy from replica to replica of all parts, of all IPUs and both ways: these send at the same time."""
    back = None
    if any(part.is_back for part in sources):
        back = _of_way(sources, is_back=True), _of_way(destinations, is_back=True)
    forward = _of_way(sources, is_back=False), _of_way(destinations, is_back=False)
    prog.add(CrossReplicaCopy(*forward, pairs, name, sources[0].graph.origin, back))


def _of_way(parts: Sequence[Part], *, is_back: bool) -> Tensor:
    """The parts that go one way, as one tensor."""
    tensors = [part.tensor for part in parts if part.is_back == is_back]
    return tensors[0] if len(tensors) == 1 else concat([tensor.flatten() for tensor in tensors])


def exchange(builder: Builder, value: Tensor, groups: Groups) -> Tensor:
    """Adds an all-to-all of a value [ranks, elements]; returns the received chunks, [ranks, elements] by sender.

    In round d rank r sends its chunk r + d to rank r + d, and receives from rank r − d.
    """
    level = Level(groups)
    ranks, elements = value.shape
    out = add_value(builder.graph, (ranks,), elements, value.dtype, builder.name)
    target_counter = _new_chunk_counter(builder, level)  # r + d: the chunk that is sent
    source_counter = _new_chunk_counter(builder, level)  # r − d: where the received one goes
    # All chunks are written one by one: without this the value would be live before its first write.
    builder.prog.add(WriteUndef(out))
    part = Part(builder.graph, value)
    # The chunk for this rank itself stays on its tiles.
    push(builder, out, _chunk(part, target_counter, builder.prog, builder.name).tensor, source_counter)
    for distance in range(1, ranks):
        pairs = tuple((group[p], group[(p + distance) % ranks]) for group in groups for p in range(ranks))
        advance_around(builder, source_counter, ranks, ranks - 1)  # down by one
        advance_around(builder, target_counter, ranks)
        sent = _chunk(part, target_counter, builder.prog, builder.name)
        received = _add_received(sent, builder.name)
        _send([sent], [received], pairs, builder.prog, f"{builder.name}/send")
        push(builder, out, received.tensor, source_counter)
    return out


def permute(builder: Builder, x: Tensor, received: Tensor, pairs: Pairs) -> None:
    """Adds one round that sends `x` along pairs of replicas into `received`; zeros where no pair has a replica."""
    graph = builder.graph
    if len(pairs) < graph.replication_factor:
        zero = graph.add_constant(np.zeros((), x.dtype), "zero", on_one_tile(1, 0))
        builder.prog.add(Copy(zero.broadcast_in_dim(x.shape, ()), received, f"{builder.name}/zero", graph.origin))
    builder.prog.add(CrossReplicaCopy(x, received, pairs, f"{builder.name}/send", graph.origin))


@remembered
def combine(monoid: str, dtype: np.dtype) -> Op:
    """Elementwise operation of a monoid."""
    return Op(monoid, _COMBINE[monoid], dtype)


def _add_received(x: Part, name: str) -> Part:
    """Adds a tensor with the layout of `x`, which receives what another replica has in `x`."""
    return replace(x, tensor=add_like(x.graph, x.tensor, f"{name}/received"))


def _chunk(value: Part, counter: Tensor, prog: Program, name: str) -> Part:
    """Adds the slice of a value at a counter; returns the chunk, [1, …]."""
    chunk = slot_of(Builder(value.graph, prog, name), value.tensor, counter)
    return replace(value, tensor=chunk.reshape((1, *chunk.shape)))


def _new_chunk_counter(builder: Builder, level: Level, *, offset: int = 0) -> Tensor:
    """Adds a counter that starts at each replica's position on its ring plus an offset, modulo its size."""
    return new_counter(builder, (level.positions(builder.graph.replication_factor) + offset) % level.size)
