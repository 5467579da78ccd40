"""Machines that differ in some numbers, as arrays: cost formulas read them as they read one target.

Input: targets that differ in rates, which are numbers. Output: `Machines`, whose `evaluate` computes a function of
targets once for each combination of the constants that it reads, all combinations at once.

    Machines.evaluate(f)  ::=  f of one machine, noting the constants that it reads
                               f of the distinct combinations of those, as arrays; a column for each machine
                          |    f of all machines at once, where its arrays are small

Arrays of machines are the last dimension of everything: a function of counts [n, 1] returns [n, machines].
Limits: a function may not branch on a constant that differs, which NumPy refuses; `evaluate_each` is for those that do.
`target.constant` says of each field whether programs are held over it: machines that differ in no others run the same
program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ipujax.runtime.errors import TargetError
from ipujax.runtime.target.target import PartOf, Target


def constants_of(*parts: PartOf) -> tuple[str, ...]:
    """Return the names of the constants that are part of "rates", "counts" or "program"."""
    return tuple(item.name for item in dataclasses.fields(Target) if item.metadata.get("part_of") in parts)


def perturbed_constants(target: Target) -> tuple[str, ...]:
    """Return the constants that are numbers, rates and not 0."""
    rates = constants_of("rates")
    items = (item for item in dataclasses.fields(Target) if item.name in rates and item.type in ("int", "float"))
    return tuple(item.name for item in items if getattr(target, item.name))


def held_constants() -> tuple[str, ...]:
    """Return the names of the constants over which programs are held."""
    return constants_of("rates", "counts")


def program_constants() -> tuple[str, ...]:
    """Return the names of the constants that a program depends on: on another value it is compiled again."""
    return constants_of("program")


def program_changes(before: Target, after: Target) -> tuple[str, ...]:
    """Return the constants of two targets that differ, and over which no program is held."""
    return tuple(name for name in program_constants() if getattr(before, name) != getattr(after, name))


def held_over(target: Target, machine: Target) -> Target:
    """Return a target with those constants of another machine, and their sources, over which programs are held."""
    names = held_constants()
    sources = {**target.sources, **{name: machine.sources[name] for name in names}}
    return dataclasses.replace(target, **{name: getattr(machine, name) for name in names}, sources=sources)


_NAMES = tuple(item.name for item in dataclasses.fields(Target) if item.name != "sources")
_NUMBERS = frozenset(item.name for item in dataclasses.fields(Target) if item.type in ("int", "float"))
_FEW_ELEMENTS = 1 << 13  # of an array of which NumPy's calls take longer than its elements: no constants are noted
_MOST_ELEMENTS = 1 << 21  # of one array of a formula, some 16 MiB: more machines are computed one part after another


class Exact(np.ndarray):
    """Numbers that are not rounded: what is computed from them is a smooth function of them, but for maxima.

    `np.ceil`, `np.rint`, a whole quotient and a conversion to integers return the number itself.
    """

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **settings: Any) -> Any:
        if ufunc in (np.ceil, np.floor, np.rint, np.positive):
            return self
        if ufunc is np.floor_divide:
            ufunc = np.true_divide
        # `out=` too: an operation in place. Operands are single arrays and numbers, of which most calls have two.
        operands = [x.view(np.ndarray) if type(x) is Exact else x for x in inputs]
        chosen = {name: _plain(x) for name, x in settings.items()} if settings else settings
        result = getattr(ufunc, method)(*operands, **chosen)
        return result.view(Exact) if type(result) is np.ndarray and result.dtype.kind == "f" else exact(result)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return exact(func(*_plain(args), **{name: _plain(value) for name, value in kwargs.items()}))

    def astype(self, dtype: Any, *args: Any, **settings: Any) -> Any:
        """Return the numbers themselves, whatever the type."""
        return self


def exact(values: Any) -> Any:
    """Return floats as `Exact`, those in lists too; anything else as it is."""
    if isinstance(values, list | tuple):
        return type(values)(map(exact, values))
    is_float = isinstance(values, np.ndarray | np.floating) and values.dtype.kind == "f"
    return np.asarray(values).view(Exact) if is_float else values


def _plain(values: Any) -> Any:
    if isinstance(values, list | tuple):
        return type(values)(map(_plain, values))
    return np.asarray(values) if isinstance(values, Exact) else values


class TargetArray(Target):
    """A target whose numbers may be arrays [machines]; equal to itself alone. It notes the constants that are read."""

    __slots__ = ("dtype", "noted", "recalled", "shape")

    noted: set[str]
    recalled: dict[Hashable, tuple[Any, set[str]]]  # values of `recall`, and the constants that were read for each
    shape: tuple[int, ...]  # of the arrays
    dtype: Any  # of cycles

    def __init__(
        self,
        target: Target,
        numbers: Mapping[str, np.ndarray],
        shape: tuple[int, ...] = (),
        recalled: dict[Hashable, tuple[Any, set[str]]] | None = None,
    ) -> None:
        for name in (*_NAMES, "sources"):
            object.__setattr__(self, name, numbers[name] if name in numbers else getattr(target, name))
        is_exact = any(isinstance(values, Exact) for values in numbers.values())
        dtype = np.dtype(float if is_exact else np.int64)
        values = {"noted": set(), "recalled": {} if recalled is None else recalled, "shape": shape, "dtype": dtype}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def recall(self, key: Hashable, function: Callable[[Target], Any]) -> Any:
        """Return `function` of this target, computed once for a key.

        The constants that it read then are noted again, as if it were computed: `noted` has all that a result needs.
        """
        noted_before = self.noted
        if key not in self.recalled:
            object.__setattr__(self, "noted", set())
            self.recalled[key] = function(self), self.noted
        value, noted = self.recalled[key]
        object.__setattr__(self, "noted", noted_before | noted)
        return value

    def __getattribute__(self, name: str) -> Any:
        if name in _NUMBERS:
            object.__getattribute__(self, "noted").add(name)
        return object.__getattribute__(self, name)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def recalled_value(target: Target, key: Hashable, function: Callable[[Target], Any]) -> Any:
    """Return a function of a target; of arrays of machines it is computed once for a key."""
    return target.recall(key, function) if isinstance(target, TargetArray) else function(target)


def machines_of(target: Target) -> tuple[tuple[int, ...], Any]:
    """Return the shape of the arrays of a target, () of a plain one, and the dtype of cycles on it."""
    return (target.shape, target.dtype) if isinstance(target, TargetArray) else ((), np.dtype(np.int64))


class Machines:
    """Machines that differ in numbers alone.

    Args:
        target: has all constants that are equal.
        numbers: values of the others, [machines] each, int64 or float64.
        count: number of machines.
        is_exact: whether nothing that is computed from `numbers` is rounded, see `Exact`.
    """

    def __init__(
        self, target: Target, numbers: Mapping[str, np.ndarray], count: int, *, is_exact: bool = False
    ) -> None:
        self.target = target
        self.numbers = dict(numbers)
        self.count = count
        self.is_exact = is_exact
        # By names of constants, see `_combinations`.
        self._distinct: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]] = {}
        # By numbers of machines: their constants, and the values that `TargetArray.recall` has computed for them.
        self._arrays: dict[tuple[int, ...], tuple[dict[str, np.ndarray], dict[Hashable, Any]]] = {}

    @classmethod
    def of(cls, targets: Sequence[Target]) -> Machines:
        """Return targets as one value.

        Raises:
            TargetError: they differ in a constant that is no rate, see `target.constant`.
        """
        first = targets[0]
        rates = set(constants_of("rates")) & _NUMBERS
        numbers = {}
        for name in _NAMES:
            values = [getattr(target, name) for target in targets]
            if name != "name" and any(value != values[0] for value in values):
                if name not in rates:
                    raise TargetError(f"machines that are costed together differ in {name}", got=repr(set(values)))
                numbers[name] = np.array(values)
        return cls(first, numbers, len(targets))

    def arrays(self, which: np.ndarray | slice = slice(None)) -> TargetArray:
        """Return some machines as a target of arrays [machines]."""
        number = np.arange(self.count)[which]
        key = tuple(number.tolist())
        if key not in self._arrays:
            chosen = {name: values[number] for name, values in self.numbers.items()}
            if self.is_exact:
                chosen = {name: exact(values.astype(float)) for name, values in chosen.items()}
            self._arrays[key] = chosen, {}
        chosen, recalled = self._arrays[key]
        return TargetArray(self.target, chosen, (len(number),), recalled)

    @cached_property
    def _all(self) -> TargetArray:
        """All machines as one target, for functions whose constants nobody asks for: remembered ones note none."""
        return self.arrays()

    def subset(self, which: np.ndarray) -> Machines:
        """Return some of the machines, by number."""
        chosen = {name: values[which] for name, values in self.numbers.items()}
        return Machines(self.target, chosen, len(which), is_exact=self.is_exact)

    def evaluate(self, function: Callable[[Target], Any], rows: int = 1) -> np.ndarray:
        """Return a function of targets for all machines.

        Args:
            function: of a target of arrays; its result has them as the last dimension, which may be 1.
            rows: elements of its largest array, for one machine.

        Returns:
            [..., machines]; or [..., 1] where it reads no constant that differs.
        """
        if rows * self.count <= _FEW_ELEMENTS:
            return np.asarray(function(self._all))
        probe = self.arrays(slice(0, 1))
        value = np.asarray(function(probe))
        names = tuple(sorted(probe.noted & self.numbers.keys()))
        if not names:
            return value
        first, number = self._combinations(names)
        part = max(1, _MOST_ELEMENTS // max(1, rows))
        parts = [first[start : start + part] for start in range(0, len(first), part)]
        values = [np.asarray(function(self.arrays(which))) for which in parts]
        columns = [np.broadcast_to(x, (*x.shape[:-1], len(which))) for x, which in zip(values, parts, strict=True)]
        return np.concatenate(columns, -1)[..., number]

    def evaluate_each(self, function: Callable[[Target], Any]) -> np.ndarray:
        """Return a function of one target, which may branch on its constants, for all machines, [..., machines]."""
        values_by_constants: dict[tuple[str, ...], dict[tuple[Any, ...], np.ndarray]] = {}
        columns = [self._value_of_one(number, function, values_by_constants) for number in range(self.count)]
        return np.stack(columns, -1)

    def _value_of_one(
        self,
        number: int,
        function: Callable[[Target], Any],
        values_by_constants: dict[tuple[str, ...], dict[Any, np.ndarray]],
    ) -> np.ndarray:
        """Return the value of one machine; that of another that has the same constants of those read for it."""
        for names, values in values_by_constants.items():
            key = tuple(self.numbers[name][number] for name in names)
            if key in values:
                return values[key]
        target = TargetArray(self.target, {name: values[number].item() for name, values in self.numbers.items()})
        value = np.asarray(function(target))
        names = tuple(sorted(target.noted & self.numbers.keys()))
        values_by_constants.setdefault(names, {})[tuple(self.numbers[name][number] for name in names)] = value
        return value

    def _combinations(self, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the first machine of each distinct combination of some constants, and each machine's combination."""
        if names not in self._distinct:
            number = np.zeros(self.count, np.int64)
            for name in names:
                _, code = np.unique(self.numbers[name], return_inverse=True)
                _, number = np.unique(number * (code.max() + 1) + code, return_inverse=True)
            _, first = np.unique(number, return_index=True)
            self._distinct[names] = first, number
        return self._distinct[names]
