"""A function of `jax.jit` whose calls are counted; JAX computes it, so numbers, errors and speed are its own.

Its stages, `jax.stages.Traced`, `Lowered` and `Compiled`, are wrapped too: calls of the compiled one are counted.

Input: a result of `jax.jit`. Output: a callable with its attributes, methods and transformations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import jax
import numpy as np

from ipujax.arguments import FunctionName, argument_places, as_names, as_numbers, dynamic_arguments, has_tracer
from ipujax.jax_scripts.hidden_frames import hide_frames, hiding_frames
from ipujax.jax_scripts.recorder import FunctionRecord, Recorder, loops_on_data
from ipujax.runtime.errors import IpuError, calling_line
from ipujax.sharding import ShardingSettings


class ProfiledStage:
    """A stage of JAX that tells a recorder of calls.

    Args:
        stage: the stage.
        recorder: recorder of calls.
        record: returns the record of the function, None if it has none.
    """

    def __init__(self, stage: Any, recorder: Recorder, record: Callable[[], FunctionRecord | None]) -> None:
        self._stage = stage
        self._recorder = recorder
        self._record = record

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the stage, for `isinstance`."""
        return type(self._stage)

    @hiding_frames
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Return the lowered stage."""
        return ProfiledStage(self._stage.lower(*args, **kwargs), self._recorder, self._record)

    @hiding_frames
    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Return the compiled stage."""
        return ProfiledStage(self._stage.compile(*args, **kwargs), self._recorder, self._record)

    @hiding_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._recorder.counts_now:
            record = self._record()
            if record is not None:
                self._recorder.count(record)
        return self._stage(*args, **kwargs)

    @hiding_frames
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_stage":
            raise AttributeError(name)
        return getattr(self._stage, name)

    def __reduce__(self) -> Any:
        return self._stage.__reduce__()

    def __repr__(self) -> str:
        return repr(self._stage)


_MAX_SIGNATURES = 64  # of one function by the values of its Python numbers; beyond it these count by type
_NUMBERS = bool, int, float, complex
_CLOSES_OVER_TRACERS = "it closes over values that a transformation of JAX computes"


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

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the jitted function, for `isinstance`."""
        return type(self._jitted)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            if self._recorder.counts_now:
                self.count(args, kwargs)
            return self._jitted(*args, **kwargs)
        except BaseException as error:
            hide_frames(error)
            raise

    def count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call with these arguments."""
        record = self.record_of(args, kwargs)
        if record is not None:
            self._recorder.count(record)

    def record_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FunctionRecord | None:
        """Return the record of calls with such arguments; None if JAX will refuse them."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_part = has_tracer(leaves)
        by_value = len(self._records) < _MAX_SIGNATURES
        key = is_part, tree, tuple([_leaf_key(x, by_value) for x in leaves])
        try:
            record = self._records.get(key)
        except TypeError:  # static arguments that cannot be hashed, which JAX refuses in its own words
            return None
        if record is None:
            if is_part:
                args, kwargs = jax.tree.map(_shape_of_tracer, (args, kwargs))
            record = self._recorder.add(self._new_record(args, kwargs, is_part))
            self._records[key] = record
        return record

    def _new_record(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_part: bool) -> FunctionRecord:
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
        name = FunctionName(traced.fun_name, file=FunctionName.of(fun, None, None).file)
        if has_tracer(traced.jaxpr.consts):
            return FunctionRecord(name, None, reason=_CLOSES_OVER_TRACERS, is_forward_alone=is_part)
        record = FunctionRecord(
            name,
            traced,
            arguments,
            calling_line(),
            sample=_copied(sample) if is_known and not is_part and loops_on_data(traced) else None,
            is_forward_alone=is_part,
        )
        if is_known:
            self._add_shardings(record, *sample)
        return record

    def _add_shardings(self, record: FunctionRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs, outputs = (_over_meshes(self._settings.get(name)) for name in ("in_shardings", "out_shardings"))
        settings = ShardingSettings(inputs, outputs)
        if settings.may_partition(args, kwargs):
            try:
                record.shardings = settings.of_call(record.name, args, kwargs)
            except IpuError as error:
                record.reason = error.what

    @hiding_frames
    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trace of JAX; calls of functions compiled from it are counted."""
        return ProfiledStage(self._jitted.trace(*args, **kwargs), self._recorder, lambda: self.record_of(args, kwargs))

    @hiding_frames
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Return the lowered function of JAX; calls of functions compiled from it are counted."""
        return ProfiledStage(self._jitted.lower(*args, **kwargs), self._recorder, lambda: self.record_of(args, kwargs))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    @hiding_frames
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
    if isinstance(x, jax.core.Tracer):
        return x.aval
    if isinstance(x, jax.Array):
        return (x.aval, x.sharding) if isinstance(x.sharding, jax.sharding.NamedSharding) else x.aval
    if isinstance(x, np.ndarray | np.generic):
        return x.shape, x.dtype
    return (type(x), x) if by_value or not isinstance(x, _NUMBERS) else type(x)


def _shape_of_tracer(x: Any) -> Any:
    """Return the shape of a traced value; another leaf unchanged."""
    if not isinstance(x, jax.core.Tracer):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)


def _over_meshes(shardings: Any) -> Any:
    """Return a pytree prefix of shardings with None for those that are over no mesh."""
    if shardings is None:
        return None
    return jax.tree.map(
        lambda s: s if isinstance(s, jax.sharding.NamedSharding | jax.sharding.PartitionSpec) else None,
        shardings,
        is_leaf=lambda s: s is None or isinstance(s, jax.sharding.PartitionSpec),
    )


def _copied(sample: tuple[Any, dict[str, Any]]) -> Any:
    """Return arguments that neither donation nor the script changes later."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array | np.ndarray) else x, sample)
