"""Names of a package that are imported when they are first read.

A package lists them once, as imports under `TYPE_CHECKING`, which type checkers and editors read:

    if TYPE_CHECKING:
        from package.module import name as name
    else:
        __getattr__ = lazy_names(__name__)

Input: the package. Output: a `__getattr__` for it, which reads these imports off its source when the first name is
asked for, in about 0.1 ms. Limits: the source must be there, not byte code alone; a module of the package that has the
name of a function would hide it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, for the names that it imports under `TYPE_CHECKING`."""

    def read(name: str) -> Any:
        modules = modules_of_names(package)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        # `from package import module` names a module, whose import must not ask for this name again.
        if modules[name] == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(modules[name]), name)

    return read


@cache
def modules_of_names(package: str) -> Mapping[str, str]:
    """Return the module of each name that a package imports under `TYPE_CHECKING`."""
    loader: Any = sys.modules[package].__loader__
    blocks = (node.body for node in ast.parse(loader.get_source(package)).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in imports for alias in node.names}
