"""`ProfileLogger`: a callback that logs predicted cycles and time beside the losses of each epoch."""

from __future__ import annotations

import time
from typing import Any

import keras

import ipujax as ipu
from ipujax.front_end import Log

_LOG = Log("keras")


class ProfileLogger(keras.callbacks.Callback):
    """Add figures of IPUs and host to the logs of each epoch, and so to the history and to later callbacks.

    `ipu_cycles`: predicted cycles of an execution; `ipu_tile_bytes`: bytes of the fullest tile; `ipu_seconds`:
    predicted seconds of the epoch's executions. `host_seconds`: seconds of the epoch on this machine;
    `host_data_seconds`: those of preparing batches, including prefetched ones; `host_wait_seconds`: those of waiting
    for batches. Put it ahead of callbacks that write logs. The logger "ipujax.keras" gets a line an epoch: whether
    the host or the device is slower.
    """

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()
        self._totals_before = self._totals()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is None:
            return
        logs["host_seconds"] = time.perf_counter() - self._start
        profile = self.model.__dict__.get("ipu_profile")
        totals = self._totals()
        if profile is not None:
            logs["ipu_cycles"] = profile.cycles
            logs["ipu_tile_bytes"] = profile.memory.max_tile_bytes
        if totals is not None:
            # Totals are those of the fit: an epoch is the difference.
            host_before, device_seconds_before = self._totals_before or (ipu.HostData(0, 0.0, 0.0), 0.0)
            host = totals[0] - host_before
            logs["ipu_seconds"] = totals[1] - device_seconds_before
            logs["host_data_seconds"] = host.prepared_seconds
            logs["host_wait_seconds"] = host.waited_seconds
            self._log_bound(epoch, logs)

    def _totals(self) -> tuple[ipu.HostData, float] | None:
        """Return host data and device seconds since the fit began; None outside of a scope."""
        fit = getattr(self.model.train_function, "time_of_fit", None)
        return None if fit is None else (fit.host, fit.device_seconds)

    def _log_bound(self, epoch: int, logs: Any) -> None:
        """Log which is slower in an epoch, the host that prepares batches or the device that trains on them."""
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
