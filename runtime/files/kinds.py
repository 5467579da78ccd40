"""Kinds of fields of JSON data: the schema of files, and the check that data are of a kind.

Input: a kind, which is a plain value, and data. Output: nothing, or a `FieldError` that names the first field that is
not of its kind. Lists may name their length: all lists of one name have equal lengths, and `Integer(below=name)` is an
index into them, wherever they are. In the name of a length, "[]" stands for the number of the innermost list element
around.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ipujax.runtime.errors import shortened
from ipujax.runtime.files.file_access import DamagedError

EXACT = 2**53 - 1  # Number.MAX_SAFE_INTEGER of JavaScript: the page computes with figures as doubles
_MAX_TOTAL = 2**62  # of a list, so that sums of it are of 64 bits
_MAX_CHARACTERS = 60  # of a text in an error


class FieldError(DamagedError):
    """A field that is not of its kind.

    Args:
        path: path of the field from the root.
        expected: description of the kind.
        got: description of the value.
    """

    def __init__(self, path: str, expected: str, got: str) -> None:
        super().__init__(f"its field {path} is damaged" if path else "its fields are damaged", expected, got)
        self.path = path


@dataclass(slots=True)
class Lengths:
    """Lengths of lists, and indices into them, collected during a check.

    Args:
        by_name: by name, the length of its lists and the path of the first of them.
        indices: by name of lists, the largest index into them and its path; checked at the end, as lists may come
            later.
        run_numbers: numbers in all lists of runs, which views make of them.
    """

    by_name: dict[str, tuple[int, str]] = field(default_factory=dict)
    indices: dict[str, tuple[int, str]] = field(default_factory=dict)
    run_numbers: int = 0

    def add(self, name: str, path: str, length: int) -> None:
        """Record the length of a list; refuse another length than that of earlier lists of this name."""
        first, first_path = self.by_name.setdefault(name, (length, path))
        if first != length:
            raise FieldError(path, f"{first:,} elements, as {first_path}", f"{length:,}")

    def add_index(self, name: str, path: str, index: int) -> None:
        """Record an index into the lists of a name."""
        if index > self.indices.get(name, (-1, ""))[0]:
            self.indices[name] = index, path

    def check_indices(self) -> None:
        """Refuse an index beyond the length of its list, or of a missing list."""
        for name, (index, path) in self.indices.items():
            length, list_path = self.by_name.get(name, (0, f"{name}, which is missing"))
            if index >= length:
                raise FieldError(path, f"an index below {length:,}, for {list_path}", f"{index:,}")


class Kind(ABC):
    """The kind of a field: the set of its valid values. Its text is part of the version of files."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        """Check that a value is of this kind.

        Raises:
            FieldError: the value, or a field in it, is not.
        """

    def check_all(self, values: list[Any], path: str, lengths: Lengths) -> None:
        """Check that all elements of a list are of this kind."""
        for number, value in enumerate(values):
            self.check(value, f"{path}[{number}]", lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Integer(Kind):
    """An integer within bounds, or an index into lists.

    Args:
        minimum: lower bound, included.
        maximum: upper bound, included.
        below: name of the lists of which it is an index; empty for other integers.
        total: upper bound of the sum of a list of such integers.
    """

    minimum: int = 0
    maximum: int = EXACT
    below: str = ""
    total: int = _MAX_TOTAL

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        # A bool is an int to Python, and 1.0 equals 1, so the type is compared exactly.
        if type(value) is not int or not self.minimum <= value <= self.maximum:
            raise FieldError(path, f"a whole number from {self.minimum:,} to {self.maximum:,}", shown(value))
        if self.below:
            lengths.add_index(self.below, path, value)

    def check_all(self, values: list[Any], path: str, lengths: Lengths) -> None:
        """Check a list of integers and its sum, in the time of a few built-in functions."""
        # Lists of integers are most of a profile: this is many times faster than `check` of each.
        are_integers = list(map(type, values)).count(int) == len(values)
        if are_integers and not any(values) and self.minimum <= 0 and not self.below:
            return  # all 0, as most lists by tile are: bytes of items on other tiles
        if not are_integers or (values and (min(values) < self.minimum or max(values) > self.maximum)):
            Kind.check_all(self, values, path, lengths)  # which names the element
        elif values and self.below:
            lengths.add_index(self.below, f"{path}[{values.index(max(values))}]", max(values))
        elif self.maximum <= EXACT and sum(values) > self.total:
            raise FieldError(path, f"numbers of at most {self.total:,} together", f"{sum(values):,}")


@dataclass(frozen=True, slots=True, eq=False)
class Text(Kind):
    """A text that UTF-8 can encode; one of `choices` if there are any."""

    choices: tuple[str, ...] = ()

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        if type(value) is not str or not _is_encodable(value):
            raise FieldError(path, "a text that UTF-8 can encode", shown(value))
        if self.choices and value not in self.choices:
            raise FieldError(path, f"one of {', '.join(self.choices)}", shown(value))


class Flag(Kind):
    """True or false."""

    __slots__ = ()

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        if type(value) is not bool:
            raise FieldError(path, "true or false", shown(value))


@dataclass(frozen=True, slots=True, eq=False)
class List(Kind):
    """A list of elements of one kind.

    Args:
        of: kind of the elements.
        length: name of its length; empty for any length.
        minimum: lower bound of the number of elements.
        maximum: upper bound of it.
    """

    of: Kind
    length: str = ""
    minimum: int = 0
    maximum: int = EXACT

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        check_type(value, list, "a list", path)
        if len(value) < self.minimum:
            raise FieldError(path, f"a list of at least {self.minimum}", f"{len(value)} elements")
        if len(value) > self.maximum:
            raise FieldError(path, f"a list of at most {self.maximum}", f"{len(value):,} elements")
        if self.length:
            # "[]" becomes the last index of the path, such as "[3]".
            lengths.add(self.length.replace("[]", path[path.rfind("[") :]), path, len(value))
        self.of.check_all(value, path, lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Map(Kind):
    """An object with names of the kind `keys`, and values of one kind; `minimum` is of the number of fields."""

    of: Kind
    keys: Text = Text()
    minimum: int = 0

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        check_type(value, dict, "an object", path)
        if len(value) < self.minimum:
            raise FieldError(path, f"an object of at least {self.minimum} fields", f"{len(value)}")
        for key, item in value.items():
            self.keys.check(key, f"{path}, a name in it", lengths)
            self.of.check(item, field_path(path, key), lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Record(Kind):
    """An object with the given fields and no other.

    Args:
        fields: required fields.
        optional: fields that may be missing.
        together: names of optional fields of which an object has all or none.
    """

    fields: Mapping[str, Kind]
    optional: Mapping[str, Kind] = field(default_factory=dict)
    together: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all fields."""
        return *self.fields, *self.optional

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        check_type(value, dict, "an object", path)
        together = self.together if any(name in value for name in self.together) else ()
        for name in (*self.fields, *together):
            if name not in value:
                raise FieldError(field_path(path, name), "a field", "nothing: it is missing")
        for name, item in value.items():
            kind = self.fields.get(name) or self.optional.get(name)
            if kind is None:
                raise FieldError(field_path(path, name), "a field that this ipujax knows", "an unknown field")
            kind.check(item, field_path(path, name), lengths)


class Anything(Kind):
    """Any value: another kind, or code, checks it."""

    __slots__ = ()

    def check(self, value: Any, path: str, lengths: Lengths) -> None:
        pass

    def check_all(self, values: list[Any], path: str, lengths: Lengths) -> None:
        pass


def check_type(value: Any, kind: type, name: str, path: str) -> None:
    """Check that a value is a list or an object."""
    # Data that were not read from a file may have tuples for lists.
    if type(value) is not kind and not (kind is list and type(value) is tuple):
        raise FieldError(path, name, shown(value))


def field_path(path: str, key: str) -> str:
    """Return the path of a field of an object, with a shortened name."""
    # Names from a file may be long, or have control characters on which a terminal acts.
    name = (key if key.isprintable() else ascii(key))[:_MAX_CHARACTERS]
    return f"{path}.{name}" if path else name


def _is_encodable(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair: JSON can have one, UTF-8 cannot."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def shown(value: Any) -> str:
    """Return a value as error messages show it, shortened."""
    if isinstance(value, int) and abs(value) >= EXACT**2:  # Python refuses to print numbers of thousands of digits
        return "a whole number that is too large"
    text = ascii(value) if isinstance(value, str) else shortened(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
