"""Old names of public arguments and attributes, each with a `DeprecationWarning` that has the new one.

Input: an old name and a new one. Output: a class decorator for keywords, a property for attributes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from ipujax.runtime.tracebacks import show_user_frames

_C = TypeVar("_C", bound=type)


def with_renamed_keyword(owner: str, old: str, new: str) -> Callable[[_C], _C]:
    """Return a decorator of class `owner` whose `__init__` accepts the deprecated keyword `old` in place of `new`."""

    def decorated(cls: _C) -> _C:
        init = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def renaming(self: Any, *args: Any, **kwargs: Any) -> None:
            if old in kwargs and new not in kwargs:
                warnings.warn(f"{owner}({old}=) is now {owner}({new}=)", DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            try:
                init(self, *args, **kwargs)
            except Exception as error:
                show_user_frames(error)
                raise

        cls.__init__ = renaming  # type: ignore[misc]
        return cls

    return decorated


def renamed_property(owner: str, old: str, new: str) -> property:
    """Return a property that reads the attribute `new`; `owner` is the object's name in the warning."""

    def read(self: Any) -> Any:
        warnings.warn(f"{owner}.{old} is now {owner}.{new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(read, doc=f"Deprecated name of `{new}`.")
