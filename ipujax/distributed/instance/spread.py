"""A function of several replicas among instances: each calls it with its own share, and gets its own share back.

Input: the arguments of one instance's call. Output: the same as arrays of all instances, for one computation that all
start together, and what must be equal on all before they do: at each call shapes and checksums of the values of what
is not split, at the first call of each kind also the program.

A call reads all values that are not split once for their checksums, also those that the last call returned: an
instance cannot know whether the others pass on the same array or a copy. Limits: a checksum has 32 bits. Instances of
one run must be on machines that compute alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.calls import Places, Replication, leaf_dims, split_dims
from ipujax.distributed.instance.membership import Facts, check_joined, meet, membership, stable
from ipujax.distributed.instance.mesh import over_instances, to_all
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
from ipujax.runtime.signatures import describe

_ARGUMENTS = (
    "each instance gives its own equal share of what is split, and the same of what is not: "
    "params = ipu.distributed.broadcast(params) gives all instances what instance 0 has"
)
_PROGRAMS = "the function must be the same on all instances: it may not ask which one it is on"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Weak:
    """An array that gives way to the other operand's dtype, which arrays of several processes cannot say."""

    array: jax.Array


@dataclass(frozen=True, slots=True)
class Operands:
    """The arguments of a call.

    Args:
        args: positional arguments as arrays of all instances; static ones as they are.
        kwargs: keyword arguments, likewise.
        facts: what must be equal on all instances at each call.
        same: the arrays of this instance that must be equal on all, by place.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    facts: Facts
    same: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What calls with arguments of the same shapes have in common.

    Args:
        places: what the user would write for each leaf.
        dims: the dimension of each that is split, None where it is not.
        facts: see `Operands`.
    """

    places: tuple[str, ...]
    dims: Dims
    facts: Facts


@dataclass(eq=False, slots=True)
class Spread:
    """Where the replicas of one function are.

    Args:
        name: of the function.
        replication: how it is replicated.
        instances: how many instances share the replicas.
    """

    name: str
    replication: Replication
    instances: Instances
    _kinds: dict[Any, _Kind] = field(default_factory=dict)

    @staticmethod
    def of(name: str, replication: Replication | None) -> Spread | None:
        """How a function is spread; None if all of it is here: it has one replica, or this process is alone.

        Raises:
            ArgumentError: replicas that instances cannot share equally.
        """
        count = membership().num_instances
        if replication is None or replication.replicas == 1 or count == 1:
            return None
        if replication.replicas % count:
            raise ArgumentError(
                f"{replication.replicas} replicas of {name} cannot be shared equally by {count} instances",
                expected=f"a multiple of {count}",
                got=replication.replicas,
                hint="replicas=ipu.distributed.num_replicas()",
            )
        return Spread(name, replication, Instances(count))

    def operands(
        self, args: Sequence[Any], kwargs: dict[str, Any], places: Places, keywords: Collection[str], shapes_only: bool
    ) -> Operands:
        """Takes the arguments of one instance's call.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            places: names of positional arguments, and the numbers of static ones.
            keywords: names of static keyword arguments.
            shapes_only: give shapes and dtypes instead of arrays.

        Raises:
            ArgumentError: for shares that replicas here cannot split.
        """
        names, static = places
        moved = [n for n in range(len(args)) if n not in static]
        arrays = {key: value for key, value in kwargs.items() if key not in keywords}
        given = tuple(args[n] for n in moved), arrays
        leaves, tree = jax.tree.flatten(given)
        settings = [(f"static argument {names[n]}", args[n]) for n in sorted(static)]
        settings += [(f"static argument {key}", kwargs[key]) for key in sorted(kwargs) if key not in arrays]
        key = tree, tuple(map(_form, leaves)), tuple(settings)
        if key not in self._kinds:
            self._kinds[key] = self._kind(given, [names[n] for n in moved], settings)
        kind = self._kinds[key]
        convert = self._struct if shapes_only else _to_all
        new = list(args)
        whole, more = jax.tree.unflatten(tree, map(convert, leaves, kind.dims))
        for n, value in zip(moved, whole, strict=True):
            new[n] = value
        same = tuple((place, x) for x, place, dim in zip(leaves, kind.places, kind.dims, strict=True) if dim is None)
        return Operands(tuple(new), {**kwargs, **more}, kind.facts, same)

    def _kind(
        self,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        names: Sequence[str],
        settings: Sequence[tuple[str, Any]],
    ) -> _Kind:
        """What is known of arguments from their shapes."""
        leaves, tree = jax.tree.flatten(given)
        found = leaf_dims(self.name, self.replication.in_specs, given, names)
        for x, (place, dim) in zip(leaves, found, strict=True):
            self._check_share(place, x, dim)
        facts = Facts.of(
            (
                *((place, describe(x)) for x, (place, _) in zip(leaves, found, strict=True)),
                *((place, stable(value)) for place, value in settings),
                ("the structure of the arguments", stable(tree)),
            )
        )
        return _Kind(tuple(place for place, _ in found), tuple(dim for _, dim in found), facts)

    def meet(self, operands: Operands) -> None:
        """Waits until every instance is about to call the function with such arguments.

        Raises:
            ArgumentError: on all instances, if they disagree.
        """
        check_joined(self.name)
        values = ((f"the values of {place}", _digest(x)) for place, x in operands.same)
        meet(self.name, operands.facts.and_more(values), _ARGUMENTS)

    def local_avals(
        self, avals: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]
    ) -> tuple[Any, ...]:
        """Shapes and dtypes of this instance's shares, from those of all."""
        found = leaf_dims(self.name, self.replication.in_specs, (args, kwargs), names)
        return tuple(self._share(aval, dim) for aval, (_, dim) in zip(avals, found, strict=True))

    def local_results(self, results: Any) -> Any:
        """Shapes and dtypes of what one instance gets, from a tree of those of all."""
        dims = split_dims(f"out_specs of {self.name}", self.replication.out_specs, results)
        leaves, tree = jax.tree.flatten(results)
        return jax.tree.unflatten(tree, map(self._share, leaves, dims))

    def _share(self, aval: Any, dim: int | None) -> Any:
        count = self.instances.count
        return aval.update(shape=tuple(n // count if d == dim else n for d, n in enumerate(aval.shape)))

    def evaluate(self, *operands: Any, jaxpr: ClosedJaxpr, in_dims: Dims, out_dims: Dims, **params: Any) -> Any:
        """The results of all replicas in plain JAX, of operands of all instances: see `replicated_primitive`."""
        check_same_program(self.name, jaxpr)
        here = partial(evaluate, jaxpr=jaxpr, in_dims=in_dims, out_dims=out_dims, instances=self.instances, **params)
        return list(over_instances(here, in_dims, out_dims)(*operands))

    def _check_share(self, place: str, x: Any, dim: int | None) -> None:
        shape, here = jnp.shape(x), self.instances.count_local(self.replication.replicas)
        if dim is not None and dim < len(shape) and shape[dim] % here:
            raise ArgumentValueError(
                f"this instance's share of argument {place} cannot be split over the {here} replicas it holds",
                expected=f"a multiple of {here} in dimension {dim}",
                got=describe(x),
                hint=f"a share of {-(-shape[dim] // here) * here}",
            )

    def _struct(self, x: Any, dim: int | None) -> Any:
        aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
        whole = jax.core.ShapedArray(
            global_shape(aval.shape, dim, self.instances.count), aval.dtype, weak_type=aval.weak_type
        )
        return on_host_if(whole, is_on_host(aval))


def check_same_program(name: str, jaxpr: ClosedJaxpr) -> None:
    """Waits until every instance has compiled a function, before the first of them runs it.

    Raises:
        ArgumentError: on all instances, if they have not compiled the same.
    """
    equations = [(f"equation {n}", text) for n, text in enumerate(_equations(jaxpr))]
    constants = [(f"value {n} that it closes over", _digest(value)) for n, value in enumerate(jaxpr.consts)]
    count = [("the number of equations", str(len(equations)))]
    meet(f"{name}, compiled", Facts.of([*constants, *equations, *count]), _PROGRAMS)


def _equations(jaxpr: ClosedJaxpr | Any) -> Iterator[str]:
    """What each equation computes and gives, those of jaxprs inside it after it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        numbers = ", ".join(str(atom.val) for atom in eqn.invars if isinstance(atom, Literal))
        yield f"{eqn.primitive.name} {numbers} -> {', '.join(var.aval.str_short() for var in eqn.outvars)}"
        for inner in jaxprs_in_params(eqn.params):
            yield from _equations(inner)


def received(tree: Any) -> Any:
    """Arguments as they come out of `Operands`, in a trace: weakly typed where they were."""
    return jax.tree.map(
        lambda x: with_weak_type(x.array, True) if isinstance(x, _Weak) else x,
        tree,
        is_leaf=lambda x: isinstance(x, _Weak),
    )


def _to_all(x: Any, dim: int | None) -> Any:
    """An argument as array of all instances; numbers of Python's, and what is no array, as they are."""
    if isinstance(x, jax.Array):
        array = x
    elif is_float0(jax.typeof(x)) or (isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic)):
        return x
    else:
        array = jnp.asarray(x)
    whole = to_all(array, dim)
    return _Weak(whole) if getattr(array, "weak_type", False) else whole  # keys have none


def _form(x: Any) -> Any:
    """What facts about an argument depend on."""
    return (x.shape, x.dtype, getattr(x, "weak_type", False)) if isinstance(x, jax.Array) else describe(x)


def _digest(x: Any) -> str:
    """The values of an array in few words: equal for equal bits."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    held = np.asarray(x)
    if held.size == 1:
        return str(held.item())
    return f"checksum {zlib.crc32(np.ascontiguousarray(held).view(np.uint8).data):08x}"
