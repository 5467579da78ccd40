"""What to launch, and how the processes of a run are started.

Input: `Launch`. Output: the exit code, 0 when every instance ended with 0, else that of the first that did not. The
event loop over running instances is in `watch.py`.

Limits: all instances run on this machine.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ipujax.distributed.instance import (
    CONTROL_FD,
    COORDINATOR,
    INSTANCE_INDEX,
    LAUNCHER_PID,
    NUM_INSTANCES,
    NUM_REPLICAS,
)
from ipujax.distributed.launcher.output import DEFAULT_PREFIX, Prefix
from ipujax.distributed.launcher.started import Instance
from ipujax.distributed.launcher.watch import Watch, watching_signals
from ipujax.runtime.errors import ArgumentError

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Launch:
    """What to launch.

    Args:
        command: a script and its arguments, or "-m", a module and its arguments.
        instances: how many processes run it.
        replicas: how many replicas they hold together, the same number each.
        timeout_seconds: all are ended when one gives no sign of life for so long; 0 waits for ever.
        grace_seconds: time between the signal to end and the kill.
        prefix: text before each line of output, see `output.Prefix`; "" for none.
        only_stdout_from: the one instance whose standard output is shown; all when None. Errors are always shown.

    Raises:
        ArgumentError: for numbers that make no sense, or do not fit each other.
    """

    command: tuple[str, ...]
    instances: int
    replicas: int
    timeout_seconds: float = 600.0
    grace_seconds: float = 3.0
    prefix: str = DEFAULT_PREFIX
    only_stdout_from: int | None = None

    def __post_init__(self) -> None:
        for name in ("instances", "replicas"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"no run has {getattr(self, name)} {name}", expected="at least 1")
        if self.replicas % self.instances:
            raise ArgumentError(
                f"{self.replicas} replicas cannot be shared equally by {self.instances} instances",
                expected="a multiple of the number of instances",
                got=self.replicas,
                hint=f"--replicas {(self.replicas // self.instances + 1) * self.instances}",
            )
        for name in ("timeout_seconds", "grace_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ArgumentError(f"{name} makes no sense", expected="0 or more", got=getattr(self, name))
        if self.only_stdout_from is not None and not 0 <= self.only_stdout_from < self.instances:
            expected = f"0 to {self.instances - 1}"
            raise ArgumentError("there is no such instance to show", expected=expected, got=self.only_stdout_from)
        Prefix(self.prefix, self.instances)


def launch(settings: Launch) -> int:
    """Runs instances to their end. Only the main thread can do so, because signals come to it.

    Args:
        settings: what to run.

    Returns:
        The exit code: 0, or that of the first instance that failed (128 + n if signal n killed it); 124 if one was
        stuck, 128 + n if signal n ended the launcher. No process of any instance's group is left.
    """
    prefix = Prefix(settings.prefix, settings.instances)
    with watching_signals() as signals, _guardian() as guardian, _reserved_port() as port:
        watch = Watch(signals, guardian, settings.instances, settings.timeout_seconds, settings.grace_seconds)
        with watch:
            for index in range(settings.instances):
                is_shown = settings.only_stdout_from in (None, index)
                watch.add(_start(settings, index, port), prefix, is_shown)
            return watch.run()


def _start(settings: Launch, index: int, port: int) -> Instance:
    """Starts an instance: the leader of a session, and so of a process group, of its own."""
    mine, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(_HERE.parent / "instance" / "instance.py"), *settings.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=(theirs.fileno(),),
            env={
                "JAX_PLATFORMS": "cpu",  # where IPUs are simulated; several processes cannot share one GPU anyway
                **os.environ,
                **_past_proxies(),
                "PYTHONUNBUFFERED": "1",
                LAUNCHER_PID: str(os.getpid()),
                CONTROL_FD: str(theirs.fileno()),
                COORDINATOR: f"127.0.0.1:{port}",
                INSTANCE_INDEX: str(index),
                NUM_INSTANCES: str(settings.instances),
                NUM_REPLICAS: str(settings.replicas),
            },
        )
    return Instance(index, process, mine)


def _past_proxies() -> dict[str, str]:
    """What keeps gRPC, by which JAX's processes find each other on this machine, from asking a proxy of the network."""
    if not any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy") for name in os.environ):
        return {}
    names = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
    without = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return {"no_grpc_proxy": ",".join(filter(None, (without, "127.0.0.1")))}


@contextmanager
def _guardian() -> Iterator[int]:
    """The process that ends the instances if this one is killed; gives the file descriptor of its input."""
    command = [sys.executable, "-I", "-S", str(_HERE / "guardian.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0) as guardian:
        assert guardian.stdin is not None
        yield guardian.stdin.fileno()


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A local port that nothing else is given, but that gRPC, which sets SO_REUSEPORT, can listen on."""
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]
