"""Public names of modules, which `dir` and completion show."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def public_names(module: dict[str, Any], *extra: str) -> Callable[[], list[str]]:
    """Return a `__dir__` function for the `globals()` of a module; `extra` names are imported when first read."""

    def names() -> list[str]:
        # At each call: a module is not complete when this function is created.
        defined = (name for name, x in module.items() if not name.startswith("_") and not isinstance(x, ModuleType))
        return sorted({*module.get("__all__", defined), *extra})

    return names
