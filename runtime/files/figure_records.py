"""Figures of a record: computed when they are first read, or read from the data of a file.

    class Report(FigureRecord):
        @figure
        def cycles(self) -> int: ...

A report with `data` has `cycles` from them, any other computes them. The annotations of figures are the schema of
files: `figure_kinds` has the kind of each. Figures may be in a part of the data, by its name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, Generic, Self, TypeVar, get_type_hints, overload

from ipujax.runtime.files.field_types import FieldType, field_type
from ipujax.runtime.files.kinds import Kind

T = TypeVar("T")


class FigureRecord:
    """Base of records of figures.

    Attributes:
        data: the figures as a file has them; None where they are computed.
    """

    data: Mapping[str, Any] | None

    def part_of_data(self, part: str) -> Mapping[str, Any] | None:
        """Return the data of the figures of a part, "" for those of none; None where they are computed."""
        return self.data

    def figures_as_data(self, part: str = "") -> dict[str, Any]:
        """Return the figures of a part as JSON-able data."""
        return {each.saved_name: each.type.to_data(getattr(self, name)) for name, each in _figures(type(self), part)}

    @classmethod
    def figure_kinds(cls, part: str = "") -> dict[str, Kind]:
        """Return the kind of the data of each figure of a part."""
        return {each.saved_name: each.type.kind for _, each in _figures(cls, part)}

    def replaced(self, **figures: Any) -> Self:
        """Return a copy with other figures, which shares those that are computed already."""
        duplicate = object.__new__(type(self))
        duplicate.__dict__.update(self.__dict__ | figures)
        return duplicate


class figure(cached_property[T], Generic[T]):
    """A figure of a record, which its method computes."""

    part: ClassVar[str] = ""

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...
    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Self | T:
        if instance is None:
            return self
        assert self.attrname is not None
        value = self._value(instance)
        instance.__dict__[self.attrname] = value
        return value

    def _value(self, record: FigureRecord) -> T:
        data = record.part_of_data(self.part)
        return self.func(record) if data is None else self.type.from_data(data[self.saved_name])

    @property
    def saved_name(self) -> str:
        """Name of the field of a file."""
        return str(self.attrname)

    @property
    def type(self) -> FieldType:
        """How files have the figure."""
        return field_type(get_type_hints(self.func, include_extras=True)["return"])


class section(figure[T]):
    """JSON-able data as a figure, made anew at each access: the reader may change them. Files have `x_section` as x."""

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        return self if instance is None else self._value(instance)

    def _value(self, record: FigureRecord) -> Any:
        data = record.part_of_data(self.part)
        return self.func(record) if data is None else copy.deepcopy(data[self.saved_name])

    @property
    def saved_name(self) -> str:
        return str(self.attrname).removesuffix("_section")


def _figures(of: type[FigureRecord], part: str) -> Iterator[tuple[str, figure[Any]]]:
    """Yield the figures of a part of a class by name, in the order of their declaration."""
    for base in reversed(of.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, figure) and value.part == part:
                yield name, value
