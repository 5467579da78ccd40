"""What a host takes to prepare the batches that a program is called with, beside the time of the program.

Input: seconds measured on this machine, while batches were prepared. Output: `HostData`, per call of a program, and
how long IPUs would wait for it.
Limits: a simulator computes more slowly than IPUs, and on the processors that prepare batches: what a loop waits here
is less than it would wait for an IPU, and preparing takes longer than with nothing else to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# In the execution profile, whose names are Poplar's and in its style.
_NAMES = {
    "batches": "batches",
    "preparedSeconds": "prepared_seconds",
    "waitedSeconds": "waited_seconds",
    "isAhead": "is_ahead",
    "batchesPerCall": "batches_per_call",
}


@dataclass(frozen=True, slots=True)
class HostData:
    """How long the host took for the batches of a loop, and how long the loop waited for them.

    Args:
        batches: how many the loop got.
        prepared_seconds: in which they were prepared, all together.
        waited_seconds: of the loop, all together; where none is prepared ahead that is the same time.
        is_ahead: whether batches are prepared while the program runs.
        batches_per_call: of the program.
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
        less = replace(
            other,
            batches=-other.batches,
            prepared_seconds=-other.prepared_seconds,
            waited_seconds=-other.waited_seconds,
        )
        return self + less

    @property
    def prepared_seconds_per_call(self) -> float:
        """In which the batches of one call are prepared; 0 where there was no batch."""
        return self.prepared_seconds * self._calls

    @property
    def waited_seconds_per_call(self) -> float:
        """Of the loop for the batches of one call; 0 where there was no batch."""
        return self.waited_seconds * self._calls

    def to_data(self) -> dict[str, Any]:
        """As in the execution profile, JSON-able."""
        return {name: getattr(self, field) for name, field in _NAMES.items()}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> HostData:
        """What `to_data` gave.

        Raises:
            KeyError: data of something else.
        """
        return HostData(**{field: data[name] for name, field in _NAMES.items()})

    @property
    def _calls(self) -> float:
        return self.batches_per_call / max(1, self.batches)

    def is_slower_than(self, seconds: float) -> bool:
        """Whether the host is what bounds calls of so many seconds each on IPUs."""
        return self.prepared_seconds_per_call > seconds

    def idle_seconds(self, seconds: float) -> float:
        """How long IPUs wait for the batches of a call, if its program takes them so many seconds."""
        prepared = self.prepared_seconds_per_call
        return max(0.0, prepared - seconds) if self.is_ahead else prepared
