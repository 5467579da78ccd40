"""`ipu.jit`: a JAX function, compiled for a simulated IPU.

The call path is `jax.jit`'s own. The function it traces lowers the user's function for the shapes it is traced with, checks
that the program fits the machine, and then emits the engine's computation: one call of XLA a step, with JAX's own cache,
donation and dispatch.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, overload

import jax

from ipujax.arguments import check_arguments, function_line, function_name, has_tracer, parameter_names, split_static
from ipujax.device import CPU, Device, IPUModel, current_device
from ipujax.lowering.lower import lower
from ipujax.lowering.passes import PASSES
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.options import Options
from ipujax.stages import Lowered, Signature

_LOG = logging.getLogger("ipujax")

# The device whose compilation is tracing user code right now: inner `ipu.jit` functions are inlined into it.
_COMPILING_FOR: ContextVar[Device | None] = ContextVar("ipujax_compiling_for", default=None)


@overload
def jit(fun: Callable[..., Any], /) -> IpuFunction: ...
@overload
def jit(
    fun: None = None,
    /,
    *,
    device: Device | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    options: Options | None = None,
) -> Callable[[Callable[..., Any]], IpuFunction]: ...
@overload
def jit(
    fun: Callable[..., Any],
    /,
    *,
    device: Device | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    options: Options | None = None,
) -> IpuFunction: ...
def jit(fun=None, /, *, device=None, donate_argnums=(), static_argnums=(), static_argnames=(), options=None):  # type: ignore[no-untyped-def]
    """Compiles a JAX function for a simulated IPU; use it as `jax.jit`, also as a bare decorator.

    Args:
        fun: function of pytrees of arrays.
        device: `IPUModel(...)` or `CPU()`; the default device when None, looked up at each call.
        donate_argnums: positional arguments whose buffers may be reused; on the machine they, and the results that take
            their place, stay on the device, while all other arguments and results move from and to the host each call.
        static_argnums: positional arguments that are settings: hashable, each value compiled apart.
        static_argnames: the same by name.
        options: choices of the compiler.

    Returns:
        A function with the results of `jax.jit(fun)`, with a method `lower(*args)`.

    Raises:
        ArgumentError: at a call, for arguments that are not arrays.
        TileMemoryError: at the first call with given shapes, if the program does not fit the machine.
    """
    if fun is None:
        return functools.partial(
            jit,
            device=device,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            options=options,
        )
    return IpuFunction(
        fun,
        device,
        _as_tuple(donate_argnums, int),
        _as_tuple(static_argnums, int),
        _as_tuple(static_argnames, str),
        options or Options(),
    )


def _as_tuple(value: Any, kind: type) -> tuple[Any, ...]:
    return (value,) if isinstance(value, kind) else tuple(value)


class IpuFunction:
    """What `ipu.jit` returns. Call it, or `lower` it to look inside."""

    def __init__(
        self,
        fun: Callable[..., Any],
        device: Device | None,
        donate_argnums: tuple[int, ...],
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
        options: Options,
    ) -> None:
        if not callable(fun):
            raise ArgumentError("ipu.jit needs a function", expected="a callable", got=repr(fun))
        if device is not None and not isinstance(device, IPUModel | CPU):
            expected = "ipu.IPUModel(...) or ipu.CPU()"
            raise ArgumentError("ipu.jit got no device", where=function_line(fun), expected=expected, got=repr(device))
        functools.update_wrapper(self, fun)
        self._fun, self._device, self._options = fun, device, options
        self._settings = {
            "donate_argnums": donate_argnums,
            "static_argnums": static_argnums,
            "static_argnames": static_argnames,
        }
        self.__name__: str = function_name(fun)
        self.line = function_line(fun)
        self._plain = jax.jit(fun, **self._settings)
        self._runners: dict[IPUModel, Callable[..., Any]] = {}
        self._lowered: dict[Any, Lowered] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = self._device or _COMPILING_FOR.get() or current_device()
        if self._is_inlined(device, args, kwargs) or isinstance(device, CPU):
            return self._plain(*args, **kwargs)
        try:
            return self._runner(device)(*args, **kwargs)
        except TypeError:
            # JAX refuses arguments that are no arrays with a TypeError before it traces anything; ours says more.
            self._check(args, kwargs)
            raise

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: bound to its instance, which then is the first argument, as with `jax.jit`."""
        return self if instance is None else MethodType(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Lowers for the shapes of some arguments, which may be `jax.ShapeDtypeStruct`s; nothing is run.

        Raises:
            ArgumentError: for arguments that are no arrays, or on a `CPU` device, which has no graph.
        """
        self._check(args, kwargs)
        device = self._device or current_device()
        if isinstance(device, CPU):
            what = f"{function_name(self._fun)} runs on ipu.CPU(), which computes numbers only"
            raise ArgumentError(what, where=function_line(self._fun), hint="give ipu.jit an ipu.IPUModel")
        return self._lower(device, args, kwargs)

    def _check(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        static = self._settings["static_argnums"], self._settings["static_argnames"]
        check_arguments(self._fun, args, kwargs, *static)

    def _is_inlined(self, device: Device, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether another transformation is tracing this call, so that it becomes part of what is being traced."""
        outer = _COMPILING_FOR.get()
        if outer is not None:
            if device != outer:
                raise ArgumentError(
                    f"{function_name(self._fun)} is called inside a function compiled for another device",
                    where=function_line(self._fun),
                    expected=outer,
                    got=device,
                    hint="give both functions one device, or leave the inner one's out",
                )
            return True
        if has_tracer(args, kwargs):
            name = function_name(self._fun)
            _LOG.info("%s is called under a JAX transformation: it runs as jax.jit, without a profile", name)
            return True
        return False

    def _runner(self, device: IPUModel) -> Callable[..., Any]:
        """The jitted function that lowers while it is traced, and emits the engine's computation."""
        if device not in self._runners:

            def run(*args: Any, **kwargs: Any) -> Any:
                lowered = self._lower(device, args, kwargs)
                lowered.compile()
                return lowered.evaluate(*args, **kwargs)

            functools.update_wrapper(run, self._fun)
            self._runners[device] = jax.jit(run, **self._settings)
        return self._runners[device]

    def _lower(self, device: IPUModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        """Lowers once for each device and signature."""
        static, dynamic = self._split(args, kwargs)
        avals, tree = jax.tree.flatten(jax.tree.map(jax.typeof, dynamic))
        key = (device, tree, tuple(avals), static)
        if key not in self._lowered:
            self._lowered[key] = self._lower_anew(device, args, kwargs)
        return self._lowered[key]

    def dynamic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that are arrays, without the static ones."""
        return self._split(args, kwargs)[1]

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return split_static(self._fun, args, kwargs, self._settings["static_argnums"], self._settings["static_argnames"])

    def _lower_anew(self, device: IPUModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
        timings: dict[str, float] = {}
        with _timed(timings, "trace"), _compiling_for(device):
            traced = self._plain.trace(*args, **kwargs)
        jaxprs = {"trace": traced.jaxpr}
        for name, run in PASSES:
            with _timed(timings, name):
                jaxprs[name] = run(list(jaxprs.values())[-1])
        with _timed(timings, "lower"):
            infos, in_tree = jax.tree.flatten(traced.args_info)
            places = {place for place, _ in self._split(args, kwargs)[0]}
            positional = [n for i, n in enumerate(parameter_names(self._fun, len(args))) if i not in places]
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(traced.args_info)]
            names = [_leaf_name(path, positional) for path in paths]
            donated = [info.donated for info in infos]
            program = lower(list(jaxprs.values())[-1], device.target, donated=donated, names=names)
        signature = Signature(in_tree, tuple(traced.jaxpr.in_avals), traced.out_tree)
        return Lowered(self, signature, jaxprs, program, self._options, timings)


def _leaf_name(path: Sequence[Any], positional: Sequence[str]) -> str:
    """The name of a leaf of `(args, kwargs)` as the user would write it: `params['w']`."""
    in_args, first, *rest = path
    head = positional[first.idx] if in_args.idx == 0 else str(first.key)
    return head + jax.tree_util.keystr(tuple(rest))


@contextmanager
def _timed(timings: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    timings[name] = time.perf_counter() - start


@contextmanager
def _compiling_for(device: IPUModel) -> Iterator[None]:
    token = _COMPILING_FOR.set(device)
    try:
        yield
    finally:
        _COMPILING_FOR.reset(token)
