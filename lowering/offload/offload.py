"""Pass `offload`: arguments that lie in streaming memory are loaded before they are used, and stored when they are new.

    m2 = 0.9 * m + g                      m1 = remote_load m; m2 = 0.9 * m1 + g; r = remote_store m m2

Input: a jaxpr, which of its arguments lie there, and which result takes the place of which argument. Output: an equal
jaxpr. What is used again after others have been loaded is dropped in between and loaded anew; optimisers update one
parameter after the other, see `depth_first`; small transfers go together, see `batches`. Of a table that is looked up
or updated by rows, these rows move, see `row_updates`.

Source: tensor locations of PopART, off chip.
What a `lax.scan` goes through stays off chip too: each iteration loads its row. What the user puts on the host,
`host_put`, is stored where that is, and loaded where it is read, in loops and branches too.
Limits: other arguments that a loop or branch reads are loaded as a whole before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Var, closed, jaxprs_in_params, new_equation
from ipujax.lowering.jaxpr import equations, has_phases, variables_read
from ipujax.lowering.offload.batches import IoTiles, batched
from ipujax.lowering.offload.control_flow import Inside
from ipujax.lowering.offload.depth_first import depth_first
from ipujax.lowering.offload.moves import Moves
from ipujax.lowering.offload.phase_steps import steps_of_phases
from ipujax.lowering.offload.primitives import host_put_p
from ipujax.lowering.offload.row_updates import updates_in_place
from ipujax.lowering.offload.turns import in_turns
from ipujax.lowering.replicas import on_one_replica
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError

BATCH_BYTES = 1 << 20  # 5 times what moves in a latency of 10 us, and 700 bytes of each tile of a chip


@dataclass(frozen=True, slots=True)
class Offloading:
    """What lies in streaming memory.

    Args:
        inputs: for each input of a jaxpr whether it does.
        aliases: for each output the number of the input whose place it takes, or None.
        num_ipus: IPUs of a replica, on which phases take turns.
        batch_bytes: of loads, or stores, that go together; what moves in a few latencies is enough.
        io_tiles: those that move it, None if all tiles do.
        hosted: for each input whether it does because the user has it on the host; none when empty.
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
    """Returns an equal jaxpr that loads and stores what lies in streaming memory.

    Args:
        jaxpr: after all other passes; of one `replicated` equation if there are several replicas.
        offloading: what lies there.
        in_groups: says which inputs of a jaxpr tiles keep with their columns in groups; none when None.
    """
    puts = any(eqn.primitive is host_put_p for eqn in equations(jaxpr.jaxpr))
    if not any(offloading.inputs) and offloading.io_tiles is None and not puts:
        return jaxpr

    def rewrite(body: ClosedJaxpr, places: Sequence[int | None]) -> ClosedJaxpr:
        grouped = [False] * len(places) if in_groups is None else in_groups(body.jaxpr)
        done = _offloaded(body, _inside(offloading, places, len(body.jaxpr.outvars)), grouped)
        _check_host_puts(done.jaxpr, ())
        return done

    return on_one_replica(jaxpr, rewrite)


def _inside(offloading: Offloading, places: Sequence[int | None], num_results: int) -> Offloading:
    """The same for the jaxpr of one replica, of which input n is the whole's input `places[n]`."""
    own = {place: n for n, place in enumerate(places) if place is not None}
    inputs, hosted = (
        tuple(place is not None and bool(given) and given[place] for place in places)
        for given in (offloading.inputs, offloading.hosted)
    )
    aliases = tuple(None if alias is None else own[alias] for alias in offloading.aliases or (None,) * num_results)
    return replace(offloading, inputs=inputs, hosted=hosted, aliases=aliases)


def _offloaded(jaxpr: ClosedJaxpr, offloading: Offloading, grouped: Sequence[bool]) -> ClosedJaxpr:
    body, stays = _without_puts(jaxpr.jaxpr)
    inputs = zip(body.invars, offloading.inputs, grouped, strict=True)
    hosted = [var for var, is_there in zip(body.invars, offloading.hosted, strict=True) if is_there]
    remote = {var: in_groups for var, is_remote, in_groups in inputs if is_remote}
    homes = [None if alias is None else body.invars[alias] for alias in offloading.aliases]
    offloaded = [home if home in remote else None for home in homes]
    ordered, phases = _in_steps(body)
    steps, in_place = updates_in_place(ordered, body.outvars, offloaded)
    sends_results = has_phases(body) or offloading.io_tiles is not None
    moves = Moves(
        steps,
        body.outvars,
        remote,
        offloaded,
        [sends_results and alias is None for alias in offloading.aliases],
        in_place,
        hosted,
        stays,
        _bodies(offloading.batch_bytes),
    )
    if has_phases(body) and offloading.num_ipus > 1:
        _check_no_io_tiles(offloading)
        eqns = in_turns(moves.eqns, moves.steps, phases, offloading.num_ipus, offloading.batch_bytes)
    else:
        eqns = batched(moves.eqns, offloading.batch_bytes, offloading.io_tiles)
    return ClosedJaxpr(body.replace(eqns=eqns, outvars=moves.outvars), jaxpr.consts)


def _bodies(batch_bytes: int) -> Inside:
    """What rewrites the bodies of loops and branches, see `control_flow`."""

    def inside(
        jaxpr: ClosedJaxpr, there: Collection[int], memories: Mapping[int, int], rows: Collection[int]
    ) -> ClosedJaxpr:
        body, _ = _without_puts(jaxpr.jaxpr)
        hosted = {body.invars[n]: False for n in there}
        homes = [body.invars[memories[k]] if k in memories else None for k in range(len(body.outvars))]
        steps, in_place = updates_in_place([(eqn, 0) for eqn in body.eqns], body.outvars, homes)
        none = [False] * len(homes)
        moves = Moves(steps, body.outvars, hosted, homes, none, in_place, hosted, none, inside)
        eqns, outvars = batched(moves.eqns, batch_bytes), moves.outvars
        for k in rows:
            row = Var(outvars[k].aval)
            eqns.append(new_equation(host_put_p, [outvars[k]], [row], {}, None))
            outvars[k] = row
        return ClosedJaxpr(body.replace(eqns=eqns, outvars=outvars), jaxpr.consts)

    return inside


def _without_puts(body: Jaxpr) -> tuple[Jaxpr, list[bool]]:
    """The jaxpr with results as they are before they are put, where nothing else reads them, and which are put."""
    read = {var for eqn in body.eqns for var in variables_read(eqn)}
    put = {eqn.outvars[0]: eqn for eqn in body.eqns if eqn.primitive is host_put_p}
    stays = [isinstance(x, Var) and x in put for x in body.outvars]

    def before(atom: Atom) -> Atom:
        while isinstance(atom, Var) and atom in put and atom not in read:
            (atom,) = put[atom].invars
        return atom

    gone = {id(eqn) for var, eqn in put.items() if var not in read}
    eqns = [eqn for eqn in body.eqns if id(eqn) not in gone]
    return body.replace(eqns=eqns, outvars=[before(x) for x in body.outvars]), stays


def _check_host_puts(body: Jaxpr, stacked: Collection[Atom]) -> None:
    """Refuses values that are still put on the host after the moves are made: no transfer can be where they are.

    Args:
        body: the jaxpr with its moves.
        stacked: its results that a scan stacks, which are stored row by row.
    """
    for eqn in body.eqns:
        if eqn.primitive is host_put_p and not any(eqn.outvars[0] is x for x in stacked):
            raise ArgumentError(
                "a value is put on the host inside of what runs as one piece: a stage, or a function of a library",
                where=source_line(eqn) or None,
                expected="jax.device_put to the host, and checkpoints that offload, outside of pipelines with stages",
                hint="leave it on the device there; ipu.pipeline(recompute=...) saves memory within stages",
            )
        for inner in map(closed, jaxprs_in_params(eqn.params)):
            _check_host_puts(inner.jaxpr, inner.jaxpr.outvars if eqn.primitive.name == "scan" else ())


def _check_no_io_tiles(offloading: Offloading) -> None:
    if offloading.io_tiles is not None:
        raise ArgumentError(
            "phases take turns on several IPUs, and I/O tiles are asked for",
            expected="one of both: each makes transfers overlap what is computed",
            got=f"{offloading.num_ipus} IPUs for each replica",
            hint="Options(io_tiles=0), or num_ipus=1",
        )


def _in_steps(body: Jaxpr) -> tuple[list[tuple[JaxprEqn, int]], tuple[int | None, ...]]:
    """The equations in the order of their steps, each with its step; and the phase of each step."""
    steps = steps_of_phases(body.eqns)
    step_of = dict(zip(map(id, body.eqns), steps.of_equations, strict=True))
    eqns = depth_first(sorted(body.eqns, key=lambda eqn: step_of[id(eqn)]), body.outvars)
    return [(eqn, step_of[id(eqn)]) for eqn in eqns], steps.phases
