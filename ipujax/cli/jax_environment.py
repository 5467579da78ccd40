"""Variables of the environment that JAX reads when it is imported, where a script sets them before it imports JAX.

The command has imported JAX already, so their values are given to `jax.config` when the script imports JAX first.
Input: the environment. Output: settings of JAX; the names of variables that came too late, as under `python` too, or
that have no setting.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
    original = builtins.__import__

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "jax":
            builtins.__import__ = original
            for variable in sorted(dict(_variables() ^ before)):
                setting = variable.lower()
                old = getattr(jax.config, setting, None)
                if _apply(variable, setting):
                    old_settings[setting] = old
                else:
                    without_effect.add(variable)
            before.clear()
            before.update(_variables())
        return original(name, *args, **kwargs)

    builtins.__import__ = importing
    try:
        yield without_effect
    finally:
        builtins.__import__ = original
        without_effect.update(dict(_variables() ^ before))
        for setting, value in old_settings.items():
            jax.config.update(setting, value)


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
