"""Callbacks: what the machine would take, beside the losses of each epoch."""

from __future__ import annotations

import time
from typing import Any

import keras

from ipujax.runtime.host import HostData
from ipujax.runtime.logs import Log

_LOG = Log("keras")


class ProfileLogger(keras.callbacks.Callback):
    """Adds to the logs of each epoch, and so to the history and to callbacks behind it, what IPUs would take.

    `ipu_cycles`: predicted cycles of an execution; `ipu_tile_bytes`: of the fullest tile; `ipu_seconds`: predicted time
    of the epoch's executions. `host_seconds`: time of the epoch on this machine; `host_data_seconds`: of it to prepare
    batches, with those ahead; `host_wait_seconds`: of it waiting for batches. Put it ahead of callbacks that write
    logs. A line of each epoch goes to the logger "ipujax.keras": whether the host or the device is slower.
    """

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()
        self._before = self._so_far()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is None:
            return
        logs["host_seconds"] = time.perf_counter() - self._start
        profile, now = self.model.__dict__.get("ipu_profile"), self._so_far()
        if profile is not None:
            logs["ipu_cycles"] = profile.cycles
            logs["ipu_tile_bytes"] = profile.memory.max_tile_bytes
        if now is not None:
            before, before_seconds = self._before or (HostData(0, 0.0, 0.0), 0.0)
            host, logs["ipu_seconds"] = now[0] - before, now[1] - before_seconds
            logs["host_data_seconds"], logs["host_wait_seconds"] = host.prepared_seconds, host.waited_seconds
            self._say(epoch, logs)

    def _so_far(self) -> tuple[HostData, float] | None:
        """What host and device took since the fit began; None outside of a scope."""
        fit = getattr(self.model.train_function, "time_of_fit", None)
        return None if fit is None else (fit.host, fit.device_seconds)

    def _say(self, epoch: int, logs: Any) -> None:
        slower = "host" if logs["host_data_seconds"] > logs["ipu_seconds"] else "device"
        _LOG.info(
            "%s epoch %d: the host prepares batches in %.3g s and is waited for %.3g s, "
            "predicted device time %.3g s: bound by the %s",
            self.model.name,
            epoch + 1,
            logs["host_data_seconds"],
            logs["host_wait_seconds"],
            logs["ipu_seconds"],
            slower,
        )
