"""The stages of a function on its way to the machine, mirroring `jax.stages`: Traced, Lowered, then Compiled.

ipu.jit(fun).trace(*args) → Traced: jaxpr, shapes of arguments and results
Traced.lower()            → Lowered: jaxpr after each pass, graph, program; also ipu.jit(fun).lower(*args)
Lowered.compile()         → Compiled: callable, profile, analyses
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from threading import Lock
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from ipujax.calls import (
    EVERYWHERE,
    FunctionName,
    Given,
    Signature,
    Stage,
    check_live_arguments,
    check_whole,
    first_difference,
    has_tracer,
    may_be_offloaded,
    moves_apart,
    shown_array,
)
from ipujax.compiled_programs import announce
from ipujax.distributed.instance import Spread, check_same_program, over_instances, to_local
from ipujax.fit import Choice, Untried, compile_fitting
from ipujax.lowering.dumps import LOWERED, TRACE, intermediate_json, tile_map, write_json
from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    argument_names,
    fetched,
    is_float0,
    jaxpr_as_fun,
    to_device,
    to_memory_of,
    used_inputs,
    with_weak_type,
)
from ipujax.lowering.jaxpr import equations, has_phases, results_in_memories
from ipujax.lowering.lower import LoweredProgram
from ipujax.lowering.recomputation import ChainTrade, Recomputation, modes
from ipujax.lowering.refs import is_ref
from ipujax.runtime.compile import STEPS, Executable
from ipujax.runtime.engine import engine_function
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.graph import Program, StreamOut, distinct
from ipujax.runtime.graph.listing import listing
from ipujax.runtime.host import ALONE, CallStream, HostCalls, settled
from ipujax.runtime.logs import watch_compilation
from ipujax.runtime.markup import Markup, joined, table, tag
from ipujax.runtime.memory import MemoryReport
from ipujax.runtime.options import Options
from ipujax.runtime.report import Profile
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.target import nearest

Record = Callable[[Program, Any], None]


class Traced(Stage):
    """A function as a jaxpr for one signature.

    Made by `ipu.jit(fun).trace(*args)`; all is as in `jax.stages.Traced`, except that it is lowered for the IPU.

    Attributes:
        jaxpr: the jaxpr; that of a replicated function has one equation, for all replicas.
        fun_name: the name of the function.
        timings: seconds spent in tracing.
    """

    def __init__(
        self,
        traced: jax.stages.Traced,
        arguments: tuple[str, ...],
        given: Given,
        timings: Mapping[str, float],
        lower: Callable[[Traced], Lowered],
        offloaded: frozenset[int] = frozenset(),
    ) -> None:
        self.jaxpr, self.fun_name, self._traced, self._given = traced.jaxpr, traced.fun_name, traced, given
        self._arguments, self.timings, self._lower, self._offloaded = arguments, timings, lower, offloaded

    @property
    def out_info(self) -> Any:
        """For each array of the results its shape and dtype."""
        return self._traced.out_info

    @property
    def closes_over_tracers(self) -> bool:
        """Whether the function uses values that a transformation of JAX is tracing: the jaxpr has them as inputs."""
        return len(self.jaxpr.in_avals) != self._given.tree.num_leaves

    @cached_property
    def signature(self) -> Signature:  # type: ignore[override]
        """The signature that the function was traced with."""
        given, in_avals = self._given, tuple(self.jaxpr.in_avals)
        names, used = tuple(argument_names(self.jaxpr)), used_inputs(self.jaxpr.jaxpr)
        in_phases = has_phases(self.jaxpr.jaxpr)
        numbers = [n for n, count in enumerate(given.counts) for _ in range(count)]
        offloaded = tuple(
            (n in self._offloaded or in_phases) and may_be_offloaded(aval)
            for n, aval in zip(numbers, in_avals, strict=True)
        )
        return Signature(
            given.tree,
            in_avals,
            given.donated,
            offloaded,
            used,
            self._traced.out_tree,
            results_in_memories(self.jaxpr),
            self._arguments,
            names,
        )

    def lower(self) -> Lowered:
        """Lowers the function for its device, once.

        Raises:
            ArgumentError: as `ipu.jit(fun).lower`.
        """
        return self._lower(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function, compiled, on arguments of its signature; static arguments are left out."""
        return self.lower().compile()(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Traced({self.fun_name}: {len(self.jaxpr.eqns)} equations)"


class Lowered(Stage):
    """A function as graph and program for one device and one signature.

    Made by `ipu.jit(fun).lower(*args)`; planned at the first cost per byte, see `Options.byte_cost`.

    Attributes:
        jaxpr: the jaxpr after all passes.
        graph: variables, tile mappings and vertices.
        program: the control program of one call.
        pipelines: where pipelines with stages run: the part of the program, the schedule, the IPUs of the stages.
        choice: cost per byte and recomputation.
        trades: what recomputation would save and cost in each gradient, where it finds out by itself.
        timings: seconds spent in tracing, in each pass and in lowering.
    """

    def __init__(
        self,
        name: FunctionName,
        signature: Signature,
        jaxprs: Mapping[str, ClosedJaxpr],
        lowered: LoweredProgram,
        options: Options,
        timings: Mapping[str, float],
        choice: Choice,
        trades: Sequence[ChainTrade],
        plan: Callable[[Choice], Lowered],
        spread: Spread | None = None,
        *,
        refs: Sequence[jax.Ref] = (),
        constants: Sequence[Any] = (),
        may_offload: bool = False,
    ) -> None:
        self.name, self.signature, self._options, self.spread = name, signature, options, spread
        self.choice, self.trades, self._plan, self._may_offload = choice, tuple(trades), plan, may_offload
        self._jaxprs, self._lowered, self._refs = dict(jaxprs), lowered, tuple(refs)
        self._constants = tuple(map(fetched, constants))
        self.jaxpr = list(self._jaxprs.values())[-1]
        self.graph, self.program, self.pipelines = lowered.graph, lowered.program, lowered.pipelines
        self.timings = MappingProxyType(dict(timings))

    @checking_calls("Lowered.as_text")
    def as_text(self, after: str | None = None) -> str:
        """The jaxpr after a pass, or the graph and program when no pass is named.

        Args:
            after: "trace" or the name of a pass; None and "lower" are behind all.

        Raises:
            ArgumentError: for an unknown pass.
        """
        if after is None or after == LOWERED:
            return listing(self.graph, self.program)
        if after not in self._jaxprs:
            known = (*self._jaxprs, LOWERED)
            expected, hint = f"one of {', '.join(known)}", nearest(after, known)
            raise ArgumentError(f"no pass is called {after!r}", expected=expected, got=repr(after), hint=hint)
        return str(self._jaxprs[after])

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes all that was made as JSON: the jaxpr after each pass, graph and program; see `lowering.dumps`.

        Args:
            path: the file; one that exists is replaced.

        Raises:
            ArgumentTypeError: something that is no path.
            ArgumentError: a path that cannot be written.
        """
        write_json(path, intermediate_json(self.name, self._jaxprs, (self.graph, self.program)))

    def tile_map(self) -> dict[str, Any]:
        """Which tiles hold which variable.

        Returns:
            A dict for JSON, short in a console: `"variables"` lists each variable with its name, dtype, shape and line,
            the `"tiles"` that hold any of it, how many `"elements"` each of them holds, and the `"mapping"`, block by
            block or interval by interval, of its elements in row-major order. Tiles are those of one replica.
        """
        return tile_map(self.graph)

    def evaluate(self, *leaves: Any, record: Record | None = None, of_program: bool = False) -> Any:
        """The results for the leaves of the arguments, as JAX operations that can be traced.

        They are those of the function, or of the program where it decides; see `computes_function`.

        Args:
            leaves: arrays of the signature's shapes and dtypes, in order; where it `runs_apart`, on the device.
            record: receives what data-dependent control of the program does, see `engine_function`.
            of_program: compute the program also where the function would do.
        """
        if not (of_program or record is not None) and self.computes_function:
            return self._tree_of_results(leaves, self._run_function)
        on_device = [to_device(x) for x in leaves]
        outs = self._tree_of_results(on_device, lambda operands: self._run_program(operands, record))
        return outs if self.runs_apart(record) else self.to_memories(outs)

    def runs_apart(self, record: Record | None) -> bool:
        """Whether arrays move to and from memory of the host before and behind what XLA runs, see `memory_kinds`."""
        return moves_apart(self.signature, record is not None or self.calls is not None)

    def to_memories(self, outs: Any) -> Any:
        """The tree of results, each in its memory."""
        leaves = zip(jax.tree.leaves(outs), self.signature.out_avals, strict=True)
        return jax.tree.unflatten(self.signature.out_tree, [to_memory_of(x, aval) for x, aval in leaves])

    def _tree_of_results(self, leaves: Sequence[Any], run: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """The tree of what `run` computes of the arrays of the jaxpr; writes the Refs that it changes."""
        signature = self.signature
        moved = [x for x, aval in zip(leaves, signature.in_avals, strict=True) if not is_float0(aval)]
        moved += self._refs
        refs = [x for x in moved if is_ref(jax.typeof(x))]
        operands = [x[...] if is_ref(jax.typeof(x)) else x for x in moved]
        outs = iter(run([*operands, *self._constants]))
        are_weak = (aval.weak_type for aval in self._jaxprs["discharge"].out_avals)  # a Ref's value less than the Ref
        results = [
            np.zeros(aval.shape, aval.dtype) if is_float0(aval) else with_weak_type(next(outs), next(are_weak))
            for aval in signature.out_avals
        ]
        for ref in refs:
            ref[...] = next(outs)
        return jax.tree.unflatten(signature.out_tree, results)

    def _run_function(self, operands: list[Any]) -> Sequence[Any]:
        return list(jaxpr_as_fun(self._jaxprs[TRACE])(*operands))

    def _run_program(self, operands: list[Any], record: Record | None) -> Sequence[Any]:
        """The results of the program, by this process or, if replicas are spread, by all instances together."""
        program, spread = self._lowered, self.spread
        instances = ALONE if spread is None else spread.instances
        run = engine_function(
            program.graph,
            program.program,
            exact_splits=self._options.exact_splits,
            record=record,
            calls=self.calls,
            instances=instances,
        )
        if spread is None:
            return program.evaluate(operands, run)
        if self.calls is not None:
            what = f"{self.name} calls Python functions while it runs, and its replicas are on several instances"
            raise ArgumentError(what, hint="return what these functions would be given")
        check_same_program(self.name, self.jaxpr)
        together = over_instances(
            lambda *shares: program.evaluate(shares, run, instances), program.in_dims, program.out_dims
        )
        return together(*operands)

    @cached_property
    def computes_function(self) -> bool:
        """Whether XLA computes the function as it was traced: the same as it gets from `jax.jit`.

        It computes the program that the function was lowered to where that decides something: with
        `Options(exact_splits=True)`, for replicas, also those of a `jax.shard_map`, whose devices need not exist, where
        Python functions are called, whose exceptions come back unchanged, and where memory of the host is used in a way
        that JAX does not compile.
        """
        traced = equations(self._jaxprs[TRACE].jaxpr)
        is_replicated = self.graph.replication_factor > 1 or any(eqn.primitive.name == "shard_map" for eqn in traced)
        is_apart = self.spread is not None or self.calls is not None or self.runs_apart(None) or bool(self._constants)
        return not (self._options.exact_splits or is_replicated or is_apart)

    @cached_property
    def calls(self) -> HostCalls | None:
        """Makes the program's calls of Python functions; None when there are none."""
        makes = any(isinstance(n, StreamOut) and isinstance(n.stream, CallStream) for n in distinct(self.program))
        return HostCalls(guarded=True) if makes else None

    @property
    def untried(self) -> Untried:
        """What could make the program smaller, and is not asked for."""
        eqns, options = list(equations(self._jaxprs["dce"].jaxpr)), self._options
        with_auto = modes(eqns, Recomputation("auto"))
        recompute = modes(eqns, Recomputation(options.recompute)) != with_auto
        return Untried(recompute, bool(with_auto - {"auto"}), self._may_offload, options.io_tiles)

    @cached_property
    def _compiled(self) -> Compiled:
        steps, spent = (*self.timings, *STEPS), sum(self.timings.values())
        with collecting_rarely(), watch_compilation(self.name, steps, self._options.progress, spent):
            lowered, executable = compile_fitting(self, self._plan, self._options)
        executable = executable.named(self.name, self.name.file, lowered.timings)
        announce(self.name, executable)
        return Compiled(lowered, executable)

    def cost_analysis(self) -> dict[str, float]:
        """Machine costs of one call, those of the compiled program."""
        return self.compile().cost_analysis()

    @checking_calls("Lowered.compile")
    def compile(self) -> Compiled:
        """Checks the graph, plans its exchanges and memory, and makes it callable.

        A program that does not fit is lowered again at higher costs per byte, unless `Options(byte_cost=)` fixes one.

        Raises:
            TileMemoryError: if the program does not fit, unless `Options(allow_out_of_memory=True)`.
            VerifyError: if a rule of the verifier is broken, which is a bug in ipujax.
        """
        return self._compiled

    def _repr_html_(self) -> str:
        graph, listed = self.graph, f"{len(self._jaxprs)}: {', '.join(self._jaxprs)}"
        vertices = sum(group.num_vertices for groups in graph.groups.values() for group in groups)
        rows = [
            ("Machine", f"{graph.target.num_ipus:,} × {graph.target.name}, {graph.replication_factor:,} replicas"),
            ("Equations", len(self.jaxpr.eqns)),
            ("Variables", len(graph.variables)),
            ("Compute sets", len(graph.groups)),
            ("Vertices", vertices),
            ("Pipelines", len(self.pipelines)),
            ("Texts, by as_text(after=…)", listed),
        ]
        return table((), rows, f"Lowered {self.name}")

    def __repr__(self) -> str:
        return f"Lowered({self.name}: {len(self.jaxpr.eqns)} equations)"


class Compiled(Stage):
    """A function compiled for one device and one signature; call it, or read its profile.

    Attributes:
        executable: the checked program with its costs and memory.
        pipelines: as those of `Lowered`.
    """

    def __init__(self, lowered: Lowered, executable: Executable) -> None:
        self._lowered, self.executable, self.pipelines = lowered, executable, lowered.pipelines
        self.signature = lowered.signature
        self._notes: dict[Program, list[int]] = {}
        self._one_at_a_time = Lock()  # the notes are those of one call

    @property
    def lowered(self) -> Lowered:
        """The program as it is planned, at the cost per byte at which it fits."""
        return self._lowered

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds spent in each step from tracing to the executable; XLA's own compilation is not in it."""
        return self.executable.timings

    @cached_property
    def profile(self) -> Profile:
        """The static profile: cycles, phases and memory of one call."""
        return Profile(self.executable)

    def cost_analysis(self) -> dict[str, float]:
        """Machine costs of one call, as numbers by name; cycles of loops whose trip count is data need `Options`."""
        profile = self.profile
        phases = {f"{name}_cycles": float(cycles) for name, cycles in profile.phase_cycles.items()}
        return {"cycles": float(profile.cycles), "seconds": profile.seconds, **phases}

    def as_text(self) -> str:
        """Graph and program."""
        return self._lowered.as_text()

    def runtime_executable(self) -> Executable:
        """The checked program with its costs and memory."""
        return self.executable

    def memory_analysis(self) -> MemoryReport:
        """Tile memory, by tile and by category."""
        return self.profile.memory

    @cached_property
    def _call(self) -> Callable[..., Any]:
        return self._jitted(None, tuple(n for n, given in enumerate(self._lowered.signature.donated) if given))

    @cached_property
    def _profiled_call(self) -> Callable[..., Any]:
        return self._jitted(self._note, ())

    def _jitted(self, record: Record | None, donated: tuple[int, ...]) -> Callable[..., Any]:
        def run(*leaves: Any) -> Any:
            return self._lowered.evaluate(*leaves, record=record)

        run.__name__ = self._lowered.name
        jitted = jax.jit(run, donate_argnums=donated)
        if not self._lowered.runs_apart(record):
            return jitted
        return lambda *leaves: self._lowered.to_memories(jitted(*map(to_device, leaves)))

    def _note(self, node: Program, what: Any) -> None:
        """Records a data-dependent decision of the profiled call that is running."""
        self._notes.setdefault(node, []).append(int(what))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function on arguments of the compiled signature; static arguments are left out, as in `jax.stages`.

        Raises:
            ArgumentError: for another tree, shape or dtype, for an array that is donated and given a second time, or
                under a transformation of JAX.
        """
        leaves = self._check(args, kwargs)
        self._lowered.signature.check_donated(self._lowered.name, leaves)
        spread = self._lowered.spread
        if spread is None:
            return self._settled(self._call(*leaves))
        operands = spread.operands(args, kwargs, (self._lowered.signature.arguments, ()), (), shapes_only=False)
        spread.meet(operands)
        return to_local(self._call(*jax.tree.leaves((operands.args, operands.kwargs))))

    def profile_call(self, *args: Any, **kwargs: Any) -> tuple[Any, Profile]:
        """Runs the function and returns its results with the profile of this run.

        Donated arguments are kept: this run does not reuse their buffers.

        Raises:
            ArgumentError: as a call, and for replicas that are spread over instances.
        """
        leaves = self._check(args, kwargs)
        if self._lowered.spread is not None:
            what = f"replicas of {self._lowered.name} are on several instances, which no profile follows while it runs"
            raise ArgumentError(what, hint="compiled.profile is that of all replicas; or --instances 1")
        with self._one_at_a_time:
            self._notes = {}
            outs = jax.block_until_ready(self._profiled_call(*leaves))
            jax.effects_barrier()
            self._settled(outs)
            return outs, Profile(self.executable, self._notes)

    def _settled(self, outs: Any) -> Any:
        calls = self._lowered.calls
        return outs if calls is None else settled(outs, [calls])

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call, if they are of the compiled signature."""
        signature, name = self._lowered.signature, self._lowered.name
        if has_tracer(jax.tree.leaves((args, kwargs))):
            check_live_arguments(args, kwargs)
            what = f"{name} is compiled: transformations of JAX cannot trace it any more"
            raise ArgumentTypeError(what, hint="apply them to the ipu.jit function itself")
        leaves, tree = jax.tree.flatten((args, kwargs))
        hint = "call the ipu.jit function itself, which compiles anew for new shapes"
        if tree != signature.in_tree:
            difference = first_difference(signature.in_tree, args, kwargs, signature.arguments)
            what = f"{name} was compiled for another structure of {difference.place}"
            if difference.place == EVERYWHERE:
                hint = f"leave static arguments out, they are compiled in; or {hint}"
            raise ArgumentTypeError(what, expected=difference.expected, got=difference.got, hint=hint)
        avals, spread = signature.in_avals, self._lowered.spread
        if spread is not None:
            avals = spread.local_avals(avals, args, kwargs, signature.arguments)
        check_whole(name, lambda: signature.arguments, args, kwargs)
        for place, leaf, aval in zip(signature.leaf_names, leaves, avals, strict=True):
            found = shown_array(name, place, leaf, "convert it to such an array", aval.str_short())
            if found != aval.str_short():
                what = f"{name} was compiled for another shape or dtype of its argument {place}"
                raise ArgumentTypeError(what, expected=aval.str_short(), got=found, hint=hint)
        return leaves

    def _repr_html_(self) -> str:
        return joined([tag("p", f"Compiled {self._lowered.name}"), Markup(self.profile._repr_html_())])

    def __repr__(self) -> str:
        return f"Compiled({self._lowered.name}: {self.profile.brief})"
