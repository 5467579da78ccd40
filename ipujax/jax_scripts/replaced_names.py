"""Replacement of `jax.jit` and its relatives while some code runs.

JAX has no hook that sees every call of a compiled function: compiled calls never come back to Python. So public names
are replaced: `jax.jit`, `jax.pmap`, `jax.experimental.pjit.pjit`, `LOOPS` and `TRANSFORMATIONS`. `flax.nnx.jit`,
`equinox.filter_jit` and the trainer of Keras call `jax.jit` by that name, and `from jax import jit` inside of the run
takes the replacement. Functions of JAX itself keep the original.
Functions that were jitted before are replaced too, where global names of the user's modules have them, or are classes
or objects with them as attributes, as those of `nnx.jit` and `filter_jit`.

Loops, and transformations of jitted functions, that a script calls outside of `jax.jit` are counted as functions: JAX
compiles the whole of a `jax.lax.scan` that nothing else traces, and the parts of `jax.grad(jitted)(x)`. Each is
recorded by a trace of `jax.jit` around it, whose inner traces JAX caches: Python code runs once. The call itself is
JAX's own. `jax.grad(f)` of a Python function that calls jitted ones has a row for each of these, of its forward
alone.

Limits: functions jitted before that are local variables, or deeper in objects, are not seen.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import jax
import jax.experimental.pjit
import jax.numpy as jnp
import numpy as np

from ipujax.arguments import FunctionName, function_name, has_tracer
from ipujax.jax_scripts.hidden_frames import hiding_frames
from ipujax.jax_scripts.profiled_function import ProfiledFunction
from ipujax.jax_scripts.recorder import FunctionRecord, Recorder
from ipujax.runtime.errors import is_installed
from ipujax.runtime.names_at_import import jax_jit

LOOPS = ("scan", "while_loop", "fori_loop", "map")  # of jax.lax
TRANSFORMATIONS = ("grad", "value_and_grad", "vmap")  # of jax


def recorded_transformation(
    original: Callable[..., Any], jit: Callable[..., Any], recorder: Recorder, is_own: Callable[[], bool]
) -> Callable[..., Any]:
    """Return a transformation whose results, of jitted functions, are counted.

    Args:
        original: the transformation of JAX.
        jit: `jax.jit`.
        recorder: recorder of calls.
        is_own: returns whether code of JAX makes the call.
    """

    @hiding_frames
    @functools.wraps(original)
    def transformation(*args: Any, **settings: Any) -> Any:
        result = original(*args, **settings)
        fun = args[0] if args else settings.get("fun")
        if type(fun) is not ProfiledFunction or is_own():
            return result
        counted = _counted_function(result, f"{original.__name__}({function_name(fun)})", jit, recorder)

        @hiding_frames
        @functools.wraps(result)
        def transformed(*args: Any, **kwargs: Any) -> Any:
            if not recorder.counts_now:
                return result(*args, **kwargs)
            with recorder.counting_no_parts():
                counted.count(args, kwargs)
                return result(*args, **kwargs)

        return transformed

    return transformation


def recorded_loop(
    original: Callable[..., Any], jit: Callable[..., Any], recorder: Recorder, is_own: Callable[[], bool]
) -> Callable[..., Any]:
    """Return a loop of `jax.lax` whose calls outside of other functions are counted; arguments as above."""

    @hiding_frames
    @functools.wraps(original)
    def loop(*args: Any, **settings: Any) -> Any:
        if not recorder.counts_now or is_own():
            return original(*args, **settings)
        with recorder.counting_no_parts():
            leaves, tree = jax.tree.flatten((args, settings))
            is_operand = [_is_operand(x) for x in leaves]
            if not has_tracer(leaves):

                def run(*operands: Any) -> Any:
                    values = iter(operands)
                    filled = [next(values) if flag else x for x, flag in zip(leaves, is_operand, strict=True)]
                    args, settings = jax.tree.unflatten(tree, filled)
                    return original(*args, **settings)

                functions = [function_name(x) for x in leaves if callable(x)]
                operands = [x for x, flag in zip(leaves, is_operand, strict=True) if flag]
                _counted_function(
                    run, f"{original.__name__}({functions[-1] if functions else ''})", jit, recorder
                ).count(tuple(operands), {})
            return original(*args, **settings)

    return loop


def _counted_function(
    fun: Callable[..., Any], name: str, jit: Callable[..., Any], recorder: Recorder
) -> ProfiledFunction:
    """Return a function, jitted under a name, to be traced alone."""

    @functools.wraps(fun)
    def named(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    named.__name__ = name
    return ProfiledFunction(jit(named), recorder)


def _is_operand(x: Any) -> bool:
    """Return whether a leaf is traced: numbers stay as they are, for they may be bounds of a loop."""
    if not isinstance(x, jax.Array | np.ndarray):
        return False
    return x.ndim > 0 or not jnp.issubdtype(x.dtype, jnp.integer)


_OWN = ("jax", "jaxlib", "ipujax")  # packages whose calls of jax.jit are no functions of the script
_CALLER = 3  # frames from a check to the caller of a replaced function: itself, its boundary
_PMAP = "jax.pmap places its parts on devices of JAX; jax.jit, or ipu.jit(replicas=), can be compiled"


@contextmanager
def replaced_names(recorder: Recorder) -> Iterator[None]:
    """Record all calls of functions that are jitted inside, and restore every name at the end."""
    original_jit = jax.jit
    original_pmap = jax.pmap
    original_pjit_names = vars(jax.experimental.pjit)["__getattr__"]

    @hiding_frames
    @functools.wraps(original_jit)
    def jit(*args: Any, **settings: Any) -> Any:
        jitted = original_jit(*args, **settings)
        return jitted if _is_called_by_own_code() else _profiled(jitted, recorder, settings)

    @hiding_frames
    @functools.wraps(original_pmap)
    def pmap(*args: Any, **settings: Any) -> Any:
        mapped = original_pmap(*args, **settings)
        return mapped if _is_called_by_own_code() else _counted(mapped, recorder, _PMAP)

    @hiding_frames
    def pjit_names(name: str) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = original_pjit_names(name)
        for warning in caught:  # that the name is deprecated, at the line of the script
            warnings.warn(warning.message, warning.category, stacklevel=3)
        return jit if name == "pjit" else value

    new: list[tuple[Any, str, Any]] = [(jax, "jit", jit), (jax, "pmap", pmap)]
    new.append((jax.experimental.pjit, "__getattr__", pjit_names))
    for space, names, make in (jax, TRANSFORMATIONS, recorded_transformation), (jax.lax, LOOPS, recorded_loop):
        for name in names:
            new.append((space, name, make(getattr(space, name), original_jit, recorder, _is_called_by_own_code)))
    old = [(space, name, getattr(space, name)) for space, name, _ in new]
    replaced = list(_jitted_before())
    try:
        for space, name, value in new:
            setattr(space, name, value)
        for space, name, value in replaced:
            _set(space, name, ProfiledFunction(value, recorder))
        yield
    finally:
        recorder.is_active = False
        for space, name, value in old:
            setattr(space, name, value)
        for space, name, value in replaced:
            if type(vars(space).get(name)) is ProfiledFunction:  # else the code inside has replaced it
                _set(space, name, value)


def _is_called_by_own_code() -> bool:
    package = str(sys._getframe(_CALLER).f_globals.get("__name__", "")).partition(".")[0]
    return package in _OWN


def _profiled(jitted: Any, recorder: Recorder, settings: Mapping[str, Any]) -> Any:
    """Return a profiled function, or the decorator that `jax.jit` returns without one."""
    if hasattr(jitted, "trace"):
        return ProfiledFunction(jitted, recorder, settings)
    return lambda fun: ProfiledFunction(jitted(fun), recorder, settings)


def _counted(mapped: Any, recorder: Recorder, reason: str) -> Callable[..., Any]:
    """Return a function whose calls are counted under the reason for which it is not compiled."""
    name = FunctionName(function_name(getattr(mapped, "__wrapped__", mapped)))

    class Counted(ProfiledFunction):
        def record_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FunctionRecord:
            return recorder.add(FunctionRecord(name, None, reason=reason))

    return Counted(mapped, recorder)


def _jitted_before() -> Iterator[tuple[Any, str, Any]]:
    """Yield the user's modules, classes and objects that have a jitted function, with its name there."""
    kind = type(jax_jit(lambda: None))
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or not _is_of_user(module):
            continue
        for space in (module, *(x for x in list(vars(module).values()) if _may_hold_functions(x, module))):
            yield from ((space, name, x) for name, x in list(vars(space).items()) if isinstance(x, kind))


def _may_hold_functions(x: Any, module: ModuleType) -> bool:
    """Return whether a value is a class of the module, or an object with attributes, as `nnx.jit` returns."""
    if inspect.isclass(x):
        return x.__module__ == module.__name__
    return isinstance(getattr(x, "__dict__", None), dict) and not isinstance(x, ModuleType | FunctionType)


def _set(space: Any, name: str, value: Any) -> None:
    if inspect.isclass(space):
        setattr(space, name, value)
    else:  # frozen objects too
        vars(space)[name] = value


def _is_of_user(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ == "__main__"
    return not is_installed(file)
