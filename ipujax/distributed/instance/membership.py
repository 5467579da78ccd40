"""Membership of this process in a job: `jax.process_index()` of `jax.process_count()`.

A script is one job if it calls `jax.distributed.initialize()` or `ipu.distributed.init()`, or runs under `ipujax run`.
Other processes are independent, whatever started them: workers of a sweep are. Programs that an instance of `ipujax
run` starts inherit its environment, but are no instances: the launcher is not their parent.

Input: what JAX knows, and environment variables of launchers. Output: `membership()`, read at the first compilation
and not at import, because counting the processes starts JAX's backend.

Before JAX joins the processes of a launcher, they report to process 0. JAX ends a process whose job is incomplete after
its timeout, and says of no process that it is missing. Process 0 therefore listens on the port of the job, and tells
all who have come who has not; when all have, also on which port JAX's coordinator will listen, and how many processes
share each host.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import socket
import sys
import time
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, NoReturn

import jax

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.logs import Log

HOST = "IPUJAX_COORDINATOR"  # of instance 0
INSTANCE_INDEX = "IPUJAX_INSTANCE_INDEX"
NUM_INSTANCES = "IPUJAX_NUM_INSTANCES"
NUM_REPLICAS = "IPUJAX_NUM_REPLICAS"
LAUNCHER_PID = "IPUJAX_LAUNCHER_PID"
PORT = "JAX_COORDINATOR_PORT"
SIGN_FD = "IPUJAX_SIGN_FD"  # the file to which an instance writes what it does together with the others
TIMEOUT_SECONDS = 300  # as `jax.distributed.initialize`

_HEARTBEAT_SECONDS = 6  # assumed: a cut link is then known within 10 s; JAX has 100
_LAST_SECONDS = 1.0  # assumed: for the others, and the launcher, to see who ended first
_REPORT_SECONDS = 1.0  # assumed: for a process that has connected to say which one it is
_RETRY_SECONDS = 0.05  # assumed
_PORTS = range(61440, 65536)  # those that JAX chooses from
_LOG = Log("distributed")
# Variables by which launchers tell processes how many they are, which one each is, and the host of process 0.
_LAUNCHERS = {
    "ipujax run": (NUM_INSTANCES, INSTANCE_INDEX, HOST),
    "srun": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri"),
}
# "host" of `ipujax run`, "1.0;tcp://host,…:port" of Open MPI, and Slurm's list of nodes, "host[01-04],…".
_HOST_OF_PROCESS_0 = re.compile(r"(?:.*?tcp://)?([^,:\[]+)(?:\[(\w+))?")
_OTHERS = "JAX_COORDINATOR_ADDRESS", "JOB_COMPLETION_INDEX", "TPU_WORKER_ID"  # JAX finds a job by them too


class Membership(NamedTuple):
    """Position of this process in its job: its number from 0, that of processes, and that of replicas of all."""

    instance_index: int = 0
    num_instances: int = 1
    num_replicas: int = 1


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
    """Read the membership of a process once, by its id: its number among the processes, and the replicas of all."""
    del pid  # a fork is another process
    if is_instance():
        join(TIMEOUT_SECONDS)
    is_joined = jax.distributed.is_initialized()
    index, count = (jax.process_index(), jax.process_count()) if is_joined else (0, 1)
    if not is_joined:
        for launcher, (name, _, _) in _LAUNCHERS.items():
            if os.environ.get(name, "1") != "1":
                text = "this process is independent of the others of %s (%s=%s); ipu.distributed.init() joins them"
                _LOG.warning(text, launcher, name, os.environ[name])
    # Programs that an instance starts have the replicas of no job.
    text = os.environ.get(NUM_REPLICAS, "") if LAUNCHER_PID not in os.environ or is_instance() else ""
    if text and (not text.isdecimal() or not int(text) or int(text) % count):
        problem = f"{NUM_REPLICAS} must be the number of replicas of all {count} processes"
        raise ArgumentError(problem, expected=f"a multiple of {count}", got=repr(text))
    return Membership(index, count, int(text) if text else count)


def is_instance() -> bool:
    """Return whether `ipujax run` has started this very process."""
    return os.environ.get(LAUNCHER_PID) == str(os.getppid())


def join(timeout_seconds: int) -> None:
    """Join the job of this process by `jax.distributed.initialize`, unless that has been done or there is none.

    Raises:
        ArgumentError: JAX has computed something before; the processes have not met in time; their address is in use.
    """
    if jax.distributed.is_initialized() or (LAUNCHER_PID in os.environ and not is_instance()):
        return
    if is_instance():
        # JAX would catch SIGTERM as a notice of preemption; here it ends the instance.
        jax.config.update("jax_enable_preemption_service", False)
        jax.config.update("jax_check_proxy_envs", False)  # the launcher sets them
    settings: dict[str, Any] = {"local_device_ids": [0]} if is_instance() else {}
    settings |= {"initialization_timeout": timeout_seconds, "heartbeat_timeout_seconds": _HEARTBEAT_SECONDS}
    for names in _LAUNCHERS.values():
        if all(name in os.environ for name in names):
            count, index = (int(os.environ[name]) for name in names[:2])
            # One process needs no coordinator.
            if count == 1:
                return
            address, num_neighbours = _meet(count, index, os.environ[names[2]], timeout_seconds)
            settings |= {"coordinator_address": address, "num_processes": count, "process_id": index}
            _share_cores(num_neighbours)
            break
    try:
        jax.distributed.initialize(**settings)
    except (RuntimeError, ValueError) as error:
        # Without a launcher there is nothing to join: a script runs alone as it is.
        if "process_id" not in settings and not any(name in os.environ for name in _OTHERS):
            return
        is_late = "must be called before" in str(error)
        problem = "comes after JAX has started to compute" if is_late else "cannot join the processes of its job"
        hint = "call it first of all, before any array is made"
        raise ArgumentError(f"ipu.distributed.init() {problem}", got=str(error).split("\n")[0], hint=hint) from error
    exit_codes()
    atexit.register(leave_if_failed)  # before JAX's own handler, which waits for the others


def _meet(count: int, index: int, hosts: str, timeout_seconds: float) -> tuple[str, int]:
    """Wait until all have come to the host that a launcher's variable names.

    Returns:
        The address of JAX's coordinator in process 0, and the number of processes on the host of this one.
    """
    host = "".join(_HOST_OF_PROCESS_0.match(hosts).groups(""))  # type: ignore[union-attr]
    # All processes of a job, and of no other, have these variables.
    chosen = _PORTS[zlib.crc32(f"{hosts} {os.environ.get('SLURM_JOB_ID')}".encode()) % len(_PORTS)]
    address = host, int(os.environ.get(PORT, chosen))
    deadline = time.monotonic() + timeout_seconds
    news = _report(address, index, deadline) if index else _call_roll(address, count, deadline)
    coordinator, missing, num_neighbours = news
    if coordinator:
        return f"{host}:{coordinator}", num_neighbours
    names = f"process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    raise ArgumentError(
        f"process {index} of {count} has waited {timeout_seconds} seconds for {names}",
        expected="every process calls ipu.distributed.init()",
        got=f"no answer of {names}" + (f" at {host}:{address[1]}" if missing == [0] else ""),
        hint="start all processes; a firewall may stop them; timeout_seconds= of init, if they need longer",
    )


class _News(NamedTuple):
    """News of process 0: a free port when all have come, who has not, how many are on the host of the reader."""

    port: int
    missing: Sequence[int]
    num_neighbours: int = 1


def _call_roll(address: tuple[str, int], count: int, deadline: float) -> _News:
    """Collect reports in process 0, and answer them."""
    try:
        server = socket.create_server(("", address[1]), backlog=count)
    except OSError as error:
        problem = f"port {address[1]} of process 0, where it meets the others, is in use"
        hint = f"set {PORT} to a free one, the same in all processes"
        raise ArgumentError(problem, got=error.strerror, hint=hint) from error
    hosts = {0: socket.gethostname()}
    connections: dict[int, socket.socket] = {}
    news = _News(0, [*range(1, count)])
    with server, contextlib.ExitStack() as stack:
        while news.missing and (remaining_seconds := deadline - time.monotonic()) > 0:
            server.settimeout(remaining_seconds)
            with contextlib.suppress(OSError, ValueError):  # silence, or another program
                connection = stack.enter_context(server.accept()[0])
                connection.settimeout(_REPORT_SECONDS)
                index, host = json.loads(connection.recv(1 << 10))
                connections[index], hosts[index] = connection, host
            with socket.create_server(("", 0)) as free:
                missing = [n for n in range(count) if n not in hosts]
                news = _News(0 if missing else free.getsockname()[1], missing)
            for index, connection in connections.items():
                news = news._replace(num_neighbours=[*hosts.values()].count(hosts[index]))
                with contextlib.suppress(OSError):  # it has given up
                    connection.sendall(json.dumps(news).encode() + b"\n")
    return news._replace(num_neighbours=[*hosts.values()].count(hosts[0]))


def _report(address: tuple[str, int], index: int, deadline: float) -> _News:
    """Report to process 0, and return its last news."""
    news = _News(0, [0])
    while not news.port and (remaining_seconds := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError, ValueError), socket.create_connection(address, remaining_seconds) as server:
            server.sendall(json.dumps([index, socket.gethostname()]).encode())
            for line in server.makefile():
                news = _News(*json.loads(line))
                server.settimeout(max(deadline - time.monotonic(), _RETRY_SECONDS))
        time.sleep(0.0 if news.port else _RETRY_SECONDS)
    return news


def _share_cores(num_processes: int) -> None:
    """Give XLA its share of the cores of this host, unless the launcher has: more threads wait for one another."""
    cores = os.cpu_count() or 1
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) == cores:
        os.environ.setdefault("PJRT_NPROC", str(max(1, cores // num_processes)))


@cache
def exit_codes() -> list[int]:
    """Return a list of the codes of later calls of `sys.exit`: Python tells no handler with which code it ends."""
    codes = list[int]()
    leave = sys.exit

    def noting_exit(code: object = None, /) -> NoReturn:
        codes.append(code if isinstance(code, int) else int(code is not None))
        leave(code)  # type: ignore[arg-type]

    sys.exit = noting_exit
    return codes


def leave_if_failed() -> None:
    """End a process whose script has raised an error, or called `sys.exit` with another code than 0."""
    codes = [1] if getattr(sys, "last_value", None) is not None else exit_codes()
    code = codes[-1] if codes else 0
    if code and jax.distributed.is_initialized():
        leave_at_once(jax.process_index() == 0, code)


def leave_at_once(is_last: bool, code: int = 1) -> NoReturn:
    """End a process that failed without the exit handlers of JAX, which wait for the others; the last lets them see.

    Process 0 is last: it has JAX's coordinator, without which the others abort.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    time.sleep(_LAST_SECONDS if is_last else 0.0)
    os._exit(code)
