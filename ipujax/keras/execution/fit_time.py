"""The time of a fit: measured time of the host for its batches, and predicted time of the IPUs.

Input: the iterators of its epochs, and the profile of each call. Output: `HostData`, and predicted seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import ipujax as ipu


class FitTime:
    """Iterate over the batches of a fit, and add up the time of host and device.

    Args:
        batches: number of batches of all epochs; None where it is not known.
        depth: batches that are prepared ahead.
    """

    def __init__(self, batches: int | None, depth: int) -> None:
        self._batches = batches
        self._depth = depth
        self._finished = ipu.HostData(0, 0.0, 0.0, depth > 0)  # of epochs whose iterators are exhausted
        self._reading: tuple[Iterator[Any], ipu.prefetch[Any]] | None = None
        self.device_seconds = 0.0  # NaN where a trip count depends on data

    @property
    def host(self) -> ipu.HostData:
        """Seconds of preparing the batches so far, and of waiting for them."""
        return self._finished if self._reading is None else self._finished + self._reading[1].host

    def reader(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Return the batches of an epoch's iterator, of which prefetching reads no more than the fit needs."""
        # Keras has one iterator for all epochs where data goes on: its thread and its batches ahead are reused.
        if self._reading is None or self._reading[0] is not iterator:
            self._finished = self.host
            self._reading = iterator, ipu.prefetch(islice(iterator, self._batches), self._depth)
        return self._reading[1]

    def add_call(self, profile: ipu.Profile) -> None:
        """Add the predicted seconds of a call of the device."""
        try:
            self.device_seconds += profile.seconds
        except ipu.ProfileError:  # a trip count depends on data
            self.device_seconds = math.nan
