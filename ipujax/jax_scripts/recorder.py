"""Record of the functions that a script compiles with JAX: signatures, how often each was called, where.

Input: calls, from `watched`. Output: a `FunctionRecord` for each function and signature.

Primitives that libraries and scripts define are replaced by the equations that implement them: control flow, calls of
the host and products inside such a primitive, as in `lineax.linear_solve`, are no part of the jaxpr that has it; the
compiler lowers them all the same.
Limits: an implementation that is no JAX code stays a primitive.
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import Lock, local
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import jax

from ipujax.jax_scripts.equal_calls import CallSamples, Signatures
from ipujax.jax_scripts.places import CallPlace, PlaceFinder, has_place, is_defined_by_jax, is_of_script_or_library
from ipujax.jax_scripts.running_again import can_run_again
from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, call_equation, traced_impl
from ipujax.lowering.jaxpr import Rewrite, equations, everywhere, primitive_names, with_equations, with_inner
from ipujax.lowering.source_info import common_function, common_functions, source_line
from ipujax.runtime.errors import IpuError, file_name, is_installed
from ipujax.sharding import NO_SHARDINGS, CallShardings, ShardingSettings


def has_library_primitives(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr, or one inside it, has an equation of such a primitive."""
    return any(map(_is_of_library, equations(jaxpr)))


def with_implementations(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return the jaxpr with implementations in place of these primitives; one without any stays the same object."""
    return everywhere(_implemented_body)(jaxpr)


def _implemented_body(jaxpr: ClosedJaxpr, inside: Rewrite) -> ClosedJaxpr:
    eqns = [_implemented(eqn, inside) for eqn in jaxpr.jaxpr.eqns]
    return with_equations(jaxpr, eqns)


def _implemented(eqn: JaxprEqn, inside: Rewrite) -> JaxprEqn:
    if not _is_of_library(eqn):
        return with_inner(eqn, inside)
    callee = traced_impl(eqn)
    if callee is None or eqn.primitive.name in primitive_names(callee.jaxpr):  # it would be replaced without end
        return eqn
    return call_equation(eqn.invars, eqn.outvars, inside(callee), eqn)


def _is_of_library(eqn: JaxprEqn) -> bool:
    implementation = inspect.unwrap(eqn.primitive.impl)
    while isinstance(implementation, partial):
        implementation = inspect.unwrap(implementation.func)
    code = getattr(implementation, "__code__", None)
    return code is not None and is_of_script_or_library(code.co_filename)


_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of Python functions in a jaxpr
_CONTROL_ON_DATA = frozenset(("while", "cond"))


@dataclass(eq=False)
class FunctionRecord:
    """A function of JAX with one signature.

    Args:
        name: its name for JAX, or see `_called_name`.
        jaxpr: its trace; None of a function that is counted alone.
        donated: for each argument whether its buffer may be reused.
        shardings: shardings of the first call over meshes of devices.
        place: where the first call comes from; None if nothing of a script calls it.
        is_of_jax: whether JAX defines it, as an operation of an array, not the script or a library.
        reason: reason for which it cannot be compiled for an IPU; "" if it can.
        depends_on_data: whether it has loops or branches on data, or may, in primitives that libraries define.
        samples: arguments of calls, if it depends on them and may be run again; None else.
        calls: number of calls.
        places: number of calls by place, of a function that JAX defines.
    """

    name: str
    jaxpr: ClosedJaxpr | None
    donated: tuple[bool, ...] = ()
    shardings: CallShardings = NO_SHARDINGS
    place: CallPlace | None = None
    is_of_jax: bool = False
    reason: str = ""
    depends_on_data: bool = False
    samples: CallSamples | None = None
    calls: int = 0
    places: Counter[CallPlace] = field(default_factory=Counter)

    @property
    def source(self) -> str:
        """Where the function is defined, `name at file:line`; "" if that is unknown."""
        return "" if self.jaxpr is None else (self.jaxpr.jaxpr.debug_info.func_src_info or "")

    @property
    def inner_name(self) -> str:
        """Name of the function that is called: that which JAX exports or maps over devices, if it does."""
        if self.jaxpr is None:
            return self.name
        if self.is_of_jax:
            for eqn in equations(self.jaxpr.jaxpr):
                if eqn.primitive.name == "call_exported":
                    return str(eqn.params["exported"].fun_name)
                if eqn.primitive.name == "shard_map":
                    return _function_name(eqn.params["jaxpr"])
        is_part = self.jaxpr.jaxpr.debug_info.arg_names is None and not self.is_of_jax
        has_name = has_place(self.source) and not self.holds_script
        name = self.name if has_name else _function_name(self.jaxpr.jaxpr)
        return f"{name}, transformed" if is_part else name

    @cached_property
    def holds_script(self) -> bool:
        """Whether a function that JAX defines runs one of the script's, as that of `checkify` does."""
        # A single operation may have the line of the one that it is the gradient of.
        eqns = [] if self.jaxpr is None else self.jaxpr.jaxpr.eqns
        return self.is_of_jax and len(eqns) > 1 and any(map(source_line, eqns))

    @property
    def body_name(self) -> str:
        """Name of the script's function that a loop of JAX runs; "" of other functions."""
        if self.jaxpr is not None and self.is_of_jax:
            for eqn in self.jaxpr.jaxpr.eqns:
                body = eqn.params.get({"scan": "jaxpr", "while": "body_jaxpr"}.get(eqn.primitive.name, ""))
                if body is not None and not is_defined_by_jax(body.jaxpr.debug_info.func_src_info or ""):
                    return _function_name(body.jaxpr)
        return ""

    @property
    def definition(self) -> tuple[str, int]:
        """Path and line of its definition; ("", 0) if these are unknown, or of JAX or a library."""
        path, _, line = self.source.partition(" at ")[2].rpartition(":")
        is_known = line.isdigit() and not self.is_of_jax and not is_installed(path)
        return (path, int(line)) if is_known else ("", 0)

    @property
    def file(self) -> str:
        """Name of the file that defines the function; that of its first call if a library does."""
        path, _ = self.definition
        return file_name(path) if path or self.place is None else file_name(self.place.code.co_filename)

    @property
    def line(self) -> str:
        """Line of the first call."""
        return "" if self.place is None else str(self.place)

    @cached_property
    def text(self) -> str:
        """The jaxpr as text, by which equal functions are found."""
        return "" if self.jaxpr is None else _ADDRESS.sub("", str(self.jaxpr))

    def with_implementations(self) -> FunctionRecord:
        """Return the record with the equations of all primitives that libraries define; equal without any."""
        if self.jaxpr is None or (jaxpr := with_implementations(self.jaxpr)) is self.jaxpr:
            return self
        samples = self.samples if can_run_again(jaxpr) else None
        return replace(self, jaxpr=jaxpr, depends_on_data=_has_control_on_data(jaxpr), samples=samples)

    @property
    def outline(self) -> Any:
        """Features that equal functions have in common, found in constant time."""
        if self.jaxpr is None:
            return self.name
        avals = tuple(map(str, (*self.jaxpr.in_avals, *self.jaxpr.out_avals)))
        return self.name, self.source, self.donated, avals, len(self.jaxpr.eqns)


@dataclass(eq=False)
class Recorder:
    """Records of a run, see `Watcher`; threads add to them."""

    is_active: bool = True
    _records: dict[Any, list[FunctionRecord]] = field(default_factory=dict)
    _by_jaxpr: WeakKeyDictionary[ClosedJaxpr, FunctionRecord] = field(default_factory=WeakKeyDictionary)
    _by_function: dict[int, tuple[ReferenceType[Any], Signatures[FunctionRecord]]] = field(default_factory=dict)
    _own: FunctionRecord = field(default_factory=lambda: FunctionRecord("ipujax", None))  # all that ipujax itself runs
    _finder: PlaceFinder = field(default_factory=PlaceFinder)
    _lock: Lock = field(default_factory=Lock)
    _thread: local = field(default_factory=local)

    @property
    def records(self) -> list[FunctionRecord]:
        """All records, in the order of first calls; those that differ in weak types alone are one."""
        with self._lock:
            return _without_weak_types([record for records in self._records.values() for record in records])

    def count_dispatched(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call that C++ has run."""
        entry = self._by_function.get(id(fun))
        if entry is None:
            if getattr(fun, "__wrapped__", None) is None or self._is_muted:
                return  # an executable whose call `count_evaluated` or `count_compiled` has counted
            entry = ref(fun, self._forgetting(id(fun))), Signatures(fun)
            self._by_function[id(fun)] = entry
        elif self._is_muted:
            return
        signatures = entry[1]
        record = signatures.only
        if record is None:
            record = signatures.find(args, kwargs, self._record_of_call)
        self._count(record)

    def count_evaluated(self, jaxpr: ClosedJaxpr, params: Mapping[str, Any], args: tuple[Any, ...]) -> bool:
        """Count a call that runs next; return whether the next one has to come here too."""
        if self._is_muted:
            return False
        if jaxpr not in self._by_jaxpr:
            self._by_jaxpr[jaxpr] = self._new_record(
                params["name"],
                jaxpr,
                tuple(params["donated_invars"]),
                args,
                (params["in_shardings"], params["out_shardings"]),
            )
        record = self._by_jaxpr[jaxpr]
        self._count(record)
        return self._add_sample(record, args)

    def count_compiled(self, traced: jax.stages.Traced | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call of `jax.stages.Compiled`."""
        leaves = jax.tree.leaves((args, kwargs))
        if self._is_muted or any(isinstance(x, jax.core.Tracer) for x in leaves):
            return
        record = self._record_of_trace(traced, leaves)
        self._count(record)
        self._add_sample(record, leaves)

    @property
    def _is_muted(self) -> bool:
        return not self.is_active or getattr(self._thread, "is_muted", False)

    @contextmanager
    def _muted(self) -> Iterator[None]:
        """Count no calls of this thread: they are of the recorder."""
        self._thread.is_muted = True
        try:
            yield
        finally:
            self._thread.is_muted = False

    def _forgetting(self, number: int) -> Callable[[Any], None]:
        return lambda _: self._by_function.pop(number, None) and None

    def _count(self, record: FunctionRecord) -> None:
        if not record.is_of_jax:
            with self._lock:
                record.calls += 1
            return
        place = self._finder.find(sys._getframe(1))
        if place is not None:
            with self._lock:
                record.calls += 1
                record.places[place] += 1

    def _add_sample(self, record: FunctionRecord, args: Sequence[Any]) -> bool:
        """Add a call to the samples of a function; return whether the next one is wanted too."""
        samples = record.samples
        is_deleted = any(isinstance(x, jax.Array) and x.is_deleted() for x in args)  # JAX refuses it next
        if samples is None or not samples.is_open or is_deleted:
            return False
        with self._muted(), self._lock:
            samples.add(args)
        return samples.is_open

    def _record_of_call(self, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FunctionRecord:
        """Return the record of a call that C++ has run: JAX finds its trace in a cache."""
        with self._muted():
            traced = fun.trace(*args, **kwargs)
        return self._record_of_trace(traced, jax.tree.leaves((args, kwargs)))

    def _record_of_trace(self, traced: jax.stages.Traced | None, leaves: Sequence[Any]) -> FunctionRecord:
        if traced is None:
            return self._new_record("compiled program", None, (), leaves)
        jaxpr = traced.jaxpr
        if jaxpr not in self._by_jaxpr:
            donated = tuple(bool(leaf.donated) for leaf in jax.tree.leaves(traced.args_info))
            self._by_jaxpr[jaxpr] = self._new_record(traced.fun_name, jaxpr, donated, leaves)
        return self._by_jaxpr[jaxpr]

    def _new_record(
        self,
        name: str,
        jaxpr: ClosedJaxpr | None,
        donated: tuple[bool, ...],
        args: Sequence[Any],
        shardings: tuple[Any, Any] = (None, None),
    ) -> FunctionRecord:
        """Return the record of an equal function, a new one else, `_own` for a call of ipujax itself."""
        place = self._finder.find(sys._getframe(1))
        if place is None:
            return self._own
        record = FunctionRecord(_called_name(name, jaxpr), jaxpr, donated, NO_SHARDINGS, place)
        if jaxpr is None:
            record.reason = "it was compiled before the run, or read from a file"
        else:
            # What JAX calls by itself is its own, where it does not know the definition.
            record.is_of_jax = is_defined_by_jax(record.source) or (
                not has_place(record.source) and place.function != ""
            )
            record.depends_on_data = _has_control_on_data(jaxpr) or has_library_primitives(jaxpr.jaxpr)
            record.samples = CallSamples() if record.depends_on_data and can_run_again(jaxpr) else None
            record.shardings, record.reason = _shardings_of(name, args, shardings)
        with self._lock:
            equal = self._records.setdefault(record.outline, [])
            earlier = next((each for each in equal if each.text == record.text), None) if equal else None
            if earlier is None:
                equal.append(record)
            return earlier or record


def _has_control_on_data(jaxpr: ClosedJaxpr) -> bool:
    return not _CONTROL_ON_DATA.isdisjoint(primitive_names(jaxpr.jaxpr))


def _without_weak_types(records: Sequence[FunctionRecord]) -> list[FunctionRecord]:
    """Return records with one for a function whose first call has weak types, as of Python numbers, and others not."""
    groups: dict[Any, list[FunctionRecord]] = {}
    for record in records:
        avals = () if record.jaxpr is None else (*record.jaxpr.in_avals, *record.jaxpr.out_avals)
        types = tuple(aval.str_short() for aval in avals)
        groups.setdefault((record.name, record.source, record.donated, types), []).append(record)
    merged = []
    for group in groups.values():
        if group[0].is_of_jax or len({_weak_types(record) for record in group}) < len(group):
            merged += group  # programs of other static arguments
        else:
            most_called = max(group, key=lambda record: record.calls)
            merged.append(replace(most_called, calls=sum(record.calls for record in group)))
    return merged


def _called_name(name: str, jaxpr: ClosedJaxpr | None) -> str:
    """Return the name of a function; of a library's wrapper of an object, "Partial", that of what the object calls."""
    source = "" if jaxpr is None else (jaxpr.jaxpr.debug_info.func_src_info or "")
    path, _, line = source.partition(" at ")[2].rpartition(":")
    definition = linecache.getline(path, int(line)).lstrip() if line.isdigit() and is_installed(path) else ""
    if jaxpr is None or not definition.startswith("def ") or definition.startswith(f"def {name}("):
        return name
    # The library has given its wrapper the name of the function, or of the class of the object, that it wraps.
    called = common_functions([eqn for eqn in jaxpr.jaxpr.eqns if source_line(eqn)])
    return name if name in called or not called else called[0]


def _function_name(jaxpr: Jaxpr) -> str:
    """Return the name of the script's function that a jaxpr was traced from, also where a function of JAX calls it."""
    source = jaxpr.debug_info.func_src_info or ""
    if has_place(source) and not is_defined_by_jax(source):
        return str(jaxpr.debug_info.func_name)
    return common_function([eqn for eqn in jaxpr.eqns if source_line(eqn)]) or str(jaxpr.debug_info.func_name)


def _weak_types(record: FunctionRecord) -> tuple[bool, ...]:
    avals: Sequence[Any] = () if record.jaxpr is None else (*record.jaxpr.in_avals, *record.jaxpr.out_avals)
    return tuple(bool(getattr(aval, "weak_type", False)) for aval in avals)


def _shardings_of(name: str, args: Sequence[Any], shardings: tuple[Any, Any]) -> tuple[CallShardings, str]:
    """Return the shardings of a call over meshes, and the reason for which it cannot be compiled, "" if it can."""
    inputs, outputs = map(_over_meshes, shardings)
    settings = ShardingSettings(inputs, outputs)
    if not settings.may_partition(tuple(args), {}):
        return NO_SHARDINGS, ""
    try:
        return settings.of_call(name, tuple(args), {}), ""
    except IpuError as error:
        return NO_SHARDINGS, error.what


def _over_meshes(shardings: Any) -> Any:
    """Return flat shardings with None for those that are over no mesh; None without any."""
    if shardings is None:
        return None
    kinds = jax.sharding.NamedSharding
    named = tuple(sharding if isinstance(sharding, kinds) else None for sharding in shardings)
    return named if any(named) else None
