"""Lowers a jaxpr to a graph and a control program.

    lower(jaxpr, target, inputs, choice, options) → LoweredProgram(graph, program, inputs, outputs)

Arguments become variables filled from host streams, each equation adds compute sets by its rule, see `equations`, and
results go to host streams. A donated argument stays on the device: the result that takes its place is copied into its
variable, and neither moves to or from the host. Pipelines without stages get theirs first; then an argument that stacks
layers may be several variables, one a stage. Variables that no rule has mapped are mapped linearly at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, pairwise
from math import prod
from typing import Any

import jax

from ipujax.lowering.choice import Choice
from ipujax.lowering.ipus import IpuView
from ipujax.lowering.jax_compat import ClosedJaxpr, Var
from ipujax.lowering.jaxpr import ValueRoles, has_stages
from ipujax.lowering.layout import MemoryOrder, map_linearly, must_be_set_aside, overwrite
from ipujax.lowering.merge import merge_compute_sets
from ipujax.lowering.other_roles import note_other_roles
from ipujax.lowering.passes.channel_groups import grouped_inputs
from ipujax.lowering.pipelining import (
    CutJaxpr,
    Cuts,
    PipelineRun,
    Planning,
    find_stages,
    lower_staged,
    num_shards,
    uncut,
)
from ipujax.lowering.program_inputs import NO_MEMORIES, ProgramInputs
from ipujax.lowering.recomputation import ChainTrade
from ipujax.lowering.replicas import (
    BlockSplit,
    Dims,
    Replicated,
    Splits,
    check_results,
    join,
    of_one_replica,
    shared_split,
    split,
    unwrapped,
)
from ipujax.lowering.rules import Lowering, Probes, check_is_array
from ipujax.runtime.graph import (
    BYTE_COST_CYCLES,
    Builder,
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
from ipujax.runtime.tensor import UPDATE, Origin, Tensor, concat

# Proportion of a tile's memory that an operation may use at most where the user sets none, by the least cost of a byte
# in cycles that it holds for. Smaller operations take more code: 0.15 is best for ResNet-50 and BERT-Large, 0.1 for
# GPT-2 (measured).
_PROPORTIONS = ((16.0, 0.1), (2.0, 0.15), (1.0, 0.3))
_INTO_ARGUMENTS = Origin(path="results into donated arguments", part=UPDATE)


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """A graph with its control program, and a host stream for each input and output of the jaxpr.

    Args:
        graph: variables, mappings and vertices.
        program: the program of one call.
        inputs: one stream for each input of the jaxpr.
        outputs: one stream for each output.
        aliases: for each output, the number of the donated input whose variable it ends in, or None.
        in_dims: for each input the dimension that is split over replicas, None if all get the same.
        out_dims: for each output the dimension along which replicas are joined, None if they are equal.
        pipelines: run of each pipeline with stages.
        cuts: stage boundaries of each pipeline that had no stages.
    """

    graph: Graph
    program: ProgramSequence
    inputs: tuple[HostStream, ...]
    outputs: tuple[HostStream, ...]
    aliases: tuple[int | None, ...]
    in_dims: Splits
    out_dims: Splits
    pipelines: tuple[PipelineRun, ...] = ()
    cuts: tuple[Cuts, ...] = ()

    @property
    def trades(self) -> tuple[ChainTrade, ...]:
        """Savings and costs of recomputation in the stages of pipelines."""
        return tuple(trade for run in self.pipelines for trade in run.trades)

    def dims_of_instances(self, instances: Instances) -> tuple[Dims, Dims]:
        """Return the dimension of each input, and of each result, along which instances share it."""
        in_dims, out_dims = (
            tuple(shared_split(dim, instances.count).dim for dim in dims) for dims in (self.in_dims, self.out_dims)
        )
        return in_dims, out_dims

    def evaluate(
        self,
        operands: Sequence[jax.Array],
        run: Callable[..., Mapping[HostStream, Any]],
        instances: Instances = ALONE,
    ) -> list[jax.Array]:
        """Runs the program on arrays of all replicas, which are split; joins its results and returns them.

        Args:
            operands: for each input the array of the replicas of this instance.
            run: the engine: from arrays by input stream to arrays by output stream.
            instances: processes that share the replicas.
        """
        if self.graph.replication_factor == 1:
            outs = run(dict(zip(self.inputs, operands, strict=True)))
            return [outs[stream] for stream in self.outputs]
        replicas = instances.count_local(self.graph.replication_factor)
        # This instance has a share of each array: the splits are those of a share over the replicas here.
        in_splits, out_splits = (
            [shared_split(dim, instances.count).of_share for dim in dims] for dims in (self.in_dims, self.out_dims)
        )
        replica_operands = [split(x, dim, replicas) for x, dim in zip(operands, in_splits, strict=True)]
        outs = run(dict(zip(self.inputs, replica_operands, strict=True)))
        return [join(outs[stream], dim) for stream, dim in zip(self.outputs, out_splits, strict=True)]


def lower(
    jaxpr: ClosedJaxpr,
    target: Target,
    inputs: ProgramInputs = NO_MEMORIES,
    choice: Choice | None = None,
    options: Options | None = None,
    line: str = "",
    probes: Probes | None = None,
) -> LoweredProgram:
    """Lowers a jaxpr for a target.

    Args:
        jaxpr: inlined jaxpr, see `passes`; of one `replicated` equation if there are several replicas.
        target: the machine, of all replicas together.
        inputs: names and memories of the inputs of the jaxpr.
        choice: what a caller tries one after the other until a program fits: the cost of a byte of memory in cycles,
            the memory of a tile that planners count on, the recomputation of pipelines (of other gradients passes have
            decided on it), and the stage boundaries from which the search for stages starts. When None, the least of
            the costs that are tried, and all memory of a tile.
        options: options of the user, `Options()` when None; the cost of a byte is that of the choice.
        line: line of equations that have no line of the user, `file:line (function)`.
        probes: adds probes of all values to the program; None for a program without.

    Returns:
        The graph and the program of one call.

    Raises:
        GraphError: an argument or constant that is not an array, more replicas than the machine has room for, a result
            that is declared equal on all replicas and may differ, or partials of a type that no codelet has.
    """
    function = unwrapped(jaxpr)
    _check(function, inputs.names)
    options = options or Options()
    # With the user's available memory proportion, which bounds the memory of one operation.
    replica_target = _with_proportion(of_one_replica(target, function.replicas), options)
    choice = choice or Choice(BYTE_COST_CYCLES, replica_target.bytes_per_tile)
    planning_target = for_planners(replica_target, choice, options)
    make_lowering = partial(Lowering, options=options, probes=probes)
    plan = _Plan(function, inputs.of_function(function), planning_target, choice, options.io_tiles, line, make_lowering)
    program = _in_stages(plan) if has_stages(function.jaxpr.jaxpr) else _Program(plan, uncut(function.jaxpr)).lowered()
    # Planners have seen the memory of the choice alone: that of the machine decides only whether the program fits.
    program.graph.target = replica_target
    return program


def _check(function: Replicated, names: Sequence[str]) -> None:
    """Refuse results that may differ between replicas, and inputs that are no arrays."""
    check_results(function)
    for number, aval in enumerate(function.jaxpr.in_avals):
        check_is_array(aval, f"argument {names[number] if names else number}")
    for var in function.jaxpr.jaxpr.constvars:
        check_is_array(var.aval, "a value that the function closes over")


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What all programs of a function have in common, wherever its stages are cut.

    Args:
        function: the function of one replica.
        inputs: names and memories of its inputs.
        target: machine of one replica, as planners know it.
        choice: parameters of the plan.
        io_tiles: number of I/O tiles.
        line: line of equations that have no line of the user.
        make_lowering: makes a `Lowering` with the user's options.
    """

    function: Replicated
    inputs: ProgramInputs
    target: Target
    choice: Choice
    io_tiles: int
    line: str
    make_lowering: Callable[..., Lowering]

    @property
    def aliases(self) -> tuple[int | None, ...]:
        """For each output the donated input whose place it takes, or None."""
        assert self.inputs.aliases is not None
        return self.inputs.aliases

    def graph(self) -> Graph:
        """Return an empty graph."""
        graph = Graph(self.target, self.function.replicas, self.choice.byte_cost, self.io_tiles)
        graph.replica_axes = self.function.mesh
        return graph


def _in_stages(plan: _Plan) -> LoweredProgram:
    """Lowers a function with stages, each for an IPU, cut where the user says or where the program is cheapest.

    To find the best cuts, candidate programs are lowered and compared.

    Args:
        plan: the function, target and options.
    """
    latest: dict[ClosedJaxpr, LoweredProgram] = {}  # at most one: most often the first fits, and is requested again

    def lowered_of(candidate: CutJaxpr) -> LoweredProgram:
        if candidate.jaxpr not in latest:
            latest.clear()
            latest[candidate.jaxpr] = _Program(plan, candidate).lowered()
        return latest[candidate.jaxpr]

    def graph_of(candidate: CutJaxpr) -> tuple[Graph, ProgramSequence]:
        program = lowered_of(candidate)
        return program.graph, program.program

    choice = plan.choice
    function = plan.function
    planning = Planning(plan.target, plan.make_lowering, choice.byte_cost, choice.recomputation, function.replicas)
    best, cuts = find_stages(function.jaxpr, planning, graph_of, choice.cuts)
    return replace(lowered_of(best), cuts=cuts)


def for_planners(target: Target, choice: Choice, options: Options) -> Target:
    """Return a machine for planners: the more a byte costs, the smaller the share of a tile for an operation.

    A share that the user sets is that of all costs.
    """
    share = options.available_memory_proportion
    if share is None:
        proportion = next((proportion for min_cost, proportion in _PROPORTIONS if choice.byte_cost >= min_cost), 1.0)
        share = min(proportion, target.available_memory_proportion)
    return replace(target, available_memory_proportion=share, bytes_per_tile=choice.tile_bytes)


def _with_proportion(target: Target, options: Options) -> Target:
    """Return a machine with the proportion of a tile's memory that the user sets for an operation, if any."""
    share = options.available_memory_proportion
    return target if share is None else replace(target, available_memory_proportion=share)


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Tensors of arguments, the shards that each is made of, and their host streams."""

    tensors: tuple[Tensor, ...]
    shards: tuple[tuple[Tensor, ...], ...]
    streams: tuple[HostStream, ...]


class _Program:
    """Program of one call; `cut` is the function's jaxpr with arguments and results that may be in row shards."""

    def __init__(self, plan: _Plan, cut: CutJaxpr) -> None:
        """Begins an empty graph and program for a function whose arguments may be in row shards; `lowered` fills it."""
        self._plan = plan
        self._cut = cut
        self._graph = graph = plan.graph()
        self._roles = ValueRoles(cut.jaxpr.jaxpr, self._overwritten_inputs(plan.aliases))
        self._make_lowering = partial(plan.make_lowering, roles=self._roles)
        # Equations outside of stages are not on I/O tiles.
        self._home: Graph = IpuView(graph, 0) if graph.io_tiles else graph
        self._prog = ProgramSequence()
        self._outputs = [
            HostStream(f"out{n}", aval.shape, aval.dtype, resident=alias is not None)
            for n, (aval, alias) in enumerate(zip(plan.function.jaxpr.out_avals, plan.aliases, strict=True))
        ]

    def lowered(self) -> LoweredProgram:
        """Lowers the function: arguments, equations, results, then what holds for the entire graph. Call it once."""
        graph = self._graph
        prog = self._prog
        aliases = self._plan.aliases
        placed = self._add_arguments()
        arguments = placed.tensors
        results, pipelines = self._add_results(placed)
        # Before any donated argument is overwritten: a result may be a view of it.
        results = self._set_aside_arguments(results, arguments)
        for result, alias, stream in zip(results, aliases, self._outputs, strict=True):
            self._return_result(result, stream, None if alias is None else arguments[alias], alias)
        for variable in graph.variables:
            self._map_linearly(Tensor.of(variable))
        note_other_roles(graph, prog)
        merge_compute_sets(graph, prog)
        function = self._plan.function
        dims = function.in_dims, function.out_dims
        return LoweredProgram(graph, prog, placed.streams, tuple(self._outputs), aliases, *dims, pipelines)

    def _return_result(self, result: Tensor, stream: HostStream, home: Tensor | None, alias: int | None) -> None:
        """Sends a result to the host; one for a donated argument is written over it first, for the next call.

        Args:
            result: the result; one off chip stays there.
            stream: its stream.
            home: tensor of the donated argument whose place it takes, which nothing reads later; None without one.
            alias: number of that argument; None as `home`.
        """
        if not set(self._graph.off_chip).isdisjoint(result.variables()):
            self._leave_off_chip(result, stream, home)
            return
        if alias is not None and home is not None and result is not home:
            self._map_linearly(result)
            with self._graph.debug_origin(_INTO_ARGUMENTS):
                name = f"{self._plan.inputs.names[alias]}/update"
                overwrite(Builder(self._graph, self._prog, name), result, home)
            result = home
        self._prog.add(StreamOut(result, stream))

    def _add_arguments(self) -> _Arguments:
        """Adds variables for all arguments, filled from host streams, or buffers for those off chip.

        Returns their tensors. An argument may be several shards of rows, each a variable: a pipeline has them on
        different IPUs.
        """
        arguments = list[Tensor]()
        shards_of_arguments = list[tuple[Tensor, ...]]()
        inputs = list[HostStream]()
        function = self._plan.function
        graph = self._graph
        inputs_of_plan = self._plan.inputs
        names = inputs_of_plan.names
        grouped = iter(grouped_inputs(self._cut.jaxpr.jaxpr))
        for number, (aval, bounds) in enumerate(zip(function.jaxpr.in_avals, self._cut.inputs, strict=True)):
            # Columns in groups of channels, as products read them, if any of its shards is read so. A list, as `any`
            # alone would leave later shards in `grouped`.
            in_groups = any([next(grouped) for _ in range(num_shards(bounds))])
            in_dim = function.in_dims[number]
            stream = HostStream(
                names[number],
                aval.shape,
                aval.dtype,
                resident=number in self._plan.aliases,
                broadcast=function.replicas > 1 and in_dim is None,
                blocks=in_dim.blocks if isinstance(in_dim, BlockSplit) else None,
            )
            inputs.append(stream)
            if inputs_of_plan.offloaded[number] or inputs_of_plan.streamed[number]:
                shards_of_arguments.append(self._remote_argument(number, stream, bounds))
                arguments.append(_concatenated(shards_of_arguments[-1]))
                continue
            shards_of_arguments.append(self._add_shards(stream, bounds, in_groups=in_groups))
            arguments.append(_concatenated(shards_of_arguments[-1]))
            self._prog.add(StreamIn(stream, arguments[-1]))
        for var, shard in zip(self._cut.jaxpr.jaxpr.invars, chain.from_iterable(shards_of_arguments), strict=True):
            graph.note_role(shard, self._roles.get(var))
        return _Arguments(tuple(arguments), tuple(shards_of_arguments), tuple(inputs))

    def _add_shards(self, stream: HostStream, bounds: Sequence[int] | None, *, in_groups: bool) -> tuple[Tensor, ...]:
        """Adds a variable for each shard of an argument, whose rows have `bounds`; for None one for the argument."""
        shapes = {stream.name: stream.shape}
        if bounds is not None:
            shapes = {f"{stream.name}[{a}:{b}]": (b - a, *stream.shape[1:]) for a, b in pairwise(bounds)}
        with self._graph.debug_origin(Origin(path=f"argument {stream.name}")):
            return tuple(
                MemoryOrder.for_argument(shape, in_groups).add_variable(self._graph, stream.dtype, name)
                for name, shape in shapes.items()
            )

    def _set_aside_arguments(self, results: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[Tensor]:
        """Copies results that are views of a donated argument, before that argument is overwritten by its new value.

        Args:
            results: tensors of all results.
            arguments: tensors of all arguments.

        Returns:
            The results, with copies in the place of those views.
        """
        overwritten = {v for alias in self._plan.aliases if alias is not None for v in arguments[alias].variables()}
        safe_results = []
        for result, alias in zip(results, self._plan.aliases, strict=True):
            is_safe = alias is not None and not must_be_set_aside(result, arguments[alias], overwritten)
            if not is_safe and overwritten & set(result.variables()):
                copy = self._home.add_variable(result.shape, result.dtype, "aside")
                self._map_linearly(copy)
                self._prog.add(Copy(result, copy, "aside", _INTO_ARGUMENTS))
                result = copy
            safe_results.append(result)
        return safe_results

    def _map_linearly(self, tensor: Tensor) -> None:
        """Maps the variables of a tensor that no rule has mapped."""
        for variable in tensor.variables():
            if variable not in self._graph.mappings:
                map_linearly(self._home, Tensor.of(variable))

    def _leave_off_chip(self, result: Tensor, stream: HostStream, home: Tensor | None) -> None:
        """Lets the host read a result from streaming memory: from an argument's buffer, or one of its own."""
        # An argument's buffer has its reader since it was added, see `_remote_argument`.
        assert result is home or (home is None and len(result.variables()) == 1), "it has been stored"
        if home is None:
            (memory,) = result.variables()
            assert memory.size == result.size, "a result is a buffer, or reshapes one"
            self._graph.off_chip[memory] = replace(self._graph.off_chip[memory], read_into=stream)

    def _remote_argument(self, number: int, stream: HostStream, bounds: Sequence[int] | None) -> tuple[Tensor, ...]:
        """Adds a buffer for an argument; returns tensors of its memory: one, or one for each shard."""
        result = next((n for n, alias in enumerate(self._plan.aliases) if alias == number), None)
        output = None if result is None else self._outputs[result]
        on_host = self._plan.inputs.streamed[number]
        count = self._plan.inputs.batches[number]
        rows = stream.shape if count is None else _in_rows(stream.shape, count)
        buffer = self._graph.add_off_chip(rows, stream.dtype, stream.name, stream, output, on_host)
        memory = Tensor.of(buffer.memory).reshape(stream.shape)
        return (memory,) if bounds is None else tuple(memory[a:b] for a, b in pairwise(bounds))

    def _add_results(self, arguments: _Arguments) -> tuple[list[Tensor], tuple[PipelineRun, ...]]:
        """Lowers the function on its arguments; returns the tensors of all results, and the runs of its pipelines.

        With stages it sets `_home`, the graph (the view of an IPU) that maps what no rule has mapped.

        Args:
            arguments: tensors of the arguments, and the shards of rows that each consists of.
        """
        jaxpr = self._cut.jaxpr
        graph = self._graph
        operands = list(chain.from_iterable(arguments.shards))
        donated = self._donated(arguments.shards)
        pipelines = tuple[PipelineRun, ...]()
        with graph.debug_origin(Origin(self._plan.line)):
            if has_stages(jaxpr.jaxpr):
                # What nothing reads, and constants of copies, are mapped to an IPU that works anyway.
                recomputation = self._plan.choice.recomputation
                tensors, pipelines, self._home = lower_staged(
                    graph, self._make_lowering, jaxpr, operands, self._prog, donated, recomputation
                )
            else:
                tensors = self._make_lowering(self._home, donated).jaxpr(jaxpr, operands, self._prog)
        remaining = iter(tensors)
        results = list[Tensor]()
        # An argument that is returned unchanged stays one tensor, not a concatenation of its shards.
        argument_of = dict(zip(arguments.shards, arguments.tensors, strict=True))
        for bounds in self._cut.outputs:
            shards = tuple(next(remaining) for _ in range(num_shards(bounds)))
            results.append(argument_of.get(shards) or _concatenated(shards))
        return results, pipelines

    def _overwritten_inputs(self, aliases: Sequence[int | None]) -> list[bool]:
        """Flag of each input of the jaxpr: a result takes its place."""
        return [n in aliases for n, bounds in enumerate(self._cut.inputs) for _ in range(num_shards(bounds))]

    def _donated(self, shards: Sequence[Sequence[Tensor]]) -> dict[Var, Tensor]:
        """Arguments, or shards of them, that results may be written to directly, by the variables of the results."""
        outvars = iter(self._cut.jaxpr.jaxpr.outvars)
        donated = dict[Var, Tensor]()
        for bounds, alias in zip(self._cut.outputs, self._plan.aliases, strict=True):
            result_vars = list(islice(outvars, num_shards(bounds)))
            if alias is not None and not self._plan.inputs.offloaded[alias] and self._cut.inputs[alias] == bounds:
                donated.update((v, x) for v, x in zip(result_vars, shards[alias], strict=True) if isinstance(v, Var))
        return donated


def _in_rows(shape: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the shape of an array in `count` rows, of as many leading dimensions as they take."""
    leading = next((n for n in range(1, len(shape) + 1) if prod(shape[:n]) % count == 0), None)
    if leading is None:  # a mesh has split them
        return tuple(shape)
    return (count, prod(shape[:leading]) // count, *shape[leading:])


def _concatenated(shards: Sequence[Tensor]) -> Tensor:
    return shards[0] if len(shards) == 1 else concat(shards, 0)
