"""Rules for random numbers: keys stay arrays of keys, and draws equal JAX's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ipujax.lowering.jax_compat import Primitive
from ipujax.lowering.poprand import per_key
from ipujax.lowering.rules.context import Context, Rule
from ipujax.lowering.rules.fallback import fallback
from ipujax.runtime.cache import remembered
from ipujax.runtime.tensor import Tensor


@remembered
def _bound(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """The primitive with its parameters, one function for equal ones."""
    given = dict(params)
    return lambda *blocks: primitive.bind(*blocks, **given)


def _draw(
    ctx: Context, operands: Sequence[Tensor], keys_rank: int, params: dict[str, Any], *, cut_results: bool
) -> Sequence[Tensor]:
    results = [(tuple(aval.shape), aval.dtype) for aval in ctx.out_avals]
    if not all(tensor.size for tensor in operands) or not all(aval.size for aval in ctx.out_avals):
        return fallback(ctx, *operands)
    fun, title = _bound(ctx.primitive, tuple(sorted(params.items()))), ctx.primitive.name.title().replace("_", "")
    return per_key(ctx.graph, fun, title, operands, keys_rank, results, ctx.prog, ctx.name, cut_results)


def draw_rule(ctx: Context, keys: Tensor, **params: Any) -> Sequence[Tensor]:
    """`random_bits` and `random_split`: a block of numbers or of keys from each key."""
    return _draw(ctx, [keys], keys.ndim, params, cut_results=True)


def same_shape_rule(ctx: Context, *operands: Tensor, **params: Any) -> Sequence[Tensor]:
    """`random_fold_in`, `random_seed`, `threefry2x32`: element by element, scalars and sizes of 1 repeated."""
    shape = ctx.out_avals[0].shape
    alike = [x.broadcast_in_dim(shape, tuple(range(len(shape) - x.ndim, len(shape)))) for x in operands]
    return _draw(ctx, alike, len(shape), params, cut_results=False)


def wrap_rule(ctx: Context, data: Tensor, **params: Any) -> Sequence[Tensor]:
    """Key data, words in the last dimension, as keys."""
    return _draw(ctx, [data], len(ctx.out_avals[0].shape), params, cut_results=False)


def unwrap_rule(ctx: Context, keys: Tensor, **params: Any) -> Sequence[Tensor]:
    """Keys as key data."""
    return _draw(ctx, [keys], keys.ndim, params, cut_results=False)


def gamma_rule(ctx: Context, keys: Tensor, alpha: Tensor, **params: Any) -> Sequence[Tensor]:
    """`random_gamma`: a block of numbers from each key, and a parameter for each number."""
    return _draw(ctx, [keys, alpha], keys.ndim, params, cut_results=True)


def rng_bit_generator_rule(ctx: Context, state: Tensor, **params: Any) -> Sequence[Tensor]:
    """The next state, which one tile computes, and bits, of which each tile computes those it keeps."""
    if not all(aval.size for aval in ctx.out_avals):
        return fallback(ctx, state)
    items, outs = tuple(sorted(params.items())), []
    for number, aval in enumerate(ctx.out_avals):
        fun, result = _one_result(ctx.primitive, items, number), [(tuple(aval.shape), aval.dtype)]
        cut = number == 1
        outs += per_key(ctx.graph, fun, "RngBitGenerator", [state], 0, result, ctx.prog, ctx.name, cut_results=cut)
    return outs


@remembered
def _one_result(primitive: Primitive, params: tuple[tuple[str, Any], ...], number: int) -> Callable[..., Any]:
    given = dict(params)
    return lambda state: primitive.bind(state, **given)[number]


def rng_uniform_rule(ctx: Context, low: Tensor, high: Tensor, **params: Any) -> Sequence[Tensor]:
    """`rng_uniform`: numbers of XLA's own generator, never the same twice, of which each tile draws its own."""
    return _draw(ctx, [low, high], 0, params, cut_results=True)


def clone_rule(ctx: Context, keys: Tensor) -> Tensor:
    """A key that may be used again is the same key."""
    del ctx
    return keys


RULES: dict[str, Rule] = {
    "random_bits": draw_rule,
    "random_split": draw_rule,
    "random_fold_in": same_shape_rule,
    "random_seed": same_shape_rule,
    "threefry2x32": same_shape_rule,
    "random_wrap": wrap_rule,
    "random_unwrap": unwrap_rule,
    "random_clone": clone_rule,
    "random_gamma": gamma_rule,
    "rng_uniform": rng_uniform_rule,
    "rng_bit_generator": rng_bit_generator_rule,
}
