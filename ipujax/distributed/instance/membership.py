"""An instance's view of its run: its index, the number of instances, and meetings with the others.

Input: what the launcher left in the environment. Output: `membership()`, and `meet`, which returns when all instances
are about to do the same thing together, and raises on all of them if they are not.

Programs that a script starts inherit its environment, but are no instances: their process number differs.
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

COORDINATOR = "IPUJAX_COORDINATOR"  # where instance 0 lets JAX's processes find each other, as "host:port"
INSTANCE_INDEX = "IPUJAX_INSTANCE_INDEX"
NUM_INSTANCES = "IPUJAX_NUM_INSTANCES"
NUM_REPLICAS = "IPUJAX_NUM_REPLICAS"

_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")


@dataclass(frozen=True, slots=True)
class Facts:
    """What must be equal on all instances.

    Args:
        texts: (place, what is there in words), in an order that is the same everywhere.
        digest: equal for equal texts.
    """

    texts: tuple[tuple[str, str], ...]
    digest: str

    @staticmethod
    def of(texts: Iterable[tuple[str, str]]) -> Facts:
        """Facts from their texts."""
        held = tuple(texts)
        return Facts(held, _digest(held))

    def and_more(self, texts: Iterable[tuple[str, str]]) -> Facts:
        """Facts with others after them."""
        more = tuple(texts)
        return Facts(self.texts + more, _digest((self.digest, more)))


def _digest(held: object) -> str:
    return hashlib.blake2b(repr(held).encode(), digest_size=16).hexdigest()


_NONE = Facts.of(())


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of this process in its run.

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
    """The membership of this process; one instance of one replica if `ipujax run` did not start it."""
    return _membership(os.getpid())


@cache
def _membership(pid: int) -> Membership:
    if os.environ.get(INSTANCE_PID) != str(pid):
        return Membership()
    index, instances, replicas = (int(os.environ[name]) for name in (INSTANCE_INDEX, NUM_INSTANCES, NUM_REPLICAS))
    return Membership(index, instances, replicas, os.environ[COORDINATOR])


def stable(value: object) -> str:
    """The `repr` of a value without addresses, equal in every process."""
    return _ADDRESS.sub("0x…", repr(value))


def check_joined(who: str) -> None:
    """Raises where an instance has not joined its run.

    Args:
        who: the function that needs all instances, for the message.

    Raises:
        ArgumentError: if `init` was not called in an instance.
    """
    if membership().num_instances > 1 and not jax.distributed.is_initialized():
        what = f"{who} needs all {membership().num_instances} instances, and this one has not joined them"
        raise ArgumentError(what, hint="call ipu.distributed.init() first of all, before any array is made")


def meet(what: str, facts: Facts = _NONE, hint: str | None = None) -> None:
    """Waits until every instance is about to do the same.

    Args:
        what: name of the joint action: "train_step".
        facts: what must be equal on all instances.
        hint: what to try if they are not.

    Raises:
        ArgumentError: on every instance, if they are about to do different things, disagree on a fact, or one of them
            has ended.
    """
    if membership().num_instances > 1:
        _connection(os.getpid()).meet(what, facts, hint)


def leave(code: int) -> NoReturn:
    """Ends this process at once, or, where JAX's coordinator is, once the others are ended, which abort without it.

    Args:
        code: the exit code of a script that failed.
    """
    if membership().instance_index == 0:
        _connection(os.getpid()).ask({"leaving": code})
    os._exit(code)


@cache
def _connection(pid: int) -> _Connection:
    del pid  # a forked process has no connection
    return _Connection(int(os.environ[CONTROL_FD]))


class _Connection:
    """The connection to the launcher."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))
        self._replies = self._socket.makefile("rb")
        self._one_at_a_time = threading.Lock()

    def ask(self, request: Mapping[str, object]) -> Mapping[str, Mapping[str, str]]:
        """Sends a request and waits for its answer."""
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        reply: Mapping[str, Mapping[str, str]] = json.loads(self._replies.readline() or b'{"lost": {}}')
        return reply

    def meet(self, what: str, facts: Facts, hint: str | None) -> None:
        request: dict[str, object] = {"what": what, "digest": facts.digest}
        with self._one_at_a_time:
            reply = self.ask(request)
            if "report" in reply:
                reply = self.ask({**request, "facts": facts.texts})
        if "lost" in reply:
            raise ArgumentError(f"the launcher is gone, so nobody meets at {what}")
        if "refused" in reply:
            text = dict(reply["refused"])
            hint = text.pop("hint", hint)
            raise ArgumentError(text.pop("what"), **text, hint=hint)
