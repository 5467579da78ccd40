"""An instance's view of the run it belongs to: who it is, how many there are, and meeting the others.

Input: what the launcher left in the environment. Output: `membership()`, and `meet`, which returns when all instances
are about to do the same thing together, and raises on all of them if they are not.

Programs that a script starts inherit its environment, but are no instances: the process number tells.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ipujax.processes.instance import CONTROL_FD, INSTANCE_PID
from ipujax.runtime.errors import ArgumentError

COORDINATOR = "IPUJAX_COORDINATOR"  # where instance 0 lets JAX's processes find each other, as "host:port"
INSTANCE_INDEX = "IPUJAX_INSTANCE_INDEX"
NUM_INSTANCES = "IPUJAX_NUM_INSTANCES"
NUM_REPLICAS = "IPUJAX_NUM_REPLICAS"

Facts = Sequence[tuple[str, str]]  # (place, what must be equal there), in an order that is the same everywhere


@dataclass(frozen=True, slots=True)
class Membership:
    """Who this process is.

    Args:
        instance_index: its number, from 0.
        num_instances: how many there are.
        num_replicas: how many replicas they hold together.
        coordinator: where JAX's processes find each other.
    """

    instance_index: int = 0
    num_instances: int = 1
    num_replicas: int = 1
    coordinator: str = ""

    @property
    def local_replicas(self) -> int:
        """How many replicas this instance holds."""
        return self.num_replicas // self.num_instances


def membership() -> Membership:
    """What the environment says of this process; alone, with one replica, if `ipujax run` did not start it."""
    return _membership(os.getpid())


@cache
def _membership(pid: int) -> Membership:
    if os.environ.get(INSTANCE_PID) != str(pid):
        return Membership()
    index, instances, replicas = (int(os.environ[name]) for name in (INSTANCE_INDEX, NUM_INSTANCES, NUM_REPLICAS))
    return Membership(index, instances, replicas, os.environ[COORDINATOR])


def meet(what: str, facts: Facts = ()) -> None:
    """Waits until every instance is about to do the same.

    Args:
        what: what it is: "train_step".
        facts: what must be equal on all instances.

    Raises:
        ArgumentError: on every instance, if they are about to do different things, disagree on a fact, or one of them
            has ended.
    """
    if membership().num_instances > 1:
        _line(os.getpid()).meet(what, facts)


@cache
def _line(pid: int) -> _Line:
    del pid  # a forked process has no line
    return _Line(int(os.environ[CONTROL_FD]))


class _Line:
    """The line to the launcher."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))
        self._replies = self._socket.makefile("rb")
        self._one_at_a_time = threading.Lock()
        self._sent: set[str] = set()  # digests whose facts the launcher has

    def meet(self, what: str, facts: Facts) -> None:
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
        request: dict[str, object] = {"what": what, "digest": digest}
        with self._one_at_a_time:
            if digest not in self._sent:
                request["facts"] = list(facts)
                self._sent.add(digest)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            reply: Mapping[str, Mapping[str, str]] = json.loads(self._replies.readline() or b'{"lost": {}}')
        if "lost" in reply:
            raise ArgumentError(f"the launcher is gone, so nobody meets at {what}")
        if "refused" in reply:
            text = dict(reply["refused"])
            raise ArgumentError(text.pop("what"), **text)
