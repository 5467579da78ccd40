"""Partition rules of equations that move elements: reshapes, transposes, broadcasts, slices, joins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.partition.factors import Factors
from ipujax.lowering.partition.resharding import index_along
from ipujax.lowering.partition.rules_base import (
    Blocks,
    Rule,
    aligned,
    bound,
    elementwise,
    except_dims,
    shapes,
    with_shape,
)


def _reshape(eqn: JaxprEqn) -> Factors:
    """Factors are the common refinement of both shapes; where there is none, a group's first factor alone."""
    (before,), (after,) = shapes(eqn.invars[:1]), shapes(eqn.outvars)
    labels: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])
    sizes: dict[int, int] = {}
    if 0 in before or eqn.params.get("dimensions") is not None:
        return Factors((((),) * len(before),), (((),) * len(after),), {})
    remaining = [list(before), list(after)]
    open_labels: list[list[int]] = [[], []]
    # Both shapes are consumed from the major end; each common divisor is a factor.
    while remaining[0] and remaining[1]:
        a, b = remaining[0][0], remaining[1][0]
        size = a if b % a == 0 else b if a % b == 0 else 0
        if not size:
            return _with_first_factor(labels, open_labels, sizes, remaining)
        number = len(sizes)
        sizes[number] = size
        for side in (0, 1):
            open_labels[side].append(number)
            remaining[side][0] //= size
            if remaining[side][0] == 1:
                labels[side].append(tuple(open_labels[side]))
                open_labels[side] = []
                remaining[side].pop(0)
        _skip_ones(remaining, open_labels, labels)
    for side in (0, 1):
        labels[side].extend(() for _ in remaining[side])
    return Factors((tuple(labels[0]),), (tuple(labels[1]),), sizes)


def _skip_ones(
    remaining: list[list[int]], open_labels: list[list[int]], labels: tuple[list[tuple[int, ...]], ...]
) -> None:
    """Closes dimensions of size 1 on either side, which no factor runs over."""
    for side in (0, 1):
        while remaining[side] and remaining[side][0] == 1 and not open_labels[side]:
            labels[side].append(())
            remaining[side].pop(0)


def _with_first_factor(
    labels: tuple[list[tuple[int, ...]], list[tuple[int, ...]]],
    open_labels: list[list[int]],
    sizes: dict[int, int],
    remaining: list[list[int]],
) -> Factors:
    """Dimensions from here on are whole, but for the factors they have already."""
    for side in (0, 1):
        labels[side].append(tuple(open_labels[side]))
        labels[side].extend(() for _ in remaining[side][1:])
    return Factors((tuple(labels[0]),), (tuple(labels[1]),), sizes)


def _transpose(eqn: JaxprEqn) -> Factors:
    order = eqn.params["permutation"]
    return aligned(eqn, [range(len(order))], [order])


def _broadcast(eqn: JaxprEqn) -> Factors:
    (operand, *_), (result,) = shapes(eqn.invars), shapes(eqn.outvars)
    places = eqn.params["broadcast_dimensions"]
    numbers = [d if n == result[d] else None for n, d in zip(operand, places, strict=True)]
    return aligned(eqn, [numbers], [range(len(result))])


def _squeeze(eqn: JaxprEqn) -> Factors:
    rank = len(shapes(eqn.invars)[0])
    dropped = {d % rank for d in eqn.params["dimensions"]}
    remaining = [d for d in range(rank) if d not in dropped]
    return aligned(eqn, [[None if d in dropped else d for d in range(rank)]], [remaining])


def _concatenate(eqn: JaxprEqn) -> Factors:
    return except_dims(eqn, (eqn.params["dimension"],))


def _split(eqn: JaxprEqn) -> Factors:
    return except_dims(eqn, (eqn.params["axis"],))


def _rev(eqn: JaxprEqn) -> Factors:
    return except_dims(eqn, eqn.params["dimensions"])


def _changed_dims(eqn: JaxprEqn) -> list[int]:
    (before, *_), (after,) = shapes(eqn.invars), shapes(eqn.outvars)
    return [d for d, (n, m) in enumerate(zip(before, after, strict=True)) if n != m]


def _slice(eqn: JaxprEqn) -> Factors:
    return except_dims(eqn, _changed_dims(eqn))


def _sliced(blocks: Blocks) -> list[Any]:
    (operand,) = blocks.operands
    params = blocks.eqn.params
    changed = _changed_dims(blocks.eqn)
    limits = [
        b if d in changed else n for d, (n, b) in enumerate(zip(operand.shape, params["limit_indices"], strict=True))
    ]
    return blocks.bind(limit_indices=tuple(limits))


def _pad(eqn: JaxprEqn) -> Factors:
    config = eqn.params["padding_config"]
    return except_dims(eqn, [d for d, amounts in enumerate(config) if tuple(amounts) != (0, 0, 0)])


def _dynamic_slice(eqn: JaxprEqn) -> Factors:
    rank = len(shapes(eqn.outvars)[0])
    changed = _changed_dims(eqn)
    numbers = [None if d in changed else d for d in range(rank)]
    return aligned(eqn, [numbers, *[()] * (len(eqn.invars) - 1)], [numbers])


def _dynamic_update_slice(eqn: JaxprEqn) -> Factors:
    operand, update, *_ = shapes(eqn.invars)
    numbers = [d if n == m else None for d, (n, m) in enumerate(zip(operand, update, strict=True))]
    return aligned(eqn, [numbers, numbers, *[()] * (len(eqn.invars) - 2)], [numbers])


def _with_full_starts(blocks: Blocks) -> list[Any]:
    """Starts of dimensions that are read whole become 0: JAX clips them to that, by the shape of a block too."""
    return blocks.bind(slice_sizes=blocks.result_shapes[0]) if "slice_sizes" in blocks.eqn.params else blocks.bind()


def _iota(eqn: JaxprEqn) -> Factors:
    return aligned(eqn, [()] * len(eqn.invars), [range(len(shapes(eqn.outvars)[0]))])


def _iota_block(blocks: Blocks) -> list[Any]:
    (shape,) = blocks.result_shapes
    dim = blocks.eqn.params["dimension"]
    (numbers,) = blocks.bind(shape=shape)
    axes = blocks.axes.get(dim, ())
    if not axes:
        return [numbers]
    first = (index_along(axes, blocks.mesh) * shape[dim]).astype(numbers.dtype)
    return [numbers + lax.broadcast(first, shape)]


def _each_alone(eqn: JaxprEqn) -> Factors:
    """Results that are their operands, each with factors of its own."""
    numbers: list[Sequence[int]] = []
    first = 0
    for shape in shapes(eqn.invars):
        numbers.append(range(first, first + len(shape)))
        first += len(shape)
    return aligned(eqn, numbers, numbers)


def _tile(eqn: JaxprEqn) -> Factors:
    return except_dims(eqn, _changed_dims(eqn))


def _bitcast(eqn: JaxprEqn) -> Factors:
    (before,), (after,) = shapes(eqn.invars), shapes(eqn.outvars)
    rank = min(len(before), len(after))
    # A dtype of another size adds or drops the last dimension.
    numbers = [[d if d < rank else None for d in range(len(shape))] for shape in (before, after)]
    return aligned(eqn, numbers[:1], numbers[1:])


def _random_rows(eqn: JaxprEqn) -> Factors:
    """Nothing is split: each device draws all numbers, and takes its own, without communication."""
    return aligned(eqn, *([[None] * len(s) for s in shapes(atoms)] for atoms in (eqn.invars, eqn.outvars)))


RULES: dict[str, Rule] = {
    "reshape": Rule(_reshape, with_shape("new_sizes")),
    "transpose": Rule(_transpose, bound),
    "broadcast_in_dim": Rule(_broadcast, with_shape("shape")),
    "squeeze": Rule(_squeeze, bound),
    "concatenate": Rule(_concatenate, bound),
    "split": Rule(_split, bound),
    "rev": Rule(_rev, bound),
    "slice": Rule(_slice, _sliced),
    "pad": Rule(_pad, bound),
    "dynamic_slice": Rule(_dynamic_slice, _with_full_starts),
    "dynamic_update_slice": Rule(_dynamic_update_slice, _with_full_starts),
    "iota": Rule(_iota, _iota_block),
    "optimization_barrier": Rule(_each_alone, bound),
    **{
        name: Rule(elementwise, lambda blocks: list(blocks.operands))
        for name in ("shard_alike", "layout_constraint", "xla_metadata_value")
    },
    # Over the replicas around the mesh.
    **{name: Rule(_each_alone, bound) for name in ("psum", "pmax", "pmin", "pvary", "pcast")},
    "bitcast_convert_type": Rule(_bitcast, bound),
    "tile": Rule(_tile, bound),
    **{
        name: Rule(_random_rows, bound)
        for name in (
            *("random_bits", "random_seed", "random_split", "random_fold_in", "random_wrap", "random_unwrap"),
            *("random_gamma", "random_clone", "rng_bit_generator", "rng_uniform"),
        )
    },
}
