"""Membership of this process in a job: `jax.process_index()` of `jax.process_count()`.

A script is one job if it calls `jax.distributed.initialize()` or `ipu.distributed.init()`, or runs under `ipujax run`.
Other processes are independent, whatever started them: workers of a sweep are.

Input: what JAX knows, and environment variables of `ipujax run`. Output: `membership()`, read at the first compilation
and not at import, because counting the processes starts JAX's backend.

Programs that a script starts inherit its environment, but are not instances: their process number differs.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import zlib
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from threading import Thread
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
_NO_LIMIT_SECONDS = 10**6
# Variables by which launchers tell processes how many they are, which one each is, and the job.
_LAUNCHERS = {
    "ipujax run": (NUM_INSTANCES, INSTANCE_INDEX, COORDINATOR),
    "srun": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_ID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri"),
}
_OTHERS = "JAX_COORDINATOR_ADDRESS", "JOB_COMPLETION_INDEX", "TPU_WORKER_ID"  # JAX finds a job by them too
_PORT = "JAX_COORDINATOR_PORT"
_PORTS = range(61440, 65536)  # those that JAX chooses from
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
    for launcher, (name, _, _) in _LAUNCHERS.items():
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
        # One process needs no coordinator.
        if os.environ[NUM_INSTANCES] == "1":
            return
        # JAX would catch SIGTERM as a notice of preemption; here it ends the instance.
        jax.config.update("jax_enable_preemption_service", False)
        jax.config.update("jax_check_proxy_envs", False)  # the launcher sets them
        address = os.environ[COORDINATOR]
        job = {"coordinator_address": address, "coordinator_bind_address": address, "local_device_ids": [0]}
        job |= {"num_processes": int(os.environ[NUM_INSTANCES]), "process_id": int(os.environ[INSTANCE_INDEX])}
    else:
        # JAX aborts the process where another listens on its port.
        _check_port()
    job |= {"initialization_timeout": _NO_LIMIT_SECONDS, "heartbeat_timeout_seconds": _HEARTBEAT_SECONDS}
    # JAX ends the process when its own timeout is over: in a thread it can be left behind, with an error that says why.
    outcome: Future[None] = Future()
    Thread(target=_initialize, args=(job, outcome), daemon=True).start()
    try:
        outcome.result(timeout_seconds)
    except TimeoutError:
        # The thread still waits inside of JAX, and would hold the interpreter at its end.
        atexit.register(_leave_unmet)
        raise ArgumentError(
            f"{_own_name()} has waited {timeout_seconds} seconds for the other processes of its job",
            expected="every process calls ipu.distributed.init()",
            got="at least one process, or the host of process 0, has not come",
            hint="start all processes; a firewall may stop them; timeout_seconds= of init, if they need longer",
        ) from None
    except (RuntimeError, ValueError) as error:
        is_job = any(name in os.environ for name in (*_OTHERS, *(names[1] for names in _LAUNCHERS.values())))
        # Without a launcher there is nothing to join: a script runs alone as it is.
        if _NO_CLUSTER in str(error) or (_TOO_LATE in str(error) and not is_job):
            return
        if _TOO_LATE in str(error):
            problem = "ipu.distributed.init() comes after JAX has started to compute"
            raise ArgumentError(problem, hint="call it first of all, before any array is made") from error
        problem = f"{_own_name()} cannot join the other processes of its job"
        raise ArgumentError(problem, got=str(error).splitlines()[0]) from error


def _initialize(job: dict[str, Any], outcome: Future[None]) -> None:
    try:
        jax.distributed.initialize(**job)
    except Exception as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(None)


def _own_name() -> str:
    """Return the number of this process as its launcher gives it, where it has not met the others."""
    for count, index, _ in _LAUNCHERS.values():
        if index in os.environ and count in os.environ:
            return f"process {os.environ[index]} of {os.environ[count]}"
    return "this process"


def _check_port() -> None:
    """Refuse a port of JAX's coordinator that is in use: JAX would end the process by a segmentation fault."""
    for _, index, job in _LAUNCHERS.values():
        if index in os.environ and job in os.environ:
            port = _PORTS[zlib.crc32(os.environ[job].encode()) % len(_PORTS)]
            port = int(os.environ.setdefault(_PORT, str(port)))
            if os.environ[index] == "0":
                try:
                    socket.create_server(("", port)).close()
                except OSError as error:
                    problem = f"port {port} of process 0, for JAX's coordinator, is in use"
                    hint = f"set {_PORT} to a free one, the same in all processes"
                    raise ArgumentError(problem, got=error.strerror, hint=hint) from error
            return


def _leave_unmet() -> None:
    """End the process without JAX, which would wait for processes that have not come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
