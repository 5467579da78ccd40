"""The time of a fit: what the host takes for its batches, and what IPUs take as predicted.

Input: the iterators of its epochs, and the profile of each call. Output: `HostData`, and seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

from ipujax.prefetching import prefetch
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.host import HostData
from ipujax.runtime.report import Profile


class FitTime:
    """Reads the batches of a fit, and counts.

    Args:
        batches: as many as all epochs ask for; None where that is not known.
        depth: batches that are prepared ahead.
    """

    def __init__(self, batches: int | None, depth: int) -> None:
        self._batches, self._depth = batches, depth
        self._before = HostData(0, 0.0, 0.0, depth > 0)  # of epochs whose iterators are done
        self._reading: tuple[Iterator[Any], prefetch[Any]] | None = None
        self.device_seconds = 0.0  # NaN where loops run as often as their data says

    @property
    def host(self) -> HostData:
        """What the host took for the batches so far, and how long they were waited for."""
        return self._before if self._reading is None else self._before + self._reading[1].host

    def reader(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The batches of an epoch's iterator, which is read no further than will be asked for."""
        if self._reading is None or self._reading[0] is not iterator:
            self._before = self.host
            self._reading = iterator, prefetch(islice(iterator, self._batches), self._depth)
        return self._reading[1]

    def add_call(self, profile: Profile) -> None:
        """Counts a call of the device."""
        try:
            self.device_seconds += profile.seconds
        except ProfileError:  # a trip count is data
            self.device_seconds = math.nan
