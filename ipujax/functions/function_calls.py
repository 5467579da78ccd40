"""Calls of `ipu.jit` functions on their devices, shared by those of one Python function with equal settings.

A call is one of `jax.jit`, with JAX's own cache, donation and dispatch. Only its first trace for new shapes differs: it
lowers the user's function, checks that the program fits the machine, and emits the operations of the program for XLA.

Programs are looked up as by `jax.jit`: `ipu.jit(f)(x)` in a loop compiles once. Functions are compared by equality, so
closures that are made anew are new functions; references to them are weak, so a function that dies frees its programs.
Functions and settings without a hash share nothing.

Input: a function and settings, arguments of calls. Output: the calls of both; results, or an error that names the
argument.
Limits: of each function the programs of the last `MOST_SETTINGS` settings are kept, apart from those of functions of
`ipu.jit` that are alive. After names of ipujax were replaced all programs are new. The names are compared before each
lowering, and after it where a function is found again, but in a loop that only finds functions at most a twentieth of
its time.
"""

from __future__ import annotations

import functools
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import jax

from ipujax.arguments import check_arguments, has_tracer, own_check
from ipujax.calls import PlainCalls, RunsApart, check_memories, check_mesh_of_devices, compiling, locates_nans
from ipujax.device import CPU, Device, device_of_context
from ipujax.functions.function_compiler import FunctionCompiler
from ipujax.functions.function_settings import FunctionSettings
from ipujax.functions.user_function import Function, UserFunction
from ipujax.lowering.dumps import ENVIRONMENT
from ipujax.lowering.jax_compat import EVALUATION, find_top_trace, is_eager, is_evaluating
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.replicas import HOST_CALLS
from ipujax.runtime.cache import clear_with_caches, release_freed_memory, set_basis
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.names_at_import import replaced_values
from ipujax.sharding import check_blocks
from ipujax.stages import Lowered
from ipujax.storage import CACHE_BYTES, CACHE_DIR

if TYPE_CHECKING:
    from ipujax.checking import CheckReport
    from ipujax.distributed.instance.spread import Spread
    from ipujax.functions.partitioned_calls import PartitionedCalls
    from ipujax.runtime.host import HostCalls

_NO_CALL = object()  # in the place of the device of the latest call
_TRANSFORMATION = "a transformation of JAX"
_DONATED_TWICE = "donate", "Execute()"  # words in XLA's error about a donated array that a call has twice
_REFUSALS = TypeError, ValueError, OverflowError, RuntimeError  # what JAX's dispatch raises for arguments


class _CallsPython(Exception):
    """Ends the first trace of a program that calls Python functions: these may raise, so nothing may be donated."""


class FunctionCalls:
    """Calls of one function.

    Attributes:
        compiler: traces and lowers the function, for the first call of each signature.
    """

    def __init__(self, compiler: FunctionCompiler) -> None:
        self.compiler = compiler
        self._user = compiler.user
        self._runners: dict[Device, Callable[..., Any]] = {}
        self._latest: tuple[object, Callable[..., Any]] = (_NO_CALL, compiler.plain)  # see `call`
        self._has_compiled = False  # since the last call that looked, see `_dispatch`
        self._plain_calls = PlainCalls(f"{self._user.name} is called under a JAX transformation: it runs as jax.jit")
        self._checked: WeakSet[Lowered] = WeakSet()
        self._donates = True  # until a program calls Python functions
        self._host_calls: WeakSet[HostCalls] | None = None  # of programs that call Python functions; XLA holds them

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function for the arguments of a call."""
        # Constant time, below a microsecond: JAX's dispatch flattens the arguments and compares them with the compiled
        # signature; where it refuses them, `_explain` raises an error that names the argument.
        latest_device, run = self._latest
        if device_of_context() is not latest_device or find_top_trace(()) is not EVALUATION:
            return self._call(self._user.settings.current_device, args, kwargs)
        try:
            outs = run(*args, **kwargs) if kwargs else run(*args)  # an empty dictionary would be copied
        except (RunsApart, _CallsPython, *_REFUSALS) as error:
            return self._after(error, self._user.settings.current_device, args, kwargs)
        return outs if self._host_calls is None else self._waited(outs)

    def _call(self, device: Device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on another device than the latest, or where more than JAX's dispatch looks at the call."""
        user = self._user
        if user.has_own_check and (check := own_check(user.fun)) is not None:
            check(*args, **kwargs)
        if (outer := compiling()) is not None:
            return self.compiler.inlined(outer, args, kwargs)
        may_partition = self.compiler.may_partition and not isinstance(device, CPU)
        partitions = may_partition and user.shardings.may_partition(args, kwargs)
        is_traced = not is_evaluating() if partitions else _is_traced(args, kwargs)
        if user.settings.options.check and not is_traced and not isinstance(device, CPU):
            self._check_first(args, kwargs)
        if partitions and not is_traced:
            return self._explained(lambda: self._partitioned(device, args, kwargs), device, args, kwargs)
        if (spread := self.compiler.spread) is not None:
            return self._call_together(spread, device, args, kwargs, is_traced)
        return self._call_plain(args, kwargs) if is_traced else self._dispatch(device, args, kwargs)

    def _call_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Leave a call that JAX traces to `jax.jit`."""
        self._plain_calls.notice()
        return self._explained(lambda: self.compiler.plain(*args, **kwargs), _TRANSFORMATION, args, kwargs)

    def _dispatch(self, device: Device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on a device by JAX's dispatch, which compiles it for new shapes."""
        run = self._runners.get(device) or self._runner(device)
        if self._needs_dispatch_alone:
            self._latest = device_of_context(), run
        try:
            outs = run(*args, **kwargs)
        except (RunsApart, _CallsPython, *_REFUSALS) as error:
            return self._after(error, device, args, kwargs)
        if self._has_compiled:
            # XLA has compiled, too. Half of the process may be freed memory, which nothing would return to the system.
            self._has_compiled = False
            release_freed_memory()
        return outs if self._host_calls is None else self._waited(outs)

    @functools.cached_property
    def _needs_dispatch_alone(self) -> bool:
        """Whether nothing but JAX's dispatch looks at the arguments of calls that no transformation traces."""
        user = self._user
        alone = user.replication is None and not user.has_own_check and not user.settings.options.check
        return alone and not self.compiler.may_partition

    def _runner(self, device: Device) -> Callable[..., Any]:
        """Return the jitted function of a device, which lowers while it is traced; on a `CPU` it is JAX's own."""
        if device not in self._runners:
            if not isinstance(device, CPU):
                run = self._user.jitted(lambda *args, **kwargs: self._run_in_trace(device, args, kwargs), self._donates)
            elif any(self._user.settings.donated) and self.compiler.spread is None:
                run = self._user.jitted(lambda *args, **kwargs: self._run_plain_in_trace(args, kwargs), self._donates)
            else:
                run = self.compiler.on_cpu
            self._runners.setdefault(device, run)
        return self._runners[device]

    def _run_plain_in_trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the function as JAX does, in its trace of a call whose arguments are donated."""
        if self._donates:
            jaxpr = self.compiler.plain.trace(*args, **kwargs).jaxpr.jaxpr
            if any(eqn.primitive.name in HOST_CALLS for eqn in equations(jaxpr)):
                self._keep_donated()
        return self.compiler.on_cpu(*args, **kwargs)

    def _keep_donated(self) -> NoReturn:
        """Donate nothing to XLA from now on, and end the trace of the call, which is then made anew."""
        self._donates = False
        self._runners.clear()
        raise _CallsPython

    def _run_in_trace(self, device: Device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile for the shapes of a call that JAX traces, and evaluate the program in that trace."""
        user = self._user
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self.compiler.plain(*args, **kwargs)
        positional, named = user.dynamic(args, kwargs)
        with self.compiler.watching():
            shardings = user.shardings.of_whole_call(user.name, tuple(positional.values()))
            traced = self.compiler.trace_for(device, args, kwargs, shardings)
            compiled = None if traced.reads_transformation else traced.lower().compile()
        if compiled is None:
            self._plain_calls.notice()
            return self.compiler.plain(*args, **kwargs)
        self._has_compiled = True
        self._latest = _NO_CALL, self.compiler.plain  # so that the next call goes through `_call`
        lowered = compiled.lowered
        if lowered.call_program.runs_apart(None):
            raise RunsApart(compiled)
        if lowered.calls is not None:
            self._host_calls = self._host_calls or WeakSet()
            self._host_calls.add(lowered.calls)
            if self._donates and any(lowered.signature.donated) and self.compiler.spread is None:
                self._keep_donated()
        communicates = user.replication is not None or "shard_map" in lowered.primitives
        if locates_nans() and not communicates:
            return user.fun(*args, **kwargs)  # the traceback is that of the user's code
        return lowered.evaluate(*jax.tree.leaves((positional, named)))

    def _call_together(
        self, spread: Spread, device: Device, args: tuple[Any, ...], kwargs: dict[str, Any], is_traced: bool
    ) -> Any:
        """Run the function on all instances together, each with its share of the arguments."""
        user = self._user
        if is_traced or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            problem = f"{user.name} runs on several instances together, which no transformation of JAX can trace"
            raise ArgumentError(problem, hint="differentiate inside of the function, or leave out replicas=")

        def run() -> Any:
            arguments = spread.arguments(args, kwargs, user.places(args), user.static_keywords)
            return spread.call(self._runner(device), arguments)

        return self._explained(run, device, args, kwargs)

    @functools.cached_property
    def _partitioned(self) -> PartitionedCalls:
        from ipujax.functions.partitioned_calls import PartitionedCalls  # few calls have shardings

        return PartitionedCalls(self.compiler)

    def _waited(self, outs: Any) -> Any:
        """Return results after the Python functions that the program calls."""
        from ipujax.runtime.host import wait_for_calls

        assert self._host_calls is not None
        return wait_for_calls(outs, self._host_calls)

    def _after(self, error: Exception, where: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of a call that JAX's dispatch cannot run; raise the error of one that it refused."""
        if isinstance(error, RunsApart):  # raised in each trace, which then is not cached: each call comes here
            positional, named = self._user.dynamic(args, kwargs)
            return error.compiled(*positional.values(), **named)
        if isinstance(error, _CallsPython):
            return self._call(self._user.settings.current_device, args, kwargs)
        self._explain(error, where, args, kwargs)
        raise error

    def _explained(self, run: Callable[[], Any], where: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, and explain its error; see `_explain`."""
        try:
            return run()
        except _REFUSALS as error:
            self._explain(error, where, args, kwargs)
            raise

    def _explain(self, error: Exception, where: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise an error with function, argument and remedy in place of JAX's, if JAX refused the arguments."""
        user = self._user
        check_mesh_of_devices(user.name, error, where)
        is_donated_twice = all(words in str(error) for words in _DONATED_TWICE)
        if is_donated_twice and not (traced := self.compiler.trace(args, kwargs)).reads_transformation:
            traced.signature.check_donated(user.name, jax.tree.leaves(user.dynamic(args, kwargs)))
        if not isinstance(error, jax.errors.JaxRuntimeError):  # raised by a run, which has deleted donated arguments
            check_memories(user.name, error)
            check_blocks(user.name, error)
            check_arguments(user.fun, args, kwargs, *user.settings.static)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckReport:
        """Compare the program with plain JAX on arguments; see `IpuFunction.check`."""
        self._check_comparable(args, kwargs)
        return self._report(self.compiler.lower(args, kwargs), args, kwargs)

    def _check_comparable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a call without numbers of a machine to compare: on `ipu.CPU()`, in a trace, or of shapes."""
        name = self._user.name
        if isinstance(self._user.settings.current_device, CPU):
            problem = f"{name} runs on ipu.CPU(): plain JAX computes it, and there is nothing to check"
            raise ArgumentError(problem, hint="give ipu.jit an ipu.IPUModel")
        leaves = jax.tree.leaves(self._user.dynamic(args, kwargs))
        if compiling() is not None or not is_evaluating() or has_tracer(leaves):
            problem = f"{name} is traced here, and a check compares numbers"
            raise ArgumentError(problem, hint="check it outside of transformations of JAX and of other functions")
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            raise ArgumentError(f"{name} is checked on arrays", expected="arrays", got="a jax.ShapeDtypeStruct")
        check_arguments(self._user.fun, args, kwargs, *self._user.settings.static)

    def _report(self, lowered: Lowered, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckReport:
        from ipujax.checking import check_compiled

        positional, named = self._user.dynamic(args, kwargs)
        return check_compiled(lowered.compile(), jax.tree.leaves((tuple(positional.values()), named)))

    def _check_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the program in the first call of its signature."""
        traced = self.compiler.trace(args, kwargs)
        if traced.reads_transformation:
            return  # JAX computes the call: no program is checked
        lowered = traced.lower()
        if lowered not in self._checked:
            self._report(lowered, args, kwargs).raise_mismatch()
            self._checked.add(lowered)

    def clear_cache(self) -> None:
        """Drop all traces, lowered programs and compiled computations of the function."""
        self.compiler.clear_cache()
        self._runners.clear()
        self._latest = _NO_CALL, self.compiler.plain
        self.__dict__.pop("_partitioned", None)


def _is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether JAX traces a call that is not partitioned, and so computes it alone."""
    if is_evaluating():
        return False
    leaves = jax.tree.leaves((args, kwargs))
    # A jaxpr that is being made has the function. Without arguments, one may close over what is traced.
    return not is_eager() or not leaves or has_tracer(leaves)


MOST_SETTINGS = 8  # a study of one function on many devices must not keep all of its programs
_LOOPS_A_LOOK = 20  # seconds between two looks at the names, by those of a look: 2 ms; `jax.jit(f)(x)` takes 0.05 ms
_ENVIRONMENT = (CACHE_DIR, CACHE_BYTES, *ENVIRONMENT)  # variables that compilations read


class SharedCalls:
    """Calls by function and settings."""

    def __init__(self) -> None:
        self._by_function: WeakKeyDictionary[Function, OrderedDict[Hashable, FunctionCalls]] = WeakKeyDictionary()
        self._next_look_seconds = 0.0
        self._lock = RLock()  # comparing functions may run code of the user, which may come here

    def find(self, fun: Function, settings: FunctionSettings) -> tuple[FunctionCalls, Function]:
        """Return the calls of a function, and the equal function that they refer to, to be kept with them."""
        key = settings.key, tuple(map(os.environ.get, _ENVIRONMENT))
        if not _can_be_found(fun, key):
            return _new_calls(fun, settings), fun
        with self._lock:
            if fun in self._by_function:  # names are compared before a new one is lowered
                self._drop_programs_of_replaced_names()
            by_settings = self._by_function.setdefault(fun, OrderedDict())
            calls = by_settings.get(key)
            function = None if calls is None else calls.compiler.user.reference()
            if calls is None or function is None:
                calls = by_settings[key] = _new_calls(fun, settings)
                function = fun
                self._next_look_seconds = 0.0  # names may be replaced after it has lowered
            by_settings.move_to_end(key)
            while len(by_settings) > MOST_SETTINGS:
                by_settings.popitem(last=False)
            return calls, function

    def clear(self) -> None:
        """Drop all calls but those that functions of `ipu.jit` hold."""
        with self._lock:
            self._by_function.clear()

    def drop_programs(self) -> None:
        """Drop the calls that have programs, but not those of which the first is being lowered."""
        with self._lock:
            for by_settings in self._by_function.values():
                for key in [key for key, calls in by_settings.items() if calls.compiler.has_lowered]:
                    del by_settings[key]

    def _drop_programs_of_replaced_names(self) -> None:
        start_seconds = time.monotonic()
        if start_seconds >= self._next_look_seconds:
            set_basis(replaced_values())
            self._next_look_seconds = start_seconds + _LOOPS_A_LOOK * (time.monotonic() - start_seconds)


def _new_calls(fun: Function, settings: FunctionSettings) -> FunctionCalls:
    return FunctionCalls(FunctionCompiler(UserFunction.of(fun, settings)))


def _can_be_found(fun: Function, key: Hashable) -> bool:
    try:
        hash((ref(fun), key))
    except TypeError:  # no hash, or no weak references
        return False
    return True


SHARED_CALLS = SharedCalls()
clear_with_caches(SHARED_CALLS.drop_programs)
