"""Abstract values of results: shape, dtype, weakness and memory kind are those of `jax.jit`, whatever computes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import SingleDeviceSharding

import ipujax as ipu

DEVICE = ipu.IPUModel(tiles_per_ipu=8)
X = jnp.arange(1.0, 5.0)
HOST = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


doubled = jax.jit(lambda x: x * 2)


def weak() -> jax.Array:
    return doubled(3.0)


def weak_ref() -> Any:
    return jax.new_ref(weak())


def strong_ref() -> Any:
    return jax.new_ref(jnp.float32(1))


def described(value: Any) -> tuple[Any, ...]:
    aval: Any = jax.typeof(value)
    return aval.shape, aval.dtype, aval.weak_type, value.sharding.memory_kind


def put(ref: Any, value: Any) -> Any:
    ref[...] = value
    return ref[...], ref[...] + 1


def swapped(x: Any) -> Any:
    ref = jax.new_ref(x)
    return jax.ref.swap(ref, ..., x * 3), ref[...] * 2.0


def looped(x: Any) -> Any:
    ref = jax.new_ref(x)
    first = ref[...]
    count = lax.fori_loop(0, 3, lambda n, c: (put(ref, ref[...] + n), c)[1], first)
    return count, first, jax.freeze(ref)


def branched(x: Any) -> Any:
    ref = jax.new_ref(x)
    lax.cond(x > 0, lambda: put(ref, ref[...] * 2), lambda: (x, x))
    return ref[...], x


def called(x: Any) -> Any:
    ref = jax.new_ref(x)
    jax.jit(lambda ref: put(ref, 5.0))(ref)
    return ref[...], jnp.sin(ref[...])


CASES: dict[str, tuple[Callable[..., Any], tuple[Callable[[], Any], ...]]] = {
    "numbers": (lambda x: (x * 2, 2.0, 3, True, jnp.float16(1)), (lambda: 3.0,)),
    "arrays": (lambda x: (jnp.broadcast_to(x, (4,)), x + X, x.astype(jnp.bfloat16)), (weak,)),
    "loops": (lambda x: lax.scan(lambda c, _: (c * 2, c), x, None, length=3), (weak,)),
    "on the host": (lambda x, h: (h, jax.device_put(x, HOST)), (lambda: X, lambda: jax.device_put(X, HOST))),
    "a Ref read": (lambda ref: (ref[...], ref[...] * 2), (weak_ref,)),
    "a weak Ref written": (lambda ref: put(ref, jnp.float32(2)), (weak_ref,)),
    "a strong Ref written": (lambda ref: put(ref, 2.0), (strong_ref,)),
    "a Ref swapped": (lambda ref: (jax.ref.swap(ref, ..., jnp.float32(2)), ref[...]), (weak_ref,)),
    "a Ref added to": (lambda ref: (jax.ref.addupdate(ref, ..., jnp.float32(2)), ref[...])[1], (weak_ref,)),
    "a Ref inside": (lambda x: jax.freeze(jax.new_ref(x)), (weak,)),
    "a Ref inside, swapped": (swapped, (weak,)),
    "a Ref inside, in a loop": (looped, (weak,)),
    "a Ref inside, in a branch": (branched, (weak,)),
    "a Ref inside, in a function": (called, (weak,)),
}


def compiled(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: ipu.jit(fun, device=DEVICE).lower(*args).compile()(*args)


def profiled(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: ipu.jit(fun, device=DEVICE).lower(*args).compile().profile_call(*args)[0]


def with_a_callback(fun: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        jax.debug.callback(lambda x: None, jnp.float32(1))
        return fun(*args)

    return ipu.jit(run, device=DEVICE)


EXECUTORS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "function": lambda fun: ipu.jit(fun, device=DEVICE),
    "compiled function": compiled,
    "profiled": profiled,
    "exact splits": lambda fun: ipu.jit(fun, device=DEVICE, options=ipu.Options(exact_splits=True)),
    "callbacks": with_a_callback,
    "CPU": lambda fun: ipu.jit(fun, device=ipu.CPU()),
}


def avals(jit: Callable[..., Any], name: str) -> list[tuple[Any, ...]]:
    """Descriptions of the results of a case, then of the values of its Refs."""
    fun, makers = CASES[name]
    args = [make() for make in makers]
    results = jax.tree.leaves(jit(fun)(*args))
    return [described(x) for x in (*results, *(x[...] for x in args if isinstance(x, jax.Ref)))]


@functools.cache
def avals_of_jax(name: str) -> list[tuple[Any, ...]]:
    return avals(jax.jit, name)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", CASES)
def test_of_results(name: str, executor: str) -> None:
    assert avals(EXECUTORS[executor], name) == avals_of_jax(name)


@pytest.mark.parametrize("options", [ipu.Options(), ipu.Options(exact_splits=True)])
def test_of_a_ref_closed_over(options: ipu.Options) -> None:
    def run(jit: Callable[..., Any]) -> list[Any]:
        ref = weak_ref()
        results = jit(lambda x: put(ref, ref[...] * x))(weak())
        return [described(x) for x in (*results, ref[...])]

    assert run(lambda fun: ipu.jit(fun, device=DEVICE, options=options)) == run(jax.jit)


@pytest.mark.parametrize("name", [name for name, (_, makers) in CASES.items() if makers == (weak,)])
def test_of_replicas(name: str) -> None:
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=8)
    assert avals(lambda fun: ipu.jit(fun, device=device, replicas=2), name) == avals_of_jax(name)
