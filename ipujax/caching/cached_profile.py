"""Profile of a program in the cache.

Input: the stored data, and a function that compiles the program again. Output: `CachedProfile`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from ipujax.runtime.compile import Executable
from ipujax.runtime.report import Profile, SavedProfile
from ipujax.runtime.sections.ids import Numbering
from ipujax.runtime.sources import current_texts
from ipujax.runtime.timeline import Timeline


class CachedProfile(SavedProfile):
    """A profile from the cache; its program is compiled again if the executable or the timeline is read."""

    def __init__(self, data: Any, compile_again: Callable[[], Executable]) -> None:
        super().__init__(data)
        self.__dict__["_compile_again"] = compile_again  # figures are frozen

    @property
    def executable(self) -> Executable:
        """The compiled program."""
        executable: Executable = self.__dict__["_compile_again"]()
        return executable

    @cached_property
    def timeline(self) -> Timeline:
        """`Figures.timeline`."""
        return self.executable.timeline_of(None)

    @cached_property
    def numbering(self) -> Numbering:
        """`Figures.numbering`."""
        return Profile(self.executable).numbering

    @cached_property
    def sources(self) -> Mapping[str, list[str]]:
        """The lines of the source files as they are now, by path."""
        return current_texts(super().sources)
