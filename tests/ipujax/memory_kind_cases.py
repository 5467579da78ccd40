"""Functions of arrays on the host, with the transfers of their programs to and from streaming memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P, SingleDeviceSharding

import ipujax as ipu

HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device
POLICIES = jax.checkpoint_policies
OFFLOADING = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["pre"], offload_src="device", offload_dst="pinned_host"
)
SAVING = POLICIES.save_only_these_names("pre")
SPLIT = P("replica")


def kind(name: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind=name)


def put(tree: Any) -> Any:
    return jax.device_put(tree, HOST)


def get(tree: Any) -> Any:
    return jax.device_put(tree, DEVICE)


def array(*shape: int, seed: int = 0) -> jax.Array:
    """Numbers that differ for each shape and seed."""
    return jax.device_put((np.random.default_rng([*shape, seed]).normal(size=shape) / 2).astype(np.float32))


def held(*shape: int, seed: int = 0) -> jax.Array:
    """A random array on the host."""
    return jax.device_put(array(*shape, seed=seed), kind("pinned_host"))


def on_host(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=kind("pinned_host"))


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def device(num_ipus: int = 1, **changes: Any) -> ipu.IPUModel:
    return ipu.IPUModel(num_ipus, arch="mk2", **{"tiles_per_ipu": 16, **changes})


def is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def copied(tree: Any) -> Any:
    """Copies of arrays in memory of their own: donated ones are gone after a call."""
    return jax.tree.map(lambda x: x if is_key(x) else jax.device_put(np.array(x), x.sharding), tree)


def kinds(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding.memory_kind, tree)


def assert_same(got: Any, expected: Any) -> None:
    """Asserts that results have the numbers, dtypes and memory kinds of others."""
    assert kinds(got) == kinds(expected)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        x, y = (jax.random.key_data(v) if is_key(v) else v for v in (x, y))
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-4, atol=1e-5)


def moves(lowered: Any) -> Counter[str]:
    """Number of transfers of each kind in the program."""
    return Counter(re.findall(r"= (remote_\w+|host_put)\b", lowered.as_text(after="offload")))


# --- functions --------------------------------------------------------------------------------------------------------


def adam(params: Any, state: Any, grads: Any) -> Any:
    """An update whose moments are fetched, used and put back."""
    moments = get(state["m"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, moments)
    return params, {"m": put(moments), "count": state["count"] + 1}


def layer(policy: Any) -> Callable[..., Any]:
    return jax.checkpoint(lambda w, x: jnp.sin(checkpoint_name(x @ w, "pre")), policy=policy)


def layers_loss(policy: Any) -> Callable[..., Any]:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = layer(policy)(w, x)
        return (x**2).mean()

    return loss


def loop_loss(policy: Any) -> Callable[..., Any]:
    return lambda ws, x: (lax.scan(lambda x, w: (layer(policy)(w, x), None), x, ws)[0] ** 2).mean()


def double(x: jax.Array) -> jax.Array:
    return put(get(x) * 2)


@dataclass(frozen=True)
class Case:
    """A function, and the transfers of its program to and from streaming memory.

    Args:
        fun: the function.
        args: makes its arguments.
        streams: bytes there; not checked when None.
        moves: the transfers in its program; not checked when None.
        settings: of `jax.jit` and `ipu.jit`.
    """

    fun: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    streams: int | None = None
    moves: Mapping[str, int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


FIRST = {"donate_argnums": 0}
BOTH = {"donate_argnums": (0, 1)}


def one() -> tuple[Any, ...]:
    return (held(4, 3),)


def two() -> tuple[Any, ...]:
    return held(4, 3), held(4, 3, seed=1)


def mixed() -> tuple[Any, ...]:
    return held(4, 3), array(4, 3)


def plain() -> tuple[Any, ...]:
    return (array(4, 3),)


def branched(choice: bool) -> Callable[[], tuple[Any, ...]]:
    return lambda: (held(4, 3), jnp.array(choice))


def state() -> tuple[Any, ...]:
    params = {"a": array(6, 8), "b": array(8, 4)}
    return params, {"m": put(jax.tree.map(jnp.zeros_like, params)), "count": put(jnp.int32(0))}, params


STRAIGHT = {
    "fetch": Case(lambda h, w: get(h) + w, mixed, 48, {"remote_load": 1}),
    "fetch by sharding": Case(lambda h, w: jax.device_put(h, kind("device")) + w, mixed, 48, {"remote_load": 1}),
    "times": Case(lambda h: h * 2, one, 96, {"remote_load": 1, "remote_put": 1}),
    "several operations": Case(lambda h: jnp.tanh(h * 2) + h, one, 96, {"remote_load": 1, "remote_put": 1}),
    "relu": Case(jax.nn.relu, one, 96),
    "sorted": Case(jnp.sort, one, 96),
    "product": Case(lambda h: h @ h.T, one),
    "sum": Case(lambda h: h.sum(), one, 48),
    "untouched": Case(lambda h: h, one, 48, {}),
    "untouched, twice": Case(lambda h: (h, h), one, 96),
    "untouched, fetched, used": Case(lambda h: (h, get(h), h * 1), one),
    "view": Case(lambda h: h.reshape(2, 6).T, one),
    "rows": Case(lambda h: (h[1:3], h[2], get(h[1])), one),
    "put": Case(lambda w: put(w * 2), plain, 48, {"remote_put": 1}),
    "put by sharding": Case(lambda w: jax.device_put(w, kind("pinned_host")), plain, 48),
    "put twice": Case(lambda w: (put(w), put(w), w), plain, 96, {"remote_put": 2}),
    "put and fetched": Case(lambda w: get(put(w * 2)) + w, plain, 48, {"remote_put": 1, "remote_load": 1}),
    "put, returned and fetched": Case(lambda w: (lambda y: (y, get(y) * 2))(put(w)), plain, 48),
    "constant": Case(lambda w: (put(jnp.ones((4, 3))), w), plain, 48),
    "one element": Case(lambda h: (h * 2, put(get(h) + 1)), lambda: (put(jnp.float32(2)),), 0, {}),
    "key": Case(lambda k: (jax.random.uniform(get(k), (3,)), k), lambda: (put(jax.random.key(1)),), 0),
    "no elements": Case(lambda x: (put(x), x), lambda: (jnp.zeros((0, 3)),), 0),
    "half": Case(double, lambda: (put(jnp.ones((4, 3), jnp.float16)),), 48),
    "cast": Case(lambda h: h.astype(jnp.bfloat16), one),
    "tree": Case(lambda t: jax.device_put(t, {"a": HOST, "b": DEVICE}), lambda: ({"a": array(4, 3), "b": held(3)},)),
    "table": Case(lambda h, i: get(h)[i], lambda: (held(40, 3), jnp.array([3, 5])), 480, {"remote_rows": 1}),
}
DONATED = {
    "replaced": Case(double, one, 48, {"remote_load": 1, "remote_store": 1}, FIRST),
    "swapped": Case(lambda x, y: (y, x), two, 96, None, BOTH),
    "crossed": Case(lambda x, y: (put(get(y) * 2), x), two, 96, None, BOTH),
    "beside the device": Case(lambda x, w: (w * 2, put(get(x) + w)), mixed, 48, None, BOTH),
    "in other memory": Case(lambda x, w: (get(x) * 2, put(w)), mixed, None, None, BOTH),
    "untouched": Case(lambda x, w: (x, get(x) + w), mixed, 48, {"remote_load": 1}, FIRST),
    "read behind": Case(lambda x: (lambda y: (y, get(y) * 3))(double(x)), one, 48, None, FIRST),
    "copied before": Case(
        lambda x, others: (lambda old, new: (new, [get(o) + 1 for o in others], get(old) * 2))(put(get(x)), double(x)),
        lambda: (held(4, 3), [held(4, 3, seed=n) for n in range(1, 7)]),
        7 * 48,
        None,
        FIRST,
    ),
    "copied before a loop": Case(
        lambda x, others: (lambda old, new: (new, [get(o) + 1 for o in others], get(old) * 2))(
            put(get(x)), lax.fori_loop(0, 2, lambda _, c: double(c), x)
        ),
        lambda: (held(4, 3), [held(4, 3, seed=n) for n in range(1, 7)]),
        None,
        None,
        FIRST,
    ),
    "optimiser": Case(adam, state, 320, {"remote_load": 2, "remote_store": 2}, BOTH),
    "optimiser, kept": Case(adam, state, 640, {"remote_load": 2, "remote_put": 2}),
    "rows": Case(
        lambda h, i, g: put(get(h).at[i].add(g)),
        lambda: (held(40, 3), jnp.array([3, 5]), array(2, 3)),
        480,
        {"remote_rows": 1, "remote_update": 1},
        FIRST,
    ),
}


def scanned(body: Callable[..., Any], length: int | None = None, **settings: Any) -> Callable[..., Any]:
    return lambda start, *rows: lax.scan(body, start, *(rows or (None,)), length=length, **settings)


LOOPS = {
    "rows read": Case(
        lambda h, x: lax.scan(lambda x, w: (jnp.tanh(x @ get(w)), None), x, h)[0],
        lambda: (held(3, 4, 4), array(2, 4)),
        192,
        {},
    ),
    "numbers read": Case(lambda h: scanned(lambda c, w: (c * get(w), None))(1.0, h)[0], lambda: (held(5),)),
    "rows left": Case(scanned(lambda x, _: (x * 2, put(x)), 3), plain, 144, {"host_put": 1}),
    "rows left in reverse": Case(scanned(lambda x, _: (x * 2, put(x)), 3, reverse=True), plain, 144),
    "no rows left": Case(scanned(lambda x, _: (x * 2, put(x)), 0), plain),
    "numbers left": Case(scanned(lambda x, _: (x * 2, put(x.sum())), 3), plain, 12, {"remote_put": 1}),
    "rows left and read": Case(
        lambda x: (lambda r: get(r[1]) + r[0])(scanned(lambda x, _: (x * 2, put(x)), 3)(x)), plain, 144
    ),
    "rows passed on": Case(lambda h: scanned(lambda c, x: (c + get(x).sum(), x))(0.0, h), one, 48),
    "mapped": Case(lambda h: lax.map(double, h), one, 96),
    "state": Case(scanned(lambda c, x: (put(get(c) + x), None)), lambda: (held(4, 3), array(3)), 96),
    "donated state": Case(
        scanned(lambda c, x: (put(get(c) + x), None)),
        lambda: (held(4, 3), array(3)),
        48,
        {"remote_load": 1, "remote_store": 1},
        FIRST,
    ),
    "state that is read outside": Case(
        lambda h, xs: (scanned(lambda c, x: (put(get(c) + x + get(h)), get(c).sum()))(h, xs), get(h)),
        lambda: (held(4, 3), array(3)),
        96,
        None,
        FIRST,
    ),
    "two states that change places": Case(
        lambda h, g: scanned(lambda c, _: ((c[1], put(get(c[0]) * 2)), None), 3)((h, g))[0], two, None, None, BOTH
    ),
    "state computed there": Case(scanned(lambda c, _: (c * 2, None), 3), one),
    "state put before": Case(lambda w: scanned(lambda c, _: (double(c), None), 3)(put(w + 1)), plain, 48),
    "state of a view": Case(lambda h: scanned(lambda c, _: (double(c), None), 3)(h.reshape(3, 4)), one),
    "state untouched": Case(
        lambda h, w: scanned(lambda c, _: ((c[0], c[1] + get(c[0])), None), 3)((h, w)), mixed, 48, {"remote_load": 1}
    ),
    "rows of a state": Case(
        scanned(lambda c, i: (put(get(c).at[i].add(1.0)), None)),
        lambda: (held(40, 3), jnp.array([[3], [5]])),
        480,
        {"remote_rows": 1, "remote_update": 1},
        FIRST,
    ),
    "rows of a constant": Case(
        lambda h, i: scanned(lambda c, i: (c + get(h)[i], None))(jnp.zeros(3), i),
        lambda: (held(40, 3), jnp.array([3, 5])),
        480,
        {"remote_rows": 1},
    ),
    "count": Case(lambda h: lax.fori_loop(0, 3, lambda i, c: put(get(c) + i), h), one, 48, None, FIRST),
    "while": Case(
        lambda h: lax.while_loop(lambda c: get(c).sum() < 100, lambda c: put(get(c) ** 2 + 1), h), one, 48, None, FIRST
    ),
    "while, of a constant": Case(
        lambda h, w: lax.while_loop(lambda c: (c * get(h)).sum() < 100, lambda c: c + get(h) ** 2, w), mixed, 48
    ),
    "while of a batch": Case(
        jax.vmap(lambda h: lax.while_loop(lambda c: get(c).sum() < 100, lambda c: put(get(c) ** 2 + 1), h)), one
    ),
}


def either(yes: Callable[..., Any], no: Callable[..., Any]) -> Callable[..., Any]:
    return lambda h, p: lax.cond(p, yes, no, h)


BRANCHES = {
    f"{name} {choice}": Case(fun, branched(choice), streams, None, settings)
    for choice in (True, False)
    for name, fun, streams, settings in (
        ("fetch", either(get, lambda h: jnp.zeros((4, 3))), 48, {}),
        ("leave", either(lambda h: h, lambda h: put(jnp.zeros((4, 3)))), 96, {}),
        ("replace", either(double, lambda h: h), 48, FIRST),
        ("use", lambda h, p: get(either(double, lambda h: h)(h, p)) + 1, 96, {}),
    )
} | {
    "two": Case(
        lambda h, g, p: lax.cond(p, lambda h, g: (put(get(h) + get(g)), double(h)), lambda h, g: (g, h), h, g),
        lambda: (*two(), jnp.array(False)),
        None,
        None,
        BOTH,
    ),
    "in a loop": Case(
        scanned(lambda c, p: (lax.cond(p, double, lambda c: c, c), None)),
        lambda: (held(4, 3), jnp.array([True, False, True])),
        48,
        {"remote_load": 1, "remote_store": 1},
        FIRST,
    ),
}
TRANSFORMED = {
    "vmap": Case(jax.vmap(lambda h, w: put(get(h) * 2 + w)), mixed, 96),
    "grad": Case(jax.grad(lambda h: (get(h) ** 2).sum()), one, 96),
    "grad of both": Case(
        jax.value_and_grad(lambda h, w: (jnp.tanh(w @ get(h)) ** 2).sum(), argnums=(0, 1)),
        lambda: (held(4, 3), array(2, 4)),
    ),
    "grad of a loop": Case(
        jax.grad(lambda h, x: (lax.scan(lambda x, w: (jnp.tanh(x @ get(w)), None), x, h)[0] ** 2).sum()),
        lambda: (held(3, 4, 4), array(2, 4)),
        384,
        {"host_put": 1},
    ),
    "remat": Case(
        jax.grad(jax.checkpoint(lambda h, w: (jnp.sin(w @ get(h)) ** 2).sum()), argnums=1),
        lambda: (held(4, 3), array(2, 4)),
    ),
    "policy": Case(
        jax.grad(layers_loss(OFFLOADING)),
        lambda: ([array(4, 4, seed=n) for n in range(3)], array(2, 4)),
        96,
        {"remote_put": 3, "remote_load": 3},
    ),
    "policy in a loop": Case(
        jax.grad(loop_loss(OFFLOADING)), lambda: (array(3, 4, 4), array(2, 4)), 96, {"host_put": 1}
    ),
    "policy under vmap": Case(
        jax.vmap(jax.grad(layers_loss(OFFLOADING)), (None, 0)),
        lambda: ([array(4, 4, seed=n) for n in range(3)], array(3, 2, 4)),
    ),
}
CASES = {
    f"{family}: {name}": case
    for family, cases in (
        ("straight", STRAIGHT),
        ("donated", DONATED),
        ("loop", LOOPS),
        ("branch", BRANCHES),
        ("transformed", TRANSFORMED),
    )
    for name, case in cases.items()
}
