"""Resharding: collectives that bring a value from one spec to another, with their bytes and cycles.

Unreduced sums come first, as reduce-scatters where the wanted spec splits over the same axis, else as
one all-reduce. Then, as long as dimensions differ: an axis that moves to another dimension is an all-to-all; an axis
that splits further is a slice, without communication; other axes are gathered, those of a dimension at once. Blocks of
the same shapes on other devices are a permute.

Values stay unreduced where their only reader adds up the partial sums, or is unreduced too.

A value becomes an unreduced sum without communication: over an axis that splits it, the partial sum of a device is
its block amid zeros; over another one the first device has the value, others have zeros.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, Var
from ipujax.lowering.partition.specs import Axes, MeshAxes, Spec, local_shape, typed_spec
from ipujax.lowering.primitives import record_of
from ipujax.runtime.target import Target

Kind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "slice", "amid_zeros", "first_alone"
]
_WITHOUT_COMMUNICATION = frozenset({"slice", "amid_zeros", "first_alone"})
ADDITIONS = frozenset({"add", "add_any"})  # of partial sums, if both operands are


@dataclass(frozen=True, slots=True)
class Step:
    """One collective, or a change of a device's own block.

    Args:
        kind: its kind.
        axes: mesh axes whose devices communicate, major to minor.
        dim: dimension that is gathered, scattered, sliced or concatenated along; −1 for none.
        split_dim: dimension that an all-to-all splits, −1 for others.
        pairs: (source, destination) ranks along the axes of a permute.
    """

    kind: Kind
    axes: Axes
    dim: int = -1
    split_dim: int = -1
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def communicates(self) -> bool:
        """True for collectives."""
        return self.kind not in _WITHOUT_COMMUNICATION


def steps(before: Spec, after: Spec, mesh: MeshAxes) -> tuple[Step, ...]:
    """Collectives from one spec to another; sums over axes that both have unreduced stay."""
    return tuple(transition.step for transition in transitions(before, after, mesh))


def reshard(x: jax.Array, before: Spec, after: Spec, mesh: MeshAxes) -> jax.Array:
    """The local block of a value under another spec, from that under `before`."""
    for step in steps(before, after, mesh):
        x = _APPLY[step.kind](x, step, mesh)
    return x


def resharding_cycles(aval: Any, before: Spec, after: Spec, mesh: MeshAxes, target: Target) -> float:
    """Cycles of a resharding: received bytes at the rate of all IPU-Links of an IPU, and a sync a collective."""
    bytes_per_cycle = target.global_exchange_bytes_per_second / target.clock_hz
    cycles = 0.0
    for step, spec, _ in transitions(before, after, mesh):
        local_bytes = prod(local_shape(aval.shape, spec, mesh)) * itemsize(aval.dtype)
        if step.communicates:
            cycles += target.global_sync_cycles + received_blocks(step, mesh) * local_bytes / bytes_per_cycle
    return cycles


def received_blocks(step: Step, mesh: MeshAxes) -> float:
    """Received blocks, of the size before a step, of each device."""
    return _RECEIVED_BLOCKS[step.kind](mesh.size(step.axes)) if step.communicates else 0.0


def itemsize(dtype: Any) -> int:
    """Bytes of an element; a key of `jax.random` counts as its two words."""
    return int(getattr(dtype, "itemsize", 8))


# Received blocks of the size before the step, of `n` ranks (bandwidth-optimal algorithms).
_RECEIVED_BLOCKS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "all_to_all": lambda n: (n - 1) / n,
    "permute": lambda _: 1,
}


class Transition(NamedTuple):
    """A step of a resharding, with the specs of the value before and after it."""

    step: Step
    before: Spec
    after: Spec


def transitions(before: Spec, after: Spec, mesh: MeshAxes) -> Iterator[Transition]:
    """Yield the steps of a resharding in order: sums are taken, dimensions are split anew, unreduced sums begin.

    A sum over axes that both specs have unreduced is not taken.
    """
    spec = before
    for transition in _reduce_scatter_steps(spec, after, before.unreduced - after.unreduced):
        yield transition
        spec = transition.after
    pending = tuple(axis for axis in mesh.names if axis in spec.unreduced - after.unreduced)
    if pending:  # sums that no reduce-scatter has taken
        reduced = replace(spec, unreduced=spec.unreduced - set(pending))
        yield Transition(Step("all_reduce", pending), spec, reduced)
        spec = reduced
    for transition in _steps_to_amid_zeros(spec, after.unreduced - before.unreduced):
        yield transition
        spec = transition.after
    while spec.dims != after.dims:
        transition = _next_step(spec, after, mesh)
        yield transition
        spec = transition.after
    alone = tuple(axis for axis in mesh.names if axis in after.unreduced - spec.unreduced)
    if alone:
        yield Transition(Step("first_alone", alone), spec, after)


def _steps_to_amid_zeros(spec: Spec, added: frozenset[str]) -> Iterator[Transition]:
    """Steps of a resharding after which devices have partial sums over `added` axes, which split a dimension before.

    The partial sum of a device is its block at its place in that dimension, amid zeros.
    """
    for dim, axes in enumerate(spec.dims):
        # Only the last, minor axes: without a major one, the blocks that minor ones leave would not be contiguous.
        num_axes = len(axes)
        while num_axes and axes[num_axes - 1] in added:
            num_axes -= 1
        if num_axes < len(axes):
            following = _with_dim(replace(spec, unreduced=spec.unreduced | set(axes[num_axes:])), dim, axes[:num_axes])
            yield Transition(Step("amid_zeros", axes[num_axes:], dim), spec, following)
            spec = following


def _reduce_scatter_steps(spec: Spec, after: Spec, pending: frozenset[str]) -> Iterator[Transition]:
    """Steps of a resharding that add up partial sums over axes (unreduced ones) that `after` splits a dimension over.

    Each is a reduce-scatter, which leaves a device the sum of its block alone.

    Args:
        spec: spec before.
        after: spec after all steps.
        pending: axes over which the sum has to be taken.
    """
    for dim, axes in enumerate(after.dims):
        current = spec.dims[dim]
        # Axes of one dimension are scattered at once while they are the next of it.
        scattered = tuple(takewhile(pending.__contains__, axes[len(current) :]))
        if scattered and axes[: len(current)] == current:
            following = _with_dim(replace(spec, unreduced=spec.unreduced - set(scattered)), dim, current + scattered)
            yield Transition(Step("reduce_scatter", scattered, dim), spec, following)
            spec = following


def _next_step(spec: Spec, after: Spec, mesh: MeshAxes) -> Transition:
    """The next step between specs of different dimensions.

    Slices come first, as they make blocks smaller without communication.
    """
    permuted = _permute_step(spec, after, mesh)
    if permuted is not None:
        return Transition(permuted, spec, replace(spec, dims=after.dims))
    candidates = (_slice_step(spec, after), _all_to_all_step(spec, after), _gather_step(spec, after))
    return next(candidate for candidate in candidates if candidate is not None)


def _slice_step(spec: Spec, after: Spec) -> Transition | None:
    """The step of a resharding that splits a dimension further, by axes that split no other one; None if there is none.

    It needs no communication: each device takes a slice of its block.
    """
    for dim, (current, axes) in enumerate(zip(spec.dims, after.dims, strict=True)):
        if len(axes) > len(current) and axes[: len(current)] == current:
            free = tuple(takewhile(lambda axis: axis not in spec.axes, axes[len(current) :]))
            if free:
                return Transition(Step("slice", free, dim), spec, _with_dim(spec, dim, current + free))
    return None


def _all_to_all_step(spec: Spec, after: Spec) -> Transition | None:
    """The step of a resharding that moves an axis from one dimension to another, by an all-to-all; None without one.

    The axis is the last of the dimension that it leaves, and the next one that the other needs.
    """
    for split_dim, (current, axes) in enumerate(zip(spec.dims, after.dims, strict=True)):
        if len(axes) <= len(current) or axes[: len(current)] != current:
            continue  # nothing to add behind the axes that it has
        axis = axes[len(current)]
        for dim, axes_of_dim in enumerate(spec.dims):
            stays = after.dims[dim][: len(axes_of_dim)] == axes_of_dim
            if axes_of_dim and axes_of_dim[-1] == axis and not stays:
                following = _with_dim(_with_dim(spec, dim, axes_of_dim[:-1]), split_dim, (*current, axis))
                return Transition(Step("all_to_all", (axis,), dim, split_dim), spec, following)
    return None


def _gather_step(spec: Spec, after: Spec) -> Transition | None:
    """The step of a resharding that gathers a dimension over the axes that it must not keep; None without one.

    These are its axes from the first on that differs from those of `after`.
    """
    for dim, (current, axes) in enumerate(zip(spec.dims, after.dims, strict=True)):
        shorter = min(len(current), len(axes))
        num_common = next((n for n in range(shorter) if current[n] != axes[n]), shorter)
        if len(current) > num_common:
            gathered = _with_dim(spec, dim, current[:num_common])
            return Transition(Step("all_gather", current[num_common:], dim), spec, gathered)
    return None


def _with_dim(spec: Spec, dim: int, axes: Axes) -> Spec:
    return replace(spec, dims=(*spec.dims[:dim], axes, *spec.dims[dim + 1 :]))


def _permute_step(spec: Spec, after: Spec, mesh: MeshAxes) -> Step | None:
    """A permute, if blocks have the same shapes and are only on other devices; else None."""
    sizes = [mesh.size(axes) for axes in spec.dims]
    if sizes != [mesh.size(axes) for axes in after.dims]:
        return None
    used = {*spec.axes, *after.axes}
    axes = tuple(axis for axis in mesh.names if axis in used)
    holders = _ranks_of_blocks(spec, axes, mesh)
    readers = _ranks_of_blocks(after, axes, mesh)
    # As many devices hold a block as read it. One that does both keeps it.
    pairs: list[tuple[int, int]] = []
    for block, ranks in readers.items():
        resident = [rank for rank in ranks if rank in holders[block]]
        sources = [*resident, *(r for r in holders[block] if r not in resident)]
        destinations = [*resident, *(r for r in ranks if r not in resident)]
        pairs += list(zip(sources, destinations, strict=True))
    return Step("permute", axes, pairs=tuple(sorted(pairs)))


def _ranks_of_blocks(spec: Spec, axes: Axes, mesh: MeshAxes) -> Mapping[int, list[int]]:
    """Ranks along axes that have each block; blocks are numbered row-major over the dimensions."""
    coordinates = np.indices([mesh.size((axis,)) for axis in axes]).reshape(len(axes), -1)
    number = np.zeros(coordinates.shape[1], np.int64)
    for axis in spec.axes:
        number = number * mesh.size((axis,)) + coordinates[axes.index(axis)]
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, block in enumerate(number.tolist()):
        ranks[block].append(rank)
    return ranks


def index_along(axes: Axes, mesh: MeshAxes) -> jax.Array:
    """Rank of a device along axes, major to minor, int32."""
    first, *inner_axes = axes
    rank = lax.axis_index(first)
    for axis in inner_axes:
        rank = rank * mesh.size((axis,)) + lax.axis_index(axis)
    return rank


def of_numbers(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """The result of a collective that combines numbers: truths become 0 and 1."""
    return collective(x.astype(jnp.int32)) != 0 if x.dtype == jnp.bool_ else collective(x)


def _all_reduce(x: jax.Array, step: Step, mesh: MeshAxes) -> jax.Array:
    return of_numbers(lambda x: lax.psum(x, step.axes), x)


def _reduce_scatter(x: jax.Array, step: Step, mesh: MeshAxes) -> jax.Array:
    return of_numbers(lambda x: lax.psum_scatter(x, step.axes, scatter_dimension=step.dim, tiled=True), x)


def _all_gather(x: jax.Array, step: Step, mesh: MeshAxes) -> jax.Array:
    return lax.all_gather(x, step.axes, axis=step.dim, tiled=True)


def _all_to_all(x: jax.Array, step: Step, mesh: MeshAxes) -> jax.Array:
    return lax.all_to_all(x, step.axes, step.split_dim, step.dim, tiled=True)


def _permute(x: jax.Array, step: Step, mesh: MeshAxes) -> jax.Array:
    return lax.ppermute(x, step.axes, list(step.pairs))


def _sliced(x: jax.Array, step: Step, mesh: MeshAxes) -> jax.Array:
    size = x.shape[step.dim] // mesh.size(step.axes)
    starts = [index_along(step.axes, mesh) * size if d == step.dim else 0 for d in range(x.ndim)]
    sizes = [size if d == step.dim else n for d, n in enumerate(x.shape)]
    return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


def _amid_zeros(x: jax.Array, step: Step, mesh: MeshAxes) -> jax.Array:
    size = x.shape[step.dim]
    shape = [n * mesh.size(step.axes) if d == step.dim else n for d, n in enumerate(x.shape)]
    starts = [index_along(step.axes, mesh) * size if d == step.dim else 0 for d in range(x.ndim)]
    return lax.dynamic_update_slice(jnp.zeros(shape, x.dtype), x, starts, allow_negative_indices=False)


def _on_first_device_alone(x: jax.Array, step: Step, mesh: MeshAxes) -> jax.Array:
    return jnp.where(index_along(step.axes, mesh) == 0, x, jnp.zeros((), x.dtype))


_APPLY = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "slice": _sliced,
    "amid_zeros": _amid_zeros,
    "first_alone": _on_first_device_alone,
}


def values_that_may_stay_unreduced(jaxpr: Jaxpr, results: Mapping[Var, int]) -> dict[Var, int]:
    """Values of a jaxpr of which devices may keep partial sums: linear equations compute those of a result from them.

    Args:
        jaxpr: the jaxpr.
        results: values that may be returned unreduced, each with the number of partial sums that share one sum over
            devices. One with another reader may not stay, as that reader needs the sum.

    Returns:
        The values, each with the number of its result.
    """
    num_readers = Counter(atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, Var))
    num_readers.update(atom for atom in jaxpr.outvars if isinstance(atom, Var))
    may_stay = {var: number for var, number in results.items() if num_readers[var] == 1}
    # Backwards: operands of a linear equation may stay if its result may.
    for eqn in reversed(jaxpr.eqns):
        number = may_stay.get(eqn.outvars[0]) if _is_linear(eqn) else None
        if number is not None:
            single = (atom for atom in eqn.invars if isinstance(atom, Var) and num_readers[atom] == 1)
            may_stay.update(dict.fromkeys(single, number))
    return may_stay


def holds_partial_sums(dtype: Any) -> bool:
    """True if partial sums that are added up, or scaled, have the range of a dtype wherever their sum has it.

    Terms of a sum may be larger than the sum: those of float16 overflow, and vanish, where the sum does not.
    """
    return not jnp.issubdtype(dtype, jnp.inexact) or jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp


def _is_linear(eqn: JaxprEqn) -> bool:
    """True if an equation computes, from partial sums, those of its result."""
    record = record_of(eqn)
    computes = _is_scaling(eqn) or eqn.primitive.name in ADDITIONS
    if not (computes or record.keeps_sums):
        return False
    result: Any = eqn.outvars[0].aval
    return holds_partial_sums(result.dtype) or not (computes or record.is_reduction)


def _is_scaling(eqn: JaxprEqn) -> bool:
    """True for a product with a literal, or a quotient by one, of partial sums that adds up to that of the sum."""
    name = eqn.primitive.name
    factors = [atom for atom in eqn.invars if not isinstance(atom, Var)]
    if name not in ("mul", "div") or len(factors) != 1 or (name == "div" and eqn.invars[0] is factors[0]):
        return False
    aval: Any = eqn.outvars[0].aval
    if not jnp.issubdtype(aval.dtype, jnp.inexact):
        return name == "mul"  # a quotient of integers is rounded
    number = factors[0].val
    # Infinite terms of both signs add up to no number.
    return bool(np.isfinite(number)) and not (name == "div" and number == 0)


def unreduced_by_reshards(jaxpr: Jaxpr, specs: Mapping[Var, Spec], mesh: MeshAxes) -> dict[Var, int]:
    """Values that may stay unreduced because their one reader reshards them to an unreduced sum.

    A value with an explicit type has the spec of that instead.
    """
    operands = [
        eqn.invars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "reshard" and (spec := specs.get(eqn.outvars[0])) is not None and spec.unreduced
    ]
    untyped = {v: 1 for v in operands if isinstance(v, Var) and typed_spec(v.aval, mesh) is None}
    return values_that_may_stay_unreduced(jaxpr, untyped)
