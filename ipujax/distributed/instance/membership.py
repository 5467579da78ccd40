"""An instance's view of its run: its index, the number of instances, and barriers with the other instances.

Input: environment variables of the launcher. Output: `membership()`, and `meet`, a barrier of all instances before a
joint action, which raises on all of them if their actions or facts differ.

Programs that a script starts inherit its environment, but are not instances: their process number differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NoReturn

import jax

from ipujax.distributed.instance.instance import CONTROL_FD, INSTANCE_PID
from ipujax.runtime.errors import ArgumentError

COORDINATOR = "IPUJAX_COORDINATOR"  # address of JAX's coordinator in instance 0, as "host:port"
INSTANCE_INDEX = "IPUJAX_INSTANCE_INDEX"
NUM_INSTANCES = "IPUJAX_NUM_INSTANCES"
NUM_REPLICAS = "IPUJAX_NUM_REPLICAS"

_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")


@dataclass(frozen=True, slots=True)
class Facts:
    """Descriptions of values that must be equal on all instances.

    Args:
        texts: (place, description) of each value, in the same order on all instances.
        digest: hash of the texts.
    """

    texts: tuple[tuple[str, str], ...]
    digest: str

    @staticmethod
    def of(texts: Iterable[tuple[str, str]]) -> Facts:
        """Return facts of (place, description) pairs."""
        pairs = tuple(texts)
        return Facts(pairs, _digest(pairs))

    def extended(self, texts: Iterable[tuple[str, str]]) -> Facts:
        """Return these facts followed by further ones."""
        pairs = tuple(texts)
        return Facts(self.texts + pairs, _digest((self.digest, pairs)))


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


_NONE = Facts.of(())


@dataclass(frozen=True, slots=True)
class Membership:
    """Position of this process in its run.

    Args:
        instance_index: number of this instance, from 0.
        num_instances: number of instances.
        num_replicas: number of replicas of all instances together.
        coordinator: address of JAX's coordinator.
    """

    instance_index: int = 0
    num_instances: int = 1
    num_replicas: int = 1
    coordinator: str = ""

    @property
    def local_replicas(self) -> int:
        """Number of replicas of this instance."""
        return self.num_replicas // self.num_instances


def membership() -> Membership:
    """Return the membership of this process; a single instance of one replica without `ipujax run`.

    Raises:
        ArgumentError: see `check_alone`.
    """
    check_alone("ipu.distributed")
    return _membership(os.getpid())


def check_alone(who: str) -> None:
    """Refuse a process that `jax.distributed` has joined to others, without `ipujax run`: no replica would meet theirs.

    Args:
        who: name of what communicates between replicas or IPUs.

    Raises:
        ArgumentError: on every such process.
    """
    # 0.1 µs; counting the processes starts JAX's backend, as whatever comes next would.
    if not jax.distributed.is_initialized() or _membership(os.getpid()).num_instances > 1:
        return
    if (count := jax.process_count()) > 1:
        raise ArgumentError(
            f"{who} would compute apart from the other processes of jax.distributed, whose replicas it does not see",
            expected="processes that `ipujax run` starts, or a single one",
            got=f"process {jax.process_index()} of {count}, started otherwise",
            hint=f"ipujax run --instances {count} SCRIPT, without jax.distributed.initialize; a function without"
            " replicas, shardings and ipu.distributed computes in each process by itself",
        )


@cache
def _membership(pid: int) -> Membership:
    if os.environ.get(INSTANCE_PID) != str(pid):
        return Membership()
    index, instances, replicas = (int(os.environ[name]) for name in (INSTANCE_INDEX, NUM_INSTANCES, NUM_REPLICAS))
    return Membership(index, instances, replicas, os.environ[COORDINATOR])


def stable(value: object) -> str:
    """Return the `repr` of a value without addresses, which is equal in every process."""
    return _ADDRESS.sub("0x…", repr(value))


def check_joined(who: str) -> None:
    """Refuse an instance that has not joined its run with `init`; `who` needs all instances."""
    if membership().num_instances > 1 and not jax.distributed.is_initialized():
        problem = f"{who} needs all {membership().num_instances} instances, and this one has not joined them"
        raise ArgumentError(problem, hint="call ipu.distributed.init() first of all, before any array is made")


def meet(action: str, facts: Facts = _NONE, hint: str | None = None) -> None:
    """Wait until every instance is about to start the same joint action.

    Args:
        action: name of the action: "train_step".
        facts: facts that must be equal on all instances.
        hint: remedy for the message if they differ.

    Raises:
        ArgumentError: on every instance, if their actions or facts differ, or one of them has ended.
    """
    if membership().num_instances > 1:
        _connection(os.getpid()).meet(action, facts, hint)


def leave(code: int) -> NoReturn:
    """End this process at once with the exit code of a script that failed."""
    # Instance 0, which has JAX's coordinator, ends after the others: they abort without it.
    if membership().instance_index == 0:
        _connection(os.getpid()).ask({"leaving": code})
    os._exit(code)


@cache
def _connection(pid: int) -> _Connection:
    del pid  # a forked process has no connection
    return _Connection(int(os.environ[CONTROL_FD]))


class _Connection:
    """Connection to the launcher, for one request at a time."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))
        self._replies = self._socket.makefile("rb")
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, object]) -> Mapping[str, Mapping[str, str]]:
        """Send a request and wait for its reply."""
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        reply: Mapping[str, Mapping[str, str]] = json.loads(self._replies.readline() or b'{"lost": {}}')
        return reply

    def meet(self, action: str, facts: Facts, hint: str | None) -> None:
        # Texts of facts are long: they are sent only if the launcher, which compares digests, asks for a report.
        request: dict[str, object] = {"what": action, "digest": facts.digest}
        with self._lock:
            reply = self.ask(request)
            if "report" in reply:
                reply = self.ask({**request, "facts": facts.texts})
        if "lost" in reply:
            raise ArgumentError(f"the launcher has ended: instances cannot start {action} together")
        if "refused" in reply:
            text = dict(reply["refused"])
            hint = text.pop("hint", hint)
            raise ArgumentError(text.pop("what"), **text, hint=hint)
