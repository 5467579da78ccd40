"""Public names of modules, which `dir` and completion show."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ipujax.runtime.lazy_names import modules_of_names


def public_names(module: dict[str, Any], *extra: str, has_lazy_names: bool = False) -> Callable[[], list[str]]:
    """Return a `__dir__` function.

    Args:
        module: `globals()` of the module.
        extra: names that are not among them yet.
        has_lazy_names: whether the module has names of `lazy_names`.
    """

    def names() -> list[str]:
        # At each call: a module is not complete when this function is created.
        defined = (name for name, x in module.items() if not name.startswith("_") and not isinstance(x, ModuleType))
        late = modules_of_names(module["__name__"]) if has_lazy_names else ()
        return sorted({*module.get("__all__", defined), *extra, *late})

    return names
