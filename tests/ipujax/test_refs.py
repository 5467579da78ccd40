"""Refs, arrays that change (`jax.new_ref`): made inside, given, closed over, in all control flow, as in plain JAX."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu

X = jnp.arange(1.0, 5.0)
DEVICE = ipu.IPUModel(tiles_per_ipu=8)
TWO_IPUS = ipu.IPUModel(num_ipus=2, tiles_per_ipu=8)
TABLE = np.arange(4, dtype=np.float32)


def put(ref: Any, where: Any, value: Any) -> None:
    ref[where] = value


def check(run: Callable[[Any], Any]) -> None:
    """Asserts that results with `ipu.jit` are those with `jax.jit`."""
    expected = run(jax.jit)
    actual = run(lambda fun, **settings: ipu.jit(fun, device=DEVICE, **settings))
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for got, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert got.dtype == reference.dtype
        np.testing.assert_allclose(got, reference, rtol=1e-6, atol=1e-6)


# --- made inside ------------------------------------------------------------------------------------------------------


def single_elements(x: Any) -> Any:
    ref = jax.new_ref(x)
    ref[0] = 5.0
    ref[-1] += 2.0
    return ref[...], ref[-2]


def slices(x: Any) -> Any:
    ref = jax.new_ref(jnp.outer(x, x))
    ref[1, 1:3] = x[:2]
    ref[1:, 2] += 1.0
    old = jax.ref.swap(ref, (3, slice(None)), x * 0)
    return jax.freeze(ref), old


def index_arrays(x: Any) -> Any:
    ref = jax.new_ref(x)
    places = jnp.argsort(x)[:2]
    ref[places] = x[:2] * 7
    jax.ref.addupdate(ref, places, jnp.ones(2))
    return ref[places], ref[::2]


def views(x: Any) -> Any:
    ref = jax.new_ref(jnp.outer(x, x))
    return ref.at[1][2:4][...], ref.at[1:3][0, :2]


def in_scan(x: Any) -> Any:
    ref = jax.new_ref(x)
    sums = jax.new_ref(jnp.zeros(()))

    def body(carry: Any, n: Any) -> Any:
        ref[n] = ref[n] * 2 + carry
        jax.ref.addupdate(sums, ..., ref[0])
        return carry + ref[0], ref[1]

    return lax.scan(body, 0.0, jnp.arange(4)), ref[...], sums[...]


def made_in_scan(x: Any) -> Any:
    def body(carry: Any, v: Any) -> Any:
        ref = jax.new_ref(v * jnp.ones(3))
        ref[1] += carry
        return carry + ref[...].sum(), jax.freeze(ref)

    return lax.scan(body, 0.0, x)


def in_nested_scans(x: Any) -> Any:
    ref = jax.new_ref(x)

    def outer(carry: Any, n: Any) -> Any:
        def inner(c: Any, m: Any) -> Any:
            ref[m] += c + n
            return c + 1.0, None

        return lax.scan(inner, carry, jnp.arange(4))[0], ref[n]

    return lax.scan(outer, 0.0, jnp.arange(3)), ref[...]


def in_while(x: Any) -> Any:
    ref = jax.new_ref(x)
    last = lax.while_loop(lambda n: n < ref_free(x), lambda n: (put(ref, n, ref[n] + n), n + 1)[1], 0)
    return last, ref[...]


def ref_free(x: Any) -> Any:
    return x[2].astype(int)


def in_fori_loop(x: Any) -> Any:
    ref = jax.new_ref(x)
    end = lax.fori_loop(0, ref_free(x), lambda n, c: (put(ref, n, c), c + ref[n])[1], 1.0)
    return end, ref[...]


def condition_reads(x: Any) -> Any:
    ref = jax.new_ref(x)
    return lax.while_loop(lambda n: n < ref[2], lambda n: n + ref[0], 0.0)


def in_cond(x: Any) -> Any:
    ref = jax.new_ref(x)

    def change() -> Any:
        ref[0] = 9.0
        return ref[1]

    first = lax.cond(x[0] > 0, change, lambda: 0.0)
    return first, lax.cond(x[0] < 0, change, lambda: ref[0]), ref[...]


def in_switch(x: Any) -> Any:
    ref = jax.new_ref(x)
    branches = [lambda: put(ref, 0, 7.0), lambda: None, lambda: put(ref, slice(1, 3), ref[1:3] * 2)]
    lax.switch(ref_free(x) - 1, branches)
    return ref[...]


def in_nested_jit(x: Any) -> Any:
    ref = jax.new_ref(x)

    @jax.jit
    def add(ref: Any, y: Any) -> Any:
        ref[...] += y
        return ref[0]

    return add(ref, x), add(ref, x * 2), ref[...]


def with_constants(x: Any) -> Any:
    ref = jax.new_ref(x)
    table = jnp.arange(4.0) * 3
    scale = jax.jit(lambda v: v * TABLE + table)
    lax.while_loop(lambda n: n < 3, lambda n: (put(ref, ..., scale(ref[...])), n + 1)[1], 0)
    lax.scan(lambda c, n: (c, put(ref, n, (scale(ref[...]) + TABLE)[n])), 0, jnp.arange(2))
    return ref[...]


def vmapped(x: Any) -> Any:
    def one(v: Any) -> Any:
        ref = jax.new_ref(jnp.zeros(3))
        lax.scan(lambda c, n: (c + v, put(ref, n, c)), v, jnp.arange(3))
        return ref[...]

    return jax.vmap(one)(x)


def gradient(x: Any) -> Any:
    def loss(x: Any) -> Any:
        total = jax.new_ref(jnp.zeros(()))
        work = jax.new_ref(x)
        work[0] = x[1] ** 2

        def body(c: Any, v: Any) -> Any:
            total[...] += jnp.sin(v) * c
            return c * v, None

        return lax.scan(body, 1.0, work[...])[0] + total[...]

    return jax.value_and_grad(loss)(x), jax.jvp(loss, (x,), (x,))


def cotangent_put_out(x: Any) -> Any:
    @jax.custom_vjp
    def stash(ref: Any, x: Any) -> Any:
        return x

    stash.defvjp(lambda ref, x: (x, ref), lambda ref, g: (put(ref, ..., g), (None, g))[1])
    ref = jax.new_ref(jnp.zeros_like(x))
    return jax.grad(lambda x: (jnp.sin(stash(ref, x)) ** 2).sum())(x), ref[...]


def other_dtypes(x: Any) -> Any:
    key = jax.new_ref(jax.random.key(3))
    full = jax.new_ref(jnp.arange(4))
    flags = jax.new_ref(x > 2)
    halves = jax.new_ref(x.astype(jnp.bfloat16))

    def draw() -> Any:
        key[...], now = jax.random.split(key[...])
        return jax.random.normal(now, (3,))

    full[1] += 3
    flags[0] = True
    halves[0] += 1
    return draw(), draw(), full[...], flags[...], halves[...].astype(jnp.float32)


def unread(x: Any) -> Any:
    jax.new_ref(x)[0] = 5.0
    return x


INSIDE = (
    *(single_elements, slices, index_arrays, views, in_scan, made_in_scan, in_nested_scans, in_while, in_fori_loop),
    *(condition_reads, in_cond, in_switch, in_nested_jit, with_constants, vmapped, gradient, cotangent_put_out),
    *(other_dtypes, unread),
)


@pytest.mark.parametrize("fun", INSIDE, ids=lambda fun: fun.__name__)
def test_made_inside(fun: Callable[[Any], Any]) -> None:
    check(lambda jit: jit(fun)(X))


def test_nothing_is_moved_for_a_known_place() -> None:
    """JAX then folds the correction of an index below 0: the program has the sine alone."""

    def fun(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[0] = jnp.sin(ref[1])
        return ref[...]

    lowered = ipu.jit(fun, device=DEVICE).lower(X)
    assert len(lowered.graph.groups) == 1
    line = inspect.getsourcelines(fun)[1] + 2
    assert f"test_refs.py:{line} (fun)" in lowered.as_text()


def test_in_replicas_and_pipelines() -> None:
    def fun(x: Any) -> Any:
        ref = jax.new_ref(x)
        lax.scan(lambda c, n: (c, put(ref, n, lax.psum(ref[0], "replica") + n)), 0, jnp.arange(2))
        return ref[...]

    def loss(w: Any, x: Any) -> Any:
        with ipu.stage(0):
            hidden = jax.new_ref(x * w[0])
            hidden[0] += 1.0
        with ipu.stage(1):
            return jnp.sum(hidden[...] * w[1])

    settings: Any = {"replicas": 2, "in_specs": P("replica"), "out_specs": P("replica")}
    runs = [ipu.jit(fun, device=device, **settings)(jnp.arange(8.0)) for device in (TWO_IPUS, ipu.CPU())]
    np.testing.assert_array_equal(runs[0], runs[1])
    mesh = AbstractMesh((2,), ("replica",))
    sharded = jax.shard_map(fun, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"), check_vma=False)
    np.testing.assert_array_equal(ipu.jit(sharded, device=TWO_IPUS)(jnp.arange(8.0)), runs[1])
    step = ipu.pipeline(jax.value_and_grad(loss), micro_batches=2)
    inputs = X[:2], jnp.ones((4, 3))
    jitted = ipu.jit(step, device=TWO_IPUS)
    assert jitted.lower(*inputs).pipelines
    for got, reference in zip(jax.tree.leaves(jitted(*inputs)), jax.tree.leaves(jax.jit(step)(*inputs)), strict=True):
        np.testing.assert_allclose(got, reference, rtol=1e-6)


# --- from outside -----------------------------------------------------------------------------------------------------


def as_arguments(jit: Any) -> Any:
    state = {"w": jax.new_ref(X), "m": jax.new_ref(X * 0)}

    @jit
    def step(state: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: ((w * x) ** 2).sum())(state["w"][...])
        state["m"][...] = 0.9 * state["m"][...] + gradient
        state["w"][...] -= 0.01 * state["m"][...]
        return (state["w"][...] ** 2).sum()

    return [step(state, X) for _ in range(3)], state["w"][...], state["m"][...]


def closed_over(jit: Any) -> Any:
    ref = jax.new_ref(X)
    full = jax.new_ref(X.astype(int))
    table = jnp.ones(4)
    inputs = jax.new_ref(jnp.zeros(2))

    @jit
    def fun(x: Any, inputs: Any) -> Any:
        def body(carry: Any, n: Any) -> Any:
            ref[n] += carry
            full[n] = full[0] + 1
            inputs[0] += table[n]
            return carry + 1.0, None

        return lax.scan(body, x, jnp.arange(3))

    return fun(1.0, inputs), fun(2.0, inputs), ref[...], full[...], inputs[...]


def changed_between(jit: Any) -> Any:
    ref = jax.new_ref(X)
    fun = jit(lambda x: ref[...] + x)
    first = fun(1.0)
    ref[...] = ref[...] * 10
    return first, fun(1.0)


def in_inner_functions(jit: Any) -> Any:
    ref = jax.new_ref(X)
    inner = jit(lambda ref, x: put(ref, 0, x))

    @jit
    def fun(x: Any) -> Any:
        inner(ref, x)
        ref[...] = ref[...] + 1.0
        return jax.jit(lambda y: y + ref[0])(x)

    return fun(1.0), fun(2.0), ref[...]


def beside_other_settings(jit: Any) -> Any:
    ref = jax.new_ref(X)
    key = jax.new_ref(jax.random.key(1))

    def fun(ref: Any, n: int, x: Any, *, key: Any) -> Any:
        key[...], now = jax.random.split(key[...])
        ref[n] = x[0]
        return x * 2, jax.random.normal(now, (2,))

    jitted = jit(fun, static_argnums=1, donate_argnums=2)
    return jitted(ref, 1, X + 1, key=key), jitted(ref, 2, X + 2, key=key), ref[...]


def compiled_ahead(jit: Any) -> Any:
    ref = jax.new_ref(X)
    other = jax.new_ref(X)
    compiled = jit(lambda ref, x: (put(ref, 0, x), put(other, 1, x), ref[...])[2]).lower(ref, 3.0).compile()
    return compiled(ref, 3.0), compiled(ref, 4.0), ref[...], other[...]


def of_a_mesh_of_one_device(jit: Any) -> Any:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    given = jax.new_ref(x)
    closed_over = jax.new_ref(x)

    def fun(ref: Any) -> Any:
        ref[...] = ref[...] * 2
        closed_over[...] += ref[...]
        return ref[...] + 1

    result = jit(fun)(given)
    assert jax.typeof(result) == jax.typeof(given[...]) == jax.typeof(closed_over[...]) == jax.typeof(x)
    return result, given[...], closed_over[...]


def under_transformations(jit: Any) -> Any:
    ref = jax.new_ref(X)
    fun = jit(lambda ref, x: (put(ref, 0, x), ref[1])[1])

    def closes_over_a_traced_one(x: Any) -> Any:
        inside = jax.new_ref(x)
        return jit(lambda y: (put(inside, 0, y), inside[1])[1])(5.0), inside[...]

    by_rows = jax.vmap(jit(lambda x: single_elements(x)[0]))(jnp.stack([X, X * 2]))
    return jax.jit(lambda ref: fun(ref, 5.0))(ref), ref[...], jax.jit(closes_over_a_traced_one)(X), by_rows


OUTSIDE = (
    as_arguments,
    closed_over,
    changed_between,
    in_inner_functions,
    beside_other_settings,
    compiled_ahead,
    of_a_mesh_of_one_device,
)


@pytest.mark.parametrize("run", [*OUTSIDE, under_transformations], ids=lambda run: run.__name__)
def test_from_outside(run: Callable[[Any], Any]) -> None:
    check(run)


def test_a_ref_is_donated_state() -> None:
    """It stays on the device: a call moves neither it nor its new value from or to the host."""
    ref = jax.new_ref(jnp.ones(1000))
    state = jnp.ones(1000)
    changing = ipu.jit(lambda ref: put(ref, ..., ref[...] * 2), device=DEVICE).lower(ref).compile()
    donated = ipu.jit(lambda x: x * 2, device=DEVICE, donate_argnums=0).lower(state).compile()
    assert changing.profile.cycles == donated.profile.cycles
    _, profile = changing.profile_call(ref)
    assert profile.cycles == changing.profile.cycles and ref[0] == 2
    offloaded = ipu.jit(lambda ref: put(ref, ..., ref[...] * 2), device=DEVICE, offload_argnums=0)
    offloaded(ref)
    assert ref[0] == 4 and offloaded.lower(ref).graph.off_chip


def test_on_the_cpu() -> None:
    ref = jax.new_ref(X)
    ipu.jit(lambda ref: put(ref, 0, 7.0), device=ipu.CPU())(ref)
    assert ref[0] == 7


def test_compiled_for_another_ref() -> None:
    compiled = ipu.jit(lambda ref: ref[...], device=DEVICE).lower(jax.new_ref(X)).compile()
    for inputs in (X, jax.new_ref(X[:2])):
        with pytest.raises(ipu.ArgumentError, match=r"its argument ref(.|\n)*expected: Ref\{float32\[4\]\}"):
            compiled(inputs)


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_condition_that_would_never_change() -> None:
    def fun(x: Any) -> Any:
        ref = jax.new_ref(x)
        return lax.while_loop(lambda n: ref[0] < 3.5, lambda n: (put(ref, 0, ref[0] + 1), n + 1)[1], 0)

    line = inspect.getsourcelines(fun)[1] + 2
    with pytest.raises(ipu.GraphError, match=rf"condition of a loop reads a Ref(.|\n)*test_refs.py:{line} \(fun\)"):
        ipu.jit(fun, device=DEVICE)(X)


def test_refuses_refs_for_which_jax_has_no_rule() -> None:
    """A `custom_jvp` function that makes one: `jax.jit` raises a NotImplementedError."""

    @jax.custom_jvp
    def double_first(x: Any) -> Any:
        ref = jax.new_ref(x)
        ref[0] *= 2
        return ref[...]

    double_first.defjvp(lambda x, t: (double_first(*x), t[0]))

    def fun(x: Any) -> Any:
        return double_first(x)

    with pytest.raises(NotImplementedError, match="custom_jvp_call"):
        jax.jit(fun)(X)
    line = inspect.getsourcelines(fun)[1] + 1
    with pytest.raises(ipu.GraphError, match=rf"Ref that custom_jvp_call uses(.|\n)*test_refs.py:{line} \(fun\)"):
        ipu.jit(fun, device=DEVICE)(X)


def test_shared_by_replicas_or_micro_batches() -> None:
    ref = jax.new_ref(X)
    settings: Any = {"device": TWO_IPUS, "replicas": 2, "in_specs": P(), "out_specs": P()}
    pipelined = ipu.pipeline(lambda w, x: jnp.sum(w * x) + ref[0], micro_batches=2)
    inputs = ipu.pipeline(lambda w, x: jnp.sum(w[...] * x), micro_batches=2)
    for fun, args, text in (
        (ipu.jit(lambda ref: ref[0], **settings), (ref,), "of 2 replicas is given a Ref"),
        (ipu.jit(lambda x: x + ref[0], **settings), (X,), "of 2 replicas closes over a Ref"),
        (ipu.jit(pipelined, device=DEVICE), (X, jnp.ones((4, 1))), r"ipu.pipeline\(<lambda>\) closes over a Ref"),
        (ipu.jit(inputs, device=DEVICE), (ref, jnp.ones((4, 1))), r"ipu.pipeline\(<lambda>\) is given a Ref"),
    ):
        with pytest.raises(ipu.ArgumentError, match=rf"{text}(.|\n)*got: Ref(.|\n)*try: ref\[...\] as an argument"):
            fun(*args)


def test_mistakes_of_the_user_are_as_in_jax() -> None:
    ref = jax.new_ref(X)
    for fun, args in (
        (lambda x: jax.new_ref(x), (X,)),
        (lambda a, b: a[0] + b[0], (ref, ref)),
        (lambda a: a[0] + ref[0], (ref,)),
    ):
        texts = []
        for jit in (jax.jit, ipu.jit):
            with pytest.raises(ValueError) as caught:
                jit(fun)(*args)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


def test_beside_arrays_on_the_host() -> None:
    def fun(a: Any) -> Any:
        ref = jax.new_ref(a)
        return ref[...], jax.device_put(a * 2, jax.memory.Space.Host)

    with pytest.raises(ipu.GraphError, match=r"Refs has arguments or results on the host(.|\n)*device_put"):
        ipu.jit(fun, device=DEVICE)(X)
