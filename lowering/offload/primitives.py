"""Primitives that move values between tiles and streaming memory; plain JAX evaluates them as copies.

    x  = remote_load[in_groups] r        an entire value in streaming memory
    x  = remote_rows r rows              rows of it: `x[i] = r[rows[i]]`
    r2 = remote_store r x                replaces it entirely
    r  = remote_put[is_result] x         stores in a new buffer, of the host if it is a result
    r2 = remote_update r rows x          replaces rows of it: `r2[rows[i]] = x[i]`
    r  = remote_empty[shape dtype]       a new buffer, for stores in branches
    r  = host_put x                      a put by the user: the pass `offload` replaces it by one of the others, except
                                         for stacked results of a loop

    r  = host_send x                      a row that a loop stores in a buffer of the host, as a result of the program

    b  = remote_fetch[in_groups] r       brings it to the I/O tiles; later equations do not wait for it
    x  = remote_take[in_groups] b        from there to the tiles that compute
    b  = remote_hand x                   from these to the I/O tiles, which store or put it later
    remote_wait b                        its memory is live until it is stored

`r` and `r2` are in streaming memory, in one buffer: r must not be read afterwards. `in_groups` is the memory order of
`x` on tiles, see `passes.channel_groups`. Rows beyond the buffer read as zeros, and writes to them are dropped.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipujax.lowering.jax_compat import make_primitive


def _moved(value: Any, **params: Any) -> list[Any]:
    return [value]


def _shape_of_moved(value: Any, **params: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(value.shape, value.dtype)]


def _rows(remote: Any, rows: Any) -> list[Any]:
    return [remote.at[_without_negative(remote, rows)].get(mode="fill", fill_value=0)]


def _rows_shape(remote: Any, rows: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct((*rows.shape, *remote.shape[1:]), remote.dtype)]


def _store(remote: Any, value: Any) -> list[Any]:
    return [value]


def _update(remote: Any, rows: Any, values: Any) -> list[Any]:
    return [remote.at[_without_negative(remote, rows)].set(values, mode="drop")]


def _shape_of_buffer(remote: Any, *operands: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(remote.shape, remote.dtype)]


def _without_negative(remote: Any, rows: Any) -> Any:
    """Row numbers in which negative ones are beyond the buffer, not counted from its end."""
    return jnp.where(rows < 0, remote.shape[0], rows)


def _empty(*, shape: tuple[int, ...], dtype: Any) -> list[Any]:
    return [jnp.zeros(shape, dtype)]


def _empty_shape(*, shape: tuple[int, ...], dtype: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(shape, dtype)]


def _wait(value: Any) -> list[Any]:
    return []


remote_load_p = make_primitive("remote_load", _moved, _shape_of_moved)
remote_rows_p = make_primitive("remote_rows", _rows, _rows_shape)
remote_store_p = make_primitive("remote_store", _store, _shape_of_buffer)
remote_update_p = make_primitive("remote_update", _update, _shape_of_buffer)
remote_put_p = make_primitive("remote_put", _moved, _shape_of_moved)
remote_empty_p = make_primitive("remote_empty", _empty, _empty_shape)
host_put_p = make_primitive("host_put", _moved, _shape_of_moved)
host_send_p = make_primitive("host_send", _moved, _shape_of_moved)
remote_fetch_p = make_primitive("remote_fetch", _moved, _shape_of_moved)
remote_take_p = make_primitive("remote_take", _moved, _shape_of_moved)
remote_hand_p = make_primitive("remote_hand", _moved, _shape_of_moved)
remote_wait_p = make_primitive("remote_wait", _wait, _wait)

MOVES = frozenset(
    (
        *(remote_load_p, remote_rows_p, remote_store_p, remote_update_p, remote_put_p, remote_empty_p, host_put_p),
        *(remote_fetch_p, remote_take_p, remote_hand_p, remote_wait_p, host_send_p),
    )
)
