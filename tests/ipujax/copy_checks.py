"""Checks of copies and pickles, for the public classes of the core and of each front end."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import pickle
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from typing import Any

import cloudpickle
import jax
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.errors import ArgumentTypeError

COPIES: dict[str, Callable[[Any], Any]] = {"copy": copy.copy, "deepcopy": copy.deepcopy}
PICKLES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "cloudpickle": lambda x: pickle.loads(cloudpickle.dumps(x)),
}
WAYS = COPIES | PICKLES


def public_classes(modules: Collection[str]) -> Iterator[tuple[str, type]]:
    """Yield name and class, for modules of ipujax as ".poplar"; names are those behind the package."""
    for module in modules:
        space = importlib.import_module(f"ipujax{module}")
        for name in dir(space):
            value = getattr(space, name)
            if inspect.isclass(value) and value.__module__.startswith("ipujax") and name[0] != "_":
                yield f"{module}.{name}"[1:], value


def classes_not_in(modules: Collection[str], named: Collection[str]) -> set[str]:
    """Return the public classes that no table names, but errors, enumerations, and other names of a class in one."""
    plain = {kind for name, kind in public_classes(modules) if name in named}
    return {
        name
        for name, kind in public_classes(modules)
        if name not in named and kind not in plain and not issubclass(kind, BaseException | Enum)
    }


def check_copy(value: Any, way: str) -> None:
    """Compare a value with its copy."""
    duplicate = WAYS[way](value)
    assert isinstance(duplicate, type(value))
    if not isinstance(value, type(ipu.jit(abs))):
        _check_equal(duplicate, value)


def _check_equal(duplicate: Any, value: Any) -> None:
    leaves, tree = jax.tree.flatten(value)
    if leaves and leaves[0] is not value:  # a pytree of arrays, whose `==` is no bool
        assert jax.tree.structure(duplicate) == tree
        jax.tree.map(np.testing.assert_array_equal, duplicate, value)
    elif type(value).__eq__ is not object.__eq__:
        assert duplicate == value
        with contextlib.suppress(TypeError):  # frozen values of lists or mappings
            assert hash(value) == hash(duplicate)
    elif isinstance(value, ipu.Profile):
        assert duplicate.summary() == value.summary() and duplicate.execution() == value.execution()
        np.testing.assert_array_equal(duplicate.memory.tile_bytes, value.memory.tile_bytes)
    if " at 0x" not in repr(value) and "frozenset" not in repr(value):
        assert repr(duplicate) == repr(value)


def check_refused(value: Any) -> None:
    """Try to copy a value that refuses it and names the remedy."""
    for way in WAYS.values():
        with pytest.raises(
            ArgumentTypeError, match=f"{type(value).__name__} objects cannot be copied or pickled\n.*\n  try: "
        ):
            way(value)


def check_errors(package: str, way: str) -> None:
    """Compare errors of a package, as far as it is imported, with their copies."""
    for kind in {*_subclasses(ipu.IpuError)}:
        if not f"{kind.__module__}.".startswith(f"{package}."):
            continue
        rule = ("rule",) if issubclass(kind, ipu.VerifyError) else ()
        error = kind(*rule, "a fault", where="a.py:1 (f)", expected="4 rows", got=(3, 2.5, "x"))
        error.add_note("a note")
        duplicate = WAYS[way](error)
        assert type(duplicate) is kind and str(duplicate) == str(error) and duplicate.args == error.args
        assert vars(duplicate) == vars(error)


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    for each in kind.__subclasses__():
        yield from _subclasses(each)
