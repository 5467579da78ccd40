"""Distribution of a function's replicas over instances: each calls it with its share of arguments and results.

Input: the arguments of one instance's call. Output: arrays of all instances, for one computation that all start
together. Before, instances compare values that must be equal on all: at each call shapes, and checksums of arrays that
are not split; at the first call with new shapes also the program.

A call reads all values that are not split once for their checksums, unless they are results of the last call. Limits: a
checksum has 32 bits. Machines of all instances must compute equal bits.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.calls import Places, Replication, leaf_dims, split_dims
from ipujax.distributed.instance.meeting import agree, naming_lost, stable
from ipujax.distributed.instance.membership import membership
from ipujax.distributed.instance.process_arrays import over_instances, to_all, to_local
from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    Literal,
    is_float0,
    is_on_host,
    jaxprs_in_params,
    on_host_if,
    with_weak_type,
)
from ipujax.lowering.replicas import Dims, evaluate, global_shape
from ipujax.runtime.errors import ArgumentError, ArgumentValueError
from ipujax.runtime.host import Instances
from ipujax.runtime.options import Options
from ipujax.runtime.signatures import describe

_ARGUMENTS = (
    "each instance gives its own equal share of what is split, and the same of what is not: "
    "params = ipu.distributed.broadcast(params) gives all instances what instance 0 has"
)
_LOCAL_OPTIONS = "progress", "label", "cache_dir"  # those that change no program
_PROGRAMS = "the function must be the same on all instances: it may not ask which one it is on"


class _Kind(NamedTuple):
    """Properties of calls with arguments of equal shapes: of each leaf expression and split; what must be equal."""

    places: tuple[str, ...]
    dims: Dims
    equal: tuple[tuple[str, str], ...]


class Arguments(NamedTuple):
    """Arguments of one instance's call: their leaves, with the function that puts others in their place."""

    leaves: list[Any]
    kind: _Kind
    rebuilt: Callable[[Iterable[Any]], tuple[list[Any], dict[str, Any]]]


class _Result(NamedTuple):
    """A result of the last call that is equal on all instances: this one's array, its number, and that of all."""

    local: ref[jax.Array]
    number: int
    of_all: jax.Array


@dataclass(eq=False, slots=True)
class Spread:
    """Distribution of the replicas of one function over instances.

    Args:
        name: name of the function.
        replication: its replication.
        instances: the instances that share the replicas.
        settings: (place, text) of settings of the function that must be equal on all.
    """

    name: str
    replication: Replication
    instances: Instances
    settings: tuple[tuple[str, str], ...] = ()
    _kinds: dict[Any, _Kind] = field(default_factory=dict)
    _last_results: dict[int, _Result] = field(default_factory=dict)

    @staticmethod
    def of(name: str, replication: Replication, device: object, options: Options) -> Spread | None:
        """Return the distribution of a function; None if it has one replica, or this process is the only instance."""
        count = membership().num_instances
        if replication.replicas == 1 or count == 1:
            return None
        if replication.replicas % count:
            raise ArgumentError(
                f"{replication.replicas} replicas of {name} cannot be shared equally by {count} instances",
                expected=f"a multiple of {count}",
                got=replication.replicas,
                hint="replicas=ipu.distributed.num_replicas()",
            )
        settings = [("the number of replicas", str(replication.replicas)), ("the device", stable(device))]
        for each in dataclasses.fields(options):
            if each.name not in _LOCAL_OPTIONS:
                settings.append((f"the option {each.name}", stable(getattr(options, each.name))))
        return Spread(name, replication, Instances(count), tuple(settings))

    def arguments(
        self, args: Sequence[Any], kwargs: dict[str, Any], places: Places, keywords: Collection[str] = ()
    ) -> Arguments:
        """Check and return the arguments of a call.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            places: names of positional arguments, and positions of static ones.
            keywords: names of static keyword arguments.

        Raises:
            ArgumentError: a share that this instance's replicas cannot split.
        """
        names, static = places
        dynamic = [n for n in range(len(args)) if n not in static]
        arrays = {key: value for key, value in kwargs.items() if key not in keywords}
        operands = tuple(args[n] for n in dynamic), arrays
        leaves, tree = jax.tree.flatten(operands)
        settings = [(f"static argument {names[n]}", args[n]) for n in sorted(static)]
        settings += [(f"static argument {key}", kwargs[key]) for key in sorted(kwargs) if key not in arrays]
        key = tree, tuple(map(_form, leaves)), tuple(settings)
        if key not in self._kinds:
            self._kinds[key] = self._kind(operands, [names[n] for n in dynamic], settings)
        return Arguments(leaves, self._kinds[key], partial(_rebuilt, tree, dynamic, args, kwargs))

    def call(self, run: Callable[..., Any], arguments: Arguments) -> Any:
        """Return this instance's results of a computation of all instances, `run`, that all make together.

        Raises:
            ArgumentError: on all instances: arguments or settings differ, or one has ended.
        """
        leaves, kind, rebuilt = arguments
        again = [self._last_result(x, dim) for x, dim in zip(leaves, kind.dims, strict=True)]
        placed = list(zip(kind.places, leaves, kind.dims, again, strict=True))
        all_args, all_kwargs = rebuilt([old.of_all if old else _to_all(x, dim) for _, x, dim, old in placed])
        unsplit = [(place, x, old) for place, x, dim, old in placed if dim is None]
        marks = ((place, f"result {old.number} of the last call" if old else _digest(x)) for place, x, old in unsplit)
        # One process may give the results of the last call, another copies of them: then their values decide.
        values = ((f"the values of {place}", _digest(x)) for place, x, _ in unsplit)
        agree(self.name, (*kind.equal, *marks), _ARGUMENTS, lambda: (*kind.equal, *values))
        with naming_lost(self.name):
            results = run(*all_args, **all_kwargs)
            local = to_local(results)
        # Kept while the user keeps them: in the next call they need no checksum, and no new array of all instances.
        self._last_results = {}
        for number, (of_all, x) in enumerate(zip(jax.tree.leaves(results), jax.tree.leaves(local), strict=True)):
            if isinstance(x, jax.Array) and of_all.is_fully_replicated:
                forget = partial(_forget, self._last_results, id(x))
                self._last_results[id(x)] = _Result(ref(x, forget), number, of_all)
        return local

    def _last_result(self, x: Any, dim: int | None) -> _Result | None:
        """Return the result of the last call that an argument is, if both are equal on all instances."""
        result = self._last_results.get(id(x)) if dim is None else None
        return result if result is not None and result.local() is x else None

    def avals(self, arguments: Arguments) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a trace: shapes and dtypes of all instances, from those of this one."""
        return arguments.rebuilt(map(self._aval_of_all, arguments.leaves, arguments.kind.dims))

    def _kind(self, operands: Any, names: Sequence[str], settings: Sequence[tuple[str, Any]]) -> _Kind:
        """Check this instance's arguments, and return their places, dimensions and texts that must be equal on all."""
        leaves, tree = jax.tree.flatten(operands)
        places_and_dims = leaf_dims(self.name, self.replication.in_specs, operands, names)
        num_local = self.instances.count_local(self.replication.replicas)
        for x, (place, dim) in zip(leaves, places_and_dims, strict=True):
            size = 0 if dim is None or dim >= jnp.ndim(x) else jnp.shape(x)[dim]
            if size % num_local:
                raise ArgumentValueError(
                    f"this instance's share of argument {place} cannot be split over its {num_local} replicas",
                    expected=f"a multiple of {num_local} in dimension {dim}",
                    got=describe(x),
                    hint=f"a share of {-(-size // num_local) * num_local}",
                )
        places, dims = (tuple(each) for each in zip(*places_and_dims, strict=True)) if leaves else ((), ())
        equal = (
            *zip(places, map(describe, leaves), strict=True),
            *((place, stable(value)) for place, value in settings),
            ("the structure of the arguments", stable(tree)),
            *self.settings,
        )
        return _Kind(places, dims, equal)

    def local_avals(
        self, avals: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]
    ) -> tuple[Any, ...]:
        """Return shapes and dtypes of this instance's shares of arguments, from those of all instances."""
        dims = leaf_dims(self.name, self.replication.in_specs, (args, kwargs), names)
        return tuple(self._share(aval, dim) for aval, (_, dim) in zip(avals, dims, strict=True))

    def local_results(self, results: Any) -> Any:
        """Return shapes and dtypes of this instance's shares of results, from a tree of those of all instances."""
        dims = split_dims(f"out_specs of {self.name}", self.replication.out_specs, results)
        leaves, tree = jax.tree.flatten(results)
        return jax.tree.unflatten(tree, map(self._share, leaves, dims))

    def _share(self, aval: Any, dim: int | None) -> Any:
        count = self.instances.count
        return aval.update(shape=tuple(n // count if d == dim else n for d, n in enumerate(aval.shape)))

    def _aval_of_all(self, x: Any, dim: int | None) -> Any:
        aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
        shape = global_shape(aval.shape, dim, self.instances.count)
        of_all = jax.core.ShapedArray(shape, aval.dtype, weak_type=aval.weak_type)
        return on_host_if(of_all, is_on_host(aval))

    def evaluate(self, *operands: Any, jaxpr: ClosedJaxpr, in_dims: Dims, out_dims: Dims, **params: Any) -> Any:
        """Compute all replicas in plain JAX on operands of all instances, see `replicated_primitive`."""
        check_same_program(self.name, jaxpr)
        local = partial(evaluate, jaxpr=jaxpr, in_dims=in_dims, out_dims=out_dims, instances=self.instances, **params)
        return list(over_instances(local, in_dims, out_dims)(*operands))


def _forget(results: dict[int, _Result], key: int, _: object) -> None:
    """Drop a result that the user has dropped."""
    results.pop(key, None)


def check_same_program(name: str, jaxpr: ClosedJaxpr) -> None:
    """Wait until every instance has compiled a function, before the first runs it; refuse different programs on all."""
    equations = [(f"equation {n}", text) for n, text in enumerate(_equations(jaxpr))]
    constants = [(f"value {n} that it closes over", _digest(value)) for n, value in enumerate(jaxpr.consts)]
    count = [("the number of equations", str(len(equations)))]
    agree(f"{name}, compiled", [*constants, *equations, *count], _PROGRAMS)


def _equations(jaxpr: ClosedJaxpr | Any) -> Iterator[str]:
    """Yield a description of each equation, followed by those of the jaxprs inside it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        numbers = ", ".join(str(atom.val) for atom in eqn.invars if isinstance(atom, Literal))
        yield f"{eqn.primitive.name} {numbers} -> {', '.join(var.aval.str_short() for var in eqn.outvars)}"
        for inner in jaxprs_in_params(eqn.params):
            yield from _equations(inner)


def _rebuilt(
    tree: Any, dynamic: Sequence[int], args: Any, kwargs: Any, leaves: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with other leaves in the place of those that are not static."""
    positional, named = jax.tree.unflatten(tree, leaves)
    by_position = dict(zip(dynamic, positional, strict=True))
    return [by_position.get(n, value) for n, value in enumerate(args)], {**kwargs, **named}


def _to_all(x: Any, dim: int | None) -> Any:
    """Return an argument as array of all instances; Python numbers and float0 are unchanged."""
    if not isinstance(x, jax.Array):
        is_number = isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic)
        if is_number or is_float0(jax.typeof(x)):
            return x
        x = jnp.asarray(x)
    of_all = to_all(x, dim)
    return with_weak_type(of_all, True) if getattr(x, "weak_type", False) else of_all  # keys have no weak_type


def _form(x: Any) -> Any:
    """Return the properties of an argument that its description and its split depend on."""
    return (x.shape, x.dtype, getattr(x, "weak_type", False)) if isinstance(x, jax.Array) else describe(x)


def _digest(x: Any) -> str:
    """Return a text of an array's values that is equal for equal bits."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    values = np.asarray(x)
    if values.size == 1:
        return str(values.item())
    return f"checksum {zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data):08x}"
