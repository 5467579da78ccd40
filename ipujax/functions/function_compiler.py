"""Compiler of one `ipu.jit` function for the devices of its calls.

A call is one of `jax.jit`, with JAX's own cache, donation and dispatch. Only its first trace for new shapes differs: it
lowers the user's function, checks that the program fits the machine, and emits the operations of the program for XLA.

Input: settings of the function, and arguments of calls. Output: results, `Traced`, `Lowered`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

import jax

from ipujax.arguments import argument_places, check_arguments, dynamic_arguments, has_tracer, own_check, static_keywords
from ipujax.caching import find_or_lower
from ipujax.calls import (
    CallArguments,
    Compilation,
    Places,
    PlainCalls,
    Replication,
    RunsApart,
    UnusedIpus,
    check_jaxpr,
    check_live,
    check_live_arguments,
    check_memories,
    check_mesh_of_devices,
    check_whole,
    compiling,
    compiling_for,
    explaining_axis_errors,
    inside_function,
    locates_nans,
    offloaded_arguments,
    with_host_shapes,
)
from ipujax.compiled_programs import note_call
from ipujax.device import CPU, Device, IPUModel, device_of_context
from ipujax.distributed.instance.membership import membership
from ipujax.functions.function_settings import FunctionSettings
from ipujax.functions.likeness import make_alike
from ipujax.lowering.jax_compat import EVALUATION, ClosedJaxpr, find_top_trace, is_eager, is_evaluating
from ipujax.lowering.partition import tracing_without_mesh
from ipujax.lowering.replicas import evaluate, replicated_p
from ipujax.lowering_plan import LoweringPlan, ProgramSettings, compilation_steps
from ipujax.runtime.cache import release_freed_memory
from ipujax.runtime.errors import ArgumentError, calling_line
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.logs import Log, step, watch_compilation
from ipujax.runtime.names_at_import import jax_jit
from ipujax.sharding import NO_SHARDINGS, UNSET, CallShardings, ShardingSettings, in_explicit_mesh
from ipujax.stages import Compiled, Lowered, Traced

if TYPE_CHECKING:
    from ipujax.checking import CheckReport
    from ipujax.distributed.instance.spread import Spread
    from ipujax.functions.partitioned_calls import PartitionedCalls
    from ipujax.runtime.host import HostCalls

_LOG = Log("jit")
_NO_CALL = object()  # in the place of the device of the latest call
_DONATED_TWICE = "donate", "Execute()"  # words in XLA's error about a donated array that a call has twice


def _weak_reference(fun: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    try:
        return ref(fun)
    except TypeError:  # objects without weak references
        return lambda: fun


class FunctionCompiler:
    """Compiler of one function.

    Args:
        fun: the user's function. It is kept by the functions that call, not by their compiler: what JAX keeps of the
            compiler would keep it too.
        settings: settings of the function.

    Attributes:
        unused_ipus: warning of devices that have more IPUs than the function uses.
    """

    def __init__(self, fun: Callable[..., Any], settings: FunctionSettings) -> None:
        self._reference = _weak_reference(fun)
        self._name = settings.name_of(fun)
        self._settings = settings
        # A lambda: `_jitted` renames it, and must not rename the user's function.
        self._one_replica = self._jitted(lambda *args, **kwargs: inside_function(self._fun)(*args, **kwargs))
        self._plain = self._one_replica if self._replication is None else self._all_replicas(self._replication)
        self._runners: dict[Device, Callable[..., Any]] = {}
        self._latest: tuple[object, Callable[..., Any]] = (_NO_CALL, self._plain)  # see `call`
        self._has_compiled = False  # since the last call that looked, see `_call`
        self._tracers: dict[IPUModel, Any] = {}
        # By jaxpr, which JAX holds until it would trace again; a value that refers to its key would never be freed.
        self._lowered: WeakKeyDictionary[ClosedJaxpr, dict[Any, Lowered]] = WeakKeyDictionary()
        self._known_places: dict[int, Places] = {}  # by the number of positional arguments
        self.unused_ipus = UnusedIpus(self._name)
        self._plain_calls = PlainCalls(f"{self._name} is called under a JAX transformation: it runs as jax.jit")
        self._checked: WeakSet[Lowered] = WeakSet()
        self._calls: WeakSet[HostCalls] | None = None  # of programs that call Python functions; XLA holds them

    @property
    def _replication(self) -> Replication | None:
        return self._settings.replication

    @property
    def _shardings(self) -> ShardingSettings:
        return self._settings.shardings or UNSET

    @functools.cached_property
    def _has_own_check(self) -> bool:
        return own_check(self._fun) is not None

    @property
    def live_function(self) -> Callable[..., Any] | None:
        """The user's function; None if nobody has it any more."""
        return self._reference()

    @property
    def _fun(self) -> Callable[..., Any]:
        fun = self._reference()
        assert fun is not None, f"{self._name} is called, and was not kept"
        return fun

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function for the arguments of a call."""
        # Constant time, below a microsecond: JAX's dispatch flattens the arguments and compares them with the compiled
        # signature; where it refuses them, `_explain` raises an error that names the argument.
        known, run = self._latest
        if device_of_context() is not known or find_top_trace(()) is not EVALUATION:
            return self._call(self._settings.current_device, args, kwargs)
        try:
            outs = run(*args, **kwargs) if kwargs else run(*args)  # an empty dictionary would be copied
        except (RunsApart, TypeError, ValueError, RuntimeError) as error:
            return self._after(error, self._settings.current_device, args, kwargs)
        return outs if self._calls is None else self._waited(outs)

    @functools.cached_property
    def _needs_dispatch_alone(self) -> bool:
        """Whether nothing but JAX's dispatch looks at the arguments of calls that no transformation traces."""
        alone = self._replication is None and not self._has_own_check and not self._settings.options.check
        return alone and not self._may_partition

    def _call(self, device: Device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on another device, or where more than JAX's dispatch looks at the call."""
        if self._has_own_check and (check := own_check(self._fun)) is not None:
            check(*args, **kwargs)
        if (outer := compiling()) is not None:
            outer.check_inner(self._name)  # inlined into the outer function: one program
            return self._one_replica(*args, **kwargs)
        partitions = self._may_partition and not isinstance(device, CPU) and self._shardings.may_partition(args, kwargs)
        is_traced = not is_evaluating()
        if is_traced and not partitions:
            leaves = jax.tree.leaves((args, kwargs))
            # A jaxpr that is being made has the function. Without arguments, one may close over what is traced.
            is_traced = not is_eager() or not leaves or has_tracer(leaves)
        if self._settings.options.check and not is_traced and not isinstance(device, CPU):
            self._check_first(args, kwargs)
        if partitions and not is_traced:
            try:
                return self._partitioned(device, args, kwargs)
            except (TypeError, ValueError, RuntimeError) as error:
                self._explain(error, device, args, kwargs)
                raise
        if self._replication is not None and self._spread is not None:
            return self._call_together(self._spread, device, args, kwargs, is_traced)
        if is_traced:
            self._plain_calls.notice()
        run = self._plain if is_traced else self._runners.get(device) or self._runner(device)
        if self._needs_dispatch_alone and not is_traced:
            self._latest = device_of_context(), run
        try:
            outs = run(*args, **kwargs)
        except (RunsApart, TypeError, ValueError, RuntimeError) as error:
            return self._after(error, "a transformation of JAX" if is_traced else device, args, kwargs)
        if self._has_compiled:
            # XLA has compiled, too. Half of the process may be freed memory, which nothing would return to the system.
            self._has_compiled = False
            release_freed_memory()
        return outs if is_traced or self._calls is None else self._waited(outs)

    def _after(self, error: Exception, where: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of a call that JAX's dispatch cannot run; raise the error of one that it refused."""
        if isinstance(error, RunsApart):  # raised in each trace, which then is not cached: each call comes here
            dynamic_args, dynamic_kwargs = self._dynamic(args, kwargs)
            return error.compiled(*dynamic_args.values(), **dynamic_kwargs)
        self._explain(error, where, args, kwargs)
        raise error

    def _waited(self, outs: Any) -> Any:
        """Return results after the Python functions that the program calls."""
        from ipujax.runtime.host import wait_for_calls

        assert self._calls is not None
        return wait_for_calls(outs, self._calls)

    @functools.cached_property
    def _may_partition(self) -> bool:
        """Whether shardings may partition any call; JAX's devices do not change once it has any."""
        return self._shardings.has_any or jax.device_count() > 1

    def _explain(self, error: Exception, where: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise an error with function, argument and remedy in place of JAX's, if JAX refused the arguments."""
        check_mesh_of_devices(self._name, error, where)
        is_donated_twice = all(words in str(error) for words in _DONATED_TWICE)
        if is_donated_twice and not (traced := self.trace(args, kwargs)).closes_over_tracers:
            traced.signature.check_donated(self._name, jax.tree.leaves(self._dynamic(args, kwargs)))
        if not isinstance(error, jax.errors.JaxRuntimeError):  # raised by a run, which has deleted donated arguments
            check_memories(self._name, error)
            check_arguments(self._fun, args, kwargs, *self._settings.static)

    def _call_together(self, spread: Spread, device: Device, args: Any, kwargs: Any, is_traced: bool) -> Any:
        """Run the function on all instances together, each with its share of the arguments."""
        if is_traced or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            problem = f"{self._name} runs on several instances together, which no transformation of JAX can trace"
            raise ArgumentError(problem, hint="differentiate inside of the function, or leave out replicas=")
        try:
            arguments = spread.arguments(args, kwargs, self._places(args), self._static_keywords)
            return spread.call(self._runner(device), arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain(error, device, args, kwargs)
            raise

    @functools.cached_property
    def _static_keywords(self) -> Collection[str]:
        return static_keywords(self._fun, *self._settings.static)

    @property
    def _spread(self) -> Spread | None:
        """Distribution of replicas over instances; None if all are on this one."""
        if self._replication is None or membership().num_instances == 1:  # at each call: JAX may join it afterwards
            return None
        return self._known_spread

    @functools.cached_property
    def _known_spread(self) -> Spread | None:
        from ipujax.distributed.instance.spread import Spread

        assert self._replication is not None
        return Spread.of(self._name, self._replication, self._settings.current_device, self._settings.options)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """Trace for the shapes of arguments; see `IpuFunction.trace`."""
        self._check_whole(args, kwargs)
        check_live_arguments(args, kwargs)
        dynamic = None if self._settings.computes_whole else self._dynamic(args, kwargs)
        shardings, shapes, named_shapes = self._shardings.shaped(self._name, args, kwargs, dynamic)
        try:
            operands: Any = with_host_shapes(shapes, named_shapes)
            if self._spread is not None:
                shares, named = operands
                arguments = self._spread.arguments(shares, named, self._places(shares), self._static_keywords)
                operands = self._spread.avals(arguments)
            with self._watching():
                traced = self._trace(self._settings.current_device, operands[0], operands[1], shardings)
            if traced.closes_over_tracers:
                check_live(self._plain, args, kwargs, *self._dynamic(args, kwargs))
            return traced
        except (TypeError, ValueError) as error:
            check_memories(self._name, error)
            check_arguments(self._fun, args, kwargs, *self._settings.static, shapes=True)
            raise

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        """Lower for the shapes of arguments; see `IpuFunction.lower`."""
        with self._watching():
            return self._lower(self._settings.current_device, self.trace(args, kwargs))

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckReport:
        """Compare the program with plain JAX on arguments; see `IpuFunction.check`."""
        self._check_comparable(args, kwargs)
        return self._report(self.lower(args, kwargs), args, kwargs)

    def _check_comparable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(self._settings.current_device, CPU):
            problem = f"{self._name} runs on ipu.CPU(): plain JAX computes it, and there is nothing to check"
            raise ArgumentError(problem, hint="give ipu.jit an ipu.IPUModel")
        leaves = jax.tree.leaves(self._dynamic(args, kwargs))
        if compiling() is not None or not is_evaluating() or has_tracer(leaves):
            problem = f"{self._name} is traced here, and a check compares numbers"
            raise ArgumentError(problem, hint="check it outside of transformations of JAX and of other functions")
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            raise ArgumentError(f"{self._name} is checked on arrays", expected="arrays", got="a jax.ShapeDtypeStruct")

    def _report(self, lowered: Lowered, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckReport:
        from ipujax.checking import check_compiled

        positional, named = self._dynamic(args, kwargs)
        return check_compiled(lowered.compile(), jax.tree.leaves((tuple(positional.values()), named)))

    def _check_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the program in the first call of its signature."""
        lowered = self.lower(args, kwargs)
        if lowered not in self._checked:
            self._report(lowered, args, kwargs).raise_mismatch()
            self._checked.add(lowered)

    def eval_shape(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return shapes and dtypes of the results; see `IpuFunction.eval_shape`."""
        if compiling() is not None:
            return self._one_replica.eval_shape(*args, **kwargs)
        results = self.trace(args, kwargs).out_info
        return results if self._spread is None else self._spread.local_results(results)

    def clear_cache(self) -> None:
        """Drop all traces, lowered programs and compiled computations of the function."""
        self._one_replica.clear_cache()
        self._plain.clear_cache()
        self._runners.clear()
        self._latest = _NO_CALL, self._plain
        self._tracers.clear()
        self._lowered.clear()
        self.__dict__.pop("_partitioned", None)

    @functools.cached_property
    def _partitioned(self) -> PartitionedCalls:
        from ipujax.functions.partitioned_calls import PartitionedCalls  # few calls have shardings

        return PartitionedCalls(self._jitted, self._compiled, self._dynamic)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        return self.lower(args, kwargs).compile()

    def _all_replicas(self, replication: Replication) -> Any:
        """Return the jitted function in plain JAX, with the results of all replicas."""

        def run(*args: Any, **kwargs: Any) -> Any:
            do = evaluate if self._spread is None else self._spread.evaluate
            return replication.apply(do, inside_function(self._fun), args, kwargs, self._places(args), self._name)

        return self._jitted(run)

    def _check_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not isinstance(self._settings.current_device, CPU):
            check_whole(self._name, lambda: self._places(args)[0], args, kwargs, self._replication is None)

    def _watching(self, spent_seconds: float = 0.0) -> AbstractContextManager[None]:
        """Log and show the progress of the compilation inside, on which `spent_seconds` were spent before."""
        return watch_compilation(self._name, compilation_steps, self._settings.options.progress, spent_seconds)

    def _runner(self, device: Device) -> Callable[..., Any]:
        """Return the jitted function of a device, which lowers while it is traced; on a `CPU` the plain one."""
        if isinstance(device, CPU):
            return self._runners.setdefault(device, self._plain)
        if device not in self._runners:

            def run(*args: Any, **kwargs: Any) -> Any:
                if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
                    return self._plain(*args, **kwargs)
                with self._watching():
                    shardings = self._shardings.of_whole_call(
                        self._name, tuple(self._dynamic(args, kwargs)[0].values())
                    )
                    traced = self._trace(device, args, kwargs, shardings)
                    compiled = None if traced.closes_over_tracers else traced.lower().compile()
                if compiled is None:
                    self._plain_calls.notice()
                    return self._plain(*args, **kwargs)
                self._has_compiled = True
                self._latest = _NO_CALL, self._plain  # so that the next call goes through `_call`
                lowered = compiled.lowered
                if lowered.call_program.runs_apart(None):
                    raise RunsApart(compiled)
                if lowered.calls is not None:
                    self._calls = self._calls or WeakSet()
                    self._calls.add(lowered.calls)
                communicates = self._replication is not None or "shard_map" in lowered.primitives
                if locates_nans() and not communicates:
                    return self._fun(*args, **kwargs)  # the traceback is that of the user's code
                return lowered.evaluate(*jax.tree.leaves(self._dynamic(args, kwargs)))

            self._runners.setdefault(device, self._jitted(run))
        return self._runners[device]

    def _tracer(self, device: IPUModel) -> Any:
        """Return the jitted function to trace for a device; each has its own traces, which check inner devices."""
        if device not in self._tracers:

            def traced(*args: Any, **kwargs: Any) -> Any:
                replication = self._replication
                with compiling_for(self._compilation(device)):
                    if replication is None:
                        return self._fun(*args, **kwargs)
                    places = self._places(args)
                    return replication.apply(replicated_p.bind, self._fun, args, kwargs, places, self._name)

            self._tracers.setdefault(device, self._jitted(traced))
        return self._tracers[device]

    def _jitted(self, wrapper: Callable[..., Any]) -> Any:
        """Return a wrapper of the function with its name and signature, jitted with its settings."""
        make_alike(wrapper, self._fun, self._name)
        return jax_jit(wrapper, **self._settings.of_jax)

    def _trace(
        self,
        device: Device,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shardings: CallShardings = NO_SHARDINGS,
    ) -> Traced:
        note_call(self._fun, self._settings, args, kwargs)
        timings: dict[str, float] = {}
        jitted = self._plain if isinstance(device, CPU) else self._tracer(device)
        explaining = explaining_axis_errors(self._replication)
        with collecting_rarely(), step(_LOG, "trace", timings), explaining, in_explicit_mesh(shardings):
            traced = jitted.trace(*args, **kwargs)
        names, static = self._places(args)
        arguments = tuple(name for n, name in enumerate(names) if n not in static)
        offloaded = offloaded_arguments(self._name, self._settings.offload, len(args), static)
        call = CallArguments.of_call(self._fun, *self._dynamic(args, kwargs), args, self._settings.donated)
        lower = functools.partial(self._lower, device)
        for_xla = self._settings.for_xla
        return Traced(traced, arguments, call, timings, lower, offloaded, shardings, for_xla)

    def _lower(self, device: Device, traced: Traced) -> Lowered:
        """Lower once for each trace; JAX traces once for each signature."""
        if isinstance(device, CPU):
            problem = f"{self._name} runs on ipu.CPU(), which computes numbers only"
            raise ArgumentError(problem, hint="give ipu.jit an ipu.IPUModel")
        if traced.closes_over_tracers:
            problem = f"{self._name} uses values that a transformation of JAX is tracing"
            raise ArgumentError(problem, hint="lower it outside of that transformation, or make them arguments")
        membership()  # read at the first compilation
        # The jaxpr itself is the key: JAX caches one for each combination of shapes, static values and settings such as
        # `jax.enable_x64`.
        programs = self._lowered.setdefault(traced.jaxpr, {})
        # Shardings over automatic axes are no part of types.
        key = traced.shardings.inputs, traced.result_shardings, traced.shardings.mesh
        if key not in programs:
            with collecting_rarely(), self._watching(sum(traced.timings.values())), tracing_without_mesh():
                lowered = find_or_lower(self._plan(device, traced))
            self.unused_ipus.check(device, lowered.call_program.used_ipus, device.target.num_ipus)
            programs.setdefault(key, lowered)
        return programs[key]

    def _plan(self, device: IPUModel, traced: Traced) -> LoweringPlan:
        """Return the plan of a trace, of which the lowering and the key of the cache are functions."""
        self._compilation(device).check(traced.jaxpr)
        check_jaxpr(self._name, traced.jaxpr, None if self._replication is None else self._replication.axis_name)
        line = self._settings.line or calling_line()
        settings = ProgramSettings(self._name, line, device.target, self._settings.options, self._spread)
        return LoweringPlan.of(settings, traced)

    def _places(self, args: Sequence[Any]) -> Places:
        if len(args) not in self._known_places:
            self._known_places[len(args)] = argument_places(self._fun, args, *self._settings.static)
        return self._known_places[len(args)]

    def _dynamic(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[int, Any], dict[str, Any]]:
        return dynamic_arguments(self._fun, args, kwargs, *self._settings.static)

    def _compilation(self, device: IPUModel) -> Compilation:
        return Compilation(device, self._replication.replicas if self._replication else 1)
