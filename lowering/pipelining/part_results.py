"""Results of a pipeline: parts reduce their terms over micro-batches, and terms are added at the end.

A term is added to its accumulator as soon as it is computed; rows that a loop computes, as the gradients of layers, in
the loop, so that no stack of all rows is stored beside the sum:

    ys = scan …; z = convert ys; sum += z      →      in iteration i of the loop: sum[i] += ys[i]

Input: the terms of each part. Output: accumulators, and the tensor of each result after all tasks.
Limits: stacks that other equations than a cast read, as a sum over replicas in each micro-batch, are added as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.host_rows import TaskMoves, store_of_stack
from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, Var, is_float0
from ipujax.lowering.jaxpr import scan_body, variables
from ipujax.lowering.layout import map_linearly
from ipujax.lowering.pipelining.part_values import HandedOn, PartBuilder, Pipeline
from ipujax.lowering.pipelining.partition import TaskKind
from ipujax.lowering.pipelining.primitive import combine
from ipujax.lowering.pipelining.staged import Term
from ipujax.lowering.popops import new_stack, push
from ipujax.lowering.schedules import FORWARD
from ipujax.runtime.graph import Builder, Copy, Sequence as ProgramSequence
from ipujax.runtime.tensor import BACKWARD as BACKWARD_PART, FORWARD as FORWARD_PART, UPDATE, Tensor
from ipujax.runtime.tensor.roles import GRADIENTS

_CAST = "convert_element_type"


class LoopSums(NamedTuple):
    """A part whose loops add rows to sums.

    Args:
        jaxpr: the part; stacks are results in the place of their casts.
        stacks: for each term that is added row by row the stack in its place.
    """

    jaxpr: Jaxpr
    stacks: dict[Var, Var]


def loop_sums(jaxpr: Jaxpr, terms: Collection[Var]) -> LoopSums:
    """Return a part of a pipeline whose terms, summands of its results, are stacks of loops where they can be.

    The caller then adds each row to the sum inside of the loop, so that no stack of all rows is stored. A term that is
    a cast of a stack is replaced by the stack. `terms` are read by sums alone.
    """
    reads = Counter(v for eqn in jaxpr.eqns for v in variables(eqn.invars))
    rows = {v for eqn in jaxpr.eqns if _is_loop(eqn) for v in _stacks_of(eqn)}
    casts = {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == _CAST and eqn.invars[0] in rows and reads[eqn.invars[0]] == 1
    }
    stacks = {v: casts.get(v, v) for v in terms if not reads[v] and (v in casts or v in rows)}
    is_shared = Counter(v for v in variables(jaxpr.outvars) if v in rows)
    stacks = {v: stack for v, stack in stacks.items() if is_shared[stack] == (v is stack)}
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != _CAST or eqn.outvars[0] not in stacks]
    outvars = [stacks.get(v, v) if isinstance(v, Var) else v for v in jaxpr.outvars]
    return LoopSums(jaxpr.replace(eqns=eqns, outvars=outvars), stacks)


def _is_loop(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and eqn.params["length"] > 1


def _stacks_of(eqn: JaxprEqn) -> list[Var]:
    """Stacks of rows that a loop computes."""
    return list(eqn.outvars[scan_body(eqn.params).results.stacks])


@dataclass(frozen=True, slots=True, eq=False)
class PartResults:
    """Results of a pipeline: parts reduce their terms over micro-batches, and terms are added at the end.

    Args:
        pipeline: the pipeline.
        states: variable of each state.
        handed: values that parts hand on.
        moves: gets the stores of rows on the host.
        reductions: of terms, see `reductions`.
        accumulators: variables by number of the result and position of the term.
    """

    pipeline: Pipeline
    states: Mapping[Var, Tensor]
    handed: HandedOn
    moves: TaskMoves[TaskKind]
    reductions: Mapping[tuple[str, str], Callable[..., jax.Array]]
    accumulators: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def add_term(self, term: Term, value: Tensor, builder: PartBuilder) -> None:
        """Adds to the program of a part the reduction of a term over micro-batches, into its accumulator.

        A term is what one stage adds to a result. Nothing is added for the last value of a state, which the method
        `result` takes from the state, and for a result of dtype float0, which has no values.
        """
        spec = self.pipeline.staged.spec
        kind = spec.kind_of(term.number)
        aval = self.pipeline.staged.partition.jaxpr.out_avals[term.number]
        if kind == "carry" or is_float0(aval):
            return
        graph = self.pipeline.ipus.graph
        part = FORWARD_PART if builder.part.task.kind == FORWARD else BACKWARD_PART
        with graph.debug_origin(replace(graph.origin, part=part)):
            self._add_reduction(term, kind, value, builder)

    def _add_reduction(self, term: Term, kind: str, value: Tensor, builder: PartBuilder) -> None:
        """Adds the reduction of a term over micro-batches, and its accumulator, zeroed once a step.

        Args:
            term: the term of a result.
            kind: "sum", "mean", "running_mean", "last" or "stack".
            value: the term of one micro-batch.
            builder: the part that computes it.
        """
        ipus = self.pipeline.ipus
        graph = ipus.graph
        name = f"{builder.name}/result {term.number}"
        key = term.number, term.position
        map_linearly(builder.view, value)
        if kind == "stack":
            self.accumulators[key] = self._stacked(term.number, value, builder, name)
            return
        shared = self._shared_accumulator(term.number, builder.ipu) if kind in ("sum", "mean") else None
        if shared is not None:  # zeroed where the other term has added it
            self.accumulators[key] = shared
            ipus.emit(builder.ipu, self.reductions["part", kind], [shared, value], builder.body, name, into=shared)
            return
        dtype = value.dtype if kind == "last" else self._accumulator_dtype(term)
        accumulator = ipus.add_like(value, builder.ipu, f"{name}/{kind}", dtype)
        self._note_accumulator(term, accumulator, builder)
        if kind == "last":
            builder.body.add(Copy(value, accumulator, name, graph.origin))
            return
        self._clear(accumulator, builder, name)
        values = [accumulator, value, *([builder.counted()] if kind == "running_mean" else [])]
        ipus.emit(builder.ipu, self.reductions["part", kind], values, builder.body, name, into=accumulator)

    def _accumulator_dtype(self, term: Term) -> Any:
        staged = self.pipeline.staged
        return staged.spec.accumulator_dtype(staged.partition.jaxpr.out_avals[term.number])

    def _note_accumulator(self, term: Term, accumulator: Tensor, builder: PartBuilder) -> None:
        self.accumulators[term.number, term.position] = accumulator
        if builder.part.task.kind != FORWARD:
            self.pipeline.ipus.graph.note_role(accumulator, GRADIENTS)

    def _clear(self, accumulator: Tensor, builder: PartBuilder, name: str) -> None:
        """Zeroes an accumulator once a step, as the update: PopART does in the fragment of its optimisers."""
        zero = builder.view.add_constant(np.zeros((), accumulator.dtype), "0")
        map_linearly(builder.view, zero)
        zeros = zero.broadcast_in_dim(accumulator.shape, ())
        origin = replace(self.pipeline.ipus.graph.origin, part=UPDATE)
        self.pipeline.prog.add(Copy(zeros, accumulator, f"{name}/zero", origin))

    def is_new_sum(self, term: Term, builder: PartBuilder) -> bool:
        """True for a term of a sum or mean that no other part reads, and of which its IPU has no accumulator yet."""
        staged = self.pipeline.staged
        is_read = any(var is term.atom for var, _ in staged.readers)
        is_sum = staged.spec.kind_of(term.number) in ("sum", "mean")
        return is_sum and not is_read and self._shared_accumulator(term.number, builder.ipu) is None

    def row_accumulator(self, term: Term, row: Tensor, rows: int, builder: PartBuilder) -> Tensor:
        """Adds the accumulator of a term whose rows a loop computes, of the layout of one of them."""
        name = f"{builder.name}/result {term.number}"
        map_linearly(builder.view, row)
        # A variable for its layout alone.
        template = self.pipeline.ipus.add_like(row, builder.ipu, name, self._accumulator_dtype(term))
        accumulator = new_stack(Builder(builder.view, self.pipeline.prog, f"{name}/sum"), template, rows)
        self._note_accumulator(term, accumulator, builder)
        self._clear(accumulator, builder, name)
        return accumulator

    def add_row(self, term: Term, row: Tensor, total: Tensor, builder: PartBuilder, prog: ProgramSequence) -> None:
        """Adds to the program of a loop the reduction of a row over micro-batches, into that of the accumulator.

        The row is cast to the type of the term before, as the stack would have been: a wider sum has its rounding.
        """
        ipus = self.pipeline.ipus
        reduction = self.reductions["part", self.pipeline.staged.spec.kind_of(term.number)]
        aval: Any = term.atom.aval
        if aval.dtype not in (row.dtype, total.dtype):
            reduction = partial(_combine_cast, reduction, aval.dtype)
        name = f"{builder.name}/result {term.number}"
        ipus.emit(builder.ipu, reduction, [total, row], prog, name, into=total)

    def _stacked(self, number: int, value: Tensor, builder: PartBuilder, name: str) -> Tensor:
        """The stack of a result: on the IPU, or on the host if it is sent there after the part has run.

        Args:
            number: number of the result.
            value: its row of one micro-batch.
            builder: the part that computes it.
            name: debug name.
        """
        spec = self.pipeline.staged.spec
        if not spec.sent or not spec.sent[number]:
            stack = new_stack(Builder(builder.view, self.pipeline.prog, name), value, spec.micro_batches)
            push(Builder(builder.view, builder.body, name), stack, value, builder.counted())
            return stack
        # The row is sent after the part has run: its variable must not be overwritten before, and its number is that of
        # a counter one behind `builder.counted()`, since the part counts its micro-batch at its end.
        value = self.handed.kept(value, builder)
        row_number = builder.counted_stored()
        stack, stores = store_of_stack(builder.view, name, value, spec.micro_batches, row_number, on_host=True)
        self.moves.stores.setdefault(builder.part.task, []).append(stores)
        return stack

    def _shared_accumulator(self, number: int, ipu: int) -> Tensor | None:
        """Accumulator of another term of this result on the same IPU, as for a tied weight of two stages there.

        None where there is no such term yet.
        """
        of_result = [accumulator for (n, _), accumulator in self.accumulators.items() if n == number]
        variable_ipu = self.pipeline.ipus.variable_ipu
        return next((x for x in of_result if variable_ipu(x.variables()[0]) == ipu), None)

    def result(self, number: int) -> Tensor:
        """A result after all tasks: a state, a stack, or the sum or mean of its accumulators.

        One of dtype float0 has no values: constant flags of its shape stand for it. A mean is summed by the parts, and
        divided here.
        """
        staged = self.pipeline.staged
        ipus = self.pipeline.ipus
        kind = staged.spec.kind_of(number)
        aval = staged.partition.jaxpr.out_avals[number]
        terms = staged.partition.results[number]
        if is_float0(aval):
            shape = (staged.spec.micro_batches, *aval.shape) if kind == "stack" else aval.shape
            return ipus.graph.add_constant(np.zeros((), bool), "float0").broadcast_in_dim(shape, ())
        if kind == "carry":  # the state of which this result is the next value
            return self.states[staged.partition.jaxpr.jaxpr.invars[staged.spec.states[number]]]
        ipu = staged.result_ipu(terms)
        accumulators = (self.accumulators[number, position] for position in range(len(terms)))
        # Terms of stages on one IPU share an accumulator.
        distinct = list({accumulator.node: accumulator for accumulator in accumulators}.values())
        if kind not in ("mean", "sum") or (kind == "sum" and len(distinct) == 1):
            return distinct[0]
        local = [ipus.copy_to(accumulator, ipu) for accumulator in distinct]
        reduction = self.reductions["end", kind]
        with ipus.graph.debug_origin(replace(ipus.graph.origin, part=UPDATE)):
            return ipus.emit(ipu, reduction, local, ipus.prog, f"{self.pipeline.name}/result {number}")


def _combine_cast(reduction: Callable[..., jax.Array], dtype: Any, total: jax.Array, row: jax.Array) -> jax.Array:
    return reduction(total, row.astype(dtype))


@dataclass(frozen=True, slots=True, eq=False)
class PartRowSum:
    """The sum over micro-batches of a term whose rows a loop computes.

    Args:
        results: has the accumulator.
        term: the term.
        builder: the part that computes it.
    """

    results: PartResults
    term: Term
    builder: PartBuilder

    def stack_for(self, row: Tensor, rows: int) -> Tensor:
        """Adds the accumulator."""
        return self.results.row_accumulator(self.term, row, rows, self.builder)

    def add(self, row: Tensor, total: Tensor, prog: ProgramSequence) -> None:
        """Adds a row to that of the accumulator."""
        self.results.add_row(self.term, row, total, self.builder, prog)


def reductions(micro_batches: int) -> dict[tuple[str, str], Callable[..., jax.Array]]:
    """Functions that reduce terms over micro-batches in a part, and at the end, by kind of result."""

    def total(*arrays: jax.Array) -> jax.Array:
        return sum(arrays[1:], arrays[0])

    def mean(*arrays: jax.Array) -> jax.Array:
        sums = total(*arrays)
        return sums / jnp.asarray(micro_batches, sums.dtype)

    of_parts = {("part", kind): partial(combine, kind) for kind in ("sum", "mean", "running_mean")}
    return {**of_parts, ("end", "sum"): total, ("end", "mean"): mean}
