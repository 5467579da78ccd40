"""Changes that need an edit of the user's function, as hints: what, where and how large, none of them compiled.

Input: the profile of the program as it is. Output: rows of advice that are not tried.
"""

from __future__ import annotations

from ipujax.runtime.causes import AdviceRow, Cause
from ipujax.runtime.causes.removals import RETURNED, SLOW_PATHS, STREAMING, UNEQUAL_TILES
from ipujax.runtime.report import Profile
from ipujax.runtime.tensor import Origin
from ipujax.runtime.views import REMEDIES, verdict

_BY_OPTIONS = frozenset((RETURNED, STREAMING))  # causes that options remove, which are compiled


def edits(profile: Profile) -> tuple[AdviceRow, ...]:
    """Return the changes of the function that its causes suggest, most cycles to save first.

    Raises:
        ProfileError: a trip count is data.
    """
    causes = [cause for cause in verdict(profile).causes if cause.name not in _BY_OPTIONS]
    return tuple(AdviceRow(_edit(cause, profile), saved_cycles=cause.alone_cycles, tried=False) for cause in causes)


def _edit(cause: Cause, profile: Profile) -> str:
    """Return what to change, with the line of most of the cycles, and sizes where these are known."""
    where = "" if cause.origin == Origin() else f"{cause.origin}: "
    if cause.name == SLOW_PATHS and profile.slow_paths:
        reasons = dict.fromkeys(str(each.reason) for each in profile.slow_paths)
        return f"{where}other sizes: {'; '.join(reasons)}"
    if cause.name == UNEQUAL_TILES:
        return f"{where}sizes that are multiples of {profile.target.tiles_per_ipu:,}, or many more elements at once"
    return f"{where}{REMEDIES[cause.name]}"
