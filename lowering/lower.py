"""From a jaxpr to a graph and a control program.

    lower(jaxpr, target, donated, options) → LoweredProgram(graph, program, inputs, outputs)

Arguments become variables filled from host streams, each equation adds compute sets by its rule, see `equations`, and
results go to host streams. A donated argument stays on the device: the result that takes its place is copied into its
variable, and neither moves to or from the host. Stages of pipelines that have none are found first; then an argument
that stacks layers may be several variables, one a stage. Variables no rule has placed are placed linearly at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any

import jax

from ipujax.lowering.ipus import IpuView
from ipujax.lowering.jax_compat import ClosedJaxpr, Var, is_on_host
from ipujax.lowering.jaxpr import ValueRoles, has_stages
from ipujax.lowering.layout import MemoryOrder, map_linearly, must_be_set_aside, overwrite
from ipujax.lowering.merge import merge_compute_sets
from ipujax.lowering.other_roles import note_other_roles
from ipujax.lowering.passes.channel_groups import grouped_inputs
from ipujax.lowering.pipelining import CutJaxpr, Cuts, PipelineRun, find_stages, lower_staged, num_shards, uncut
from ipujax.lowering.recomputation import KEEP_ALL, ChainTrade, Recomputation
from ipujax.lowering.replicas import Dims, Replicated, check_results, joined, of_one_replica, split, unwrapped
from ipujax.lowering.rules import Lowering, check_is_array
from ipujax.runtime.graph import (
    BYTE_PRICE_CYCLES,
    Copy,
    Graph,
    HostStream,
    Sequence as ProgramSequence,
    StreamIn,
    StreamOut,
)
from ipujax.runtime.host import ALONE, Instances
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin, Tensor, concat

_SHARES = ((16.0, 1 / 6), (2.0, 1 / 4), (1.0, 1 / 2))  # of what an operation may use, from a price of a byte on
_UPDATE = Origin(path="results into donated arguments")


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """A graph with its control program, and a host stream for each input and output of the jaxpr.

    Args:
        graph: variables, mappings and vertices.
        program: what runs in one call.
        inputs: one stream for each input of the jaxpr.
        outputs: one stream for each output.
        aliases: for each output, the number of the donated input whose variable it ends in, or None.
        in_dims: for each input the dimension that is split over replicas, None where all get the same.
        out_dims: for each output the dimension along which parts of replicas are joined, None where they are equal.
        pipelines: where pipelines with stages run.
        cuts: of each pipeline whose stages were found, where it is cut.
    """

    graph: Graph
    program: ProgramSequence
    inputs: tuple[HostStream, ...]
    outputs: tuple[HostStream, ...]
    aliases: tuple[int | None, ...]
    in_dims: Dims
    out_dims: Dims
    pipelines: tuple[PipelineRun, ...] = ()
    cuts: tuple[Cuts, ...] = ()

    @property
    def trades(self) -> tuple[ChainTrade, ...]:
        """What recomputation saves and costs in the stages of pipelines."""
        return tuple(trade for run in self.pipelines for trade in run.trades)

    def evaluate(
        self,
        operands: Sequence[jax.Array],
        run: Callable[..., Mapping[HostStream, Any]],
        instances: Instances = ALONE,
    ) -> list[jax.Array]:
        """The results of a run on whole arrays, which are split over replicas and joined again.

        Args:
            operands: one array for each input: what the replicas of this instance have of it.
            run: the engine's function of streams.
            instances: processes among which replicas are shared.
        """
        if self.graph.replication_factor == 1:
            outs = run(dict(zip(self.inputs, operands, strict=True)))
            return [outs[stream] for stream in self.outputs]
        replicas = instances.local(self.graph.replication_factor)
        parts = [split(x, dim, replicas) for x, dim in zip(operands, self.in_dims, strict=True)]
        outs = run(dict(zip(self.inputs, parts, strict=True)))
        return [joined(outs[stream], dim) for stream, dim in zip(self.outputs, self.out_dims, strict=True)]


def lower(
    jaxpr: ClosedJaxpr,
    target: Target,
    *,
    donated: Sequence[bool] = (),
    aliases: Sequence[int | None] | None = None,
    offloaded: Sequence[bool] = (),
    streamed: Sequence[bool] = (),
    names: Sequence[str] = (),
    line: str = "",
    options: Options | None = None,
    recomputation: Recomputation = KEEP_ALL,
    cuts: Sequence[Cuts] = (),
) -> LoweredProgram:
    """Lowers a jaxpr for a target.

    Args:
        jaxpr: inlined jaxpr, see `passes`; of one `replicated` equation if there are several replicas.
        target: the machine, of all replicas together.
        donated: for each input whether its buffer may be reused; all False when empty.
        aliases: for each output the donated input whose place it takes, or None; paired by shape, dtype and split when
            None.
        offloaded: for each input whether it lies in streaming memory, as the jaxpr has it already; all False when
            empty.
        streamed: for each input whether it lies in memory of the host's, and is loaded from there likewise.
        names: debug name of each input.
        line: line of equations whose own line is not the user's, `file:line (function)`.
        options: what the user chose, `Options()` when None; of no price of a byte, the first of the ladder.
        recomputation: what gradients of pipelines compute again; others do already.
        cuts: where to start to look for the stages of pipelines that have none; anywhere when empty.

    Returns:
        The graph and the program of one call.

    Raises:
        GraphError: for an argument or constant that is no array, for more replicas than the machine has room for, or
            for a result that is to be the same on all replicas and may differ, or for partials that no codelet has.
    """
    whole = unwrapped(jaxpr)
    jaxpr, replicas = whole.jaxpr, whole.replicas
    check_results(whole)
    for number, aval in enumerate(jaxpr.in_avals):
        check_is_array(aval, f"argument {names[number] if names else number}")
    for var in jaxpr.jaxpr.constvars:
        check_is_array(var.aval, "a value that the function closes over")
    donated = donated or [False] * len(jaxpr.in_avals)
    offloaded = offloaded or [False] * len(jaxpr.in_avals)
    streamed = streamed or [False] * len(jaxpr.in_avals)
    aliases = donated_aliases(whole, donated) if aliases is None else tuple(aliases)
    names = names or [f"arg{n}" for n in range(len(jaxpr.in_avals))]
    one, options = of_one_replica(target, replicas), options or Options()
    price = BYTE_PRICE_CYCLES if options.byte_price is None else options.byte_price
    planned_for = _with_less_memory(one, price)
    make = partial(Lowering, options=options)
    lowered: dict[ClosedJaxpr, LoweredProgram] = {}

    def program_of(found: CutJaxpr) -> LoweredProgram:
        if found.jaxpr not in lowered:
            lowered.clear()  # one at a time: most often the first fits, and is what is asked for again
            graph = Graph(planned_for, replicas, price, options.io_tiles)
            program = _Program(whole, found, graph, make, aliases, (offloaded, streamed), names, recomputation)
            lowered[found.jaxpr] = program.lowered(line)
        return lowered[found.jaxpr]

    def whole_of(found: CutJaxpr) -> tuple[Graph, ProgramSequence]:
        done = program_of(found)
        return done.graph, done.program

    if not has_stages(jaxpr.jaxpr):
        return program_of(uncut(jaxpr))
    found, cuts = find_stages(jaxpr, planned_for, make, whole_of, price, recomputation, cuts)
    return replace(program_of(found), cuts=cuts)


def _with_less_memory(target: Target, price: float) -> Target:
    """The machine as planners see it: the dearer a byte, the less of a tile an operation may use.

    Smaller operations take more code: a quarter is best for ResNet-50 and BERT-Large, a sixth for GPT-2 (measured).
    """
    share = next((share for least_price, share in _SHARES if price >= least_price), 1.0)
    return replace(target, available_memory_proportion=share * target.available_memory_proportion)


class _Program:
    """The program of one call; `found` is `whole` with arguments and results that may be in row shards."""

    def __init__(
        self,
        whole: Replicated,
        found: CutJaxpr,
        graph: Graph,
        make: Callable[..., Lowering],
        aliases: tuple[int | None, ...],
        off_chip: tuple[Sequence[bool], Sequence[bool]],
        names: Sequence[str],
        recomputation: Recomputation,
    ) -> None:
        self._whole, self._found, self._graph, self._names = whole, found, graph, names
        self._roles = ValueRoles(found.jaxpr.jaxpr, self._taken_places(aliases))
        self._make = partial(make, roles=self._roles)
        self._recomputation, (self._offloaded, self._streamed) = recomputation, off_chip
        # Where what belongs to no stage lies: not on tiles that only move data.
        self._home = IpuView(graph, 0) if graph.io_tiles else graph
        self._prog = ProgramSequence()
        self._aliases = aliases
        self._outputs = [
            HostStream(f"out{n}", aval.shape, aval.dtype, resident=alias is not None)
            for n, (aval, alias) in enumerate(zip(whole.jaxpr.out_avals, self._aliases, strict=True))
        ]
        self._shards: list[tuple[Tensor, ...]] = []  # of each argument

    def lowered(self, line: str) -> LoweredProgram:
        """The program; equations whose line is not the user's belong to `line`."""
        whole, graph, prog, names, aliases = self._whole, self._graph, self._prog, self._names, self._aliases
        arguments, inputs = self._arguments()
        results, pipelines = self._results(arguments, line)
        results = self._set_aside_arguments(results, arguments)
        for result, alias, stream in zip(results, aliases, self._outputs, strict=True):
            if not set(graph.off_chip).isdisjoint(result.variables()):
                self._leave_off_chip(result, stream, None if alias is None else arguments[alias])
                continue
            if alias is not None and result is not arguments[alias]:
                self._map_linearly(result)
                with graph.debug_origin(_UPDATE):
                    overwrite(graph, result, arguments[alias], prog, f"{names[alias]}/update")
                result = arguments[alias]
            prog.add(StreamOut(result, stream))
        for variable in graph.variables:
            self._map_linearly(Tensor.of(variable))
        note_other_roles(graph, prog)
        merge_compute_sets(graph, prog)
        ends = whole.in_dims, whole.out_dims
        return LoweredProgram(graph, prog, tuple(inputs), tuple(self._outputs), aliases, *ends, pipelines)

    def _arguments(self) -> tuple[list[Tensor], list[HostStream]]:
        """The tensors of all arguments, filled from host streams."""
        arguments, inputs = list[Tensor](), list[HostStream]()
        whole, graph, names = self._whole, self._graph, self._names
        grouped = iter(grouped_inputs(self._found.jaxpr.jaxpr))
        for number, (aval, bounds) in enumerate(zip(whole.jaxpr.in_avals, self._found.inputs, strict=True)):
            in_groups = any([next(grouped) for _ in range(num_shards(bounds))])
            shared = whole.replicas > 1 and whole.in_dims[number] is None
            resident = number in self._aliases
            stream = HostStream(names[number], aval.shape, aval.dtype, resident=resident, broadcast=shared)
            inputs.append(stream)
            if self._offloaded[number] or self._streamed[number]:
                self._shards.append(self._remote_argument(number, stream, bounds))
                arguments.append(_joined(self._shards[-1]))
                continue
            with graph.debug_origin(Origin(path=f"argument {names[number]}")):
                shapes = {names[number]: aval.shape}
                if bounds is not None:
                    spans = pairwise(bounds)
                    shapes = {f"{names[number]}[{a}:{b}]": (b - a, *aval.shape[1:]) for a, b in spans}
                shards = tuple(
                    MemoryOrder.for_argument(shape, in_groups).add_variable(graph, aval.dtype, name)
                    for name, shape in shapes.items()
                )
            self._shards.append(shards)
            arguments.append(_joined(shards))
            self._prog.add(StreamIn(stream, arguments[-1]))
        for var, shard in zip(self._found.jaxpr.jaxpr.invars, chain.from_iterable(self._shards), strict=True):
            graph.note_role(shard, self._roles.get(var))
        return arguments, inputs

    def _set_aside_arguments(self, results: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[Tensor]:
        """Copies results that are views of a donated argument, before that argument is overwritten."""
        overwritten = {v for alias in self._aliases if alias is not None for v in arguments[alias].variables()}
        kept = []
        for result, alias in zip(results, self._aliases, strict=True):
            stays = alias is not None and not must_be_set_aside(result, arguments[alias], overwritten)
            if not stays and overwritten & set(result.variables()):
                copy = self._home.add_variable(result.shape, result.dtype, "aside")
                self._map_linearly(copy)
                self._prog.add(Copy(result, copy, "aside", _UPDATE))
                result = copy
            kept.append(result)
        return kept

    def _map_linearly(self, tensor: Tensor) -> None:
        """Maps what no rule has placed."""
        for variable in tensor.variables():
            if variable not in self._graph.mappings:
                map_linearly(self._home, Tensor.of(variable))

    def _leave_off_chip(self, result: Tensor, stream: HostStream, home: Tensor | None) -> None:
        """The host reads a result from streaming memory: where an argument lay, or from a buffer of its own."""
        assert result is home or (home is None and result.is_whole_variable), "it has been stored"
        if home is None:
            (memory,) = result.variables()
            self._graph.off_chip[memory] = replace(self._graph.off_chip[memory], read_into=stream)

    def _remote_argument(self, number: int, stream: HostStream, bounds: Sequence[int] | None) -> tuple[Tensor, ...]:
        """A buffer for an argument, as tensors of its memory: one, or one for each shard."""
        result = next((n for n, alias in enumerate(self._aliases) if alias == number), None)
        left = None if result is None else self._outputs[result]
        on_host = self._streamed[number]
        buffer = self._graph.add_off_chip(stream.shape, stream.dtype, stream.name, stream, left, on_host)
        whole = Tensor.of(buffer.memory)
        return (whole,) if bounds is None else tuple(whole[a:b] for a, b in pairwise(bounds))

    def _results(self, arguments: Sequence[Tensor], line: str) -> tuple[list[Tensor], tuple[PipelineRun, ...]]:
        """The tensors of all results."""
        jaxpr, graph = self._found.jaxpr, self._graph
        given, pipelines = [shard for shards in self._shards for shard in shards], tuple[PipelineRun, ...]()
        with graph.debug_origin(Origin(line)):
            if has_stages(jaxpr.jaxpr):
                made, pipelines = lower_staged(
                    graph, self._make, jaxpr, given, self._prog, self._donated(), self._recomputation
                )
            else:
                made = self._make(self._home, self._donated()).jaxpr(jaxpr, given, self._prog)
        remaining, results = iter(made), list[Tensor]()
        whole_of = dict(zip(self._shards, arguments, strict=True))
        for bounds in self._found.outputs:
            shards = tuple(next(remaining) for _ in range(num_shards(bounds)))
            results.append(whole_of.get(shards) or _joined(shards))
        return results, pipelines

    def _taken_places(self, aliases: Sequence[int | None]) -> list[bool]:
        """For each input of the jaxpr whether a result takes its place."""
        return [n in aliases for n, bounds in enumerate(self._found.inputs) for _ in range(num_shards(bounds))]

    def _donated(self) -> dict[Var, Tensor]:
        """The arguments, or shards of them, that results may be written to at once, by the variables of the results."""
        outvars, donated = iter(self._found.jaxpr.jaxpr.outvars), dict[Var, Tensor]()
        for bounds, alias in zip(self._found.outputs, self._aliases, strict=True):
            own = list(islice(outvars, num_shards(bounds)))
            if alias is not None and not self._offloaded[alias] and self._found.inputs[alias] == bounds:
                donated.update((v, x) for v, x in zip(own, self._shards[alias], strict=True) if isinstance(v, Var))
        return donated


def _joined(shards: Sequence[Tensor]) -> Tensor:
    return shards[0] if len(shards) == 1 else concat(shards, 0)


def donated_aliases(whole: Replicated, donated: Sequence[bool]) -> tuple[int | None, ...]:
    """For each output the first free donated input of its shape, dtype, memory and split, as JAX pairs them."""
    free = [n for n, given in enumerate(donated) if given]
    jaxpr, in_dims = whole.jaxpr, whole.in_dims
    aliases: list[int | None] = []
    for aval, dim in zip(jaxpr.out_avals, whole.out_dims, strict=True):
        match = next((n for n in free if _buffer(jaxpr.in_avals[n], in_dims[n]) == _buffer(aval, dim)), None)
        if match is not None:
            free.remove(match)
        aliases.append(match)
    return tuple(aliases)


def _buffer(aval: Any, dim: int | None) -> tuple[Any, ...]:
    return aval.shape, aval.dtype, dim, is_on_host(aval)
