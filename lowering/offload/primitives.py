"""Equations that move values between tiles and streaming memory; plain JAX computes them as copies.

    x  = remote_load[in_groups] r        all of what lies in streaming memory
    x  = remote_rows r rows              some rows of it: `x[i] = r[rows[i]]`
    r2 = remote_store r x                all of it is replaced
    r  = remote_put[is_result] x         all of it, in a new buffer, of the host's if that is where it goes
    r2 = remote_update r rows x          some rows of it are: `r2[rows[i]] = x[i]`
    r  = remote_empty[shape dtype]       a new buffer, for what a branch stores
    r  = host_put x                      the user's: the pass `offload` makes it one of these; what a loop leaves
                                         by rows stays so

    b  = remote_fetch[in_groups] r       all of it comes to the I/O tiles; what follows does not wait for it
    x  = remote_take[in_groups] b        from there to the tiles that compute
    b  = remote_hand x                   from these to the I/O tiles, which store or put it later
    remote_wait b                        its memory is kept until it is stored

`r` and `r2` lie in streaming memory, in one buffer: r must not be read afterwards. `in_groups` says how tiles keep `x`,
see `passes.channel_groups`. Rows beyond the buffer read as zeros, and are lost when they are written.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipujax.lowering.jax_compat import make_primitive


def _load(remote: Any, *, in_groups: bool) -> list[Any]:
    return [remote]


def _loaded(remote: Any, *, in_groups: bool) -> list[Any]:
    return [jax.ShapeDtypeStruct(remote.shape, remote.dtype)]


def _rows(remote: Any, rows: Any) -> list[Any]:
    return [remote.at[_known(remote, rows)].get(mode="fill", fill_value=0)]


def _rows_shape(remote: Any, rows: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct((*rows.shape, *remote.shape[1:]), remote.dtype)]


def _store(remote: Any, value: Any) -> list[Any]:
    return [value]


def _stored(remote: Any, value: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(value.shape, value.dtype)]


def _update(remote: Any, rows: Any, values: Any) -> list[Any]:
    return [remote.at[_known(remote, rows)].set(values, mode="drop")]


def _updated(remote: Any, rows: Any, values: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(remote.shape, remote.dtype)]


def _known(remote: Any, rows: Any) -> Any:
    """The numbers of rows; what is negative is beyond the buffer, not counted from its end."""
    return jnp.where(rows < 0, remote.shape[0], rows)


def _put(value: Any, *, is_result: bool) -> list[Any]:
    return [value]


def _put_shape(value: Any, *, is_result: bool) -> list[Any]:
    return [jax.ShapeDtypeStruct(value.shape, value.dtype)]


def _empty(*, shape: tuple[int, ...], dtype: Any) -> list[Any]:
    return [jnp.zeros(shape, dtype)]


def _empty_shape(*, shape: tuple[int, ...], dtype: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(shape, dtype)]


def _moved(value: Any) -> list[Any]:
    return [value]


def _moved_shape(value: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(value.shape, value.dtype)]


def _nothing(value: Any) -> list[Any]:
    return []


remote_load_p = make_primitive("remote_load", _load, _loaded)
remote_rows_p = make_primitive("remote_rows", _rows, _rows_shape)
remote_store_p = make_primitive("remote_store", _store, _stored)
remote_update_p = make_primitive("remote_update", _update, _updated)
remote_put_p = make_primitive("remote_put", _put, _put_shape)
remote_empty_p = make_primitive("remote_empty", _empty, _empty_shape)
host_put_p = make_primitive("host_put", _moved, _moved_shape)
remote_fetch_p = make_primitive("remote_fetch", _load, _loaded)
remote_take_p = make_primitive("remote_take", _load, _loaded)
remote_hand_p = make_primitive("remote_hand", _moved, _moved_shape)
remote_wait_p = make_primitive("remote_wait", _nothing, _nothing)

MOVES = frozenset(
    (
        *(remote_load_p, remote_rows_p, remote_store_p, remote_update_p, remote_put_p, remote_empty_p, host_put_p),
        *(remote_fetch_p, remote_take_p, remote_hand_p, remote_wait_p),
    )
)
