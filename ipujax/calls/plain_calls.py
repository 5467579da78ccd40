"""Notice of calls that JAX computes alone, so that a missing profile is no riddle.

Input: what runs so. Output: a warning of the log, once.
"""

from __future__ import annotations

from ipujax.runtime.logs import Log

_LOG = Log("jit")


class PlainCalls:
    """Calls of a function that have no profile.

    Args:
        what: a clause that says which function runs how.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_said = False

    def notice(self) -> None:
        """Warn, the first time."""
        if not self._is_said:
            self._is_said = True
            _LOG.warning("%s, without a profile", self._what)
