"""The memory of every tile in the tile interpreter: values, and whether each may be read.

Each tile has its own copy of the elements of a variable. A copy may be read if the element is mapped to the tile or was
delivered to it by the exchange, and if it was written; every other read is an error, and would return poison (NaN in
floating point). The home of an element is the tile that it is mapped to. After each compute set all copies that are not
at home are poisoned again.

`RaceLog` records the vertex of the running compute set that read and wrote each element, and refuses a second one.

Limits: every variable takes tiles × elements, so it is for machines of a few tiles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import VerifyError
from ipujax.runtime.exchange import Demand, access_demand, cut_at_homes, flat_bases, mappings_of, ragged_rows
from ipujax.runtime.graph import Graph, VertexGroup, tile_gap
from ipujax.runtime.tensor import TileMapping, Variable, is_key_dtype, owners

KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")
# Numbers of no vertex, in a race log: the element was not accessed; several vertices read it.
NO_VERTEX = -1
SEVERAL = -2


class InterpreterError(VerifyError):
    """A step that no IPU can run, or that has no meaning; `rule` names the broken rule."""


class Messages(NamedTuple):
    """Elements that an exchange moves from tile to tile; the arrays have one entry for each, int[messages].

    Args:
        variables: the variables that `which` numbers.
        which: number of the variable.
        element: flat element of the variable.
        source: tile that sends.
        destination: tile that receives.
    """

    variables: tuple[Variable, ...]
    which: np.ndarray
    element: np.ndarray
    source: np.ndarray
    destination: np.ndarray


@dataclass(frozen=True, slots=True)
class Actor:
    """The reader or writer of memory: a vertex of the running compute set, by number, or a step of the program."""

    name: str
    tile: int | None = None
    vertex: int = NO_VERTEX
    where: object = None

    def error(
        self, rule: str, action: str, variable: Variable, element: int, hint: str | None = None
    ) -> InterpreterError:
        """Return the error for an action of this actor on one element."""
        index = [int(i) for i in np.unravel_index(element, variable.shape)]
        tile = "" if self.tile is None else f" on tile {self.tile}"
        return InterpreterError(rule, f"{self.name}{tile} {action} {variable!r}{index}", where=self.where, hint=hint)


@remembered
def key_impl(dtype: Any) -> str:
    """Return the name of the random number generator of a PRNG key dtype, for `jax.random.wrap_key_data`."""
    for name in KEY_IMPLS:
        if jax.random.key(0, impl=name).dtype == dtype:
            return name
    raise InterpreterError(
        "type-mismatch", f"the generator of PRNG keys of dtype {dtype} is unknown", expected=" or ".join(KEY_IMPLS)
    )


def to_raw(value: Any) -> np.ndarray:
    """Return an array as tile memory stores it: a NumPy array, PRNG keys as their bytes."""
    if not is_key_dtype(getattr(value, "dtype", np.dtype(bool))):
        return np.asarray(value)
    # NumPy has no key dtype: one void element a key keeps the shape of the array.
    data = np.ascontiguousarray(jax.random.key_data(value))
    return data.view(f"V{data.itemsize * data.shape[-1]}")[..., 0]


def from_raw(raw: np.ndarray, dtype: Any) -> jax.Array:
    """Return the array that `to_raw` stored."""
    if not is_key_dtype(dtype):
        return jnp.asarray(raw)
    words = np.ascontiguousarray(raw).reshape((*raw.shape, 1)).view(np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=key_impl(dtype))


def poison(dtype: Any) -> np.ndarray:
    """Return a value that spoils results: NaN, the largest integer, True, key bytes of ones."""
    if is_key_dtype(dtype):
        return np.frombuffer(b"\xff" * dtype.itemsize, f"V{dtype.itemsize}")[0]
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(np.nan).astype(dtype)
    return np.array(True) if dtype == np.bool_ else np.array(jnp.iinfo(dtype).max, dtype)


def raw_empty(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return poisoned raw storage of a shape."""
    value = poison(dtype)
    return np.full(shape, value, value.dtype)


@dataclass(slots=True)
class _Cells:
    """The copies of one variable on all tiles, [tiles, elements], and the home of each element, int32[elements]."""

    home: np.ndarray
    value: np.ndarray
    present: np.ndarray  # mapped to the tile, or delivered to it
    defined: np.ndarray  # written by any step
    fresh: np.ndarray  # written by the running compute set

    @classmethod
    def of(cls, variable: Variable, home: np.ndarray, num_tiles: int) -> _Cells:
        shape = (num_tiles, variable.size)
        present = np.arange(num_tiles)[:, None] == home
        return cls(home, raw_empty(variable.dtype, shape), present, np.zeros(shape, bool), np.zeros(shape, bool))

    def retire(self) -> None:
        """Drop every copy that is not at home."""
        is_home = np.arange(len(self.value))[:, None] == self.home
        self.present &= is_home
        self.defined &= is_home
        self.fresh[:] = False

    def spoil(self, dtype: Any) -> None:
        """Poison all copies that may not be read."""
        self.value[~(self.present & self.defined)] = poison(dtype)


class TileMemory:
    """The memory of all tiles.

    Args:
        graph: gives the tile mappings and the target.
        variables: the variables in it; at the start constants are defined, others are not.
        replica: number of the replica, for constants by replica.
    """

    def __init__(self, graph: Graph, variables: Iterable[Variable], replica: int = 0) -> None:
        self._cells: dict[Variable, _Cells] = {}
        self._changed: set[Variable] = set()  # since the last `retire`
        self._sharing: dict[Variable, list[Variable]] = {}  # others in the memory of a variable
        for variable in variables:
            if variable not in graph.mappings:
                raise InterpreterError("unmapped-variable", tile_gap(graph, variable).what, where=variable.origin)
            home = owners(graph.mappings[variable])
            self._cells[variable] = cells = _Cells.of(variable, home, graph.target.num_tiles)
            if variable.is_constant:
                constant = to_raw(variable.value[replica] if variable.by_replica else variable.value).ravel()
                cells.value[home, np.arange(variable.size)] = constant
                cells.defined[home, np.arange(variable.size)] = True

    def home(self, variable: Variable) -> np.ndarray:
        """Return the tile that each element is mapped to, int32[size]."""
        return self._cells[variable].home

    def contents(self, variable: Variable) -> np.ndarray:
        """Return a copy of the memory of every tile, poison included, raw [tiles, size]."""
        return self._cells[variable].value.copy()

    def read(self, tiles: Any, variable: Variable, elements: np.ndarray, actor: Actor) -> np.ndarray:
        """Return the raw values of flat elements, each from the memory of its tile: int, or int[elements]."""
        cells = self._cells[variable]
        tiles = np.broadcast_to(tiles, elements.shape)
        for table, rule, action, hint in (
            (
                cells.present,
                "not-delivered",
                "reads, undelivered,",
                "deliver it in the exchange before the compute set",
            ),
            (cells.defined, "undefined-read", "reads, before any write,", "write it first"),
        ):
            missing = np.flatnonzero(~table[tiles, elements])
            if missing.size:
                raise actor.error(rule, action, variable, int(elements[missing[0]]), hint)
        return cells.value[tiles, elements]

    def write(self, tiles: Any, variable: Variable, elements: np.ndarray, values: np.ndarray) -> None:
        """Write raw values to flat elements in the memory of their tiles: int, or int[elements]."""
        cells = self._cells[variable]
        tiles = np.broadcast_to(tiles, elements.shape)
        cells.value[tiles, elements] = values
        # A vertex may write away from home: the exchange after the compute set delivers the result.
        for table in (cells.present, cells.defined, cells.fresh):
            table[tiles, elements] = True
        self._changed.add(variable)
        is_home = tiles == cells.home[elements]
        self._destroy_others(variable, elements[is_home])

    def share(self, memory: Mapping[Variable, Variable]) -> None:
        """Put variables in the memory of others: a write at home leaves the same elements of the others undefined."""
        in_place: dict[Variable, list[Variable]] = defaultdict(list)
        for variable in self._cells:
            in_place[memory.get(variable, variable)].append(variable)
        for variables in in_place.values():
            self._sharing.update((x, [y for y in variables if y is not x]) for x in variables)

    def _destroy_others(self, variable: Variable, elements: np.ndarray) -> None:
        for other in self._sharing.get(variable, ()):
            cells = self._cells[other]
            cells.defined[cells.home[elements], elements] = False
            self._changed.add(other)

    def deliver(self, messages: Messages, actor: Actor, *, to_home: bool) -> None:
        """Copy elements between tiles: operands from their homes, or results to them; refuse other senders."""
        for number, variable in enumerate(messages.variables):
            selected = messages.which == number
            element, source, destination = (column[selected] for column in messages[2:])
            cells = self._cells[variable]
            is_wrong = ~cells.fresh[source, element] if to_home else cells.home[element] != source
            if to_home:
                is_wrong |= cells.home[element] != destination
            if is_wrong.any():
                raise actor.error(
                    "not-delivered", "exchanges from or to the wrong tile", variable, element[is_wrong][0]
                )
            # An operand may be delivered undefined: only reading it is an error.
            for table in (cells.value, cells.present, cells.defined, cells.fresh):
                table[destination, element] = table[source, element]
            cells.present[destination, element] = True
            self._changed.add(variable)
            if to_home:
                self._destroy_others(variable, element)

    def check_results_home(self, actor: Actor) -> None:
        """Refuse a result of the running compute set that did not reach its home."""
        for variable in self._changed:
            cells = self._cells[variable]
            at_home = cells.fresh[cells.home, np.arange(variable.size)]
            lost = np.flatnonzero(cells.fresh.any(axis=0) & ~at_home)
            if lost.size:
                raise actor.error("not-delivered", "leaves, away from its owner,", variable, int(lost[0]))

    def retire(self) -> None:
        """End a step: drop and poison all copies that are not at home."""
        for variable in self._changed:
            self._cells[variable].retire()
            self._cells[variable].spoil(variable.dtype)
        self._changed.clear()


@dataclass(slots=True)
class RaceLog:
    """The numbers of the vertices that read and wrote each element in one compute set."""

    _writer: dict[Variable, np.ndarray] = field(default_factory=dict)
    _reader: dict[Variable, np.ndarray] = field(default_factory=dict)

    def _tables(self, variable: Variable) -> tuple[np.ndarray, np.ndarray]:
        # Made when first asked for: most compute sets use few variables.
        for log in (self._writer, self._reader):
            if variable not in log:
                log[variable] = np.full(variable.size, NO_VERTEX)
        return self._writer[variable], self._reader[variable]

    def read(self, variable: Variable, elements: np.ndarray, actor: Actor) -> None:
        """Record a read; refuse it if another vertex wrote the element."""
        writer, reader = self._tables(variable)
        raced = np.flatnonzero((writer[elements] != NO_VERTEX) & (writer[elements] != actor.vertex))
        if raced.size:
            raise actor.error(
                "read-write-race", "reads an element that another vertex writes:", variable, elements[raced[0]]
            )
        is_only_reader = (reader[elements] == NO_VERTEX) | (reader[elements] == actor.vertex)
        reader[elements] = np.where(is_only_reader, actor.vertex, SEVERAL)

    def write(self, variable: Variable, elements: np.ndarray, actor: Actor) -> None:
        """Record a write; refuse it if any vertex wrote the element, or another read it."""
        writer, reader = self._tables(variable)
        twice = np.flatnonzero(writer[elements] != NO_VERTEX)
        # One vertex may not write an element twice either: a block has no order.
        if twice.size or len(np.unique(elements)) < elements.size:
            element = elements[twice[0]] if twice.size else elements[0]
            raise actor.error("write-race", "writes, already written,", variable, element)
        raced = np.flatnonzero((reader[elements] != NO_VERTEX) & (reader[elements] != actor.vertex))
        if raced.size:
            raise actor.error(
                "read-write-race", "writes an element that another vertex reads:", variable, elements[raced[0]]
            )
        writer[elements] = actor.vertex


def list_messages(graph: Graph, group: VertexGroup, number: int, results: bool) -> Messages:
    """List the elements that a field of a vertex group exchanges, each once for every tile that receives it.

    They are expanded from the pieces that `runtime.exchange.traffic` counts, so that the tile interpreter tests the
    exchange as it was planned.
    """
    # Of results vertices send to owners, the tiles that elements are mapped to; of operands owners send to vertices.
    access = group.accesses[number]
    demand = access_demand(group, access, graph.target.num_tiles)
    remote = _elements_of_others(demand, access.tensor.variables(), mappings_of(access.tensor, graph))
    source, destination = (remote.demanding, remote.owner) if results else (remote.owner, remote.demanding)
    return Messages(access.tensor.variables(), remote.which, remote.element, source, destination)


class _RemoteElements(NamedTuple):
    """Elements that a tile demands and another owns, int[n] each.

    Args:
        which: number of the variable.
        element: flat element of it.
        owner: tile that the element is mapped to.
        demanding: tile of the vertex.
    """

    which: np.ndarray
    element: np.ndarray
    owner: np.ndarray
    demanding: np.ndarray


def _elements_of_others(
    demand: Demand, variables: tuple[Variable, ...], mappings: tuple[TileMapping, ...]
) -> _RemoteElements:
    """Return all elements that a tile demands and another owns."""
    pieces = cut_at_homes(demand.runs, mappings)
    tiles = np.flatnonzero(demand.block_of_tile >= 0)
    block = demand.block_of_tile[tiles]
    # First a row for each pair of tile and piece of its block, then one for each element of the pieces from elsewhere.
    counts = np.bincount(pieces.block, minlength=int(block.max(initial=-1)) + 1)
    row, within = ragged_rows(counts[block])
    piece = (np.cumsum(counts) - counts)[block][row] + within
    tile = tiles[row]
    is_remote = pieces.home[piece] != tile
    piece = piece[is_remote]
    tile = tile[is_remote]
    row, within = ragged_rows(pieces.length[piece])
    flat = pieces.start[piece][row] + within
    bases = np.array(list(flat_bases(variables).values()))
    which = np.searchsorted(bases, flat, side="right") - 1
    return _RemoteElements(which, flat - bases[which], pieces.home[piece][row], tile[row])
