"""Pass `stream`: micro-batches come from the host one by one, and rows of stacked results go there one by one.

    batch    an argument that pipelines alone read, as their batch: it stays in the host's memory, and a pipeline loads
             the rows of a micro-batch when the stage that reads them begins it
    result   a result that a pipeline stacks, and that nothing else reads: each row is stored when it is computed, by
             `host_send` in a loop, by a flag of `PipelineSpec` in a pipeline with stages

So do, with `Options.stream_loops`, stacks that loops alone read by rows, and stacks that they make.

Input: a jaxpr, and the micro-batches of each batch, as `batch_arguments` finds them in the traced function. Output: an
equal jaxpr. Reshapes between an argument or a result and its pipeline stay: they move nothing in the host's memory.

Source: PopART's data streams, of one micro-batch each (PopART user guide, "Data input and output").
Limits: a single element is not worth a host exchange, so a stack of them stays on chip until the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

from jax import lax

from ipujax.lowering.jax_compat import (
    CALLEES,
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    closed,
    is_float0,
    new_equation,
    shape_of,
)
from ipujax.lowering.jaxpr import PIPELINE, is_pipeline, scan_body, variables, variables_read
from ipujax.lowering.offload.loop_rows import Rows, read_by_number, reads_row, rows_by_counter
from ipujax.lowering.offload.primitives import host_send_p, remote_load_p, remote_rows_p
from ipujax.lowering.offload.row_access import row_access
from ipujax.lowering.offload.row_updates import is_reshape
from ipujax.lowering.replicas import on_one_replica, unwrapped
from ipujax.runtime.tensor import is_key_dtype

_PIPELINES = frozenset((PIPELINE, "ipu_pipeline"))
_CALLEES = {**CALLEES, "replicated": "jaxpr", "shard_map": "jaxpr"}
_MIN_ELEMENTS = 2  # of a row that is stored by itself, as of arguments that are offloaded


@dataclass(frozen=True, slots=True)
class Streams:
    """Values that go between host and tiles by micro-batches.

    Args:
        batches: for each input of a jaxpr the micro-batches in which it is loaded, None if it is not; none when empty.
        results: for each result whether it may be stored by rows; none when empty.
        of_loops: whether all loops store the rows of their stacks, not pipelines alone.
    """

    batches: tuple[int | None, ...] = ()
    results: tuple[bool, ...] = ()
    of_loops: bool = False


NO_STREAMS = Streams()


# A value may be read from the host by rows if all of its readers split it along its leading dimension in one number of
# rows: a pipeline in micro-batches, a loop in one row for each iteration. So for each value the *row counts* of its
# readers are found, a set.

_READ_WHOLE = 0  # row count of any other reader


def batch_arguments(jaxpr: ClosedJaxpr, of_loops: bool = False) -> dict[int, int]:
    """Inputs of a traced function that go in by rows, with the number of these.

    Args:
        jaxpr: the traced function; for loops after the pass `count_loops`.
        of_loops: whether loops read rows of their stacks from the host, not pipelines alone.
    """
    row_counts = _row_counts(jaxpr.jaxpr, of_loops=of_loops)
    counts = {n: row_counts.get(var, set()) for n, var in enumerate(jaxpr.jaxpr.invars)}
    return {n: count for n, numbers in counts.items() if len(numbers) == 1 and (count := max(numbers)) > 1}


def _row_counts(body: Jaxpr, *, of_loops: bool, is_inside_loop: bool = False) -> dict[Var, set[int]]:
    """For each variable that is read the row counts of its readers: in how many rows each splits it.

    The count of a reader that does not split it is `_READ_WHOLE`.

    Args:
        body: the jaxpr.
        of_loops: whether loops read rows of their stacks from the host, not pipelines alone.
        is_inside_loop: whether it is the body of a loop.
    """
    # A result goes out whole. Backwards, as a reshape reads its operand as readers of its result do.
    row_counts: dict[Var, set[int]] = {atom: {_READ_WHOLE} for atom in body.outvars if isinstance(atom, Var)}
    for eqn in reversed(body.eqns):
        counts_of_operands = _row_counts_of_operands(eqn, row_counts, of_loops, is_inside_loop)
        for atom, counts in zip(eqn.invars, counts_of_operands, strict=True):
            if isinstance(atom, Var):
                row_counts.setdefault(atom, set()).update(counts)
    return row_counts


def _row_counts_of_operands(
    eqn: JaxprEqn, row_counts: Mapping[Var, set[int]], of_loops: bool, is_inside_loop: bool
) -> Sequence[set[int]]:
    """The row counts of an equation as reader of each operand, a set for each.

    Args:
        eqn: the equation.
        row_counts: row counts of the readers of its results, which a reshape passes on.
        of_loops: whether loops read rows of their stacks from the host, not pipelines alone.
        is_inside_loop: whether it is in the body of a loop.
    """
    name = eqn.primitive.name
    if name in _PIPELINES:
        spec = eqn.params["spec"]
        return [{spec.micro_batches if role == "batch" else _READ_WHOLE} for role in spec.roles]
    if name == "scan" and of_loops:
        return _row_counts_of_loop(eqn, is_inside_loop)
    if is_reshape(eqn):
        return [row_counts.get(eqn.outvars[0], set())]
    callee = closed(eqn.params[_CALLEES[name]]).jaxpr if name in _CALLEES else None
    if callee is None or len(callee.invars) != len(eqn.invars):
        return [{_READ_WHOLE}] * len(eqn.invars)
    inner = _row_counts(callee, of_loops=of_loops, is_inside_loop=is_inside_loop)
    return [inner.get(var, set()) for var in callee.invars]


def _row_counts_of_loop(loop: JaxprEqn, is_inside_loop: bool) -> list[set[int]]:
    """For each operand of a loop the numbers of rows in which it reads that from the host, a set: its row counts.

    A stack is read by rows, and so is a constant of which each iteration reads one; others are `_READ_WHOLE`. Constants
    of a loop inside of another do not count: what changes with the outer loop has no rows by its counter.
    """
    scan = scan_body(loop.params)
    body = scan.jaxpr.jaxpr
    inner = _row_counts(body, of_loops=True, is_inside_loop=True)
    rows = body.invars[scan.inputs.stacks]
    counts_of_stacks = [{loop.params["length"] * _rows_inside(row, inner.get(row, set()))} for row in rows]
    counts = [*({_READ_WHOLE} for _ in range(scan.operands.stacks.start)), *counts_of_stacks]  # stacks come last
    if not is_inside_loop:
        for n in rows_by_counter(loop):
            counts[n] = {shape_of(loop.invars[n])[0]}
    return counts


def _rows_inside(row: Var, row_counts: set[int]) -> int:
    """The rows in which loops inside of a loop read a row of it; 1 if anything else reads it, or other parts of it."""
    return max(row_counts) if len(row_counts) == 1 and max(row_counts) in _leading_rows(row) else 1


def _leading_rows(value: Atom) -> set[int]:
    """The numbers of rows, more than one, that leading dimensions of a value have."""
    return {rows for rows in accumulate(shape_of(value), mul) if rows > 1}


def could_stream_loops(counted: ClosedJaxpr, before: ClosedJaxpr) -> bool:
    """True if loops read arguments by rows, or stack results, that are not streamed already.

    A program that does not fit is then compiled again with streamed loops. Arguments are judged without calls, and with
    loops whose length is known, before other passes change how they are read.

    Args:
        counted: the function after the pass `count_loops`.
        before: the function before this pass.
    """
    if batch_arguments(counted, of_loops=True) != batch_arguments(counted):
        return True
    body = unwrapped(before).jaxpr.jaxpr
    stacks = _sent_stacks(body, Streams(results=(True,) * len(body.outvars), of_loops=True))
    return any(not is_pipeline(eqn) for eqn in body.eqns if not stacks.isdisjoint(eqn.outvars))


def sends_results(body: Jaxpr) -> list[bool]:
    """For each result whether it is a stack, or a reshaped one, that a pipeline or a loop stores by rows."""
    definition = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    return [_is_sent(atom, definition) for atom in body.outvars]


def _is_sent(atom: Atom, definition: Mapping[Var, JaxprEqn]) -> bool:
    """True if a value is a stack, or a reshaped one, that a pipeline or a loop stores off chip by rows.

    `definition` has the equation that defines each value. A pipeline has no entry in `sent` if it stores none.
    """
    eqn = definition.get(atom) if isinstance(atom, Var) else None
    if eqn is None:
        return False
    if is_reshape(eqn):
        return _is_sent(eqn.invars[0], definition)
    number = eqn.outvars.index(atom)  # type: ignore[arg-type]
    if eqn.primitive.name == PIPELINE:
        return bool(eqn.params["spec"].sent) and eqn.params["spec"].sent[number]
    return eqn.primitive.name == "scan" and sent_rows(eqn.params["jaxpr"].jaxpr)[number]


def sent_rows(body: Jaxpr) -> list[bool]:
    """For each result of the body of a loop whether it is sent to the host."""
    sent = {eqn.outvars[0] for eqn in body.eqns if eqn.primitive is host_send_p}
    return [isinstance(x, Var) and x in sent for x in body.outvars]


def stream(jaxpr: ClosedJaxpr, streams: Streams = NO_STREAMS) -> ClosedJaxpr:
    """Returns an equal jaxpr whose pipelines load and store micro-batches themselves.

    Args:
        jaxpr: after all other passes but `offload`; of one `replicated` equation if there are several replicas.
        streams: batches that are loaded, and results that may be stored, by micro-batches.
    """
    if not any(streams.batches) and not any(streams.results):
        return jaxpr

    def rewrite(body: ClosedJaxpr, sources: Sequence[int | None]) -> ClosedJaxpr:
        batches = [None if source is None or not streams.batches else streams.batches[source] for source in sources]
        return _stream_one_replica(body, replace(streams, batches=tuple(batches)))

    return on_one_replica(jaxpr, rewrite)


def _stream_one_replica(jaxpr: ClosedJaxpr, streams: Streams) -> ClosedJaxpr:
    """Makes pipelines load and store by rows, and loads batches entirely for other readers."""
    body = jaxpr.jaxpr
    # Number of rows of each value on the host; a reshape of an argument is one too.
    batches = {var: count for var, count in zip(body.invars, streams.batches, strict=True) if count is not None}
    for eqn in body.eqns:
        if _is_reshape_of(eqn, batches):
            batches[eqn.outvars[0]] = batches[eqn.invars[0]]
    sent = _sent_stacks(body, streams)
    eqns: list[JaxprEqn] = []
    for eqn in body.eqns:
        if _streams_rows(eqn, streams.of_loops):
            eqns += _with_row_loads(_with_streamed_rows(eqn, batches, sent), batches)
        elif _is_reshape_of(eqn, batches) or batches.keys().isdisjoint(variables_read(eqn)):
            eqns.append(eqn)
        else:  # another pass has made it read a batch
            eqns += _with_loads(eqn, batches)
    return ClosedJaxpr(body.replace(eqns=eqns), jaxpr.consts)


def _streams_rows(eqn: JaxprEqn, of_loops: bool) -> bool:
    """True for a pipeline, and for any loop where loops stream."""
    return is_pipeline(eqn) or (of_loops and eqn.primitive.name == "scan")


def _with_row_loads(eqn: JaxprEqn, batches: Mapping[Var, int]) -> list[JaxprEqn]:
    """A loop over micro-batches whose batches stay on the host: each iteration loads the rows that it reads.

    So do loops inside. A pipeline stays as it is, since its lowering loads rows.

    Args:
        eqn: the pipeline, or the loop, a `scan`.
        batches: number of rows of each value on the host.
    """
    if eqn.primitive.name != "scan":
        return [eqn]
    *loads, loop = _with_table_reads(eqn, batches)
    return [*loads, *_with_nested_row_loads(loop, batches)]


def _with_nested_row_loads(loop: JaxprEqn, batches: Mapping[Var, int]) -> list[JaxprEqn]:
    """A loop, in which loops inside read their rows of batches by number, so that none is loaded for all of them.

    Args:
        loop: a `scan`.
        batches: number of rows of each value on the host; more than the loop has iterations if loops inside read it.
    """
    are_stacks = scan_body(loop.params).operands.are_stacks()
    operands = enumerate(zip(loop.invars, are_stacks, strict=True))
    stacks = {n: x for n, (x, is_stack) in operands if is_stack and isinstance(x, Var) and x in batches}
    length = loop.params["length"]
    # Those of which loops inside read the rows of an iteration, not this loop itself.
    nested = {n: x for n, x in stacks.items() if batches[x] > length}
    if not nested:
        return [loop]
    if any(batches[x] not in _leading_rows(x) for x in nested.values()):  # a mesh has split the rows inside
        return _with_loads(loop, list(nested.values()))
    tables = {x: _reshape_to_table(x, batches[x], loop) for x in nested.values()}
    rows = {n: Rows(tables[x].outvars[0], batches[x] // length) for n, x in nested.items()}
    return [*tables.values(), *read_by_number(loop, rows)]


def _with_table_reads(loop: JaxprEqn, batches: Mapping[Var, int]) -> list[JaxprEqn]:
    """A loop whose body reads rows of batches, which are constants of the loop, on the host.

    If it also reads a batch entirely, or as a carry, as another pass may make it, all are loaded before the loop.

    Args:
        loop: a `scan`.
        batches: number of rows of each value on the host.
    """
    scan = scan_body(loop.params)
    body = scan.jaxpr
    # Batches among constants and carries: of stacks the loop itself reads the rows.
    batches_read = [x for x in loop.invars[: scan.operands.stacks.start] if isinstance(x, Var) and x in batches]
    if not batches_read:
        return [loop]
    pairs = zip(body.jaxpr.invars[scan.inputs.constants], loop.invars[scan.operands.constants], strict=True)
    tables = {var for var, x in pairs if x in batches_read}  # inputs of the body
    eqns = [each for eqn in body.jaxpr.eqns for each in (row_access(eqn) if reads_row(eqn, tables) else [eqn])]
    others_read = [var for eqn in eqns if eqn.primitive is not remote_rows_p for var in variables_read(eqn)]
    read_entirely = tables.intersection([*others_read, *(x for x in body.jaxpr.outvars if isinstance(x, Var))])
    if read_entirely or not batches.keys().isdisjoint(variables(loop.invars[scan.operands.carries])):
        return _with_loads(loop, batches_read)
    return [loop.replace(params={**loop.params, "jaxpr": ClosedJaxpr(body.jaxpr.replace(eqns=eqns), body.consts)})]


def _reshape_to_table(batch: Var, count: int, like: JaxprEqn) -> JaxprEqn:
    """The reshape of a batch to a table of `count` rows, by joining leading dimensions; at the source of `like`."""
    aval: Any = batch.aval
    dims = list(aval.shape)
    rows = 1
    while rows < count:
        rows *= dims.pop(0)
    table = Var(aval.update(shape=(count, *dims)))
    params = {"new_sizes": shape_of(table), "dimensions": None, "sharding": None}
    return new_equation(lax.reshape_p, [batch], [table], params, like)


def _is_reshape_of(eqn: JaxprEqn, values: Collection[Var]) -> bool:
    # A literal has no hash.
    return is_reshape(eqn) and isinstance(eqn.invars[0], Var) and eqn.invars[0] in values


def _with_streamed_rows(eqn: JaxprEqn, batches: Collection[Var], sent: set[Var]) -> JaxprEqn:
    """A pipeline that loads the batches it reads, and stores its results of `sent`, by micro-batches.

    A loop stores its results of `sent` by rows.
    """
    is_sent = [var in sent for var in eqn.outvars]
    if eqn.primitive.name == PIPELINE:
        spec = eqn.params["spec"]
        streamed = tuple(
            role == "batch" and isinstance(atom, Var) and atom in batches
            for atom, role in zip(eqn.invars, spec.roles, strict=True)
        )
        return eqn.replace(params={**eqn.params, "spec": replace(spec, streamed=streamed, sent=tuple(is_sent))})
    return (
        eqn.replace(params={**eqn.params, "jaxpr": _with_sends(eqn.params["jaxpr"], is_sent)}) if any(is_sent) else eqn
    )


def _with_sends(jaxpr: ClosedJaxpr, is_sent: Sequence[bool]) -> ClosedJaxpr:
    """The body of a loop that sends rows of some results to the host."""
    body = jaxpr.jaxpr
    pairs = zip(body.outvars, is_sent, strict=True)
    outvars: list[Atom] = [Var(atom.aval) if is_row else atom for atom, is_row in pairs]
    sends = [
        new_equation(host_send_p, [atom], [row], {}, None)
        for atom, row in zip(body.outvars, outvars, strict=True)
        if atom is not row and isinstance(row, Var)
    ]
    return ClosedJaxpr(body.replace(eqns=[*body.eqns, *sends], outvars=outvars), jaxpr.consts)


def _with_loads(eqn: JaxprEqn, batches: Collection[Var]) -> list[JaxprEqn]:
    """An equation after loads of the whole batches that it reads."""
    arrived: dict[Var, Var] = {var: Var(var.aval) for var in variables_read(eqn) if var in batches}
    loads = [new_equation(remote_load_p, [var], [loaded], {"in_groups": False}, eqn) for var, loaded in arrived.items()]
    return [*loads, eqn.replace(invars=[arrived.get(x, x) if isinstance(x, Var) else x for x in eqn.invars])]


def _sent_stacks(body: Jaxpr, streams: Streams) -> set[Var]:
    """Stacked results of pipelines, or loops, whose rows may go to the host one by one, as nothing else reads them.

    Only reshapes read them, and the results of the jaxpr that `streams` allows to be stored by rows.
    """
    num_readers = Counter(var for eqn in body.eqns for var in variables_read(eqn))
    num_readers.update(atom for atom in body.outvars if isinstance(atom, Var))
    definition = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    pairs = zip(body.outvars, streams.results or (False,) * len(body.outvars), strict=True)
    stacks = (_stack_of(atom, definition, num_readers, streams.of_loops) for atom, may_be_sent in pairs if may_be_sent)
    return {stack for stack in stacks if stack is not None}


def _stack_of(atom: Atom, definition: Mapping[Var, JaxprEqn], num_readers: Counter[Var], of_loops: bool) -> Var | None:
    """The stack of a pipeline, or loop, that a result shows alone, None for other results."""
    while isinstance(atom, Var) and num_readers[atom] == 1 and (eqn := definition.get(atom)) is not None:
        if _streams_rows(eqn, of_loops):
            return atom if _is_stack_of_rows(eqn, eqn.outvars.index(atom)) else None
        if not is_reshape(eqn):
            return None
        atom = eqn.invars[0]
    return None


def _is_stack_of_rows(eqn: JaxprEqn, number: int) -> bool:
    """True if a result of a pipeline or loop stacks several rows that are worth a host exchange."""
    aval: Any = eqn.outvars[number].aval
    is_stack = (
        eqn.params["spec"].reduce[number] == "stack"
        if eqn.primitive.name == PIPELINE
        else scan_body(eqn.params).results.are_stacks()[number]
    )
    count, *row = shape_of(eqn.outvars[number]) if is_stack else (0,)  # rows, and the shape of one
    return count > 1 and prod(row) >= _MIN_ELEMENTS and not is_key_dtype(aval.dtype) and not is_float0(aval)
