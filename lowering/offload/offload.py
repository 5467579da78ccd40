"""Pass `offload`: arguments in streaming memory are loaded before they are used, and stored when they are replaced.

    m2 = 0.9 * m + g                      m1 = remote_load m; m2 = 0.9 * m1 + g; r = remote_store m m2

Input: a jaxpr, its arguments in streaming memory, and the argument that each result replaces. Output: an equal jaxpr. A
value that is used again after others have been loaded is dropped in between and loaded again; optimisers update one
parameter after the other, see `depth_first`; small transfers go together, see `batches`. Of a table that is looked up
or updated by rows, only these rows move, see `row_updates`.

The update of an optimiser is traced as operations over all parameters. Its equations are put in depth-first order of
the results, one parameter after the other, so that the state of all parameters need not be on chip at the same time;
with effects in the update, all equations keep their order.

Source: tensor locations of PopART, off chip.
Stacks of a `lax.scan` stay off chip too: each iteration loads its row. A value that the user puts on the host,
`host_put`, is stored after it is computed, and loaded before it is read, in loops and branches too.
Limits: other arguments of a loop or branch are loaded entirely before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    closed,
    jaxprs_in_params,
    new_equation,
    without_axes,
)
from ipujax.lowering.jaxpr import PIPELINE, equations, has_phases, stage_name, value_bytes, variables, variables_read
from ipujax.lowering.offload.alternating_ipus import alternate_ipus
from ipujax.lowering.offload.batches import Batch, batch_transfers, in_batches, overlapped
from ipujax.lowering.offload.control_flow import BodyMemory, BodyRewrite
from ipujax.lowering.offload.io_tiles import IoTiles, check_room
from ipujax.lowering.offload.micro_batch_streams import sends_results
from ipujax.lowering.offload.move_plan import StagedValues
from ipujax.lowering.offload.moves import Moved, with_moves
from ipujax.lowering.offload.phase_steps import steps_of_phases
from ipujax.lowering.offload.primitives import host_put_p
from ipujax.lowering.offload.row_updates import StagedEquation, updates_in_place
from ipujax.lowering.replicas import on_one_replica
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError


def depth_first(eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> list[JaxprEqn]:
    """The equations, those behind the last gradient in another order: the update of one parameter after the other.

    So the state of one parameter is loaded, updated and stored before that of the next, and is never on the tiles with
    all others. The smallest comes first: a gradient is dropped after its update, so that fewest are beside the state of
    the largest. An update with effects keeps its order. `results` are the program's.
    """
    start = 1 + max((n for n, eqn in enumerate(eqns) if _is_gradient(eqn)), default=len(eqns) - 1)
    update = eqns[start:]
    if any(without_axes(eqn.effects) for eqn in update):
        return list(eqns)
    defining_eqn = {var: n for n, eqn in enumerate(update) for var in eqn.outvars}
    order: dict[int, None] = {}
    for atom in sorted(variables(results), key=lambda var: value_bytes(var.aval)):
        _append_with_operands(defining_eqn.get(atom), update, defining_eqn, order)
    unused = [n for n in range(len(update)) if n not in order]
    return [*eqns[:start], *(update[n] for n in (*order, *unused))]


def _is_gradient(eqn: JaxprEqn) -> bool:
    return stage_name(eqn).is_backward or eqn.primitive.name == PIPELINE


def _append_with_operands(
    root: int | None, eqns: Sequence[JaxprEqn], defining_eqn: dict[Var, int], order: dict[int, None]
) -> None:
    """Adds the number of equation `root`, none if None, to `order`, after those of its operands.

    Without recursion: chains of equations may exceed Python's limit.
    """
    stack = [] if root is None else [(root, False)]
    while stack:
        number, has_operands_in_order = stack.pop()
        if has_operands_in_order:
            order.setdefault(number)
        elif number not in order:
            stack.append((number, True))
            # Reversed: the first operand is popped first.
            operand_eqns = [defining_eqn[var] for var in reversed(variables_read(eqns[number])) if var in defining_eqn]
            stack += [(n, False) for n in operand_eqns if n not in order]


BATCH_BYTES = 1 << 20  # 5 times the bytes moved in a latency of 10 us, and 700 bytes of each tile of a chip


@dataclass(frozen=True, slots=True)
class Offloading:
    """Values in streaming memory.

    Args:
        inputs: for each input of a jaxpr whether it is there.
        aliases: for each output the index of the input that it replaces, or None.
        num_ipus: IPUs of a replica, which alternate in phases.
        batch_bytes: bytes of loads, or stores, that go together; those of a few latencies are enough.
        io_tiles: tiles that move them, None if all tiles do.
        hosted: for each input whether it is there because the user has put it on the host; none when empty.
    """

    inputs: tuple[bool, ...] = ()
    aliases: tuple[int | None, ...] = ()
    num_ipus: int = 1
    batch_bytes: int = BATCH_BYTES
    io_tiles: IoTiles | None = None
    hosted: tuple[bool, ...] = ()


ON_CHIP = Offloading()


def offload(
    jaxpr: ClosedJaxpr, offloading: Offloading = ON_CHIP, in_groups: Callable[[Jaxpr], Sequence[bool]] | None = None
) -> ClosedJaxpr:
    """Returns an equal jaxpr that loads and stores values in streaming memory.

    Args:
        jaxpr: after all other passes; of one `replicated` equation if there are several replicas.
        offloading: values in streaming memory.
        in_groups: tells which inputs of a jaxpr have their columns in channel groups on tiles; none when None.
    """
    puts = any(eqn.primitive is host_put_p for eqn in equations(jaxpr.jaxpr))
    if not any(offloading.inputs) and offloading.io_tiles is None and not puts:
        return jaxpr

    def rewrite(body: ClosedJaxpr, sources: Sequence[int | None]) -> ClosedJaxpr:
        grouped = [False] * len(sources) if in_groups is None else in_groups(body.jaxpr)
        offloaded = _offload_one_replica(body, _for_one_replica(offloading, sources, len(body.jaxpr.outvars)), grouped)
        _check_host_puts(offloaded.jaxpr, ())
        return offloaded

    return on_one_replica(jaxpr, rewrite)


def _for_one_replica(offloading: Offloading, sources: Sequence[int | None], num_results: int) -> Offloading:
    """Offloading of the jaxpr of one replica, whose input n is the program's input `sources[n]`."""
    replica_input = {source: n for n, source in enumerate(sources) if source is not None}
    inputs, hosted = (
        tuple(source is not None and bool(flags) and flags[source] for source in sources)
        for flags in (offloading.inputs, offloading.hosted)
    )
    aliases = tuple(
        None if alias is None else replica_input[alias] for alias in offloading.aliases or (None,) * num_results
    )
    return replace(offloading, inputs=inputs, hosted=hosted, aliases=aliases)


def _offload_one_replica(jaxpr: ClosedJaxpr, offloading: Offloading, grouped: Sequence[bool]) -> ClosedJaxpr:
    """Adds loads and stores to the jaxpr of one replica: planned, emitted, and put in batches.

    `grouped` says for each input whether its columns are in channel groups on tiles.
    """
    body, is_put = _without_puts(jaxpr.jaxpr)
    inputs = zip(body.invars, offloading.inputs, grouped, strict=True)
    hosted = [var for var, is_hosted in zip(body.invars, offloading.hosted, strict=True) if is_hosted]
    remote = {var: in_groups for var, is_remote, in_groups in inputs if is_remote}
    replaced_inputs = [None if alias is None else body.invars[alias] for alias in offloading.aliases]
    destinations = [replaced if replaced in remote else None for replaced in replaced_inputs]
    ordered, phases = _in_steps(body)
    steps, in_place = updates_in_place(ordered, body.outvars, destinations)
    # With phases or I/O tiles new results leave the tiles as soon as they are computed, but for those that a loop or
    # pipeline stores by rows itself.
    overlaps = has_phases(body) or offloading.io_tiles is not None
    streamed = sends_results(body)
    values = StagedValues(
        steps=steps,
        outvars=body.outvars,
        remote=remote,
        hosted=hosted,
        destinations=destinations,
        is_put=is_put,
        is_sent=[overlaps and alias is None and not x for alias, x in zip(offloading.aliases, streamed, strict=True)],
        in_place=in_place,
    )
    moves = with_moves(values, _body_rewrite(offloading.batch_bytes))
    if offloading.io_tiles is not None:
        check_room(moves.eqns, offloading.io_tiles)
    if has_phases(body) and offloading.num_ipus > 1:
        eqns = alternate_ipus(
            moves.eqns, moves.steps, phases, offloading.num_ipus, offloading.batch_bytes, offloading.io_tiles
        )
    elif offloading.io_tiles is not None:
        eqns = overlapped(_batches_of_ipu(moves, offloading.batch_bytes, has_phases(body)), offloading.io_tiles)
    else:
        eqns = batch_transfers(moves.eqns, offloading.batch_bytes)
    return ClosedJaxpr(body.replace(eqns=eqns, outvars=moves.outvars), jaxpr.consts)


def _batches_of_ipu(moves: Moved, batch_bytes: int, is_phased: bool) -> list[Batch]:
    """Batches of loads and stores of a single IPU; with phases those of each step, which I/O tiles count."""
    if not is_phased:
        return in_batches(moves.eqns, batch_bytes)
    groups = groupby(zip(moves.steps, moves.eqns, strict=True), key=lambda pair: pair[0])
    batches = [in_batches((eqn for _, eqn in group), batch_bytes, step=step) for step, group in groups]
    return list(chain.from_iterable(batches))


def _body_rewrite(batch_bytes: int) -> BodyRewrite:
    """The function that rewrites bodies of loops and branches, see `control_flow`."""

    def rewrite_body(jaxpr: ClosedJaxpr, memory: BodyMemory) -> ClosedJaxpr:
        """Adds the loads and stores of a body to values that stay in streaming memory around it."""
        body, _ = _without_puts(jaxpr.jaxpr)
        # Inputs in streaming memory, none in channel groups on tiles. All of them stay there, as what a user has put on
        # the host (`hosted`): a body loads what it reads, in each iteration.
        remote = dict.fromkeys((body.invars[n] for n in memory.inputs), False)
        inputs = [memory.input_of_result.get(result) for result in range(len(body.outvars))]
        destinations = [None if n is None else body.invars[n] for n in inputs]
        # A body is in one step of phases.
        staged = [StagedEquation(eqn, step=0) for eqn in body.eqns]
        steps, in_place = updates_in_place(staged, body.outvars, destinations)
        values = StagedValues(
            steps=steps,
            outvars=body.outvars,
            remote=remote,
            hosted=list(remote),
            destinations=destinations,
            is_put=[False] * len(destinations),  # what the body puts has a destination, or is a row, see below
            is_sent=[False] * len(destinations),
            in_place=in_place,
        )
        moves = with_moves(values, rewrite_body)
        eqns = batch_transfers(moves.eqns, batch_bytes)
        outvars = moves.outvars
        for result in memory.stacked_results:
            row = Var(outvars[result].aval)
            eqns.append(new_equation(host_put_p, [outvars[result]], [row], {}, None))
            outvars[result] = row
        return ClosedJaxpr(body.replace(eqns=eqns, outvars=outvars), jaxpr.consts)

    return rewrite_body


def _without_puts(body: Jaxpr) -> tuple[Jaxpr, list[bool]]:
    """The jaxpr with results before they are put, and for each result whether it was put.

    A put value that an equation reads keeps its put.
    """
    read = {var for eqn in body.eqns for var in variables_read(eqn)}
    put = {eqn.outvars[0]: eqn for eqn in body.eqns if eqn.primitive is host_put_p}
    is_put = [isinstance(x, Var) and x in put for x in body.outvars]

    def before_put(atom: Atom) -> Atom:
        while isinstance(atom, Var) and atom in put and atom not in read:
            (atom,) = put[atom].invars
        return atom

    removed_ids = {id(eqn) for var, eqn in put.items() if var not in read}
    eqns = [eqn for eqn in body.eqns if id(eqn) not in removed_ids]
    return body.replace(eqns=eqns, outvars=[before_put(x) for x in body.outvars]), is_put


def _check_host_puts(body: Jaxpr, stacked: Collection[Atom]) -> None:
    """Refuses puts that are left after the pass, other than those of `stacked` results of a scan.

    Raises:
        ArgumentError: with the line of a put that the pass does not reach.
    """
    for eqn in body.eqns:
        if eqn.primitive is host_put_p and not any(eqn.outvars[0] is x for x in stacked):
            raise ArgumentError(
                "a value is put on the host inside a stage or a library function, which run as one piece",
                where=source_line(eqn) or None,
                expected="jax.device_put to the host, and checkpoints that offload, outside of pipelines with stages",
                hint="leave it on the device there; ipu.pipeline(recompute=...) saves memory within stages",
            )
        for inner in map(closed, jaxprs_in_params(eqn.params)):
            _check_host_puts(inner.jaxpr, inner.jaxpr.outvars if eqn.primitive.name == "scan" else ())


def _in_steps(body: Jaxpr) -> tuple[list[StagedEquation], tuple[int | None, ...]]:
    """The equations in the order of their steps, each with its step; and the phase of each step."""
    steps = steps_of_phases(body.eqns)
    step_of = dict(zip(map(id, body.eqns), steps.of_equations, strict=True))
    eqns = depth_first(sorted(body.eqns, key=lambda eqn: step_of[id(eqn)]), body.outvars)
    return [StagedEquation(eqn, step_of[id(eqn)]) for eqn in eqns], steps.phases
