"""Where JAX runs what it has compiled: a watcher is told of each call while some code runs.

JAX has no public place for that. Three places together see every call of this process:

    C++ dispatch    the hook that JAX's own search for NaNs uses, after each call whose signature it knows
    Python          the function that looks for an executable, before each other call, and evaluates `jit` equations
    stages          `jax.stages.Compiled.__call__`

Nothing of the code is replaced, so its functions, their speed and their tracebacks stay what they are.

Input: a watcher. Output: calls of its methods.
Limits: the first two places are private to JAX, and are checked when the watch begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import local
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import jax

from ipujax.jax_scripts.hidden_frames import hiding_frames
from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.runtime.errors import IpuError
from ipujax.runtime.names_at_import import jax_jit

_HOOK = "_post_hook_state"
_RUN = "_pjit_call_impl_python"


class Watcher(Protocol):
    """A watcher, which is told of calls."""

    def count_dispatched(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a call of a jitted function that C++ has run; donated arguments are deleted."""

    def count_evaluated(self, jaxpr: ClosedJaxpr, params: Mapping[str, Any], args: tuple[Any, ...]) -> bool:
        """Take a call, before it runs, of a jaxpr with the parameters of its `jit` equation.

        Returns:
            Whether the next call of the function should come here too, not to C++.
        """

    def count_compiled(self, traced: jax.stages.Traced | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take a call of `jax.stages.Compiled`, before it runs, with its trace, None if that is unknown."""


class _NotSettled:
    """A profiler of JAX that has not finished: JAX then looks for an executable in the next call again."""

    def is_enabled(self) -> bool:
        return True

    def is_fdo_consumed(self) -> bool:
        return False


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell a watcher of all calls inside.

    Raises:
        IpuError: a version of JAX without these places.
    """
    jit_p = jax.make_jaxpr(jax_jit(lambda: 0.0))().eqns[0].primitive
    original_impl: Callable[..., Any] = jit_p.impl
    names = inspect.unwrap(original_impl).__globals__
    hooks = inspect.unwrap(jax_jit).__globals__
    if _RUN not in names or _HOOK not in hooks:
        raise IpuError(f"JAX {jax.__version__} has no place where calls of compiled functions can be seen")
    original_run = names[_RUN]
    outer_state = getattr(original_impl, "hook_state", hooks[_HOOK])
    thread = local()

    def hook(fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> None:
        watcher.count_dispatched(fun, args, kwargs)
        outer = outer_state.value
        if outer is not None:  # the search for NaNs
            outer(fun, args, kwargs, results)

    @hiding_frames
    def run(*args: Any, **params: Any) -> Any:
        jaxpr = params["jaxpr"]
        if getattr(thread, "evaluating", None) is jaxpr:
            return original_run(*args, **params)
        stays = watcher.count_evaluated(jaxpr, params, args)
        results, executable, profiler, constants = original_run(*args, **params)
        return results, executable, _NotSettled() if stays else profiler, constants

    @hiding_frames
    def impl(*args: Any, **params: Any) -> Any:
        outer = getattr(thread, "evaluating", None)
        watcher.count_evaluated(params["jaxpr"], params, args)
        thread.evaluating = params["jaxpr"]
        try:
            return original_impl(*args, **params)
        finally:
            thread.evaluating = outer

    # A state of our own: JAX resets its own one, by thread, wherever it does not look for NaNs.
    state = type(hooks[_HOOK])("post_hook", None, include_in_jit_key=False)
    state.set_global(hook)
    impl.hook_state = state  # type: ignore[attr-defined]
    impl.__wrapped__ = inspect.unwrap(original_impl)  # type: ignore[attr-defined]
    with _watched_stages(watcher):
        hooks["jax_jit"].set_post_hook_state(state)
        names[_RUN] = run
        jit_p.def_impl(impl)
        try:
            yield
        finally:
            jit_p.def_impl(original_impl)
            names[_RUN] = original_run
            hooks["jax_jit"].set_post_hook_state(outer_state)


@contextmanager
def _watched_stages(watcher: Watcher) -> Iterator[None]:
    """Tell a watcher of calls of `jax.stages.Compiled`, each with the trace that it was made of."""
    stages = jax.stages
    traces: WeakKeyDictionary[Any, jax.stages.Traced] = WeakKeyDictionary()
    lower, compile_, call = stages.Traced.lower, stages.Lowered.compile, stages.Compiled.__call__

    @hiding_frames
    def lowered(self: jax.stages.Traced, *args: Any, **settings: Any) -> Any:
        result = lower(self, *args, **settings)
        traces[result] = self
        return result

    @hiding_frames
    def compiled(self: jax.stages.Lowered, *args: Any, **settings: Any) -> Any:
        result = compile_(self, *args, **settings)
        if self in traces:
            traces[result] = traces[self]
        return result

    @hiding_frames
    def called(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        watcher.count_compiled(traces.get(self), args, kwargs)
        return call(self, *args, **kwargs)

    places: tuple[tuple[Any, str, Any, Any], ...] = (
        (stages.Traced, "lower", lowered, lower),
        (stages.Lowered, "compile", compiled, compile_),
        (stages.Compiled, "__call__", called, call),
    )
    for owner, name, new, _ in places:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, _, old in places:
            setattr(owner, name, old)
