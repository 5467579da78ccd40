"""Compiler of one `ipu.jit` function: traces and lowered programs, each made once.

Input: the function with its settings, and arguments of calls, of which shapes are enough. Output: `Traced`, `Lowered`,
and the plain forms of the function, which JAX computes alone; a line of the log, once for each device and each option,
of IPUs and options that its programs do not use.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jax

from ipujax.arguments import check_arguments
from ipujax.caching import find_or_lower
from ipujax.calls import (
    CallArguments,
    Compilation,
    Replication,
    check_jaxpr,
    check_live,
    check_live_arguments,
    check_memories,
    check_whole,
    compiling,
    compiling_for,
    explaining_axis_errors,
    inside_function,
    offloaded_arguments,
    with_host_shapes,
)
from ipujax.compiled_programs import note_call
from ipujax.device import CPU, Device, IPUModel
from ipujax.distributed.instance.membership import membership
from ipujax.functions.user_function import UserFunction
from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.partition import tracing_without_mesh
from ipujax.lowering.replicas import evaluate, replicated_p
from ipujax.lowering_plan import LoweringPlan, ProgramSettings, compilation_steps
from ipujax.runtime.errors import ArgumentError, calling_line
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.logs import Log, step, watch_compilation
from ipujax.sharding import CallShardings, check_blocks, constrained, in_explicit_mesh
from ipujax.stages import Lowered, Traced

if TYPE_CHECKING:
    from ipujax.distributed.instance.spread import Spread

_LOG = Log("jit")
_NO_LOADS = "keys, single elements and arrays that are not read stay on the chip"


class UnusedSettings:
    """Devices and options of which a function has warned, or need not warn.

    Args:
        name: name of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._settled_devices: set[Any] = set()
        self._named_options: set[str] = set()
        self._names_options = True

    def may_idle(self, device: Any) -> None:
        """Do not warn for a device whose other IPUs another function uses."""
        self._settled_devices.add(device)

    def ignore_options(self) -> None:
        """Do not warn of options: a front end sets them for all of its functions."""
        self._names_options = False

    def check_ipus(self, device: Any, num_used: int, num_ipus: int) -> None:
        """Warn, once for each device, if a smaller device is enough.

        Args:
            device: device of the function.
            num_used: IPUs that the program uses.
            num_ipus: IPUs of the device.
        """
        enough = 1 << (num_used - 1).bit_length()  # systems have powers of two
        # A function is compiled for each shape, which would repeat the line.
        if enough < num_ipus and device not in self._settled_devices:
            self._settled_devices.add(device)
            text = "%s uses %d of the %d IPUs of its device; num_ipus=%d is enough (replicas=, or stages, use more)"
            _LOG.warning(text, self._name, num_used, num_ipus, enough)

    def check_options(self, lines: Sequence[str]) -> None:
        """Warn of options without effect, each once: a line each, of `unused_options`."""
        if self._names_options:
            for line in lines:
                if line not in self._named_options:
                    self._named_options.add(line)
                    _LOG.warning("%s: %s", self._name, line)


class FunctionCompiler:
    """Traces and lowers one function.

    Attributes:
        user: the function and its settings.
        one_replica: the function of one replica as JAX computes it.
        plain: the function as JAX computes it: with the results of all replicas, if it has any.
        unused_settings: warnings of IPUs and options that the function does not use.
        has_lowered: whether a program was lowered.
    """

    def __init__(self, user: UserFunction) -> None:
        self.user = user
        # A lambda: `jitted` renames it, and must not rename the user's function.
        self.one_replica = user.jitted(lambda *args, **kwargs: inside_function(user.fun)(*args, **kwargs))
        self.plain = self.one_replica if user.replication is None else self._all_replicas(user.replication)
        self.unused_settings = UnusedSettings(user.name)
        self.has_lowered = False
        self._tracers: dict[IPUModel, Any] = {}
        # By jaxpr, which JAX holds until it would trace again; a value that refers to its key would never be freed.
        self._lowered: WeakKeyDictionary[ClosedJaxpr, dict[Any, Lowered]] = WeakKeyDictionary()

    def _all_replicas(self, replication: Replication) -> Any:
        user = self.user

        def run(*args: Any, **kwargs: Any) -> Any:
            do = evaluate if self.spread is None else self.spread.evaluate
            return replication.apply(do, inside_function(user.fun), args, kwargs, user.places(args), user.name)

        return user.jitted(run)

    @functools.cached_property
    def on_cpu(self) -> Any:
        """The function as `ipu.CPU()` runs it: `plain`, with memory and type of results by `out_shardings`.

        Not so in `plain`: inside of another function JAX ignores that memory, and values of two would not combine.
        """
        user = self.user
        if user.shardings.outputs is None:
            return self.plain
        return user.jitted(lambda *args, **kwargs: user.shardings.placed(user.name, self.plain(*args, **kwargs)))

    def inlined(self, outer: Compilation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function inside of another one of `ipu.jit`, in whose program it is: its shardings are constraints.

        Args:
            outer: compilation of the other function, whose device and replicas are checked, and whose options hold.
            args: positional arguments.
            kwargs: arguments by name.
        """
        user = self.user
        outer.check_inner(user.name)
        self.unused_settings.check_options(user.settings.unused_inside(outer.options))
        shardings = user.shardings
        if not shardings.has_any:
            return self.one_replica(*args, **kwargs)
        positional, _ = user.dynamic(args, kwargs)
        operands = constrained(f"in_shardings of {user.name}", shardings.inputs, tuple(positional.values()))
        by_position = dict(zip(positional, operands, strict=True))
        results = self.one_replica(*(by_position.get(n, x) for n, x in enumerate(args)), **kwargs)
        return constrained(f"out_shardings of {user.name}", shardings.outputs, results)

    @property
    def spread(self) -> Spread | None:
        """Distribution of replicas over instances; None if all are on this one."""
        if self.user.replication is None or membership().num_instances == 1:  # at each call: JAX may join it afterwards
            return None
        return self._known_spread

    @functools.cached_property
    def _known_spread(self) -> Spread | None:
        from ipujax.distributed.instance.spread import Spread

        settings = self.user.settings
        assert settings.replication is not None
        return Spread.of(self.user.name, settings.replication, settings.current_device, settings.options)

    @functools.cached_property
    def may_partition(self) -> bool:
        """Whether shardings may partition any call; JAX's devices do not change once it has any."""
        return self.user.shardings.has_any or jax.device_count() > 1

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """Trace for the shapes of arguments; see `IpuFunction.trace`."""
        user = self.user
        device = user.settings.current_device
        if not isinstance(device, CPU):
            check_whole(user.name, lambda: user.places(args)[0], args, kwargs, user.replication is None)
        check_live_arguments(args, kwargs)
        dynamic = None if user.settings.computes_whole else user.dynamic(args, kwargs)
        names = () if dynamic is None else user.places(args)[0]
        shardings, shapes, named_shapes = user.shardings.shaped(user.name, args, kwargs, dynamic, names)
        try:
            operands: Any = with_host_shapes(shapes, named_shapes)
            if self.spread is not None:
                shares, named = operands
                arguments = self.spread.arguments(shares, named, user.places(shares), user.static_keywords)
                operands = self.spread.avals(arguments)
            with self.watching():
                traced = self.trace_for(device, operands[0], operands[1], shardings)
            if traced.reads_transformation:
                check_live(self.plain, args, kwargs, *user.dynamic(args, kwargs))
            return traced
        except (TypeError, ValueError, OverflowError) as error:
            check_memories(user.name, error)
            check_blocks(user.name, error)
            check_arguments(user.fun, args, kwargs, *user.settings.static, shapes=True)
            raise

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        """Lower for the shapes of arguments; see `IpuFunction.lower`."""
        with self.watching():
            return self._lower(self.user.settings.current_device, self.trace(args, kwargs))

    def eval_shape(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return shapes and dtypes of the results; see `IpuFunction.eval_shape`."""
        if compiling() is not None:
            return self.one_replica.eval_shape(*args, **kwargs)
        results = self.trace(args, kwargs).out_info
        return results if self.spread is None else self.spread.local_results(results)

    def watching(self, spent_seconds: float = 0.0) -> AbstractContextManager[None]:
        """Log and show the progress of the compilation inside, on which `spent_seconds` were spent before."""
        return watch_compilation(self.user.name, compilation_steps, self.user.settings.options.progress, spent_seconds)

    def trace_for(
        self, device: Device, args: tuple[Any, ...], kwargs: dict[str, Any], shardings: CallShardings
    ) -> Traced:
        """Trace for a device, inside or outside of JAX's own trace of a call; arguments have passed all checks."""
        user = self.user
        note_call(user.fun, user.settings, args, kwargs)
        timings: dict[str, float] = {}
        jitted = self.on_cpu if isinstance(device, CPU) else self._tracer(device)
        explaining = explaining_axis_errors(user.replication)
        with collecting_rarely(), step(_LOG, "trace", timings), explaining, in_explicit_mesh(shardings):
            traced = jitted.trace(*args, **kwargs)
        names, static = user.places(args)
        arguments = tuple(name for n, name in enumerate(names) if n not in static)
        offloaded = offloaded_arguments(user.name, user.settings.offload, len(args), static)
        call = CallArguments.of_call(user.fun, *user.dynamic(args, kwargs), args, user.settings.donated)
        lower = functools.partial(self._lower, device)
        return Traced(traced, arguments, call, timings, lower, offloaded, shardings, user.settings.for_xla)

    def _tracer(self, device: IPUModel) -> Any:
        """Return the jitted function to trace for a device; each has its own traces, which check inner devices."""
        user = self.user
        if device not in self._tracers:

            def run(*args: Any, **kwargs: Any) -> Any:
                return user.shardings.placed(user.name, user.fun(*args, **kwargs))

            def traced(*args: Any, **kwargs: Any) -> Any:
                replication = user.replication
                with compiling_for(self._compilation(device)):
                    if replication is None:
                        return run(*args, **kwargs)
                    return replication.apply(replicated_p.bind, run, args, kwargs, user.places(args), user.name)

            self._tracers.setdefault(device, user.jitted(traced))
        return self._tracers[device]

    def _lower(self, device: Device, traced: Traced) -> Lowered:
        """Lower once for each trace; JAX traces once for each signature."""
        if isinstance(device, CPU):
            problem = f"{self.user.name} runs on ipu.CPU(), which computes numbers only"
            raise ArgumentError(problem, hint="give ipu.jit an ipu.IPUModel")
        if traced.reads_transformation:
            problem = f"{self.user.name} uses values or axes of a transformation of JAX around it"
            raise ArgumentError(problem, hint="lower it outside of that transformation, or make them arguments")
        membership()  # read at the first compilation
        # The jaxpr itself is the key: JAX caches one for each combination of shapes, static values and settings such as
        # `jax.enable_x64`.
        programs = self._lowered.setdefault(traced.jaxpr, {})
        # Shardings over automatic axes are no part of types.
        key = traced.shardings.inputs, traced.result_shardings, traced.shardings.mesh
        if key not in programs:
            with collecting_rarely(), self.watching(sum(traced.timings.values())), tracing_without_mesh():
                lowered = find_or_lower(self._plan(device, traced))
            self.unused_settings.check_ipus(device, lowered.call_program.used_ipus, device.target.num_ipus)
            on_chip = (f"offload_argnums has no effect on {name}: {_NO_LOADS}" for name in traced.arguments_on_chip)
            unused = lowered.call_program.unused_options
            self.unused_settings.check_options([*unused, *on_chip, *self.user.shardings.without_effect])
            programs.setdefault(key, lowered)
            self.has_lowered = True
        return programs[key]

    def _plan(self, device: IPUModel, traced: Traced) -> LoweringPlan:
        """Return the plan of a trace, of which the lowering and the key of the cache are functions."""
        user = self.user
        self._compilation(device).check(traced.jaxpr)
        check_jaxpr(user.name, traced.jaxpr, None if user.replication is None else user.replication.axis_name)
        line = user.settings.line or calling_line()
        return LoweringPlan.of(
            ProgramSettings(user.name, line, device.target, user.settings.options, self.spread), traced
        )

    def _compilation(self, device: IPUModel) -> Compilation:
        replication = self.user.replication
        return Compilation(device, 1 if replication is None else replication.replicas, self.user.settings.options)

    def clear_cache(self) -> None:
        """Drop all traces and lowered programs."""
        self.one_replica.clear_cache()
        self.plain.clear_cache()
        self.on_cpu.clear_cache()
        self._tracers.clear()
        self._lowered.clear()
