"""The event loop of the launcher: runs until all instances have ended, and ends all when one fails.

One thread waits for the next event: output, a message of an instance, the end of a process, a signal, a timeout.
Ending an instance ends its process group. Signs of life are output, messages before what all instances do together, and
the end of the script; an instance that gives none for too long is stuck, and so are those that wait for it.

Limits: a process that leaves its instance's group (a daemon) is not ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, Self, cast

from ipujax.distributed.launcher.started import Instance, Relay

TIMED_OUT = 124  # as `timeout` of the GNU coreutils
_STACKS_SECONDS = 1.0  # assumed: long enough for stuck instances to print where they are
_HELD_UP_SECONDS = 1.0  # assumed: longer than an iteration of the loop takes on a busy machine
_DRAIN_SECONDS = 1.0  # assumed: for remaining output in pipes that a daemon of the script keeps open
_FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}  # signal to instances


@contextmanager
def watching_signals() -> Iterator[socket.socket]:
    """Yield a socket that receives the numbers of signals: those that end the launcher, and SIGCHLD."""
    # A wakeup descriptor makes a signal an event of the selector; Python writes to it for signals with a handler only.
    read, write = socket.socketpair()
    read.setblocking(False)
    write.setblocking(False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGCHLD, *_FORWARDED)}
    previous_fd = signal.set_wakeup_fd(write.fileno())
    try:
        yield read
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        read.close()
        write.close()


class Watch:
    """The event loop over running instances. As a context manager it ends those that still run.

    Args:
        signals: receives the numbers of signals.
        guardian: file descriptor of the guardian's input.
        timeout_seconds: upper bound of time without a sign of life of an instance; 0 for none.
        grace_seconds: time between the signal to end and the kill.
    """

    def __init__(self, signals: socket.socket, guardian: int, timeout_seconds: float, grace_seconds: float) -> None:
        self._guardian = guardian
        self._timeout = timeout_seconds
        self._grace = grace_seconds
        self._instances: list[Instance] = []
        self._code: int | None = None  # exit code of the run, once an instance failed or a signal came
        self._first_failure: tuple[Instance, str, int] | None = None  # instance, reason and exit code
        self._exiting: Instance | None = None  # the first failure, while its exit handlers run
        self._leaving: Instance | None = None  # the first failure, after its exit handlers
        self._end_at: float | None = None  # time of SIGTERM to all
        self._kill_at: float | None = None  # time of SIGKILL to all
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ, partial(self._on_signals, signals))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for instance in self._running():
            instance.end()
        self._selector.close()
        for instance in self._instances:
            instance.control.close()
            for relay in instance.relays:
                relay.close()

    def add(self, instance: Instance, prefix: Callable[[int, str], bytes], is_stdout_shown: bool) -> None:
        """Watch a started instance; `prefix(index, stream)` returns the text before a line of its "out" or "err"."""
        self._notify_guardian(b"+", instance)  # first: an instance that the guardian does not know could survive
        self._instances.append(instance)
        self._selector.register(instance.control, selectors.EVENT_READ, partial(self._on_control, instance))
        streams = ((instance.process.stdout, "out", sys.stdout), (instance.process.stderr, "err", sys.stderr))
        for stream, name, sink in streams:
            # Hidden output is read all the same: a full pipe would stop its instance.
            show = partial(self._show, sink) if name == "err" or is_stdout_shown else lambda text: None
            relay = Relay(cast(BinaryIO, stream), partial(prefix, instance.index, name), show)
            instance.relays.append(relay)
            self._selector.register(relay, selectors.EVENT_READ, partial(self._on_output, instance, relay))

    def run(self) -> int:
        """Handle events until all instances have ended, and return the exit code of the run."""
        while self._running():
            self._handle_events(self._timeout_seconds())
            for instance in self._running():
                if instance.has_ended():
                    self._reap(instance)
            self._check_time(time.monotonic())
        end = time.monotonic() + _DRAIN_SECONDS
        while any(relay.is_open for i in self._instances for relay in i.relays) and time.monotonic() < end:
            for key, _ in self._selector.select(end - time.monotonic()):
                key.data()
        return self._code or 0

    def _handle_events(self, timeout: float | None) -> None:
        """Handle the next events. After a delay of the launcher itself the silence of instances is counted again."""
        start = time.monotonic()
        ready = self._selector.select(timeout)
        selected = time.monotonic()
        for key, _ in ready:
            key.data()  # may block, on the reader of the output for example
        now = time.monotonic()
        was_suspended = timeout is not None and selected - start > timeout + _HELD_UP_SECONDS
        for instance in self._instances if was_suspended or now - selected > _HELD_UP_SECONDS else ():
            instance.last_sign_at = now

    def _running(self) -> list[Instance]:
        return [instance for instance in self._instances if not instance.is_reaped]

    # --- deadlines ---

    def _timeout_seconds(self) -> float | None:
        """Return the seconds until the next deadline; None for none."""
        times = [at for at in (self._kill_at, self._end_of_silence(), self._end_at) if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _end_of_silence(self) -> float | None:
        """Return the time at which an instance has been silent for too long; None for no limit."""
        if self._code is not None or not self._timeout:
            return None
        scripts = [instance.last_sign_at for instance in self._running() if instance.script_code is None]
        # Without a running script, processes wait for one another to end: the latest sign counts for all.
        return (min(scripts) if scripts else max(i.last_sign_at for i in self._instances)) + self._timeout

    def _check_time(self, now: float) -> None:
        silence = self._end_of_silence()
        if silence is not None and now >= silence:
            self._report_silence(now)
            self._code = TIMED_OUT
            self._end_at = now + _STACKS_SECONDS
            # Instances print their stacks at SIGUSR1; processes that they started would die of it.
            for instance in self._instances:
                instance.send(signal.SIGUSR1, whole_group=False)
        if self._end_at is not None and now >= self._end_at:
            self._report_failure()
            self._end_all(signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for instance in self._instances:
                instance.send(signal.SIGKILL)

    def _report_silence(self, now: float) -> None:
        """Print the last sign of life of each instance."""
        self._report(f"an instance gave no sign of life for {self._timeout:g} seconds; ending all")
        for instance in self._instances:
            seconds = f"{now - instance.last_sign_at:.1f} seconds"
            self._report(f"  instance {instance.index}: last sign of life {seconds} ago: {instance.last_sign}")

    # --- events ---

    def _on_signals(self, signals: socket.socket) -> None:
        for number in signals.recv(4096):
            if number not in _FORWARDED:
                continue
            if self._code is not None:  # a second Ctrl-C: kill at once
                self._end_at = None
                self._kill_at = time.monotonic()
            name = signal.Signals(number).name
            self._end_run(128 + number, f"received {name}; ending all", _FORWARDED[signal.Signals(number)])

    def _on_output(self, instance: Instance, relay: Relay) -> bool:
        """Show a piece of output, and return whether there was one."""
        if not relay.is_open:  # read to its end after the selector returned it
            return False
        fileno = relay.fileno()
        has_read = relay.read()
        if has_read:
            instance.last_sign_at = time.monotonic()
            instance.last_sign = "output"
        if not relay.is_open:
            self._selector.unregister(fileno)
        return has_read

    def _on_control(self, instance: Instance) -> None:
        """Handle messages of an instance, or the end of its pipe, which its own end closes."""
        piece = os.read(instance.control.fileno(), 1 << 16)
        if not piece:
            self._selector.unregister(instance.control)
        for line in instance.messages.add(piece):
            message = json.loads(line)
            instance.last_sign_at = time.monotonic()
            if "ended" in message:
                self._on_script_end(instance, message["ended"])
            elif "leaving" in message:  # instance 0: others abort without its coordinator, so it ends last
                self._leaving = instance
                if self._kill_at is None:
                    self._end_all(signal.SIGTERM)
            else:
                instance.last_sign = f"it came to {message['what']}, together with the others"

    def _on_script_end(self, instance: Instance, code: int) -> None:
        """Record the end of a script, whose process may still run exit handlers."""
        instance.script_code = code
        instance.last_sign = "the end of the script"
        if code:
            self._record_failure(instance, f"failed with exit code {code}", code)

    def _reap(self, instance: Instance) -> None:
        """Wait for a process that has ended, kill the rest of its group, and record a failure."""
        instance.end()
        instance.last_sign_at = time.monotonic()
        self._notify_guardian(b"-", instance)
        status = instance.process.returncode
        if status < 0:
            name = signal.Signals(-status).name
            self._record_failure(instance, f"was killed by signal {-status} ({name})", 128 - status)
        elif status and not instance.script_code:
            self._record_failure(instance, f"ended with exit code {status}", status)
        elif instance.script_code is None:
            self._on_script_end(instance, 0)  # by `os._exit`, which runs no exit handlers
        if not any(other.is_dying() for other in self._instances):
            self._report_failure()
        if self._exiting is not None and self._exiting.is_reaped:
            self._end_all(signal.SIGTERM)
        if self._leaving is not None and self._running() == [self._leaving]:
            self._leaving.send(signal.SIGKILL)

    # --- ending ---

    def _record_failure(self, instance: Instance, reason: str, code: int) -> None:
        """Record the first failure, which ends all other instances once its exit handlers have run."""
        # A killed instance makes others fail, and their reports may arrive before its end: it takes precedence.
        if self._code is not None:
            return
        if self._first_failure is None or (
            self._first_failure[0].script_code is not None and instance.script_code is None
        ):
            self._first_failure = instance, reason, code
            self._end_at = time.monotonic() + self._grace
        # While another instance dies, it may be the one that was killed first.
        if not any(other.is_dying() for other in self._instances if other is not self._first_failure[0]):
            self._report_failure()

    def _report_failure(self) -> None:
        """Report the first failure, after the output of its instance."""
        if self._code is None and self._first_failure is not None:
            instance, reason, self._code = self._first_failure
            for relay in instance.relays:
                while self._on_output(instance, relay):
                    pass
            running = [str(other.index) for other in self._running() if other is not instance]
            ending = f"; ending instance{'s' * (len(running) > 1)} {', '.join(running)}" if running else ""
            self._report(f"instance {instance.index} {reason}{ending}")
            self._exiting = instance

    def _end_run(self, code: int, reason: str, number: signal.Signals) -> None:
        """End all instances; a later reason is not reported."""
        if self._code is None:
            self._code = code
            self._report(reason)
            self._end_all(number)

    def _end_all(self, number: signal.Signals) -> None:
        self._exiting = self._end_at = None
        for instance in reversed(self._instances):  # JAX's coordinator runs in the first: it goes last
            if instance is not self._leaving:
                instance.send(number)
        self._kill_at = time.monotonic() + self._grace

    def _notify_guardian(self, sign: bytes, instance: Instance) -> None:
        with contextlib.suppress(BrokenPipeError):  # the guardian was killed; instances still end with their launcher
            os.write(self._guardian, b"%b%d\n" % (sign, instance.process.pid))

    # --- output ---

    def _show(self, sink: Any, text: bytes) -> None:
        # As bytes: lines of instances need not be valid text.
        try:
            sink.flush()
            sink.buffer.write(text)
            sink.buffer.flush()
        except BrokenPipeError:  # the reader has ended, as after `| head`
            with open(os.devnull, "wb") as null_device:
                os.dup2(null_device.fileno(), sink.fileno())  # else Python fails when it flushes at exit
            self._end_run(128 + signal.SIGPIPE, "nobody reads the output any more; ending all", signal.SIGTERM)

    def _report(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(f"ipujax run: {text}", file=sys.stderr, flush=True)
