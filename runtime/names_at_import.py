"""Names of ipujax that a program replaced after their import: passes, rules, planners, constants of the compiler.

Input: modules of ipujax as they are imported, whose loader keeps the values of their names. Output: the names that have
another value now. What is stored on disk or kept in memory depends on them, as it does on the files of ipujax. Of JAX
the name `jax_jit`: a program may put `ipu.jit` in the place of `jax.jit`, which then must not call itself.
Limits: tables that are dicts are compared by their items, classes by their members, all by identity.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import chain
from operator import attrgetter, is_
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from jax import jit as jax_jit

__all__ = [
    "FRONT_ENDS",
    "ReplacedName",
    "import_time_ns",
    "jax_jit",
    "record_imports",
    "replaced_names",
    "replaced_values",
]

_PACKAGE = "ipujax."
# Packages that nothing else imports, and no parts of the compiler: a replaced name shows in the traced function.
FRONT_ENDS = ("keras", "onnx", "popart")
_OTHER_PARTS = tuple(_PACKAGE + name for name in (*FRONT_ENDS, "caching", "storage"))  # a cache shows in no result
# Names that Python or imports of other modules write.
_WRITTEN_LATER = frozenset({"__abstractmethods__", "__annotations__", "__builtins__", "__slotnames__", "_abc_impl"})


class ReplacedName(NamedTuple):
    """A name with another value than at the end of its import: its module, class or table, and the value now."""

    owner: str
    name: str
    value: Any


class _RecordingLoader(SourceFileLoader):
    """Loader of a module that keeps its names."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        name = module.__name__
        _OWNERS[name] = list(_name_owners(module))
        functions = (value for value in vars(module).values() if isinstance(value, FunctionType))
        _FUNCTIONS[name] = {each: _parts(each) for each in functions if each.__module__ == name}


class _RecordingFinder:
    """Finder of the modules of ipujax."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the specification of a module of ipujax, whose names are recorded as it is loaded; None for others."""
        if not name.startswith(_PACKAGE) or name.startswith(_OTHER_PARTS):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _RecordingLoader(spec.loader.name, spec.loader.path)
        return spec


@dataclass(frozen=True, slots=True)
class _Owner:
    """A module, class or table, and its values at the end of an import.

    Args:
        path: its name.
        current: its values as they are at any time.
        at_import: those at the end of the import.
        may_grow: whether other modules may add names to it, as to a package.
    """

    path: str
    current: Mapping[Any, Any]
    at_import: Mapping[Any, Any]
    may_grow: bool

    def replaced(self) -> Iterator[ReplacedName]:
        """Yield the names with other values."""
        current, at_import = self.current, self.at_import
        # Some 25,000 names are compared before each compilation: without a loop in Python.
        if [*current] == [*at_import] and all(map(is_, current.values(), at_import.values())):
            return
        for name in at_import if self.may_grow else dict.fromkeys((*at_import, *current)):
            value = current.get(name)
            if value is not at_import.get(name) and name not in _WRITTEN_LATER:
                yield ReplacedName(self.path, str(name), value)


def record_imports() -> None:
    """Keep the names of all modules of ipujax that are imported from now on."""
    if not any(finder is _RecordingFinder for finder in sys.meta_path):
        sys.meta_path.insert(0, _RecordingFinder)


def import_time_ns() -> int:
    """Return the time of the import of ipujax, in nanoseconds since the epoch."""
    return _IMPORT_TIME_NS


def replaced_names() -> tuple[ReplacedName, ...]:
    """Return the names of imported modules that were replaced, added to a table or class, or removed."""
    names = (name for _, owners in sorted(_OWNERS.items()) for owner in owners for name in owner.replaced())
    return (
        *names,
        *(name for module, parts in sorted(_FUNCTIONS.items()) for name in _changed_functions(module, parts)),
    )


def replaced_values() -> tuple[Any, ...]:
    """Return the values of `replaced_names`: what is kept in memory was made with these objects."""
    return tuple(name.value for name in replaced_names())


_parts = attrgetter("__code__", "__defaults__", "__kwdefaults__")


def _changed_functions(module: str, parts: Mapping[FunctionType, tuple[Any, ...]]) -> Iterator[ReplacedName]:
    """Yield the functions of a module whose code or defaults were changed in place."""
    if all(map(is_, chain.from_iterable(map(_parts, parts)), chain.from_iterable(parts.values()))):
        return
    for function, at_import in parts.items():
        if not all(map(is_, _parts(function), at_import)):
            yield ReplacedName(module, function.__qualname__, _parts(function))


def _name_owners(module: ModuleType) -> Iterator[_Owner]:
    """Yield a module, the classes that it defines, and its tables."""
    names = vars(module)
    yield _Owner(module.__name__, names, dict(names), True)
    for name, value in names.items():
        path = f"{module.__name__}.{name}"
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield _Owner(path, vars(value), dict(vars(value)), False)
        elif isinstance(value, dict) and not name.startswith("__"):
            yield from _tables(path, value)


def _tables(path: str, table: dict[Any, Any]) -> Iterator[_Owner]:
    """Yield a table, and those inside it."""
    yield _Owner(path, table, dict(table), False)
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _tables(f"{path}[{name!r}]", value)


# By module, those of its owners; a module that is loaded again replaces them.
_OWNERS: dict[str, list[_Owner]] = {}
_FUNCTIONS: dict[str, dict[FunctionType, tuple[Any, ...]]] = {}  # by module, those that it defines
_IMPORT_TIME_NS = time.time_ns()
