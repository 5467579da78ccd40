"""Several replicas in the tile interpreter: a machine with its own memory for each.

Input: the machines, and a program. Output: the values that the program sends to the host, stacked. Steps between
meetings (host streams, copies between replicas) are run by one machine after the other, each with its own decisions.
Control flow around a meeting is run by the machines of each choice together; that another machine takes part in a
meeting inside is an error.

Limits: the order in which replicas run between meetings is that of their numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.runtime.analysis import joins_replicas
from ipujax.runtime.graph import (
    Block,
    Branch,
    CrossReplicaCopy,
    Decision,
    HostStream,
    Loop,
    Program,
    StreamIn,
    StreamOut,
)
from ipujax.runtime.host import CallStream, Host
from ipujax.runtime.interpreter.tile_memory import InterpreterError, to_raw
from ipujax.runtime.tensor import Tensor


class Runner(ABC):
    """Runs control flow; subclasses run other steps and make decisions."""

    def run(self, program: Program) -> None:
        """Run one node of a program."""
        match program:
            case Block():
                for child in program.children():
                    self.run(child)
            case Branch():
                self.run(program.children()[self.choice(program)])
            case Loop(test=Program() as test) if isinstance(program, Decision):
                self.run(test)
                while self.choice(program):
                    self.run(program.body)
                    self.run(test)
            case Loop(trips=int() as trips):
                for _ in range(trips):
                    self.run(program.body)
            case _:
                self.step(program)

    @abstractmethod
    def choice(self, node: Decision) -> int:
        """Return the outcome of a decision, as `Decision.choice` does."""

    @abstractmethod
    def step(self, program: Program) -> None:
        """Run a node other than control flow."""


class Machine(Protocol):
    """The tile interpreter of one replica."""

    outputs: dict[HostStream, Any]

    def run(self, program: Program) -> None:
        """Run one node of a program."""

    def load(self, tensor: Tensor, step: Program) -> np.ndarray:
        """Return the raw value of a tensor; errors name `step`."""

    def store(self, tensor: Tensor, raw: np.ndarray, step: Program) -> None:
        """Write a raw value to a tensor; errors name `step`."""

    def choice(self, node: Decision) -> int:
        """Return the outcome of a decision, as `Decision.choice` does."""


class Replicas(Runner):
    """The machines of all replicas of a program, or of those that run a part of it.

    Args:
        machines: by replica.
        host: answers the transfers of all replicas at once; None if each machine has its stream values.
        members: numbers of the replicas that run the program; None for all.
        decision: the decision on which the others disagree.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        host: Host | None,
        members: Sequence[int] | None = None,
        decision: Decision | None = None,
    ) -> None:
        self._machines = machines
        self._host = host
        self._members = range(len(machines)) if members is None else members
        self._decision = decision

    @property
    def outputs(self) -> dict[HostStream, Any]:
        """Return the last value of each output stream, [replicas, *shape]."""
        by_replica = [machine.outputs for machine in self._machines]
        return {stream: _stack([outputs[stream] for outputs in by_replica]) for stream in by_replica[0]}

    def run(self, program: Program) -> None:
        """Run one node: on one machine after the other, unless replicas meet in it."""
        # Without a host, a stream is no meeting: each machine has its values.
        if not joins_replicas(program) or (isinstance(program, (StreamIn, StreamOut)) and self._host is None):
            for member in self._members:
                self._machines[member].run(program)
        elif isinstance(program, Branch):
            for number, child in enumerate(program.children()):
                if members := self._choosing(program, number):
                    self._of(members, program).run(child)
        elif isinstance(program, Loop) and isinstance(program, Decision) and program.test is not None:
            self.run(program.test)
            inside = self
            while members := inside._choosing(program, 1):
                inside = inside._of(members, program)
                inside.run(program.body)
                inside.run(program.test)
        else:
            super().run(program)

    def step(self, program: Program) -> None:
        """Run a step at which replicas meet."""
        match program:
            case StreamIn(CallStream()) | StreamOut(_, CallStream()):
                for member in self._members:
                    self._machines[member].run(program)
            case StreamIn(stream, destination):
                assert self._host is not None, "without a host each machine runs its transfers"
                self._check_members(range(len(self._machines)))
                raw = to_raw(self._host.pull(stream))
                for number, machine in enumerate(self._machines):
                    machine.store(destination, raw if stream.broadcast else raw[number], program)
            case StreamOut(source, stream):
                assert self._host is not None, "without a host each machine runs its transfers"
                self._check_members(range(len(self._machines)))
                self._host.push(stream, np.stack([machine.load(source, program) for machine in self._machines]))
            case CrossReplicaCopy():
                for receiver, sender in enumerate(program.sources(len(self._machines))):
                    if sender is not None and {receiver, sender} & set(self._members):
                        self._check_members((receiver, sender))
                # All are read before any is written: the source may be the destination.
                sent = [{m: self._machines[m].load(way.source, program) for m in self._members} for way in program.ways]
                for way, by_sender in zip(program.ways, sent, strict=True):
                    senders = way.sources(len(self._machines))
                    for member in self._members:
                        if (sender := senders[member]) is not None:
                            self._machines[member].store(way.destination, by_sender[sender], program)

    def choice(self, node: Decision) -> int:
        raise AssertionError("members may choose differently")

    def _choosing(self, node: Decision, choice: int) -> list[int]:
        return [member for member in self._members if self._machines[member].choice(node) == choice]

    def _of(self, members: list[int], decision: Decision) -> Replicas:
        return self if len(members) == len(self._members) else Replicas(self._machines, self._host, members, decision)

    def _check_members(self, replicas: Sequence[int]) -> None:
        """Refuse a meeting that not all of some replicas reach."""
        if not set(replicas) <= set(self._members):
            assert self._decision is not None, "all replicas are members before the first decision"
            kind = type(self._decision).__name__
            message = f"replicas disagree at this {kind}, which has steps that all of them must reach"
            raise InterpreterError("divergent-control", message, where=self._decision.origin)


def _stack(values: list[Any]) -> Any:
    return jnp.stack(values) if isinstance(values[0], jax.Array) else np.stack(values)
