"""Replication settings of `ipu.jit`: number of replicas, and the split of arguments and results over them.

The function is that of one replica. `in_specs` is a pytree prefix of the positional arguments that are not static:
`PartitionSpec()` for arrays that are equal on all replicas, `PartitionSpec("replica")` to split along the first
dimension, `PartitionSpec(None, "replica")` along the second. Keyword arguments are equal on all. `out_specs` is a
prefix of the results. The axis is named "replica" unless `axis_name` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ipujax.arguments import whole_number
from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    is_float0,
    is_on_host,
    on_host_if,
    trace_over_axis,
    with_float0,
    without_float0,
)
from ipujax.lowering.jaxpr import axes_around, equations
from ipujax.lowering.refs import discharged_body, refuse_refs
from ipujax.lowering.replicas import AXIS, Dims, global_shape
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError, ArgumentNameError, ArgumentTypeError, ArgumentValueError, line_of
from ipujax.runtime.logs import Log
from ipujax.sharding import place_in_call

_LOG = Log("jit")
_PUBLIC_NAMES = {"psum": "psum or pmean"}  # both are one primitive
_SUMMED_GRADIENT = (
    "%s: a gradient passes through the %s at %s. It is the gradient of the sum of the losses of all %d replicas: %d"
    " times that of a loss that they all share. jax.shard_map inside ipu.jit, without replicas=, has the gradient of"
    " the loss"
)
Places = tuple[Sequence[str], Collection[int]]  # names of positional arguments, and the numbers of static ones


@dataclass(frozen=True, slots=True)
class Replication:
    """Replication of a function.

    Args:
        replicas: number of replicas.
        in_specs: prefix of the positional arguments that are not static; all `PartitionSpec()` when None.
        out_specs: prefix of the results; likewise.
        axis_name: name of the axis of replicas.
        warned: lines with collectives in gradients, of which the user has been warned.
    """

    replicas: int = 1
    in_specs: Any = None
    out_specs: Any = None
    axis_name: str = AXIS
    warned: set[str] = field(default_factory=set, compare=False, repr=False)

    @staticmethod
    def of(replicas: Any, in_specs: Any, out_specs: Any, axis_name: Any = None) -> Replication | None:
        """Check settings of `ipu.jit` and return them; None for a function without an axis of replicas."""
        axis_name = AXIS if axis_name is None else axis_name
        if not isinstance(axis_name, str) or not axis_name:
            raise ArgumentTypeError("axis_name of ipu.jit", expected="a string", got=repr(axis_name))
        if replicas is None:
            _refuse_axes_without_replicas(in_specs, out_specs, axis_name)
            replicas = 1
        replicas = whole_number("replicas of ipu.jit", replicas, 1)
        for name, spec in _all_specs(in_specs, out_specs):
            _check_spec(name, spec, axis_name)
        # One replica with specs has an axis all the same, over which collectives are the identity.
        is_plain = (replicas, in_specs, out_specs) == (1, None, None)
        return None if is_plain else Replication(replicas, in_specs, out_specs, axis_name)

    @property
    def settings(self) -> tuple[int, Any, Any, str]:
        """Replicas, specs and name of the axis."""
        return self.replicas, self.in_specs, self.out_specs, self.axis_name

    def apply(
        self,
        do: Callable[..., Any],
        fun: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        places: Places,
        name: str,
    ) -> Any:
        """Return the results of all replicas of a call.

        Args:
            do: function of operands and parameters of `replicated_p`: `replicated_p.bind` binds one equation,
                `evaluate` plain JAX operations.
            fun: function of one replica.
            args: positional arguments of all replicas.
            kwargs: keyword arguments.
            places: names of the positional arguments, and the positions of static ones.
            name: name of the function, for messages.

        Raises:
            ArgumentError: arguments or results that do not match their specs.
        """
        arguments, static = places
        dynamic = [n for n in range(len(args)) if n not in static]
        arrays = {key: value for key, value in kwargs.items() if _is_array_tree(value)}
        settings = {key: value for key, value in kwargs.items() if key not in arrays}
        operand_tree = tuple(args[n] for n in dynamic), arrays
        leaves, tree = jax.tree.flatten(operand_tree)
        places_and_dims = leaf_dims(name, self.in_specs, operand_tree, [arguments[n] for n in dynamic])
        dims = tuple(dim for _, dim in places_and_dims)
        who = f"{name} of {self.replicas} replicas"
        refuse_refs(who, "is given", leaves)
        # The function is traced for one replica's part; the equation around it has the whole arrays.
        shapes = [self._local(x, dim, place) for x, (place, dim) in zip(leaves, places_and_dims, strict=True)]

        def run_replica(*local: Any) -> Any:
            local_args, keywords = jax.tree.unflatten(tree, local)
            all_args = list(args)
            for n, value in zip(dynamic, local_args, strict=True):
                all_args[n] = value
            return fun(*all_args, **keywords, **settings)

        with explaining_axis_errors(self):
            jaxpr, results = trace_over_axis(run_replica, shapes, self.axis_name, self.replicas)
        self._refuse_axes_around(name, jaxpr)
        self._warn_of_gradients(name, jaxpr)
        jaxpr = discharged_body(jaxpr, who, {self.axis_name: self.replicas})
        out_dims = split_dims(f"out_specs of {name}", self.out_specs, results)
        for (path, aval), dim in zip(jax.tree.leaves_with_path(results), out_dims, strict=True):
            _check_rank(f"out_specs of {name}", f"result{jax.tree_util.keystr(path)}", aval, dim)
        # Constants become operands equal on all replicas: they may be tracers, which an equation cannot close over.
        body = jaxpr.jaxpr
        open_jaxpr = ClosedJaxpr(body.replace(constvars=[], invars=[*body.constvars, *body.invars]), ())
        with_data, positions = without_float0(open_jaxpr)
        operands = [*jaxpr.consts, *leaves]
        in_dims = (None,) * len(jaxpr.consts) + dims
        is_empty = [is_float0(aval) for aval in jaxpr.out_avals]
        outs = do(
            *[operands[n] for n in positions],
            jaxpr=with_data,
            replicas=self.replicas,
            in_dims=tuple(in_dims[n] for n in positions),
            out_dims=tuple(dim for dim, empty in zip(out_dims, is_empty, strict=True) if not empty),
            is_checked=False,
            axis_name=self.axis_name,
        )
        pairs = zip(jaxpr.out_avals, out_dims, strict=True)
        global_outs = with_float0(outs, is_empty, [global_shape(x.shape, dim, self.replicas) for x, dim in pairs])
        return jax.tree.unflatten(jax.tree.structure(results), global_outs)

    def _refuse_axes_around(self, name: str, jaxpr: ClosedJaxpr) -> None:
        """Refuse a function of replicas that reads an axis of a transformation around it, as `jax.vmap` has."""
        axes = axes_around(jaxpr.jaxpr) - {self.axis_name}
        if axes:
            lines = [source_line(eqn) for eqn in equations(jaxpr.jaxpr) if axes & axes_around(eqn)]
            raise ArgumentError(
                f"{name} of {self.replicas} replicas reads an axis of a transformation around it",
                where=lines[-1],  # outer equations, as calls, come first
                expected=f'"{self.axis_name}", the axis of its replicas',
                got=", ".join(map(repr, sorted(axes))),
                hint="pass what depends on that axis as an argument",
            )

    def _warn_of_gradients(self, name: str, jaxpr: ClosedJaxpr) -> None:
        """Warn, once for each line, of collectives that sum gradients of values that all replicas share."""
        if self.replicas == 1:
            return
        from ipujax.lowering.replicas import gradient_sums  # for functions of several replicas alone

        for collective, line in gradient_sums(jaxpr.jaxpr, self.axis_name):
            if line not in self.warned:
                self.warned.add(line)
                public_name = _PUBLIC_NAMES.get(collective, collective)
                _LOG.warning(_SUMMED_GRADIENT, name, public_name, line, self.replicas, self.replicas)

    def _local(self, x: Any, dim: int | None, place: str) -> Any:
        """Return the abstract value of one replica's part of an array."""
        aval = jax.typeof(x)
        _check_rank("in_specs", place, aval, dim)
        shape = list(aval.shape)
        if dim is not None:
            if shape[dim] % self.replicas:
                raise ArgumentValueError(
                    f"argument {place} cannot be split over {self.replicas} replicas",
                    expected=f"a multiple of {self.replicas} in dimension {dim}",
                    got=aval.str_short(),
                    hint=f"a batch of {-(-shape[dim] // self.replicas) * self.replicas}, or another number of replicas",
                )
            shape[dim] //= self.replicas
        local = jax.core.ShapedArray(tuple(shape), aval.dtype, weak_type=aval.weak_type)
        return on_host_if(local, is_on_host(aval))


def leaf_dims(
    name: str, in_specs: Any, operand_tree: tuple[tuple[Any, ...], dict[str, Any]], names: Sequence[str]
) -> list[tuple[str, int | None]]:
    """Return for each leaf of the arguments its Python expression, and the dimension that is split.

    Args:
        name: name of the function.
        in_specs: prefix of the positional arguments.
        operand_tree: positional arguments that are not static, and arrays among the keyword arguments.
        names: names of these positional arguments.

    Raises:
        ArgumentError: specs of another structure than the arguments.
    """
    args, arrays = operand_tree
    dims = split_dims(f"in_specs of {name}", in_specs, args) + (None,) * len(jax.tree.leaves(arrays))
    places = [place_in_call(names, path) for path, _ in jax.tree.leaves_with_path(operand_tree)]
    return list(zip(places, dims, strict=True))


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec)


def _is_array_tree(x: Any) -> bool:
    """Return whether a keyword argument is data to trace, not a setting."""
    leaves = jax.tree.leaves(x)
    return bool(leaves) and all(isinstance(leaf, jax.core.Tracer | jax.Array) for leaf in leaves)


def _all_specs(in_specs: Any, out_specs: Any) -> Iterator[tuple[str, Any]]:
    for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        yield from ((name, spec) for spec in jax.tree.leaves(specs, is_leaf=_is_spec))


def _refuse_axes_without_replicas(in_specs: Any, out_specs: Any, axis_name: str) -> None:
    if axis_name != AXIS:
        problem = "axis_name of ipu.jit names the axis of replicas, and replicas= is not given"
        raise ArgumentError(problem, expected="replicas=N", got=repr(axis_name))
    for name, spec in _all_specs(in_specs, out_specs):
        if isinstance(spec, PartitionSpec) and any(spec):
            problem = f"{name} of ipu.jit split over replicas, and replicas= is not given"
            raise ArgumentError(problem, expected="replicas=N, or PartitionSpec()", got=spec, hint="replicas=2")


def _check_spec(name: str, spec: Any, axis_name: str) -> None:
    """Refuse a spec that is no PartitionSpec, or splits by other than one axis, that of the replicas."""
    if spec is None:
        return
    if not isinstance(spec, PartitionSpec):
        hint = f"jax.sharding.PartitionSpec(), or PartitionSpec({axis_name!r})"
        raise ArgumentTypeError(f"{name} of ipu.jit", expected="a tree of PartitionSpec", got=repr(spec), hint=hint)
    axes = [axis for part in spec if part is not None for axis in ((part,) if isinstance(part, str) else part)]
    unknown = [axis for axis in axes if axis != axis_name]
    if unknown or len(axes) > 1:
        raise ArgumentError(
            f"{name} of ipu.jit name axes that do not exist" if unknown else f"{name} split twice",
            expected=f'"{axis_name}" once, or no axis',
            got=spec,
            hint=f"axis_name={unknown[0]!r}" if unknown == axes[:1] else None,  # the user may mean this name
        )


def split_dims(name: str, specs: Any, values: Any) -> Dims:
    """Return the dimension that each leaf is split along, or None; without specs all are `PartitionSpec()`."""
    # None among the values has no leaves, and no spec of its own.
    specs = jax.tree.map(lambda spec: PartitionSpec() if spec is None else spec, specs, is_leaf=_is_spec)
    # A list of specs for the tuple of arguments is common, and would be another structure.
    if isinstance(values, tuple) and isinstance(specs, list):
        specs = tuple(specs)
    try:
        full = jax.tree.broadcast(specs, values)
    except ValueError as error:
        raise ArgumentError(
            f"{name} do not match the structure of their arrays",
            expected=f"a prefix of {jax.tree.map(lambda _: '*', values)}, the arguments given by position"
            if name.startswith("in_")
            else f"a prefix of {jax.tree.map(lambda _: '*', values)}",
            got=specs,
            hint="one PartitionSpec for each argument or result, or for a subtree of it",
        ) from error
    return tuple(map(_dim, jax.tree.leaves(full)))


def _dim(spec: PartitionSpec) -> int | None:
    return next((dim for dim, part in enumerate(spec) if part is not None and part != ()), None)


def _check_rank(name: str, place: str, aval: Any, dim: int | None) -> None:
    if dim is not None and dim >= len(aval.shape):
        shape = f"{aval.dtype}{list(aval.shape)}"
        problem = f"{name} split dimension {dim} of {place}, which does not exist"
        raise ArgumentValueError(problem, expected=f"{dim + 1} dimensions or more", got=shape, hint="PartitionSpec()")


@contextmanager
def explaining_axis_errors(replication: Replication | None) -> Iterator[None]:
    """Replace JAX's errors about unknown axes and casts of varying types (`pcast`, `pvary`) during a trace."""
    try:
        yield
    except NameError as error:
        if "unbound axis name" not in str(error):  # a name that the user's code misspells
            raise
        raise _unknown_axis(error, replication) from error
    except AssertionError as error:
        if "ManualAxisType" not in str(error):
            raise
        raise ArgumentError(
            "a function of replicas cannot cast a value by jax.lax.pcast or pvary",
            where=line_of(error),
            expected="values whose type has no varying axes",
            hint="leave it out: it changes no number here, only under jax.shard_map",
        ) from error


def _unknown_axis(error: NameError, replication: Replication | None) -> ArgumentNameError:
    """Return the error for a collective over an axis that JAX does not know, with the names that there are."""
    name = str(error).partition("axis name: ")[2].partition(".")[0]
    if replication is None:
        hint = f"ipu.jit(..., replicas=N, axis_name={name!r}, in_specs=..., out_specs=...)"
    else:
        hint = f'jax.lax.psum(x, "{replication.axis_name}"), or ipu.jit(..., axis_name={name!r})'
    return ArgumentNameError(
        f"a collective over the axis {name!r}, which does not exist",
        where=line_of(error),
        expected=f'"{replication.axis_name}"' if replication else "an axis of jax.vmap or jax.shard_map",
        got=repr(name),
        hint=hint,
    )
