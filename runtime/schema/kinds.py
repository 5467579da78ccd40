"""Kinds of fields of JSON data, and the check that data are of a kind.

Input: a kind, which is a plain value, and data. Output: nothing, or a `FieldError` that names the first field that is
not of its kind. Lists may name their length: all lists of one name have the same, and `Whole(below=name)` is an index
into them, wherever they are. In the name of a length, "[]" stands for the number of the innermost list element around.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ipujax.runtime.errors import shortened

EXACT = 2**53 - 1  # the largest whole number of which JavaScript, and so the page, says that it is exact
_MOST_FLOAT = 1e30  # far beyond any figure, and products of a few of them are finite
_MOST_TOTAL = 2**62  # of a list, so that sums of it are of 64 bits
_MOST_SHOWN = 60  # characters of a text in an error


class FieldError(ValueError):
    """A field that is not what it must be.

    Args:
        path: of the field, from the root.
        expected: what it must be.
        got: what it is.
    """

    def __init__(self, path: str, expected: str, got: str) -> None:
        super().__init__(f"{path}: expected {expected}, got {got}")
        self.path, self.expected, self.got = path, expected, got


@dataclass(slots=True)
class Lengths:
    """What is met during a check: lengths of lists by name, each with the field that has it, and indices into them.

    Args:
        version: of the file.
        known: lengths by name.
        indices: the field, the name of the lists, and the index, of those that are to be checked.
    """

    version: int
    known: dict[str, tuple[int, str]] = field(default_factory=dict)
    indices: list[tuple[str, str, int]] = field(default_factory=list)

    def meet(self, name: str, path: str, length: int) -> None:
        """Notes the length of a list, which must be that of all others of its name."""
        first, where = self.known.setdefault(name, (length, path))
        if first != length:
            raise FieldError(path, f"{first:,} elements, as {where}", f"{length:,}")

    def check_indices(self) -> None:
        """Checks all indices; one into a list that is nowhere is refused."""
        for path, name, index in self.indices:
            length, where = self.known.get(name, (0, f"{name}, which is missing"))
            if index >= length:
                raise FieldError(path, f"an index below {length:,}, for {where}", f"{index:,}")


class Kind:
    """What a field must be."""

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        """Refuses a value of another kind.

        Raises:
            FieldError: for the value, or for something in it.
        """
        raise NotImplementedError

    def check_all(self, values: list[Any], path: str, lengths: Lengths) -> None:
        """Refuses a list in which something is of another kind."""
        for number, value in enumerate(values):
            self.check(value, f"{path}[{number}]", lengths)


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    """A whole number, or with `below` an index into lists of that name; `total` bounds the sum of a list of them."""

    least: int = 0
    most: int = EXACT
    below: str = ""
    total: int = _MOST_TOTAL

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        if type(value) is not int or not self.least <= value <= self.most:
            raise FieldError(path, f"a whole number from {self.least:,} to {self.most:,}", _shown(value))
        if self.below:
            lengths.indices.append((path, self.below, value))

    def check_all(self, values: list[Any], path: str, lengths: Lengths) -> None:
        """As for each of them; lists of numbers are most of a profile, and are looked at as wholes."""
        are_whole = list(map(type, values)).count(int) == len(values)
        if are_whole and not any(values) and self.least <= 0 and not self.below:
            return  # as most lists by tile are: bytes of what is on other tiles
        if not are_whole or (values and (min(values) < self.least or max(values) > self.most)):
            Kind.check_all(self, values, path, lengths)
        elif values and self.below:
            lengths.indices.append((f"{path}[{values.index(max(values))}]", self.below, max(values)))
        elif self.most <= EXACT and sum(values) > self.total:
            raise FieldError(path, f"numbers of at most {self.total:,} together", f"{sum(values):,}")


@dataclass(frozen=True, slots=True)
class Real(Kind):
    """A finite number."""

    least: float = 0.0
    most: float = _MOST_FLOAT

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        is_number = type(value) in (int, float) and (type(value) is int or math.isfinite(value))
        if not is_number or not self.least <= value <= self.most:
            raise FieldError(path, f"a finite number from {self.least:g} to {self.most:g}", _shown(value))


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """A text that UTF-8 can encode; one of some if there are `choices`."""

    choices: tuple[str, ...] = ()

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        if type(value) is not str or not _is_encodable(value):
            raise FieldError(path, "a text that UTF-8 can encode", _shown(value))
        if self.choices and value not in self.choices:
            raise FieldError(path, f"one of {', '.join(self.choices)}", _shown(value))


@dataclass(frozen=True, slots=True)
class Flag(Kind):
    """True or false."""

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        if type(value) is not bool:
            raise FieldError(path, "true or false", _shown(value))


@dataclass(frozen=True, slots=True)
class Nullable(Kind):
    """Something, or null."""

    of: Kind

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        if value is not None:
            self.of.check(value, path, lengths)


@dataclass(frozen=True, slots=True)
class List(Kind):
    """A list of one kind, with a name of its length, or at least so many elements."""

    of: Kind
    length: str = ""
    least: int = 0

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        _check_type(value, list, "a list", path)
        if len(value) < self.least:
            raise FieldError(path, f"a list of at least {self.least}", f"{len(value)} elements")
        if self.length:
            lengths.meet(self.length.replace("[]", path[path.rfind("[") :]), path, len(value))
        self.of.check_all(value, path, lengths)


@dataclass(frozen=True, slots=True)
class Row(Kind):
    """A list of a fixed number of elements, each of a kind of its own."""

    kinds: tuple[Kind, ...]

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        _check_type(value, list, "a list", path)
        if len(value) != len(self.kinds):
            raise FieldError(path, f"{len(self.kinds)} elements", f"{len(value)}")
        for number, kind in enumerate(self.kinds):
            kind.check(value[number], f"{path}[{number}]", lengths)


@dataclass(frozen=True, slots=True)
class Map(Kind):
    """An object of any names, whose values are of one kind; of `keys` if there are any."""

    of: Kind
    keys: Text = Text()
    least: int = 0

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        _check_type(value, dict, "an object", path)
        if len(value) < self.least:
            raise FieldError(path, f"an object of at least {self.least} fields", f"{len(value)}")
        for key, item in value.items():
            self.keys.check(key, f"{path}, a name in it", lengths)
            self.of.check(item, _inside(path, key), lengths)


@dataclass(frozen=True, slots=True)
class Since(Kind):
    """An optional field that only files before a version may lack."""

    version: int
    of: Kind

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        self.of.check(value, path, lengths)


@dataclass(frozen=True, slots=True)
class Record(Kind):
    """An object of known fields.

    Args:
        fields: those that must be there.
        optional: those that may be missing, always or, if they are `Since`, in files of older versions.
        together: names of optional fields that are there together or not at all.
    """

    fields: Mapping[str, Kind]
    optional: Mapping[str, Kind] = field(default_factory=dict)
    together: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all fields."""
        return *self.fields, *self.optional

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        _check_type(value, dict, "an object", path)
        since = (name for name, x in self.optional.items() if isinstance(x, Since) and x.version <= lengths.version)
        together = self.together if any(name in value for name in self.together) else ()
        for name in (*self.fields, *since, *together):
            if name not in value:
                raise FieldError(_inside(path, name), "a field", "nothing: it is missing")
        for name, item in value.items():
            kind = self.fields.get(name) or self.optional.get(name)
            if kind is None:
                raise FieldError(_inside(path, name), "a field that this ipujax knows", "another")
            kind.check(item, _inside(path, name), lengths)


@dataclass(frozen=True, slots=True)
class Tagged(Kind):
    """An object whose field `tag` says which record it is."""

    tag: str
    records: Mapping[str, Record]

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        _check_type(value, dict, "an object", path)
        Text(tuple(self.records)).check(value.get(self.tag), _inside(path, self.tag), lengths)
        self.records[value[self.tag]].check(value, path, lengths)


@dataclass(frozen=True, slots=True)
class Tree(Kind):
    """Nodes in nodes, at most `depth` deep.

    Args:
        node: kind of a node, which leaves its children to this.
        children: the key or the place of the list of children in a node; a node may lack the key.
        depth: of the deepest node, the root being 1 deep.
    """

    node: Kind
    children: str | int
    depth: int

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        level = [(value, path)]
        for _ in range(self.depth):
            inside: list[tuple[Any, str]] = []
            for node, where in level:
                self.node.check(node, where, lengths)
                children = node.get(self.children, ()) if isinstance(node, dict) else node[self.children]
                place = _inside(where, self.children) if isinstance(self.children, str) else f"{where}[{self.children}]"
                inside += [(child, f"{place}[{number}]") for number, child in enumerate(children)]
            level = inside
        if level:
            raise FieldError(path, f"nodes at most {self.depth} deep", f"{len(level):,} that are deeper")


@dataclass(frozen=True, slots=True)
class Anything(Kind):
    """What something else checks."""

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        pass

    def check_all(self, values: list[Any], path: str, lengths: Lengths) -> None:
        pass


def _check_type(value: Any, kind: type, name: str, path: str) -> None:
    """Refuses what is no list or object; what is not yet written may have tuples for lists."""
    if type(value) is not kind and not (kind is list and type(value) is tuple):
        raise FieldError(path, name, _shown(value))


def _inside(path: str, key: str) -> str:
    """The path of a field of an object; a name from a file may be long, or have what a terminal acts on."""
    shown = (key if key.isprintable() else ascii(key))[:_MOST_SHOWN]
    return f"{path}.{shown}" if path else shown


def _is_encodable(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _shown(value: Any) -> str:
    """Formats a value for an error message, shortened."""
    if isinstance(value, int) and abs(value) >= EXACT**2:  # Python refuses to print numbers of thousands of digits
        return "a whole number that is too large"
    text = ascii(value) if isinstance(value, str) else shortened(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
