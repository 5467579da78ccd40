"""Variables of the environment that JAX reads when it is imported, where a script sets them before it imports JAX.

The command has imported JAX already, so their values are given to `jax.config` when the script imports JAX first.
Input: the environment. Output: settings of JAX; the names of variables that came too late, as under `python` too, or
that have no setting.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import jax

_TRUE = frozenset(("y", "yes", "t", "true", "on", "1"))  # as JAX reads them
_FALSE = frozenset(("n", "no", "f", "false", "off", "0"))


@contextmanager
def applied_environment() -> Iterator[set[str]]:
    """Apply variables that code sets before its first import of JAX; yield the names of those without effect."""
    before = _variables()
    old_settings: dict[str, Any] = {}
    without_effect: set[str] = set()

    def apply() -> None:
        for variable in sorted(dict(_variables() ^ before)):
            setting = variable.lower()
            old = getattr(jax.config, setting, None)
            if _apply(variable, setting):
                old_settings[setting] = old
            else:
                without_effect.add(variable)
        before.clear()
        before.update(_variables())

    hidden = _HiddenJax(apply)
    try:
        yield without_effect
    finally:
        hidden.restore()
        without_effect.update(dict(_variables() ^ before))
        for setting, value in old_settings.items():
            jax.config.update(setting, value)


class _HiddenJax(MetaPathFinder, Loader):
    """Modules of JAX as if they were not imported, until code imports one of them.

    A replaced `__import__` would see that too, but stand in the traceback of every import that fails.

    Args:
        at_import: called once, when JAX is imported.
    """

    def __init__(self, at_import: Callable[[], None]) -> None:
        self._at_import = at_import
        self._spec = jax.__spec__
        self._modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "jax"}
        for name in self._modules:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def restore(self) -> None:
        """Make the modules visible again."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            sys.modules.update(self._modules)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Restore JAX where it is imported: each import of a part of it begins with the package."""
        if name != "jax":
            return None
        self.restore()
        del sys.modules[name]  # else Python would take its own specification, and import JAX once more
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return JAX as it is."""
        return jax

    def exec_module(self, module: ModuleType) -> None:
        """Restore the specification, which Python has replaced, and apply the environment."""
        module.__spec__ = self._spec
        self._at_import()


def _variables() -> set[tuple[str, str]]:
    return {(name, value) for name, value in os.environ.items() if name.startswith("JAX_")}


def _apply(variable: str, setting: str) -> bool:
    """Give the value of a variable to a setting of JAX; return whether JAX has such a setting and value."""
    text = os.environ.get(variable)
    if text is None or not hasattr(jax.config, setting):
        return False
    current = getattr(jax.config, setting)
    value: Any = text
    if isinstance(current, bool):
        if text.lower() not in _TRUE | _FALSE:
            return False
        value = text.lower() in _TRUE
    elif isinstance(current, int):
        if not text.lstrip("-").isdecimal():
            return False
        value = int(text)
    jax.config.update(setting, value)
    return True
