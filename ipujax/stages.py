"""Compilation stages of a function, mirroring `jax.stages`: Traced, Lowered, then Compiled.

ipu.jit(fun).trace(*args) → Traced: jaxpr, shapes of arguments and results
Traced.lower()            → Lowered: jaxpr after each pass, graph, program; also ipu.jit(fun).lower(*args)
Lowered.compile()         → Compiled: callable, profile, analyses
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ipujax.arguments import FunctionName
from ipujax.calls import Signature, Stage, Traced as Traced, check_compiled_call, locates_nans
from ipujax.compiled_programs import announce, compile_warnings
from ipujax.lowering.dumps import LOWERED
from ipujax.lowering.jax_compat import ClosedJaxpr, to_device
from ipujax.lowering.jaxpr import primitive_names
from ipujax.lowering_plan import LoweringPlan
from ipujax.lowering_plan.call_program import CallProgram, Store
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.logs import watch_compilation
from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.not_copied import ReadOnlyMapping
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.target import nearest
from ipujax.runtime.tracebacks import showing_user_frames
from ipujax.sharding import Partitioning, run_on_one_device

# Imported by the methods that need them: a program of the cache is called without.
if TYPE_CHECKING:
    from ipujax.device import Device
    from ipujax.distributed.instance.spread import Spread
    from ipujax.lowering.choice import Choice
    from ipujax.lowering.pipelining import PipelineRun
    from ipujax.lowering.recomputation import ChainTrade
    from ipujax.lowering_plan.planned_program import PlannedProgram
    from ipujax.runtime.compile import Executable
    from ipujax.runtime.engine import DecisionLog
    from ipujax.runtime.graph import Graph, Program
    from ipujax.runtime.host import HostCalls
    from ipujax.runtime.memory import MemoryReport
    from ipujax.runtime.report import Profile
    from ipujax.storage import Computation


class Lowered(Stage):
    """A function as graph and program for one device and one signature, returned by `ipu.jit(fun).lower(*args)`.

    It is planned at the first cost per byte, see `Options.byte_cost`. A program of the cache is lowered when its graph
    is read.
    """

    def __init__(
        self,
        plan: LoweringPlan,
        lower: Callable[[], PlannedProgram],
        store: Store | None = None,
        stored: CallProgram | None = None,
    ) -> None:
        self.plan = plan
        self.store = store
        self._lower = lower
        self._stored = stored

    @cached_property
    def planned(self) -> PlannedProgram:
        """The program as planned, lowered when it is first read."""
        planned: PlannedProgram = self.as_traced(self._lower)
        return planned

    def as_traced(self, run: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a function that runs with `jax_enable_x64` as the program is lowered and computed."""
        with jax.enable_x64(self.plan.has_64_bits):
            return run(*args)

    @cached_property
    def call_program(self) -> CallProgram:
        """Values of the program that calls read."""
        return self._stored or CallProgram.of(self.planned)

    @property
    def name(self) -> FunctionName:
        """Name of the function."""
        return self.plan.settings.name

    @property
    def signature(self) -> Signature:
        """Pytrees, shapes and dtypes of arguments and results."""
        return self.plan.signature

    @property
    def partitioning(self) -> Partitioning | None:
        """How shardings partition the program; None if they do not."""
        return self.call_program.partitioning

    @property
    def spread(self) -> Spread | None:
        """Distribution of replicas over instances; None if all are on this one."""
        return self.plan.settings.spread

    @property
    def jaxpr(self) -> ClosedJaxpr:
        """The jaxpr after all passes."""
        return self.planned.jaxpr

    @property
    def graph(self) -> Graph:
        """Variables, tile mappings and vertices."""
        return self.planned.graph

    @property
    def program(self) -> Program:
        """Control program of one call."""
        return self.planned.program

    @property
    def pipelines(self) -> tuple[PipelineRun, ...]:
        """Part of the program, schedule and IPUs of the stages of each pipeline with stages."""
        return self.planned.lowered.pipelines

    @property
    def choice(self) -> Choice:
        """Cost per byte and recomputation."""
        return self.planned.choice

    @property
    def trades(self) -> tuple[ChainTrade, ...]:
        """Bytes and cycles of recomputation in each gradient, where it is "auto"."""
        return self.planned.trades

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds of tracing, of each pass and of lowering; of a program in the cache, of the search there."""
        return ReadOnlyMapping(self.call_program.timings)

    @checking_calls("Lowered.as_text")
    def as_text(self, after: str | None = None) -> str:
        """Return the jaxpr after a pass, or a listing of graph and program for None and "lower".

        Args:
            after: "trace", the name of a pass, or "lower".

        Raises:
            ArgumentError: for an unknown pass.
        """
        if after is None or after == LOWERED:
            from ipujax.runtime.graph.listing import listing

            return listing(self.graph, self.program)
        jaxprs = self.planned.jaxprs
        if after not in jaxprs:
            names = ", ".join((*jaxprs, LOWERED))
            hint = nearest(after, (*jaxprs, LOWERED))
            raise ArgumentError(f"no pass is called {after!r}", expected=f"one of {names}", got=repr(after), hint=hint)
        return str(jaxprs[after])

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the jaxpr after each pass, the graph and the program as JSON; see `lowering.dumps`.

        Args:
            path: the file; an existing one is replaced.

        Raises:
            ArgumentTypeError: `path` is not a path.
            ArgumentError: it cannot be written.
        """
        from ipujax.lowering.dumps import intermediate_json, write_json

        write_json(path, intermediate_json(self.name, self.planned.jaxprs, (self.graph, self.program)))

    def shardings(self) -> str:
        """Return the sharding of each argument and result as text, and the collectives that partitioning has added.

        Raises:
            ArgumentAttributeError: shardings do not partition the function.
        """
        return self._partitioned("shardings").text(self.signature.leaf_names)

    def tile_map(self) -> dict[str, Any]:
        """Return the tile mapping of each variable, for the tiles of one replica.

        Returns:
            A dict for JSON, short in a console: `"variables"` lists each variable with its name, dtype, shape and line,
            its `"tiles"`, the number of `"elements"` on each of them, and the `"mapping"`, by blocks or intervals, of
            its elements in row-major order.
        """
        from ipujax.lowering.dumps import tile_map

        return tile_map(self.graph)

    def evaluate(self, *leaves: Any, log: DecisionLog | None = None) -> Any:
        """Compute the results of the program in JAX operations that can be traced.

        Args:
            leaves: arrays of the signature's shapes and dtypes, in order; where it `runs_apart`, on the device.
            log: takes the decisions of data-dependent control, see `engine_function`.
        """
        # XLA computes the program on device arrays; results return to their memories below.
        on_device = list(map(to_device, leaves))
        run = partial(self.run_program, log=log)
        outs = self.as_traced(self.call_program.tree_of_results, on_device, lambda operands: run(*operands))
        return outs if self.call_program.runs_apart(log) else self.call_program.to_memories(outs)

    @property
    def jaxprs(self) -> Mapping[str, ClosedJaxpr]:
        """The jaxpr as traced, and after each pass, by name."""
        return ReadOnlyMapping(self.planned.jaxprs)

    def run_program(self, *operands: Any, log: DecisionLog | None = None) -> Sequence[Any]:
        """Return the results of the jaxpr, computed by the program, from its inputs; see `evaluate_program`."""
        computation = None if log is not None or locates_nans() else self.stored_computation
        if computation is not None:
            results: Sequence[Any] = computation(*operands)
            return results
        from ipujax.lowering_plan.program_evaluation import evaluate_program

        with collecting_rarely():
            return evaluate_program(self.planned, operands, self.calls, log)

    @cached_property
    def stored_computation(self) -> Computation | None:
        """The program as XLA has it, of a program in the cache."""
        return None if self.store is None or self._stored is None else self.store.computation()

    @property
    def calls(self) -> HostCalls | None:
        """Caller of the program's Python functions; None if it has none."""
        return self.call_program.calls

    @property
    def primitives(self) -> set[str]:
        """Names of the primitives of the function as traced."""
        return set(primitive_names(self.plan.jaxpr.jaxpr))

    @property
    def num_used_ipus(self) -> int:
        """IPUs of the device that the program uses."""
        return self.call_program.used_ipus

    @cached_property
    def _fitted(self) -> tuple[PlannedProgram, Executable]:
        """The fastest attempt that fits, compiled."""
        from ipujax.fit import compile_fitting
        from ipujax.lowering_plan.planned_program import planned_program
        from ipujax.runtime.compile import STEPS
        from ipujax.storage.stored_values import with_stored_values

        options = self.plan.settings.options
        first = self.planned
        steps = (*first.timings, *STEPS)
        watching = watch_compilation(self.name, lambda: steps, options.progress, sum(first.timings.values()))
        with collecting_rarely(), watching:
            fitting = partial(compile_fitting, first, partial(planned_program, first.plan), options)
            planned, executable = self.as_traced(with_stored_values, options.cache_dir, fitting)
        return planned, executable.named(self.name, self.name.file, planned.timings)

    @cached_property
    def _compiled(self) -> Compiled:
        """The program of the attempt that fits; of one in the cache, compiled when its executable is read."""
        store = self.store
        if self._stored is not None:
            lowered = Lowered(self.plan, lambda: self._fitted[0], store, self._stored)
            compiled = Compiled(lowered, lambda: self._fitted[1], store)
            announce(self.name, self._stored.warnings, lambda: compiled.profile, self.signature.in_avals)
            return compiled
        planned, executable = self._fitted
        compiled = Compiled(Lowered(planned.plan, lambda: planned, store), lambda: executable, store)
        announce(self.name, compile_warnings(executable), lambda: compiled.profile, self.signature.in_avals)
        if store is not None:
            self.as_traced(store.put_program, compiled)
        return compiled

    def cost_analysis(self) -> dict[str, float]:
        """Return costs of one call, see `Compiled.cost_analysis`."""
        return self.compile().cost_analysis()

    @checking_calls("Lowered.compile")
    def compile(self) -> Compiled:
        """Check the graph, plan its exchanges and memory, and return the callable program.

        A program that does not fit is lowered again, see `ipujax.fit`: at higher costs per byte, unless
        `Options(byte_cost=)` fixes one, and for smaller tiles.

        Raises:
            TileMemoryError: the program does not fit, unless `Options(allow_out_of_memory=True)`.
            VerifyError: the program breaks a rule of the verifier, which is a bug in ipujax.
        """
        return self._compiled

    def _repr_html_(self) -> str:
        return table((), self.planned.counts, f"Lowered {self.name}")

    def __repr__(self) -> str:
        is_stored = self._stored is not None
        return f"Lowered({self.name}: {'in the cache' if is_stored else f'{len(self.jaxpr.eqns)} equations'})"


class Compiled(Stage):
    """A function compiled for one device and one signature; call it, or read its profile.

    Attributes:
        lowered: program of the attempt that fits.
    """

    def __init__(self, lowered: Lowered, compile_now: Callable[[], Executable], store: Store | None = None) -> None:
        self.lowered = lowered
        self._compile_now = compile_now
        self._store = store
        self._profiling = Lock()  # calls share the log of decisions

    @cached_property
    def executable(self) -> Executable:
        """The checked program with its costs and memory; of a program in the cache, compiled now."""
        return self._compile_now()

    @property
    def signature(self) -> Signature:
        """Pytrees, shapes and dtypes of arguments and results."""
        return self.lowered.signature

    @property
    def partitioning(self) -> Partitioning | None:
        """How shardings partition the program; None if they do not."""
        return self.lowered.partitioning

    @property
    def pipelines(self) -> tuple[PipelineRun, ...]:
        """See `Lowered`."""
        return self.lowered.pipelines

    @property
    def _is_stored(self) -> bool:
        return self.lowered.call_program.is_stored

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds of each step from tracing to the executable, or to the program in the cache; without XLA's."""
        return self.lowered.timings if self._is_stored else self.executable.timings

    @cached_property
    def profile(self) -> Profile:
        """Static profile: cycles, phases and memory of one call."""
        with collecting_rarely():  # imports make as many objects as a compilation
            from ipujax.runtime.report import Profile

            data = self._store.profile() if self._store is not None and self._is_stored else None
            if data is not None:
                return Profile.from_data(data, lambda: self.executable)
            profile = Profile(self.executable, list_equations=self.lowered.planned.list_equations)
            if self._store is not None:
                self._store.put_profile(profile)
        return profile

    @checking_calls("Compiled.on")
    def on(self, device: Device) -> Compiled:
        """Return the same program on another `ipu.IPUModel`, costed again; its profile says whether it fits the tiles.

        Raises:
            TargetError: the machines differ in constants that programs depend on, as tiles or workers: compile again.
            ArgumentError: another device.
            StreamingMemoryError: arrays do not fit in its streaming memory.
        """
        from ipujax.lowering_plan.planned_program import held_on

        planned, executable = held_on(self.lowered.planned, self.executable, device)
        return Compiled(Lowered(planned.plan, lambda: planned), lambda: executable)

    def cost_analysis(self) -> dict[str, float]:
        """Return "cycles", "seconds" and cycles by phase of one call; data-dependent trip counts need `Options`."""
        profile = self.profile
        phases = {f"{name}_cycles": float(cycles) for name, cycles in profile.phase_cycles.items()}
        return {"cycles": float(profile.cycles), "seconds": profile.seconds, **phases}

    def as_text(self) -> str:
        """Return a listing of graph and program."""
        return self.lowered.as_text()

    def runtime_executable(self) -> Executable:
        """Return the checked program with its costs and memory."""
        return self.executable

    def memory_analysis(self) -> MemoryReport:
        """Return tile memory by tile and by category."""
        return self.profile.memory

    @cached_property
    def _call(self) -> Callable[..., Any]:
        # A Python function may raise: donated arguments are then as they were, for another call.
        donated = np.flatnonzero(self.lowered.signature.donated).tolist() if self.lowered.calls is None else ()
        return self._jitted(None, tuple(donated))

    @cached_property
    def _log(self) -> DecisionLog:
        from ipujax.runtime.engine import DecisionLog

        return DecisionLog()

    @cached_property
    def _profiled_call(self) -> Callable[..., Any]:
        return self._jitted(self._log, ())

    def _jitted(self, log: DecisionLog | None, donated: tuple[int, ...]) -> Callable[..., Any]:
        """Return the function of flat arguments that XLA runs; with a log it records decisions."""

        def run(*leaves: Any) -> Any:
            return self.lowered.evaluate(*leaves, log=log)

        run.__name__ = self.lowered.name
        # A profiled call donates nothing, so that the same arguments can be passed again.
        jitted = partial(self.lowered.as_traced, jax_jit(run, donate_argnums=donated, **self.signature.for_xla))
        if not self.lowered.call_program.runs_apart(log):
            return jitted
        if self.partitioning is not None:
            return lambda *leaves: self.lowered.call_program.to_memories(run_on_one_device(jitted, leaves, donated))
        return lambda *leaves: self.lowered.call_program.to_memories(jitted(*map(to_device, leaves)))

    @showing_user_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on arguments of the compiled signature, without static ones, as in `jax.stages`.

        Raises:
            ArgumentError: another pytree, shape or dtype, an array that is donated and passed twice, or a call under a
                transformation of JAX.
        """
        leaves = self._check(args, kwargs)
        self.lowered.signature.check_donated(self.lowered.name, leaves)
        spread = self.lowered.spread
        if spread is None:
            return self._settled(self._call(*leaves))
        arguments = spread.arguments(args, kwargs, (self.lowered.signature.arguments, ()))
        return spread.call(lambda *args, **kwargs: self._call(*jax.tree.leaves((args, kwargs))), arguments)

    @showing_user_frames
    def profile_call(self, *args: Any, **kwargs: Any) -> tuple[Any, Profile]:
        """Run the function and return its results with the profile of this run; donated arguments stay valid.

        Raises:
            ArgumentError: as a call, and for replicas that are spread over instances.
        """
        from ipujax.runtime.report import Profile

        leaves = self._check(args, kwargs)
        if self.lowered.spread is not None:
            problem = f"replicas of {self.lowered.name} are on several instances: their run cannot be profiled"
            raise ArgumentError(problem, hint="compiled.profile is that of all replicas; or --instances 1")
        with self._profiling:
            self._log.clear()
            outs = jax.block_until_ready(self._profiled_call(*leaves))
            self._settled(outs)
            listing = self.lowered.planned.list_equations
            return outs, Profile(self.executable, self._log.decisions, list_equations=listing)

    @showing_user_frames
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program to a file, which `ipu.load` reads: computation, profile and versions.

        Args:
            path: of the file; an existing one is replaced.

        Raises:
            ArgumentError: a program that calls Python functions, changes Refs, has arrays in the host's memory, or is
                partitioned or spread over instances; or the path cannot be written.
            ArgumentTypeError: arguments or results of a pytree that no file can describe, or `path` is not a path.
        """
        from ipujax.storage import save_program

        self.lowered.as_traced(save_program, path, self.lowered, self.profile)

    def _settled(self, outs: Any) -> Any:
        calls = self.lowered.calls
        if calls is None:
            return outs
        from ipujax.runtime.host import wait_for_calls

        return wait_for_calls(outs, [calls])

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        signature = self.lowered.signature
        spread = self.lowered.spread

        def local_avals() -> Sequence[Any]:
            avals = signature.in_avals
            return avals if spread is None else spread.local_avals(avals, args, kwargs, signature.arguments)

        return check_compiled_call(self.lowered.name, signature, args, kwargs, local_avals, self.partitioning)

    def _repr_html_(self) -> str:
        return join_markup([tag("p", f"Compiled {self.lowered.name}"), Markup(self.profile._repr_html_())])

    def __repr__(self) -> str:
        return f"Compiled({self.lowered.name}: {self.profile.brief})"
