"""The memory of every tile, as the tile interpreter sees it: what lies where, and what may be read.

Each tile has its own copy of the elements of a variable. A copy may be read when the element is mapped to the tile or
was delivered to it by the exchange, and when something wrote it; every other read is an error, and would find poison
(NaN in floating point). After each compute set the copies that exchanges left away from home are poisoned again.

`RaceLog` notes which vertex of the running compute set read and wrote each element, and refuses a second one.

Limits: holds tiles × elements of everything, so it is for machines of a few tiles.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import VerifyError
from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import Variable, is_key_dtype, owners

KEY_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")
NOBODY, MANY = -1, -2


class InterpreterError(VerifyError):
    """The interpreted machine did what no IPU can do, or what has no meaning; `rule` names the rule broken."""


class Messages(NamedTuple):
    """Elements an exchange moves from tile to tile: one entry each, arrays of one length.

    Args:
        variables: what `which` counts.
        which: number of the variable.
        element: flat element of it.
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
    """Who touches memory: a vertex of the running compute set by number, or a step of the program (number -1)."""

    name: str
    tile: int | None = None
    vertex: int = NOBODY
    where: object = None

    def error(
        self, rule: str, what: str, variable: Variable, element: int, hint: str | None = None
    ) -> InterpreterError:
        """The error that says what this actor did to one element."""
        index = [int(i) for i in np.unravel_index(element, variable.shape)]
        tile = "" if self.tile is None else f" on tile {self.tile}"
        return InterpreterError(rule, f"{self.name}{tile} {what} {variable!r}{index}", where=self.where, hint=hint)


@remembered
def key_impl(dtype: Any) -> str:
    """Name of the random number generator of a PRNG key dtype."""
    for name in KEY_IMPLS:
        if jax.random.key(0, impl=name).dtype == dtype:
            return name
    raise InterpreterError("type-mismatch", f"keys of {dtype} are unknown", expected=" or ".join(KEY_IMPLS))


def to_raw(value: Any) -> np.ndarray:
    """An array as tile memory stores it: numpy, PRNG keys as their bytes."""
    if not is_key_dtype(getattr(value, "dtype", np.dtype(bool))):
        return np.asarray(value)
    data = np.ascontiguousarray(jax.random.key_data(value))
    return data.view(f"V{data.itemsize * data.shape[-1]}")[..., 0]


def from_raw(raw: np.ndarray, dtype: Any) -> jax.Array:
    """The array that `raw` stores."""
    if not is_key_dtype(dtype):
        return jnp.asarray(raw)
    words = np.ascontiguousarray(raw).reshape((*raw.shape, 1)).view(np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=key_impl(dtype))


def poison(dtype: Any) -> np.ndarray:
    """A scalar no program expects: NaN, the largest integer, True, key bytes of ones."""
    if is_key_dtype(dtype):
        return np.frombuffer(b"\xff" * dtype.itemsize, f"V{dtype.itemsize}")[0]
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(np.nan).astype(dtype)
    return np.array(True) if dtype == np.bool_ else np.array(jnp.iinfo(dtype).max, dtype)


def raw_empty(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Poisoned raw storage of a shape."""
    bad = poison(dtype)
    return np.full(shape, bad, bad.dtype)


@dataclass(slots=True)
class _Cells:
    """All tiles' copies of one variable: arrays of [tiles, elements], and the home tile of each element."""

    home: np.ndarray
    value: np.ndarray
    here: np.ndarray  # mapped to the tile, or delivered to it
    defined: np.ndarray  # written by something
    fresh: np.ndarray  # written by the running compute set

    @classmethod
    def of(cls, variable: Variable, home: np.ndarray, num_tiles: int) -> _Cells:
        shape = (num_tiles, variable.size)
        here = np.arange(num_tiles)[:, None] == home
        return cls(home, raw_empty(variable.dtype, shape), here, np.zeros(shape, bool), np.zeros(shape, bool))

    def retire(self) -> None:
        """Forgets every copy away from home."""
        away = np.arange(len(self.value))[:, None] != self.home
        self.here &= ~away
        self.defined &= ~away
        self.fresh[:] = False

    def spoil(self, dtype: Any) -> None:
        """Poisons all that may not be read."""
        self.value[~(self.here & self.defined)] = poison(dtype)


class TileMemory:
    """The memory of all tiles.

    Args:
        graph: gives the tile mappings and the target.
        variables: those that live in it; constants start defined, others undefined.
        replica: whose constants, where replicas have constants of their own.
    """

    def __init__(self, graph: Graph, variables: Iterable[Variable], replica: int = 0) -> None:
        self._cells: dict[Variable, _Cells] = {}
        self._moved: set[Variable] = set()
        for variable in variables:
            if variable not in graph.mappings:
                raise InterpreterError("unmapped-variable", f"{variable!r} has no tile mapping", where=variable.origin)
            home = owners(graph.mappings[variable])
            self._cells[variable] = cells = _Cells.of(variable, home, graph.target.num_tiles)
            if variable.is_constant:
                constant = to_raw(variable.value[replica] if variable.by_replica else variable.value).ravel()
                cells.value[home, np.arange(variable.size)] = constant
                cells.defined[home, np.arange(variable.size)] = True

    def home(self, variable: Variable) -> np.ndarray:
        """The tile that owns each element, int32[size]."""
        return self._cells[variable].home

    def contents(self, variable: Variable) -> np.ndarray:
        """What lies in the memory of every tile, poison included, raw [tiles, size]."""
        return self._cells[variable].value.copy()

    def read(self, tiles: Any, variable: Variable, elements: np.ndarray, actor: Actor) -> np.ndarray:
        """Raw values of flat elements, each from the memory of its tile (one tile for all, or one each)."""
        cells, tiles = self._cells[variable], np.broadcast_to(tiles, elements.shape)
        for table, rule, what, hint in (
            (cells.here, "not-delivered", "reads, undelivered,", "deliver it in the exchange before the compute set"),
            (cells.defined, "undefined-read", "reads, before anything wrote it,", "write it first"),
        ):
            missing = np.flatnonzero(~table[tiles, elements])
            if missing.size:
                raise actor.error(rule, what, variable, int(elements[missing[0]]), hint)
        return cells.value[tiles, elements]

    def write(self, tiles: Any, variable: Variable, elements: np.ndarray, values: np.ndarray) -> None:
        """Writes raw values to flat elements in the memory of their tiles, at home or to be sent home."""
        cells, tiles = self._cells[variable], np.broadcast_to(tiles, elements.shape)
        cells.value[tiles, elements] = values
        for table in (cells.here, cells.defined, cells.fresh):
            table[tiles, elements] = True
        self._moved.add(variable)

    def deliver(self, messages: Messages, actor: Actor, *, to_home: bool) -> None:
        """Moves elements between tiles: operands from their homes, or results to them.

        Raises:
            InterpreterError: if the sender does not own an operand, or did not compute a result.
        """
        for number, variable in enumerate(messages.variables):
            chosen = messages.which == number
            element, source, destination = (column[chosen] for column in messages[2:])
            cells = self._cells[variable]
            lacking = ~cells.fresh[source, element] if to_home else cells.home[element] != source
            if to_home:
                lacking |= cells.home[element] != destination
            if lacking.any():
                raise actor.error("not-delivered", "exchanges from or to the wrong tile", variable, element[lacking][0])
            for table in (cells.value, cells.here, cells.defined, cells.fresh):
                table[destination, element] = table[source, element]
            cells.here[destination, element] = True
            self._moved.add(variable)

    def check_results_home(self, actor: Actor) -> None:
        """Refuses a result of the running compute set that never reached its owner."""
        for variable in self._moved:
            cells = self._cells[variable]
            at_home = cells.fresh[cells.home, np.arange(variable.size)]
            lost = np.flatnonzero(cells.fresh.any(axis=0) & ~at_home)
            if lost.size:
                raise actor.error("not-delivered", "leaves, away from its owner,", variable, int(lost[0]))

    def retire(self) -> None:
        """Ends a step: copies away from home are gone, and poisoned."""
        for variable in self._moved:
            self._cells[variable].retire()
            self._cells[variable].spoil(variable.dtype)
        self._moved.clear()


@dataclass(slots=True)
class RaceLog:
    """Who read and who wrote each element in one compute set."""

    _writer: dict[Variable, np.ndarray] = field(default_factory=dict)
    _reader: dict[Variable, np.ndarray] = field(default_factory=dict)

    def _tables(self, variable: Variable) -> tuple[np.ndarray, np.ndarray]:
        for log in (self._writer, self._reader):
            if variable not in log:
                log[variable] = np.full(variable.size, NOBODY)
        return self._writer[variable], self._reader[variable]

    def read(self, variable: Variable, elements: np.ndarray, actor: Actor) -> None:
        """Notes a read; refuses it if another vertex wrote the element."""
        writer, reader = self._tables(variable)
        raced = np.flatnonzero((writer[elements] != NOBODY) & (writer[elements] != actor.vertex))
        if raced.size:
            raise actor.error("read-write-race", "reads what another vertex writes:", variable, elements[raced[0]])
        alone = (reader[elements] == NOBODY) | (reader[elements] == actor.vertex)
        reader[elements] = np.where(alone, actor.vertex, MANY)

    def write(self, variable: Variable, elements: np.ndarray, actor: Actor) -> None:
        """Notes a write; refuses it if any vertex wrote the element, or another read it."""
        writer, reader = self._tables(variable)
        twice = np.flatnonzero(writer[elements] != NOBODY)
        if twice.size or len(np.unique(elements)) < elements.size:
            element = elements[twice[0]] if twice.size else elements[0]
            raise actor.error("write-race", "writes what is written already:", variable, element)
        raced = np.flatnonzero((reader[elements] != NOBODY) & (reader[elements] != actor.vertex))
        if raced.size:
            raise actor.error("read-write-race", "writes what another vertex reads:", variable, elements[raced[0]])
        writer[elements] = actor.vertex
