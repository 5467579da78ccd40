"""What all processes of a job must agree on, compared before they act together, and processes that are lost.

A collective between processes that disagree hangs, mixes up bytes or aborts. So each joint action begins with a
collective of fixed size: a digest of its name and facts. Where digests differ, all gather the texts, padded to one
length, and raise the same error. The end of the script is such an action too: who ends early is named.

A process that waits for one that has died gets an error of gloo, which names no process. Each process therefore listens
on a port, and accepts nothing while all is well: where nobody listens any more, the process is lost. Who notices tells
the others, so that all name the first that was lost and not those that ended because of it.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.distributed.instance.instance import CONTROL_FD, EXIT_CODE, INSTANCE_PID
from ipujax.distributed.instance.membership import membership
from ipujax.distributed.instance.process_arrays import all_of, to_all
from ipujax.runtime.errors import ArgumentError

NOTHING = "nothing"  # text of a place that only other processes have
_DIGEST_BYTES = 16
_PROBE_SECONDS = 1.0  # assumed: for a connection to a host that is alive
_FAILURES = "Gloo", "coordination", "UNAVAILABLE", "Connection"  # words in errors of JAX about other processes
_END = "the end of the script"
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")


def stable(value: object) -> str:
    """Return the `repr` of a value without addresses, which is equal in every process."""
    return _ADDRESS.sub("0x…", repr(value))


Texts = Iterable[tuple[str, str]]


def agree(action: str, facts: Texts = (), hint: str | None = None, texts: Callable[[], Texts] | None = None) -> None:
    """Wait until every process is about to start the same joint action.

    Args:
        action: name of the action: "train_step".
        facts: (place, description) of each value that must be equal on all processes, in the same order.
        hint: remedy for the message if they differ.
        texts: what must be equal where the facts differ, in their place.

    Raises:
        ArgumentError: on every process, if their actions or facts differ, or one of them has ended.
    """
    if membership().num_instances == 1:
        return
    _joined(os.getpid())
    _compare(action, facts, hint, texts)


def _compare(action: str, facts: Texts, hint: str | None = None, texts: Callable[[], Texts] | None = None) -> None:
    """Compare digests of an action on all processes, and its texts if they differ."""
    _tell_launcher({"what": action})
    described = [("", action), *facts]
    with naming_lost(action):
        digest = np.frombuffer(hashlib.blake2b(repr(described).encode(), digest_size=_DIGEST_BYTES).digest(), np.uint8)
        if (_gathered(digest) == digest).all():
            return
        gathered = _gathered_texts(described if texts is None else [("", action), *texts()])
    if any(process != gathered[0] for process in gathered):
        problem = difference(gathered)
        raise ArgumentError(problem.pop("what"), **{"hint": hint, **problem})


def _gathered(values: np.ndarray) -> np.ndarray:
    """Return the arrays of all processes, of one shape, stacked; as `process_allgather`, but also inside of a trace."""
    with jax.ensure_compile_time_eval():
        return np.asarray(all_of(to_all(jnp.asarray(values[None]), 0)).addressable_data(0))


def _gathered_texts(texts: Sequence[tuple[str, str]]) -> list[Mapping[str, str]]:
    """Return the texts of all processes by place; gloo aborts where arrays differ in size."""
    data = np.frombuffer(json.dumps(texts).encode(), np.uint8)
    sizes = _gathered(np.array([data.size], np.int32))[:, 0]
    padded = _gathered(np.pad(data, (0, int(sizes.max()) - data.size)))
    return [dict(json.loads(bytes(row[:size]))) for row, size in zip(padded, sizes, strict=True)]


def difference(texts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the first difference between the actions and facts of processes, as parts of an error.

    Args:
        texts: for each process the text of each place; that of "" is the action.
    """
    actions = [process[""] for process in texts]
    if len(set(actions)) > 1:
        return {
            "what": "instances are not at the same point of the program",
            "expected": "every instance makes the same calls in the same order",
            "got": _group_by_text(actions),
            "hint": "give all instances the same number of steps"
            if _END in actions
            else "look for a call that only some instances make",
        }
    # The process with most places comes first: a part that another lacks is reported before its container.
    places = dict.fromkeys(place for process in sorted(texts, key=len, reverse=True) for place in process)
    place = next(place for place in places if len({process.get(place, NOTHING) for process in texts}) > 1)
    return {
        "what": f"instances disagree on {place} of {actions[0]}",
        "expected": "the same on every instance",
        "got": _group_by_text([process.get(place, NOTHING) for process in texts]),
    }


def _group_by_text(texts: Sequence[str]) -> str:
    """Return each text with its processes: "f32[4] on instances 0, 2; f32[6] on instance 1"."""
    groups: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        groups.setdefault(text, []).append(index)
    return "; ".join(f"{text} on {_names(indices)}" for text, indices in groups.items())


def _names(instances: Sequence[int]) -> str:
    return f"instance{'s' if len(instances) > 1 else ''} {', '.join(map(str, instances))}"


# --- processes that are lost ---


@contextmanager
def naming_lost(action: str) -> Iterator[None]:
    """Raise an error that names the processes that are lost, in place of one of gloo.

    Args:
        action: what all processes do inside.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:  # JAX raises both
        if not any(word in str(error) for word in _FAILURES) or isinstance(error, ArgumentError):
            raise
        lost = _joined(os.getpid()).lost()
        who = _names(lost) if lost else "another instance"
        raise ArgumentError(
            f"{who} ended while this one, instance {membership().instance_index}, waits for it",
            expected=f"all instances together in {action}",
            got=str(error).splitlines()[0][:200],
            hint=f"the output of {who} says why it ended",
        ) from error


@dataclass(frozen=True, slots=True)
class _Peers:
    """Ports on which the processes of this job listen, by process.

    Args:
        listener: socket of this process.
        addresses: (host, port) of each process, this one's too.
        known_lost: numbers of processes of which an error has said that they have ended.
    """

    listener: socket.socket
    addresses: tuple[tuple[str, int], ...]
    known_lost: set[int] = field(default_factory=set)

    def lost(self) -> list[int]:
        """Return the numbers of processes that have ended; of those that another process has told, if any has."""
        told = set() if self.known_lost else self._told()
        if not self.known_lost and not told:
            told = {index for index in range(len(self.addresses)) if not self._tell(index, b"")}
            for index in range(len(self.addresses)) if told else ():
                self._tell(index, json.dumps(sorted(told)).encode())
        self.known_lost.update(told)
        return sorted(self.known_lost)

    def _told(self) -> set[int]:
        told: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self.listener.accept()
                connection.settimeout(_PROBE_SECONDS)
                with connection, contextlib.suppress(OSError, ValueError):
                    told |= set(json.loads(connection.makefile("rb").read(1 << 12) or b"[]"))
        return told

    def _tell(self, index: int, message: bytes) -> bool:
        """Send a message to a process, and return whether it lives."""
        if index == membership().instance_index:
            return True
        try:
            with socket.create_connection(self.addresses[index], _PROBE_SECONDS) as connection:
                connection.sendall(message)
        except OSError:
            return False
        return True


@cache
def _joined(pid: int) -> _Peers:
    """Compare versions and settings of all processes, once, and exchange the ports on which they listen."""
    del pid
    atexit.register(_leave)  # before JAX's own handler, which waits for the others
    _compare("the start", _versions(), "install the same versions, and give all processes one environment")
    host = socket.gethostbyname(socket.gethostname())  # the address that gloo has
    listener = socket.create_server(("", 0), backlog=2 * membership().num_instances)
    listener.setblocking(False)
    texts = _gathered_texts([("host", host), ("port", str(listener.getsockname()[1]))])
    return _Peers(listener, tuple((text["host"], int(text["port"])) for text in texts))


def _versions() -> Iterator[tuple[str, str]]:
    """Yield versions and settings that decide which program and which numbers a process has."""
    yield "the version of ipujax", importlib.metadata.version("ipujax")
    yield "the version of jax", jax.__version__
    yield "the version of jaxlib", importlib.metadata.version("jaxlib")
    yield "the version of Python", sys.version.split()[0]
    yield "the number of replicas", str(membership().num_replicas)
    for name in (
        "jax_enable_x64",
        "jax_default_matmul_precision",
        "jax_default_prng_impl",
        "jax_numpy_dtype_promotion",
    ):
        yield name, str(getattr(jax.config, name))


def _leave() -> None:
    """End this process together with the others; at once if its script has failed, because JAX would wait for them."""
    if not jax.distributed.is_initialized():  # the script has left the job itself
        return
    has_failed = getattr(sys, "last_value", None) is not None or bool(_joined(os.getpid()).known_lost)
    code = int(os.environ.get(EXIT_CODE, 0)) or int(has_failed)
    if not code:
        try:
            _compare(_END, ())
        except ArgumentError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            code = 1
    if code:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # Under `ipujax run` instance 0, which has JAX's coordinator, ends last: others abort without it.
        if membership().instance_index == 0 and _tell_launcher({"leaving": code}):
            time.sleep(_LAST_SECONDS)
        os._exit(code)


_LAST_SECONDS = 60.0  # assumed: the launcher ends this process long before


def _tell_launcher(message: Mapping[str, object]) -> bool:
    """Send a message to `ipujax run`, and return whether it has started this process."""
    if os.environ.get(INSTANCE_PID) != str(os.getpid()):
        return False
    with contextlib.suppress(OSError):  # the launcher is gone: so is this process soon
        os.write(int(os.environ[CONTROL_FD]), json.dumps(message).encode() + b"\n")
    return True
