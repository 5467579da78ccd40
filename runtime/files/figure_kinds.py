"""Kinds of fields of figures: finite numbers, runs of them, rows, alternatives and trees.

Runs of equal numbers are one text: "7 0*1471" is 7, then 1,471 zeros.

Input: as of `kinds`, which has the kinds of all other fields; files without figures are read without these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from ipujax.runtime.files.kinds import (
    EXACT,
    FieldError,
    Integer,
    Kind,
    Lengths,
    Record,
    Text,
    check_type,
    field_path,
    shown,
)

_RUNS = re.compile(r"\d{1,18}(?:\*\d{1,9})?(?: \d{1,18}(?:\*\d{1,9})?)*", re.ASCII)


def runs_of(numbers: Sequence[int] | np.ndarray) -> str:
    """Return numbers from 0 on, below 10¹⁸, as runs."""
    values = np.asarray(numbers, np.int64)
    return _text(values, np.ones_like(values))


def _text(values: np.ndarray, counts: np.ndarray) -> str:
    """Return runs of which some beside each other may have equal numbers."""
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])) if len(values) else np.zeros(0, np.int64)
    sizes = np.add.reduceat(counts, starts) if len(values) else starts
    rows = zip(values[starts].tolist(), sizes.tolist(), strict=True)
    return " ".join(f"{value}*{count}" if count > 1 else f"{value}" for value, count in rows)


def values_and_counts(runs: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of each run and its length, int64[runs] each.

    Raises:
        ValueError: a text of another form, or a run of no numbers.
    """
    if not runs:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if not _RUNS.fullmatch(runs):
        raise ValueError("no runs of numbers")
    rows = [run.partition("*") for run in runs.split(" ")]
    values = np.array([value for value, _, _ in rows], np.int64)
    counts = np.array([count or "1" for _, _, count in rows], np.int64)
    if not counts.all():
        raise ValueError("a run of no numbers")
    return values, counts


def numbers_of_runs(runs: str) -> np.ndarray:
    """Return the numbers, int64[…]; see `runs_of`."""
    return np.repeat(*values_and_counts(runs))


def total_of_runs(runs: str) -> int:
    """Return the sum of the numbers."""
    values, counts = values_and_counts(runs)
    return sum(value * count for value, count in zip(values.tolist(), counts.tolist(), strict=True))


def sum_of_runs(lists: Iterable[str]) -> str:
    """Return the sums of lists of equal lengths, element by element."""
    rows = [values_and_counts(runs) for runs in lists]
    ends = np.unique(np.concatenate([np.cumsum(counts) for _, counts in rows] or [np.zeros(0, np.int64)]))
    sums = np.zeros(len(ends), np.int64)
    for values, counts in rows:
        sums += values[np.searchsorted(np.cumsum(counts), ends)]
    return _text(sums, np.diff(ends, prepend=0))


_MAX_FLOAT = 1e30  # far beyond any figure, and products of a few of them are finite
_MAX_RUN_NUMBERS = 2**30  # of a file; views list them one by one


@dataclass(frozen=True, slots=True, eq=False)
class Real(Kind):
    """A finite number."""

    minimum: float = 0.0
    maximum: float = _MAX_FLOAT

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        is_number = type(value) in (int, float) and (type(value) is int or math.isfinite(value))
        if not is_number or not self.minimum <= value <= self.maximum:
            raise FieldError(path, f"a finite number from {self.minimum:g} to {self.maximum:g}", shown(value))


@dataclass(frozen=True, slots=True, eq=False)
class Nullable(Kind):
    """A value of a kind, or null."""

    of: Kind

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        if value is not None:
            self.of.check(value, path, lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Runs(Kind):
    """Runs of integers, as `runs_of` writes them.

    Args:
        of: kind of the integers.
        length: name of their number, as of `List`.
    """

    of: Integer
    length: str

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        """Refuse another text, too many numbers, and numbers that are not of their kind; runs are not expanded."""
        check_type(value, str, "runs of numbers", path)
        try:
            numbers, counts = values_and_counts(value)
        except ValueError as error:
            raise FieldError(path, "runs of numbers, such as 7 0*1471", shown(value)) from error
        num_numbers = int(counts.sum())
        lengths.add(self.length, path, num_numbers)
        lengths.run_numbers += num_numbers
        if lengths.run_numbers > _MAX_RUN_NUMBERS:
            raise FieldError(path, f"at most {_MAX_RUN_NUMBERS:,} numbers in all runs", f"{lengths.run_numbers:,}")
        if not all(self.of.minimum <= number <= self.of.maximum for number in numbers.tolist()):
            expected = f"whole numbers from {self.of.minimum:,} to {self.of.maximum:,}"
            raise FieldError(path, expected, f"{int(numbers.max()):,}")
        if (total := sum(a * b for a, b in zip(numbers.tolist(), counts.tolist(), strict=True))) > self.of.total:
            raise FieldError(path, f"numbers of at most {self.of.total:,} together", f"{total:,}")


@dataclass(frozen=True, slots=True, eq=False)
class Flags(Runs):
    """Runs of 0 and 1, for false and true."""

    of: Integer = Integer(maximum=1)
    length: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Row(Kind):
    """A list of a fixed number of elements, each of a kind of its own."""

    kinds: tuple[Kind, ...]

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        check_type(value, list, "a list", path)
        if len(value) != len(self.kinds):
            raise FieldError(path, f"{len(self.kinds)} elements", f"{len(value)}")
        for number, kind in enumerate(self.kinds):
            kind.check(value[number], f"{path}[{number}]", lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Tagged(Kind):
    """An object that is of one of several records, by the text in its field `tag`."""

    tag: str
    records: Mapping[str, Record]

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        check_type(value, dict, "an object", path)
        Text(tuple(self.records)).check(value.get(self.tag), field_path(path, self.tag), lengths)
        self.records[value[self.tag]].check(value, path, lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Either(Kind):
    """An object of one record if it has a field, of another if not.

    Args:
        name: name of the field.
        having: record with the field.
        lacking: record without it.
    """

    name: str
    having: Record
    lacking: Record

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        check_type(value, dict, "an object", path)
        (self.having if self.name in value else self.lacking).check(value, path, lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Tree(Kind):
    """A node with nodes inside it, at most `depth` deep.

    Args:
        node: kind of a node, with `Anything` for its children.
        children: key or index of the list of children in a node; a node may lack the key.
        depth: upper bound of the depth; that of the root is 1.
    """

    node: Kind
    children: str | int
    depth: int

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        """Refuse a node of another kind, and nodes that are too deep."""
        # Level by level: a recursion would depend on the depth of a file, which is not checked yet.
        level = [(value, path)]
        for _ in range(self.depth):
            next_level: list[tuple[Any, str]] = []
            for node, node_path in level:
                self.node.check(node, node_path, lengths)
                children = node.get(self.children, ()) if isinstance(node, dict) else node[self.children]
                key = self.children
                list_path = field_path(node_path, key) if isinstance(key, str) else f"{node_path}[{key}]"
                next_level += [(child, f"{list_path}[{number}]") for number, child in enumerate(children)]
            level = next_level
        if level:
            raise FieldError(path, f"nodes at most {self.depth} deep", f"{len(level):,} that are deeper")


LARGE = Integer(maximum=2**100)  # sums over all tiles and runs, which no array holds
BYTES = Integer(maximum=2**48, total=EXACT)  # of one tile
SIGNED = Integer(minimum=-EXACT)
Large = Annotated[int, LARGE]
Bytes = Annotated[int, BYTES]
TileIndex = Annotated[int, Integer(below="tiles")]
IpuIndex = Annotated[int, Integer(below="IPUs")]
BytesByTile = Annotated[np.ndarray, Runs(BYTES, "tiles")]
