"""Serial parts: the largest values of a program, computed in parts one after the other, so that one part is in memory.

    logits = x @ table.T      →   a loop over parts of x, each with the loss and the gradients of its own logits
    loss, gradients

Input: a jaxpr, which of its arguments vary between micro-batches, a number of parts. Output: an equal jaxpr in which
one loop has the equations around the largest value: those that compute values of its index space, or read them, and
those between. They are split along a dimension of what they read by the pass `partition`, as a step is into
micro-batches: results are rows, or sums over parts, such as the gradient of a table.
Idea: serialised matrix products of PopART (docs.graphcore.ai, "Serialising matrix multiplications"), which divide one
operation; here its readers are in the loop too.

Limits: one loop. A value that its readers need whole, such as a softmax along the dimension, is not split along it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var, eval_equation, eval_jaxpr, part_of, source_of
from ipujax.lowering.jaxpr import value_bytes, variables, with_inner
from ipujax.lowering.partition import tracing_without_mesh
from ipujax.lowering.primitives import record_of
from ipujax.plan_search.accumulation import SplitStep, along, split_along
from ipujax.runtime.errors import ArgumentError, IpuError
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import wide_dtype

_LEAST_SHARE = 1 / 4  # of the bytes of the largest value that has a region, which are worth a loop; assumed
_PARTS_IN_MEMORY = 16  # of a large value, as its readers have several of its size; of an IPU's memory, assumed


@dataclass(frozen=True, slots=True)
class Region:
    """The equations around a large value.

    Args:
        before: equations that are computed before them.
        eqns: the equations.
        after: all others.
        inputs: values that they read from outside.
        results: values that are read outside.
        shape: dimensions of the large value.
        num_bytes: its bytes.
    """

    before: tuple[JaxprEqn, ...]
    eqns: tuple[JaxprEqn, ...]
    after: tuple[JaxprEqn, ...]
    inputs: tuple[Var, ...]
    results: tuple[Var, ...]
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LargeValue:
    """The largest value of a micro-batch that can be computed in parts.

    Args:
        row_bytes: its bytes for each row of the micro-batch.
        most_parts: most parts that are tried.
    """

    row_bytes: float = 0.0
    most_parts: int = 1

    def parts(self, rows: int, shards: int, target: Target) -> int:
        """Return the parts of a micro-batch of so many rows, on IPUs of so many shards: a power of two."""
        part_bytes = target.tiles_per_ipu * target.bytes_per_tile / _PARTS_IN_MEMORY
        needed = ceil(self.row_bytes * rows / shards / part_bytes)
        return min(self.most_parts, 1 << max(0, needed - 1).bit_length())


def large_value(jaxpr: ClosedJaxpr, varies: Sequence[bool], rows: int) -> LargeValue:
    """Return the largest value of a micro-batch of so many rows that can be computed in parts."""
    choice = next(_splits(jaxpr, varies, 2), None)
    if choice is None:
        return LargeValue()
    region, split = choice
    divided = [(v.aval.shape, dim) for v, dim in zip(region.inputs, split.in_dims, strict=True) if dim is not None]  # type: ignore[attr-defined]
    # The first dimension may be that of the rows, of which another plan has one.
    sizes = [shape[dim] if dim else max(1, shape[dim] // rows) for shape, dim in divided]
    size = gcd(*sizes)
    return LargeValue(region.num_bytes / rows, size & -size)


def in_parts(jaxpr: ClosedJaxpr, varies: Sequence[bool], parts: int) -> ClosedJaxpr:
    """Return a program with its largest value in parts.

    Args:
        jaxpr: the program, without calls and constants.
        varies: for each argument whether it is of the batch.
        parts: number of parts; the program as it is for one.

    Raises:
        ArgumentError: no large value divides into so many parts.
    """
    if parts == 1:
        return jaxpr
    choice = next(_splits(jaxpr, varies, parts), None)
    if choice is None:
        problem = f"no large value of this step can be computed in {parts} parts, one after the other"
        raise ArgumentError(problem, expected="rows that are divided, whose results are rows or sums", hint="serial=1")
    region, split = choice
    body = jaxpr.jaxpr
    defined = {v for eqn in region.before for v in eqn.outvars}
    read = dict.fromkeys(v for atoms in (*(eqn.invars for eqn in region.after), body.outvars) for v in variables(atoms))
    read_later = [v for v in read if v in defined]
    before = part_of(body, body.invars, [*region.inputs, *read_later], list(region.before))
    after = part_of(body, [*body.invars, *read_later, *region.results], body.outvars, list(region.after))

    def program(*arrays: Any) -> Any:
        values = _evaluated(before, arrays)
        inputs, passed_on = values[: len(region.inputs)], values[len(region.inputs) :]
        return _evaluated(after, [*arrays, *passed_on, *_loop(split, inputs, parts)])

    return _traced(program, jaxpr)


def _traced(program: Callable[..., Any], jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr of a program with the inputs of another, without a mesh in the types of its values."""
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in jaxpr.in_avals]
    with tracing_without_mesh():
        return jax.make_jaxpr(program)(*avals)


def _evaluated(jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Results of a program, whose values may have the mesh of micro-batches in their types, without it."""
    return eval_jaxpr(jaxpr, operands, _results, _itself)


def _results(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    # Types of values inside a loop, and of some parameters, have the mesh too.
    inner = with_inner(eqn, lambda body: _traced(lambda *arrays: _evaluated(body, arrays), body))
    params = {name: None if isinstance(value, NamedSharding) else value for name, value in inner.params.items()}
    with source_of(eqn):  # by which equations of the backward pass are known
        return eval_equation(inner.replace(params=params), *operands)


def _itself(x: Any) -> Any:
    return x


def _loop(split: SplitStep, inputs: Sequence[Any], parts: int) -> list[Any]:
    """Results of a region, whose parts are computed in a loop."""
    stacks = {n: _stacked(inputs[n], dim, parts) for n, dim in enumerate(split.in_dims) if dim is not None}
    avals = split.micro_batch.out_avals
    of_sums = [aval for aval, flag in zip(avals, split.is_sum, strict=True) if flag]
    sums = [jnp.zeros(aval.shape, _sum_dtype(aval.dtype)) for aval in of_sums]

    def part(totals: list[Any], number_and_slices: tuple[Any, dict[int, Any]]) -> tuple[list[Any], list[Any]]:
        """Compute a part from its slices of the divided inputs; sums are carried, all else comes out as rows."""
        number, slices = number_and_slices
        operands = [number, *(slices.get(n, x) for n, x in enumerate(inputs))]
        results = _with_totals(split, operands, totals)
        return (
            [x for x, flag in zip(results, split.is_sum, strict=True) if flag],
            [x for x, flag in zip(results, split.is_sum, strict=True) if not flag],
        )

    sums, rows = lax.scan(part, sums, (jnp.arange(parts, dtype=jnp.int32), stacks))
    remaining_sums = iter([x.astype(aval.dtype) for x, aval in zip(sums, of_sums, strict=True)])
    remaining_rows = iter(rows)
    handed = [next(remaining_sums) if dim is None else _unstacked(next(remaining_rows), dim) for dim in split.out_dims]
    return _evaluated(split.update, [*inputs, *handed])


def _with_totals(split: SplitStep, operands: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
    """Results of a part, terms added to the totals of the parts before it.

    A term, as the gradient of a table, is added as soon as it is computed: it is not in memory beside what follows.
    """
    body = split.micro_batch.jaxpr
    of_sums = [atom for atom, flag in zip(body.outvars, split.is_sum, strict=True) if flag]
    totals = dict(zip(variables(of_sums), carry, strict=True))
    added: dict[Var, Any] = {}

    def results_of(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        results = _results(eqn, values)
        for var, term in zip(eqn.outvars, results, strict=True):
            if var in totals:
                added[var] = totals[var] + term.astype(totals[var].dtype)
        return results

    results = eval_jaxpr(split.micro_batch, operands, results_of, _itself)
    return [added.get(v, x) if isinstance(v, Var) else x for v, x in zip(body.outvars, results, strict=True)]


def _sum_dtype(dtype: Any) -> Any:
    # A product adds halves in single precision too.
    return wide_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _stacked(x: Any, dim: int, parts: int) -> Any:
    """An array as a stack of parts of one dimension."""
    return jnp.moveaxis(x.reshape(*x.shape[:dim], parts, -1, *x.shape[dim + 1 :]), dim, 0)


def _unstacked(stack: Any, dim: int) -> Any:
    x = jnp.moveaxis(stack, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _splits(jaxpr: ClosedJaxpr, varies: Sequence[bool], parts: int) -> Iterator[tuple[Region, SplitStep]]:
    """Yield regions, that of the largest value first, each with the first split that makes this value smaller."""
    body = jaxpr.jaxpr
    varying = _varying(body, varies)
    for region in _regions(body, varying):
        inner = part_of(body, list(region.inputs), list(region.results), list(region.eqns))
        for n, v in enumerate(region.inputs):
            # Of the dimensions the last first: the first are those of a batch, which IPUs may share.
            shape = v.aval.shape if v in varying else ()  # type: ignore[attr-defined]
            for dim in reversed([dim for dim, size in enumerate(shape) if size > 1 and size % parts == 0]):
                specs = [
                    along(dim) if m == n else None if u in varying else PartitionSpec()
                    for m, u in enumerate(region.inputs)
                ]
                try:
                    split = split_along(inner, specs, parts)
                except IpuError:
                    continue
                if _is_smaller(split, region, parts):
                    yield region, split
                    return


def _is_smaller(split: SplitStep, region: Region, parts: int) -> bool:
    """Return True if a part has a part of the large value, and nothing of its whole shape."""
    sizes = [v.aval.shape for eqn in split.micro_batch.jaxpr.eqns for v in eqn.outvars]
    return region.shape not in sizes and prod(region.shape) // parts in map(prod, sizes)


def _varying(body: Jaxpr, varies: Sequence[bool]) -> set[Var]:
    """Values that are not the same for all micro-batches."""
    varying = {v for v, flag in zip(body.invars, varies, strict=True) if flag}
    for eqn in body.eqns:
        if not varying.isdisjoint(variables(eqn.invars)):
            varying.update(eqn.outvars)
    return varying


def _regions(body: Jaxpr, varying: set[Var]) -> Iterator[Region]:
    """Yield the regions of the largest values that vary, each value in one of them at most.

    Neither values that loops make or read, as the gradients of a stack of layers, nor values that are read outside of
    their region, as the gradient of a table, have one, whatever their size: they are in memory as a whole.
    """
    values = sorted((v for eqn in body.eqns for v in eqn.outvars if v in varying), key=lambda v: -value_bytes(v.aval))
    searched_values: set[Var] = set()
    largest_bytes = 0
    for value in values:
        if value in searched_values or value_bytes(value.aval) < _LEAST_SHARE * largest_bytes:
            continue
        space = _index_space(body, value)
        searched_values |= space
        region = _around(body, value, space)
        if region is None or not region.results:  # nothing reads what equations without results compute
            continue
        largest_bytes = max(largest_bytes, region.num_bytes)
        if space.isdisjoint(region.results):
            yield region


def _index_space(body: Jaxpr, value: Var) -> set[Var]:
    """Values that split together with a value: of as many elements, and connected with it by equations.

    Products end the space: behind one, values have other dimensions.
    """
    size = prod(value.aval.shape)  # type: ignore[attr-defined]
    space = {value}
    while True:
        count = len(space)
        for eqn in body.eqns:
            atoms = variables([*eqn.invars, *eqn.outvars])
            if record_of(eqn).cost not in ("product", "body") and not space.isdisjoint(atoms):
                space.update(v for v in atoms if prod(v.aval.shape) == size)  # type: ignore[attr-defined]
        if len(space) == count:
            return space


def _around(body: Jaxpr, value: Var, space: set[Var]) -> Region | None:
    """The region of an index space; None if a loop is in it."""
    has_space = [not space.isdisjoint(variables([*eqn.invars, *eqn.outvars])) for eqn in body.eqns]
    # Values that it reads, and that read it: an equation with both is between.
    descends, leads = set[Var](), set[Var]()
    follows = list[bool]()
    for eqn, flag in zip(body.eqns, has_space, strict=True):
        follows.append(not descends.isdisjoint(variables(eqn.invars)))
        if flag or follows[-1]:
            descends.update(eqn.outvars)
    is_inside = [False] * len(body.eqns)
    for n, eqn in reversed(list(enumerate(body.eqns))):
        is_inside[n] = has_space[n] or (follows[n] and not leads.isdisjoint(eqn.outvars))
        if is_inside[n] or not leads.isdisjoint(eqn.outvars):
            leads.update(variables(eqn.invars))
    eqns = tuple(eqn for eqn, flag in zip(body.eqns, is_inside, strict=True) if flag)
    if any(record_of(eqn).cost == "body" for eqn in eqns):
        return None
    defined = {v for eqn in eqns for v in eqn.outvars}
    outside = [(eqn, n) for n, eqn in enumerate(body.eqns) if not is_inside[n]]
    read = {v for atoms in (*(eqn.invars for eqn, _ in outside), body.outvars) for v in variables(atoms)}
    return Region(
        tuple(eqn for eqn, n in outside if not follows[n]),
        eqns,
        tuple(eqn for eqn, n in outside if follows[n]),
        tuple(dict.fromkeys(v for eqn in eqns for v in variables(eqn.invars) if v not in defined)),
        tuple(v for eqn in eqns for v in eqn.outvars if v in read),
        tuple(value.aval.shape),  # type: ignore[attr-defined]
        value_bytes(value.aval),
    )
