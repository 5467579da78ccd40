"""The roll call: processes report to process 0 before JAX joins them, so that one that never comes is named.

JAX ends a process whose job is incomplete after its timeout, and says of no process that it is missing. Process 0
therefore listens on the port of the job, and tells all who have come who has not; when all have, also on which port
JAX's coordinator will listen, and how many processes share each host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from ipujax.runtime.errors import ArgumentError

PORT = "JAX_COORDINATOR_PORT"
_PORTS = range(61440, 65536)  # those that JAX chooses from
_WAIT_SECONDS = 1.0  # assumed: for a process that has connected to say which one it is
_RETRY_SECONDS = 0.05  # assumed
# "host" of `ipujax run`, "1.0;tcp://host,…:port" of Open MPI, and Slurm's list of nodes, "host[01-04],…".
_HOST = re.compile(r"(?:.*?tcp://)?([^,:\[]+)(?:\[(\w+))?")


def meet(count: int, index: int, hosts: str, timeout_seconds: float) -> tuple[str, int]:
    """Wait until all have come to the host that a launcher's variable names.

    Returns:
        The address of JAX's coordinator in process 0, and the number of processes on the host of this one.
    """
    host = "".join(_HOST.match(hosts).groups(""))  # type: ignore[union-attr]
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
                connection.settimeout(_WAIT_SECONDS)
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
