"""Public names of modules: what `dir` and completion show."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def public_names(module: dict[str, Any], *more: str) -> Callable[[], list[str]]:
    """A module's `__dir__`.

    Args:
        module: its `globals()`.
        more: submodules for users, and names that are imported when they are asked for.

    Returns:
        A function that gives the names in `__all__`, or without it all but modules and names that begin with "_";
        with them `more`.
    """

    def names() -> list[str]:
        own = (name for name, x in module.items() if not name.startswith("_") and not isinstance(x, ModuleType))
        return sorted({*module.get("__all__", own), *more})

    return names
