"""Callbacks: what the machine would take, beside the losses of each epoch."""

from __future__ import annotations

import time
from typing import Any

import keras


class ProfileLogger(keras.callbacks.Callback):
    """Adds to the logs of each epoch, and so to the history and to callbacks behind it, what IPUs would take.

    `ipu_cycles`: predicted cycles of an execution; `ipu_tile_bytes`: of the fullest tile; `host_seconds`: time of the
    epoch on this machine. Put it ahead of callbacks that write logs.
    """

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is None:
            return
        logs["host_seconds"] = time.perf_counter() - self._start
        profile = self.model.__dict__.get("ipu_profile")
        if profile is not None:
            logs["ipu_cycles"] = profile.cycles
            logs["ipu_tile_bytes"] = profile.memory.max_tile_bytes
