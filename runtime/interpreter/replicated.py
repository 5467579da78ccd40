"""Several replicas in the tile interpreter: one machine each, with memory of its own.

Input: the machines, and a program. Output: what the program sends to the host, stacked. Steps between meetings (host
streams, copies between replicas) are run by one machine after the other, each taking its own decisions. Control around
meetings is followed together; machines that disagree there are an error.

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
from ipujax.runtime.host import Host
from ipujax.runtime.interpreter.tile_memory import InterpreterError, to_raw
from ipujax.runtime.tensor import Tensor


class Runner(ABC):
    """Follows control; what a machine does in a step and how it decides is for subclasses to say."""

    def run(self, program: Program) -> None:
        """Runs one node."""
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
        """Decides as `Decision.choice` does."""

    @abstractmethod
    def step(self, program: Program) -> None:
        """Runs a node that is no control."""


class Machine(Protocol):
    """The tile interpreter of one replica."""

    outputs: dict[HostStream, Any]

    def run(self, program: Program) -> None:
        """Runs one node."""

    def load(self, tensor: Tensor, step: Program) -> np.ndarray:
        """The raw value of a tensor."""

    def store(self, tensor: Tensor, raw: np.ndarray, step: Program) -> None:
        """Writes a raw value to a tensor."""

    def choice(self, node: Decision) -> int:
        """Decides as `Decision.choice` does."""


class Replicas(Runner):
    """Machines that run one program.

    Args:
        machines: by replica.
        host: answers transfers, all replicas' at once; None if each machine has values of its own.
    """

    def __init__(self, machines: Sequence[Machine], host: Host | None) -> None:
        self._machines, self._host = machines, host

    @property
    def outputs(self) -> dict[HostStream, Any]:
        """The last value of each output stream, [replicas, *shape]."""
        each = [machine.outputs for machine in self._machines]
        return {stream: _stacked([outputs[stream] for outputs in each]) for stream in each[0]}

    def run(self, program: Program) -> None:
        """Runs one node: a part in which replicas do not meet, or which they leave to each, on one after the other."""
        if not joins_replicas(program) or (isinstance(program, (StreamIn, StreamOut)) and self._host is None):
            for machine in self._machines:
                machine.run(program)
        else:
            super().run(program)

    def step(self, program: Program) -> None:
        """Runs a meeting."""
        match program:
            case StreamIn(stream, destination):
                assert self._host is not None, "else each machine has values of its own"
                raw = to_raw(self._host.pull(stream))
                for number, machine in enumerate(self._machines):
                    machine.store(destination, raw if stream.broadcast else raw[number], program)
            case StreamOut(source, stream):
                assert self._host is not None, "else each machine has values of its own"
                self._host.push(stream, np.stack([machine.load(source, program) for machine in self._machines]))
            case CrossReplicaCopy(source, destination):
                sent = [machine.load(source, program) for machine in self._machines]
                for machine, sender in zip(self._machines, program.sources(len(self._machines)), strict=True):
                    if sender is not None:
                        machine.store(destination, sent[sender], program)

    def choice(self, node: Decision) -> int:
        choices = [machine.choice(node) for machine in self._machines]
        if len(set(choices)) > 1:
            what = f"replicas disagree at this {type(node).__name__}, in which they have to meet"
            raise InterpreterError("divergent-control", what, where=node.origin)
        return choices[0]


def _stacked(values: list[Any]) -> Any:
    return jnp.stack(values) if isinstance(values[0], jax.Array) else np.stack(values)
