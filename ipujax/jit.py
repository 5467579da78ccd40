"""`ipu.jit`: a JAX function, compiled for a simulated IPU.

A call is one of `jax.jit`, with JAX's own cache, donation and dispatch. Only its first trace for new shapes differs: it
lowers the user's function, checks that the program fits the machine, and emits the operations for XLA, those of the
function or of the program; see `Lowered.computes_function`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload
from weakref import WeakKeyDictionary, WeakSet

import jax

from ipujax.caching import find_or_lower
from ipujax.calls import (
    CallArguments,
    FunctionName,
    FunctionSettings,
    Replication,
    RunsApart,
    Settings,
    UnusedIpus,
    as_names,
    as_numbers,
    check_arguments,
    check_function,
    check_jaxpr,
    check_live,
    check_live_arguments,
    check_memories,
    check_mesh_of_devices,
    check_settings,
    check_whole,
    compiling,
    compiling_for,
    explaining_axis_errors,
    has_tracer,
    offloaded_arguments,
    static_keywords,
    with_host_shapes,
)
from ipujax.device import CPU, Device, IPUModel, check_device, current_device
from ipujax.distributed.instance import Operands, Spread, received, to_local
from ipujax.fit import first_choice
from ipujax.lowering.jax_compat import ClosedJaxpr, is_evaluating
from ipujax.lowering.partition import tracing_without_mesh
from ipujax.lowering.replicas import AXIS, evaluate, replicated_p
from ipujax.lowering_plan import STEPS, LoweringPlan
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, calling_line
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.host import HostCalls, wait_for_calls
from ipujax.runtime.logs import Log, step, watch_compilation
from ipujax.runtime.options import Options
from ipujax.runtime.report import Profile
from ipujax.runtime.signatures import checking_calls
from ipujax.sharding import NO_SHARDINGS, UNSET, CallShardings, ShardingSettings, in_explicit_mesh
from ipujax.stages import Lowered, Traced

_LOG = Log("jit")
_IS_PLAIN = "%s is called under a JAX transformation: it runs as jax.jit, without a profile"
_DONATED_TWICE = "donate", "Execute()"  # words in XLA's error about a donated array that a call has twice
_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")


@overload
def jit(fun: None = None, /, **settings: Unpack[Settings]) -> Callable[[Callable[_P, _R]], IpuFunction[_P, _R]]: ...
@overload
def jit(fun: Callable[_P, _R], /, **settings: Unpack[Settings]) -> IpuFunction[_P, _R]: ...
@checking_calls("ipu.jit")
def jit(  # type: ignore[no-untyped-def]
    fun=None,
    /,
    *more,
    device=None,
    replicas=None,
    in_specs=None,
    out_specs=None,
    axis_name=AXIS,
    donate_argnums=None,
    donate_argnames=None,
    static_argnums=None,
    static_argnames=None,
    offload_argnums=(),
    in_shardings=None,
    out_shardings=None,
    options=None,
):
    """Compile a JAX function for a simulated IPU; use it as `jax.jit`, also as a bare decorator::

        @ipu.jit(device=ipu.IPUModel(arch="bow"), donate_argnums=0)
        def step(weights, batch):
            gradients = jax.grad(loss)(weights, batch)
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

        weights = step(weights, batch)
        print(step.profile(weights, batch).summary())

    Args:
        fun: function of pytrees of arrays.
        device: `IPUModel(...)` or `CPU()`; the default device when None, looked up at each call.
        replicas: number of copies of the function, each on an equal share of the device's IPUs and of the arguments.
            The function is that of one replica; collectives as `jax.lax.pmean(x, "replica")` communicate between
            replicas. Nothing is reduced unless the function does it.
        in_specs: partition of positional arguments that are not static: a pytree prefix of `PartitionSpec()`, equal on
            all replicas, `PartitionSpec("replica")`, split along the first dimension, `PartitionSpec(None, "replica")`
            along the second, and so on. Nothing is split when None.
        out_specs: specs to join results by, likewise; results of `PartitionSpec()` must be equal on all replicas.
        axis_name: name of the axis of replicas, in specs and in collectives.
        donate_argnums: positional arguments whose buffers may be reused. On the machine they, and the results that take
            their place, stay on the device; all other arguments and results move from and to the host in each call.
        donate_argnames: the same by name; if only one of the two is set, the other follows from the signature.
        static_argnums: positional arguments that are hashable settings; each value is compiled separately.
        static_argnames: the same by name, as with donated arguments.
        offload_argnums: positional arguments in streaming memory: the state of an optimiser, weights, tables. Each of
            their arrays is loaded before use and dropped after it; the result in place of a donated one is stored as
            soon as it is computed. Of a table whose rows are looked up or updated only these rows are loaded. Arrays of
            one element, and keys, stay on chip. Of an argument that is split over replicas each loads its part, as with
            the state of `ipu.optim.shard`.
        in_shardings: shardings of positional arguments that are not static, as of `jax.jit`: a pytree prefix of
            `jax.sharding.NamedSharding`, `PartitionSpec` for the mesh that is set, or None. A sharding that splits a
            value, be it of an argument, a result, a constraint or a type, partitions the function over the IPUs of a
            mesh: one device of it is one IPU. See `ipu.make_mesh`.
        out_shardings: shardings of results, likewise.
        options: compiler options.

    Returns:
        An `IpuFunction`: the results of `jax.jit(fun)`, and methods such as `lower(*args)` and `profile(*args)`.

    Raises:
        ArgumentError: at a call: arguments that are not arrays or cannot be split, an array that is donated and passed
            twice, arrays that are sharded beside `replicas=`, or that a sharding does not divide.
        GraphError: at a call: a result with `PartitionSpec()` that may differ between replicas, shardings over
            different meshes, or over one larger than the device.
        TileMemoryError: at the first call with new shapes: the program does not fit the machine.
        StreamingMemoryError: likewise: offloaded arrays do not fit streaming memory.
    """
    if more:
        raise ArgumentTypeError(
            "ipu.jit takes one function by position, and settings by name",
            expected="ipu.jit(fun, device=...)",
            got=f"ipu.jit({', '.join(map(repr, (fun, *more)))})",
            hint=f"device={more[0]!r}" if isinstance(more[0], IPUModel | CPU) else None,
        )
    settings = {
        "donate_argnums": donate_argnums if donate_argnums is None else as_numbers("donate_argnums", donate_argnums),
        "donate_argnames": donate_argnames if donate_argnames is None else as_names("donate_argnames", donate_argnames),
        "static_argnums": static_argnums if static_argnums is None else as_numbers("static_argnums", static_argnums),
        "static_argnames": static_argnames if static_argnames is None else as_names("static_argnames", static_argnames),
    }
    replication = Replication.of(replicas, in_specs, out_specs, axis_name)
    shardings = ShardingSettings.of(in_shardings, out_shardings, None if replication is None else replication.replicas)
    make = functools.partial(
        IpuFunction,
        device=device,
        settings=settings,
        options=Options() if options is None else options,
        replication=replication,
        offload=as_numbers("offload_argnums", offload_argnums),
        shardings=shardings,
    )
    return make if fun is None else make(fun)


class IpuFunction(FunctionSettings, Generic[_P, _R]):
    """The function that `ipu.jit` returns. Call it, or `lower` it to look inside."""

    def __init__(
        self,
        fun: Callable[_P, _R],
        device: Device | None,
        settings: Mapping[str, tuple[Any, ...] | None],
        options: Options,
        replication: Replication | None = None,
        offload: tuple[int, ...] = (),
        shardings: ShardingSettings = UNSET,
    ) -> None:
        check_function(fun, f"@ipu.jit(device={fun!r})" if isinstance(fun, IPUModel | CPU) else None)
        if device is not None:
            check_device(device, "ipu.jit")
        if not isinstance(options, Options):
            raise ArgumentError(
                "options of ipu.jit must be ipu.Options", expected="ipu.Options(...)", got=repr(options)
            )
        check_settings(fun, **{name: value or () for name, value in settings.items()})
        self._line = calling_line()  # the origin of equations without a line of the user's
        # Attributes of a callable object are not copied: they would hide methods of this class.
        functools.update_wrapper(self, fun, updated=("__dict__",) if inspect.isroutine(fun) else ())
        self._fun = fun
        self._device = device
        self._options = options
        self._static = settings["static_argnums"], settings["static_argnames"]
        self._donated = settings["donate_argnums"], settings["donate_argnames"]
        # None where unset: only then does JAX derive positions from names, and names from positions.
        self._settings: dict[str, Any] = dict(settings)
        self._replication = replication
        self._offload = offload
        self._shardings = shardings
        self.__name__ = FunctionName.of(fun, device, None if replication is None else replication.replicas)
        # A lambda: `_jitted` renames it, and must not rename the user's function.
        self._one_replica = self._jitted(lambda *args, **kwargs: fun(*args, **kwargs))
        self._plain = self._one_replica if replication is None else self._all_replicas(replication)
        self._runners: dict[Device, Callable[..., Any]] = {}
        self._tracers: dict[IPUModel, Any] = {}
        # By jaxpr, which JAX holds until it would trace again; a value that refers to its key would never be freed.
        self._lowered: WeakKeyDictionary[ClosedJaxpr, dict[Any, Lowered]] = WeakKeyDictionary()
        self.unused_ipus = UnusedIpus(self.__name__)
        self._calls: WeakSet[HostCalls] | None = None  # of programs that call Python functions; XLA holds them

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Constant time: only the compiled function is chosen here. JAX's dispatch flattens the arguments and compares
        # them with the compiled signature; where it refuses them, `_explain` raises an error that names the argument.
        if (outer := compiling()) is not None:
            outer.check_inner(self.__name__)  # inlined into the outer function: one program
            return self._one_replica(*args, **kwargs)
        device = self._device or current_device()
        partitions = not isinstance(device, CPU) and self._shardings.may_partition(args, kwargs)
        is_traced = not is_evaluating()
        if is_traced and not partitions:  # without arguments, a function may close over what is traced
            leaves = jax.tree.leaves((args, kwargs))
            is_traced = not leaves or has_tracer(leaves)
        if partitions and not is_traced:
            positional, named = self._dynamic(args, kwargs)
            return self.lower(*args, **kwargs).compile()(*positional.values(), **named)
        if self._spread is not None:
            return self._call_together(self._spread, device, args, kwargs, is_traced)
        if is_traced:
            _LOG.info(_IS_PLAIN, self.__name__)
        run = self._plain if is_traced else self._runners.get(device) or self._runner(device)
        try:
            outs = run(*args, **kwargs)
        except RunsApart as apart:  # raised while `run` is traced, which then is not cached: each call comes here
            dynamic_args, dynamic_kwargs = self._dynamic(args, kwargs)
            return apart.compiled(*dynamic_args.values(), **dynamic_kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain(error, "a transformation of JAX" if is_traced else device, args, kwargs)
            raise
        return outs if is_traced or self._calls is None else wait_for_calls(outs, self._calls)

    def _explain(self, error: Exception, where: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise an error with function, argument and remedy in place of JAX's, if JAX refused the arguments."""
        check_mesh_of_devices(self.__name__, error, where)
        is_donated_twice = all(words in str(error) for words in _DONATED_TWICE)
        if is_donated_twice and not (traced := self.trace(*args, **kwargs)).closes_over_tracers:
            traced.signature.check_donated(self.__name__, jax.tree.leaves(self._dynamic(args, kwargs)))
        if not isinstance(error, jax.errors.JaxRuntimeError):  # raised by a run, which has deleted donated arguments
            check_memories(self.__name__, error)
            check_arguments(self._fun, args, kwargs, *self._static)

    def _call_together(self, spread: Spread, device: Device, args: Any, kwargs: Any, is_traced: bool) -> Any:
        """Run the function on all instances together, each with its share of the arguments."""
        if is_traced or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            problem = f"{self.__name__} runs on several instances together, which no transformation of JAX can trace"
            raise ArgumentError(problem, hint="differentiate inside of the function, or leave out replicas=")
        try:
            operands = self._operands(spread, args, kwargs)
            spread.meet(operands)
            return to_local(self._runner(device)(*operands.args, **operands.kwargs))
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain(error, device, args, kwargs)
            raise

    def _operands(
        self, spread: Spread, args: tuple[Any, ...], kwargs: dict[str, Any], shapes_only: bool = False
    ) -> Operands:
        """Return the arguments as arrays of all instances, of which this one has its share."""
        return spread.operands(args, kwargs, self._places(args), static_keywords(self._fun, *self._static), shapes_only)

    @functools.cached_property
    def _spread(self) -> Spread | None:
        """Distribution of replicas over instances; None if all are on this one."""
        return Spread.of(self.__name__, self._replication)

    def with_options(
        self,
        options: Options | None = None,
        offload_argnums: Sequence[int] | None = None,
        device: Device | None = None,
    ) -> IpuFunction[_P, _R]:
        """Return the function with other settings; None leaves a setting unchanged.

        Args:
            options: compiler options.
            offload_argnums: positional arguments in streaming memory.
            device: `IPUModel(...)` or `CPU()`.
        """
        options = self._options if options is None else options
        offload = self._offload if offload_argnums is None else as_numbers("offload_argnums", offload_argnums)
        return IpuFunction(
            self._fun, device or self._device, self._settings, options, self._replication, offload, self._shardings
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> IpuFunction[_P, _R]:
        return self  # as functions of Python: a module that refers to one may be copied

    def __repr__(self) -> str:
        return f"ipu.jit({self.__name__})"

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> IpuFunction[_P, _R]: ...
    @overload
    def __get__(
        self: IpuFunction[Concatenate[Any, _Q], _R], instance: object, owner: Any = None
    ) -> Callable[_Q, _R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an instance as a method, whose first argument it becomes, as with `jax.jit`."""
        return self if instance is None else MethodType(self, instance)

    def trace(self, *args: _P.args, **kwargs: _P.kwargs) -> Traced:
        """Trace for the shapes of arguments, which may be `jax.ShapeDtypeStruct`s; nothing is run.

        Raises:
            ArgumentError: for arguments that are not arrays.
            UnexpectedTracerError: JAX's, for a tracer, closed over or among the arguments, of a transformation
                or branch that has ended.
        """
        self._check_whole(args, kwargs)
        check_live_arguments(args, kwargs)
        dynamic = None if self._computes_whole else self._dynamic(args, kwargs)
        shardings, shapes, named_shapes = self._shardings.shaped(self.__name__, args, kwargs, dynamic)
        try:
            operands: Any = with_host_shapes(shapes, named_shapes)
            if self._spread is not None:
                global_operands = self._operands(self._spread, operands[0], operands[1], shapes_only=True)
                operands = global_operands.args, global_operands.kwargs
            with self._watching():
                traced = self._trace(self._device or current_device(), operands[0], operands[1], shardings)
            if traced.closes_over_tracers:
                check_live(self._plain, args, kwargs, *self._dynamic(args, kwargs))
            return traced
        except (TypeError, ValueError) as error:
            check_memories(self.__name__, error)
            check_arguments(self._fun, args, kwargs, *self._static, shapes=True)
            raise

    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> Lowered:
        """Lower for the shapes of arguments, which may be `jax.ShapeDtypeStruct`s; nothing is run.

        Raises:
            ArgumentError: for arguments that are not arrays, for a function that closes over tracers, or on a `CPU`
                device, which has no graph.
        """
        with self._watching():
            return self.trace(*args, **kwargs).lower()

    def profile(self, *args: _P.args, **kwargs: _P.kwargs) -> Profile:
        """Return the static profile of a call, `.lower(*args).compile().profile`, with its errors; nothing is run."""
        return self.lower(*args, **kwargs).compile().profile

    def eval_shape(self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """Return shapes and dtypes of the results, a tree of `jax.ShapeDtypeStruct`; nothing is run or lowered.

        Raises:
            ArgumentError: as `trace`.
        """
        if compiling() is not None:
            return self._one_replica.eval_shape(*args, **kwargs)
        results = self.trace(*args, **kwargs).out_info
        return results if self._spread is None else self._spread.local_results(results)

    def clear_cache(self) -> None:
        """Drop all traces, lowered programs and compiled computations of the function."""
        self._one_replica.clear_cache()
        self._plain.clear_cache()
        self._runners.clear()
        self._tracers.clear()
        self._lowered.clear()

    def _all_replicas(self, replication: Replication) -> Any:
        """Return the jitted function in plain JAX, with the results of all replicas."""

        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = received((args, kwargs))
            do = evaluate if self._spread is None else self._spread.evaluate
            return replication.apply(do, self._fun, args, kwargs, self._places(args), self.__name__)

        return self._jitted(run)

    def _check_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not isinstance(self._device or current_device(), CPU):
            check_whole(self.__name__, lambda: self._places(args)[0], args, kwargs, self._replication is None)

    def _watching(self, spent_seconds: float = 0.0) -> AbstractContextManager[None]:
        """Log and show the progress of the compilation inside, on which `spent_seconds` were spent before."""
        return watch_compilation(self.__name__, STEPS, self._options.progress, spent_seconds)

    def _runner(self, device: Device) -> Callable[..., Any]:
        """Return the jitted function of a device, which lowers while it is traced; on a `CPU` the plain one."""
        if isinstance(device, CPU):
            return self._runners.setdefault(device, self._plain)
        if device not in self._runners:

            def run(*args: Any, **kwargs: Any) -> Any:
                if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
                    return self._plain(*args, **kwargs)
                args, kwargs = received((args, kwargs))
                with self._watching():
                    traced = self._trace(device, args, kwargs)
                    compiled = None if traced.closes_over_tracers else traced.lower().compile()
                if compiled is None:
                    _LOG.info(_IS_PLAIN, self.__name__)
                    return self._plain(*args, **kwargs)
                lowered = compiled.lowered
                if lowered.runs_apart(None):
                    raise RunsApart(compiled)
                if lowered.calls is not None:
                    self._calls = self._calls or WeakSet()
                    self._calls.add(lowered.calls)
                # All arrays are tracers here, and static arguments never are.
                leaves = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.core.Tracer)]
                if len(leaves) != len(lowered.signature.in_avals):
                    return self._fun(*args, **kwargs)  # `jax.debug_nans` runs it op by op to locate the first NaN
                return lowered.evaluate(*leaves)

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
                    return replication.apply(replicated_p.bind, self._fun, args, kwargs, places, self.__name__)

            self._tracers.setdefault(device, self._jitted(traced))
        return self._tracers[device]

    def _jitted(self, wrapper: Callable[..., Any]) -> Any:
        """Return a wrapper of the function with its name and signature, jitted with its settings."""
        functools.update_wrapper(wrapper, self._fun, updated=())
        wrapper.__name__ = self.__name__
        return jax.jit(wrapper, **self._settings)

    def _trace(
        self,
        device: Device,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shardings: CallShardings = NO_SHARDINGS,
    ) -> Traced:
        timings: dict[str, float] = {}
        jitted = self._plain if isinstance(device, CPU) else self._tracer(device)
        explaining = explaining_axis_errors(self._replication)
        with collecting_rarely(), step(_LOG, "trace", timings), explaining, in_explicit_mesh(shardings):
            traced = jitted.trace(*args, **kwargs)
        names, static = self._places(args)
        arguments = tuple(name for n, name in enumerate(names) if n not in static)
        offloaded = offloaded_arguments(self.__name__, self._offload, len(args), static)
        call = CallArguments.of_call(self._fun, *self._dynamic(args, kwargs), args, self._donated)
        lower = functools.partial(self._lower, device)
        return Traced(traced, arguments, call, timings, lower, offloaded, shardings)

    def _lower(self, device: Device, traced: Traced) -> Lowered:
        """Lower once for each trace; JAX traces once for each signature."""
        if isinstance(device, CPU):
            problem = f"{self.__name__} runs on ipu.CPU(), which computes numbers only"
            raise ArgumentError(problem, hint="give ipu.jit an ipu.IPUModel")
        if traced.closes_over_tracers:
            problem = f"{self.__name__} uses values that a transformation of JAX is tracing"
            raise ArgumentError(problem, hint="lower it outside of that transformation, or make them arguments")
        # The jaxpr itself is the key: JAX caches one for each combination of shapes, static values and settings such as
        # `jax.enable_x64`.
        programs = self._lowered.setdefault(traced.jaxpr, {})
        # Shardings over automatic axes are no part of types.
        key = traced.shardings.inputs, traced.result_shardings, traced.shardings.mesh
        if key not in programs:
            with collecting_rarely(), self._watching(sum(traced.timings.values())):
                programs.setdefault(key, self._lower_anew(device, traced))
        return programs[key]

    def _lower_anew(self, device: IPUModel, traced: Traced) -> Lowered:
        self._compilation(device).check(traced.jaxpr)
        check_jaxpr(self.__name__, traced.jaxpr, None if self._replication is None else self._replication.axis_name)
        line = self._line or calling_line()
        with tracing_without_mesh():
            plan = LoweringPlan.of(self.__name__, traced, line, device.target, self._options, self._spread)
            lowered = find_or_lower(plan, lambda: self._lower_plan(plan))
        self.unused_ipus.check(device, lowered.num_used_ipus, device.target.num_ipus)
        return lowered

    def _lower_plan(self, plan: LoweringPlan) -> Lowered:
        with collecting_rarely(), self._watching(sum(plan.timings.values())), tracing_without_mesh():
            return plan.lowered(first_choice(self._options, plan.argument_bytes_per_tile))
