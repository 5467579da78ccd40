"""Names of a package that are imported when they are first read.

Input: the names by module of the package. Output: a `__getattr__` for the package. A type checker reads the imports
beside it, under `TYPE_CHECKING`. Limits: a module of the package that has the name of a function would hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: full name of the package.
        names: for each of its modules the names to import from it, with spaces between.
    """
    module_of = {name: module for module, words in names.items() for name in words.split()}

    def read(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return read
