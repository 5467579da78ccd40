"""Changes that need an edit of the user's function, as hints: what, where and how large, none of them compiled.

Input: the profile of the program as it is. Output: rows of advice that are not tried.
"""

from __future__ import annotations

from ipujax.runtime.causes import AdviceRow, Cause
from ipujax.runtime.causes.removals import RETURNED, STREAMING
from ipujax.runtime.report import Profile
from ipujax.runtime.tensor import Origin
from ipujax.runtime.views import verdict

_BY_OPTIONS = frozenset((RETURNED, STREAMING))  # causes that options remove, which are compiled


def edits(profile: Profile) -> tuple[AdviceRow, ...]:
    """Return the changes of the function that its causes suggest, most cycles to save first.

    Raises:
        ProfileError: a trip count is data.
    """
    result = verdict(profile)
    return tuple(
        AdviceRow(_edit(cause, remedy), saved_cycles=gain, tried=False)
        for cause, gain, remedy in zip(result.causes, result.gains, result.remedies, strict=True)
        if cause.name not in _BY_OPTIONS
    )


def _edit(cause: Cause, remedy: str) -> str:
    """Return what to change, with the line of most of the cycles."""
    return remedy if cause.origin == Origin() else f"{cause.origin}: {remedy}"
