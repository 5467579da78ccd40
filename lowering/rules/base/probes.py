"""Probes: host streams that a program gets beside its results, with the values of operands and results of equations.

Input: equations as they are lowered. Output: a `ProbedEquation` for each, in the order in which they end, those inside
of loops, branches and calls before the equation that holds them. A value is sent to the host where it is computed, or
where a sequence of the program reads it first; a stream has the last value of a run.

Limits: arrays in streaming memory have no stream; programs that were lowered on the way to another leave equations
whose streams no run has. Of several replicas, which may decide differently and reach all streams together, equations
inside of data-dependent loops and branches have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ipujax.lowering.jax_compat import JaxprEqn, Literal
from ipujax.runtime.graph import Graph, HostStream, Sequence as ProgramSequence, StreamOut
from ipujax.runtime.tensor import Origin, Tensor

_DATA_DEPENDENT = ("while", "cond")  # primitives that run their equations as often as data say


@dataclass(frozen=True, eq=False, slots=True)
class ProbedEquation:
    """An equation of a lowered program, and the streams of its values.

    Args:
        equation: the equation.
        origin: its line, name stack and layer.
        holders: equations that it is inside of, outermost first.
        was_run: stream of a flag, bool[], that is True once the equation was run.
        operands: stream of each operand; None for literals, and for values that have no stream.
        results: stream of each result, likewise.
    """

    equation: JaxprEqn
    origin: Origin
    holders: tuple[JaxprEqn, ...]
    was_run: HostStream
    operands: tuple[HostStream | None, ...]
    results: tuple[HostStream | None, ...]


@dataclass(slots=True)
class _ProbedSequence:
    """Streams of one sequence of a program.

    Args:
        prog: the sequence.
        was_run: stream of a flag that is sent first of all whenever the sequence is run.
        streams: tensor and stream by identity of the tensor, since a view is a value of its own.
    """

    prog: ProgramSequence
    was_run: HostStream
    streams: dict[int, tuple[Tensor, HostStream]] = field(default_factory=dict)


class Probes:
    """Adds probes to programs while they are lowered.

    Attributes:
        equations: the probed equations, in the order in which they were left.
    """

    def __init__(self) -> None:
        self.equations: list[ProbedEquation] = []
        self._sequences: dict[int, _ProbedSequence] = {}  # by identity of the sequence
        self._holders: list[JaxprEqn] = []  # equations that were entered and not left yet, outermost first

    def enter(
        self, graph: Graph, prog: ProgramSequence, eqn: JaxprEqn, operands: Sequence[Tensor]
    ) -> tuple[HostStream | None, ...]:
        """Add probes (host streams of values) of the operands of an equation; returns these streams, for `leave`.

        It is lowered next: `leave` must follow, after `enter` and `leave` of the equations inside it. Adds nothing, and
        returns no streams, where replicas may run the equation unequally often.

        Args:
            graph: graph of the equation.
            prog: sequence that the equation is lowered to.
            eqn: the equation.
            operands: a tensor for each of its operands.

        Returns:
            The stream of each operand; None for literals, and for values that have no stream.
        """
        if self._may_run_unequally(graph):
            self._holders.append(eqn)
            return ()
        atoms = zip(eqn.invars, operands, strict=True)
        streams = tuple(None if isinstance(atom, Literal) else self._stream(graph, prog, x) for atom, x in atoms)
        self._holders.append(eqn)
        return streams

    def leave(
        self,
        graph: Graph,
        prog: ProgramSequence,
        operand_streams: tuple[HostStream | None, ...],
        results: Sequence[Tensor],
    ) -> None:
        """Add probes (host streams of values) of the results of the equation that was entered last.

        Adds it to `equations`, those that a debugger can show values of; not one that replicas may run unequally often.

        Args:
            graph: graph of the equation.
            prog: sequence that the equation was lowered to.
            operand_streams: what `enter` returned for the equation.
            results: tensors of its results.
        """
        eqn = self._holders.pop()
        if self._may_run_unequally(graph):
            return
        was_run = self._probed_sequence(graph, prog).was_run
        # A result may be the tensor of an operand, updated in place: its stream has the value of before.
        streams = tuple(self._stream(graph, prog, x, is_new=True) for x in results)
        holders = tuple(self._holders)
        self.equations.append(ProbedEquation(eqn, graph.origin, holders, was_run, operand_streams, streams))

    def _may_run_unequally(self, graph: Graph) -> bool:
        """Return whether replicas may run the equations that are lowered now unequally often.

        They reach a stream together, so there can be none.
        """
        is_inside = any(holder.primitive.name in _DATA_DEPENDENT for holder in self._holders)
        return is_inside and graph.replication_factor > 1

    def _stream(
        self, graph: Graph, prog: ProgramSequence, tensor: Tensor, *, is_new: bool = False
    ) -> HostStream | None:
        """Return the stream that sends a tensor to the host where it is known; None for one that has no stream.

        Tensors without elements, or in streaming memory, have none.

        Args:
            graph: the graph.
            prog: sequence of the program: a value has one stream in each sequence that reads it.
            tensor: the tensor.
            is_new: whether it has a new value, which gets a stream although the sequence has one of the old value.
        """
        if tensor.size == 0 or not set(graph.off_chip).isdisjoint(tensor.variables()):
            return None
        streams = self._probed_sequence(graph, prog).streams
        if id(tensor) not in streams or is_new:
            stream = HostStream("probe", tensor.shape, tensor.dtype)
            streams[id(tensor)] = tensor, stream
            prog.add(StreamOut(tensor, stream, graph.origin))
        return streams[id(tensor)][1]

    def _probed_sequence(self, graph: Graph, prog: ProgramSequence) -> _ProbedSequence:
        """Return the streams of a sequence; its flag is added at the first call for it, before all other probes."""
        if id(prog) not in self._sequences:
            was_run = HostStream("probe/was_run", (), np.dtype(bool))
            prog.add(StreamOut(graph.add_constant(np.ones((), bool), "probe"), was_run, graph.origin))
            self._sequences[id(prog)] = _ProbedSequence(prog, was_run)
        return self._sequences[id(prog)]
