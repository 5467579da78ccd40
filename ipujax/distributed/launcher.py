"""`ipujax run`: starts the instances of a run on this machine, shows their output, and ends all when one fails.

Input: `Launch`. Output: the exit code. A thread follows each pipe and each process; the main thread handles their
events, signals and timeouts. Ending an instance ends its process group. If the launcher is killed, a guardian in each
group does, whose pipe from the launcher then ends.

Limits: a process that leaves its instance's group (a daemon) is not ended. Text without an end of line is shown when
its line, or its process, ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from threading import Lock, Thread
from typing import Any

from ipujax.distributed.instance import membership
from ipujax.runtime.errors import ArgumentError

DEFAULT_PREFIX = "[{instance}] "
_TIMED_OUT = 124  # as `timeout` of the GNU coreutils
_OTHERS_SECONDS = 1.0  # assumed: for the others to say why they fail too
_DRAIN_SECONDS = 1.0  # assumed: for remaining output in a pipe that a daemon of the script keeps open
_PIPE_BYTES = 1 << 16
# Signal to the launcher → signal to instances.
_FORWARDED = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
# Starts a guardian as nobody's child, which kills the process group when standard input ends; becomes the instance.
_GUARDED = """
exec 3<&0 </dev/null
((trap '' INT TERM HUP; read -r _ <&3; kill -9 0) >/dev/null 2>&1 &)
exec "$@" 3<&-
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings of a run; numbers are in range, see the command `run`.

    Args:
        command: a script and its arguments, or "-m", a module and its arguments.
        instances: number of processes that run it.
        replicas: number of replicas of all instances, a multiple of `instances`.
        timeout_seconds: time without a sign of life of one instance after which all are ended; 0 for no limit.
        grace_seconds: time between the signal to end and the kill.
        prefix: text before each line; may name {instance}, {instances}, {stream} ("out" or "err") and {time}.
        only_stdout_from: instance whose standard output is shown; all when None. Standard errors are always shown.

    Raises:
        ArgumentError: `replicas` is not a multiple of `instances`, `only_stdout_from` is none of them, or the prefix
            has unknown names.
    """

    command: tuple[str, ...]
    instances: int
    replicas: int
    timeout_seconds: float = 600.0
    grace_seconds: float = 3.0
    prefix: str = DEFAULT_PREFIX
    only_stdout_from: int | None = None

    def __post_init__(self) -> None:
        if self.replicas % self.instances:
            raise ArgumentError(
                f"{self.replicas} replicas cannot be shared equally by {self.instances} instances",
                expected="a multiple of the number of instances",
                got=self.replicas,
                hint=f"--replicas {(self.replicas // self.instances + 1) * self.instances}",
            )
        if self.only_stdout_from not in (None, *range(self.instances)):
            problem = "only_stdout_from must be the number of an instance"
            raise ArgumentError(problem, expected=f"0 to {self.instances - 1}", got=self.only_stdout_from)
        try:
            self.prefix_of(0, "out")
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            problem = f"the prefix {self.prefix!r} cannot be filled in"
            got = f"{type(error).__name__}: {error}"
            raise ArgumentError(problem, expected="{instance}, {instances}, {stream} or {time}", got=got) from None

    def prefix_of(self, instance: int, stream: str) -> bytes:
        """Return the text before a line that an instance writes now."""
        now = time.strftime("%H:%M:%S")
        text = self.prefix.format(instance=instance, instances=self.instances, stream=stream, time=now)
        return text.encode(errors="surrogateescape")


def launch(settings: Launch) -> int:
    """Run instances to their end, in the main thread: only it may set signal handlers.

    Returns:
        The exit code: 0, or that of the first instance that failed (128 + n if signal n killed it); 124 if one was
        stuck, 128 + n if signal n ended the launcher. No process of any instance's group is left.
    """
    run = _Run(settings)
    handlers = {number: signal.signal(number, run.on_signal) for number in _FORWARDED}
    try:
        return run.run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@dataclass(eq=False, slots=True)
class _Instance:
    """A started process, leader of its group; the threads that read from it; what it was last known to do."""

    index: int
    process: subprocess.Popen[bytes]
    relays: tuple[Thread, ...] = ()
    last_sign: str = "its start"
    silent_seconds: float = 0.0

    def send(self, number: int) -> None:
        # Others that it started would die of the signal at which Python prints its stack.
        send = os.kill if number == signal.SIGABRT else os.killpg
        with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, for a zombie
            send(self.process.pid, number)


class _Run:
    """The event loop over running instances."""

    def __init__(self, settings: Launch) -> None:
        self._settings = settings
        # An instance that has ended; or exit code, text and signal of another reason to end all.
        self._events: queue.SimpleQueue[_Instance | tuple[int, str, int]] = queue.SimpleQueue()
        self._showing = Lock()
        self._running: list[_Instance] = []
        self._code: int | None = None  # exit code of the run, once all must end
        self._steps: list[tuple[float, int]] = []  # times of signals to all

    def on_signal(self, number: int, _: object) -> None:
        """Handle a signal to the launcher."""
        name = signal.Signals(number)
        self._events.put((128 + number, f"received {name.name}; ending all", _FORWARDED[name]))

    def run(self) -> int:
        """Start all instances, and return the exit code when they have ended."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        # Nobody writes to it: it ends with the launcher.
        life, life_end = os.pipe()
        try:
            for index in range(self._settings.instances):
                self._start(index, port, life)
            os.close(life)
            while self._running:
                self._handle_event()
        finally:
            for instance in self._running:
                instance.send(signal.SIGKILL)
            os.close(life_end)
        return self._code or 0

    def _start(self, index: int, port: int, life: int) -> None:
        """Start an instance as the leader of a new session, and so of a process group, whose guardian reads `life`."""
        signs, sign_end = os.pipe()
        variables = {
            "PYTHONUNBUFFERED": "1",  # into a pipe Python writes blocks: a stuck instance would look silent
            "PYTHONFAULTHANDLER": "1",  # prints the stack at SIGABRT
            # gRPC, which connects JAX's processes on this machine, must not use a network's proxy.
            "no_grpc_proxy": f"{os.environ.get('no_proxy', '')},127.0.0.1",
            membership.LAUNCHER_PID: str(os.getpid()),
            membership.SIGN_FD: str(sign_end),
            membership.HOST: "127.0.0.1",
            membership.PORT: str(port),
            membership.INSTANCE_INDEX: str(index),
            membership.NUM_INSTANCES: str(self._settings.instances),
            membership.NUM_REPLICAS: str(self._settings.replicas),
        }
        process = subprocess.Popen(
            ["sh", "-c", _GUARDED, "sh", sys.executable, *self._settings.command],
            stdin=life,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(sign_end,),
            # Where IPUs are simulated, several processes cannot share one GPU.
            env={"JAX_PLATFORMS": "cpu", **os.environ, **variables},
        )
        os.close(sign_end)
        instance = _Instance(index, process)
        self._running.append(instance)
        streams = ((process.stdout, "out"), (process.stderr, "err"), (os.fdopen(signs, "rb"), "sign"))
        instance.relays = tuple(Thread(target=self._relay, args=(instance, *each), daemon=True) for each in streams)
        for thread in (*instance.relays, Thread(target=self._wait, args=(instance,), daemon=True)):
            thread.start()

    def _wait(self, instance: _Instance) -> None:
        instance.process.wait()
        self._events.put(instance)

    def _relay(self, instance: _Instance, stream: Any, name: str) -> None:
        """Show the lines of a stream; those of signs say what an instance does together with the others."""
        # Hidden output is read all the same: a full pipe would stop its instance.
        is_shown = name == "err" or (name == "out" and self._settings.only_stdout_from in (None, instance.index))
        with stream:
            for lines in whole_lines(iter(lambda: os.read(stream.fileno(), _PIPE_BYTES), b"")):
                instance.silent_seconds = 0.0
                instance.last_sign = f"it came to {lines[-1].decode().strip()}" if name == "sign" else "output"
                if is_shown:
                    prefix = self._settings.prefix_of(instance.index, name)
                    self._show(sys.stdout if name == "out" else sys.stderr, b"".join(prefix + line for line in lines))

    def _show(self, sink: Any, text: bytes) -> None:
        """Write output of an instance to the launcher's own; where nobody reads that, end all instances."""
        with self._showing:
            try:
                sink.flush()
                sink.buffer.write(text)  # as bytes: lines of instances need not be valid text
                sink.buffer.flush()
            except BrokenPipeError:  # the reader has ended, as after `| head`
                with open(os.devnull, "wb") as null_device:
                    os.dup2(null_device.fileno(), sink.fileno())  # else Python fails when it flushes at exit
                reason = "nobody reads the output any more; ending all"
                self._events.put((128 + signal.SIGPIPE, reason, signal.SIGTERM))

    def _handle_event(self) -> None:
        """Handle the next event: the end of an instance, a reason to end all, silence, a signal to send."""
        # Waits no longer than to the next signal that is due.
        timeout_seconds = self._settings.timeout_seconds
        tick_seconds = max(0.1, timeout_seconds / 100)
        due = min((at for at, _ in self._steps), default=inf)
        try:
            event = self._events.get(timeout=max(0.0, min(tick_seconds, due - time.monotonic())))
        except queue.Empty:
            # Counted in ticks: neither the time in which the launcher is stopped, nor that of a slow reader.
            for each in self._running:
                each.silent_seconds += 0.0 if self._showing.locked() else tick_seconds
            silent = [each for each in self._running if each.silent_seconds > timeout_seconds > 0]
            if silent and self._code is None:
                who = ", ".join(str(each.index) for each in silent)
                self._report(f"no sign of life for {timeout_seconds:g} seconds of instance {who}; ending all")
                for each in self._running:
                    self._report(f"  instance {each.index}: last sign of life: {each.last_sign}")
                self._end(_TIMED_OUT, signal.SIGABRT)
        else:
            if isinstance(event, _Instance):
                self._reap(event)
            elif self._code is None:
                code, text, number = event
                self._report(text)
                self._end(code, number)
            else:  # a second Ctrl-C: kill at once
                self._steps = [(0.0, signal.SIGKILL)]
        for step in [step for step in self._steps if step[0] <= time.monotonic()]:
            self._steps.remove(step)
            for instance in reversed(self._running):  # JAX's coordinator runs in the first: it goes last
                instance.send(step[1])

    def _reap(self, instance: _Instance) -> None:
        """Kill the rest of the group of a process that has ended; the first that fails ends all."""
        instance.send(signal.SIGKILL)
        self._running.remove(instance)
        # The reason comes after the last words of the instance.
        for relay in instance.relays:
            relay.join(_DRAIN_SECONDS)
        status = instance.process.returncode
        if status and self._code is None:
            is_killed = f"was killed by signal {-status} ({signal.Signals(-status).name})" if status < 0 else ""
            running = ", ".join(str(other.index) for other in self._running)
            ending = f"; ending instance{'s' * (len(self._running) > 1)} {running}" if running else ""
            self._report(f"instance {instance.index} {is_killed or f'failed with exit code {status}'}{ending}")
            self._end(status if status > 0 else 128 - status, signal.SIGTERM, _OTHERS_SECONDS)

    def _end(self, code: int, number: int, after_seconds: float = 0.0) -> None:
        self._code = code
        at = time.monotonic() + after_seconds
        self._steps = [(at, number), (at + self._settings.grace_seconds, signal.SIGKILL)]

    def _report(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(f"ipujax run: {text}", file=sys.stderr, flush=True)


def whole_lines(pieces: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yield the lines that each piece of output completes, with their ends; a carriage return ends a line too."""
    rest = b""
    for piece in pieces:
        lines = (rest + piece).splitlines(keepends=True)
        if len(lines[-1]) >= _PIPE_BYTES and not lines[-1].endswith(b"\n"):
            lines[-1] += b"\n"
        rest = b"" if lines[-1].endswith(b"\n") else lines.pop()  # a "\r" at the end may be half of "\r\n"
        if lines:
            yield lines
    if rest:
        yield [rest if rest.endswith(b"\r") else rest + b"\n"]
