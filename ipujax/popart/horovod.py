"""Horovod's extension of PopART: gradients averaged over processes, on the host.

    import ipujax.popart as popart
    import ipujax.popart.horovod as hvd

    hvd.init()                                          # before a session is made
    options.hostAllReduce = True
    session = popart.TrainingSession(…, userOptions=options)
    hvd.DistributedOptimizer(optimizer, session, options).insert_host_allreduce()
    session.prepareDevice()
    hvd.broadcast_weights(session, root_rank=0)

Processes are those of `ipu.distributed`: `ipujax run`, `mpirun` or `srun` start them.

Source: PopART user guide, "Distributed training with Horovod".
Limits: a session has one replica in each process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

import ipujax as ipu
from ipujax.front_end import public_names
from ipujax.popart.exceptions import popart_exception
from ipujax.popart.optimisers import Optimizer
from ipujax.popart.options import SessionOptions
from ipujax.popart.session import TrainingSession

# Variables of launchers with the number of a process among those of its host.
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
Arrays = dict[str, np.ndarray[Any, Any]]


def init() -> None:
    """Join the processes of this job; see `ipu.distributed.init`."""
    ipu.distributed.init()


def rank() -> int:
    """Return the number of this process, from 0."""
    return ipu.distributed.instance_index()


def size() -> int:
    """Return the number of processes."""
    return ipu.distributed.num_instances()


def local_rank() -> int:
    """Return the number of this process among those on its host; of `ipujax run` all are on one."""
    ranks_found = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), None)
    return rank() if ranks_found is None or size() == 1 else int(ranks_found)


class DistributedOptimizer:
    """Averages the gradients of a session over all processes, before the optimiser reads them.

    Args:
        optimizer: of the session.
        session: made with `hostAllReduce`.
        session_options: of the session.

    Raises:
        popart_exception: a session without `hostAllReduce`, or values that are none of PopART's.
    """

    def __init__(self, optimizer: Optimizer, session: TrainingSession, session_options: SessionOptions) -> None:
        for value, kind in ((optimizer, Optimizer), (session, TrainingSession), (session_options, SessionOptions)):
            if not isinstance(value, kind):
                raise popart_exception("DistributedOptimizer", expected=f"a popart.{kind.__name__}", got=repr(value))
        if not session_options.hostAllReduce or not session.getHostReduceStreamIds():
            message = "DistributedOptimizer needs a session whose gradients go to the host"
            raise popart_exception(message, expected="hostAllReduce = True", hint="set it before the session is made")
        self._session = session
        self._sent: Arrays = {}
        self._means: Mapping[str, Any] = {}

    def insert_host_allreduce(self) -> None:
        """Connect the streams of gradients with functions that take their mean over all processes."""
        handles = self._session.getHostReduceStreamIds()
        stores, loads = handles[: len(handles) // 2], handles[len(handles) // 2 :]
        for store, load in zip(stores, loads, strict=True):
            self._session.connectStreamToCallback(store, partial(self._send, store))
            self._session.connectStreamToCallback(load, partial(self._receive, store))

    def _send(self, name: str, buffer: np.ndarray[Any, Any]) -> None:
        self._sent[name] = buffer

    def _receive(self, name: str, buffer: np.ndarray[Any, Any]) -> None:
        if self._sent:  # all have been sent: one reduction for all of them
            self._means = ipu.distributed.all_reduce(self._sent, "mean")
            self._sent = {}
        buffer[...] = np.asarray(self._means[name])


def broadcast_weights(session: TrainingSession, root_rank: int = 0) -> None:
    """Give all processes the weights of one, on the host and on the device.

    Args:
        session: prepared for its device.
        root_rank: number of the process with the weights.

    Raises:
        popart_exception: a session that is not prepared.
    """
    session.broadcastWeights(root_rank)


__all__ = ["DistributedOptimizer", "broadcast_weights", "init", "local_rank", "rank", "size"]
__dir__ = public_names(globals())
