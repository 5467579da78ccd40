"""Operations of random programs that change refs, and that send values to the host's memory and back.

Each takes rows of a buffer, more rows of the same shape and picks, and computes what plain arrays could: functions of
values, whose effects stay inside.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device
_POLICY = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["pre"], offload_src="device", offload_dst="pinned_host"
)


def ref_in_loop(rows: jax.Array, settings: jax.Array, picks: tuple[int, ...]) -> list[jax.Array]:
    """A loop that reads and writes rows of a ref, and sums them in another one."""
    ref = jax.new_ref(rows)
    total = jax.new_ref(jnp.zeros(rows.shape[1:], rows.dtype))
    distance = 1 + picks[1] % 3
    steps = min(len(rows), 5)

    def iteration(carry: jax.Array, n: Any) -> tuple[jax.Array, jax.Array]:
        ref[n] = jnp.tanh(ref[(n - distance) % len(rows)] + settings[n] * carry)
        if picks[2] % 2:
            jax.ref.addupdate(total, ..., ref[n] / 4)
        else:
            total[...] = total[...] / 2 + ref[n]
        return carry / 2 + 0.25, ref[n]

    _, trace = lax.scan(iteration, jnp.float32(1), jnp.arange(steps), reverse=bool(picks[3] % 2))
    return [jax.freeze(ref), total[...], trace]


def ref_moved(rows: jax.Array, settings: jax.Array, picks: tuple[int, ...]) -> list[jax.Array]:
    """Rows that are swapped, read at an array of places, written in a loop, and read by a function of its own."""
    first = picks[1] % len(rows)
    places = jnp.arange(picks[2] % 3 + 1) % len(rows)

    @jax.custom_vjp  # JAX does not differentiate every swap
    def moved(rows: jax.Array, settings: jax.Array) -> list[jax.Array]:
        ref = jax.new_ref(rows)
        old = jax.ref.swap(ref, first, settings[0])
        taken = ref[places]

        def iteration(n: Any, c: jax.Array) -> jax.Array:
            ref[n] = c
            return ref[-1]

        last = lax.fori_loop(0, picks[4] % min(3, len(rows)), iteration, old)
        return [ref[...], jax.jit(lambda x: ref[first] + x)(jnp.zeros_like(last)) if picks[3] % 2 else last, taken]

    moved.defvjp(lambda *operands: (moved(*operands), operands), lambda ops, _: jax.tree.map(jnp.zeros_like, ops))
    return moved(rows, settings)


def host_and_back(rows: jax.Array, settings: jax.Array, picks: tuple[int, ...]) -> list[jax.Array]:
    """Rows that are on the host: whole, in a loop that fetches each, or in a carry of one that stores what it makes."""
    # JAX refuses the cotangent of an array on the host for one on the device.
    rows, settings = lax.stop_gradient((rows, settings))
    there = jax.device_put(rows, HOST)
    match picks[1] % 4:
        case 0:
            return [jax.device_put(there, DEVICE), jax.device_put(jax.device_put(settings, HOST), DEVICE)]
        case 1:
            fetched = lax.scan(lambda c, row: (c, jax.device_put(row, DEVICE)), 0, there)[1]
            return [fetched]
        case 2:
            kept = lax.fori_loop(
                0, picks[2] % 3 + 1, lambda _, h: jax.device_put(-jax.device_put(h, DEVICE), HOST), there
            )
            return [jax.device_put(kept, DEVICE)]
    chosen = lax.cond(settings.ravel()[0] > 0, lambda: there, lambda: jax.device_put(settings, HOST))
    return [jax.device_put(chosen, DEVICE)]


def offloaded_residuals(rows: jax.Array, settings: jax.Array, picks: tuple[int, ...]) -> jax.Array:
    """A layer, or a loop of layers, whose gradient keeps values on the host."""

    @lambda fun: jax.checkpoint(fun, policy=_POLICY)
    def layer(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sin(checkpoint_name(x * y + x, "pre"))

    if picks[1] % 2:
        return layer(layer(rows, settings), settings)
    return lax.scan(lambda x, y: (layer(x, y), None), rows, jnp.stack([settings] * (1 + picks[2] % 3)))[0]
