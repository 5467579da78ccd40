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
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from ipujax.arguments import FunctionName
from ipujax.calls import Signature, Stage, Traced as Traced, check_compiled_call, moves_apart
from ipujax.compiled_programs import announce, bound_warnings
from ipujax.distributed.instance import check_alone, to_local
from ipujax.lowering.dumps import LOWERED, TRACE
from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    fetched,
    is_float0,
    to_device,
    to_memory_of,
    with_weak_type,
)
from ipujax.lowering.jaxpr import equations, primitive_names
from ipujax.lowering.refs import is_ref
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.logs import watch_compilation
from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.options import Options
from ipujax.runtime.read_only import ReadOnlyMapping
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.target import nearest
from ipujax.runtime.tracebacks import showing_user_frames
from ipujax.sharding import Partitioning, run_on_one_device, with_axes, without_axes

# Imported by the methods that need them: a program of the cache is called without.
if TYPE_CHECKING:
    from ipujax.distributed.instance import Spread
    from ipujax.fit import Choice, Untried
    from ipujax.lowering.lower import LoweredProgram
    from ipujax.lowering.recomputation import ChainTrade
    from ipujax.lowering.rules import Probes
    from ipujax.runtime.compile import Executable
    from ipujax.runtime.graph import Program
    from ipujax.runtime.host import HostCalls
    from ipujax.runtime.memory import MemoryReport
    from ipujax.runtime.report import Profile

Record = Callable[["Program", Any], None]
_COMMUNICATING = frozenset(("replicated", "shard_map"))  # primitives whose parts exchange values


class Store(Protocol):
    """Where a compiled program and its profile go, once each is known; see `ipujax.caching`."""

    def put_program(self, compiled: Compiled) -> None: ...
    def put_profile(self, profile: Profile) -> None: ...


class Lowered(Stage):
    """A function as graph and program for one device and one signature, returned by `ipu.jit(fun).lower(*args)`.

    It is planned at the first cost per byte, see `Options.byte_cost`.

    Attributes:
        jaxpr: the jaxpr after all passes.
        graph: variables, tile mappings and vertices.
        program: control program of one call.
        pipelines: part of the program, schedule and IPUs of the stages of each pipeline with stages.
        choice: cost per byte and recomputation.
        trades: bytes and cycles of recomputation in each gradient, where it is "auto".
        timings: seconds of tracing, of each pass and of lowering.
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
        plan: Callable[..., Lowered],
        spread: Spread | None = None,
        *,
        refs: Sequence[jax.Ref] = (),
        constants: Sequence[Any] = (),
        may_offload: bool = False,
        partitioning: Partitioning | None = None,
    ) -> None:
        self.name = name
        self.signature = signature
        self.spread = spread
        self.choice = choice
        self.trades = tuple(trades)
        self._options = options
        self._plan = plan
        self._may_offload = may_offload
        self.partitioning = partitioning
        self.store: Store | None = None
        self._jaxprs = dict(jaxprs)
        self._function = self._jaxprs[TRACE]
        # Of the discharged jaxpr: the value of a Ref may be weakly typed, the Ref is not.
        self._are_weak = tuple(aval.weak_type for aval in self._jaxprs["discharge"].out_avals)
        self._lowered = lowered
        self._refs = tuple(refs)
        self._constants = tuple(map(fetched, constants))
        self.jaxpr = list(self._jaxprs.values())[-1]
        self.graph = lowered.graph
        self.program = lowered.program
        self.pipelines = lowered.pipelines
        self.timings = ReadOnlyMapping(timings)

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
        if after not in self._jaxprs:
            names = ", ".join((*self._jaxprs, LOWERED))
            hint = nearest(after, (*self._jaxprs, LOWERED))
            raise ArgumentError(f"no pass is called {after!r}", expected=f"one of {names}", got=repr(after), hint=hint)
        return str(self._jaxprs[after])

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the jaxpr after each pass, the graph and the program as JSON; see `lowering.dumps`.

        Args:
            path: the file; an existing one is replaced.

        Raises:
            ArgumentTypeError: `path` is not a path.
            ArgumentError: it cannot be written.
        """
        from ipujax.lowering.dumps import intermediate_json, write_json

        write_json(path, intermediate_json(self.name, self._jaxprs, (self.graph, self.program)))

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

    def evaluate(self, *leaves: Any, record: Record | None = None) -> Any:
        """Compute the results of the program in JAX operations that can be traced.

        Args:
            leaves: arrays of the signature's shapes and dtypes, in order; where it `runs_apart`, on the device.
            record: receives decisions of data-dependent control, see `engine_function`.
        """
        self.check_alone()
        # XLA computes the program on device arrays; results return to their memories below.
        on_device = [without_axes(to_device(x)) for x in leaves]
        outs = self._tree_of_results(on_device, lambda operands: self.run_program(*operands, record=record))
        return outs if self.runs_apart(record) else self.to_memories(outs)

    @property
    def jaxprs(self) -> Mapping[str, ClosedJaxpr]:
        """The jaxpr as traced, and after each pass, by name."""
        return ReadOnlyMapping(self._jaxprs)

    def probed(self, probes: Probes) -> LoweredProgram:
        """Lower the function again, as it is, with probes of all values."""
        program: LoweredProgram = self._plan(self.choice, probes)._lowered
        return program

    def check_alone(self) -> None:
        """Refuse processes that `ipujax run` did not start, where IPUs or replicas communicate; see `check_alone`."""
        if self.partitioning is not None or not _COMMUNICATING.isdisjoint(self.primitives):
            check_alone(self.name)

    def runs_apart(self, record: Record | None) -> bool:
        """Return whether arrays move outside the XLA computation: to and from host memory, or a mesh of devices."""
        is_partitioned = self.partitioning is not None
        return is_partitioned or moves_apart(self.signature, record is not None or self.calls is not None)

    def to_memories(self, outs: Any) -> Any:
        """Return the pytree of results, each in the memory of its aval, or on the mesh of the call."""
        avals = self.signature.out_avals
        placed = [to_memory_of(x, aval) for x, aval in zip(jax.tree.leaves(outs), avals, strict=True)]
        placed = with_axes(placed, avals) if self.partitioning is None else self.partitioning.placed(placed, avals)
        return jax.tree.unflatten(self.signature.out_tree, placed)

    def _tree_of_results(self, leaves: Sequence[Any], run: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Return the pytree of the results of `run` on the arrays of the jaxpr; writes the Refs that it changes."""
        signature = self.signature
        inputs = self._inputs(leaves)
        refs = [x for x in inputs if is_ref(jax.typeof(x))]
        outs = iter(run(self.operands(leaves)))
        are_weak = iter(self._are_weak)
        results = [
            np.zeros(aval.shape, aval.dtype) if is_float0(aval) else with_weak_type(next(outs), next(are_weak))
            for aval in signature.out_avals
        ]
        # Final values of Refs are the last results, in the order of the inputs.
        for ref in refs:
            ref[...] = next(outs)
        return jax.tree.unflatten(signature.out_tree, results)

    def operands(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the arrays of the inputs of the jaxpr: arguments, values of Refs, and arrays in the host's memory."""
        values = [x[...] if is_ref(jax.typeof(x)) else x for x in self._inputs(leaves)]
        return [*values, *self._constants]

    def _inputs(self, leaves: Sequence[Any]) -> list[Any]:
        arguments = zip(leaves, self.signature.in_avals, strict=True)
        return [*(x for x, aval in arguments if not is_float0(aval)), *self._refs]

    def run_program(self, *operands: Any, record: Record | None = None) -> Sequence[Any]:
        """Return the results of the jaxpr, computed by the program, from its inputs; see `evaluate_program`."""
        from ipujax.program_evaluation import evaluate_program

        exact_splits = self._options.exact_splits
        with collecting_rarely():
            return evaluate_program(
                self.name, self._lowered, self._jaxprs, operands, self.spread, self.calls, record, exact_splits
            )

    @cached_property
    def calls(self) -> HostCalls | None:
        """Caller of the program's Python functions; None if it has none."""
        from ipujax.program_evaluation import host_calls

        return host_calls(self.program)

    @property
    def primitives(self) -> set[str]:
        """Names of the primitives of the function as traced."""
        return set(primitive_names(self._function.jaxpr))

    @property
    def num_used_ipus(self) -> int:
        """IPUs of the device that the program uses."""
        return self.graph.num_used_ipus

    @property
    def closes_over_host_arrays(self) -> bool:
        """True if arrays in the host's memory, or Refs, are inputs beside the arguments."""
        return bool(self._constants or self._refs)

    @property
    def untried(self) -> Untried:
        """Options that could make the program smaller, and are not set."""
        from ipujax.fit import Untried
        from ipujax.lowering.offload import could_stream_loops
        from ipujax.lowering.recomputation import Recomputation, modes

        eqns = list(equations(self._jaxprs["dce"].jaxpr))
        with_auto = modes(eqns, Recomputation("auto"))
        recompute = modes(eqns, Recomputation(self._options.recompute)) != with_auto
        stream_loops = not self.choice.stream_loops and could_stream_loops(self._function, self._jaxprs["fuse"])
        pipelines = bool(with_auto - {"auto"})
        return Untried(recompute, pipelines, self._may_offload, self._options.io_tiles, stream_loops)

    @cached_property
    def _compiled(self) -> Compiled:
        from ipujax.fit import compile_fitting
        from ipujax.runtime.compile import STEPS
        from ipujax.storage.stored_values import with_stored_values

        spent_seconds = sum(self.timings.values())
        watching = watch_compilation(self.name, lambda: (*self.timings, *STEPS), self._options.progress, spent_seconds)
        with collecting_rarely(), watching:
            fitting = partial(compile_fitting, self, self._plan, self._options)
            lowered, executable = with_stored_values(self._options.cache_dir, fitting)
        executable = executable.named(self.name, self.name.file, lowered.timings)
        compiled = Compiled(lowered, executable, self.store)
        announce(self.name, bound_warnings(executable), lambda: compiled.profile)
        if self.store is not None:
            self.store.put_program(compiled)
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
        graph = self.graph
        vertices = sum(group.num_vertices for groups in graph.groups.values() for group in groups)
        rows = [
            ("Machine", f"{graph.target.num_ipus:,} × {graph.target.name}, {graph.replication_factor:,} replicas"),
            ("Equations", len(self.jaxpr.eqns)),
            ("Variables", len(graph.variables)),
            ("Compute sets", len(graph.groups)),
            ("Vertices", vertices),
            ("Pipelines", len(self.pipelines)),
            ("Texts, by as_text(after=…)", f"{len(self._jaxprs)}: {', '.join(self._jaxprs)}"),
        ]
        return table((), rows, f"Lowered {self.name}")

    def __repr__(self) -> str:
        return f"Lowered({self.name}: {len(self.jaxpr.eqns)} equations)"


class Compiled(Stage):
    """A function compiled for one device and one signature; call it, or read its profile.

    Attributes:
        executable: the checked program with its costs and memory.
        pipelines: see `Lowered`.
    """

    def __init__(self, lowered: Lowered, executable: Executable, store: Store | None = None) -> None:
        self.executable = executable
        self._store = store
        self.pipelines = lowered.pipelines
        self.signature = lowered.signature
        self.partitioning = lowered.partitioning
        self._lowered = lowered
        self._decisions: dict[Program, list[int]] = {}  # of data-dependent control in one profiled call
        self._profiling = Lock()  # calls share the dict of decisions

    @property
    def lowered(self) -> Lowered:
        """Program of the attempt that fits."""
        return self._lowered

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds of each step from tracing to the executable, without XLA's compilation."""
        return self.executable.timings

    @cached_property
    def profile(self) -> Profile:
        """Static profile: cycles, phases and memory of one call."""
        with collecting_rarely():  # imports make as many objects as a compilation
            from ipujax.runtime.report import Profile

            profile = Profile(self.executable)
            if self._store is not None:
                self._store.put_profile(profile)
        return profile

    def cost_analysis(self) -> dict[str, float]:
        """Return "cycles", "seconds" and cycles by phase of one call; data-dependent trip counts need `Options`."""
        profile = self.profile
        phases = {f"{name}_cycles": float(cycles) for name, cycles in profile.phase_cycles.items()}
        return {"cycles": float(profile.cycles), "seconds": profile.seconds, **phases}

    def as_text(self) -> str:
        """Return a listing of graph and program."""
        return self._lowered.as_text()

    def runtime_executable(self) -> Executable:
        """Return the checked program with its costs and memory."""
        return self.executable

    def memory_analysis(self) -> MemoryReport:
        """Return tile memory by tile and by category."""
        return self.profile.memory

    @cached_property
    def _call(self) -> Callable[..., Any]:
        return self._jitted(None, tuple(np.flatnonzero(self._lowered.signature.donated).tolist()))

    @cached_property
    def _profiled_call(self) -> Callable[..., Any]:
        return self._jitted(self._record, ())

    def _jitted(self, record: Record | None, donated: tuple[int, ...]) -> Callable[..., Any]:
        self._lowered.check_alone()  # before arrays of several processes are read

        def run(*leaves: Any) -> Any:
            return self._lowered.evaluate(*leaves, record=record)

        run.__name__ = self._lowered.name
        # A profiled call donates nothing, so that the same arguments can be passed again.
        jitted = jax_jit(run, donate_argnums=donated, **self.signature.for_xla)
        if not self._lowered.runs_apart(record):
            return jitted
        if self.partitioning is not None:
            return lambda *leaves: self._lowered.to_memories(run_on_one_device(jitted, leaves, donated))
        return lambda *leaves: self._lowered.to_memories(jitted(*map(to_device, leaves)))

    def _record(self, node: Program, decision: Any) -> None:
        self._decisions.setdefault(node, []).append(int(decision))

    @showing_user_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on arguments of the compiled signature, without static ones, as in `jax.stages`.

        Raises:
            ArgumentError: another pytree, shape or dtype, an array that is donated and passed twice, or a call under a
                transformation of JAX.
        """
        leaves = self._check(args, kwargs)
        self._lowered.signature.check_donated(self._lowered.name, leaves)
        spread = self._lowered.spread
        if spread is None:
            return self._settled(self._call(*leaves))
        operands = spread.operands(args, kwargs, (self._lowered.signature.arguments, ()), (), shapes_only=False)
        spread.meet(operands)
        return to_local(self._call(*jax.tree.leaves((operands.args, operands.kwargs))))

    @showing_user_frames
    def profile_call(self, *args: Any, **kwargs: Any) -> tuple[Any, Profile]:
        """Run the function and return its results with the profile of this run; donated arguments stay valid.

        Raises:
            ArgumentError: as a call, and for replicas that are spread over instances.
        """
        from ipujax.runtime.report import Profile

        leaves = self._check(args, kwargs)
        if self._lowered.spread is not None:
            problem = f"replicas of {self._lowered.name} are on several instances: their run cannot be profiled"
            raise ArgumentError(problem, hint="compiled.profile is that of all replicas; or --instances 1")
        with self._profiling:
            self._decisions = {}
            outs = jax.block_until_ready(self._profiled_call(*leaves))
            jax.effects_barrier()  # decisions arrive by callbacks, which may run after the results are ready
            self._settled(outs)
            return outs, Profile(self.executable, self._decisions)

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

        save_program(path, self._lowered, self.profile)

    def _settled(self, outs: Any) -> Any:
        calls = self._lowered.calls
        if calls is None:
            return outs
        from ipujax.runtime.host import wait_for_calls

        return wait_for_calls(outs, [calls])

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        signature = self._lowered.signature
        spread = self._lowered.spread

        def local_avals() -> Sequence[Any]:
            avals = signature.in_avals
            return avals if spread is None else spread.local_avals(avals, args, kwargs, signature.arguments)

        return check_compiled_call(self._lowered.name, signature, args, kwargs, local_avals, self.partitioning)

    def _repr_html_(self) -> str:
        return join_markup([tag("p", f"Compiled {self._lowered.name}"), Markup(self.profile._repr_html_())])

    def __repr__(self) -> str:
        return f"Compiled({self._lowered.name}: {self.profile.brief})"
