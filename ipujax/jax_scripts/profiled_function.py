"""A function of `jax.jit` whose calls are counted; JAX computes it, so numbers, errors and speed are its own.

Input: a result of `jax.jit`. Output: a callable with its attributes, methods and transformations.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MethodType
from typing import Any

import jax
import numpy as np

from ipujax.arguments import FunctionName, argument_places, as_names, as_numbers, dynamic_arguments, has_tracer
from ipujax.jax_scripts.recorder import FunctionRecord, Recorder, loops_on_data
from ipujax.lowering.jax_compat import is_evaluating
from ipujax.runtime.errors import calling_line

PROFILED_FILES = (__file__,)  # files whose frames stand between a script and JAX
_MAX_SIGNATURES = 64  # of one function by the values of its Python numbers; beyond it these count by type


class ProfiledFunction:
    """A jitted function that tells a recorder of its calls.

    Args:
        jitted: function of `jax.jit`.
        recorder: its recorder.
        settings: keywords of `jax.jit`; None if unknown.
    """

    def __init__(self, jitted: Any, recorder: Recorder, settings: Mapping[str, Any] | None = None) -> None:
        fun = getattr(jitted, "__wrapped__", jitted)
        functools.update_wrapper(self, fun, updated=())
        self.__wrapped__ = fun
        self._jitted = jitted
        self._recorder = recorder
        self._settings = {} if settings is None else settings
        self._records: dict[Any, FunctionRecord] = {}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._recorder.is_active and is_evaluating() and not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            self._count(args, kwargs)
        return self._jitted(*args, **kwargs)

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, tree = jax.tree.flatten((args, kwargs))
        if has_tracer(leaves):  # a transformation computes it as part of another function
            return
        by_value = len(self._records) < _MAX_SIGNATURES
        key = tree, tuple([_leaf_key(x, by_value) for x in leaves])
        try:
            record = self._records.get(key)
        except TypeError:  # static arguments that cannot be hashed, which JAX refuses in its own words
            return
        if record is None:
            record = self._recorder.add(self._new_record(args, kwargs))
            self._records[key] = record
        self._recorder.count(record)

    def _new_record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FunctionRecord:
        # The call that follows finds this trace in JAX's cache: Python code of the function runs once, as without us.
        traced = self._jitted.trace(*args, **kwargs)
        fun = self.__wrapped__
        static = (
            None
            if (numbers := self._settings.get("static_argnums")) is None
            else as_numbers("static_argnums", numbers),
            None if (names := self._settings.get("static_argnames")) is None else as_names("static_argnames", names),
        )
        names, static_numbers = argument_places(fun, args, *static)
        arguments = tuple(name for n, name in enumerate(names) if n not in static_numbers)
        positional, named = dynamic_arguments(fun, args, kwargs, *static)
        sample = tuple(positional.values()), named
        is_known = jax.tree.structure(sample) == traced.in_tree
        if not is_known:
            arguments = tuple(f"arg{n}" for n in range(len(traced.args_info[0])))
        return FunctionRecord(
            FunctionName(traced.fun_name, file=FunctionName.of(fun, None, None).file),
            traced,
            arguments,
            calling_line(),
            sample=_copied(sample) if is_known and loops_on_data(traced) else None,
        )

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_jitted":  # asked for by copies, before anything is set
            raise AttributeError(name)
        return getattr(self._jitted, name)

    def __reduce__(self) -> Any:
        return _unchanged, (self._jitted,)

    def __repr__(self) -> str:
        return repr(self._jitted)


def _unchanged(jitted: Any) -> Any:
    """Return a jitted function: the copy or the pickle of a profiled one, for other processes."""
    return jitted


def _leaf_key(x: Any, by_value: bool) -> Any:
    """Return a hashable description of a leaf, equal where JAX compiles once."""
    if isinstance(x, jax.Array):
        return x.aval
    if isinstance(x, np.ndarray | np.generic):
        return x.shape, x.dtype
    return (type(x), x) if by_value else type(x)


def _copied(sample: tuple[Any, dict[str, Any]]) -> Any:
    """Return arguments that neither donation nor the script changes later."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array | np.ndarray) else x, sample)
