"""Seconds in which a host prepares the batches of a program, beside the time of the program.

Input: seconds measured on this machine, while batches were prepared. Output: `HostData`, per call of a program, and
seconds that IPUs would wait for it.
Limits: a simulator computes more slowly than IPUs, and on the processors that prepare batches. So a loop waits less
here than with an IPU, and preparing a batch takes longer than on an idle host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# Keys of saved execution profiles, in the style of Poplar's, by field: not to be renamed.
_NAMES = {
    "batches": "batches",
    "preparedSeconds": "prepared_seconds",
    "waitedSeconds": "waited_seconds",
    "isAhead": "is_ahead",
    "batchesPerCall": "batches_per_call",
}


@dataclass(frozen=True, slots=True)
class HostData:
    """Seconds in which the host prepared the batches of a loop, and seconds that the loop waited for them.

    Args:
        batches: number of batches.
        prepared_seconds: time to prepare all of them.
        waited_seconds: time that the loop waited for all of them; equal to `prepared_seconds` unless `is_ahead`.
        is_ahead: whether batches are prepared while the program runs.
        batches_per_call: number of batches that one call of the program takes.
    """

    batches: int
    prepared_seconds: float
    waited_seconds: float
    is_ahead: bool = False
    batches_per_call: int = 1

    def __add__(self, other: HostData) -> HostData:
        return replace(
            self,
            batches=self.batches + other.batches,
            prepared_seconds=self.prepared_seconds + other.prepared_seconds,
            waited_seconds=self.waited_seconds + other.waited_seconds,
        )

    def __sub__(self, other: HostData) -> HostData:
        """Return the batches of a part of a loop, as the difference of two sums over it."""
        negative = replace(
            other,
            batches=-other.batches,
            prepared_seconds=-other.prepared_seconds,
            waited_seconds=-other.waited_seconds,
        )
        return self + negative

    @property
    def prepared_seconds_per_call(self) -> float:
        """Seconds to prepare the batches of one call; 0 without batches."""
        return self.prepared_seconds * self._calls

    @property
    def waited_seconds_per_call(self) -> float:
        """Seconds that the loop waits for the batches of one call; 0 without batches."""
        return self.waited_seconds * self._calls

    def to_data(self) -> dict[str, Any]:
        """Return the fields under the names of the execution profile, JSON-able."""
        return {name: getattr(self, field) for name, field in _NAMES.items()}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> HostData:
        """Restore a value from its `to_data`.

        Raises:
            KeyError: a field is missing.
        """
        return HostData(**{field: data[name] for name, field in _NAMES.items()})

    @property
    def _calls(self) -> float:
        return self.batches_per_call / max(1, self.batches)

    def is_slower_than(self, seconds: float) -> bool:
        """Return whether a call takes the host longer than `seconds`, its time on IPUs."""
        return self.prepared_seconds_per_call > seconds

    def idle_seconds(self, seconds: float) -> float:
        """Return the seconds that IPUs wait for the batches of a call that takes them `seconds`."""
        prepared = self.prepared_seconds_per_call
        return max(0.0, prepared - seconds) if self.is_ahead else prepared
