"""Agreement of all processes of a job, before each joint action, and processes that are lost.

A collective between processes that disagree hangs, mixes up bytes or aborts. So each joint action begins with a
collective of fixed size: a digest of its name and of values that must be equal. Where digests differ, all gather the
texts, padded to one length, and raise the same error. The end of the script is such an action too: who ends early is
named.

A process that waits for one that has died gets an error of gloo, which names no process. Process 0 therefore holds a
connection to each other one, which ends with it, and tells the others who was lost first.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import select
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Thread

import jax
import numpy as np

from ipujax.distributed.instance.membership import (
    SIGN_FD,
    exit_codes,
    is_instance,
    leave_at_once,
    leave_if_failed,
    membership,
)
from ipujax.distributed.instance.process_arrays import gathered
from ipujax.runtime.errors import ArgumentError

_NOTHING = "nothing"  # text of a place that only other processes have
_NEWS_SECONDS = 1.0  # assumed: for the news of a process that has ended
_MEETING_SECONDS = 60.0  # assumed: for connections to process 0, when all have come
_FAILURES = "Gloo", "coordination", "UNAVAILABLE", "Connection"  # words in errors of JAX about other processes
_END = "the end of the script"
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")
_SETTINGS = "enable_x64", "default_matmul_precision", "default_prng_impl", "numpy_dtype_promotion"  # of JAX


def stable(value: object) -> str:
    """Return the `repr` of a value without addresses, which is equal in every process."""
    return _ADDRESS.sub("0x…", repr(value))


Texts = Iterable[tuple[str, str]]


def agree(action: str, equal: Texts = (), hint: str | None = None, texts: Callable[[], Texts] | None = None) -> None:
    """Wait until every process is about to start the same joint action.

    Args:
        action: name of the action: "train_step".
        equal: (place, description) of each value that must be equal on all processes, in the same order.
        hint: remedy for the message if they differ.
        texts: descriptions to compare in their place where they differ.

    Raises:
        ArgumentError: on every process, if their actions or values differ, or one of them has ended.
    """
    if membership().num_instances > 1:
        _news(os.getpid())
        _compare(action, equal, hint, texts)


def _compare(action: str, equal: Texts, hint: str | None = None, texts: Callable[[], Texts] | None = None) -> None:
    """Compare digests of an action on all processes, and its texts if they differ."""
    exit_codes().clear()  # an exit before this was caught
    if is_instance():
        with contextlib.suppress(OSError):  # the launcher is gone: so is this process soon
            os.write(int(os.environ[SIGN_FD]), action.encode() + b"\n")
    described = [("", action), *equal]
    with naming_lost(action):
        digest = np.frombuffer(hashlib.blake2b(repr(described).encode(), digest_size=16).digest(), np.uint8)
        if (np.asarray(gathered(digest)) == digest).all():
            return
        of_all = _gathered_texts(described if texts is None else [("", action), *texts()])
    if any(process != of_all[0] for process in of_all):
        problem = difference(of_all)
        raise ArgumentError(problem.pop("what"), **{"hint": hint, **problem})


def _gathered_texts(texts: Sequence[tuple[str, str]]) -> list[Mapping[str, str]]:
    """Return the texts of all processes by place; gloo aborts where arrays differ in size."""
    data = np.frombuffer(json.dumps(texts).encode(), np.uint8)
    sizes = np.asarray(gathered(np.array(data.size, np.int32)))
    padded = np.asarray(gathered(np.pad(data, (0, int(sizes.max()) - data.size))))
    return [dict(json.loads(bytes(row[:size]))) for row, size in zip(padded, sizes, strict=True)]


def difference(texts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the first difference between texts of processes by place, of "" their actions, as parts of an error."""
    actions = [process[""] for process in texts]
    if len(set(actions)) > 1:
        same_steps = "give all instances the same number of steps"
        return {
            "what": "instances are not at the same point of the program",
            "expected": "every instance makes the same calls in the same order",
            "got": _group_by_text(actions),
            "hint": same_steps if _END in actions else "look for a call that only some instances make",
        }
    # The process with most places comes first: a part that another lacks is reported before its container.
    places = dict.fromkeys(place for process in sorted(texts, key=len, reverse=True) for place in process)
    place = next(place for place in places if len({process.get(place, _NOTHING) for process in texts}) > 1)
    return {
        "what": f"instances disagree on {place} of {actions[0]}",
        "expected": "the same on every instance",
        "got": _group_by_text([process.get(place, _NOTHING) for process in texts]),
    }


def _group_by_text(texts: Sequence[str]) -> str:
    """Return each text with its processes: "f32[4] on instances 0, 2; f32[6] on instance 1"."""
    groups: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        groups.setdefault(text, []).append(index)
    return "; ".join(f"{text} on {_names(indices)}" for text, indices in groups.items())


def _names(instances: Sequence[int]) -> str:
    return f"instance{'s' if len(instances) > 1 else ''} {', '.join(map(str, instances))}"


@contextmanager
def naming_lost(action: str) -> Iterator[None]:
    """Raise an error that names the processes that are lost, in place of one of gloo, in a joint action."""
    try:
        yield
    except (ValueError, RuntimeError) as error:  # JAX raises both
        if not any(word in str(error) for word in _FAILURES) or isinstance(error, ArgumentError):
            raise
        lost = _lost(_NEWS_SECONDS)
        who = _names(lost) if lost else "another instance"
        raise ArgumentError(
            f"{who} ended while this one, instance {membership().instance_index}, waits for it",
            expected=f"all instances together in {action}",
            got=str(error).splitlines()[0][:200],
            hint=f"the output of {who} says why it ended",
        ) from error


def _lost(timeout_seconds: float) -> list[int]:
    """Return the numbers of the processes that were lost first; without news in time, none."""
    if not _news.cache_info().currsize:  # lost before the first meeting
        return []
    connection = _news(os.getpid())
    connection.settimeout(timeout_seconds)
    try:
        line = connection.recv(1 << 12, socket.MSG_PEEK)  # the first line stays the first
    except (TimeoutError, BlockingIOError):
        return []
    except OSError:
        line = b""  # the end of the connection: process 0 is lost
    lost: list[int] = json.loads(line.split(b"\n")[0] or b"[0]")
    return lost


@cache
def _news(pid: int) -> socket.socket:
    """Return a connection by which process 0 says who is lost, and which ends with it.

    Once, before: compares versions and settings of all processes.
    """
    del pid  # a fork is another process
    atexit.register(_leave)  # before JAX's own handler, which waits for the others
    texts = [(f"the version of {name}", importlib.metadata.version(name)) for name in ("ipujax", "jax", "jaxlib")]
    texts += [("the version of Python", sys.version.split()[0])]
    texts += [("the number of replicas", str(membership().num_replicas))]
    texts += [(f"jax_{name}", str(getattr(jax.config, f"jax_{name}"))) for name in _SETTINGS]
    _compare("the start", texts, "install the same versions, and give all processes one environment")
    host = socket.gethostbyname(socket.gethostname())  # the address that gloo has
    with socket.create_server(("", 0), backlog=membership().num_instances) as server:
        server.settimeout(_MEETING_SECONDS)
        first = _gathered_texts([("host", host), ("port", str(server.getsockname()[1]))])[0]
        if membership().instance_index:
            connection = socket.create_connection((first["host"], int(first["port"])), _MEETING_SECONDS)
            connection.sendall(str(membership().instance_index).encode())
            return connection
        # All have joined, and come at once: whoever does not is a failure of the network.
        accepted = [server.accept()[0] for _ in range(1, membership().num_instances)]
    # Process 0 reads the news as the others do.
    to_itself, connection = socket.socketpair()
    connections = {int(each.recv(16)): each for each in accepted}
    Thread(target=_tell_lost, args=({**connections, 0: to_itself},), daemon=True).start()
    return connection


def _tell_lost(connections: dict[int, socket.socket]) -> None:
    """Wait in process 0 for processes that end, and tell the others."""
    while len(connections) > 1:
        readable, _, _ = select.select(connections.values(), [], [])
        lost = [n for n, connection in connections.items() if connection in readable]
        # Nobody writes to process 0: what can be read is an end.
        for n in lost:
            connections.pop(n).close()
        for connection in connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(lost).encode() + b"\n")


def _leave() -> None:
    """End this process together with the others; at once if its script has failed, or one of them is lost."""
    # The script may have left the job itself.
    if jax.distributed.is_initialized():
        # JAX would wait for the others at its own end, and they for this process.
        leave_if_failed()
        if _lost(0.0):
            leave_at_once(is_last=True)
        try:
            _compare(_END, ())
        except ArgumentError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            leave_at_once(membership().instance_index == 0)
