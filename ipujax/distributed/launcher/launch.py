"""The launcher: settings of a run, and the start of its processes.

Input: `Launch`. Output: the exit code, 0 if every instance ended with 0, else that of the first that did not. The
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
from ipujax.distributed.launcher.started import DEFAULT_PREFIX, Instance, Prefix
from ipujax.distributed.launcher.watch import Watch, watching_signals
from ipujax.runtime.errors import ArgumentError

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings of a run.

    Args:
        command: a script and its arguments, or "-m", a module and its arguments.
        instances: number of processes that run it.
        replicas: number of replicas of all instances, a multiple of `instances`.
        timeout_seconds: time without a sign of life of an instance after which all are ended; 0 for no limit.
        grace_seconds: time between the signal to end and the kill.
        prefix: text before each line of output, see `output.Prefix`; "" for none.
        only_stdout_from: instance whose standard output is shown; all when None. Standard errors are always shown.

    Raises:
        ArgumentError: a number is out of its range, `replicas` is not a multiple of `instances`, or the prefix has
            unknown names.
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
                raise ArgumentError(f"{name} of a run must be positive", expected="at least 1", got=getattr(self, name))
        if self.replicas % self.instances:
            raise ArgumentError(
                f"{self.replicas} replicas cannot be shared equally by {self.instances} instances",
                expected="a multiple of the number of instances",
                got=self.replicas,
                hint=f"--replicas {(self.replicas // self.instances + 1) * self.instances}",
            )
        for name in ("timeout_seconds", "grace_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):  # also refuses NaN, which no comparison holds for
                problem = f"{name} must be a finite number of seconds"
                raise ArgumentError(problem, expected="0 or more", got=getattr(self, name))
        if self.only_stdout_from is not None and not 0 <= self.only_stdout_from < self.instances:
            expected = f"0 to {self.instances - 1}"
            problem = "only_stdout_from must be the number of an instance"
            raise ArgumentError(problem, expected=expected, got=self.only_stdout_from)
        Prefix(self.prefix, self.instances)  # refuses unknown names before anything is started


def launch(settings: Launch) -> int:
    """Run instances to their end, in the main thread: only it may set signal handlers.

    Args:
        settings: settings of the run.

    Returns:
        The exit code: 0, or that of the first instance that failed (128 + n if signal n killed it); 124 if one was
        stuck, 128 + n if signal n ended the launcher. No process of any instance's group is left.
    """
    prefix = Prefix(settings.prefix, settings.instances)
    with watching_signals() as signals, _guardian() as guardian, _reserved_port() as port:
        watch = Watch(signals, guardian, settings.timeout_seconds, settings.grace_seconds)
        with watch:
            for index in range(settings.instances):
                is_shown = settings.only_stdout_from in (None, index)
                watch.add(_start(settings, index, port), prefix, is_shown)
            return watch.run()


def _start(settings: Launch, index: int, port: int) -> Instance:
    """Start an instance as the leader of a new session, and so of a new process group."""
    control, instance_end = os.pipe()
    # Closed after the start, so that the end of the instance, which inherits it, closes its last copy.
    with open(instance_end, "wb"):
        process = subprocess.Popen(
            [sys.executable, str(_FOLDER.parent / "instance" / "instance.py"), *settings.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=(instance_end,),
            env={
                "JAX_PLATFORMS": "cpu",  # where IPUs are simulated; several processes cannot share one GPU anyway
                **os.environ,
                **_proxy_exemption(),
                "PYTHONUNBUFFERED": "1",  # into a pipe Python writes blocks: a stuck instance would look silent
                LAUNCHER_PID: str(os.getpid()),
                CONTROL_FD: str(instance_end),
                COORDINATOR: f"127.0.0.1:{port}",
                INSTANCE_INDEX: str(index),
                NUM_INSTANCES: str(settings.instances),
                NUM_REPLICAS: str(settings.replicas),
            },
        )
    return Instance(index, process, open(control, "rb", buffering=0))


def _proxy_exemption() -> dict[str, str]:
    """Return variables that keep gRPC, which connects JAX's processes on this machine, from using a network's proxy."""
    if not any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy") for name in os.environ):
        return {}
    # gRPC reads the first that is set: it has to repeat the exemptions of the user.
    names = ("no_grpc_proxy", "no_proxy", "NO_PROXY")
    exemptions = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return {"no_grpc_proxy": ",".join(filter(None, (exemptions, "127.0.0.1")))}


@contextmanager
def _guardian() -> Iterator[int]:
    """Run the process that ends the instances if this one is killed, and yield the file descriptor of its input."""
    # In a new session, so that a Ctrl-C of the terminal does not reach it.
    command = [sys.executable, "-I", "-S", str(_FOLDER / "guardian.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0) as guardian:
        assert guardian.stdin is not None
        yield guardian.stdin.fileno()


@contextmanager
def _reserved_port() -> Iterator[int]:
    """Yield a local port that the system assigns to no other program, but on which gRPC can listen by SO_REUSEPORT."""
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]
