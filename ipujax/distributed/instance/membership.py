"""Membership of this process in a job: `jax.process_index()` of `jax.process_count()`.

A script is one job if it calls `jax.distributed.initialize()` or `ipu.distributed.init()`, or runs under `ipujax run`.
Other processes are independent, whatever started them: workers of a sweep are.

Input: what JAX knows, and environment variables of `ipujax run`. Output: `membership()`, read at the first compilation
and not at import, because counting the processes starts JAX's backend.

Programs that a script starts inherit its environment, but are not instances: their process number differs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from ipujax.distributed.instance.instance import INSTANCE_PID
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.logs import Log

COORDINATOR = "IPUJAX_COORDINATOR"  # address of JAX's coordinator in instance 0, as "host:port"
INSTANCE_INDEX = "IPUJAX_INSTANCE_INDEX"
NUM_INSTANCES = "IPUJAX_NUM_INSTANCES"
NUM_REPLICAS = "IPUJAX_NUM_REPLICAS"
TIMEOUT_SECONDS = 300  # as `jax.distributed.initialize`

_HEARTBEAT_SECONDS = 6  # assumed: a cut link is then known within 10 s; JAX has 100
_LOG = Log("distributed")
# Variables by which launchers tell their processes how many they are.
_COUNTS = {"SLURM_NTASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}
# The words of JAX's errors for which there is a better one.
_NO_CLUSTER = "coordinator_address should be defined"
_TOO_LATE = "must be called before"


@dataclass(frozen=True, slots=True)
class Membership:
    """Position of this process in its job.

    Args:
        instance_index: number of this process, from 0.
        num_instances: number of processes.
        num_replicas: number of replicas of all processes together.
    """

    instance_index: int = 0
    num_instances: int = 1
    num_replicas: int = 1

    @property
    def local_replicas(self) -> int:
        """Number of replicas of this process."""
        return self.num_replicas // self.num_instances


def membership() -> Membership:
    """Return the membership of this process; joins an instance of `ipujax run` that has not joined yet.

    Raises:
        ArgumentError: JAX has joined processes after the membership was read, or cannot join any more.
    """
    me = _membership(os.getpid())
    if me.num_instances == 1 and jax.distributed.is_initialized() and (count := jax.process_count()) > 1:
        raise ArgumentError(
            "JAX has joined this process to others after ipujax compiled for it alone",
            expected="jax.distributed.initialize() or ipu.distributed.init() before the first compilation",
            got=f"process {jax.process_index()} of {count}",
            hint="call it first of all, before any array is made",
        )
    return me


@cache
def _membership(pid: int) -> Membership:
    if _is_instance(pid) and os.environ[NUM_INSTANCES] != "1":
        join(TIMEOUT_SECONDS)
    is_joined = jax.distributed.is_initialized()
    index, count = (jax.process_index(), jax.process_count()) if is_joined else (0, 1)
    if not is_joined:
        _log_independence()
    # Programs that an instance starts have the replicas of no job.
    text = os.environ.get(NUM_REPLICAS, "") if INSTANCE_PID not in os.environ or _is_instance(pid) else ""
    if text and (not text.isdecimal() or not int(text) or int(text) % count):
        problem = f"{NUM_REPLICAS} must be the number of replicas of all {count} processes"
        raise ArgumentError(problem, expected=f"a multiple of {count}", got=repr(text))
    return Membership(index, count, int(text) if text else count)


def _is_instance(pid: int) -> bool:
    return os.environ.get(INSTANCE_PID) == str(pid)


def _log_independence() -> None:
    """Say once that the other processes of a launcher take no part, for those who expect that they do."""
    for name, launcher in _COUNTS.items():
        if os.environ.get(name, "1") != "1":
            text = "this process is independent of the others of %s (%s=%s); ipu.distributed.init() joins them"
            _LOG.warning(text, launcher, name, os.environ[name])
            return


def join(timeout_seconds: int) -> None:
    """Join the job of this process by `jax.distributed.initialize`, unless that has been done or there is none.

    Raises:
        ArgumentError: JAX has computed something before; the processes have not met in time; their address is in use.
    """
    pid = str(os.getpid())
    if jax.distributed.is_initialized() or os.environ.get(INSTANCE_PID, pid) != pid:
        return
    job: dict[str, Any] = {}
    if INSTANCE_PID in os.environ:
        if os.environ[NUM_INSTANCES] == "1":
            return
        # JAX would catch SIGTERM as a notice of preemption; here it ends the instance.
        jax.config.update("jax_enable_preemption_service", False)
        jax.config.update("jax_check_proxy_envs", False)  # the launcher sets them
        address = os.environ[COORDINATOR]
        job = {"coordinator_address": address, "coordinator_bind_address": address, "local_device_ids": [0]}
        job |= {"num_processes": int(os.environ[NUM_INSTANCES]), "process_id": int(os.environ[INSTANCE_INDEX])}
    try:
        jax.distributed.initialize(
            **job, initialization_timeout=timeout_seconds, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS
        )
    except (RuntimeError, ValueError) as error:
        if _NO_CLUSTER in str(error):
            return
        if _TOO_LATE in str(error):
            problem = "ipu.distributed.init() comes after JAX has started to compute"
            raise ArgumentError(problem, hint="call it first of all, before any array is made") from error
        problem = f"the processes of this job have not met within {timeout_seconds} seconds"
        hint = "every process calls ipu.distributed.init(); the port of the coordinator is free, and hosts reach it"
        raise ArgumentError(problem, got=str(error).splitlines()[0], hint=hint) from error
