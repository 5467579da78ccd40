"""The event loop of the launcher: runs until all instances have ended, and ends all when one fails.

One thread waits for the next event: output, a request of an instance (`meeting.py`), the end of a process, a signal, a
timeout. Ending an instance ends its process group. Signs of life are output, requests and the end of the script; an
instance that gives none for too long is stuck, and so are those that wait for it.

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

from ipujax.distributed.launcher.meeting import Meetings, Replies, named
from ipujax.distributed.launcher.output import Relay
from ipujax.distributed.launcher.started import Instance

TIMED_OUT = 124  # as `timeout` of the GNU coreutils
_STACKS_SECONDS = 1.0  # assumed: long enough for stuck instances to print where they are
_HELD_UP_SECONDS = 1.0  # assumed: longer than an iteration of the loop takes on a busy machine
_DRAIN_SECONDS = 1.0  # assumed: for what is left in pipes that a daemon of the script keeps open
_ENDS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}  # sent on as


@contextmanager
def watching_signals() -> Iterator[socket.socket]:
    """A socket that receives the numbers of signals: those that end the launcher, and SIGCHLD."""
    read, write = socket.socketpair()
    read.setblocking(False)
    write.setblocking(False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGCHLD, *_ENDS)}
    before = signal.set_wakeup_fd(write.fileno())
    try:
        yield read
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        read.close()
        write.close()


class Watch:
    """The event loop over running instances. As a context manager, it leaves none behind.

    Args:
        signals: receives the numbers of signals.
        guardian: file descriptor of the guardian's input.
        instances: number of instances of the run.
        timeout_seconds: how long an instance may give no sign of life; 0 for ever.
        grace_seconds: time between the signal to end and the kill.
    """

    def __init__(
        self, signals: socket.socket, guardian: int, instances: int, timeout_seconds: float, grace_seconds: float
    ) -> None:
        self._signals, self._guardian = signals, guardian
        self._timeout, self._grace = timeout_seconds, grace_seconds
        self._meetings = Meetings(instances)
        self._instances: list[Instance] = []
        self._code: int | None = None  # of the run, once something went wrong
        self._blamed: tuple[Instance, str, int] | None = None  # the first that failed, how, and its exit code
        self._failing: Instance | None = None  # the same, as long as it does what it does at exit
        self._leaving: Instance | None = None  # the same, when that is done
        self._end_at: float | None = None
        self._kill_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ, self._on_signals)

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
        """Adds an instance that was just started.

        Args:
            instance: the process.
            prefix: makes the text before a line of an instance's "out" or "err".
            is_stdout_shown: whether its standard output is shown; its errors are.
        """
        self._notify_guardian(b"+", instance)
        self._instances.append(instance)
        self._selector.register(instance.control, selectors.EVENT_READ, partial(self._on_control, instance))
        streams = ((instance.process.stdout, "out", sys.stdout), (instance.process.stderr, "err", sys.stderr))
        for stream, name, sink in streams:
            show = partial(self._show, sink) if name == "err" or is_stdout_shown else lambda text: None
            relay = Relay(cast(BinaryIO, stream), partial(prefix, instance.index, name), show)
            instance.relays.append(relay)
            self._selector.register(relay, selectors.EVENT_READ, partial(self._on_output, instance, relay))

    def run(self) -> int:
        """Handles events until no instance is left; the exit code of the run."""
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
        """Handles the next events. If the launcher itself was held up, silence of instances is counted anew."""
        start = time.monotonic()
        ready = self._selector.select(timeout)
        selected = time.monotonic()
        for key, _ in ready:
            key.data()  # may block: on the reader of the output, say
        now = time.monotonic()
        was_stopped = timeout is not None and selected - start > timeout + _HELD_UP_SECONDS
        for instance in self._instances if was_stopped or now - selected > _HELD_UP_SECONDS else ():
            instance.last_sign = now

    def _running(self) -> list[Instance]:
        return [instance for instance in self._instances if not instance.is_reaped]

    # --- time ---

    def _timeout_seconds(self) -> float | None:
        """Seconds until the next deadline; None if there is none."""
        times = [at for at in (self._kill_at, self._end_of_silence(), self._end_at) if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _end_of_silence(self) -> float | None:
        """When an instance will have been silent for too long; all of them, where scripts are over and wait to end."""
        if self._code is not None or not self._timeout:
            return None
        scripts = [instance.last_sign for instance in self._running() if instance.ended is None]
        return (min(scripts) if scripts else max(i.last_sign for i in self._instances)) + self._timeout

    def _check_time(self, now: float) -> None:
        silence = self._end_of_silence()
        if silence is not None and now >= silence:
            self._report_silence(now)
            self._code, self._end_at = TIMED_OUT, now + _STACKS_SECONDS  # they say where they are until then
            for instance in self._instances:
                instance.send(signal.SIGUSR1, whole_group=False)
        if self._end_at is not None and now >= self._end_at:
            self._blame()
            self._end_all(signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for instance in self._instances:
                instance.send(signal.SIGKILL)

    def _report_silence(self, now: float) -> None:
        """Prints which instances gave no sign of life, and which wait for which."""
        waiting = self._meetings.waiting()
        absent = [instance.index for instance in self._instances if instance.index not in waiting]
        self._report(f"an instance gave no sign of life for {self._timeout:g} seconds; ending all")
        for instance in self._instances:
            seconds = f"{now - instance.last_sign:.1f} seconds"
            if instance.index in waiting:
                text = f"has waited for {seconds} at {waiting[instance.index]} for {named(absent)}"
            else:
                text = f"last sign of life {seconds} ago: {instance.sign}"
            self._report(f"  instance {instance.index}: {text}")

    # --- what happens ---

    def _on_signals(self) -> None:
        for number in self._signals.recv(4096):
            if number not in _ENDS:
                continue
            if self._code is not None:  # asked once more: now
                self._end_at, self._kill_at = None, time.monotonic()
            name = signal.Signals(number).name
            self._fail(128 + number, f"received {name}; ending all", _ENDS[signal.Signals(number)])

    def _on_output(self, instance: Instance, relay: Relay) -> bool:
        """Output has come: shows it; whether there was some."""
        if not relay.is_open:  # read to its end since the selector named it
            return False
        fileno = relay.fileno()
        has_read = relay.read()
        if has_read:
            instance.last_sign, instance.sign = time.monotonic(), "output"
        if not relay.is_open:
            self._selector.unregister(fileno)
        return has_read

    def _on_control(self, instance: Instance) -> None:
        """An instance sent a message, or closed its socket by ending."""
        try:
            piece = instance.control.recv(1 << 16)
        except ConnectionError:
            piece = b""
        if not piece:
            self._selector.unregister(instance.control)
        for line in instance.said.add(piece):
            message = json.loads(line)
            instance.last_sign = time.monotonic()
            if "ended" in message:
                self._on_ended(instance, message["ended"])
            elif "leaving" in message:  # it waits for the others to be gone
                self._leaving = instance
                if self._kill_at is None:
                    self._end_all(signal.SIGTERM)
            else:
                instance.sign = f"{message['what']}, together with the others"
                self._answer(self._meetings.arrive(instance.index, message))

    def _on_ended(self, instance: Instance, code: int) -> None:
        """A script is over, though its process may still have something to do."""
        instance.ended, instance.sign = code, "the end of the script"
        if code:
            self._failed(instance, f"failed with exit code {code}", code)
        else:
            self._answer(self._meetings.end(instance.index))

    def _answer(self, replies: Replies) -> None:
        for index, reply in replies.items():
            self._instances[index].last_sign = time.monotonic()
            with contextlib.suppress(ConnectionError):  # it died while it waited, which `_reap` reports
                self._instances[index].control.sendall(json.dumps(reply).encode() + b"\n")

    def _reap(self, instance: Instance) -> None:
        """A process has ended: whatever is left of its group goes too."""
        instance.end()
        instance.last_sign = time.monotonic()
        self._notify_guardian(b"-", instance)
        status = instance.process.returncode
        if status < 0:
            name = signal.Signals(-status).name
            self._failed(instance, f"was killed by signal {-status} ({name})", 128 - status)
        elif status and not instance.ended:
            self._failed(instance, f"ended with exit code {status}", status)
        elif instance.ended is None:
            self._on_ended(instance, 0)  # by `os._exit`
        if not any(other.is_dying() for other in self._instances):
            self._blame()
        if self._failing is not None and self._failing.is_reaped:
            self._end_all(signal.SIGTERM)
        if self._leaving is not None and self._running() == [self._leaving]:
            self._answer({self._leaving.index: {"go": True}})

    # --- ending ---

    def _failed(self, instance: Instance, how: str, code: int) -> None:
        """The first instance that fails ends all others, once it has done what it does at its exit.

        One that is killed makes others fail, whose reports may be here before its end is: it goes before those.
        """
        if self._code is not None:
            return
        if self._blamed is None or (self._blamed[0].ended is not None and instance.ended is None):
            self._blamed, self._end_at = (instance, how, code), time.monotonic() + self._grace
        if not any(other.is_dying() for other in self._instances if other is not self._blamed[0]):
            self._blame()

    def _blame(self) -> None:
        """Reports the instance that failed first, once that is known."""
        if self._code is None and self._blamed is not None:
            instance, how, self._code = self._blamed
            for relay in instance.relays:
                while self._on_output(instance, relay):
                    pass
            others = [other.index for other in self._running() if other is not instance]
            self._report(f"instance {instance.index} {how}" + (f"; ending {named(others)}" if others else ""))
            self._failing = instance

    def _fail(self, code: int, why: str, number: signal.Signals) -> None:
        """Ends all; only the first reason is reported."""
        if self._code is None:
            self._code = code
            self._report(why)
            self._end_all(number)

    def _end_all(self, number: signal.Signals) -> None:
        self._failing = self._end_at = None
        for instance in reversed(self._instances):  # JAX's coordinator, in the first, last
            if instance is not self._leaving:
                instance.send(number)
        self._kill_at = time.monotonic() + self._grace

    def _notify_guardian(self, sign: bytes, instance: Instance) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody killed it; instances still die with their launcher
            os.write(self._guardian, b"%b%d\n" % (sign, instance.process.pid))

    # --- showing ---

    def _show(self, sink: Any, text: bytes) -> None:
        try:
            sink.flush()
            sink.buffer.write(text)
            sink.buffer.flush()
        except BrokenPipeError:  # whoever read this is gone, as after `| head`
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sink.fileno())
            self._fail(128 + signal.SIGPIPE, "nobody reads the output any more; ending all", signal.SIGTERM)

    def _report(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            print(f"ipujax run: {text}", file=sys.stderr, flush=True)
