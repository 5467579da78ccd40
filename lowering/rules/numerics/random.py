"""Rules for random numbers: keys stay arrays of keys, and draws equal those of JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.custom_batching

from ipujax.lowering.jax_compat import Primitive
from ipujax.lowering.poprand import per_key
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.runtime.cache import remembered
from ipujax.runtime.tensor import Tensor, is_key_dtype


def _draw(
    ctx: Context, operands: Sequence[Tensor], keys_rank: int, params: dict[str, Any], *, cut_results: bool
) -> Sequence[Tensor]:
    """Lowers an equation that draws from keys, `per_key`; without elements its fallback."""
    results = [(tuple(aval.shape), aval.dtype) for aval in ctx.out_avals]
    if not all(tensor.size for tensor in operands) or not all(aval.size for aval in ctx.out_avals):
        return fallback(ctx, *operands)
    fun = _drawing_function(ctx.primitive, ctx.equation.ctx.threefry_partitionable, **params)
    title = ctx.primitive.name.title().replace("_", "")
    return per_key(ctx.builder, fun, title, operands, keys_rank, results, cut_results=cut_results)


@remembered
def _drawing_function(primitive: Primitive, is_partitionable: bool, /, **params: Any) -> Callable[..., Any]:
    """A primitive with parameters; equal ones give one function, which caches can compare."""
    return partial(_bind_drawing, primitive, is_partitionable, params)


def _bind_drawing(primitive: Primitive, is_partitionable: bool, params: dict[str, Any], *operands: jax.Array) -> Any:
    def draw(*operands: jax.Array) -> Any:
        with jax.threefry_partitionable(is_partitionable):  # as the user had it where the equation was traced
            return primitive.bind(*operands, **params)

    draws_by_key = all(jax.random.key_impl(x) == _BY_KEY for x in operands if is_key_dtype(x.dtype))
    return draw(*operands) if draws_by_key else _drawn_by_replica(draw)(*operands)


_BY_KEY = "threefry2x32"  # the generator whose numbers are the same in a batch of keys


def _drawn_by_replica(draw: Callable[..., Any]) -> Callable[..., Any]:
    """A draw that replicas make one after the other: in a batch, generators of XLA draw from the first key alone."""
    return jax.custom_batching.sequential_vmap(draw)


def draw_rule(ctx: Context, keys: Tensor, *parameters: Tensor, **params: Any) -> Sequence[Tensor]:
    """Numbers or keys from each key: `random_bits`, `random_split`, `random_gamma` with parameters for each number."""
    return _draw(ctx, [keys, *parameters], keys.ndim, params, cut_results=True)


def same_shape_rule(ctx: Context, *operands: Tensor, **params: Any) -> Sequence[Tensor]:
    """Element by element, with scalars and sizes of 1 for all: `random_fold_in`, `random_seed`, `threefry2x32`."""
    return _draw(ctx, operands, len(ctx.out_avals[0].shape), params, cut_results=False)


def convert_rule(ctx: Context, x: Tensor, **params: Any) -> Sequence[Tensor]:
    """Key data, with words in the last dimension, as keys, and back."""
    return _draw(ctx, [x], min(x.ndim, ctx.out_avals[0].ndim), params, cut_results=False)


def rng_bit_generator_rule(ctx: Context, state: Tensor, **params: Any) -> Sequence[Tensor]:
    """The next state, computed by one tile, and bits, computed by each tile for its own block.

    A tile computes all bits of the stream and slices its block out, so that they are the same however bits are cut.

    Args:
        ctx: the equation.
        state: state of the generator, uint32[4] or uint64[2].
        params: parameters of `lax.rng_bit_generator`.
    """
    if not all(aval.size for aval in ctx.out_avals):
        return fallback(ctx, state)
    next_state, bits = ctx.out_avals
    outs = []
    # Compute sets of their own, as the state is not cut.
    for number, (aval, is_cut) in enumerate([(next_state, False), (bits, True)]):
        fun = _function_of_result(ctx.primitive, number, **params)
        result = [(tuple(aval.shape), aval.dtype)]
        # The state is no array of keys, but an operand of a single draw: an array of keys of rank 0.
        outs += per_key(ctx.builder, fun, "RngBitGenerator", [state], 0, result, cut_results=is_cut)
    return outs


@remembered
def _function_of_result(primitive: Primitive, number: int, /, **params: Any) -> Callable[..., Any]:
    """Function from a state to result `number` of a primitive; equal ones give one function."""
    return lambda state: _drawn_by_replica(lambda state: primitive.bind(state, **params)[number])(state)


def rng_uniform_rule(ctx: Context, low: Tensor, high: Tensor, **params: Any) -> Sequence[Tensor]:
    """Numbers of XLA's own generator, different in each run; each tile draws its own."""
    return _draw(ctx, [low, high], 0, params, cut_results=True)


def clone_rule(ctx: Context, keys: Tensor) -> Tensor:
    """The key itself: a clone only allows its reuse."""
    return keys


RULES: dict[str, Rule] = {
    "random_bits": draw_rule,
    "random_split": draw_rule,
    "random_fold_in": same_shape_rule,
    "random_seed": same_shape_rule,
    "threefry2x32": same_shape_rule,
    "random_wrap": convert_rule,
    "random_unwrap": convert_rule,
    "random_clone": clone_rule,
    "random_gamma": draw_rule,
    "rng_uniform": rng_uniform_rule,
    "rng_bit_generator": rng_bit_generator_rule,
}
