"""Random numbers: those of JAX for any partition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lowering.helpers import check, lowered, small_target

KEY = jax.random.key(7)


def test_bits() -> None:
    check(lambda k: jax.random.bits(k, (9, 31)), KEY, tiles=(7,))
    check(lambda k: jax.random.bits(k, (6, 5), np.uint8), KEY, tiles=(4,))
    check(lambda k: jax.random.bits(k, ()), KEY, tiles=(4,))


def test_bits_of_many_keys() -> None:
    keys = jax.random.split(KEY, 5)
    check(jax.vmap(lambda k: jax.random.bits(k, (40,))), keys, tiles=(7,))


def test_draws() -> None:
    check(lambda k: jax.random.uniform(k, (50,)), KEY, tiles=(4,))
    check(lambda k: jax.random.bernoulli(k, 0.3, (50,)), KEY, tiles=(4,))


def test_normal() -> None:
    check(lambda k: jax.random.normal(k, (50,)), KEY, tiles=(4,), rtol=1e-5)


def test_keys_from_keys() -> None:
    check(lambda k: jax.random.split(k, 3), KEY, tiles=(4,))
    check(lambda k, n: jax.random.fold_in(k, n), KEY, np.uint32(5), tiles=(4,))
    keys = jax.random.split(KEY, 60)
    check(jax.vmap(jax.random.fold_in, (0, None)), keys, np.uint32(5), tiles=(7,))
    check(lambda k: jax.random.clone(k[::-1]), keys, tiles=(4,))


def test_conversions() -> None:
    check(jax.random.key, np.int32(3), tiles=(4,))
    check(jax.random.key_data, jax.random.split(KEY, 60), tiles=(7,))
    check(jax.random.wrap_key_data, np.arange(120, dtype=np.uint32).reshape(60, 2), tiles=(7,))


def test_old_style_keys() -> None:
    check(lambda k: jax.random.bits(k, (40,)), jax.random.PRNGKey(3), tiles=(7,))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_generators(impl: str) -> None:
    check(lambda k: jax.random.bits(k, (40,)), jax.random.key(1, impl=impl), tiles=(4,))


def test_numbers_common_to_several_keys_are_folded_in_once() -> None:
    """Of a number that is not mapped `unsafe_rbg` draws once; of one for each key it draws in another way."""
    keys = jax.random.split(jax.random.key(1, impl="unsafe_rbg"), 6)
    check(jax.vmap(jax.random.fold_in, (0, None)), keys, np.uint32(5), tiles=(4,))


def test_dropout_in_a_loop() -> None:
    def fun(k: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            carry, subkey = jax.random.split(carry)
            return carry, jax.random.bits(subkey, (6,))

        return jax.lax.scan(step, k, None, length=3)[1]

    check(fun, KEY, tiles=(4,))


def test_spreads_bits_over_tiles() -> None:
    program = lowered(lambda k: jax.random.bits(k, (64, 64)), (KEY,), small_target(16))
    (group,) = [g for groups in program.graph.groups.values() for g in groups if "Bits" in g.codelet.name]
    assert np.unique(group.tile).size == 16
    assert not program.graph.notes.fallbacks
    assert jnp.issubdtype(group.codelet.fields[0].dtype, jax.dtypes.prng_key)
