"""Names of tensors in a graph that is being built, unique over it and its subgraphs.

Names are PopART's: operator and number of the result, `Add:0`; a name in use gets a counter, `Add:0/1`; name scopes
stand before it, `layer/Add:0`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

DELIMITER = "/"


class GraphNames:
    """Names in use, and the name scopes that are open."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._scopes: list[str] = []

    def reserve(self, name: str) -> None:
        """Count a name as used."""
        self._used.add(name)

    def unique(self, name: str, output: int | None = None) -> str:
        """Return a new name.

        Args:
            name: operator or debug context.
            output: number of the result; None for an input.
        """
        base = self.path(name) if output is None else f"{self.path(name)}:{output}"
        # Names are searched, not counted: a loaded model may have `Add:0/1` and no `Add:0`.
        proposed = base
        counter = 0
        while proposed in self._used:
            counter += 1
            proposed = f"{base}{DELIMITER}{counter}"
        self._used.add(proposed)
        return proposed

    def path(self, name: str) -> str:
        """Return a name behind the open scopes."""
        return DELIMITER.join([*self._scopes, name]) if name else DELIMITER.join(self._scopes)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put a scope before all names that are made inside."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()
