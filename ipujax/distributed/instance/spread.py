"""Distribution of a function's replicas over instances: each calls it with its share of arguments and results.

Input: the arguments of one instance's call. Output: arrays of all instances, for one computation that all start
together. Before, instances compare facts that must be equal on all: at each call shapes, and checksums of values that
are not split; at the first call with new shapes also the program.

A call reads all values that are not split once for their checksums, also results of the last call: an instance cannot
know whether the others pass the same array or a copy. Limits: a checksum has 32 bits. Machines of all instances must
compute equal bits.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Weak:
    """A weakly typed array: arrays of several processes have no weak types."""

    array: jax.Array


@dataclass(frozen=True, slots=True)
class Operands:
    """Arguments of a call.

    Args:
        args: positional arguments as arrays of all instances; static ones unchanged.
        kwargs: keyword arguments, likewise.
        facts: (place, description) of what must be equal on all instances at each call.
        unsplit: (place, array) of arrays that must be equal on all instances.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    facts: tuple[tuple[str, str], ...]
    unsplit: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Properties of all calls with arguments of equal shapes.

    Args:
        places: Python expression of each leaf.
        dims: dimension of each leaf that is split, None where it is not.
        facts: see `Operands`.
    """

    places: tuple[str, ...]
    dims: Dims
    facts: tuple[tuple[str, str], ...]


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
    _equal: dict[int, tuple[ref[jax.Array], int]] = field(default_factory=dict)

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
        settings = ("the number of replicas", str(replication.replicas)), ("the device", stable(device))
        named = ((f"the option {key}", stable(value)) for key, value in _fields(options) if key not in _LOCAL_OPTIONS)
        return Spread(name, replication, Instances(count), (*settings, *named))

    def operands(
        self, args: Sequence[Any], kwargs: dict[str, Any], places: Places, keywords: Collection[str], shapes_only: bool
    ) -> Operands:
        """Return the arguments of one instance's call as arrays of all instances.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            places: names of positional arguments, and positions of static ones.
            keywords: names of static keyword arguments.
            shapes_only: return shapes and dtypes instead of arrays.

        Raises:
            ArgumentError: a share that this instance's replicas cannot split.
        """
        names, static = places
        dynamic = [n for n in range(len(args)) if n not in static]
        arrays = {key: value for key, value in kwargs.items() if key not in keywords}
        operand_tree = tuple(args[n] for n in dynamic), arrays
        leaves, tree = jax.tree.flatten(operand_tree)
        settings = [(f"static argument {names[n]}", args[n]) for n in sorted(static)]
        settings += [(f"static argument {key}", kwargs[key]) for key in sorted(kwargs) if key not in arrays]
        key = tree, tuple(map(_form, leaves)), tuple(settings)
        if key not in self._kinds:
            self._kinds[key] = self._kind(operand_tree, [names[n] for n in dynamic], settings)
        kind = self._kinds[key]
        convert = self._global_shape if shapes_only else _to_all
        global_args = list(args)
        positional, named = jax.tree.unflatten(tree, map(convert, leaves, kind.dims))
        for n, value in zip(dynamic, positional, strict=True):
            global_args[n] = value
        unsplit = tuple((place, x) for x, place, dim in zip(leaves, kind.places, kind.dims, strict=True) if dim is None)
        return Operands(tuple(global_args), {**kwargs, **named}, kind.facts, unsplit)

    def _kind(
        self,
        operand_tree: tuple[tuple[Any, ...], dict[str, Any]],
        names: Sequence[str],
        settings: Sequence[tuple[str, Any]],
    ) -> _Kind:
        """Check this instance's arguments, and return their places, dimensions and facts that must be equal on all."""
        leaves, tree = jax.tree.flatten(operand_tree)
        places_and_dims = leaf_dims(self.name, self.replication.in_specs, operand_tree, names)
        for x, (place, dim) in zip(leaves, places_and_dims, strict=True):
            self._check_share(place, x, dim)
        facts = (
            *((place, describe(x)) for x, (place, _) in zip(leaves, places_and_dims, strict=True)),
            *((place, stable(value)) for place, value in settings),
            ("the structure of the arguments", stable(tree)),
            *self.settings,
        )
        return _Kind(tuple(place for place, _ in places_and_dims), tuple(dim for _, dim in places_and_dims), facts)

    def call(self, run: Callable[..., Any], operands: Operands, *args: Any, **kwargs: Any) -> Any:
        """Return this instance's results of a call that all make together.

        Args:
            run: the computation of all instances, of `args` and `kwargs`.
            operands: arguments of this instance's call.
            args: positional arguments of `run`, arrays of all instances.
            kwargs: keyword arguments of `run`.

        Raises:
            ArgumentError: on all instances: facts about arguments differ, or one has ended.
        """
        facts = operands.facts
        marks = ((place, self._mark(x) or _digest(x)) for place, x in operands.unsplit)
        # One process may give the results of the last call, another copies of them: then their values decide.
        values = ((f"the values of {place}", _digest(x)) for place, x in operands.unsplit)
        agree(self.name, (*facts, *marks), _ARGUMENTS, lambda: (*facts, *values))
        with naming_lost(self.name):
            results = run(*args, **kwargs)
            local = to_local(results)
        pairs = zip(jax.tree.leaves(results), jax.tree.leaves(local), strict=True)
        arrays_kept = [x for whole, x in pairs if isinstance(x, jax.Array) and whole.is_fully_replicated]
        self._equal.clear()
        self._equal.update({id(x): (ref(x), n) for n, x in enumerate(arrays_kept)})
        return local

    def _mark(self, x: Any) -> str | None:
        """Return which result of the last call an argument is: those that are not split are equal on all instances."""
        result, number = self._equal.get(id(x), (None, 0))
        return f"result {number} of the last call" if result is not None and result() is x else None

    def local_avals(
        self, avals: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]
    ) -> tuple[Any, ...]:
        """Return shapes and dtypes of this instance's shares of arguments, from those of all instances."""
        places_and_dims = leaf_dims(self.name, self.replication.in_specs, (args, kwargs), names)
        return tuple(self._share(aval, dim) for aval, (_, dim) in zip(avals, places_and_dims, strict=True))

    def local_results(self, results: Any) -> Any:
        """Return shapes and dtypes of this instance's shares of results, from a tree of those of all instances."""
        dims = split_dims(f"out_specs of {self.name}", self.replication.out_specs, results)
        leaves, tree = jax.tree.flatten(results)
        return jax.tree.unflatten(tree, map(self._share, leaves, dims))

    def _share(self, aval: Any, dim: int | None) -> Any:
        count = self.instances.count
        return aval.update(shape=tuple(n // count if d == dim else n for d, n in enumerate(aval.shape)))

    def evaluate(self, *operands: Any, jaxpr: ClosedJaxpr, in_dims: Dims, out_dims: Dims, **params: Any) -> Any:
        """Compute all replicas in plain JAX on operands of all instances, see `replicated_primitive`."""
        check_same_program(self.name, jaxpr)
        local = partial(evaluate, jaxpr=jaxpr, in_dims=in_dims, out_dims=out_dims, instances=self.instances, **params)
        return list(over_instances(local, in_dims, out_dims)(*operands))

    def _check_share(self, place: str, x: Any, dim: int | None) -> None:
        shape = jnp.shape(x)
        num_local = self.instances.count_local(self.replication.replicas)
        if dim is not None and dim < len(shape) and shape[dim] % num_local:
            raise ArgumentValueError(
                f"this instance's share of argument {place} cannot be split over its {num_local} replicas",
                expected=f"a multiple of {num_local} in dimension {dim}",
                got=describe(x),
                hint=f"a share of {-(-shape[dim] // num_local) * num_local}",
            )

    def _global_shape(self, x: Any, dim: int | None) -> Any:
        aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
        global_aval = jax.core.ShapedArray(
            global_shape(aval.shape, dim, self.instances.count), aval.dtype, weak_type=aval.weak_type
        )
        return on_host_if(global_aval, is_on_host(aval))


def _fields(options: Options) -> Iterator[tuple[str, object]]:
    return ((each.name, getattr(options, each.name)) for each in dataclasses.fields(options))


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


def received(tree: Any) -> Any:
    """Return traced arguments of `Operands` with their weak types."""
    return jax.tree.map(
        lambda x: with_weak_type(x.array, True) if isinstance(x, _Weak) else x,
        tree,
        is_leaf=lambda x: isinstance(x, _Weak),
    )


def _to_all(x: Any, dim: int | None) -> Any:
    """Return an argument as array of all instances; Python numbers and float0 are unchanged."""
    if isinstance(x, jax.Array):
        array = x
    elif is_float0(jax.typeof(x)) or (isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic)):
        return x
    else:
        array = jnp.asarray(x)
    global_array = to_all(array, dim)
    return _Weak(global_array) if getattr(array, "weak_type", False) else global_array  # keys have no weak_type


def _form(x: Any) -> Any:
    """Return the properties of an argument that facts about it depend on."""
    return (x.shape, x.dtype, getattr(x, "weak_type", False)) if isinstance(x, jax.Array) else describe(x)


def _digest(x: Any) -> str:
    """Return a text of an array's values that is equal for equal bits."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    values = np.asarray(x)
    if values.size == 1:
        return str(values.item())
    return f"checksum {zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data):08x}"
