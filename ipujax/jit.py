"""`ipu.jit`: a JAX function, compiled for a simulated IPU.

Input: a function and settings, which are checked at once. Output: a callable with the results of `jax.jit`. The
compiler is imported at its first call: see `FunctionCalls`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from threading import Lock
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, SupportsIndex, TypeVar, Unpack, overload

from ipujax.arguments import as_numbers, check_function, check_settings, donated_places, settings_of_jax
from ipujax.device import CPU, Device, IPUModel, check_device
from ipujax.functions.function_settings import FunctionSettings, Settings
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, calling_line
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.options import Options
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.target import Target
from ipujax.runtime.tracebacks import show_user_frames, showing_user_frames

if TYPE_CHECKING:
    from ipujax.calls import Replication
    from ipujax.checking import CheckReport
    from ipujax.compiled_programs import TracedCall
    from ipujax.functions.function_calls import FunctionCalls, SharedCalls
    from ipujax.functions.function_compiler import UnusedSettings
    from ipujax.runtime.report import Profile
    from ipujax.sharding import ShardingSettings
    from ipujax.stages import Lowered, Traced

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")
_DEFAULT_OPTIONS = Options()
_IMPORTABLE = "_importable"
_QUALIFIED_NAMES = 4  # protocol of pickle from which a name may be an attribute of any object


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
    axis_name=None,
    donate_argnums=None,
    donate_argnames=None,
    static_argnums=None,
    static_argnames=None,
    offload_argnums=(),
    in_shardings=None,
    out_shardings=None,
    keep_unused=False,
    inline=False,
    backend=None,
    compiler_options=None,
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
        axis_name: name of the axis of replicas, in specs and in collectives; "replica" when None.
        donate_argnums: positional arguments whose buffers may be reused. On the machine they, and the results that take
            their place, stay on the device; all other arguments and results move from and to the host in each call.
            A function that calls Python functions, which may raise, leaves the arrays as they are.
        donate_argnames: the same by name; if only one of the two is set, the other follows from the signature.
        static_argnums: positional arguments that are hashable settings; each value is compiled separately.
        static_argnames: the same by name, as with donated arguments.
        offload_argnums: positional arguments in streaming memory: the state of an optimiser, weights, tables. Each of
            their arrays is loaded before use and dropped after it; the result in place of a donated one is stored as
            soon as it is computed. Of a table whose rows are looked up or updated only these rows are loaded. Arrays of
            one element, and keys, stay on chip. Of an argument that is split over replicas each loads its part, as with
            the state of `ipu.optim.shard`.
        in_shardings: shardings of positional arguments that are not static, as of `jax.jit`: a pytree prefix of
            `jax.sharding.NamedSharding`, `PartitionSpec` for the mesh that is set, `SingleDeviceSharding`, or None. A
            sharding that splits a value, be it of an argument, a result, a constraint or a type, partitions the
            function over the IPUs of a mesh: one device of it is one IPU. See `ipu.make_mesh`.
        out_shardings: shardings of results, likewise; of kind `pinned_host` over one device: in streaming memory.
        keep_unused: as of `jax.jit`, for the computation of XLA. On the machine all arguments are inputs either way.
        inline: whether the function is inlined in the jaxpr of functions of `jax.jit` and transformations around it. In
            functions of `ipu.jit` it always is.
        backend: None; a platform of XLA, which `jax.jit` has deprecated, is refused.
        compiler_options: options of XLA by name, for the computation of the numbers; cycles and memory do not change.
        options: compiler options of the machine.

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
    _check_positions(fun, more)
    of_jax = settings_of_jax(
        {
            "donate_argnums": donate_argnums,
            "donate_argnames": donate_argnames,
            "static_argnums": static_argnums,
            "static_argnames": static_argnames,
            "keep_unused": keep_unused,
            "inline": inline,
            "backend": backend,
            "compiler_options": compiler_options,
        }
    )
    replication = _replication(replicas, in_specs, out_specs, axis_name)
    shardings = _shardings(in_shardings, out_shardings, replication)
    offload = as_numbers("offload_argnums", offload_argnums)
    options = _DEFAULT_OPTIONS if options is None else options
    settings = FunctionSettings(device, options, of_jax, replication, offload, shardings)
    return functools.partial(IpuFunction, settings=settings) if fun is None else IpuFunction(fun, settings)


def _check_positions(fun: Any, more: tuple[Any, ...]) -> None:
    """Refuse settings by position."""
    if more:
        raise ArgumentTypeError(
            "ipu.jit takes one function by position, and settings by name",
            expected="ipu.jit(fun, device=...)",
            got=f"ipu.jit({', '.join(map(repr, (fun, *more)))})",
            hint=f"device={more[0]!r}" if isinstance(more[0], IPUModel | CPU) else None,
        )


# Imported where they are needed: most functions have neither, and many that are decorated are never called.
def _replication(replicas: Any, in_specs: Any, out_specs: Any, axis_name: Any) -> Replication | None:
    if all(setting is None for setting in (replicas, in_specs, out_specs, axis_name)):
        return None
    from ipujax.calls import Replication

    return Replication.of(replicas, in_specs, out_specs, axis_name)


def _shardings(in_shardings: Any, out_shardings: Any, replication: Replication | None) -> ShardingSettings | None:
    if in_shardings is None and out_shardings is None:
        return None
    from ipujax.sharding import ShardingSettings

    return ShardingSettings.of(in_shardings, out_shardings, None if replication is None else replication.replicas)


class IpuFunction(Generic[_P, _R]):
    """The function that `ipu.jit` returns. Call it, or `lower` it to look inside."""

    # Not among the attributes that `functools.wraps` copies to functions around it.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_compiled_function",
        "_fun",
        "_made_calls",
        "_making_calls",
        "_settings",
    )

    def __init__(self, fun: Callable[_P, _R], settings: FunctionSettings) -> None:
        device = settings.device
        options = settings.options
        check_function(fun, f"@ipu.jit(device={fun!r})" if isinstance(fun, IPUModel | CPU) else None)
        if device is not None:
            check_device(device, "ipu.jit")
        if not isinstance(options, Options):
            raise ArgumentError(
                "options of ipu.jit must be ipu.Options", expected="ipu.Options(...)", got=repr(options)
            )
        check_settings(fun, settings.of_jax)
        # Attributes of a callable object are not copied: they would hide methods of this class.
        functools.update_wrapper(self, fun, updated=("__dict__",) if inspect.isroutine(fun) else ())
        self._fun = fun
        self._settings = replace(settings, line=settings.line or calling_line())
        self._compiled_function: Callable[_P, _R] | None = None  # equal to `_fun`; its calls do not keep it
        self._made_calls: FunctionCalls | None = None
        self._making_calls = Lock()  # threads may make the first calls
        self.__name__ = settings.name_of(fun)

    @property
    def _calls(self) -> FunctionCalls:
        """Calls of the function and others of equal settings, imported and made when they are first needed."""
        if self._made_calls is None:
            shared = _shared_calls()
            with self._making_calls:
                if self._made_calls is None:
                    calls, self._compiled_function = shared.find(self._fun, self._settings)
                    self._made_calls = calls
        return self._made_calls

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            result: _R = (self._made_calls or self._calls).call(args, kwargs)
        except Exception as error:
            show_user_frames(error)
            raise
        return result

    @property
    def options(self) -> Options:
        """Compiler options."""
        return self._settings.options

    @property
    def offload_argnums(self) -> tuple[int, ...]:
        """Positional arguments in streaming memory."""
        return self._settings.offload

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positional arguments that are donated, as passed to `ipu.jit`, without those of `donate_argnames`."""
        return self._settings.of_jax["donate_argnums"] or ()

    @property
    def fun(self) -> Callable[_P, _R]:
        """The function that was given to `ipu.jit`, with all decorators of its own."""
        return self._fun

    @property
    def names_donated(self) -> bool:
        """Whether `ipu.jit` was told which arguments are donated, be it none."""
        return any(setting is not None for setting in self._settings.donated)

    def donated_positions(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Return the positions of the arguments that a call donates, by `donate_argnums` or `donate_argnames`."""
        positions, _ = donated_places(self._fun, args, *self._settings.donated)
        return tuple(sorted(positions))

    @property
    def device(self) -> Device | None:
        """Device that was given to `ipu.jit`; None for the default device of each call."""
        return self._settings.device

    @property
    def target(self) -> Target:
        """Target of the device of the next call.

        Raises:
            ArgumentError: on a `CPU` device.
        """
        device = self._settings.current_device
        if isinstance(device, CPU):
            raise ArgumentError(f"{self.__name__} runs on ipu.CPU(), which computes numbers only")
        return device.target

    @property
    def unused_settings(self) -> UnusedSettings:
        """Warnings of IPUs and options that the function does not use."""
        return self._calls.compiler.unused_settings

    def check_kept(self, who: str, kept: Collection[str] = ()) -> None:
        """Refuse settings that a function which `who` makes of this one would not have; see `FunctionSettings`."""
        self._settings.check_kept(self.__name__, who, kept)

    @checking_calls("with_options")
    def with_options(
        self,
        options: Options | None = None,
        offload_argnums: Sequence[int] | None = None,
        device: Device | None = None,
        donate_argnums: Sequence[int] | None = None,
        in_shardings: Any = None,
        decorator: Callable[[Callable[_P, _R]], Callable[_P, _R]] | None = None,
    ) -> IpuFunction[_P, _R]:
        """Return the function with other settings; None leaves a setting unchanged.

        Args:
            options: compiler options.
            offload_argnums: positional arguments in streaming memory.
            device: `IPUModel(...)` or `CPU()`.
            donate_argnums: positional arguments whose buffers may be reused.
            in_shardings: shardings of positional arguments.
            decorator: from the function to one that is traced in its place.
        """
        settings = self._settings
        shardings = settings.shardings
        if in_shardings is not None:
            shardings = _shardings(in_shardings, shardings and shardings.outputs, settings.replication)
        donated = {} if donate_argnums is None else {"donate_argnums": as_numbers("donate_argnums", donate_argnums)}
        changed = replace(
            settings,
            device=device or settings.device,
            options=settings.options if options is None else options,
            of_jax={**settings.of_jax, **donated},
            offload=settings.offload if offload_argnums is None else as_numbers("offload_argnums", offload_argnums),
            shardings=shardings,
            line="",
        )
        return IpuFunction(self._fun if decorator is None else decorator(self._fun), changed)

    def __copy__(self) -> IpuFunction[_P, _R]:
        return self  # as functions of Python

    def __deepcopy__(self, memo: dict[int, Any]) -> IpuFunction[_P, _R]:
        fun = self._fun
        if isinstance(inspect.unwrap(fun), FunctionType | BuiltinFunctionType):
            return self  # as functions of Python: a module that refers to one may be copied
        # A method, or an object: that of the copied object.
        return IpuFunction(copy.deepcopy(fun, memo), self._settings)

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> str | tuple[Any, ...]:
        # Compiled programs stay with the process.
        if not _is_named(self):
            return _rebuilt, (self._fun, self._settings)
        if int(protocol) < _QUALIFIED_NAMES:
            return str(vars(self)["__qualname__"])
        return _rebuilt, (self._importable, self._settings)

    @functools.cached_property
    def _importable(self) -> Callable[_P, _R]:
        """The user's function under a name that pickle finds: a decorator's result has the name of the function."""
        fun = self._fun

        @functools.wraps(fun)
        def importable(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return fun(*args, **kwargs)

        importable.__qualname__ = f"{fun.__qualname__}.{_IMPORTABLE}"
        return importable

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

    @showing_user_frames
    def trace(self, *args: _P.args, **kwargs: _P.kwargs) -> Traced:
        """Trace for the shapes of arguments, each an array or a `jax.ShapeDtypeStruct`; nothing is run.

        Raises:
            ArgumentError: for arguments that are not arrays.
            UnexpectedTracerError: JAX's, for a tracer, closed over or among the arguments, of a transformation
                or branch that has ended.
        """
        return self._calls.compiler.trace(args, kwargs)

    @showing_user_frames
    def lower(self, *args: _P.args, **kwargs: _P.kwargs) -> Lowered:
        """Lower for the shapes of arguments, each an array or a `jax.ShapeDtypeStruct`; nothing is run.

        Raises:
            ArgumentError: for arguments that are not arrays, for a function that closes over tracers, or on a `CPU`
                device, which has no graph.
        """
        return self._calls.compiler.lower(args, kwargs)

    @showing_user_frames
    def profile(self, *args: _P.args, **kwargs: _P.kwargs) -> Profile:
        """Return the static profile of a call, `.lower(*args).compile().profile`, with its errors; nothing is run."""
        return self.lower(*args, **kwargs).compile().profile

    @showing_user_frames
    def check(self, *args: _P.args, **kwargs: _P.kwargs) -> CheckReport:
        """Compare the program with plain JAX on the arguments of a call, see `ipu.check`; they stay as they are.

        Raises:
            ArgumentError: as `ipu.check`.
        """
        return self._calls.check(args, kwargs)

    @showing_user_frames
    def eval_shape(self, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        """Return shapes and dtypes of the results, a tree of `jax.ShapeDtypeStruct`; nothing is run or lowered.

        Raises:
            ArgumentError: as `trace`.
        """
        return self._calls.compiler.eval_shape(args, kwargs)

    def clear_cache(self) -> None:
        """Drop all traces, lowered programs and compiled computations of the function with its settings."""
        self._calls.clear_cache()


@showing_user_frames
def check(fun: Callable[_P, Any], /, *args: _P.args, **kwargs: _P.kwargs) -> CheckReport:
    """Compare the program of a function with plain JAX, on the arguments of a call::

        report = ipu.check(step, weights, batch)
        print(report)

    The function is computed by `jax.jit`, by its program as calls compute it, and by the tile interpreter if the
    machine has at most 64 tiles, as with `ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=16))`. Every equation of the
    program is computed again by plain JAX from the program's own operands, and the jaxpr after every pass is computed
    by plain JAX: what differs by more than rounding is named, with its line. Arguments stay as they are: nothing is
    donated, and no Ref is written.

    Args:
        fun: a function of `ipu.jit`, whose settings hold, or of plain JAX, for the default device.
        args: arguments of a call, pytrees of arrays.
        kwargs: likewise by name.

    Returns:
        The differences of all results, and the first equation at which they part.

    Raises:
        ArgumentError: shapes in place of arrays, a call under a transformation of JAX, a function on `ipu.CPU()`, one
            that calls Python functions or reads the cycle counter, or replicas on several instances.
        TileMemoryError: the program does not fit.
    """
    function, call_args = jitted(fun, args)
    return function.check(*call_args, **kwargs)


def jitted(fun: Callable[..., Any], args: tuple[Any, ...]) -> tuple[IpuFunction[..., Any], tuple[Any, ...]]:
    """Return a function of `ipu.jit`, one of plain JAX with default settings, and the arguments of a call of it.

    The object of a method is the first argument.
    """
    inner: Any = fun
    if isinstance(fun, MethodType) and isinstance(fun.__func__, IpuFunction):
        inner, args = fun.__func__, (fun.__self__, *args)
    return (inner if isinstance(inner, IpuFunction) else jit(fun)), args


@functools.cache
def _shared_calls() -> SharedCalls:
    """Import the compiler."""
    with collecting_rarely():
        from ipujax.functions.function_calls import SHARED_CALLS

        return SHARED_CALLS


def _named(module: str, name: str) -> Any:
    """Return what a module has under a dotted name; None if it has nothing there."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _is_named(fun: IpuFunction[..., Any]) -> bool:
    """Return whether a function stands in its module in place of the user's, as with a decorator."""
    return _named(getattr(fun, "__module__", ""), getattr(fun, "__qualname__", "")) is fun


def function_of(call: TracedCall) -> IpuFunction[..., Any]:
    """Return the function of a call that was traced."""
    return IpuFunction(call.fun, call.settings)


def _rebuilt(fun: Callable[..., Any], settings: FunctionSettings) -> IpuFunction[..., Any]:
    """Return the function of a pickle: that of the module, if it was pickled by its name there."""
    name, is_importable, _ = getattr(fun, "__qualname__", "").partition(f".{_IMPORTABLE}")
    if not is_importable:
        return IpuFunction(fun, settings)
    owner = _named(fun.__module__, name)
    if isinstance(owner, IpuFunction) and owner._importable is fun:
        return owner
    return IpuFunction(getattr(fun, "__wrapped__", fun), settings)
